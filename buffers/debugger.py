"""The debugger of a run with `run.debug`: `breakpoint()` anywhere, and what code of the user's raises, stop in it.

`learner.session` sets it up; the borders around such code (`env_adapters.guarded_calls`, `buffers.remote.actor`) call `stop_at`,
which does nothing in any other run. Invariant: it speaks on the terminal, where everything else that a run says goes to its log.
"""

from __future__ import annotations

import pdb
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class _Debugger:
    """Python's `sys.breakpointhook`, on a terminal of its own."""

    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal
        self._last: BaseException | None = None
        self._one_at_a_time = threading.Lock()

    def __call__(self, *_: Any, **__: Any) -> None:
        pdb.Pdb(stdout=self._terminal, nosigint=True).set_trace(sys._getframe(1))

    def post_mortem(self, error: BaseException) -> None:
        """Stops where it was raised, once; `continue` resumes as if nobody had looked. Threads wait for one another."""
        with self._one_at_a_time:
            if error is self._last:  # it has come to the next border
                return
            self._last = error
            print(f"{type(error).__name__}: {error}", file=self._terminal)
            debugger = pdb.Pdb(stdout=self._terminal, nosigint=True)
            debugger.reset()
            debugger.interaction(None, error.__traceback__)


@contextmanager
def debugger_on(terminal: TextIO) -> Iterator[None]:
    """The debugger for this process, while the body runs."""
    before, sys.breakpointhook = sys.breakpointhook, _Debugger(terminal)
    try:
        yield
    finally:
        sys.breakpointhook = before


def stop_at(error: BaseException) -> None:
    """Stop where `error` was raised, if this run is debugged."""
    if isinstance(sys.breakpointhook, _Debugger):
        sys.breakpointhook.post_mortem(error)
