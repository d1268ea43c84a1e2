"""Which ready groups a batch takes: pure functions from groups to an order.

Given to `Ledger.claim` by whoever trains. Groups that were given back come first whatever the selector says, so that lost
steps are made again as they were. Without a selector the ledger takes the oldest groups, from an index. A selector is
called in the ledger's thread: it must return at once and touch nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from buffers.records import ReadyGroup

Selector = Callable[[Sequence[ReadyGroup]], Sequence[ReadyGroup]]
"""Ready groups, the oldest first -> the same groups, the most wanted first."""


def oldest_first(groups: Sequence[ReadyGroup]) -> Sequence[ReadyGroup]:
    """In the order in which they were opened: nothing waits longer than it must. The default."""
    return sorted(groups, key=lambda group: group.group_id)


def freshest_first(groups: Sequence[ReadyGroup]) -> Sequence[ReadyGroup]:
    """The least stale first; what is passed over grows old and is evicted in the end."""
    return sorted(groups, key=lambda group: (-group.min_version, group.group_id))


def shortest_first(groups: Sequence[ReadyGroup]) -> Sequence[ReadyGroup]:
    """Groups of like length share a batch, which packs well."""
    return sorted(groups, key=lambda group: (group.num_tokens, group.group_id))


def shuffled(seed: int) -> Selector:
    """Any order, the same for the same groups and seed."""

    def select(groups: Sequence[ReadyGroup]) -> Sequence[ReadyGroup]:
        # A group's place depends on itself and the seed only.
        return sorted(groups, key=lambda group: random.Random(f"{seed}:{group.group_id}").random())

    return select
