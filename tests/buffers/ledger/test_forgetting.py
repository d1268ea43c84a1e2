"""Rules of buffers/ledger/forgetting.py: what was said is gone from every byte of the file, what was counted stays."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from buffers.errors import EpisodeClosed, UnderstudyError, UnknownEpisode
from buffers.ledger.cli import main
from buffers.ledger.doctor import findings
from buffers.ledger.forgetting import Forgotten
from buffers.ledger.ledger import Ledger
from buffers.ledger.schema import read_database
from buffers.records import Replay
from learner.live import clean_up
from tests.support.buffer_parts import make_round, open_running

MARKER = tuple(range(70_001, 70_009))
"""Ids that no other round has."""
WORDS = "the-house-in-Elm-street"
NAME = "a-name-that-tells"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run" / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    with Ledger(path) as ledger:
        yield ledger


def say(
    ledger: Ledger, episode_id: str, *, user: str = "ann", name: str = "", ids: tuple[int, ...] = (1, 2), long: int = 1
) -> str:
    """A session with a round, whose answer has the session's id."""
    ledger.open_session(episode_id=episode_id, user=user, name=name, is_side=False, version=0)
    round_ = make_round(episode_id, tail=ids * long, sampled=ids)
    ledger.put_round(replace(round_, memo=f"digests of {user}".encode(), trained=np.ones(len(ids), np.uint8)))
    ledger.name_answer(request_id=f"chatcmpl-{episode_id}", episode_id=episode_id, round_index=0).result()
    return episode_id


def think(ledger: Ledger, episode_id: str, *, score: float | None = 1.0, text: str = "") -> None:
    ledger.give_feedback(
        user=None, session=episode_id, response_id="", round_index=None, score=score, text=text, source=""
    ).result()
    if score is not None:
        assert ledger.settle_session(episode_id=episode_id, words_count=False).result()


def train(ledger: Ledger, *, step: int, num_groups: int) -> None:
    batch = ledger.claim(num_groups, min_version=0).result()
    assert batch is not None
    ledger.commit_step(batch.lease_id, step=step, version=step).result()


def holding(path: Path, *texts: bytes) -> list[str]:
    """The files of the ledger in which one of these bytes is."""
    files = [file for file in path.parent.iterdir() if file.is_file()]
    return sorted(file.name for file in files if any(text in file.read_bytes() for text in texts))


def sound(path: Path) -> bool:
    with closing(read_database(path)) as db:
        assert findings(db) == []
    return True


SECRETS = (np.array(MARKER, "<i4").tobytes(), WORDS.encode(), NAME.encode(), b"chatcmpl-ann-", b"digests of ann")


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("long", [1, 2_000, 40_000])
def test_no_byte_of_what_was_forgotten_is_left_in_the_file_or_its_log(
    ledger: Ledger, path: Path, whole: bool, long: int
) -> None:
    """Short bodies share a page, long ones have many; some are in the file already, some in its log alone."""
    for number in range(6):
        say(ledger, f"ann-{number}", name=NAME, ids=MARKER, long=long)
        think(ledger, f"ann-{number}", score=None, text=WORDS)
        say(ledger, f"bob-{number}", user="bob", name="b", ids=(5, 6, 7))
    think(ledger, "ann-2")
    think(ledger, "bob-2")
    train(ledger, step=1, num_groups=2)
    think(ledger, "ann-3")
    before = {name: ledger.rounds(name).result() for name in ("bob-0", "bob-2")}
    counts = ledger.counts()
    assert len(holding(path, SECRETS[0])) >= 1 and holding(path, SECRETS[1])

    found = ledger.episodes_of(user="ann", session="").result()
    assert found == [f"ann-{number}" for number in range(6)]
    taken = ledger.forget_episodes(episode_ids=found).result()
    ledger.overwrite(whole=whole)

    assert holding(path, *SECRETS) == []
    assert (taken.episodes, taken.rounds, taken.tokens, taken.words) == (tuple(found), 6, 48, 6)
    assert (taken.untrained, taken.steps, taken.in_batch) == (5, (1,), ())
    after = ledger.counts()
    assert {name: after[name] for name in ("rounds", "tokens", "groups/trained")} == {
        name: counts[name] for name in ("rounds", "tokens", "groups/trained")
    }
    assert after["evicted/forgotten"] == 5 and after["groups/ready"] == 0 and ledger.imbalance() == 0
    for name, rounds in before.items():
        again = ledger.rounds(name).result()
        assert [each.tail_ids.tolist() for each in again] == [each.tail_ids.tolist() for each in rounds]
    assert sound(path)
    if whole:
        assert path.stat().st_size < 600_000


