"""How an engine's process ended: by itself, as one does that a request kills, or by something outside.

Asked by `mocked_server.vllm.engine` when its engine is gone; `mocked_server.generation` judges by it. Invariant: what could as well
have come from outside is never called the engine's own.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

UNKNOWN = 255
"""Exit code that multiprocessing gives for a process whose fork server is gone."""
CRASHES = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS}
)
"""Signals that a process brings upon itself."""


@dataclass(frozen=True, slots=True)
class EngineEnding:
    """`by_itself`: see `EngineLost`. `words`: what was seen, to follow "it"."""

    by_itself: bool
    words: str


TAKEN_DOWN = EngineEnding(False, "was taken down")
STOPPED = EngineEnding(False, "was stopped from outside (SIGSTOP), and is killed")
DEAF = EngineEnding(True, "made no progress, and is killed")


def ending_of(exit_codes: Sequence[int | None], *, oom_kills: int = 0) -> EngineEnding:
    """The end of an engine of which vLLM says that it is dead. `exit_codes`: of its processes; None: it still runs, so it said
    itself that it failed. `oom_kills`: processes that Linux ended for want of memory since the engine started."""
    code = next((code for code in exit_codes if code is not None), None)
    if code is None:
        return EngineEnding(True, "failed with an error of its own")
    if code == UNKNOWN:
        return EngineEnding(False, "ended, and nobody saw how")
    if code == 0:
        return EngineEnding(False, "was told to end from outside (SIGTERM), and did")
    if code > 0:
        return EngineEnding(True, f"ended with exit code {code}")
    name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
    if -code in CRASHES:
        return EngineEnding(True, f"crashed ({name})")
    if -code == signal.SIGKILL and oom_kills:
        return EngineEnding(
            False,
            f"was killed ({name}), likely by Linux, which ended {oom_kills} processes meanwhile as memory ran out",
        )
    return EngineEnding(False, f"was killed from outside ({name})")


def oom_kills() -> int:
    """Processes that Linux has ended for want of memory since the machine started; 0 where it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
