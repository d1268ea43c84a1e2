"""What survives: reopening, kill -9, a second process, a foreign or damaged file."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from buffers.errors import EpisodeClosed, LeaseError, UnderstudyError
from buffers.ledger.doctor import findings
from buffers.ledger.ledger import Ledger
from buffers.ledger.schema import read_database
from tests.support.buffer_parts import make_ready, make_round, make_task, open_running, scored_by_group_state
from tests.support.patience import PATIENCE_S
from tests.support.processes.child_process import child_process

ROOT = Path(__file__).parents[3]


def test_reopening_keeps_what_was_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with Ledger(path) as ledger:
        make_ready(ledger, task=0, score=0.75)
        before = ledger.counts()
    with Ledger(path) as ledger:
        assert ledger.counts() == before
        batch = ledger.claim(1, min_version=0).result()
        assert batch is not None and batch.scores.tolist() == [0.75]
        assert batch.rows[0].ids.tolist() == [1, 2, 7, 8, 9]
        assert ledger.notify_score("1-0-0", 0.75).result() is False


def test_after_a_restart_a_lease_is_superseded_and_its_groups_are_ready_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with Ledger(path) as ledger:
        make_ready(ledger, task=0)
        first = ledger.claim(1, min_version=0).result()
        assert first is not None
    with Ledger(path) as ledger:
        assert ledger.counts()["groups/ready"] == 1
        with pytest.raises(LeaseError, match="superseded"):
            ledger.commit_step(first.lease_id, step=1, version=1).result()
        second = ledger.claim(1, min_version=0).result()
        assert second is not None and second.group_ids == first.group_ids and second.lease_id > first.lease_id
        assert ledger.commit_step(second.lease_id, step=1, version=1).result() == 1


def test_after_a_restart_interrupted_episodes_fail_and_are_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with Ledger(path) as ledger:
        scored, running = open_running(ledger, task=0, group_size=2)
        ledger.put_round(make_round(scored.episode_id))
        ledger.notify_score(scored.episode_id, 1.0)
        ledger.put_round(make_round(running.episode_id))
        ledger.adopt_episode("mine").result()
    with Ledger(path) as ledger:
        counts = ledger.counts()
        assert counts["failed/restart"] == 2 and counts["episodes/running"] == 0 and counts["scored/open"] == 1
        assert counts["evicted/failed"] == 1  # the adopted one: there is no task to try again
        with pytest.raises(EpisodeClosed, match="restart"):
            ledger.notify_score(running.episode_id, 1.0).result()
        (retry,) = ledger.start_pending(limit=5, version=0).result()
        assert retry.episode_id == "1-1-1" and retry.task == make_task(0)
        ledger.put_round(make_round(retry.episode_id))
        ledger.notify_score(retry.episode_id, 0.0)
        batch = ledger.claim(1, min_version=0).result()
        assert batch is not None and [row.episode_id for row in batch.rows] == ["1-0-0", "1-1-1"]


@pytest.mark.seconds
def test_an_acknowledged_score_survives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    acknowledged: dict[str, float] = {}
    for wanted in (1, 40, 120):  # acknowledgements to wait for before the kill
        command = [sys.executable, str(ROOT / "tests" / "faults" / "kill_writer.py"), str(path)]
        with child_process(command, env=os.environ | {"PYTHONPATH": str(ROOT)}) as process:
            assert process.stdout is not None
            for _ in range(wanted):
                episode_id, score = process.stdout.readline().split()
                acknowledged[episode_id] = float(score)
            os.kill(process.pid, signal.SIGKILL)
            for line in process.stdout:  # acknowledged before the kill, read after it
                if line.endswith("\n"):
                    episode_id, score = line.split()
                    acknowledged[episode_id] = float(score)
    assert len(acknowledged) >= 161
    with Ledger(path) as ledger:
        lost = [e for e, score in acknowledged.items() if ledger.notify_score(e, score).result() is not False]
        assert lost == []
        assert all(len(ledger.rounds(episode_id).result()) == 2 for episode_id in acknowledged)
        counts = ledger.counts()
        assert counts["groups/trained"] > 0
        assert counts["scored/trained"] == 2 * counts["groups/trained"]
        assert scored_by_group_state(ledger) == counts["episodes/scored"] >= len(acknowledged)
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert db.execute("PRAGMA foreign_key_check").fetchall() == []
        counted = db.execute("SELECT 'groups/' || state, count(*) FROM grp GROUP BY state").fetchall()
        assert all(counts[name] == n for name, n in counted)
    db.close()


@pytest.mark.seconds
def test_a_second_owner_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    code = (
        f"import sys; from pathlib import Path; from buffers.ledger.ledger import Ledger; Ledger(Path({str(path)!r}))"
    )
    with Ledger(path):
        second = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert second.returncode == 1
    assert "must be a ledger file that no other process has open" in second.stderr


def test_a_file_of_another_schema_version_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    Ledger(path).close()
    db = sqlite3.connect(path)
    db.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
    db.commit()
    db.close()
    with pytest.raises(UnderstudyError, match=r"ledger\.db must have schema version 9, got 99") as refusal:
        Ledger(path)
    assert "\n" not in str(refusal.value)


def test_a_file_that_is_no_ledger_is_refused_and_left_alone(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_bytes(b"not a database, whatever its name says " * 100)
    with pytest.raises(UnderstudyError, match=r"notes\.txt must be a ledger file"):
        Ledger(text)
    assert text.read_bytes() == b"not a database, whatever its name says " * 100
    other = tmp_path / "other.db"
    db = sqlite3.connect(other)
    db.execute("CREATE TABLE mine(x)")
    db.close()
    with pytest.raises(UnderstudyError, match="not a ledger"):
        Ledger(other)
    with pytest.raises(UnderstudyError, match="cannot be opened"):
        Ledger(tmp_path / "no such folder" / "ledger.db")


def test_a_damaged_round_is_named_and_never_trained(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with Ledger(path) as ledger:
        make_ready(ledger, task=0)
    db = sqlite3.connect(path)
    (body,) = db.execute("SELECT body FROM round").fetchone()
    db.execute("UPDATE round SET body = ?", (body[:-1] + bytes([body[-1] ^ 1]),))
    db.commit()
    db.close()
    with Ledger(path) as ledger:
        with pytest.raises(UnderstudyError, match=r"round 0 of episode 1-0-0: round body must have checksum"):
            ledger.claim(1, min_version=0).result()
        assert ledger.counts()["groups/ready"] == 1


FULL_DISK = """
import resource, sys
from pathlib import Path
from tests.support.buffer_parts import make_round, open_running
from buffers.errors import StorageFull
from buffers.ledger.ledger import Ledger

