"""What a process did while one of its event loops stood still: written into the report of a test that fails meanwhile."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOOK_S, LONG_S = 0.5, 2.0
found: list[tuple[float, str]] = []
"""(when, what was seen)."""


@contextmanager
def watched(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Looks twice a second whether the loop turns, from a thread of its own: one that is late itself says that the whole process
    stood still, or that something kept Python's lock."""
    over, turned = threading.Event(), [time.monotonic()]

    def watch() -> None:
        began, before, is_told = time.monotonic(), _figures(), False
        while not over.wait(LOOK_S):
            loop.call_soon_threadsafe(lambda: turned.__setitem__(0, time.monotonic()))
            now, figures = time.monotonic(), _figures()
            if now - began > LONG_S:
                found.append((now, f"the process stood still for {now - began:.1f} s: {before} -> {figures}"))
            elif now - turned[0] > LONG_S and not is_told:
                stacks = "\n".join(
                    "".join(traceback.format_stack(frame)[-12:]) for frame in sys._current_frames().values()
                )
                found.append((now, f"the loop stands still for {now - turned[0]:.1f} s: {figures}\n{stacks}"))
            is_told = now - turned[0] > LONG_S
            began, before = now, figures

    thread = threading.Thread(target=watch, name="watch a loop", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _figures() -> str:
    """Nanoseconds on a processor and waiting for one, major faults, and what processes wait for."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    pressure = [path.read_text().split("\n")[0] for path in sorted(Path("/proc/pressure").glob("*"))]
    return f"{Path('/proc/self/schedstat').read_text().split()} major faults {fields[9]}; {pressure}"
