"""Rules of `understudy why`: runs in every state are read, nothing of them is changed, and what is no run is named."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from inspect import getdoc
from pathlib import Path

import pytest

from buffers.errors import UnderstudyError
from buffers.ledger.ledger import Ledger
from learner.diagnosis.diagnose import RULES, diagnose, main
from tests.learner.diagnosis.recorded_run import RecordedRun, group, groups
from tests.support.buffer_parts import open_running

ROOT = Path(__file__).parents[3]
MIXED = [0.0, 1.0, 0.0, 1.0]


def files(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


def test_it_prints_the_worst_first_with_remedies_of_several_runs_and_writes_json(tmp_path, capsys):
    good = RecordedRun(tmp_path / "good").steps().ledger(groups(*[MIXED] * 5)).summary()
    still = (
        RecordedRun(tmp_path / "still", "learner.lr=0").steps({"time/save_s": 1.0}, rises=False).summary(stopped=True)
    )
    path = tmp_path / "why.json"
    assert main([str(good.folder), str(still.folder), "--json", str(path)]) == 0
    shown = capsys.readouterr().out
    assert f"{good.folder}: finished, 12 of 40 steps, reward 0.255 in the first ones, 0.691 in the last ones" in shown
    assert f"{still.folder}: stopped, 12 of 40 steps" in shown
    assert re.findall(r"^\d\. (.*?) \[(\w+)\]", shown, flags=re.M) == [
        ("note", "healthy"), ("stops learning", "no_rate"), ("costs time or data", "long_saving"),
    ]  # fmt: skip
    assert "   remedy: learner.lr=1e-6 for" in shown
    first, second = json.loads(path.read_text())
    assert (first["state"], first["steps"], second["state"]) == ("finished", 12, "stopped")
    assert [set(finding) for finding in second["findings"]] == [
        {"rule", "severity", "sentence", "figure", "measure", "remedy"}
    ] * 2
    assert second["findings"][0]["severity"] == "stops"


def test_of_a_run_that_ended_not_a_byte_is_changed_and_no_file_is_made(tmp_path):
    run = RecordedRun(tmp_path).steps().ledger(groups(*[MIXED] * 5)).summary()
    before = files(run.folder)
    assert [finding.rule for finding in diagnose(run.folder)] == ["healthy"]
    assert files(run.folder) == before


def test_a_killed_run_is_read_with_what_it_had_written(tmp_path, capsys):
    run = RecordedRun(tmp_path / "lives").steps(number=11)
    with (run.folder / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 12, "reward/me')
    with Ledger(run.folder / "ledger.sqlite") as ledger:
        group(ledger, [0.5] * 16, task=0)
        group(ledger, ["deadline"], task=1)
        killed = shutil.copytree(
            run.folder, tmp_path / "killed"
        )  # what a process that dies leaves: its log is not merged
    kept = ("ledger.sqlite", "ledger.sqlite-wal", "metrics.jsonl")
    before = files(killed)
    assert main([str(killed)]) == 0
    shown = capsys.readouterr().out
    assert f"{killed}: killed, 11 of 40 steps" in shown and "1 episode (6 % of the attempts) failed" in shown
    after = files(killed)
    assert [after[name] for name in kept] == [before[name] for name in kept] and before["ledger.sqlite-wal"]


def test_a_run_under_way_is_read_beside_its_writer(tmp_path, capsys):
    run = RecordedRun(tmp_path).steps(number=3).summary(error="an earlier end")
    with Ledger(run.folder / "ledger.sqlite") as ledger:
        groups(*[MIXED] * 5)(ledger)
        assert main([str(run.folder)]) == 0
        assert "under way, 3 of 40 steps" in (shown := capsys.readouterr().out) and "ended_with_error" not in shown
        group(ledger, MIXED, task=7)
        assert ledger.counts()["episodes/scored"] == 24
    assert main([str(run.folder)]) == 0
    assert "ended with an error, 3 of 40 steps" in (shown := capsys.readouterr().out) and "ended_with_error" in shown


def test_episodes_that_call_no_model_are_seen_while_they_run(tmp_path):
    run = RecordedRun(tmp_path)
    with Ledger(run.folder / "ledger.sqlite") as ledger:
        open_running(ledger, task=0, group_size=3)
        (found,) = diagnose(run.folder)
    assert found.rule == "no_step" and "3 run, none of them with a finished model call" in found.sentence


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("config.yaml", None, "RUN must be a run's folder"),
        ("config.yaml", "learner: {lrr: 1}", "must be a configuration of this release"),
        ("metrics.jsonl", "{\n", "must hold a JSON object on each line"),
        ("summary.json", "{", "must hold one JSON object"),
        ("ledger.sqlite", "x" * 20000, "must be a ledger file"),
    ],
)
def test_what_is_no_run_is_named(tmp_path, capsys, name, text, told):
    run = RecordedRun(tmp_path).steps()
    (run.folder / name).unlink(missing_ok=True)
    if text is not None:
        (run.folder / name).write_text(text)
    with pytest.raises(UnderstudyError, match=re.escape(told)):
        diagnose(run.folder)
    assert main([str(run.folder)]) == 2
    assert told in capsys.readouterr().err


def test_the_page_on_diagnosis_says_what_the_rules_say():
    page = (ROOT / "docs/diagnosis.md").read_text(encoding="utf-8")
    wanted = {rule.name: " ".join((getdoc(rule.observe) or "").split()) for rule in RULES}
    assert dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, flags=re.M)) == wanted


def test_a_page_may_show_findings_without_torch_and_vllm():
    code = (
        "import sys, learner.diagnosis.diagnose, learner.diagnosis.diagnose; "
        "print([name for name in ('torch', 'vllm', 'ray', 'pyarrow', 'matplotlib') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "[]\n"
