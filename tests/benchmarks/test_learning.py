"""Rules of benchmarks/learning.py, staleness.py, walk_player.py and report.py: how old the data is, and what is reported."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import learning, staleness
from benchmarks.harness import Report, parser_of
from benchmarks.learning import learned, solved_at
from benchmarks.processes.walk_player import Player
from benchmarks.staleness import Bench, Run, summarise, table, within_noise
from buffers.records import Row, TrainBatch
from buffers.tasks.parquet import write_traces
from configs.load import FOLDER, load_config
from env_adapters.walk.game import walk_tasks
from learner.training.warm_start import load_traces
from tests.support.learner_parts import make_model, make_trainer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


def play(model: Path, *, seed: int = 0, num: int = 3) -> list[Row]:
    random = torch.Generator().manual_seed(seed)
    return Player(model).play(walk_tasks(num, seed=0), group_size=2, version=0, random=random)


def test_player_records_what_the_learner_computes(model: Path) -> None:
    rows = play(model)
    assert [row.episode_id for row in rows] == ["0-0-0", "0-1-0", "1-0-0", "1-1-0", "2-0-0", "2-1-0"]
    trainer = make_trainer(model)
    metrics = trainer.train_step(TrainBatch(rows=rows), version=0)
    trainer.close()
    assert metrics["policy/checked_share"] == 1.0 and metrics["policy/max_logprob_diff"] < 1e-5
    for row in rows:
        rounds = row.rounds[row.mask == 1]
        assert len(set(rounds.tolist())) <= 8 and (np.diff(rounds) >= 0).all()
        assert max(np.unique(rounds, return_counts=True)[1]) <= 4


def test_equal_seeds_play_alike(model: Path) -> None:
    one, two, other = play(model), play(model), play(model, seed=1)
    assert all((left.ids.tolist(), left.score) == (right.ids.tolist(), right.score) for left, right in zip(one, two))
    assert any(left.ids.tolist() != right.ids.tolist() for left, right in zip(one, other))


def test_player_writes_a_conversation_as_the_warm_start_does(model: Path, tmp_path: Path) -> None:
    """Ids of a whole episode are those of its messages, where the answers were single letters."""
    player = Player(model)
    letters = player._tokenizer("wasd"[0])["input_ids"]
    row = _scripted(player, token=letters[0])
    messages = _messages(player, row)
    write_traces(tmp_path / "trace.parquet", [messages])
    expected = load_traces(tmp_path / "trace.parquet", tokenizer=player._tokenizer)
    assert row.ids.tolist() == expected.ids[0].tolist()
    assert row.mask.tolist() == expected.masks[0].tolist()


def _scripted(player: Player, *, token: int) -> Row:
    """An episode of a model that always says this token, and then ends its turn."""
    lm, end, said = player._lm, player._tokenizer.eos_token_id, deque([token])

    def answer(module: Any, words: Any, named: Any, outputs: Any) -> Any:
        outputs.logits[:] = -100.0
        outputs.logits[..., said[0]] = 100.0
        said.append(end if said.popleft() == token else token)
        return outputs

    hook = lm.register_forward_hook(answer, with_kwargs=True)
    task = walk_tasks(1, seed=0)
    (row,) = player.play(task, group_size=1, version=0, random=torch.Generator().manual_seed(0))
    hook.remove()
    return row


def _messages(player: Player, row: Row) -> list[dict[str, Any]]:
    text = player._tokenizer.decode(row.ids.tolist())
    turns = [turn.split("<|im_end|>")[0] for turn in text.split("<|im_start|>")[1:]]
    return [dict(zip(("role", "content"), turn.split("\n", 1), strict=True)) for turn in turns]


class ScriptedTrainer:
    """Notes the age of what it is given."""

    def __init__(self) -> None:
        self.ages: list[int] = []

    def train_step(self, batch: TrainBatch, *, version: int) -> dict[str, float]:
        (sampled,) = {int(v) for row in batch.rows for v in row.versions[row.mask == 1]}
        self.ages.append(version - sampled)
        return {"policy/is_weight_max": 1.0 + version}

    def save_pretrained(self, folder: Path) -> None: ...

    def close(self) -> None: ...


class ScriptedPlayer:
    """Episodes of one token."""

    def __init__(self, folder: Path) -> None: ...

    def load(self, weights: Path) -> None: ...

    def play(self, tasks: list[Any], *, group_size: int, version: int, **_: Any) -> list[Row]:
        row = Row(
            episode_id="0-0-0", group_id=0, score=float(version), ids=np.zeros(2, np.int32),
            mask=np.array([0, 1], np.uint8), logprobs=np.zeros(2, np.float32),
            versions=np.array([-1, version], np.int32), rounds=np.array([-1, 0], np.int32),
        )  # fmt: skip
        return [replace(row, episode_id=task.task_id) for task in tasks]


@pytest.mark.parametrize(("k", "ages"), [(0, [0] * 6), (1, [0, 1, 1, 1, 1, 1]), (2, [0, 1, 2, 2, 2, 2])])
def test_each_update_trains_what_was_sampled_k_updates_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, k: int, ages: list[int]
) -> None:
    trainer = ScriptedTrainer()
    monkeypatch.setattr(staleness, "Player", ScriptedPlayer)
    monkeypatch.setattr(Bench, "trainer", lambda *_, **__: trainer)
    bench = Bench(folder=tmp_path, config=load_config(FOLDER / "demo.yaml"), steps=6)
    run = bench.run(tmp_path, k=k, correction="tis", seed=0)
    assert trainer.ages == ages
    assert len(run.rewards) == 6 + k  # k batches are still in the line
    assert run.largest_weight == 6.0


def test_within_noise_judges_the_worst_seed_by_the_error_of_measuring_it() -> None:
    # at 0.9 the difference of two shares of 256 episodes has an error of 0.0265
    assert within_noise([0.85, 1.0], on_policy=[0.9, 1.0])
    assert not within_noise([0.84, 1.0], on_policy=[0.9, 1.0])


def test_a_cell_of_the_table_holds_its_seeds() -> None:
    def run(k: int, correction: str, final: float, seed: int) -> Run:
        return Run(
            k=k, correction=correction, seed=seed, final=final, mean=0.5, largest_weight=2.0, wall_s=1.0, rewards=[]
        )

    finals = {(0, "tis"): (0.9, 1.0), (1, "tis"): (0.88, 1.0), (1, "naive"): (0.7, 1.0)}
    cells = summarise([run(*cell, final, seed) for cell, values in finals.items() for seed, final in enumerate(values)])
    assert [(cell["k"], cell["correction"], cell["within_noise"]) for cell in cells] == [
        (0, "tis", True),
        (1, "tis", True),
        (1, "naive", False),
    ]
    assert cells[1]["finals"] == [0.88, 1.0] and "0.880 1.000" in table(cells)


def test_solved_is_the_end_of_the_first_window_at_the_target() -> None:
    assert solved_at([0.0, 1.0, 1.0, 1.0, 1.0, 0.5, 1.0], target=0.9) == 6
    assert solved_at([1.0] * 5, target=0.9) == 5
    assert solved_at([0.0, *[1.0] * 4], target=0.9) is None


def test_a_run_that_is_too_short_to_judge_is_refused() -> None:
    run = learned([0.0, *[1.0] * 5], recipe="rloo", lag=4, seed=1, wall_s=2.0)
    assert (run.solved_at, run.reward_last, run.recipe, run.lag, run.seed) == (6, 1.0, "rloo", 4, 1)
    with pytest.raises(ValueError, match="at least 5 steps, got 3"):
        learned([1.0] * 3, recipe="rloo", lag=0, seed=0, wall_s=1.0)


def test_the_table_has_a_row_for_each_recipe_and_what_did_not_learn() -> None:
    good = learned([1.0] * 6, recipe="rloo", lag=0, seed=0, wall_s=1.0)
    runs = [good, replace(good, seed=1, reward_last=0.5, solved_at=None), replace(good, recipe="grpo", lag=4)]
    cells = learning.summarise(runs)
    assert cells[0] == {
        "recipe": "rloo", "lag": 0, "seeds": 2, "solved_at": [5, None], "reward_last": 0.75, "worst_last": 0.5,
    }  # fmt: skip
    lines = learning.table(cells).splitlines()
    assert lines[2:] == [
        "| rloo | 5, never | 0.750 | 0.500 |  |  |  |",
        "| grpo |  |  |  | 5 | 1.000 | 1.000 |",
    ]


def test_a_group_has_a_greedy_episode_where_it_is_the_baseline(model: Path) -> None:
    player, tasks = Player(model), walk_tasks(2, seed=0)
    one, two = (staleness.baselines(player, tasks, version=3, first_group=5) for _ in range(2))
    assert [(row.group_id, row.episode_id, row.greedy) for row in one] == [
        (5, "5-greedy", True), (6, "6-greedy", True),
    ]  # fmt: skip
    assert [row.ids.tolist() for row in one] == [row.ids.tolist() for row in two], "greedy episodes are all alike"


def test_a_report_says_what_was_measured_on_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = parser_of("some", doc="What it is.\n\nMore.").parse_args(["--json", str(tmp_path / "out.json")]).json
    report = Report("some", about="three runs")
    report.write(None, settings={}, figures={})
    assert list(tmp_path.iterdir()) == []
    report.write(path, settings={"steps": 3}, figures={"speed": 2.5})
    found = json.loads(path.read_text())
    assert list(found) == ["benchmark", "settings", "machine", "speed", "wall_s"]
    assert (found["benchmark"], found["settings"], found["speed"]) == ("some", {"steps": 3}, 2.5)
    assert found["machine"]["cores"] >= 1
    assert capsys.readouterr().out.endswith("at the start; three runs\n")


def report_of(path: Path, *, recipe: str, seed: int, steps: int = 40) -> Path:
    run = learned([0.2 * step for step in range(6)], recipe=recipe, lag=1, seed=seed, wall_s=1.0)
    settings = {"steps": steps, "whole_runs": False, "override": []}
    Report("learning").write(path, settings=settings, figures=learning.figures_of([run]))
    return path


def test_a_table_is_made_of_reports_that_were_written_by_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [
        report_of(tmp_path / f"{number}.json", recipe=recipe, seed=seed)
        for number, (recipe, seed) in enumerate([("ppo", 1), ("demo", 2), ("demo", 0)])
    ]
    assert learning.main(["--join", *map(str, parts), "--json", str(tmp_path / "all.json")]) == 0
    report = json.loads((tmp_path / "all.json").read_text())
    assert [(run["recipe"], run["seed"]) for run in report["runs"]] == [("demo", 0), ("demo", 2), ("ppo", 1)]
    assert [cell["seeds"] for cell in report["cells"]] == [2, 1]
    assert report["settings"] == {
        "recipes": ["demo", "ppo"], "lags": [1], "seeds": [0, 1, 2], "steps": 40, "whole_runs": False, "override": [],
    }  # fmt: skip
    for wrong, said in (
        (parts[0], "ppo, lag 1, seed 1 twice"),
        (report_of(tmp_path / "x.json", recipe="gpg", seed=0, steps=9), "same steps"),
    ):
        with pytest.raises(SystemExit):
            learning.main(["--join", str(parts[0]), str(wrong)])
        assert said in capsys.readouterr().err
