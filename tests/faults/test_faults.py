"""The short tier of the fault tests: the same machinery as `make faults`, a few kills of each kind. And cuts of the power."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from buffers.ledger.doctor import findings
from buffers.ledger.ledger import Ledger
from buffers.ledger.schema import read_database
from tests.faults.ledger_faults import Log, check, ledger_faults
from tests.faults.server_faults import server_faults
from tests.support.buffer_parts import make_round, open_running

pytestmark = pytest.mark.slow


def test_a_ledger_whose_owner_is_killed_again_and_again_loses_nothing(tmp_path: Path) -> None:
    log = ledger_faults(25, seed=1, folder=tmp_path)
    assert log.kills == 25 and log.restores > 0 and len(log.scores) > 100 and len(log.steps) > 10


def test_agents_play_on_through_kills_of_their_server_and_in_the_place_of_killed_ones(tmp_path: Path) -> None:
    log = server_faults(12, seed=1, folder=tmp_path)
    assert log.kills == 12 and log.agents == 4 and log.retried > 0 and len(log.scores) >= 12 and log.steps


def test_the_check_itself_finds_a_score_that_was_lost(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.sqlite"):
        pass
    with pytest.raises(AssertionError, match="acknowledged and lost"):
        check(tmp_path / "ledger.sqlite", log=Log(scores={"1-0-0": 1.0}))
    with pytest.raises(AssertionError, match="steps acknowledged and lost"):
        check(tmp_path / "ledger.sqlite", log=Log(steps=[(1, 1)]))


def test_what_was_acknowledged_survives_a_cut_of_the_power(tmp_path: Path) -> None:
    """Whatever the disk did with what came after the last acknowledgement: lost, cut in the middle, or garbage."""
    path, wal = tmp_path / "ledger.sqlite", tmp_path / "ledger.sqlite-wal"
    sizes: list[int] = []
    with Ledger(path) as ledger:
        for number in range(25):  # before the log is folded into the file
            (episode,) = open_running(ledger, task=number)
            ledger.put_round(make_round(episode.episode_id))
            ledger.notify_score(episode.episode_id, float(number)).result()
            sizes.append(wal.stat().st_size)
        stored, log = path.read_bytes(), wal.read_bytes()
    assert sizes == sorted(set(sizes)), "each acknowledgement was in the log before it was given"
    chance = random.Random(0)
    for cut in range(120):
        acknowledged = chance.randrange(len(sizes) - 1)
        end = chance.randrange(sizes[acknowledged], sizes[acknowledged + 1])
        copy = tmp_path / f"cut-{cut}.sqlite"
        copy.write_bytes(stored)
        copy.with_name(f"{copy.name}-wal").write_bytes(log[:end] + chance.randbytes(chance.randrange(3000)))
        db = read_database(copy)
        scores = [score for (score,) in db.execute("SELECT score FROM episode WHERE score IS NOT NULL ORDER BY seq")]
        assert scores[: acknowledged + 1] == [float(n) for n in range(acknowledged + 1)] and findings(db) == []
        db.close()
        for name in (copy.name, f"{copy.name}-wal", f"{copy.name}-shm"):
            (tmp_path / name).unlink(missing_ok=True)
