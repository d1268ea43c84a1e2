"""Rules of reading a ledger beside its owner: nothing changes, lists say what the tables say, branches are training rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from buffers.ledger import branches
from buffers.ledger.batches import group_rows, read_rounds
from buffers.ledger.branches import branches_of, window_of
from buffers.ledger.episode_views import (
    NEWEST,
    EpisodeFilter,
    FilterError,
    episodes_at,
    keep,
    look_at,
    looked_share,
    ordered,
    read_agents,
    search,
    to_look_at,
)
from buffers.ledger.ledger import Ledger
from buffers.ledger.reader import LedgerReader, LedgerUnreadable, counts, trained_steps
from buffers.records import Position
from mocked_server.conversation.chat_history import EXPECTED, BranchCause
from tests.learner.page.page_parts import fill, make_run, memo, open_group, said, train
from tests.support.buffer_parts import make_ready


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def reader(run: Path) -> Iterator[LedgerReader]:
    """One that has looked at all episodes."""
    reader = LedgerReader(run / "ledger.sqlite")
    with reader.read() as db:
        while read_agents(db, limit=2):
            pass
        assert looked_share(db) == 0.0
        while places := to_look_at(db, before=NEWEST, limit=3):
            keep(db, look_at(db, places))
        assert looked_share(db) == 1.0
    yield reader
    reader.close()


def found(reader: LedgerReader, **wanted: object) -> list[str]:
    with reader.read() as db:
        some = search(db, EpisodeFilter(**wanted), order="oldest", limit=100, cursor=None)  # type: ignore[arg-type]
        return [one.episode_id for one in some.episodes]


def test_a_reader_changes_no_byte_and_can_write_nothing(run, reader):
    def digest() -> dict[str, str]:
        files = [file for file in run.rglob("*") if file.is_file() and not file.name.endswith("-shm")]
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.stat().st_size}

    before = digest()
    assert found(reader, text="walk")
    with pytest.raises(LedgerUnreadable, match="readonly"), reader.read() as db:
        db.execute("DELETE FROM episode")
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


def test_a_filter_finds_what_the_tables_hold(reader):
    assert found(reader, steps=(1, 1)) == ["1-0-0", "1-1-0"]
    assert found(reader, steps=(1, 2), score=(0.75, None)) == ["1-0-0", "2-1-0"]
    assert found(reader, score=(0.0, 0.0)) == ["1-1-0", "2-0-0", "4-0-0"]
    assert found(reader, states=("failed",)) == found(reader, untrained=True) == ["3-0-0", "3-1-0"]
    assert found(reader, reason="deadline") == ["3-0-0"] and found(reader, reason="none such") == []
    assert found(reader, group_states=("open",)) == ["5-0-0", "5-1-0"]
    assert found(reader, agent="walker") == ["2-0-0", "2-1-0"] and found(reader, agent="x") == []
    assert found(reader, text="walk-4") == ["4-0-0", "4-1-0"] and found(reader, text="4-1") == ["4-1-0"]
    assert found(reader, text="%") == found(reader, text="WALK") == [] and found(reader, text="4-") == [
        "4-0-0",
        "4-1-0",
    ]
    assert found(reader, task="walk-3") == ["3-0-0", "3-1-0"] == found(reader, group=3)
    bit = 1 << branches.CAUSES.index("history_edited")
    assert found(reader, causes=bit) == found(reader, causes=branches.ANY_BREAK) == ["1-0-0"]
    assert found(reader, tokens=(9, None), rounds=(3, 3)) == ["1-0-0"]
    with reader.read() as db:
        assert [one.seq for one in episodes_at(db, range(1, 11)) if one.cut] == [1]
    with pytest.raises(FilterError, match=r"state must be of pending, .*, got 'gone'"):
        found(reader, states=("gone",))


@pytest.mark.parametrize("order", ["newest", "oldest", "score", "-score", "tokens", "-tokens", "rounds", "-rounds"])
def test_a_cursor_goes_through_all_once_in_order(reader, order):
    walked: list[int] = []
    cursor, totals = None, set()
    with reader.read() as db:
        while True:
            part = search(db, EpisodeFilter(), order=order, limit=3, cursor=cursor)
            walked += [one.seq for one in part.episodes]
            totals.add(part.total)
            if (cursor := part.next) is None:
                break
        assert walked == ordered(db, EpisodeFilter(), order=order) and len(set(walked)) == 10
        assert totals == {10}
        for cursor in ("1.0", f"1.0_{2**63}", "1.0_" + "9" * 5000):
            with pytest.raises(FilterError, match="cursor must be that of an answer before"):
                search(db, EpisodeFilter(), order=order, limit=3, cursor=cursor)


def test_lists_follow_a_ledger_that_is_written_and_goes_back(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        fill(ledger)
        reader = LedgerReader(tmp_path / "ledger.sqlite")
        assert found(reader, steps=(1, 9)) == ["1-0-0", "1-1-0", "2-0-0", "2-1-0"]
        train(ledger, step=3)  # group 4, which was ready
        new = open_group(ledger, 6, version=3)
        ledger.notify_score("5-0-0", 0.125).result()
        with reader.read() as db:
            assert trained_steps(db) == (3, 1)
        assert found(reader, steps=(3, 3)) == ["4-0-0", "4-1-0"]
        assert found(reader, score=(0.125, 0.125)) == ["5-0-0"] and found(reader, group=6) == new
        here = ledger.position().result()
        ledger.restore(Position(run_id=here.run_id, lineage=here.lineage, step=1)).result()
        with reader.read() as db:
            assert trained_steps(db) == (1, 2)
        assert found(reader, steps=(1, 9)) == ["1-0-0", "1-1-0"]
        assert found(reader, group_states=("ready",)) == ["2-0-0", "2-1-0", "4-0-0", "4-1-0"]
        reader.close()


def test_an_episode_that_still_samples_is_looked_at_again(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        fill(ledger)
        reader = LedgerReader(tmp_path / "ledger.sqlite")

        def breaks() -> list[str]:
            with reader.read() as db:
                (one,) = search(db, EpisodeFilter(text="5-0"), order="newest", limit=1, cursor=None).episodes
                return one.breaks

        assert breaks() == []
        ledger.put_round(said("5-0-0", "again", "y", index=1, version=2, memo=memo(9, "retokenized"))).result()
        assert breaks() == ["retokenized"]
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
    assert set(branches.CAUSES) == {cause.value for cause in BranchCause}
    assert set(branches.MEANT) == {cause.value for cause in EXPECTED}
    one, two = b"1" * 64, b"2" * 64
    assert branches.causes_of([(0, None, "stop", one), (1, 0, "stop", two)]) == {}
    assert branches.causes_of([(0, None, "stop", one), (1, None, "stop", one)]) == {1: "resampled"}
    assert branches.causes_of([(0, None, "stop", one), (1, None, "stop", two)]) == {1: "new_conversation"}
    assert branches.causes_of([(0, None, "stop", b""), (1, None, "stop", b"")]) == {1: "prompt_differs"}
    three = [(0, None, "stop", one), (1, 0, "stop", two), (2, 0, "stop", b"3" * 64)]
    assert branches.causes_of(three) == {2: "forked"}
    assert branches.causes_of([(0, None, "abort", one), (1, None, "stop", one)]) == {}
    assert branches.causes_of([(0, None, "stop", one + b"retokenized")]) == {0: "retokenized"}


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
