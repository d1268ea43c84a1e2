"""The operator's tools: they see one commit, while the ledger's owner goes on."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from buffers.ledger.cli import main
from buffers.ledger.ledger import Ledger
from buffers.records import ScoreDetail
from tests.support.buffer_parts import make_ready, make_round, open_running

ROOT = Path(__file__).parents[3]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A run's folder whose ledger is in use."""
    folder = tmp_path / "run"
    folder.mkdir()
    with Ledger(folder / "ledger.sqlite") as ledger:
        make_ready(ledger, task=0, group_size=2)
        batch = ledger.claim(1, min_version=0).result()
        assert batch is not None
        ledger.commit_step(batch.lease_id, step=1, version=3).result()
        make_ready(ledger, task=1, group_size=2, version=1)
        (episode,) = open_running(ledger, task=2, version=3)
        ledger.put_round(make_round(episode.episode_id, version=3))
        ledger.put_round(make_round(episode.episode_id, index=1, tail=(4,), version=3))
        ledger.notify_score(episode.episode_id, 0.5, detail=ScoreDetail(branch=1)).result()
        ledger.notify_score(episode.episode_id, 2.0).result()
        open_running(ledger, task=3)
        yield folder


def tool(*arguments: object) -> int:
    return main([str(argument) for argument in arguments], open_ledger=Ledger)


