"""Whose data it is: what is not recorded leaves nothing, what is forgotten is gone, and a run that forgets what is old grows with
what it keeps. Rules of mocked_server/live_sessions.py."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import numpy as np
import pytest
from openai import BadRequestError, OpenAI

from buffers.errors import UnderstudyError
from buffers.ledger.doctor import findings
from buffers.ledger.ledger import Ledger
from buffers.ledger.reader import LedgerReader
from buffers.private_text import is_private, read_patterns
from configs.load import ConfigError, load_config
from configs.schema import RolloutConfig
from learner import live
from mocked_server import live_sessions
from mocked_server.conversation.live_episodes import Episodes
from mocked_server.live_keys import LiveKeys
from mocked_server.live_sessions import LiveSessions, Newest
from tests.support.buffer_parts import make_round
from tests.support.live_week import live_through
from tests.support.patience import PATIENCE_S
from tests.support.run_parts import ROOT
from tests.support.server_parts import ServerThread

FIRST = Newest(SimpleNamespace(version=0))

DAY_S = 86_400.0
NONE = {"x-understudy-record": "none"}


class Served:
    """A server with users, and a scripted engine."""

    def __init__(self, model: Path, folder: Path, *patterns: str) -> None:
        self.patterns = [re.compile(each) for each in patterns] or None
        self.path = folder / "run" / "ledger.sqlite"
        self.path.parent.mkdir()
        self.keys = LiveKeys(self.path.parent)
        self.server = ServerThread(
            model, rollout=RolloutConfig(max_model_len=512, max_tokens=16), ledger=Ledger(self.path)
        )
        start = self.server._resume

        def serve() -> None:
            start()
            self.sessions = self.server.server.serve_users(
                self.server.ledger,
                keys=self.keys,
                silence_s=600.0,
                words_count=False,
                policy=FIRST,
                patterns=self.patterns,
            )
            self.server.generation.on_round = self.sessions.recorded
            self.server.generation.keeps = self.sessions.keeps

        self.server._resume = serve  # type: ignore[method-assign]
        self.server.start()

    def client(self, key: str, **headers: str) -> OpenAI:
        made = OpenAI(base_url=f"{self.server.server.base_url}/v1", api_key=key, max_retries=0, default_headers=headers)
        self.server._clients.append(made)
        return made

    def texts(self) -> str:
        """All prompts and answers that the ledger has, as text."""
        with closing(LedgerReader(self.path)) as reader, reader.read() as db:
            found = [name for (name,) in db.execute("SELECT episode_id FROM session ORDER BY episode_id")]
        rounds = [each for name in found for each in self.server.stored(name)]
        return " ".join(self.server.tokenizer.decode(np.append(each.tail_ids, each.sampled_ids)) for each in rounds)


@pytest.fixture
def served(tiny_model: Path, tmp_path: Path) -> Iterator[Served]:
    served = Served(tiny_model, tmp_path)
    yield served
    served.server.stop()


def unasked(ledger: Ledger, *, retention_s: float | None) -> LiveSessions:
    """The sessions of a run that nobody asks for anything."""
    assert ledger.path is not None
    return LiveSessions(
        ledger, keys=LiveKeys(ledger.path.with_name("run")), episodes=Episodes(), silence_s=60.0, retention_s=retention_s,
        words_count=False, policy=FIRST, restore=lambda *_: pytest.fail("none is open"),
        on_ended=lambda *_: None,
    )  # fmt: skip


def ask(client: OpenAI, *words: str, **more: object) -> str:
    """The id of the answer to a conversation."""
    messages = [{"role": ("user", "assistant")[n % 2], "content": each} for n, each in enumerate(words)]
    answer = client.chat.completions.create(model="policy", messages=messages, **more)  # type: ignore[call-overload]
    assert answer.choices[0].message.content == "ok"
    return str(answer.id)


def test_what_is_not_to_be_recorded_is_answered_and_leaves_nothing(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """By a header, or by the key; in a session that is recorded else, too; in each dialect, whole and streamed."""
    key = served.keys.add("ann")
    ann, hidden = served.client(key), served.client(key, **NONE)
    off = served.client(served.keys.add("off", excluded=True))
    ask(ann, "apple")
    ids = [ask(hidden, "banana"), ask(off, "cherry"), ask(ann, "apple", "ok", "damson", extra_headers=NONE)]
    ids.append(ask(ann, "elder", extra_headers={**NONE, "x-session-id": "mine"}))
    ids.append(hidden.responses.create(model="policy", input="fig").id)
    parts = off.chat.completions.create(model="policy", messages=[{"role": "user", "content": "grape"}], stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == "ok"
    with anthropic.Anthropic(base_url=served.server.server.base_url, auth_token=None, api_key=key) as claude:
        told = claude.messages.create(
            model="policy", max_tokens=8, messages=[{"role": "user", "content": "hazel"}], extra_headers=NONE
        )
        assert told.content
    with caplog.at_level(logging.INFO), pytest.raises(BadRequestError):
        off.chat.completions.create(model="policy", messages=[{"role": "user", "content": {"iris": 1}}])  # type: ignore[misc, list-item]
    assert "iris" not in caplog.text and not any("iris" in why for why in served.server.server.model_requests.refused)
    ask(ann, "apple", "ok", "kiwi")

    texts = served.texts()
    assert texts.count("apple") == 1 and "kiwi" in texts
    for word in ("banana", "cherry", "damson", "elder", "fig", "grape", "hazel", "iris"):
        assert word not in texts
    assert served.server.ledger.counts()["rounds"] == 2 and served.server.ledger.counts()["episodes/running"] == 1
    assert served.server.server.status()["live/unrecorded"] == 8
    assert not any(served.sessions.door_of(name).rounds for name in ("ann", "off"))
    with served.server.http(key) as http:
        for each in ids:
            said = http.post("/feedback", json={"response_id": each, "score": 1.0})
            assert said.status_code == 404 and "nothing is stored of it" in said.text


@pytest.fixture
def guarded(tiny_model: Path, tmp_path: Path) -> Iterator[Served]:
    served = Served(tiny_model, tmp_path, r"\bproject-\w+", r"(?i)salary")
    yield served
    served.server.stop()


def test_what_has_private_text_is_answered_and_leaves_nothing(guarded: Served) -> None:
    """Of the user's own patterns and of known forms, wherever a request has it, in each dialect; the turns before it stay."""
    key = guarded.keys.add("ann")
    ann = guarded.client(key)
    ask(ann, "apple")
    named = {"extra_headers": {"x-session-id": "mine"}}
    ask(ann, "banana", **named)
    ids = [
        ask(ann, "banana", "ok", "my SALARY, cherry", **named),
        ask(ann, "apple", "ok", "project-damson", "ok", "elder"),
    ]
    ids.append(ask(ann, "fig", extra_headers={"x-session-id": "of project-x"}))
    ids.append(ask(ann, "grape ghp_" + "a1B2" * 10))
    ids.append(ask(ann, "hazel", user="salary@host"))
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"of": ["project-iris"]}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "kiwi"}]}, {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "lemon"},
    ]  # fmt: skip
    ids.append(ann.chat.completions.create(model="policy", messages=messages).id)  # type: ignore[arg-type]
    ids.append(ann.responses.create(model="policy", input="mango", instructions="salary").id)
    olive: list[Any] = guarded.server.ids("olive project-x", end=False)
    ids += [ann.completions.create(model="policy", prompt=each).id for each in (olive, [float(olive[0]), *olive[1:]])]
    ids.append(ask(ann, "quince", extra_headers={"user-agent": "project-agent/1.0"}))
    ask(ann, "banana", "ok", "pear", **named)

    texts = guarded.texts()
    assert all(word in texts for word in ("apple", "banana", "pear"))
    for word in (
        "cherry",
        "damson",
        "elder",
        "fig",
        "grape",
        "hazel",
        "iris",
        "kiwi",
        "lemon",
        "mango",
        "olive",
        "project",
        "ghp",
    ):
        assert word not in texts
    counts = guarded.server.ledger.counts()
    assert (counts["rounds"], counts["episodes/running"]) == (3, 2)
    assert guarded.server.server.status()["live/unrecorded"] == len(ids)
    with guarded.server.http(key) as http:
        for each in ids:
            assert http.post("/feedback", json={"response_id": each, "score": 1.0}).status_code == 404
        said = http.post("/feedback", json={"session": "mine", "score": 0.0, "text": "about my salary"})
        assert said.status_code == 422, said.text
        assert "serve.private_patterns" in said.text
        assert http.post("/feedback", json={"session": "mine", "score": 0.0, "text": "no"}).status_code == 200
    key = guarded.keys.add("salary_office")
    ask(guarded.client(key), "thyme", **named)
    with guarded.server.http(key) as http:
        assert http.post("/feedback", json={"session": "mine", "score": 0.0, "text": "no"}).status_code == 200


