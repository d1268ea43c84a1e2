"""Rules of an evaluation's figures: pass@k without bias, intervals over tasks, and failed episodes that are never hidden."""

from __future__ import annotations

import io
from itertools import combinations

import pytest
from rich.console import Console

from buffers.records import Validated
from learner.validation import best_ks, best_of_k, evaluation_figures, failures_in_words, table, with_interval


def scored(*scores, task_id="t", source="a", failed=0):
    return Validated(task_id=task_id, data_source=source, scores=scores, num_failed=failed)


@pytest.mark.parametrize("scores", [(0.0, 1.0, 0.0, 1.0, 0.0), (0.25, 0.5, -1.0, 3.0)])
def test_best_of_k_is_the_mean_over_all_subsets(scores):
    for k in range(1, len(scores) + 1):
        subsets = list(combinations(scores, k))
        assert best_of_k(scores, k) == pytest.approx(sum(map(max, subsets)) / len(subsets))


def test_for_zeros_and_ones_it_is_pass_at_k():
    """Chen et al. 2021, equation 1: 1 - C(n-c, k) / C(n, k); n = 4, c = 1."""
    assert [best_of_k((0.0, 0.0, 1.0, 0.0), k) for k in (1, 2, 4)] == [0.25, 0.5, 1.0]


def test_which_k_are_shown():
    assert (best_ks(1), best_ks(2), best_ks(6), best_ks(8)) == ([], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8])


def test_an_interval_holds_the_mean_narrows_with_tasks_and_is_the_same_each_time():
    few, many = with_interval([0.0, 1.0] * 5), with_interval([0.0, 1.0] * 500)
    assert few["low"] < few["value"] == 0.5 < few["high"]
    assert many["high"] - many["low"] < few["high"] - few["low"] and many == with_interval([0.0, 1.0] * 500)
    assert with_interval([0.5]) == {"value": 0.5, "low": None, "high": None, "tasks": 1}
    assert with_interval([]) == {"value": None, "low": None, "high": None, "tasks": 0}


def test_failed_episodes_are_shown_beside_the_mean():
    found = [scored(1.0, 1.0), scored(1.0, failed=1, source="b")]
    figures = evaluation_figures(found, num_tasks=3, samples=2, failures={"deadline": 2, "agent exited with code 1": 7})
    assert figures["mean"]["value"] == 1.0 and figures["mean_failed_as_0"]["value"] == pytest.approx(0.5)
    assert (figures["episodes_scored"], figures["episodes_failed"], figures["tasks_without_score"]) == (3, 3, 1)
    assert figures["best_of"]["2"] == {"value": 1.0, "low": None, "high": None, "tasks": 1}
    words = failures_in_words(figures)
    assert "3 of 6" in words[0] and "agent exited" in words[1] and "deadline" in words[2]
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(table(figures))
    shown = console.export_text()
    assert all(
        each in shown for each in ("mean score", "failed episodes as 0", "pass@1", "pass@2", "mean of a", "mean of b")
    )


def test_other_scores_than_zero_and_one_are_not_called_pass():
    figures = evaluation_figures([scored(0.5, 0.25)], num_tasks=1, samples=2, failures={})
    assert figures["binary"] is False and figures["best_of"]["2"]["value"] == 0.5 and failures_in_words(figures) == []