def test_inspect_counts_states_with_their_age_and_staleness(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool("inspect", run) == 0
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert lines["ready"][1:3] == ["2", "3"] and lines["ready"][-1] == "2"  # version 3, sampled at 1
    assert lines["trained"][1:3] == ["1", "2"] and lines["running"][1] == "1" and lines["scored"][1:3] == ["5", "18"]
    assert lines["open"][3:] == ["0", "s"]


def test_inspect_shows_an_episode_as_text_and_tokens(
    run: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool("inspect", run, "--episode", "3-0-0", "--tokenizer", tiny_model) == 0
    shown = capsys.readouterr().out
    assert "episode 3-0-0: scored, score 2.0" in shown and "sampled [7, 8, 9]" in shown
    assert "round 1, a root, stop, policy versions [3]" in shown and "'value': 0.5" in shown


@pytest.mark.parametrize("named", ["whole", "relative"])
def test_inspect_finds_the_tokenizer_of_a_run_without_a_model_of_its_own(
    run: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str], named: str
) -> None:
    """An evaluation has none, nor has a run that has not saved one; its path may be as seen from where the run was started."""
    (run.parent / "weights").symlink_to(tiny_model)
    path = tiny_model if named == "whole" else "weights"
    (run / "config.yaml").write_text(f"model: {{path: {path}}}\n")
    assert tool("inspect", run, "--episode", "3-0-0") == 0
    assert "sampled [7, 8, 9]" in capsys.readouterr().out
    (run / "config.yaml").write_text("model: [\n")
    assert tool("inspect", run, "--episode", "3-0-0") == 2
    assert "name its folder with --tokenizer" in capsys.readouterr().err


def test_export_writes_every_row_as_a_batch_would_hold_it(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.parquet"
    assert tool("export", run, "--parquet", out) == 0
    rows = pq.read_table(out).to_pylist()
    assert [(row["episode_id"], row["state"], row["score"], row["branch_score"]) for row in rows] == [
        ("1-0-0", "trained", 1.0, None),
        ("1-1-0", "trained", 1.0, None),
        ("2-0-0", "ready", 1.0, None),
        ("2-1-0", "ready", 1.0, None),
        ("3-0-0", "ready", 2.0, None),
        ("3-0-0", "ready", 2.0, 0.5),
    ]
    assert rows[0]["ids"] == [1, 2, 7, 8, 9] and rows[0]["mask"] == [0, 0, 1, 1, 1] and rows[4]["loss_weight"] == 0.5


def test_a_backup_of_a_ledger_in_use_is_a_ledger(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.sqlite"
    assert tool("backup", run, "--to", copy) == 0
    assert tool("doctor", copy) == 0
    with Ledger(copy) as ledger:
        assert ledger.counts()["groups/ready"] == 2 and ledger.imbalance() == 0
    assert tool("backup", run, "--to", tmp_path / "nowhere" / "copy.sqlite") == 2


def test_the_doctor_finds_what_is_wrong(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool("doctor", run) == 0
    damages = {
        "checksum: round 0 of episode 1-0-0": "UPDATE round SET body = "
        "CAST(substr(body, 1, 30) || x'ff' || substr(body, 32) AS BLOB) WHERE episode_id = '1-0-0'",
        "counts: rounds is 7, counted 6": "UPDATE counter SET n = n + 1 WHERE name = 'rounds'",
        "counts: a group counts other scored members": "UPDATE grp SET min_size = 1, num_lost = 1, num_scored = 1 "
        "WHERE group_id = 1",
        "counts: a group was trained more often": "DROP TRIGGER grp_trained; INSERT INTO lease VALUES (9, 'committed', 1); "
        "INSERT INTO step VALUES (9, 0, 2, 9, 4, 1); INSERT INTO trained VALUES (9, 1)",
        "counts: an episode's score is not the mean": "UPDATE episode SET score = 7 WHERE episode_id = '3-0-0'",
        "reference: row": "PRAGMA foreign_keys = OFF; UPDATE round SET episode_id = 'x' WHERE episode_id = '3-0-0'",
    }
    for number, (expected, damage) in enumerate(damages.items()):
        copy = tmp_path / f"copy{number}.sqlite"
        assert tool("backup", run, "--to", copy) == 0
        db = sqlite3.connect(copy)
        db.executescript(damage)
        db.close()
        capsys.readouterr()
        assert tool("doctor", copy) == 1
        assert expected in capsys.readouterr().out


def judge(task: object, answer: str) -> float:
    """Finds nothing good in the third task."""
    return 1.0 if getattr(task, "ground_truth", None) != 2 else -1.0


@pytest.mark.seconds
def test_rescoring_replays_episodes_and_revises_what_is_not_trained(
    run: Path, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy.sqlite"
    assert tool("backup", run, "--to", copy) == 0
    capsys.readouterr()
    arguments = ("--scorer", "tests.buffers.ledger.test_tools.judge", "--tokenizer", tiny_model)
    assert tool("rescore", run, *arguments) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(entry["episode_id"], entry["before"], entry["score"]) for entry in told] == [
        ("1-0-0", 1.0, 1.0),
        ("1-1-0", 1.0, 1.0),
        ("2-0-0", 1.0, 1.0),
        ("2-1-0", 1.0, 1.0),
        ("3-0-0", 2.0, -1.0),
    ]
    assert tool("rescore", run, *arguments, "--revise") == 2  # its owner has it open
    assert "no other process has open" in capsys.readouterr().err
    assert tool("rescore", copy, *arguments, "--revise") == 0
    with Ledger(copy) as ledger:
        batch = ledger.claim(2, min_version=0).result()
        assert batch is not None and [row.score for row in batch.rows] == [1.0, 1.0, -1.0, -1.0]


@pytest.mark.seconds
def test_what_is_no_ledger_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_bytes(b"no database at all, whatever one says " * 40)
    for run in (tmp_path, tmp_path / "nothing", tmp_path / "notes.txt"):
        done = subprocess.run(
            [sys.executable, "-m", "buffers.ledger", "inspect", str(run)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr


def test_episodes_that_match_are_listed_with_their_last_words(
    run: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        tool("episodes", run, "--tokenizer", tiny_model, "--where", "state=scored", "min_score=0.5", "--sort=-score")
        == 0
    )
    head, first, *_ = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["episode", "step", "version", "score"] and first.split()[:4] == ["3-0-0", "-", "3", "2"]
    assert tool("episodes", run, "--tokenizer", tiny_model, "--limit", "1", "--json") == 0
    shown = capsys.readouterr()
    line = json.loads(shown.out)
    assert {
        "episode_id",
        "state",
        "question",
        "answer",
        "score",
        "truth",
    } <= line.keys() and "more; --limit" in shown.err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--where", "sate=scored"], "--where must name one of step, task"),
        (["--where", "state=done"], "state must be of"),
        (["--where", "min_score=much"], "min_score must be a number, got 'much'"),
        (["--limit", "0"], "--limit must be at least 1"),
    ],
)
def test_what_no_episode_can_match_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str], words: list[str], named: str
) -> None:
    assert tool("episodes", run, *words) == 2
    assert named in capsys.readouterr().err