def test_a_forgotten_session_takes_no_feedback_and_no_round(ledger: Ledger) -> None:
    say(ledger, "ann-0", name="mine")
    ledger.forget_episodes(episode_ids=["ann-0"]).result()
    for what in ({"session": "mine"}, {"session": "ann-0"}, {"response_id": "chatcmpl-ann-0"}):
        asked = {"session": "", "response_id": "", **what}
        with pytest.raises(UnknownEpisode, match="nothing is stored of it"):
            ledger.give_feedback(user=None, round_index=None, score=1.0, text=WORDS, source="", **asked).result()
    with pytest.raises(EpisodeClosed, match="forgotten"):
        ledger.put_round(make_round("ann-0", index=1)).result()
    assert ledger.running_sessions(user="ann", name="").result() == []
    assert ledger.episodes_of(user="ann", session="").result() == []


def test_what_is_in_a_batch_is_forgotten_after_it(ledger: Ledger, path: Path) -> None:
    say(ledger, "ann-0", ids=MARKER)
    think(ledger, "ann-0", text=WORDS)
    batch = ledger.claim(1, min_version=0).result()
    assert batch is not None
    taken = ledger.forget_episodes(episode_ids=["ann-0"]).result()
    assert taken == Forgotten(in_batch=("ann-0",))
    assert ledger.expired_sessions(age_s=None, limit=9).result() == []
    ledger.name_answer(request_id="late", episode_id="ann-0", round_index=0).result()  # it stays marked
    ledger.commit_step(batch.lease_id, step=1, version=1).result()
    assert ledger.expired_sessions(age_s=None, limit=9).result() == ["ann-0"]
    assert ledger.forget_episodes(episode_ids=["ann-0"]).result().steps == (1,)
    assert ledger.expired_sessions(age_s=-1e6, limit=9).result() == []
    ledger.overwrite(whole=False)
    assert holding(path, *SECRETS) == [] and sound(path)


def test_a_stored_session_joins_no_batch_once_it_is_forgotten_and_is_forgotten_after_the_one_that_it_is_in(
    ledger: Ledger, path: Path
) -> None:
    replay = Replay(num_groups=2, min_version=0, only="all", times=2)
    for name in ("ann-0", "ann-1", "ann-2", "ann-3"):
        say(ledger, name)
        think(ledger, name)
    train(ledger, step=1, num_groups=3)
    ledger.forget_episodes(episode_ids=["ann-2"]).result()
    assert ledger.count_stored(replay).result() == 2
    batch = ledger.claim(3, min_version=0, replay=replay).result()
    assert batch is not None and [row.episode_id for row in batch.rows] == ["ann-3", "ann-0", "ann-1"]
    assert [row.baseline for row in batch.rows] == [1.0] * 3  # of the user's sessions that were trained
    assert ledger.forget_episodes(episode_ids=["ann-1"]).result() == Forgotten(in_batch=("ann-1",))
    assert ledger.expired_sessions(age_s=-1e6, limit=9).result() == []
    ledger.commit_step(batch.lease_id, step=2, version=2).result()
    assert ledger.expired_sessions(age_s=None, limit=9).result() == ["ann-1"]
    assert ledger.forget_episodes(episode_ids=["ann-1"]).result().steps == (1, 2) and sound(path)


def test_what_was_trained_and_forgotten_is_not_trained_again_in_another_lineage(ledger: Ledger, path: Path) -> None:
    start = ledger.position().result()
    for name in ("ann-0", "bob-0", "bob-1"):
        say(ledger, name, user=name[:3])
        think(ledger, name)
    train(ledger, step=1, num_groups=2)
    ledger.forget_episodes(episode_ids=["ann-0"]).result()
    ledger.restore(start).result()
    batch = ledger.claim(2, min_version=0).result()
    assert batch is not None and [row.episode_id for row in batch.rows] == ["bob-0", "bob-1"]
    assert ledger.counts()["evicted/forgotten"] == 1 and sound(path)


