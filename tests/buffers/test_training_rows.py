"""Rounds become rows: one per branch, each sampled token trained once."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffers.errors import UnderstudyError
from buffers.prompt_queue import Response
from buffers.records import UNKNOWN_EXPERT, EpisodeScores, Round, Row, UInt16
from buffers.training_rows import TokenTree, episode_rows, is_trainable
from tests.support.buffer_parts import make_round


def rows_of(rounds: list[Round]) -> list[Row]:
    return episode_rows(rounds, group_id=4, scores=EpisodeScores(whole=0.5))


def test_a_linear_episode_is_one_row_that_trains_all_its_sampled_tokens() -> None:
    (row,) = rows_of(
        [
            make_round("e", index=0, tail=[1, 2], sampled=[7, 8], version=3),
            make_round("e", index=1, parent=0, tail=[3], sampled=[9], version=4),
        ]
    )
    assert row.ids.tolist() == [1, 2, 7, 8, 3, 9]
    assert row.mask.tolist() == [0, 0, 1, 1, 0, 1]
    assert row.logprobs.tolist() == [0, 0, -0.125, -0.25, 0, -0.125]
    assert row.versions.tolist() == [-1, -1, 3, 3, -1, 4]
    assert row.rounds.tolist() == [-1, -1, 0, 0, -1, 1]
    assert (row.episode_id, row.group_id, row.score, row.loss_weight, row.greedy) == ("e", 4, 0.5, 1.0, False)
    types = [array.dtype for array in (row.ids, row.mask, row.logprobs, row.versions, row.rounds)]
    assert types == [np.int32, np.uint8, np.float32, np.int32, np.int32]


def test_a_row_has_the_scores_of_each_judge_and_none_where_no_judge_spoke() -> None:
    rounds = [make_round("e", index=0)]
    judged = EpisodeScores(whole=0.5, judges={"a": 0.25, "b": 0.75})
    assert [row.judges for row in episode_rows(rounds, group_id=4, scores=judged)] == [{"a": 0.25, "b": 0.75}]
    assert [row.judges for row in rows_of(rounds)] == [None]


def test_a_row_has_the_hint_of_its_episode() -> None:
    (row,) = episode_rows([make_round("e")], group_id=4, scores=EpisodeScores(whole=0.5, hint="Count."))
    assert row.hint == "Count."


def test_a_row_names_those_of_its_own_rounds_whose_answers_were_cut() -> None:
    first, second = rows_of(
        [
            make_round("e", index=0, finish_reason="length"),
            make_round("e", index=1, parent=0),
            make_round("e", index=2, parent=0, finish_reason="length"),
        ]
    )
    assert (first.truncated, second.truncated) == ((0,), (2,))


def test_a_shared_prefix_is_trained_in_the_branch_whose_leaf_came_first() -> None:
    first, second = rows_of(
        [
            make_round("e", index=0, tail=[1], sampled=[2]),
            make_round("e", index=1, parent=0, tail=[3], sampled=[4]),
            make_round("e", index=2, parent=0, tail=[5], sampled=[6]),
        ]
    )
    assert first.ids.tolist() == [1, 2, 3, 4] and first.mask.tolist() == [0, 1, 0, 1]
    assert second.ids.tolist() == [1, 2, 5, 6] and second.mask.tolist() == [0, 0, 0, 1]
    assert second.logprobs.tolist() == [0, 0, 0, -0.125] and second.versions.tolist() == [-1, -1, -1, 0]
    assert (first.loss_weight, second.loss_weight) == (0.5, 0.5)


def test_an_aborted_round_is_never_trained() -> None:
    (row,) = rows_of(
        [
            make_round("e", index=0, sampled=[4]),
            make_round("e", index=1, parent=0, tail=[3], sampled=[5], finish_reason="abort"),
        ]
    )
    assert row.ids.tolist() == [1, 2, 4] and row.loss_weight == 1.0


def test_a_branch_without_sampled_tokens_of_its_own_makes_no_row() -> None:
    (row,) = rows_of(
        [
            make_round("e", index=0, tail=[1], sampled=[2]),
            make_round("e", index=1, parent=0, tail=[3], sampled=[4]),
            make_round("e", index=2, parent=0, tail=[5], sampled=[]),
        ]
    )
    assert row.ids.tolist() == [1, 2, 3, 4] and row.loss_weight == 1.0


def test_a_child_of_an_aborted_round_is_refused() -> None:
    with pytest.raises(ValueError, match="round 1 of episode e: parent must be an earlier round that was not aborted"):
        rows_of([make_round("e", index=0, finish_reason="abort"), make_round("e", index=1, parent=0)])


@pytest.mark.parametrize("parent", [1, 2])
def test_a_round_that_continues_itself_or_a_later_one_is_refused(parent: int) -> None:
    rounds = [make_round("e", index=0), make_round("e", index=1, parent=parent), make_round("e", index=2, parent=1)]
    leaf = [make_round("e", index=3, parent=2)]
    with pytest.raises(ValueError, match=rf"parent must be an earlier round that was not aborted, got {parent}"):
        rows_of(rounds + leaf)


def test_a_round_of_which_no_token_is_left_in_makes_no_row_and_halves_no_weight() -> None:
    out = np.zeros(3, dtype=np.uint8)
    (row,) = rows_of(
        [
            make_round("e", index=0, tail=[1], sampled=[2]),
            make_round("e", index=1, parent=0, tail=[3], sampled=[4, 5, 6]),
            replace(make_round("e", index=2, parent=0, tail=[7], sampled=[8, 9, 10]), trained=out),
        ]
    )
    assert row.ids.tolist() == [1, 2, 3, 4, 5, 6] and row.loss_weight == 1.0


def test_tokens_that_are_left_out_are_context() -> None:
    some = np.array([1, 0, 1], dtype=np.uint8)
    (row,) = rows_of([replace(make_round("e", tail=[1, 2], sampled=[7, 8, 9], version=3), trained=some)])
    assert row.ids.tolist() == [1, 2, 7, 8, 9] and row.mask.tolist() == [0, 0, 1, 0, 1]
    assert row.logprobs.tolist() == [0, 0, -0.125, 0, -0.375]
    assert row.versions.tolist() == [-1, -1, 3, -1, 3] and row.rounds.tolist() == [-1, -1, 0, -1, 0]


def test_of_several_scored_branches_in_one_row_the_latest_counts() -> None:
    rounds = [make_round("e", index=0), make_round("e", index=1, parent=0), make_round("e", index=2, parent=1)]
    scores = EpisodeScores(whole=0.5, branches={0: 0.25, 1: -1.0}, rounds={})
    (row,) = episode_rows(rounds, group_id=4, scores=scores)
    assert row.branch_score == -1.0


def test_the_score_of_a_shared_round_is_on_the_row_that_trains_it_only() -> None:
    rounds = [
        make_round("e", index=0, tail=[1], sampled=[2]),
        make_round("e", index=1, parent=0, tail=[3], sampled=[4]),
        make_round("e", index=2, parent=0, tail=[5], sampled=[6]),
    ]
    scores = EpisodeScores(whole=0.5, branches={0: 0.25}, rounds={0: 1.0, 2: -1.0})
    first, second = episode_rows(rounds, group_id=4, scores=scores)
    assert (first.round_scores, second.round_scores) == ({0: 1.0}, {2: -1.0})
    assert (first.branch_score, second.branch_score) == (0.25, None)


@pytest.mark.parametrize("greedy", [False, True])
def test_rows_say_that_their_episode_was_sampled_greedily(greedy: bool) -> None:
    (row,) = episode_rows([make_round("e")], group_id=1, scores=EpisodeScores(whole=1.0), greedy=greedy)
    assert row.greedy is greedy


def test_a_round_is_trainable_when_it_ended_and_trains_a_token() -> None:
    assert is_trainable("stop", num_trained=1) and is_trainable("abandoned", num_trained=2)
    assert not is_trainable("stop", num_trained=0) and not is_trainable("abort", num_trained=1)


@st.composite
def trees(draw: st.DrawFn) -> list[Round]:
    rounds: list[Round] = []
    for index in range(draw(st.integers(1, 10))):
        parents = [round_.round_index for round_ in rounds if round_.finish_reason != "abort"]
        first_id = 100 * index
        rounds.append(
            make_round(
                "e",
                index=index,
                parent=draw(st.sampled_from([None, *parents])),
                tail=range(first_id, first_id + draw(st.integers(0, 3))),
                sampled=range(first_id + 50, first_id + 50 + draw(st.integers(0, 3))),
                version=index,
                finish_reason=draw(st.sampled_from(["stop", "stop", "length", "abort"])),
            )
        )
    return rounds


@given(rounds=trees(), seed=st.integers(0, 1000))
def test_each_sampled_token_is_trained_once_and_ids_are_the_exact_path(rounds: list[Round], seed: int) -> None:
    shuffled = random.Random(seed).sample(rounds, len(rounds))
    rows = rows_of(shuffled)
    by_index = {round_.round_index: round_ for round_ in rounds}

    expected = sorted(
        (int(token), index) for index, r in by_index.items() if r.finish_reason != "abort" for token in r.sampled_ids
    )
    trained = sorted(
        (int(token), int(index))
        for row in rows
        for token, index in zip(row.ids[row.mask == 1], row.rounds[row.mask == 1])
    )
    assert trained == expected

    for row in rows:
        assert row.num_trained > 0 and row.loss_weight == 1 / len(rows)
        assert (row.versions == row.rounds).all()  # the tree stamps each round with its index
        path, leaf = [], int(max(row.ids // 100))  # ids tell their round; a leaf has the highest index of its path
        current: int | None = leaf
        while current is not None:
            path.insert(0, by_index[current])
            current = by_index[current].parent
        assert row.ids.tolist() == [i for r in path for part in (r.tail_ids, r.sampled_ids) for i in part.tolist()]


def test_a_round_keeps_only_what_its_prompt_adds_to_the_verified_parent() -> None:
    tree = TokenTree("e")

    def add(prompt: list[int], sampled: list[int], *, parent: int | None, finish_reason: str = "stop") -> list[int]:
        response = Response(
            request_id="",
            sampled_ids=np.array(sampled, dtype=np.int32),
            logprobs=np.zeros(len(sampled), dtype=np.float32),
            versions=np.zeros(len(sampled), dtype=np.int32),
            finish_reason=finish_reason,
        )
        round_ = tree.add(response, prompt_ids=np.array(prompt, dtype=np.int32), parent=parent)
        assert round_.parent == parent
        return [round_.round_index, *round_.tail_ids.tolist()]

    assert add([1, 2], [3], parent=None) == [0, 1, 2]
    assert add([1, 2, 3, 4], [5], parent=0) == [1, 4]
    assert add([1, 2, 3, 4, 5, 6], [7], parent=1, finish_reason="abort") == [2, 6]
    assert add([1, 2, 3, 4, 5], [6], parent=1) == [3]  # a prompt may add nothing
    assert add([1, 2, 3, 4, 5], [6], parent=0) == [4, 4, 5]
    refused = [
        ([1, 2, 3, 4, 5, 6, 7], 2),  # aborted
        ([1, 2, 3, 4, 5], 9),  # not there
        ([1, 2, 99, 4, 5], 0),
        ([9, 2, 3, 4, 5], 1),  # differs before the parent's own ids
        ([1, 2, 3, 99, 5], 1),
        ([1, 2, 3, 4], 1),  # ends before them
    ]
    for prompt, parent in refused:
        with pytest.raises(UnderstudyError, match=f"start with those of round {parent}; give parent=None"):
            add(prompt, [8], parent=parent)
    assert add([1, 2], [3], parent=None) == [5, 1, 2]


def test_a_tree_that_is_rebuilt_from_its_rounds_goes_on_as_it_would_have() -> None:
    rounds = [
        make_round("e", index=0, tail=[1, 2], sampled=[3]),
        make_round("e", index=1, parent=0, tail=[4], sampled=[5], finish_reason="abort"),
        make_round("e", index=2, parent=0, tail=[], sampled=[6, 7]),
    ]
    added = {name: np.array([value]) for name, value in {"sampled_ids": 9, "logprobs": -0.5, "versions": 3}.items()}
    tree = TokenTree("e", rounds=rounds)
    trained = np.ones(1, dtype=np.uint8)
    round_ = tree.add(
        Response(request_id="", finish_reason="stop", **added),
        prompt_ids=np.array([1, 2, 3, 6, 7, 8]),
        parent=2,
        memo=b"memo",
        trained=trained,
        role="solver",
    )
    assert (round_.episode_id, round_.round_index, round_.parent, round_.memo) == ("e", 3, 2, b"memo")
    assert (round_.tail_ids.tolist(), round_.sampled_ids.tolist()) == ([8], [9])
    assert (round_.logprobs.tolist(), round_.versions.tolist(), round_.finish_reason) == ([-0.5], [3], "stop")
    assert round_.trained is trained and round_.role == "solver"
    types = [array.dtype for array in (round_.tail_ids, round_.sampled_ids, round_.versions, round_.logprobs)]
    assert types == [np.int32, np.int32, np.int32, np.float32]


def test_a_branch_in_which_two_roles_spoke_is_a_row_for_each_and_each_weighs_once() -> None:
    rounds = [
        make_round("e", index=0, tail=[1], sampled=[2], role="a"),
        make_round("e", index=1, parent=0, tail=[3], sampled=[4], role="b"),
        make_round("e", index=2, tail=[5], sampled=[6], role="a"),
    ]
    scores = EpisodeScores(whole=0.5, roles={"b": -1.0})
    first, second, third = episode_rows(rounds, group_id=4, scores=scores)
    assert [(row.role, row.mask.tolist()) for row in (first, second, third)] == [
        ("a", [0, 1, 0, 0]),
        ("b", [0, 0, 0, 1]),
        ("a", [0, 1]),
    ]
    assert [row.loss_weight for row in (first, second, third)] == [0.5, 1.0, 0.5]
    assert [row.own_score for row in (first, second, third)] == [0.5, -1.0, 0.5]


def used(first: int, number: int) -> UInt16:
    """Experts of `number` tokens, each of one layer with two."""
    return np.stack([np.arange(first, first + number), np.full(number, 300)], axis=-1)[:, None].astype(np.uint16)


def test_a_row_has_the_experts_of_all_tokens_but_its_last_and_those_that_nobody_recorded() -> None:
    """The engine says those of the whole prompt, or from the parent's last token on; of rounds in between it may say none."""
    tree = TokenTree("e")
    given = {"logprobs": np.zeros(2, np.float32), "finish_reason": "stop"}
    prompt, rounds = [1, 2], []
    for index, experts in enumerate([used(0, 3), used(0, 6), None, used(7, 3)]):
        ids = np.array([50 + index, 60 + index], np.int32)
        assert tree.num_ids(index - 1 if index else None) == max(0, len(prompt) - 1 if index else 0)
        rounds.append(
            tree.add(
                Response(
                    request_id="",
                    sampled_ids=ids,
                    versions=np.array([index, index + 1], np.int32),
                    experts=experts,
                    **given,
                ),
                prompt_ids=np.array(prompt, np.int32),
                parent=index - 1 if index else None,
            )
        )
        prompt += [*ids.tolist(), 9]
    assert [None if one.experts is None else len(one.experts) for one in rounds] == [3, 3, None, 3]
    (row,) = rows_of(rounds)
    assert row.experts is not None and row.experts.dtype == np.uint16
    unknown = UNKNOWN_EXPERT
    assert row.experts[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, unknown, unknown, unknown, 7, 8, 9, unknown]
    assert row.expert_versions is not None, "a token meets the routers when what follows it is sampled"
    assert row.expert_versions.tolist()[:-1] == [0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4]
    (row,) = rows_of([make_round("e")])
    assert row.experts is None and row.expert_versions is None
