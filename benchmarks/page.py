"""What three open pages cost a run: tokens per second with them over tokens per second without, within one run.

    python -m benchmarks.page --json PATH

The demo's run goes on with a learning rate of nearly nothing, so that its episodes stay alike; a Chromium beside it opens three
pages (the machine, the curves, the episodes), closes them, and so on, `STEPS` training steps each time. `training_share_3_pages`:
the median over neighbouring windows. The browser works on the machine of the run here, which a reader's does not:
`page_processor_share`, the processors' time of the page's own process, is what remains of the cost then. All three pages are seen
at once, as in windows side by side (a tab in the background asks for nothing), and the browser draws by the processor
(`--disable-gpu`): the dearest case. The browser is no child of what is measured. `scripts/page_picture.py` uses the same browser.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from benchmarks.harness import ROOT, RunFailed, parser_of, play
from learner.reporting.run_record import LineFile

PROGRAMS = ["chromium", "chromium-browser", "google-chrome"]
ARGUMENTS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
PATIENCE_MS = 120_000
VIEWS = ("machine", "curves", "episodes")
STEPS = 10
"""Training steps of a window."""
OPENING = 3
"""Steps before each window that are left out: three pages are opened in them, which takes a browser some processor seconds."""
PAIRS = 5
SETTLE = 3
"""Steps before the first window: the stock of episodes that were made before training is used up in them."""
PATIENCE_S = 900.0


@contextmanager
def chromium() -> Iterator[Browser | None]:
    """A browser; None where there is none."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        print(f"left out: what needs one of {', '.join(PROGRAMS)}: apt-get install chromium", flush=True)
        yield None
        return
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=ARGUMENTS, timeout=PATIENCE_MS)
        yield browser
        browser.close()


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
    until, file = time.monotonic() + PATIENCE_S, LineFile(path)
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RuntimeError(f"the run must go on, but ended: {(path.parent.parent / 'run.log').read_text()[-2000:]}")
        for step in file.poll().lines:
            if step["step"] > SETTLE:
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
    """The figures; `root`: the address of the run's page, which the context may see."""
    ratios, processor, pages = [], [], list[Page]()
    for pair in range(PAIRS):
        rates: dict[str, float] = {}
        for order in ("close", "open") if pair % 2 == 0 else ("open", "close"):
            for page in pages:
                page.close()
            pages = _views(context, root=root) if order == "open" else []
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


def _admitted(browser: Browser, *, link: str) -> BrowserContext:
    """A window that the one-time link let in."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.goto(link, wait_until="commit")
    page.close()
    return context


def _views(context: BrowserContext, *, root: str) -> list[Page]:
    """A page of each view of the run."""
    pages = []
    for view in VIEWS:
        pages.append(context.new_page())
        pages[-1].goto(f"{root}/#/{view}?run=run", wait_until="commit")
    for page in pages:
        page.wait_for_selector("main h1")
    return pages


def measure(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, float]]:
    with chromium() as browser:
        if browser is None:
            raise RunFailed("a browser must be there, got none; see above")
        with _run(folder) as steps:
            link = _link(folder / "run.log")
            yield _windows(steps, _admitted(browser, link=link), root=link.partition("/open")[0])


def main(words: list[str] | None = None) -> int:
    return play("page", parser_of("page", doc=__doc__).parse_args(words), measure)


if __name__ == "__main__":
    sys.exit(main())