ledger = Ledger(Path(sys.argv[1]))
first, second = open_running(ledger, task=0, group_size=2)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, hard))  # no file may grow beyond: a full disk for this process
rounds = [
    ledger.put_round(make_round(first.episode_id, index=index, sampled=range(2000))) for index in range(200)
]
refused = None
while refused is None:  # each repeats the one before, until the disk is full
    refused = ledger.notify_score(second.episode_id, 0.5).exception()
    refused = refused if isinstance(refused, StorageFull) else None
assert ledger.is_full and "free space on its disk" in str(refused), refused
stored = ledger.counts()["rounds"]
assert stored == sum(future.done() for future in rounds) < 200, stored
asked = ledger.position()  # what is not sent again by its caller waits
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))  # space is back: no restart needed
for future in rounds:
    future.result(180)
assert asked.result(180).step == 0 and not ledger.is_full
ledger.put_round(make_round(second.episode_id)).result(180)
assert ledger.notify_score(second.episode_id, 0.5).result(180) is True
ledger.close()
"""


def test_a_full_disk_loses_nothing_and_all_goes_on_when_space_returns(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    python_path = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    child = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path)],
        env=os.environ | python_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert child.returncode == 0, child.stderr
    with closing(read_database(path)) as db:  # what the writer leaves behind is nothing that a reader refuses
        assert findings(db) == []
    with Ledger(path) as ledger:
        stored = ledger.rounds("1-0-0").result()
        assert [round_.round_index for round_ in stored] == list(range(200))
