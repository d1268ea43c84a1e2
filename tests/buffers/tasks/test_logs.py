"""Rules of buffers/tasks/logs.py: a file is what its content is, what cannot be used is counted and named, the rest is given."""

from __future__ import annotations

import gzip
import json
import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from buffers.errors import UnderstudyError
from buffers.log_forms import Session, to_atif
from buffers.row_files import write_rows
from buffers.tasks import logs as read
from buffers.tasks.logs import NEEDS_ATIF_MAKE, Findings, LogReader, row_of
from buffers.tasks.parquet import TRACE_SCHEMA


def chat(word: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": f"{word}!"}], **more}


def lines(path: Path, *records: object) -> Path:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in records))
    return path


def read_all(path: Path, *, redact: bool = False) -> tuple[list[Session], Findings]:
    def of_ledger(path: Path) -> Iterator[Session]:
        raise UnderstudyError("no ledger")

    found = Findings()
    return list(LogReader(found=found, of_ledger=of_ledger, redact=redact).read(path)), found


def words(sessions: list[Session]) -> list[str]:
    return [session.messages[0]["content"] for session in sessions]


def test_broken_lines_are_counted_with_the_first_of_them_and_the_rest_is_given(tmp_path: Path) -> None:
    file = lines(
        tmp_path / "a.jsonl", chat("a"), '{"messages": [{"role": "user", "cont', "", "[1]", "7", {"other": 1}, chat("b")
    )
    sessions, found = read_all(file)
    assert words(sessions) == ["a", "b"]
    assert found.causes == {"broken JSON": 1, "JSON that is no object": 1, "record of no known form": 2}
    assert found.first["broken JSON"] == f"{file}, line 2"


def test_a_record_of_any_depth_has_a_cause_or_is_given(tmp_path: Path) -> None:
    def deep(depth: int) -> str:
        arguments = '{"a": ' * depth + "1" + "}" * depth
        call = '{"id": "c", "function": {"name": "f", "arguments": ' + arguments + "}}"
        return '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [' + call + "]}]}"

    depths = [1, 90, *range(700, 1000, 7), 5000]
    sessions, found = read_all(lines(tmp_path / "a.jsonl", *map(deep, depths)))
    assert len(sessions) + found.causes["broken JSON"] + found.causes[read.TOO_DEEP] == len(depths)


def test_a_line_that_is_too_long_is_never_in_memory_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "MAX_LINE_BYTES", 1 << 20)
    file = lines(tmp_path / "a.jsonl", chat("a"), chat("x" * (3 << 20)), chat("b"))
    sessions, found = read_all(file)
    assert words(sessions) == ["a", "b"] and found.causes == {"line of more than 1 MiB": 1}


def test_a_file_is_what_its_content_is_and_a_name_that_says_otherwise_is_named(tmp_path: Path) -> None:
    lines(tmp_path / "a.parquet", chat("json lines"))
    pq.write_table(pa.Table.from_pylist([chat("parquet")]), tmp_path / "b.jsonl")
    with pa.ipc.new_stream(tmp_path / "c.arrow", (table := pa.Table.from_pylist([chat("arrow")])).schema) as sink:
        sink.write_table(table)
    with pa.ipc.new_file(tmp_path / "d", table.schema) as sink:
        sink.write_table(table.slice(0, 0))
        sink.write_table(pa.Table.from_pylist([chat("arrow file")]))
    (tmp_path / "e.jsonl").write_bytes(gzip.compress(json.dumps(chat("gzip")).encode()))
    (tmp_path / "f.json").write_text(json.dumps([chat("a list")], indent=2))
    (tmp_path / "g.json").write_text(json.dumps(chat("a document"), indent=2))
    sessions, found = read_all(tmp_path)
    assert words(sessions) == ["json lines", "parquet", "arrow", "arrow file", "gzip", "a list", "a document"]
    assert found.causes == {
        "file named .parquet that is JSON, read as that": 1,
        "file named .jsonl that is parquet, read as that": 1,
    }