def test_a_member_that_is_forgotten_takes_its_group_with_it(ledger: Ledger, path: Path) -> None:
    """Also after another lineage gave the group back: its members are compared with one another."""
    start = ledger.position().result()
    one, other = open_running(ledger, task=0, group_size=2)
    for episode in (one, other):
        ledger.put_round(make_round(episode.episode_id))
        ledger.notify_score(episode.episode_id, 1.0).result()
    train(ledger, step=1, num_groups=1)
    ledger.forget_episodes(episode_ids=[one.episode_id]).result()
    ledger.restore(start).result()
    assert ledger.claim(1, min_version=0).result() is None
    assert ledger.counts()["evicted/forgotten"] == 1 and sound(path)


def test_old_sessions_are_found_by_what_was_stored_last_but_not_those_that_wait_to_be_trained(
    ledger: Ledger, path: Path
) -> None:
    for name in ("ann-0", "ann-1", "ann-2"):
        say(ledger, name)
    think(ledger, "ann-1")
    aged = "UPDATE session SET heard_at = heard_at - 1000 + 100 * (episode_id = 'ann-0')"
    ledger.run(lambda db: db.execute(aged) and None).result()
    assert ledger.expired_sessions(age_s=None, limit=9).result() == []
    assert ledger.expired_sessions(age_s=950, limit=9).result() == ["ann-2"]
    assert ledger.expired_sessions(age_s=800, limit=9).result() == ["ann-2", "ann-0"]
    assert ledger.expired_sessions(age_s=800, limit=1).result() == ["ann-2"]
    think(ledger, "ann-2", score=None, text="w")
    assert ledger.expired_sessions(age_s=800, limit=9).result() == ["ann-0"]
    ledger.name_answer(request_id="x", episode_id="ann-0", round_index=0).result()
    assert ledger.expired_sessions(age_s=800, limit=9).result() == []
    with closing(sqlite3.connect(path)) as db:
        plan = "EXPLAIN QUERY PLAN SELECT episode_id FROM session WHERE heard_at < 5 ORDER BY heard_at LIMIT 3"
        assert "session_by_age" in str(db.execute(plan).fetchall())


def test_a_user_or_a_session_is_exported_alone_and_nothing_of_what_was_forgotten(
    ledger: Ledger, path: Path, tiny_model: Path, tmp_path: Path
) -> None:
    for name, user in (("ann-0", "ann"), ("ann-1", "ann"), ("bob-0", "bob")):
        say(ledger, name, user=user, name=f"session of {name}")
    think(ledger, "ann-0")
    think(ledger, "bob-0")

    def exported(*chosen: str) -> list[str]:
        rows = tmp_path / "rows.parquet"
        assert run("export", path, "--parquet", rows, *chosen) == 0
        return sorted(pq.read_table(rows).column("episode_id").to_pylist())

    assert exported() == ["ann-0", "bob-0"] and exported("--user", "ann") == ["ann-0"]
    assert exported("--session", "session of bob-0") == ["bob-0"]
    to = tmp_path / "atif"
    assert run("export", path, "--atif", to, "--tokenizer", tiny_model, "--user", "ann") == 0
    assert sorted(file.stem for file in to.iterdir()) == ["ann-0", "ann-1"]  # also what nobody has scored
    assert run("export", path, "--parquet", tmp_path / "none", "--user", "eve") == 2
    ledger.forget_episodes(episode_ids=["ann-0"]).result()
    assert exported() == ["bob-0"]
    assert run("export", path, "--parquet", tmp_path / "none", "--user", "ann") == 2  # ann-1 has no score


def run(*words: object, **more: object) -> int:
    hooks = {"ask": lambda *_: pytest.fail("no run is there"), "clean_up": clean_up, **more}
    return main([str(word) for word in words], open_ledger=Ledger, **hooks)  # type: ignore[arg-type]


