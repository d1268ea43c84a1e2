"""The end of a run at once, by a second Ctrl-C or SIGTERM, or one while it has nothing to save: of all that it has started, of its
temporary files, and of itself.

Called by `learner.run`, `learner.evaluate` and `learner.session`; `end_children` also by `learner.recovery.supervisor`. The process
becomes another program, this file: its threads end in one moment, so that none of them sees its engines and its Ray die, and
answers that. Invariant: when it has ended, no process below it lives, and what `configs.child_processes` knows is
removed. It saves nothing. Linux only; elsewhere signals keep their default effect.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TextIO

SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOPPED = 130
"""The exit code after Ctrl-C."""
PR_SET_CHILD_SUBREAPER = 36
TRACKERS_S = 3.0
"""Seconds for what removes semaphores and shared memory of multiprocessing, once their users have ended."""
SHOW_CURSOR = "\x1b[?25h"


@contextmanager
def signals_end_at_once(text: Callable[[], str], *, terminal: TextIO | None = None) -> Iterator[None]:
    """While inside, SIGINT, SIGTERM, and the end of the terminal unless that is ignored (nohup), end this process at once, with the
    exit code 130. `text` is printed then, on `terminal` or the standard error. Called by the main thread."""
    owner = os.getpid()

    def end(number: int, _: FrameType | None) -> None:
        if os.getpid() != owner:  # a fork, which took this over
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        end_at_once(text(), terminal=terminal)

    before = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGHUP)}
    if before[signal.SIGHUP] == signal.SIG_IGN:
        del before[signal.SIGHUP]
    if sys.platform == "linux":
        for number in before:
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_at_once(text: str, *, terminal: TextIO | None) -> None:
    """End, as this module says."""
    from configs.child_processes import to_remove

    become_subreaper()
    if terminal is not None:
        os.dup2(terminal.fileno(), 2)
    order = json.dumps({"text": text, "folders": [str(folder) for folder in to_remove()]})
    os.execv(sys.executable, [sys.executable, "-IS", os.path.abspath(__file__), order])


def become_subreaper() -> None:
    """What loses its parent, however deep below this process, becomes a child of it."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def prctl(option: int, value: int) -> None:
    """Linux' prctl(2); raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def end_children(kept: set[int]) -> None:
    """End all processes below this one, which is their subreaper and has one thread, but for those in `kept`."""
    until = time.monotonic() + TRACKERS_S
    while children := set(children_of_this_process()) - kept:
        late = time.monotonic() > until
        for pid in children:
            if late or not _is_tracker(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for pid in children:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


def children_of_this_process() -> list[int]:
    """Their process ids, of those that have ended and were not waited for, too."""
    mine = os.getpid()
    return [int(pid) for pid in Path(f"/proc/{mine}/task/{mine}/children").read_text().split()]


def _is_tracker(pid: int) -> bool:
    """Whether it is multiprocessing's, which removes what others leave in shared memory, and ends with the last of them."""
    with suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def main(order: str) -> int:
    """What the process does as this program."""
    told = json.loads(order)
    end_children(set())
    for folder in told["folders"]:
        shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # the terminal may be gone
        if sys.stderr.isatty():
            sys.stderr.write(SHOW_CURSOR)
        print(told["text"], file=sys.stderr, flush=True)
    return STOPPED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
