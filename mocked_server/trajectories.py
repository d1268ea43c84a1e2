"""What an agent loop gives back, compared with what was sampled for its episode.

Called by the server when a loop has played. Invariant: a token that a loop says the model sampled (mask 1) is one that
the engine sampled, after just these ids, in this episode; else the episode fails with the place. What is trained are
the recorded rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from buffers.errors import AgentError
from buffers.records import Int32, Task
from mocked_server.episodes import LiveEpisode, LiveRound

Flags = npt.NDArray[np.bool_]


class Trajectory(Protocol):
    """One `AgentLoopOutput`."""

    @property
    def prompt_ids(self) -> list[int]: ...
    @property
    def response_ids(self) -> list[int]: ...
    @property
    def response_mask(self) -> list[int]: ...


class Played(Protocol):
    """An episode that a loop has played."""

    @property
    def score(self) -> float: ...
    @property
    def outputs(self) -> Sequence[Trajectory]: ...


class LoopPlayer(Protocol):
    """Who plays rows that name an agent loop (the pipeline hands in `agents.loop_manager`)."""

    @property
    def names(self) -> frozenset[str]: ...
    async def play(self, task: Task, *, api_key: str, seed: int) -> Played: ...


def check_trajectories(live: LiveEpisode, outputs: Sequence[Trajectory]) -> None:
    """Raises AgentError at the first token with mask 1 that was not sampled there."""
    for number, output in enumerate(outputs):
        ids = np.array(output.prompt_ids + output.response_ids, np.int32)
        mask = np.array([0] * len(output.prompt_ids) + output.response_mask, bool)
        foreign = [np.flatnonzero(mask & ~sampled) for sampled in _paths(live.roots, ids)]
        if all(len(places) for places in foreign):
            at = max(int(places[0]) for places in foreign)
            raise AgentError(
                f"trajectory {number}: a token with mask 1 must be one that generate() sampled after the ids before it, got "
                f"{ids[at]} at position {at - len(output.prompt_ids)} of response_ids; give back what was sampled, unchanged"
            )


def _paths(roots: Sequence[LiveRound], ids: Int32) -> Iterator[Flags]:
    """For each path of the episode's tree that these ids follow: which of them it sampled. The first has no round at all."""
    yield np.zeros(len(ids), bool)
    open_: list[tuple[LiveRound, int, Flags]] = [(root, 0, np.zeros(len(ids), bool)) for root in roots]
    while open_:
        node, start, sampled = open_.pop()
        here = ids[start : start + len(node.ids)]
        if not np.array_equal(here, node.ids[: len(here)]):
            continue
        sampled = sampled.copy()
        sampled[start + len(node.tail_ids) : start + len(node.ids)] = True
        yield sampled
        open_ += [(child, node.total, sampled) for child in node.children if node.total < len(ids)]