TOKEN = "ghp_" + "a1B2" * 10
OWN = [re.compile(each) for each in (r"\bproject-\w+", "Müller", r"\b\d{16}\b")]


def decoded(ids: list[int]) -> str:
    return " ".join(map(str, ids))


@pytest.mark.parametrize(
    "value",
    [
        "a project-x", {"project-x": 1}, {"card": [4111111111111111]}, json.dumps({"t": "a\nproject-x"}),
        json.dumps(json.dumps({"t": "a\nproject-x"})), json.dumps("Herr Müller"), json.dumps({"t": f"a\n{TOKEN}"}),
        json.dumps(json.dumps(f"a\n{TOKEN}")), "-----BEGIN RSA PRIVATE KEY-----\nMIIE", ["4111", "1", ["x project-x"]],
        ["4111111111111111"], "\\u003ctoken\\u003e" + TOKEN, "postgres:\\/\\/app:hunter2@db", "-sk-proj-Abc123Def456Ghi789Jkl",
    ],
)  # fmt: skip
def test_private_text_is_found_however_it_is_written(value: Any) -> None:
    assert is_private({"messages": value}, OWN, decode=decoded)


@pytest.mark.parametrize(
    "value",
    [
        {"messages": {"t": 0.5, "m": None, "b": True, "ids": [[1, 2], [3.0, "4"]]}}, {"messages": "projects \\project"},
        {"seed": 4111111111111111, "project-x": 1, "thinking": {"budget_tokens": 4111111111111111}}, [], {"prompt": []},
    ],
)  # fmt: skip
def test_ordinary_values_and_settings_are_not_private(value: Any) -> None:
    assert not is_private(value, OWN, decode=decoded)


