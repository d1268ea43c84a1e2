"""Rules of learner/reporting/run_metrics.py: figures of a step, and of a run that was interrupted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from buffers.records import TrainBatch
from configs.load import load_config
from learner.reporting.run_metrics import History
from learner.reporting.run_record import FILE, MachineLog
from mocked_server.generation import GenerationStats
from tests.support.learner_parts import walks


def test_groups_with_equal_scores_are_counted() -> None:
    batch = walks(num_groups=2, group_size=2)
    same = [row for row in walks(num_groups=3, group_size=2).rows if row.group_id == 2][:1]
    figures = History(load_config()).add(TrainBatch(rows=[*batch.rows, *same]), {}, version=0, stats=GenerationStats())
    assert figures["batch/equal_groups"] == pytest.approx(1 / 3)
    assert figures["reward/mean"] == pytest.approx(0.4)


def test_stored_groups_have_figures_of_their_own_and_are_in_no_other() -> None:
    fresh, old = walks(num_groups=2, version=6), walks(num_groups=1, version=4, seed=1)
    stored = [
        replace(row, group_id=9, episode_id=f"9-{n}", score=5.0, times_trained=1) for n, row in enumerate(old.rows)
    ]
    settings = ["buffer.replay.share=0.5", "buffer.groups_per_step=4"]
    history = History(load_config(overrides=settings))
    alone = History(load_config()).add(fresh, {}, version=7, stats=GenerationStats())
    both = history.add(
        TrainBatch(rows=[*fresh.rows, *stored]), {"replay/counted_share": 0.25}, version=7, stats=GenerationStats()
    )
    apart = {name: both.pop(name) for name in list(both) if name.startswith("replay/")}
    assert both == alone and both["reward/max"] == 1.0 and both["staleness/mean"] == 1.0
    assert apart == {
        "replay/groups": 1.0, "replay/short": 1.0, "replay/age_mean": 3.0, "replay/age_max": 3.0, "replay/counted_share": 0.25,
        "replay/trained_tokens": float(old.num_trained_tokens),
    }  # fmt: skip
    assert (
        history.add(TrainBatch(rows=[*fresh.rows, *stored]), {}, version=7, stats=GenerationStats())[
            "replay/counted_share"
        ]
        == 0.0
    )
    none = history.add(fresh, {}, version=7, stats=GenerationStats())
    assert {name: value for name, value in none.items() if name.startswith("replay/")} == {
        "replay/groups": 0.0,
        "replay/short": 2.0,
    }


def test_a_run_that_goes_on_counts_its_earlier_steps() -> None:
    first = History(load_config())
    for _ in range(3):
        figures = first.add(walks(), {"time/step_s": 1.0, "time/wait_s": 0.5}, version=0, stats=GenerationStats())
    assert first.recent_reward() == 0.5
    earlier = [{"step": 0, "sft/seconds": 1.0}, {"step": 1, **figures}, {"step": 1, "val/mean": 1.0}]
    second = History(load_config(), earlier=earlier)
    assert second.rewards == [0.5] and second.summary()["steps"] == 1
    assert second.summary()["episodes"] == 8
    assert History(load_config()).recent_reward() is None


@pytest.mark.parametrize("deaths", [1, 2])
@pytest.mark.parametrize("jump_s", [0.0, 86_400.0, -3_600.0])
def test_a_run_that_goes_on_counts_the_seconds_of_its_earlier_processes(
    tmp_path: Path, deaths: int, jump_s: float
) -> None:
    """Until their last line, whether they ended by themselves or were killed; not the time in between, nor that of a clock that
    was set."""
    log = tmp_path / FILE
    lines = [
        {"at": 1000.0 * n + second + (jump_s if second > 1.0 else 0.0), "took_s": second, "pid": n, "began": 1000.0 * n}
        for n in range(deaths)
        for second in (1.0, 30.0)
    ]
    log.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"at": 1.0, "pi')
    now = [50.0]
    machine = MachineLog(tmp_path)
    machine.write({})
    history = History(load_config(), earlier_s=machine.earlier_s(), clock=lambda: now[0])
    now[0] += 12.0
    assert history.summary()["wall_s"] == pytest.approx(30.0 * deaths + 12.0)


def history_of(steps: list[tuple[float, float]], *overrides: str) -> History:
    """`steps`: (mean, share of groups with equal scores) of each."""
    figures = [{"reward/mean": mean, "reward/std": 0.1, "batch/equal_groups": share} for mean, share in steps]
    return History(
        load_config(overrides=["learner.advantage=grpo", "run.reward_optimum=null", *overrides]), earlier=figures
    )


def test_steps_without_anything_to_learn_from_are_told_at_growing_distances() -> None:
    history = history_of([(0.5, 0.0), (0.0, 1.0), (0.0, 1.0)])
    assert history.news() == ""
    told = []
    for _ in range(9):
        history.steps.append({"reward/std": 0.0, "batch/equal_groups": 1.0})
        history.rewards.append(0.0)
        told.append(history.news())
    assert [bool(line) for line in told] == [True, False, False, True, False, False, False, False, False]
    assert told[0].startswith(
        "nothing was learned in the last 3 steps: all answers of each task have the same score (mean 0.000)"
    )
    assert "data" not in told[0] and "part marks" in told[0] and len(history.verdicts()) == 1
    history.steps.append({"reward/std": 0.1, "batch/equal_groups": 0.5})
    assert history.news() == "" and not any("nothing was learned" in line for line in history.verdicts())


def test_estimators_that_compare_the_batch_learn_from_equal_groups_and_solved_tasks_are_called_so() -> None:
    steps = [(0.5, 1.0)] * 4
    assert "nothing was learned in the last 4 steps" in history_of(steps).news()
    assert history_of(steps, "learner.advantage=gae").news() == history_of(steps, "learner.hints.coef=1").news() == ""
    assert "solved" in history_of([(1.0, 1.0)] * 4, "run.reward_optimum=1.0").verdicts()[0]


def test_a_reward_that_did_not_rise_is_told_at_the_end() -> None:
    flat = history_of([(0.3, 0.0)] * 10).verdicts()
    assert flat and flat[0].startswith("the reward did not rise: 0.300 in the first 3 steps, 0.300 in the last 5")
    assert history_of([(0.3, 0.0)] * 9).verdicts() == [], "too few steps to say so"
    assert history_of([(0.1 * step, 0.0) for step in range(10)]).verdicts() == []
    solved = history_of([(1.0, 0.0)] * 10, "run.reward_optimum=1.0")
    assert solved.verdicts() == [] and solved.is_solved, "nothing held it back"
    assert not history_of([(1.0, 0.0)] * 10).is_solved and not history_of([], "run.reward_optimum=1.0").is_solved


def test_the_engine_is_never_idle_for_longer_than_the_steps_take_also_after_a_resume() -> None:
    """The start of a process is not its first step's time."""

    def run(earlier: list[dict[str, float]]) -> History:
        now = [0.0]
        history = History(load_config(), earlier=earlier, clock=lambda: now[0])
        for at in (100.0, 101.0, 102.0):  # the first 99 s are the start
            now[0] = at
            history.add(walks(), {"time/step_s": 1.0, "time/wait_s": 0.5}, version=0, stats=GenerationStats())
        return history

    first = run([])
    assert ["time/engine_idle_s" in figures for figures in first.steps] == [False, True, True]
    assert first.summary()["engine_idle_share"] == 1.0
    assert run(first.steps).summary()["engine_idle_share"] == 1.0


def test_no_share_is_above_one_when_a_learner_started_again_between_steps():
    now = [0.0]
    history = History(load_config(), earlier=[], clock=lambda: now[0])
    for at in (100.0, 101.0, 126.0, 127.0):  # 25 s for a new learner, in which no engine had a request
        now[0] = at
        history.add(walks(), {"time/step_s": 1.0, "time/wait_s": 0.5}, version=0, stats=GenerationStats())
    assert history.summary()["engine_idle_share"] == 1.0


@pytest.mark.parametrize(
    ("dtype", "metric", "limit"), [("float32", "max_logprob_diff", 1e-4), ("bfloat16", "mean_logprob_diff", 0.02)]
)
def test_more_difference_than_rounding_explains_is_told_once(dtype: str, metric: str, limit: float) -> None:
    history = history_of([(0.5, 0.0)] * 2, f"model.dtype={dtype}")
    assert history.drift() == "", "nothing was compared"
    told = []
    for times in (1.0, 1.5, 2.0):
        history.steps.append({f"policy/{metric}": times * limit})
        told.append(history.drift())
    assert told[0] == told[2] == ""
    assert f"differs by {1.5 * limit:.2g}, where {dtype} explains {limit:g}; " in told[1] and "engine_args" in told[1]
