"""Rules of `understudy compare`: what differs is shown and nothing else, of finished runs and of running ones."""

from __future__ import annotations

import json

import pytest
import yaml

from learner.reporting.compare import CompareError, config_differences, main, read_run


def a_run(folder, *, lr, rewards, summary=True, more=None):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        yaml.safe_dump({"run": {"name": folder.name, "seed": 0}, "learner": {"lr": lr, **(more or {})}})
    )
    lines = [{"step": 0, "sft/seconds": 1.0}]
    lines += [{"step": step, "reward/mean": reward, "time/step_s": 2.0} for step, reward in enumerate(rewards, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if summary:
        (folder / "summary.json").write_text(json.dumps({"wall_s": 12.5}))
    return folder


@pytest.mark.seconds
def test_it_shows_the_keys_that_differ_the_figures_and_a_picture(tmp_path, capsys):
    a = a_run(tmp_path / "runs" / "a", lr=0.1, rewards=[0.0, 0.5, 1.0])
    b = a_run(tmp_path / "runs" / "b", lr=0.2, rewards=[0.25, 0.75], summary=False, more={"kl": {"coef": 0.5}})
    assert main([str(a), str(b)]) == 0
    shown = capsys.readouterr().out
    rows = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:4]]
        for line in shown.splitlines()
        if line.count("│") == 4
    }
    assert rows["learner.lr"] == ["0.1", "0.2"] and rows["learner.kl.coef"] == ["(no such key)", "0.5"]
    assert "run.seed" not in rows and "run.name" not in rows
    assert rows["steps"] == ["3", "2"] and rows["reward/mean"] == ["0.5", "0.5"]
    assert rows["reward/mean at step 2"] == ["0.25", "0.5"] and rows["seconds in all"] == ["12.5", "-"]
    assert (tmp_path / "runs" / "compare-a-b.png").read_bytes().startswith(b"\x89PNG")


def test_runs_of_the_same_name_are_told_apart_by_their_paths(tmp_path, capsys):
    one, two = (a_run(tmp_path / place / "demo", lr=0.1, rewards=[]) for place in ("one", "two"))
    assert main([str(one), str(two)]) == 0
    assert "configuration: the same but for the name" in (shown := capsys.readouterr().out)
    assert "none of them has made a step yet" in shown and not list(tmp_path.glob("*/*.png"))


def test_the_last_validation_counts_not_a_mean_of_several(tmp_path):
    folder = a_run(tmp_path / "a", lr=0.1, rewards=[0.5])
    with (folder / "metrics.jsonl").open("a") as lines:
        for step, mean in ((2, 0.1), (4, 0.9)):
            lines.write(json.dumps({"step": step, "val/mean": mean}) + "\n")
    assert read_run(folder).last("val/mean") == 0.9
    assert config_differences([read_run(folder), read_run(folder)]) == {}


@pytest.mark.parametrize("missing", ["config.yaml", "metrics.jsonl"])
def test_a_folder_without_a_run_is_refused_by_name(tmp_path, capsys, missing):
    folder = a_run(tmp_path / "a", lr=0.1, rewards=[])
    (folder / missing).unlink()
    with pytest.raises(CompareError, match=missing):
        read_run(folder)
    assert main([str(folder), str(folder)]) == 2 and "must hold" in capsys.readouterr().err
