"""Rules of learner/training/batch_tensors.py."""

from typing import Any

import pytest
import torch

from buffers.records import Row, TrainBatch
from learner.training.batch_tensors import BatchTensors, token_table
from tests.support.learner_parts import make_row


def _table(*rows: Row, min_version: int = 0) -> BatchTensors:
    return token_table(TrainBatch(rows=list(rows)), min_version=min_version)


def test_table_lists_the_trained_tokens_row_by_row() -> None:
    shared: dict[str, Any] = {"episode": "a", "group": 5, "score": 1.0, "loss_weight": 0.5}
    table = _table(
        make_row([1, 2, 3, 4], mask=[0, 1, 0, 1], logprobs=[0, -1, 0, -2], **shared),
        make_row([1, 2], mask=[0, 0], **shared),
        make_row([1, 9], mask=[0, 1], logprobs=[0, -3], version=2, **shared),
        make_row([7, 8], mask=[0, 1], episode="b", group=6, score=-1.0, logprobs=[0, -4]),
    )
    assert table.episodes.tolist() == [0, 0, 1]
    assert table.units.tolist() == [0, 0, 1]
    assert table.scores.tolist() == [1.0, -1.0]
    assert table.groups.tolist() == [5, 6]
    assert table.rows.tolist() == [0, 0, 1, 2]
    assert table.behaviour.tolist() == [-1.0, -2.0, -3.0, -4.0]
    assert table.versions.tolist() == [0, 0, 2, 0]
    assert table.padded(table.behaviour).tolist() == [[-1.0, -2.0], [-3.0, 0.0], [-4.0, 0.0]]
    assert table.weights([0, 1, 2], mode="token-mean").tolist() == pytest.approx([0.2, 0.2, 0.2, 0.4])


def test_weights_of_a_minibatch_leave_other_rows_out() -> None:
    rows = [make_row([1, 2, 3], mask=[0, 1, 1], episode=f"{name}-0") for name in "abc"]
    table = _table(*rows)
    assert table.weights([2, 0], mode="token-mean").tolist() == pytest.approx([0.25, 0.25, 0.0, 0.0, 0.25, 0.25])
    for mode in ("seq-mean-token-sum", "token-sum", "seq-mean-token-sum-norm"):
        assert table.weights([1], mode=mode).tolist() == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0]


def test_tokens_too_old_by_their_own_version_are_masked_and_the_rest_of_the_row_trains() -> None:
    long = make_row([0, 1, 2, 3, 4], mask=[0, 1, 1, 1, 1], version=[0, 3, 3, 4, 5])
    old = make_row([0, 1], mask=[0, 1], version=[0, 3], episode="1-0-0")
    table = _table(long, old, min_version=4)
    assert table.fresh.tolist() == [False, False, True, True, False]
    assert table.weights([0, 1], mode="token-mean").tolist() == pytest.approx([0.0, 0.0, 0.5, 0.5, 0.0])
    assert table.weights([0, 1], mode="seq-mean-token-mean").tolist() == pytest.approx([0.0, 0.0, 0.5, 0.5, 0.0])
    assert table.weights([0, 1], mode="seq-mean-token-sum-norm", norm=8).tolist() == [0.0, 0.0, 0.125, 0.125, 0.0]


def test_branch_with_its_own_score_is_a_unit_of_its_own() -> None:
    table = _table(
        make_row([1, 2], mask=[0, 1], score=1.0, branch_score=0.25),
        make_row([1, 3], mask=[0, 1], score=1.0),
        make_row([1, 4], mask=[0, 1], score=1.0, branch_score=-0.5),
        make_row([1, 5], mask=[0, 1], score=1.0),
    )
    assert table.units.tolist() == [0, 1, 2, 1]
    assert table.scores.tolist() == [0.25, 1.0, -0.5]
    assert table.groups.tolist() == [0, 0, 0]
    assert table.episodes.tolist() == [0, 0, 0, 0]


