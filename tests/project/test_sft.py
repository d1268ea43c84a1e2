"""SFT as a user starts it: alone, killed and resumed bit for bit; with played validation; before RL, and RL from its folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from buffers.tasks.parquet import write_tasks, write_traces
from env_adapters.walk.game import walk_tasks, walk_traces
from learner.diagnosis.diagnose import diagnose
from tests.support.run_parts import Run, start

SMALL = ("run.checkpoints.every=4", "sft.steps=12", "data.validation.every=4", "run.trackers=[]")


def files(folder: Path) -> tuple[str, ...]:
    write_traces(folder / "traces.parquet", walk_traces(120, seed=0, helpful=0.5))
    write_tasks(folder / "tasks.parquet", walk_tasks(64, seed=1))
    named = f"data.tasks={folder}/tasks.parquet", f"sft.demonstrations={folder}/traces.parquet", "data.make=[]"
    return (*named, "sft.validation=0.1", *SMALL)


def lines(run: Run) -> list[dict[str, float]]:
    found = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            name: value
            for name, value in line.items()
            if name in ("step", "sft/loss", "sft/val_loss", "policy/grad_norm")
        }
        for line in found
    ]


def weights(run: Run) -> bytes:
    return (run.folder / "last" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_killed_run_of_sft_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    settings = (*files(tmp_path), "learner.stage=sft")
    whole = start(tmp_path / "whole", *settings)
    code, output = whole.wait()
    assert code == 0, output
    summary = whole.summary()
    assert (
        summary["steps"] == summary["steps_planned"] == 12
        and summary["val_loss_last"] < 0.5 * summary["val_loss_first"]
    )
    assert "SFT 12/12  loss " in output and "validation of SFT step 12  loss " in output
    assert not (whole.folder / "ledger.sqlite").exists(), "nobody plays"
    killed = start(tmp_path / "killed", *settings)
    killed.wait_for_step(6)
    killed.process.kill()
    killed.process.wait()
    again = start(tmp_path / "killed", *settings, resume="auto")
    code, output = again.wait()
    assert code == 0 and "resuming after step 4" in output, output
    assert weights(again) == weights(whole) and lines(again) == lines(whole)
    diagnose(again.folder)


@pytest.mark.slow
@pytest.mark.engine
def test_sft_is_played_and_rl_goes_on_from_it(tmp_path: Path) -> None:
    named = files(tmp_path)
    write_tasks(tmp_path / "val.parquet", walk_tasks(6, seed=99))
    alone = start(tmp_path / "alone", *named, "learner.stage=sft", f"data.validation.tasks={tmp_path}/val.parquet")
    code, output = alone.wait()
    assert code == 0, output
    played = [json.loads(line) for line in (alone.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["val/step"] for line in played if "val/step" in line] == [0, 4, 8, 12]
    model = (alone.folder / "best").resolve()
    after = start(
        tmp_path / "after", *named, "sft.demonstrations=", "sft.validation=", f"model.path={model}", "run.steps=1"
    )
    code, output = after.wait()
    assert code == 0 and after.summary()["steps"] == 1, output


@pytest.mark.slow
@pytest.mark.engine
def test_a_stage_before_rl_is_a_run_below_the_run(tmp_path: Path) -> None:
    run = start(tmp_path, *files(tmp_path), "run.steps=1", "buffer.groups_per_step=4", "buffer.group_size=4")
    code, output = run.wait()
    assert code == 0, output
    first = json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] == 0 and first["sft/loss_last"] < first["sft/loss_first"] and first["sft/refused"] == 0
    assert run.summary()["sft"]["steps"] == 12 and run.summary()["max_logprob_diff"] < 1e-4
    assert json.loads((run.folder / "sft" / "summary.json").read_text())["steps"] == 12
    assert len((run.folder / "sft" / "metrics.jsonl").read_text().splitlines()) == 13
