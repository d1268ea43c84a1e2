"""Rules of `understudy eval`: which weights and tasks are played, and what it refuses. It is run whole in test_cli.py."""

from __future__ import annotations

import pytest

from buffers.errors import TaskError
from configs.load import load_config
from learner.evaluate import evaluated_config, main, weights_of


def test_a_run_gives_its_newest_weights_not_those_that_it_began_with(tmp_path):
    run = tmp_path / "runs" / "a"
    for folder in (run / "model", run / "checkpoints" / "step-000003" / "model"):
        folder.mkdir(parents=True)
        (folder / "config.json").touch()
    assert weights_of(run) == run / "model", "nothing was saved yet"
    (run / "last").symlink_to(run / "checkpoints" / "step-000003" / "model")
    assert weights_of(run) == run / "last"
    assert weights_of(run / "checkpoints" / "step-000003") == run / "checkpoints" / "step-000003" / "model"
    assert weights_of(run / "model") == run / "model"
    with pytest.raises(TaskError, match="--checkpoint must name a run"):
        weights_of(tmp_path)


def test_adapters_of_roles_are_played_with_the_roles_that_they_were_trained_as(tmp_path):
    (tmp_path / "adapters").mkdir()
    (tmp_path / "config.json").touch()
    (tmp_path / "adapters" / "versions.json").write_text('{"scout": 3, "runner": 2}')
    with pytest.raises(
        TaskError, match=r"roles scout, runner, got a configuration with none; set learner\.lora and roles"
    ):
        evaluated_config(load_config(), checkpoint=tmp_path, samples=1)
    roles = ["roles={runner: {}, scout: {}, old: {frozen: models/old}}", "learner.lora={rank: 4, per_role: true}"]
    config = load_config(overrides=[*roles, "learner.advantage=grpo", "learner.critic=none"])
    assert evaluated_config(config, checkpoint=tmp_path, samples=1).model.path == str(tmp_path)


def test_validation_tasks_are_played_where_there_are_some():
    config = load_config(overrides=["data.validation.tasks=val.parquet", "data.validation.samples=4"])
    played = evaluated_config(config, checkpoint=None, samples=None)
    assert (played.data.tasks, played.data.validation.samples) == ("val.parquet", 4)
    assert played.run.name == "demo-eval" and played.model == config.model and not played.sft.demonstrations
    training = evaluated_config(load_config(), checkpoint=None, samples=2)
    assert (training.data.tasks, training.data.validation.samples) == (load_config().data.tasks, 2)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--checkpoint", "nowhere"], "--checkpoint must name a run"),
        (["learner.learning_rate=1"], "learner.learning_rate is not a configuration key"),
        (["data.tasks="], "data.validation.tasks or data.tasks"),
    ],
)
def test_what_cannot_be_played_is_refused_in_a_line(words, named, capsys):
    assert main(words) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--samples", "0"], ["--limit", "-1"]])
def test_counts_are_positive(words, capsys):
    with pytest.raises(SystemExit):
        main(words)
    assert f"{words[0]} must be at least 1" in capsys.readouterr().err