def test_what_is_no_log_is_named_and_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(read.sys, "executable", str(tmp_path / "python"))
    (tmp_path / "a.txt").write_text("hello\n")
    (tmp_path / "b.bin").write_bytes(os.urandom(4096))
    (tmp_path / "c.json").touch()
    (tmp_path / "d.parquet").write_bytes(b"PAR1" + b"x" * 100)
    (tmp_path / "e.jsonl").write_bytes(gzip.compress(json.dumps(chat("x")).encode())[:-9])
    (tmp_path / "f.db").write_bytes(b"SQLite format 3\0" + b"x" * 100)
    os.mkfifo(opencode(tmp_path / "k.db").with_name("k.db-wal"))
    (tmp_path / "g.json").write_text('{"log": {"entries": []}}')
    pq.write_table(pa.Table.from_pylist([{"x": 1}]), tmp_path / "h.parquet")
    os.mkfifo(tmp_path / "i.jsonl")
    lines(tmp_path / "j.jsonl", chat("kept"))
    sessions, found = read_all(tmp_path)
    assert words(sessions) == ["kept"]
    assert found.causes.pop("file that cannot be read to its end") == 5
    assert found.causes == {"file that is no log (broken JSON)": 2, "empty file": 1, NEEDS_ATIF_MAKE: 1}


def test_fields_that_a_struct_column_fills_with_null_are_not_arguments(tmp_path: Path) -> None:
    def called(**arguments: Any) -> dict[str, Any]:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return {
            "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        }

    pq.write_table(pa.Table.from_pylist([called(a=1), called(city="Rome")]), tmp_path / "a.parquet")
    sessions, _ = read_all(tmp_path / "a.parquet")
    written = [session.messages[1]["tool_calls"][0]["function"]["arguments"] for session in sessions]
    assert written == ['{"a": 1}', '{"city": "Rome"}']


def test_what_was_written_as_demonstrations_is_read_back(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":  1}'}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "reasoning_content": "t", "tool_calls": [call], "weight": 0},
        {"role": "tool", "content": "r", "tool_call_id": "c"},
        {"role": "assistant", "content": "a"},
    ]
    session = Session(
        messages=messages, tools=[{"type": "function", "function": {"name": "f"}}], score=0.5, source="s", model="m"
    )
    write_rows(tmp_path / "a.parquet", rows=[row_of(session)], schema=TRACE_SCHEMA)
    assert read_all(tmp_path / "a.parquet")[0] == [session]


def test_a_session_that_is_there_twice_is_given_once(tmp_path: Path) -> None:
    document = to_atif(Session(messages=chat("a")["messages"], source="s"))
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps(document))
    sessions, found = read_all(tmp_path)
    assert len(sessions) == 1 and found.causes == {"session that was there before": 1}


SECRETS = {
    "OpenAI key": "sk-proj-Abc123Def456Ghi789Jkl",
    "Anthropic key": "sk-ant-api03-Abc123Def456Ghi789Jkl",
    "GitHub token": "ghp_" + "a1B2" * 10,
    "AWS key": "AKIAIOSFODNN7EXAMPLE",
    "Google key": "AIza" + "x" * 35,
    "Slack token": "xoxb-1234567890-abc",
    "Hugging Face token": "hf_" + "a" * 34,
    "JSON web token": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcdefghijklmno",
    "private key": "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----",
    "password in a URL": "user:hunter22",
}