def test_round_scores_land_on_the_last_token_of_their_round() -> None:
    table = _table(
        make_row([0] * 7, mask=[0, 1, 1, 0, 1, 0, 1], rounds=[0, 2, 2, 0, 3, 0, 5], round_scores={2: 0.5, 5: -1.0}),
        make_row([0, 1], mask=[0, 1], rounds=9, episode="1-0-0"),
    )
    assert table.rewards.tolist() == [0.0, 0.5, 0.0, -1.0, 0.0]
    assert table.ends.tolist() == [False, True, True, False, False]  # a row's last token ends nothing


def test_greedy_episodes_are_baselines_and_never_trained() -> None:
    rows = [
        make_row([1, 2], mask=[0, 1], score=1.0, group=3, episode="a"),
        make_row([1, 3], mask=[0, 1], score=1.0, group=3, episode="a"),
        make_row([1, 2], mask=[0, 1], score=0.5, group=3, episode="g", greedy=True),
        make_row([1, 3], mask=[0, 1], score=0.5, group=3, episode="g", greedy=True),
        make_row([1, 2], mask=[0, 1], score=0.25, group=3, episode="h", greedy=True),
        make_row([1, 2], mask=[0, 1], score=0.0, group=8, episode="b"),
    ]
    assert _table(*rows).baselines is None  # group 8 has none
    table = _table(*rows, make_row([1, 2], mask=[0, 1], score=2.0, group=8, episode="i", greedy=True))
    assert table.baselines is not None and table.baselines.tolist() == [0.375, 2.0]
    assert table.scores.tolist() == [1.0, 0.0]
    assert table.sequences.num_trained == 3


def test_an_answer_that_was_cut_is_left_out_where_that_is_asked_and_counted_anyway() -> None:
    row = make_row([0] * 6, mask=[0, 1, 1, 0, 1, 1], rounds=[0, 2, 2, 0, 3, 3], truncated=(3,))
    kept, cut = _table(row), token_table(TrainBatch(rows=[row]), min_version=0, mask_truncated=True)
    assert kept.truncated.tolist() == cut.truncated.tolist() == [False, False, True, True]
    assert kept.fresh.tolist() == [True] * 4 and cut.fresh.tolist() == [True, True, False, False]
    assert cut.weights([0], mode="token-mean").tolist() == [0.5, 0.5, 0.0, 0.0]


def test_scores_by_judge_are_a_table_with_holes() -> None:
    rows = [
        make_row([1, 2], mask=[0, 1], score=1.5, judges={"b": 1.0, "a": 2.0}),
        make_row([1, 2], mask=[0, 1], score=0.5, judges={"a": 0.5}, episode="1"),
        make_row([1, 2], mask=[0, 1], score=0.25, episode="2"),
    ]
    judges = _table(*rows).judges
    assert judges is not None
    torch.testing.assert_close(
        judges, torch.tensor([[torch.nan, 2.0, 1.0], [torch.nan, 0.5, torch.nan], [0.25, torch.nan, torch.nan]]),
        equal_nan=True,
    )  # fmt: skip
    assert _table(rows[2]).judges is None


