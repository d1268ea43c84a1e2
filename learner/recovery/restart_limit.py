"""Counts the restarts of a run's parts, and ends the run when one keeps dying. Called by the learn loop and by
`learner.recovery.restarts`.

A process that dies now and then (out of memory, a node's hiccup) costs what it was doing; one that dies again and again,
without a step in between, has a cause that a restart does not mend, and ends the run.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict

logger = logging.getLogger(__name__)

MAX_IN_A_ROW = 3
"""Restarts of one part without a step in between; the next death ends the run."""


class RestartLimit:
    """Counts restarts by part: `engine`, `learner`, `environment`; each engine has a limit of its own."""

    def __init__(self) -> None:
        self._total: Counter[str] = Counter()
        self._in_a_row: dict[str, Counter[str]] = defaultdict(Counter)

    def record(self, part: str, error: Exception, *, name: str = "") -> None:
        """Count a death of `part`, of which the one called `name` died. Raises `error` when it may not be started again."""
        self._in_a_row[part][name] += 1
        if self._in_a_row[part][name] > MAX_IN_A_ROW:
            raise error
        self._total[part] += 1
        logger.warning("the %s died and is started again: %s", f"{part} {name}".strip(), error)

    def excuse(self, part: str) -> None:
        """The cause of `part`'s deaths was found and ended: its restarts in a row are counted from 0 again."""
        self._in_a_row.pop(part, None)

    def reset(self) -> None:
        """A step was made: all restarts in a row are counted from 0 again."""
        self._in_a_row.clear()

    def figures(self) -> dict[str, float]:
        """`restarts/<part>`: restarts so far, of parts that died."""
        return {f"restarts/{part}": float(number) for part, number in sorted(self._total.items())}
