"""The matrix itself: nothing is without a row, a row whose effect is not seen fails, and its runs show their rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.matrix import inventory
from tests.matrix.effects import always, refused
from tests.matrix.inventory import ROOT
from tests.matrix.judge import effect_of, gaps
from tests.matrix.records import Ended, Row, Run
from tests.matrix.rows.everything import all_rows
from tests.matrix.runs import all_runs
from tests.support.patience import PATIENCE_S


def test_every_value_key_column_metric_and_promise_has_a_row():
    assert gaps(all_rows(), all_runs()) == []


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("learner.loss", "gspo"),
        ("learner.kl.in_reward", False),
        ("agents.silence_s", "null"),
        ("run.name", ""),
        ("column agent_name", ""),
        ("metric reward/mean", ""),
        ("promise P9", ""),
    ],
)
def test_what_has_no_row_is_named(what, value):
    rows = [row for row in all_rows() if (row.what, row.value) != (what, value)]
    assert gaps(rows, all_runs()) == [
        f"no row for {what}={value}" if "." in what and value != "" else f"no row for {what}"
    ]


def test_a_row_of_a_run_or_a_test_that_is_not_there_is_named():
    rows = [Row("run.name", "", "no-such-run"), Row("run.name", "", "tests/matrix/test_matrix.py::test_no_such")]
    assert gaps([*all_rows(), *rows], all_runs()) == [
        "no run no-such-run, which shows run.name=",
        "no test tests/matrix/test_matrix.py::test_no_such, which shows run.name=",
    ]


def test_values_of_a_type_are_all_that_it_allows():
    values = {
        key: [value for name, value in inventory.enumerated() if name == key] for key, _ in inventory.enumerated()
    }
    assert values["learner.kl.kind"] == ["k1", "abs", "k2", "k3"]
    assert values["learner.kl.in_reward"] == [False, True]
    assert values["learner.kl.target"] == ["null", "set"]
    assert values["data.tasks"] == ["text", "mapping"]
    assert values["run.trackers"] == ["tensorboard", "wandb", "mlflow", "swanlab"]
    assert "run.steps" in inventory.other_keys() and "learner.kl.kind" not in inventory.other_keys()


def _ended(folder: Path, *, code: int = 0, output: str = "", line: str = "{}") -> Ended:
    (folder / "metrics.jsonl").write_text(line)
    return Ended(run=Run(name="one"), code=code, output=output, base=folder, folder=folder, seconds=1.0)


def test_an_effect_that_is_not_seen_fails_with_what_was_seen(tmp_path):
    row = Row("metric batch/episodes", "", "one", always("batch/episodes", 8))
    assert effect_of(_ended(tmp_path, line='{"batch/episodes": 8.0}'), row) == ("batch/episodes: 8", True)
    assert effect_of(_ended(tmp_path, line='{"batch/episodes": 7.0}'), row) == ("batch/episodes: 7", False)
    assert effect_of(_ended(tmp_path), row) == ("batch/episodes is in no line of metrics.jsonl", False)
    assert effect_of(_ended(tmp_path, line="no JSON"), row)[1] is False


def test_a_run_that_ended_otherwise_than_it_should_fails_its_rows(tmp_path):
    ended = _ended(tmp_path, code=1, output="a line\nerror: it broke\n")
    row = Row("run.name", "", "one", lambda _: "fine")
    assert effect_of(ended, row) == ("the run ended with code 1, not 0: error: it broke", False)


def test_a_refusal_is_one_line(tmp_path):
    row = Row("refused", "", "one", refused("learner.lr", "got"))
    assert effect_of(_ended(tmp_path, output="learner.lr must be a number, got x\n"), row)[1]
    assert not effect_of(_ended(tmp_path, output="learner.lr must be a number, got x\nmore\n"), row)[1]
    assert not effect_of(_ended(tmp_path, output="something else\n"), row)[1]


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.long
@pytest.mark.parametrize("model", ["tiny", "smollm2"])
def test_a_shared_run_and_refusals_show_their_rows(tmp_path, model, request):
    """In a process of its own: it forks, and must have no threads."""
    path, names = tmp_path / "matrix.json", ["prompts", "wandb", "mlflow"]
    command = [sys.executable, "-m", "tests.matrix", "--json", str(path)]
    if model == "smollm2":
        names = ["prompts", "recipe-grpo"]
        command += ["--model", str(request.getfixturevalue("smollm2"))]
    done = subprocess.run(
        [*command, "--only", *names], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=2 * PATIENCE_S,
    )  # fmt: skip
    report = json.loads(path.read_text()) if path.exists() else {}
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert report.get("failed") == 0 == done.returncode, "\n".join(failed) or done.stdout[-8000:]
    assert {row["run"] for row in report["table"]} == set(names) and report["rows"] > 30