def test_score_of_a_branch_or_a_role_is_that_of_one_more_judge() -> None:
    shared: dict[str, Any] = {"mask": [0, 1], "score": 1.5, "judges": {"a": 2.0}}
    judges = _table(
        make_row([1, 2], **shared),
        make_row([1, 3], branch_score=0.25, **shared),
        make_row([1, 4], role="b", role_score=-1.0, **shared),
    ).judges
    assert judges is not None
    torch.testing.assert_close(
        judges, torch.tensor([[torch.nan, 2.0], [0.25, torch.nan], [-1.0, torch.nan]]), equal_nan=True
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"score": float("nan")}, "score of episode 0-0-0 must be finite, got nan"),
        ({"branch_score": float("inf")}, "score of episode 0-0-0 must be finite, got inf"),
        ({"judges": {"a": float("nan")}}, "score of episode 0-0-0 must be finite, got nan"),
        ({"round_scores": {0: float("nan")}}, "score of episode 0-0-0 must be finite, got nan"),
        ({"round_scores": {4: 1.0}}, "round_scores of episode 0-0-0 must name rounds that the row trains, got 4"),
        ({"greedy": True, "score": float("nan")}, "score of episode 0-0-0 must be finite, got nan"),
        ({"logprobs": [0.0, float("-inf")]}, "logprobs of episode 0-0-0 must be finite, got -inf"),
        (
            {"ids": [1, 2, 3], "mask": [0, 1, 1], "logprobs": [0.0, float("-inf"), float("nan")]},
            "must be finite, got -inf",
        ),
        ({"mask": [1, 0]}, r"mask\[0\] of episode 0-0-0 must be 0"),
        ({"mask": [1, 1]}, r"mask\[0\] of episode 0-0-0 must be 0"),
        ({"mask": [0, 0]}, "must hold at least one trained token of version 2 or later, got 0 older ones in 1 rows"),
        ({"version": 1}, "must hold at least one trained token of version 2 or later, got 1 older ones in 1 rows"),
        ({"greedy": True}, "must hold at least one trained token"),
    ],
)
def test_batch_that_cannot_be_trained_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    row = make_row(**({"ids": [1, 2], "mask": [0, 1], "version": 2} | change))
    with pytest.raises(ValueError, match=message):
        _table(row, min_version=2)


def test_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="got 0 older ones in 0 rows"):
        _table()


def test_whole_numbers_are_scores_and_weights_too() -> None:
    table = _table(make_row([1, 2], mask=[0, 1], score=1, loss_weight=1))
    assert table.scores.dtype == table.loss_weights.dtype == torch.float32


def test_row_without_tokens_is_left_out() -> None:
    assert _table(make_row([], mask=[]), make_row([1, 2], mask=[0, 1])).sequences.num_trained == 1


def test_padding_keeps_the_type_of_what_it_pads() -> None:
    table = _table(make_row([0, 1, 2], mask=[0, 1, 1]), make_row([0, 1], mask=[0, 1], episode="1-0-0"))
    assert table.padded(torch.tensor([True, False, True])).tolist() == [[True, False], [True, False]]


def test_roles_are_compared_and_weighed_apart() -> None:
    talk = {"mask": [0, 1], "score": 1.0}
    rows = [
        make_row([1, 2], episode=f"0-{sample}-0", group=5, role=role, role_score=own, **talk)
        for sample in (0, 1)
        for role, own in (("a", 10.0 * sample), ("b", None))
    ]
    long = make_row([1, 2, 3, 4], mask=[0, 1, 1, 1], episode="0-0-0", group=5, score=1.0, role="b", loss_weight=1.0)
    table = _table(rows[0], long, *rows[2:])
    assert table.groups.tolist() == [0, 1, 0, 1]
    assert table.scores.tolist() == [0.0, 1.0, 10.0, 1.0]
    for mode in ("token-mean", "seq-mean-token-mean"):
        weights = table.weights(range(4), mode=mode)
        own = {
            role: sum(w for w, row in zip(weights.tolist(), table.rows.tolist()) if row % 2 == role) for role in (0, 1)
        }
        assert own == pytest.approx({0: 0.5, 1: 0.5})  # however many tokens a role has
    assert table.weights(range(4), mode="token-mean").tolist() == pytest.approx([0.25, *[0.125] * 3, 0.25, 0.125])


def test_what_is_of_no_role_is_not_compared_with_a_role() -> None:
    rows = [
        make_row([1, 2], mask=[0, 1], episode=f"0-{sample}-0", role=role) for sample in (0, 1) for role in ("", "a")
    ]
    assert _table(*rows).groups.tolist() == [0, 1, 0, 1]


def test_a_greedy_baseline_is_of_the_same_role() -> None:
    rows = [
        make_row(
            [1, 2],
            mask=[0, 1],
            episode=f"{sample}",
            group=5,
            score=0.5,
            role=role,
            role_score=score,
            greedy=sample == 0,
        )
        for sample in (0, 1)
        for role, score in (("a", 3.0), ("b", None))
    ]
    baselines = _table(*rows).baselines
    assert baselines is not None and baselines.tolist() == [3.0, 0.5]