def test_the_command_forgets_in_the_files_beside_the_ledger_and_names_what_was_trained(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Ledger(path) as ledger:
        for name in ("ann-0", "ann-1", "bob-0"):
            say(ledger, name, user=name[:3], ids=MARKER if name == "ann-0" else (3, 4))
            think(ledger, name, text=WORDS if name == "ann-0" else "")
        train(ledger, step=1, num_groups=1)
        with pytest.raises(UnderstudyError, match="no other process"):
            Ledger(path)
        assert run("forget", path.parent, "--session", "ann-0", ask=None) == 2
        assert "use `understudy ledger forget`" in capsys.readouterr().err
    line = json.dumps({"step": 1, "episode_id": "ann-0", "text": WORDS})
    other = json.dumps({"step": 1, "episode_id": "ann-01"})
    (path.parent / "traces.jsonl").write_text(f"{line}\n{other}\n")
    watched = path.parent / "watched"
    watched.mkdir()
    rows = [json.dumps({"source": name, "messages": []}) + "\n" for name in ("ann-0", "ann-01")]
    (watched / "demonstrations.jsonl").write_text("".join(rows))
    (watched / "lesson-3").mkdir()
    (watched / "lesson-3" / "demonstrations.jsonl").write_text("".join(rows))
    (watched / "ann-0.jsonl").write_text(WORDS)
    (path.parent / "atif").mkdir()
    for name in ("ann-0.json", "ann-0.1.json", "bob-0.json"):
        (path.parent / "atif" / name).write_text("{}")
    (path.parent / "rows.parquet").write_text("")
    for version, state in ((0, "promoted"), (1, "promoted"), (2, "candidate")):
        (path.parent / "versions" / f"v{version}").mkdir(parents=True)
        (path.parent / "versions" / f"v{version}" / "version.json").write_text(json.dumps({"state": state}))
    (path.parent / "checkpoints" / "step-000001").mkdir(parents=True)

    assert run("forget", path.parent, "--session", "ann-0") == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("forgotten: 1 episodes, 1 rounds (8 sampled tokens), 1 words of feedback; 0 episodes")
    assert told[1] == "removed: 3 lines of traces.jsonl and watched/demonstrations.jsonl, 2 exported conversations"
    assert [path.read_text() for path in watched.rglob("demonstrations.jsonl")] == [rows[1]] * 2 and not (
        watched / "ann-0.jsonl"
    ).exists()
    assert "step 1: their weights were made with it: version 1, version 2, checkpoints/step-000001;" in told[2]
    assert told[2].endswith("the newest without it: version 0") and "rows.parquet" in told[3]
    assert (path.parent / "traces.jsonl").read_text() == f"{other}\n"
    assert holding(path, *SECRETS[:2]) == [] and sound(path)
    assert run("forget", path.parent, "--session", "ann-0") == 2
    assert "got none" in capsys.readouterr().err
    for wrong in ((), ("--user", "ann", "--episode", "ann-1")):
        assert run("forget", path.parent, *wrong) == 2
        assert "name what is to be forgotten" in capsys.readouterr().err
    assert run("forget", path.parent, "--episode", "ann-1") == 0
    assert "1 episodes were not trained, and never will be" in capsys.readouterr().out


def test_a_run_that_goes_on_is_asked(ledger: Ledger, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = []

    def ask(folder: Path, what: dict[str, str]) -> dict[str, object]:
        asked.append((folder, what))
        return json.loads(json.dumps(Forgotten(episodes=("a",), in_batch=("b",), steps=(2,))._asdict()))  # type: ignore[no-any-return]

    assert run("forget", path.parent, "--user", "ann", ask=ask) == 1
    assert asked == [(path.parent, {"user": "ann", "session": "", "episode_id": ""})]
    assert "left: b, in the batch that is trained now" in capsys.readouterr().out


def test_a_reader_that_holds_the_log_is_named_and_asked_again_later(ledger: Ledger, path: Path) -> None:
    say(ledger, "ann-0", ids=MARKER)
    with closing(read_database(path)) as db:
        db.execute("BEGIN")
        db.execute("SELECT count(*) FROM round").fetchone()
        ledger.forget_episodes(episode_ids=["ann-0"]).result()
        with pytest.raises(UnderstudyError, match="is being read"):
            ledger.overwrite(whole=False, wait_s=0.1)
        db.execute("COMMIT")
    ledger.overwrite(whole=False)
    assert holding(path, *SECRETS) == []
