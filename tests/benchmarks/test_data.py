"""Rules of benchmarks/data.py and reference_losses.py: pairs differ in what they name, and figures are what they say."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import data
from benchmarks.data import (
    AS_USUAL,
    COMPARISONS,
    MIRRORED,
    TURNED,
    Runs,
    ToldGame,
    compared,
    reader_traces,
    scripted_judge,
    tokens_to,
)
from benchmarks.harness import scripted_model
from benchmarks.reference_losses import largest_difference
from env_adapters.walk.game import KEYS, NAMES, walk_tasks
from learner.algorithms import objectives


def lines_of(rewards: list[float], **more: float) -> list[dict[str, float]]:
    return [{"step": float(step), "reward/mean": reward, **more} for step, reward in enumerate(rewards, 1)]


def test_the_second_run_has_what_the_comparison_names_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: dict[str, tuple[str, ...]] = {}

    def fake(self: Runs, name: str, *settings: str, config: str) -> list[dict[str, float]]:
        played[name] = (config, *settings)
        return lines_of([0.0] * (0 if name.startswith("echo") else 5) + [1.0] * 5, **{"batch/episodes": 64.0})

    monkeypatch.setattr(Runs, "play", fake)
    monkeypatch.setattr(data, "told_traces", lambda *_, **__: iter([]))
    found = compared("echo_steps_ratio", Runs(folder=tmp_path, seed=3, steps=20))
    first, second = played["told-3"], played["echo_steps_ratio-3"]
    assert second == (*first, "learner.echo.user=0.1")
    assert first[0] == "walk_env" and f"agents.loops={tmp_path / 'told.yaml'}" in first
    assert found["echo_steps_ratio"] == 5 / 10 and found["echo_steps_ratio_of"] == [10, 5]
    assert found["echo_effect"] == 0.5


def test_each_side_of_words_against_scores_has_settings_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[set[str]] = []

    def fake(self: Runs, name: str, *settings: str, config: str) -> list[dict[str, float]]:
        played.append(set(settings))
        return lines_of([1.0] * 5, **{"batch/episodes": 16.0})

    monkeypatch.setattr(Runs, "play", fake)
    monkeypatch.setitem(COMPARISONS, "sdpo_steps_ratio", replace(COMPARISONS["sdpo_steps_ratio"], made=lambda _: []))
    found = compared("sdpo_steps_ratio", Runs(folder=tmp_path, seed=0))
    scores, words = played
    assert scores - words == set() and words - scores == {
        "learner.recipe=sdpo",
        "learner.hints.sources=[hint]",
        "learner.lr=1e-3",
    }
    assert scores >= {"learner.epochs=4", "buffer.groups_per_step=4", "buffer.group_size=4"}
    assert found["sdpo_steps_ratio_episodes"] == [80.0, 80.0]


def test_a_run_that_never_gets_there_has_no_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runs, "play", lambda *_, **__: lines_of([0.5] * 9, **{"batch/episodes": 64.0}))
    found = compared("curriculum_tokens_ratio", Runs(folder=tmp_path, seed=0))
    assert found["curriculum_tokens_ratio"] is None and found["curriculum_tokens_ratio_last_rewards"] == [0.5, 0.5]


def test_tokens_are_those_of_the_steps_up_to_the_validation_that_was_good_enough() -> None:
    lines = lines_of([0.0] * 6, **{"throughput/tokens_per_s": 5.0, "time/step_s": 2.0})
    lines[3] |= {"val/step": 2.0, "val/mean": 0.5}
    assert tokens_to(lines) is None
    lines.append({"step": 6.0, "val/step": 4.0, "val/mean": 0.95})
    assert tokens_to(lines) == 40.0


def test_episodes_are_those_that_were_played_before_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(self: Runs, name: str, *settings: str, config: str) -> list[dict[str, float]]:
        return lines_of(
            [0.0] * 3 + [1.0] * 9, **{"batch/episodes": 32.0 if settings[-1].startswith("buffer") else 64.0}
        )

    monkeypatch.setattr(Runs, "play", fake)
    found = compared("replay_episodes_ratio", Runs(folder=tmp_path, seed=0))
    assert found["replay_episodes_ratio"] == 0.5 and found["replay_episodes_ratio_of"] == [8 * 64.0, 8 * 32.0]


def test_each_seed_is_kept_and_the_mean_is_null_where_one_has_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter([{"sdpo_steps_ratio": 0.5}, {"sdpo_steps_ratio": None}])
    monkeypatch.setattr(data, "compared", lambda *_: next(found))
    out = tmp_path / "out.json"
    assert data.main(["--only", "sdpo_steps_ratio", "--seeds", "0", "1", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["sdpo_steps_ratio"] is None and report["sdpo_steps_ratio_target"] == 0.7
    assert [one["sdpo_steps_ratio"] for one in report["seeds"]] == [0.5, None]


@pytest.mark.seconds
def test_sessions_are_counted_from_a_real_import(tmp_path: Path) -> None:
    found = data.imported(Runs(folder=tmp_path, seed=0), number=20)
    assert found["import_sessions_per_s"] > 0 and found["import_atif_sessions_per_s"] > 0
    assert "wrote      20 demonstrations" in (tmp_path / "import.log").read_text()


def test_the_words_say_which_letter_the_hinted_move_was() -> None:
    game = ToldGame(walk_tasks(1, seed=5)[0])
    wanted = game.hinted_key
    told, _, _ = game.step(next(letter for letter in KEYS if letter != wanted))
    assert told.startswith(f"No, {NAMES[wanted]} is {wanted}. The exit is ")
    done, score = False, None
    while not done:
        wanted = game.hinted_key
        told, done, score = game.step(wanted)
        assert done or told.startswith(f"Yes, {NAMES[wanted]} is {wanted}. ")
    assert score == 1.0


def test_half_of_the_readers_conversations_have_a_hint_of_which_only_what_follows_it_is_learned() -> None:
    traces = list(reader_traces(60, seed=0))
    assert all("weight" not in message for trace in traces[:30] for message in trace)
    learned = {AS_USUAL: 0, TURNED: 0}
    for trace in traces[30:]:
        hint, turns = trace[2]["content"], [*trace[:2], *trace[3:]]
        for asked, answer in zip(turns[1::2], turns[2::2], strict=True):
            direction = asked["content"].rpartition("The exit is ")[2].rstrip(".")
            key = next(key for key, name in NAMES.items() if name == direction)
            assert answer["weight"] == (answer["content"] == (key if hint == AS_USUAL else MIRRORED[key]))
            learned[hint] += answer["weight"]
    assert min(learned.values()) > 15


@pytest.mark.parametrize("errs", [0.0, 1.0])
def test_a_scripted_judge_errs_as_often_as_it_is_told(errs: float) -> None:
    question = "The exit is east.\n<answer_1>\nd\n</answer_1>\n\n<answer_2>\nw\n</answer_2>"
    with scripted_model(scripted_judge(errs=errs, seed=0)) as url:
        body = json.dumps({"model": "judge", "messages": [{"role": "user", "content": question}]}).encode()
        with urllib.request.urlopen(f"{url}/chat/completions", data=body) as reply:
            said = json.loads(json.load(reply)["choices"][0]["message"]["content"])
    assert said == ({"answer_1": 10, "answer_2": 0} if errs == 0.0 else {"answer_1": 0, "answer_2": 10})


@pytest.mark.seconds
def test_the_streams_are_the_papers_losses_and_a_wrong_clip_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(largest_difference(seed=0, batches=2).values()) <= 1e-6
    right = objectives.LOSSES["ppo"].compute
    wrong: Any = lambda *args, **bounds: right(*args, **{**bounds, "high": 0.2})  # noqa: E731
    monkeypatch.setitem(objectives.LOSSES, "ppo", objectives.PolicyLoss(compute=wrong, clip=(0.2, 0.28), ratio_max=3.0))
    found = largest_difference(seed=0, batches=2)
    assert found["ppo"] > 1e-3 and found["gspo"] < 1e-9


def test_every_comparison_is_a_configuration() -> None:
    from configs.load import load_config

    for pair in COMPARISONS.values():
        for own in (pair.one, pair.other):
            load_config(Path(pair.config), [*pair.both, *own])
