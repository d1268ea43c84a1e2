"""What every benchmark says of itself and of the machine: a first line, and a JSON file at the end.

Used by the benchmarks' `main`. Invariant: a file's keys are the benchmark's name, its settings, the machine's cores and
load before and after, its figures, and the time that all of it took. Figures and tables are the benchmark's own.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Report:
    """Begins with the benchmark: prints the machine's cores and load, and `about` after them."""

    def __init__(self, benchmark: str, *, about: str = "") -> None:
        self._benchmark = benchmark
        self._began = time.monotonic()
        self._load = os.getloadavg()
        print(f"{os.cpu_count()} cores, load {self._load[0]:.1f} at the start" + (about and f"; {about}"), flush=True)

    def write(self, path: Path | None, *, settings: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
        """Writes the file; without a path nothing."""
        report = {
            "benchmark": self._benchmark,
            "settings": dict(settings),
            "machine": {
                "cores": os.cpu_count(),
                "load_before": self._load,
                "load_after": os.getloadavg(),
                "date": time.strftime("%Y-%m-%d"),
            },
            **figures,
            "wall_s": time.monotonic() - self._began,
        }
        if path is not None:
            path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def parser_of(benchmark: str, *, doc: str | None) -> argparse.ArgumentParser:
    """A parser that is called as the module, says the first line of its docstring, and has `--json`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{benchmark}", description=(doc or "").strip().split("\n")[0]
    )
    parser.add_argument("--json", type=Path, default=None, metavar="PATH", help="write all figures there")
    return parser


def end_on_sigterm() -> None:
    """SIGTERM ends a benchmark as Ctrl-C does: what it started is ended, its folder removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
