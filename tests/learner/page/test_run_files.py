"""Rules of reading what a run leaves: each line once, figures as columns, and whether the run lives."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from pathlib import Path

import psutil
import pytest

from learner.page.metric_columns import MetricColumns, meanings
from learner.page.reports import without_secrets
from learner.page.run_set import RunSet, find_runs
from learner.page.run_view import NoRun, RunView, machine_history, state_of, waits_of
from learner.reporting import run_record
from learner.reporting.run_record import LineFile, MachineLog, began_s
from tests.learner.page.page_parts import machine_line, make_run


def test_each_whole_line_is_given_once_and_all_again_after_a_replacement(tmp_path):
    path = tmp_path / "lines.jsonl"
    lines = LineFile(path)
    assert lines.poll().lines == []
    path.write_text('{"a": 1}\nno json\n[1]\n{"b": NaN}\n{"c"')
    assert lines.poll().lines == [{"a": 1}, {"b": None}]
    with path.open("a") as sink:
        sink.write(": 2}\n")
    assert lines.poll().lines == [{"c": 2}] and lines.poll().lines == []
    path.with_name("new").write_text('{"d": 3}\n')
    os.replace(path.with_name("new"), path)
    again = lines.poll()
    assert again.again and again.lines == [{"d": 3}]
    path.write_text("")
    assert lines.poll().again


def test_lines_of_one_step_are_one_row_and_unknown_values_are_none():
    columns = MetricColumns()
    for line in (
        {"step": 1, "a": 1.0},
        {"step": 1, "b": 2.0},
        {"step": "x", "a": 9.0},
        {"step": 2, "a": True},
        {"no": 1},
    ):
        columns.add(line)
    for step in range(3, 203):
        columns.add({"step": step, "c": float(step)})
    points = columns.points(["a", "b", "c"], first=None, last=2, most=10)
    assert (points.step, points.columns["a"], points.columns["b"]) == ([1, 2], [1.0, 1.0], [2.0, None])
    few = columns.points(["c"], first=3, last=None, most=4)
    assert (few.bucket, few.step) == (50, [52, 102, 152, 202])
    assert (few.columns["c"][0], few.low["c"][0], few.high["c"][0]) == (27.5, 3.0, 52.0)
    assert columns.last("c") == 202.0 and columns.last("none") is None and columns.last_step == 202


@pytest.mark.parametrize("jump_s", [0.0, 86_400.0, -3_600.0])
def test_a_run_lives_while_its_process_runs_wherever_clocks_jump_or_while_it_writes_elsewhere(jump_s: float) -> None:
    now = time.time()
    written = now + jump_s
    here = {"at": written, "pid": os.getpid(), "host": socket.gethostname(), "began": began_s(os.getpid())}
    assert state_of(None, here, seen_at=written, now=now) == "live"
    assert state_of(None, {**here, "began": 1.0}, seen_at=written, now=now) == "killed"
    assert state_of(None, {**here, "pid": None}, seen_at=written, now=now) == "killed"
    elsewhere = {**here, "host": "other"}
    assert state_of(None, elsewhere, seen_at=written, now=now) == ("killed" if jump_s else "live")
    assert state_of(None, None, seen_at=now - 1, now=now) == "live"
    assert state_of({"error": None, "stopped": False}, None, seen_at=now, now=now) == "finished"
    assert state_of({"error": None, "stopped": True}, None, seen_at=now, now=now) == "stopped"
    assert state_of({"error": "no"}, None, seen_at=now, now=now) == "failed"
    assert state_of(None, None, seen_at=None, now=now) == "unknown"


def test_the_start_of_a_process_is_no_matter_of_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is set moves the boot time that the kernel tells of, and with it all start times."""
    before = began_s(os.getpid())
    told = psutil.boot_time()
    monkeypatch.setattr("psutil._psplatform.boot_time", lambda: told + 86_400.0)
    assert psutil.Process().create_time() > time.time() + 80_000 and began_s(os.getpid()) == pytest.approx(before)


@pytest.mark.parametrize("jump_s", [0.0, -3_600.0])
def test_a_summary_is_the_end_whatever_the_clock_said_when_the_run_began(tmp_path: Path, jump_s: float) -> None:
    run = make_run(tmp_path)
    assert RunView("seen", run).summary is None
    (run / "summary.json").write_text(json.dumps({"error": None}))
    earlier = (run / "config.yaml").stat().st_mtime + jump_s
    os.utime(run / "summary.json", (earlier, earlier))
    assert RunView("seen", run).summary == {"error": None}


def test_runs_are_found_by_name_or_by_their_folder(tmp_path):
    run = make_run(tmp_path / "one")
    other = make_run(tmp_path / "two")
    assert find_runs([run, run, tmp_path / "one"]) == {"seen": run}
    assert list(find_runs([run, other])) == ["seen", "seen~2"]
    with pytest.raises(NoRun, match="RUN must be a run's folder, or a folder of runs"):
        find_runs([tmp_path / "one" / "seen" / "model"])