def test_numbers_that_are_no_ids_are_looked_at_as_numbers() -> None:
    def none(ids: list[int]) -> str:
        raise IndexError("a tokenizer that has no such token")

    assert not is_private({"messages": [7, 8]}, OWN, decode=none)
    assert is_private({"messages": [[7, 8], "project-x"]}, OWN, decode=none)


def test_a_value_that_is_nested_deep_is_looked_through_once() -> None:
    value: Any = "a" * 200_000
    for _ in range(400):
        value = [value]
    assert not is_private({"messages": value}, OWN, decode=decoded)


LONG = """
import re
from buffers.private_text import is_private, without_secrets
for part in ("sk-a", "eyJ-", "eyJaaaaaaaaaaaa.eyJ", "-----BEGIN PRIVATE KEY-----", "\\\\nsk-", "://a:b", "\\\\", "://a", "a"):
    text = part * (2_000_000 // len(part))
    is_private(text, [re.compile("project-x")], decode=str), without_secrets(text, lambda name, secret: name)
"""


@pytest.mark.seconds
def test_a_long_text_is_looked_through_once() -> None:
    """Where each of many beginnings looks through all that follows, this takes hours."""
    subprocess.run([sys.executable, "-c", LONG], check=True, cwd=ROOT, timeout=PATIENCE_S)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_with_private_text_is_given_and_leaves_nothing(guarded: Served, stream: bool) -> None:
    key = guarded.keys.add("ann")
    ann, engine = guarded.client(key), guarded.server.engine
    ask(ann, "apple")
    usual, engine.answer = engine.answer, lambda _: guarded.server.ids("project-cherry")
    messages: list[Any] = [
        {"role": "user", "content": "apple"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "banana"},
    ]
    with ann.chat.completions.with_streaming_response.create(model="policy", messages=messages, stream=stream) as said:
        body = said.read().decode()
    assert "cherry" in "".join(re.findall(r'"content":"([^"]*)"', body))
    engine.answer = usual
    given = re.search(r'"id": ?"([^"]+)"', body)
    assert given is not None
    with guarded.server.http(key) as http:
        assert http.post("/feedback", json={"response_id": given[1], "score": 1.0}).status_code == 404
    ask(ann, "apple", "ok", "banana", "project-cherry", "damson")
    ask(ann, "apple", "ok", "elder")
    texts = guarded.texts()
    assert "elder" in texts and not any(word in texts for word in ("banana", "cherry", "damson"))
    assert guarded.server.ledger.counts()["episodes/running"] == 1
    assert guarded.server.server.status()["live/unrecorded"] == 2


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("# names\n\nproject-\\w+\n", ""),
        ("ann\n(\n", r"got '\(' in line 2 of .*: missing \)"),
        ("a*\n", "it matches an empty text"),
        ("a{99999999999}\n", "got 'a"),
        (b"\xff\xfe", "be a text file of regular expressions"),
        (None, "be a text file of regular expressions"),
    ],
)
def test_patterns_that_cannot_be_used_are_refused_before_anything_starts(
    tmp_path: Path, lines: str | bytes | None, said: str
) -> None:
    path = tmp_path / "private.txt"
    if lines is not None:
        path.write_bytes(lines if isinstance(lines, bytes) else lines.encode())
    if not said:
        (pattern,) = read_patterns(str(path))
        assert pattern.search("the project-x") and not pattern.search("the project")
    else:
        with pytest.raises(UnderstudyError, match=f"serve.private_patterns must .*{said}"):
            read_patterns(str(path))