@pytest.mark.parametrize("name", SECRETS)
def test_secrets_are_counted_and_their_names_stand_in_their_place_where_that_is_asked_for(
    tmp_path: Path, name: str
) -> None:
    secret = SECRETS[name]
    before, after = ("at https://", "@host") if name == "password in a URL" else ("it is ", ".")
    call = {"id": "c", "function": {"name": "f", "arguments": json.dumps({"x": [before + secret + after]})}}
    messages = [
        {"role": "user", "content": before + secret + after},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    tools = [{"type": "function", "function": {"name": "f", "description": before + secret + after}}]
    file = lines(tmp_path / "a.jsonl", {"messages": messages, "tools": tools})
    (kept,), found = read_all(file)
    assert kept.messages[0]["content"] == before + secret + after and found.secrets[name] == 3
    (redacted,), found = read_all(file, redact=True)
    assert redacted.messages[0]["content"] == f"{before}[{name}]{after}" and found.secrets == {name: 3}
    assert redacted.tools is not None and redacted.tools[0]["function"]["description"] == f"{before}[{name}]{after}"
    arguments = redacted.messages[1]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(arguments) == {"x": [f"{before}[{name}]{after}"]}


@pytest.mark.parametrize("escape", ["\n", "\\n"])
def test_a_private_key_that_is_cut_is_replaced_as_far_as_it_goes(tmp_path: Path, escape: str) -> None:
    lines_of_it = ["-----BEGIN RSA PRIVATE KEY-----", "Proc-Type: 4,ENCRYPTED", "", "aB1/" * 16, "aB1+" * 16, "aB=="]
    (redacted,), found = read_all(
        lines(tmp_path / "a.jsonl", chat(f"{escape.join(lines_of_it)}{escape}and so on")), redact=True
    )
    assert redacted.messages[0]["content"] == f"[private key]{escape}and so on" and set(found.secrets) == {
        "private key"
    }


def test_ordinary_text_has_no_secrets(tmp_path: Path) -> None:
    text = "sk-circle-fade-dot-animation-large https://host:8080/a@b eyJ.eyJ.x git@github.com:a/b hf_hub_download AIza xoxo"
    assert not read_all(lines(tmp_path / "a.jsonl", chat(text)))[1].secrets


def test_spans_of_one_conversation_are_one_and_each_answer_is_learned_once(tmp_path: Path) -> None:
    def span(trace: str, asked: list[str], said: str, **more: Any) -> dict[str, Any]:
        messages = [
            {"role": ("user", "assistant")[n % 2], "parts": [{"type": "text", "content": each}]}
            for n, each in enumerate(asked)
        ]
        answer = [{"role": "assistant", "parts": [{"type": "text", "content": said}], "finish_reason": "stop"}]
        attributes = {
            "gen_ai.operation.name": "chat", "gen_ai.response.model": "m", "gen_ai.input.messages": json.dumps(messages),
            "gen_ai.output.messages": json.dumps(answer), **more,
        }  # fmt: skip
        return {"name": "chat m", "context": {"trace_id": trace}, "attributes": attributes}

    silent = {"context": {"trace_id": "1"}, "attributes": {"gen_ai.operation.name": "chat"}}
    tool = {"context": {"trace_id": "1"}, "attributes": {"gen_ai.operation.name": "execute_tool"}}
    file = lines(
        tmp_path / "a.jsonl", span("1", ["q"], "a"), tool, span("2", ["other"], "b"), silent, span("1", ["q", "a", "r"], "c"),
        span("1", ["q", "x", "r"], "d"),
    )  # fmt: skip
    sessions, found = read_all(file)
    told = [[(message["content"], message.get("weight", 1)) for message in session.messages] for session in sessions]
    assert sorted(told) == sorted([
        [("q", 1), ("a", 1), ("r", 1), ("c", 1)],
        [("q", 1), ("x", 0), ("r", 1), ("d", 1)],
        [("other", 1), ("b", 1)],
    ])  # fmt: skip
    assert found.causes == {"span without its messages: its exporter leaves contents out": 1}


def atif_make(folder: Path, program: str) -> None:
    folder.mkdir()
    path = folder / "atif-make"
    path.write_text(f"#!/bin/sh\n{program}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_sessions_of_other_agents_are_what_atif_make_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program itself needs Python 3.12; tests/outside runs it on what Claude Code and Codex wrote."""
    (tmp_path / "made.json").write_text(
        json.dumps(to_atif(Session(messages=chat("a")["messages"], source="s", model="m")))
    )
    atif_make(tmp_path / "bin", f'echo "detected: codex-rollout" >&2; cp {tmp_path}/made.json "$3"')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    folder = tmp_path / "sessions"
    folder.mkdir()
    lines(folder / "a.jsonl", {"type": "session_meta", "payload": {}})
    (session,), found = read_all(folder)
    assert session.source == "s" and found.files == {"codex-rollout (atif-make)": 1} and found.models == {"m": 1}
    (tmp_path / "bin" / "atif-make").write_text('#!/bin/sh\necho "atif-make: it is damaged" >&2; exit 1\n')
    sessions, found = read_all(folder)
    assert not sessions and found.causes == {"file that atif-make refuses": 1}
    assert found.first["file that atif-make refuses"] == f"{folder / 'a.jsonl'} (atif-make: it is damaged)"


def item(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": "response_item", "payload": {"type": kind, **more}}


def test_calls_of_one_answer_of_codex_are_one_answer_though_atif_make_makes_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(source: str, text: str = "", *calls: str) -> dict[str, Any]:
        called = [{"tool_call_id": each, "function_name": "f", "arguments": {}} for each in calls]
        results = [{"source_call_id": each, "content": each.upper()} for each in calls]
        return {"source": source, "message": text, "tool_calls": called, "observation": {"results": results}}

    steps = [
        step("user", "q"),
        step("agent", "", "a"),
        step("agent", "I look."),
        step("agent", "", "b"),
        step("agent", "", "c"),
    ]
    made = {
        "schema_version": "ATIF-v1.7",
        "agent": {},
        "steps": [*steps, step("agent", "", "d"), step("agent", "done")],
    }
    (tmp_path / "made.json").write_text(json.dumps(made))
    atif_make(tmp_path / "bin", f'echo "detected: codex-rollout" >&2; cp {tmp_path}/made.json "$3"')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    call, output = (
        (lambda name: item("function_call", call_id=name)),
        (lambda name: item("function_call_output", call_id=name)),
    )
    said = item("message", role="assistant")
    file = lines(
        tmp_path / "rollout.jsonl", item("message", role="user"), call("a"), {"type": "token_usage_record"}, output("a"),
        item("reasoning"), said, call("b"), call("c"), output("b"), output("c"), call("d"), output("d"), said, {"payload": 7},
        "broken",
    )  # fmt: skip
    (session,), _ = read_all(file)
    told = [(each["content"], [one["id"] for one in each.get("tool_calls", ())]) for each in session.messages]
    assert told == [
        ("q", []), ("", ["a"]), ("A", []), ("I look.", ["b", "c"]), ("B", []), ("C", []), ("", ["d"]), ("D", []), ("done", []),
    ]  # fmt: skip


def opencode(path: Path, *messages: tuple[str, dict[str, Any], list[Any]]) -> Path:
    """Its database with messages, each of a session, with their parts."""
    with closing(sqlite3.connect(path)) as db, db:
        db.executescript(
            "CREATE TABLE session(id TEXT, time_created INTEGER); CREATE TABLE message(id TEXT, session_id TEXT, "
            "time_created INTEGER, data TEXT); CREATE TABLE part(id TEXT, message_id TEXT, data TEXT); PRAGMA journal_mode = WAL"
        )
        for number, (session, told, parts) in enumerate(messages):
            db.execute(
                "INSERT INTO session SELECT ?1, 0 WHERE NOT EXISTS (SELECT 1 FROM session WHERE id = ?1)", (session,)
            )
            db.execute("INSERT INTO message VALUES (?, ?, ?, ?)", (f"m{number}", session, number, json.dumps(told)))
            each = [
                (f"p{n:02d}", f"m{number}", part if isinstance(part, str) else json.dumps(part))
                for n, part in enumerate(parts)
            ]
            db.executemany("INSERT INTO part VALUES (?, ?, ?)", reversed(each))
    return path


def test_sessions_of_opencode_are_read_from_its_database(tmp_path: Path) -> None:
    def said(text: str, kind: str = "text", **more: Any) -> dict[str, Any]:
        return {"type": kind, "text": text, **more}

    def call(name: str, **state: Any) -> dict[str, Any]:
        return {"type": "tool", "tool": "look", "callID": name, "state": {"input": {"at": name}, **state}}

    begins, user, answer = {"type": "step-start"}, {"role": "user"}, {"role": "assistant", "modelID": "m"}
    opencode(
        tmp_path / "opencode.db",
        ("s1", user, [said("Go."), {"type": "file", "mime": "text/plain"}, {"type": "agent"}]),
        ("s2", user, [said("Also.")]),
        ("s1", answer, [
            begins, said("Well.", "reasoning"), said("I look."), call("a", output="A"), call("b", error="no"),
            {"type": "step-finish"}, begins, call("c", output=""), "broken",
        ]),
        ("s1", answer | {"error": {"name": "APIError"}}, [begins, said("half")]),
        ("s2", answer, [begins, call("d")]),
        ("s1", answer | {"finish": "length"}, [begins, said("cut")]),
        ("s1", user, [{"type": "file", "mime": "image/png"}]),
        ("s1", answer, [begins, said("never")]),
    )  # fmt: skip
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "opencode.log").write_text("noise")
    sessions, found = read_all(tmp_path)
    assert (
        found.files == {"opencode": 1}
        and found.models == {"m": 2}
        and [each.source for each in sessions] == ["s1", "s2"]
    )
    told = [
        (
            each["role"],
            each["content"],
            [one["function"]["arguments"] for one in each.get("tool_calls", ())],
            each.get("weight"),
        )
        for each in sessions[0].messages
    ]
    assert told == [
        ("user", "Go.", [], None), ("assistant", "I look.", ['{"at": "a"}', '{"at": "b"}'], None), ("tool", "A", [], None),
        ("tool", "no", [], None), ("assistant", "", ['{"at": "c"}'], None), ("tool", "", [], None), ("assistant", "half", [], 0),
        ("assistant", "cut", [], 0),
    ]  # fmt: skip
    assert sessions[0].messages[1]["reasoning_content"] == "Well."
    assert found.causes == {
        "image": 1, "answer cut in the middle": 1, read.UNSHOWN_TOOLS: 2, "session that ends at a call without its result, kept": 1,
    }  # fmt: skip
