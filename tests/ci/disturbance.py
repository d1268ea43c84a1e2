"""What a busy machine does to tests, on purpose: other work, and processes that stand still for a moment.

`disturbed(load=..., stops=...)` is for `tests.ci`. Any process below this one, its tests', their engines', runs', agents', may be
stopped (SIGSTOP) for 0.2 to 2.5 s. One that is stopped already belongs to a test that stops it, and is left alone.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MEAN_S = 1.5
"""Between two stops."""
SHORTEST_S, LONGEST_S = 0.2, 2.5
LOOK_S = 0.25


@contextmanager
def disturbed(*, load: int = 0, stops: bool = False) -> Iterator[None]:
    """`load`: busy processes beside the tests."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(load)]
    stopper = Stopper(but={process.pid for process in busy})
    if stops:
        stopper.start()
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()
        if stops:
            print(f"ci: {stopper.end()} times a process was stopped for a moment", flush=True)


class Stopper(threading.Thread):
    """Stops processes below this one until `end`. `but`: process ids that it leaves alone."""

    def __init__(self, *, but: set[int], mean_s: float = MEAN_S) -> None:
        super().__init__(name="stopper", daemon=True)
        self._but = but
        self._mean_s = mean_s
        self._seen: dict[int, int] = {}
        """Process id -> when it was started, in clock ticks: of all below, those whose parents have ended, too."""
        self._ended = threading.Event()
        self._stopped = 0

    def run(self) -> None:
        chance = random.Random()
        stopped: dict[int, float] = {}
        """Handle of a stopped process -> when it goes on."""
        next_s = time.monotonic() + self._mean_s
        while not self._ended.wait(min(LOOK_S, max(0.01, next_s - time.monotonic()))):
            running = self._look()
            if time.monotonic() >= next_s:
                next_s = time.monotonic() + chance.expovariate(1.0 / self._mean_s)
                if running and (handle := _stop(chance.choice(running))) is not None:
                    stopped[handle] = time.monotonic() + chance.uniform(SHORTEST_S, LONGEST_S)
                    self._stopped += 1
            for handle in [handle for handle, until in stopped.items() if time.monotonic() >= until]:
                del stopped[handle]
                _go_on(handle)
        for handle in stopped:
            _go_on(handle)

    def end(self) -> int:
        """How often it stopped one; all go on."""
        self._ended.set()
        self.join()
        return self._stopped

    def _look(self) -> list[int]:
        """Those below that are not stopped."""
        there: dict[int, tuple[str, int, int]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    state, parent, *rest = (entry / "stat").read_text().rpartition(")")[2].split()[:20]
                    there[int(entry.name)] = (state, int(parent), int(rest[-1]))
        ours = {pid for pid, started in self._seen.items() if pid in there and there[pid][2] == started} | {os.getpid()}
        while more := {pid for pid, (_, parent, _) in there.items() if parent in ours} - ours:
            ours |= more
        ours -= self._but | {os.getpid()}
        self._seen = {pid: there[pid][2] for pid in ours}
        return [pid for pid in ours if there[pid][0] not in "TtZX"]


def _stop(pid: int) -> int | None:
    """A handle of the process that was stopped."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    try:
        signal.pidfd_send_signal(handle, signal.SIGSTOP)
        return handle
    except (ProcessLookupError, PermissionError):
        os.close(handle)
        return None


def _go_on(handle: int) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, signal.SIGCONT)
    os.close(handle)
