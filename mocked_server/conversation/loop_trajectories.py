"""What an agent loop gives back, compared with what was sampled for its episode.

Called by the server when a loop has played. Invariants: a token that a loop says the model sampled (mask 1) is one that
the engine sampled, after just these ids, in this episode; else the episode fails with the place. A sampled token that
no trajectory has with mask 1 is not trained, as in verl. What is trained are the recorded rounds: ids and
log-probabilities of a loop are not believed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from buffers.errors import AgentError
from buffers.records import Int32, ScoreDetail, Task, UInt8
from mocked_server.conversation.live_episodes import LiveEpisode, LiveRound

Flags = npt.NDArray[np.bool_]


class Trajectory(Protocol):
    """One `AgentLoopOutput`."""

    @property
    def prompt_ids(self) -> list[int]: ...
    @property
    def response_ids(self) -> list[int]: ...
    @property
    def response_mask(self) -> list[int]: ...
    @property
    def reward_score(self) -> float | None: ...
    @property
    def step_rewards(self) -> list[float] | None: ...


class LoopOutcome(Protocol):
    """An episode that a loop has played."""

    @property
    def score(self) -> float: ...
    @property
    def outputs(self) -> Sequence[Trajectory]: ...


class LoopPlayer(Protocol):
    """The player of rows that name an agent loop (the pipeline hands in `agents.workers.manager`)."""

    @property
    def names(self) -> frozenset[str]: ...
    async def play(self, task: Task, *, api_key: str, seed: int) -> LoopOutcome: ...


def left_out(live: LiveEpisode, outputs: Sequence[Trajectory]) -> dict[int, UInt8]:
    """Round index -> [S] which sampled tokens are trained, of the rounds of which some are not.

    Raises AgentError at the first token with mask 1 that was not sampled there, and when nothing has mask 1.
    """
    trained = {id(live_round): np.zeros(live_round.num_sampled, np.uint8) for live_round in live.rounds}
    for number, output in enumerate(outputs):
        ids = np.array(output.prompt_ids + output.response_ids, np.int32)
        mask = np.array([0] * len(output.prompt_ids) + output.response_mask, bool)
        sampled = np.zeros(len(ids), bool)
        for live_round, start, alike in _rounds_of(live, ids):
            sampled[start : start + alike] = True
            trained[id(live_round)][:alike] |= mask[start : start + alike]
        _check(mask, sampled=sampled, ids=ids, what=f"trajectory {number}", prompt_length=len(output.prompt_ids))
    if not any(flags.any() for flags in trained.values()):
        raise AgentError("at least one token must have mask 1, got none; there is nothing to train")
    return {
        live_round.round_index: trained[id(live_round)]
        for live_round in live.rounds
        if live_round.round_index is not None and not trained[id(live_round)].all()
    }


def part_scores(live: LiveEpisode, outputs: Sequence[Trajectory]) -> list[tuple[float, ScoreDetail]]:
    """Scores of parts of the episode, beside its own: of each trajectory where several have one, and of single answers.

    Raises AgentError when `step_rewards` are not one for each answer."""
    found = []
    several = sum(output.reward_score is not None for output in outputs) > 1
    for number, output in enumerate(outputs):
        answers = _answers(live, np.array(output.prompt_ids + output.response_ids, np.int32))
        rewards = output.step_rewards or [0.0] * len(answers)
        if len(rewards) != len(answers):
            raise AgentError(
                f"trajectory {number}: step_rewards must hold one reward for each of its {len(answers)} answers, got "
                f"{len(rewards)}; write 0.0 where there is none"
            )
        found += [(reward, ScoreDetail(round_index=at)) for at, reward in zip(answers, rewards, strict=True) if reward]
        if several and output.reward_score is not None and answers:
            found.append((output.reward_score, ScoreDetail(branch=answers[-1])))
    return found


def _answers(live: LiveEpisode, ids: Int32) -> list[int]:
    """The rounds whose answers these ids hold, in order."""
    longest: dict[int, tuple[int, int]] = {}
    for live_round, start, alike in _rounds_of(live, ids):
        if live_round.round_index is not None:
            longest[start] = max(longest.get(start, (0, 0)), (alike, live_round.round_index))
    return [longest[start][1] for start in sorted(longest)]


def _check(mask: Flags, *, sampled: Flags, ids: Int32, what: str, prompt_length: int) -> None:
    foreign = np.flatnonzero(mask & ~sampled)
    if len(foreign):
        at = int(foreign[0])
        raise AgentError(
            f"{what}: a token with mask 1 must be one that generate() sampled after the ids before it, got {ids[at]} at position "
            f"{at - prompt_length} of response_ids; give back what was sampled, unchanged"
        )


def _rounds_of(live: LiveEpisode, ids: Int32) -> Iterator[tuple[LiveRound, int, int]]:
    """(round, where its sampled ids stand, how many of them are these ids) for each round whose prompt these ids begin with."""
    open_: list[tuple[LiveRound, int]] = [(root, 0) for root in live.roots]
    while open_:
        node, start = open_.pop()
        here = ids[start : start + len(node.ids)]
        differs = np.flatnonzero(here != node.ids[: len(here)])
        alike = int(differs[0]) if len(differs) else len(here)
        if alike > len(node.tail_ids):
            yield node, start + len(node.tail_ids), alike - len(node.tail_ids)
        if alike == len(node.ids):
            open_ += [(child, node.total) for child in node.children]
