"""The watch loop: shows the queues once a second, and ends a run whose episodes cannot succeed, with the reason.

Run by `learner.pipeline`, which names the parts. It changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from buffers.errors import AgentError

WATCH_S = 1.0
FAILING_BATCHES = 2
"""Batches of groups given up in a row, without one score in between, that end the run."""
EQUAL_BATCHES = 20
"""Batches of groups dropped in a row because their scores are equal, without one to train in between, that end the run."""


async def watch(
    *,
    counts: Callable[[], Mapping[str, int]],
    groups_per_step: int,
    show: Callable[[], None],
    last_words: Callable[[], str],
) -> None:
    """For ever. Raises AgentError when every episode fails or scores the same.

    `show` updates the display; `last_words` says where to look after failures.
    """
    failures = Streak("evicted/failed", breaks=("episodes/scored",), patience=FAILING_BATCHES * groups_per_step)
    equals = Streak(
        "evicted/no variance", breaks=("groups/ready", "groups/trained"), patience=EQUAL_BATCHES * groups_per_step
    )
    while True:
        await asyncio.sleep(WATCH_S)
        now = counts()
        if failures.lasts(now):
            reasons = {name: number for name, number in now.items() if name.startswith("failed/")}
            raise AgentError(
                f"{failures.patience} groups in a row were given up without one scored episode; reasons: {reasons}; "
                f"{last_words()}"
            )
        if equals.lasts(now):
            raise AgentError(
                f"data.reward_manager=dapo needs groups with different scores, got {equals.patience} in a row with equal "
                f"ones; the tasks are solved, or too hard, or the scorer is constant: take others, or "
                f"data.reward_manager=naive"
            )
        show()


class Streak:
    """A count that grew by `patience` while none of `breaks` grew."""

    def __init__(self, name: str, *, breaks: tuple[str, ...], patience: int) -> None:
        self._name = name
        self._breaks = breaks
        self.patience = patience
        self._since = 0
        self._seen = 0

    def lasts(self, counts: Mapping[str, int]) -> bool:
        """Look at the present counts."""
        seen = sum(counts.get(name, 0) for name in self._breaks)
        if seen > self._seen:
            self._since = counts.get(self._name, 0)
        self._seen = max(seen, self._seen)
        return counts.get(self._name, 0) - self._since >= self.patience