def test_a_wrong_word_in_the_header_is_refused_and_not_recorded(served: Served) -> None:
    ann = served.client(served.keys.add("ann"))
    with pytest.raises(
        BadRequestError, match="x-understudy-record must be none, got 'no'; leave it out to be recorded"
    ):
        ask(ann, "apple", extra_headers={"x-understudy-record": "no"})
    assert served.server.ledger.counts()["rounds"] == 0


def test_store_false_is_about_what_the_api_gives_back_and_does_not_exclude(served: Served) -> None:
    """Clients send it by default, some with every request."""
    ask(served.client(served.keys.add("ann")), "apple", store=False)
    assert "apple" in served.texts()


def test_a_key_that_excludes_is_listed_and_counts_at_once(served: Served) -> None:
    ann = served.client(served.keys.add("ann"))
    ask(ann, "apple")
    hidden = served.client(served.keys.add("ann", excluded=True))
    ask(hidden, "banana")
    assert served.keys.read()["ann"]["excluded"] and "banana" not in served.texts()
    with pytest.raises(Exception, match="opens no episode"):
        ask(ann, "cherry")


def test_the_command_makes_a_key_of_which_nothing_is_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = [f"run.dir={tmp_path}", "run.name=mine"]
    assert live.keys(["add", "off", "--no-learning", *place], users=LiveKeys) == 0
    assert live.keys(["add", "ann", *place], users=LiveKeys) == 0
    keys = LiveKeys(tmp_path / "mine")
    assert [keys.is_excluded(name) for name in ("off", "ann", "eve")] == [True, False, False]
    assert live.keys(["list", *place], users=LiveKeys) == 0
    listed = capsys.readouterr().out.splitlines()[2:]
    assert ["nothing is stored" in line for line in listed] == [True, False]


def test_a_running_run_forgets_what_its_administrator_asks_for(served: Served) -> None:
    """What is being generated for it ends; a later request begins another stretch."""
    key = served.keys.add("ann")
    ann, bob = served.client(key), served.client(served.keys.add("bob"))
    apple = ask(ann, "apple", extra_headers={"x-session-id": "mine"})
    ask(ann, "apple")
    ask(bob, "banana")
    with served.server.http(served.server.server.keys.admin) as admin, served.server.http(key) as http:
        assert http.post("/forget", json={"user": "ann"}).status_code in (401, 404)
        assert admin.post("/forget", json={}).status_code == 422
        assert admin.post("/forget", json={"user": "eve"}).status_code == 404
        told = admin.post("/forget", json={"session": "mine"})
        assert told.status_code == 200 and (told.json()["rounds"], told.json()["untrained"]) == (1, 1)
        assert served.texts().count("apple") == 1
        assert http.post("/feedback", json={"response_id": apple, "score": 1.0}).status_code == 404
        ask(ann, "apple", "ok", "cherry", extra_headers={"x-session-id": "mine"})
        served.server.engine.gate.clear()
        begun, slow = (
            ann.chat.completions.create(model="policy", messages=[{"role": "user", "content": "damson"}], stream=True),
            None,
        )
        told = admin.post("/forget", json={"user": "ann"})
        served.server.engine.gate.set()
        with pytest.raises(Exception, match="forgotten"):
            slow = [*begun]
        assert slow is None and told.json()["rounds"] == 2
    texts = served.texts()
    assert "banana" in texts and not any(word in texts for word in ("apple", "cherry", "damson"))
    assert served.server.server.status()["live/forgotten"] == 4
    with closing(LedgerReader(served.path)) as reader, reader.read() as db:
        assert findings(db) == []


