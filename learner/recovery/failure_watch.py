"""The watch loop: shows the queues once a second, says when no episode ends or the ledger waits for its disk, and ends a run whose
episodes cannot succeed.

Run by `learner.pipeline`, which names the parts. It changes nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

from buffers.errors import AgentError
from learner.recovery.failure_report import in_short

WATCH_S = 1.0
QUIET_S = 30.0
"""Seconds without a scored episode until that is reported; twice as long until it is reported again, and so on."""
FAILING_BATCHES = 2
"""Batches of groups given up in a row, without one score in between, that end the run."""
EQUAL_BATCHES = 20
"""Batches of groups dropped in a row because their scores are equal, without one to train in between, that end the run."""
NOBODY_ASKS = "no agent asks for an episode"


async def watch(
    *,
    counts: Callable[[], Mapping[str, int]],
    groups_per_step: int,
    show: Callable[[], Awaitable[None]],
    say: Callable[[str], None],
    disk: Callable[[], str],
    pool: Callable[[], Mapping[str, float]],
    is_starting: Callable[[], bool],
    why: Callable[[Mapping[str, int]], Awaitable[str]],
) -> None:
    """Runs until it is cancelled. Raises AgentError when every episode fails or scores the same.

    `show` updates the display; `say` prints a line; `disk`: why the ledger stores or begins nothing for now, and the remedy;
    `pool`: figures of the task pool; `is_starting`: no episode can start yet;
    `why(counts)` says why episodes failed, given the counts since the last score.
    """
    failures = Streak("evicted/failed", ended_by=("episodes/scored",), patience=FAILING_BATCHES * groups_per_step)
    equals = Streak(
        "evicted/no variance", ended_by=("groups/ready", "groups/trained"), patience=EQUAL_BATCHES * groups_per_step
    )
    quiet = Quiet(counts(), at=time.monotonic())
    said = ""
    while True:
        await asyncio.sleep(WATCH_S)
        now = counts()
        line = quiet.line(now, pool=pool(), at=time.monotonic(), is_starting=is_starting())
        if failures.lasts(now):
            reasons = await why(quiet.since_score(now))
            raise AgentError(f"{failures.patience} groups in a row were given up without one scored episode; {reasons}")
        if equals.lasts(now):
            raise AgentError(
                f"data.reward_manager=dapo needs groups with different scores, got {equals.patience} in a row with equal "
                f"ones; the tasks are solved, or too hard, or the scorer is constant: take others, or "
                f"data.reward_manager=naive"
            )
        if line:
            say(line)
        if (waits := disk()) != said:
            say(f"the ledger waits: {waits}; it continues by itself" if waits else "the ledger continues")
            said = waits
        await show()


class Streak:
    """A count that grew by `patience` while none of `ended_by` grew."""

    def __init__(self, name: str, *, ended_by: tuple[str, ...], patience: int) -> None:
        self._name = name
        self._ended_by = ended_by
        self.patience = patience
        self._since = 0
        self._seen = 0

    def lasts(self, counts: Mapping[str, int]) -> bool:
        """Look at the present counts."""
        seen = sum(counts.get(name, 0) for name in self._ended_by)
        if seen > self._seen:
            self._since = counts.get(self._name, 0)
        self._seen = max(seen, self._seen)
        return counts.get(self._name, 0) - self._since >= self.patience


class Quiet:
    """Says when no episode was scored for long, at growing intervals. Not a word while the learner is busy: then agents wait for
    room, and no episode runs or fails."""

    def __init__(self, counts: Mapping[str, int], *, at: float) -> None:
        """`at`: monotonic seconds."""
        self._at_score = counts
        self._since, self._next_s, self._failed = at, QUIET_S, counts["episodes/failed"]

    def line(self, counts: Mapping[str, int], *, pool: Mapping[str, float], at: float, is_starting: bool) -> str:
        """What to say now; mostly nothing."""
        has_scored = counts["episodes/scored"] > self._at_score["episodes/scored"]
        if has_scored:
            self._at_score = counts
        running, failed = int(pool["pool/running"]), counts["episodes/failed"]
        nobody_asks = not running and not pool["pool/agents_waiting"] and pool.get("pool/admissible_groups") != 0
        is_idle = not running and failed == self._failed and not nobody_asks
        if is_starting or has_scored or is_idle:
            self._since, self._next_s, self._failed = at, QUIET_S, failed
        if at - self._since < self._next_s:
            return ""
        self._next_s, self._failed = 2 * self._next_s, failed
        told = NOBODY_ASKS if nobody_asks else f"{running} running"
        failures = in_short(self.since_score(counts))
        return ", ".join(filter(None, (f"0 episodes scored in the last {at - self._since:.0f} s", told, failures)))

    def since_score(self, counts: Mapping[str, int]) -> dict[str, int]:
        """What was counted since an episode was scored last."""
        return {name: number - self._at_score.get(name, 0) for name, number in counts.items()}
