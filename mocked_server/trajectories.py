"""What an agent loop gives back, compared with what was sampled for its episode.

Called by the server when a loop has played. Invariant: a token that a loop says the model sampled (mask 1) is one that
the engine sampled, after just these ids, in this episode; else the episode fails with the place. What is trained are
the recorded rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        foreign = np.flatnonzero(mask & ~_sampled(live, ids))
        if len(foreign):
            at = int(foreign[0])
            raise AgentError(
                f"trajectory {number}: a token with mask 1 must be one that generate() sampled after the ids before it, got "
                f"{ids[at]} at position {at - len(output.prompt_ids)} of response_ids; give back what was sampled, unchanged"
            )


def _sampled(live: LiveEpisode, ids: Int32) -> Flags:
    """[T] which of these ids a round of the episode sampled, after exactly the ids before it."""
    flags = np.zeros(len(ids), bool)
    open_: list[tuple[LiveRound, int]] = [(root, 0) for root in live.roots]
    while open_:
        node, start = open_.pop()
        here = ids[start : start + len(node.ids)]
        differs = np.flatnonzero(here != node.ids[: len(here)])
        alike = int(differs[0]) if len(differs) else len(here)
        flags[start + len(node.tail_ids) : start + max(alike, len(node.tail_ids))] = True
        if alike == len(node.ids):
            open_ += [(child, node.total) for child in node.children]
    return flags
