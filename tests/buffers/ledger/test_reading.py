"""Rules of reading a ledger beside its owner: nothing changes, the index says what the tables say, branches are training rows."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from buffers.ledger.batches import group_rows, read_rounds
from buffers.ledger.ledger import Ledger
from buffers.ledger.reading import round_causes, views
from buffers.ledger.reading.branches import branches_of, window_of
from buffers.ledger.reading.episode_filter import EpisodeFilter, FilterError, ordered, search
from buffers.ledger.reading.episode_index import EpisodeIndex
from buffers.ledger.reading.reader import LedgerReader, LedgerUnreadable, counts, trained_steps
from buffers.records import Position
from mocked_server.conversation.branch_causes import EXPECTED, BranchCause
from tests.learner.page.page_parts import fill, make_run, open_group, train
from tests.support.buffer_parts import make_ready


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs"))


def index_of(reader: LedgerReader) -> EpisodeIndex:
    index = EpisodeIndex()
    with reader.read() as db:
        assert index.refresh(db)
        while index.read_agents(db):
            pass
        assert round_causes.look(db, index, limit=100) == 1.0
    return index


def found(index: EpisodeIndex, reader: LedgerReader, **wanted: object) -> list[str]:
    with reader.read() as db:
        places = search(index, EpisodeFilter(**wanted), order="oldest", limit=100, cursor=None).places  # type: ignore[arg-type]
        return [one.episode_id for one in views.episodes_at(db, places)]


def test_a_reader_changes_no_byte_and_can_write_nothing(run):
    def digest() -> dict[str, str]:
        files = [file for file in run.rglob("*") if file.is_file() and not file.name.endswith("-shm")]
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.stat().st_size}

    before = digest()
    reader = LedgerReader(run / "ledger.sqlite")
    index_of(reader)
    with pytest.raises(LedgerUnreadable, match="readonly"), reader.read() as db:
        db.execute("DELETE FROM episode")
    reader.close()
    assert digest() == before


def test_the_owner_writes_while_a_reader_is_in_the_middle_of_a_read(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        make_ready(ledger, task=1)
        reader = LedgerReader(tmp_path / "ledger.sqlite")
        before = reader.data_version()
        with reader.read() as db:
            seen = counts(db)["episodes/scored"]
            make_ready(ledger, task=2)
            assert counts(db)["episodes/scored"] == seen == 1
        with reader.read() as db:
            assert counts(db)["episodes/scored"] == 2
        assert reader.data_version() != before
        reader.close()


def test_what_is_no_ledger_says_so(tmp_path):
    with pytest.raises(LedgerUnreadable, match="must be a file that can be read"):
        LedgerReader(tmp_path / "none.sqlite")
    (tmp_path / "text.sqlite").write_text("not a database, but long enough for a header" * 10)
    with pytest.raises(LedgerUnreadable, match="must be a ledger file"):
        LedgerReader(tmp_path / "text.sqlite")


def test_the_index_finds_what_the_tables_hold(run):
    reader = LedgerReader(run / "ledger.sqlite")
    index = index_of(reader)
    assert found(index, reader, steps=(1, 1)) == ["1-0-0", "1-1-0"]
    assert found(index, reader, steps=(1, 2), score=(0.75, None)) == ["1-0-0", "2-1-0"]
    assert found(index, reader, score=(0.0, 0.0)) == ["1-1-0", "2-0-0", "4-0-0"]
    assert found(index, reader, states=("failed",)) == found(index, reader, untrained=True) == ["3-0-0", "3-1-0"]
    assert found(index, reader, reason="deadline") == ["3-0-0"] and found(index, reader, reason="none such") == []
    assert found(index, reader, group_states=("open",)) == ["5-0-0", "5-1-0"]
    assert found(index, reader, agent="walker") == ["2-0-0", "2-1-0"] and found(index, reader, agent="x") == []
    assert found(index, reader, text="walk-4") == ["4-0-0", "4-1-0"] and found(index, reader, text="4-1") == ["4-1-0"]
    assert found(index, reader, task="walk-3") == ["3-0-0", "3-1-0"] == found(index, reader, group=3)
    bit = 1 << round_causes.CAUSES.index("history_edited")
    assert found(index, reader, causes=bit) == found(index, reader, causes=round_causes.ANY_BREAK) == ["1-0-0"]
    assert found(index, reader, tokens=(9, None), rounds=(3, 3)) == ["1-0-0"]
    assert index.episodes["cut"].nonzero()[0].tolist() == [1]
    with pytest.raises(FilterError, match=r"state must be of pending, .*, got 'gone'"):
        found(index, reader, states=("gone",))
    reader.close()


@pytest.mark.parametrize("order", ["newest", "oldest", "score", "-score", "tokens", "-tokens", "rounds", "-rounds"])
def test_a_cursor_goes_through_all_once_in_order(run, order):
    reader = LedgerReader(run / "ledger.sqlite")
    index = index_of(reader)
    walked: list[int] = []
    cursor, totals = None, set()
    while True:
        part = search(index, EpisodeFilter(), order=order, limit=3, cursor=cursor)
        walked += part.places
        totals.add(part.total)
        if (cursor := part.next) is None:
            break
    assert walked == ordered(index, EpisodeFilter(), order=order)[0].tolist() and len(set(walked)) == 10
    assert totals == {10}
    with pytest.raises(FilterError, match="cursor must be that of an answer before"):
        search(index, EpisodeFilter(), order=order, limit=3, cursor="1.0")
    reader.close()


def test_the_index_follows_a_ledger_that_is_written_and_goes_back(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        fill(ledger)
        reader, index = LedgerReader(tmp_path / "ledger.sqlite"), EpisodeIndex()
        with reader.read() as db:
            index.refresh(db)
            assert not index.refresh(db) or not index.groups["step"][4] > 0
        assert found(index, reader, steps=(1, 9)) == ["1-0-0", "1-1-0", "2-0-0", "2-1-0"]
        train(ledger, step=3)  # group 4, which was ready
        new = open_group(ledger, 6, version=3)
        ledger.notify_score("5-0-0", 0.125).result()
        with reader.read() as db:
            assert index.refresh(db) and trained_steps(db) == (3, 1)
        assert found(index, reader, steps=(3, 3)) == ["4-0-0", "4-1-0"]
        assert found(index, reader, score=(0.125, 0.125)) == ["5-0-0"] and found(index, reader, group=6) == new
        here = ledger.position().result()
        ledger.restore(Position(run_id=here.run_id, lineage=here.lineage, step=1)).result()
        with reader.read() as db:
            assert index.refresh(db) and trained_steps(db) == (1, 2)
        assert found(index, reader, steps=(1, 9)) == ["1-0-0", "1-1-0"]
        assert found(index, reader, group_states=("ready",)) == ["2-0-0", "2-1-0", "4-0-0", "4-1-0"]
        reader.close()


def test_a_branch_has_the_ids_and_the_mask_of_its_training_row_in_any_window(run):
    reader = LedgerReader(run / "ledger.sqlite")
    seen = 0
    with reader.read() as db:
        for group_id in (1, 2, 4):
            rows: dict[str, list] = {}
            for row in group_rows(db, group_id=group_id):
                rows.setdefault(row.episode_id, []).append(row)
            for episode_id, expected in rows.items():
                branches = branches_of(read_rounds(db, episode_id=episode_id))
                for row, branch in zip(expected, [one for one in branches if one.fresh], strict=True):
                    assert branch.num_tokens == row.num_tokens and branch.num_trained == row.num_trained
                    for start in (0, 5, row.num_tokens - 3):
                        window = window_of(branch, start=start, count=row.num_tokens // 2)
                        end = start + len(window.ids)
                        assert np.array_equal(window.ids, row.ids[start:end])
                        assert np.array_equal(window.mask, row.mask[start:end])
                        own = window.mask.astype(bool)
                        assert np.array_equal(window.logprob[own], row.logprobs[start:end][own])
                        assert np.array_equal(window.version[own], row.versions[start:end][own])
                        assert np.array_equal(window.round_index[own], row.rounds[start:end][own])
                        seen += 1
    reader.close()
    assert seen == 7 * 3


def test_an_aborted_round_is_a_branch_that_trains_nothing(run):
    reader = LedgerReader(run / "ledger.sqlite")
    with reader.read() as db:
        branches = branches_of(read_rounds(db, episode_id="1-0-0"))
    reader.close()
    assert [(one.leaf, one.aborted, sorted(one.fresh)) for one in branches] == [
        (1, False, [0, 1]),
        (2, False, [2]),
        (3, True, []),
    ]
    window = window_of(branches[2], start=0, count=10_000)
    assert window.mask.sum() == 0 and window.sampled.sum() > 4 and (window.order == -1).all()


def test_causes_are_the_servers_and_second_rounds_are_named_by_its_rule():
    assert set(round_causes.CAUSES) == {cause.value for cause in BranchCause}
    assert set(round_causes.MEANT) == {cause.value for cause in EXPECTED}
    one, two = b"1" * 64, b"2" * 64
    assert round_causes.causes_of([(0, None, "stop", one), (1, 0, "stop", two)]) == {}
    assert round_causes.causes_of([(0, None, "stop", one), (1, None, "stop", one)]) == {1: "resampled"}
    assert round_causes.causes_of([(0, None, "stop", one), (1, None, "stop", two)]) == {1: "new_conversation"}
    assert round_causes.causes_of([(0, None, "stop", b""), (1, None, "stop", b"")]) == {1: "prompt_differs"}
    three = [(0, None, "stop", one), (1, 0, "stop", two), (2, 0, "stop", b"3" * 64)]
    assert round_causes.causes_of(three) == {2: "forked"}
    assert round_causes.causes_of([(0, None, "abort", one), (1, None, "stop", one)]) == {}
    assert round_causes.causes_of([(0, None, "stop", one + b"retokenized")]) == {0: "retokenized"}


def test_a_ledger_that_was_replaced_is_known_to_be(tmp_path):
    path = tmp_path / "ledger.sqlite"
    Ledger(path).close()
    reader = LedgerReader(path)
    assert not reader.is_replaced
    path.rename(tmp_path / "old.sqlite")
    assert reader.is_replaced
    Ledger(path).close()
    assert reader.is_replaced
    reader.close()
