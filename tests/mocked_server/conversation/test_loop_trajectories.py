"""Rules of mocked_server/dispatch.py: what a loop may say was sampled, and what of it is trained."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from buffers.errors import AgentError
from buffers.records import ScoreDetail
from mocked_server.conversation.live_episodes import LiveEpisode
from mocked_server.dispatch import left_out, part_scores
from tests.mocked_server.conversation.test_continuation import add, episode


def played() -> LiveEpisode:
    """Rounds 0: 1 2 | 3 4;  1, after it: 5 | 6 7;  2, after 0 too: 5 | 8."""
    live = episode()
    root = add(live, 1, 2, 3, 4, num_sampled=2)
    add(live, 5, 6, 7, parent=root, num_sampled=2)
    add(live, 5, 8, parent=root)
    return live


def output(prompt: list[int], response: list[int], mask: list[int]) -> Any:
    return SimpleNamespace(prompt_ids=prompt, response_ids=response, response_mask=mask)


def scored(trajectory: Any, score: float | None, *, steps: list[float] | None = None, role: str = "") -> Any:
    return SimpleNamespace(**vars(trajectory), reward_score=score, step_rewards=steps, role=role)


def flags(live: LiveEpisode, *outputs: Any) -> dict[int, list[int]]:
    return {index: trained.tolist() for index, trained in left_out(live, outputs).items()}


WHOLE = output([1, 2], [3, 4, 5, 6, 7], [1, 1, 0, 1, 1])
BRANCH = output([1, 2], [3, 4, 5, 8], [1, 1, 0, 1])


def test_what_every_trajectory_has_with_mask_1_is_trained_whole() -> None:
    assert flags(played(), WHOLE, BRANCH) == {}
    assert flags(played(), WHOLE) == {2: [0]}
    assert flags(played(), BRANCH) == {1: [0, 0]}


def test_tokens_without_mask_1_anywhere_are_left_out() -> None:
    assert flags(played(), output([1, 2], [3, 4, 5, 6, 7], [0, 1, 0, 1, 0]), BRANCH) == {1: [1, 0]}
    assert flags(played(), output([1, 2], [3, 4, 5, 6, 7], [0, 1, 0, 1, 0])) == {0: [0, 1], 1: [1, 0], 2: [0]}
    assert flags(played(), output([1, 2], [3], [1])) == {0: [1, 0], 1: [0, 0], 2: [0]}, "cut short"
    assert flags(played(), output([1, 2, 3, 4, 5], [8], [1])) == {0: [0, 0], 1: [0, 0]}
    types = {str(trained.dtype) for trained in left_out(played(), [BRANCH]).values()}
    assert types == {"uint8"}


def test_what_was_sampled_but_in_other_words_afterwards_may_stand_with_mask_0() -> None:
    assert flags(played(), output([1, 2], [3, 9, 9], [1, 0, 0])) == {0: [1, 0], 1: [0, 0], 2: [0]}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (output([1, 2], [3, 9], [1, 1]), "trajectory 1: .*got 9 at position 1 of response_ids"),
        (output([1, 2], [3, 4, 5], [1, 1, 1]), "got 5 at position 2"),
        (output([1, 9], [3, 4], [1, 1]), "got 3 at position 0"),
        (output([1, 2], [3, 4, 9, 6], [0, 0, 0, 1]), "got 6 at position 3"),
        (output([], [1, 2, 3], [1, 0, 1]), "got 1 at position 0"),
        (output([1, 2], [3, 4, 5, 6, 7, 7], [1, 1, 0, 1, 1, 1]), "got 7 at position 5"),
    ],
)
def test_a_token_that_was_not_sampled_there_is_told_with_its_place(wrong: Any, words: str) -> None:
    with pytest.raises(AgentError, match=words):
        left_out(played(), [WHOLE, wrong])


def test_nothing_to_train_is_told() -> None:
    for outputs in ([], [output([1, 2], [3, 4], [0, 0])]):
        with pytest.raises(AgentError, match="at least one token must have mask 1, got none"):
            left_out(played(), outputs)


def test_rounds_of_another_program_are_compared_and_not_recorded() -> None:
    live = episode()
    add(live, 1, 2, 3, num_sampled=2, round_index=None)
    assert flags(live, output([1], [2], [1])) == {}
    add(live, 1, 7, num_sampled=1, round_index=4)
    assert flags(live, output([1], [2], [1])) == {4: [0]}


def test_rewards_of_steps_and_of_trajectories_are_scores_of_their_rounds_and_branches() -> None:
    live = episode()
    root = add(live, 1, 2, 3, 4, num_sampled=2, round_index=10)
    add(live, 5, 6, 7, parent=root, num_sampled=2, round_index=11)
    add(live, 5, 8, parent=root, round_index=12)
    whole, other = scored(WHOLE, 1.0, steps=[0.5, 0.0]), scored(BRANCH, 0.0, steps=[0.0, -0.25])
    half, penalty = (0.5, ScoreDetail(round_index=10)), (-0.25, ScoreDetail(round_index=12))
    assert part_scores(live, [whole]) == [half], "the only trajectory's score is the episode's"
    branches = [(1.0, ScoreDetail(branch=11)), (0.0, ScoreDetail(branch=12))]
    assert part_scores(live, [whole, other]) == [half, branches[0], penalty, branches[1]]
    assert part_scores(live, [scored(WHOLE, 1.0), scored(BRANCH, None)]) == []
    roles = [(1.0, ScoreDetail(role="a")), (-1.0, ScoreDetail(role="b"))]
    assert part_scores(live, [scored(WHOLE, 1.0, role="a"), scored(BRANCH, -1.0, role="b")]) == roles
    assert part_scores(live, [scored(WHOLE, 1.0, role="a")]) == roles[:1], "that of a role, and the episode's"
    with pytest.raises(
        AgentError, match="trajectory 0: step_rewards must hold one reward for each of its 2 answers, got 1"
    ):
        part_scores(live, [scored(WHOLE, None, steps=[0.5])])