def test_a_run_is_listed_with_its_stage_of_sft_which_may_begin_later(tmp_path: Path) -> None:
    run, other = make_run(tmp_path / "one"), make_run(tmp_path / "two")
    now = [0.0]
    runs = RunSet([run], meanings={}, clock=lambda: now[0])
    assert runs.ids() == ["seen"]
    for folder in (run / "sft", other / "sft", tmp_path / "sft"):
        folder.mkdir()
        shutil.copy(run / "config.yaml", folder)
    (run / "sft" / "metrics.jsonl").write_text('{"step": 1, "sft/loss": 6.5}\n')
    now[0] += 10.0
    assert runs.ids() == ["seen", "seen-sft"]
    with runs.view("seen-sft").metrics() as metrics:
        assert metrics.last("sft/loss") == 6.5
    runs.close()
    assert find_runs([run.parent, other, tmp_path / "sft"]) == {
        "seen": run, "seen-sft": run / "sft", "seen~2": other, "seen-sft~2": other / "sft", "sft": tmp_path / "sft",
    }  # fmt: skip


def test_values_of_secret_names_are_left_out_and_others_stay():
    given = {"api_key": "x", "tokens": 5, "max_tokens": 4, "inner": [{"password": "y", "token_budget": 3}], "key": ""}
    assert without_secrets(given) == {
        "api_key": "(left out)", "tokens": "(left out)", "max_tokens": 4,
        "inner": [{"password": "(left out)", "token_budget": 3}], "key": "",
    }  # fmt: skip


def test_each_part_that_waits_is_named_with_what_it_waits_for():
    def pairs(**more: object) -> set[tuple[str, str]]:
        found = waits_of(machine_line(**more), groups_per_step=8, max_policy_lag=1)
        return {(each["who"], each["for"]) for each in found}

    idle = {"slots": 4, "running": 1, "agents_waiting": 0}
    assert ("tasks", "learner") in pairs(tasks={"admissible_groups": 0}, pool={**idle, "agents_waiting": 3})
    assert ("agents", "learner") in pairs(tasks={"admissible_groups": 0}, pool={**idle, "agents_waiting": 3})
    assert ("tasks", "agents") in pairs(pool=idle) and ("tasks", "agents") not in pairs()
    assert ("engines", "prompts") in pairs(engines=[{"name": "e0", "is_up": True}], prompts_waiting=0, generating=0)
    assert ("prompts", "engines") in pairs(engines=[{"name": "e0", "is_up": False}], prompts_waiting=0, generating=0)
    some = {"tasks": {"admissible_groups": 0}, "pool": {**idle, "agents_waiting": 3}}
    for twice in ({**some, "phase": "saving"}, {"engines": [{"name": "e0", "is_up": False}], "prompts_waiting": 3}):
        found = [
            (each["who"], each["for"]) for each in waits_of(machine_line(**twice), groups_per_step=8, max_policy_lag=1)
        ]
        assert len(found) == len(set(found)), "each wait is said once"
    assert ("learner", "groups") in pairs() and ("learner", "groups") not in pairs(learner="updating")
    assert waits_of({}, groups_per_step=8, max_policy_lag=1) == []
    assert machine_history([{"at": "x"}, {}], since=0.0, points=5)["at"] == []


def test_the_machine_log_stays_small_and_reaches_back_to_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(run_record, "MOST_LOG_BYTES", 20_000)
    times = iter(range(100_000))
    log = MachineLog(tmp_path, clock=lambda: float(next(times)))
    for step in range(1000):
        log.write({"step": step})
    lines = [json.loads(line) for line in (tmp_path / "machine.jsonl").read_text().splitlines()]
    assert (tmp_path / "machine.jsonl").stat().st_size <= 20_100
    assert lines[0]["step"] == 0 and lines[-1]["step"] == 999 and lines[-1]["pid"] == os.getpid()
    assert [line["at"] for line in lines] == sorted({line["at"] for line in lines})
    assert [line["step"] for line in lines[-20:]] == list(range(980, 1000))


def test_a_machine_log_that_cannot_be_written_ends_nothing(tmp_path, caplog):
    log = MachineLog(tmp_path / "gone")
    log.write({})
    log.write({})
    assert len([record for record in caplog.records if "cannot be written" in record.message]) == 1


def test_a_figures_meaning_is_that_of_the_documents(tmp_path):
    (tmp_path / "metrics.md").write_text(
        "| name | unit | meaning | healthy |\n|---|---|---|---|\n"
        "| `reward/min`, `reward/max` | score | lowest and `highest` | within range |\n| `batch/rows` | count | rows | |\n"
    )
    found = meanings(tmp_path / "metrics.md")
    assert found["reward/max"] == found["reward/min"] == "lowest and highest (score); healthy: within range"
    assert found["batch/rows"] == "rows (count)" and meanings(tmp_path / "none.md") == {}
    assert meanings()["reward/mean"].startswith("mean score of the batch's episodes (score)")


def test_findings_of_a_folder_without_a_run_are_none(tmp_path: Path) -> None:
    found = RunView("none", tmp_path).findings()
    assert found["findings"] == [] and not found["available"] and "RUN must be a run's folder" in found["why"]
