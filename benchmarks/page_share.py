"""What three open pages cost a run: tokens per second with them over tokens per second without, within one run.

Called by `benchmarks.page`. The demo's run goes on with a learning rate of nearly nothing, so that its episodes stay alike;
a browser beside it opens three pages (the machine, the curves, the episodes), closes them, and so on, `STEPS` training steps
each time. `training_share_3_pages`: the median over neighbouring windows. The browser works on the machine of the run here,
which a reader's does not: `page_processor_share`, the processors' time of the page's own process, is what
remains of the cost then. All three pages are seen at once, as in windows side by side (a tab in the background asks for
nothing), and the browser draws by the processor (`--disable-gpu`): the dearest case.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import Browser, BrowserContext, Page

from benchmarks.harness import ROOT
from benchmarks.page_browser import admitted, views

PAGES = 3
STEPS = 10
"""Training steps of a window."""
OPENING = 3
"""Steps before each window that are left out: three pages are opened in them, which takes a browser some processor seconds."""
PAIRS = 5
SETTLE = 3
"""Steps before the first window: the stock of episodes that were made before training is used up in them."""
PATIENCE_S = 900.0


def share(browser: Browser) -> dict[str, float]:
    """The figures."""
    with tempfile.TemporaryDirectory(prefix="understudy-page-share-") as place, _run(Path(place)) as steps:
        link = _link(Path(place) / "run.log")
        return _windows(steps, admitted(browser, link=link), root=link.partition("/open")[0])


@contextmanager
def _run(folder: Path) -> Iterator[Iterator[dict[str, Any]]]:
    """A run, and its steps as they come."""
    settings = [f"run.dir={folder}", "run.name=run", "run.steps=100000", "learner.lr=1.0e-9"]
    with (folder / "run.log").open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "learner.run", "--keep-running", *settings], cwd=ROOT, stdout=sink,
            stderr=subprocess.STDOUT, env={"OMP_NUM_THREADS": "1", **os.environ},
        )  # fmt: skip
    try:
        yield _steps(folder / "run" / "metrics.jsonl", process)
    finally:
        process.terminate()
        process.wait()


def _steps(path: Path, process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    until, seen = time.monotonic() + PATIENCE_S, 0
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RuntimeError(f"the run must go on, but ended: {(path.parent.parent / 'run.log').read_text()[-2000:]}")
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        for line in lines[seen:]:
            if line.endswith("\n"):
                seen += 1
                if (step := json.loads(line))["step"] > SETTLE:
                    until = time.monotonic() + PATIENCE_S
                    yield step
        time.sleep(0.1)
    raise TimeoutError(f"a run must make a step within {PATIENCE_S:.0f} s")


def _link(log: Path) -> str:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        for word in log.read_text(errors="replace").split() if log.exists() else ():
            if "/open/" in word:
                return word
        time.sleep(0.5)
    raise TimeoutError(f"{log} must name the page's address within {PATIENCE_S:.0f} s")


def _windows(steps: Iterator[dict[str, Any]], context: BrowserContext, *, root: str) -> dict[str, float]:
    ratios, processor, pages = [], [], list[Page]()
    for pair in range(PAIRS):
        rates: dict[str, float] = {}
        for order in ("close", "open") if pair % 2 == 0 else ("open", "close"):
            for page in pages:
                page.close()
            pages = views(context, root=root, run="run", number=PAGES) if order == "open" else []
            for _ in range(OPENING):
                next(steps)
            before, began = _page_s(), time.monotonic()
            window = [next(steps) for _ in range(STEPS)]
            if order == "open":
                processor.append((_page_s() - before) / (time.monotonic() - began) / (os.cpu_count() or 1))
            tokens = sum(step["throughput/tokens_per_s"] * step["time/step_s"] for step in window)
            rates[order] = tokens / sum(step["time/step_s"] for step in window)
        ratios.append(rates["open"] / rates["close"])
        print(f"pages open over closed: {ratios[-1]:.3f}", file=sys.stderr, flush=True)
    return {
        "training_share_3_pages": round(statistics.median(ratios), 4),
        "training_share_lowest": round(min(ratios), 4),
        "training_share_highest": round(max(ratios), 4),
        "page_processor_share": round(statistics.median(processor), 4),
    }


def _page_s() -> float:
    """Processor time of the run's page process, in seconds."""
    for process in psutil.Process().children(recursive=True):
        try:
            if "learner.page" in process.cmdline():
                times = process.cpu_times()
                return times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return 0.0