@pytest.mark.seconds
@pytest.mark.long
async def test_a_week_of_sessions_leaves_a_file_and_a_memory_of_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,680 sessions, of which a day is kept: the file grows by what may be forgotten before it is written anew, and by what a
    forgotten session leaves to count. It would be seven times as large."""
    monkeypatch.setattr(live_sessions, "REWRITTEN_BYTES", 16 * 1024 * 1024)
    week = await live_through(tmp_path, hours=168, sessions_per_hour=10, retention_days=1.0, prompt=6_000, answer=200)
    assert week[-1].sessions == 1_680 and {hour.kept for hour in week[24:]} == {240}
    full, last = max(hour.file_bytes for hour in week[:24]), max(hour.file_bytes for hour in week[-24:])
    assert last - full < live_sessions.REWRITTEN_BYTES + 1_000 * (week[-1].sessions - 240)
    assert week[-1].heap_bytes - week[48].heap_bytes < 2_000_000


async def test_what_is_old_is_forgotten_some_at_a_time_and_its_space_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short rounds share pages, which are free only once the file is written anew: when half of it was forgotten."""
    monkeypatch.setattr(live_sessions, "REWRITTEN_BYTES", 100_000)
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        for number in range(200):
            ledger.open_session(episode_id=f"{number}", user="ann", name="", is_side=False, version=0)
            ledger.put_round(make_round(f"{number}", tail=range(2_000)))
        ledger.run(lambda db: db.execute("UPDATE session SET heard_at = 5 WHERE episode_id < '9'") and None).result()
        ledger.overwrite(whole=True)
        before = path.stat().st_size
        sessions = unasked(ledger, retention_s=DAY_S)
        sizes = []
        for _ in range(4):
            await sessions.look()
            sizes.append(path.stat().st_size)
        assert sessions.figures()["live/forgotten"] == 189
        assert before > 1_600_000 and sizes[0] == before and sizes[-1] < before - 900_000


async def test_without_a_retention_nothing_is_forgotten_by_itself_and_one_shorter_than_a_silence_is_refused(
    tmp_path: Path,
) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.open_session(episode_id="old", user="ann", name="", is_side=False, version=0)
        ledger.run(lambda db: db.execute("UPDATE session SET heard_at = 5") and None).result()
        await unasked(ledger, retention_s=None).look()
        assert ledger.episodes_of(user="ann", session="").result() == ["old"]
        await unasked(ledger, retention_s=DAY_S).look()
        assert ledger.episodes_of(user="ann", session="").result() == []
    serve = ["serve.enabled=true", "serve.silence_s=600"]
    assert load_config(Path("live"), [*serve, "serve.retention_days=1"]).serve.retention_days == 1.0
    with pytest.raises(ConfigError, match=r"must be longer than serve\.silence_s=600"):
        load_config(Path("live"), [*serve, "serve.retention_days=0.001"])


async def test_feedback_before_a_restart_is_learned_from_before_its_session_is_forgotten(tmp_path: Path) -> None:
    """Its agent never came back: nothing else would have ended it."""
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        for name in ("said", "silent"):
            ledger.open_session(episode_id=name, user="ann", name=name, is_side=False, version=0)
            ledger.put_round(make_round(name)).result()
        asked = {"response_id": "", "round_index": None, "score": 1.0, "text": "", "source": ""}
        ledger.give_feedback(user="ann", session="said", **asked).result()
        ledger.run(lambda db: db.execute("UPDATE session SET heard_at = 5") and None).result()
        sessions = unasked(ledger, retention_s=DAY_S)
        await sessions.look()
        assert ledger.counts()["groups/ready"] == 1 and ledger.counts()["evicted/forgotten"] == 1
        assert len(ledger.rounds("said").result()[0].sampled_ids) == 3
        batch = ledger.claim(1, min_version=0).result()
        assert batch is not None and [row.episode_id for row in batch.rows] == ["said"]
        ledger.commit_step(batch.lease_id, step=1, version=1).result()
        await sessions.look()
        assert ledger.rounds("said").result()[0].sampled_ids.size == 0 and sessions.figures()["live/forgotten"] == 2
