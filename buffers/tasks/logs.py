"""Files and folders -> the conversations in them, one after the other: what a file is, is found from its content.

Called by `learner.import_logs`. Invariants: one file, one line of it or one slice of its rows is in memory at a time; what cannot
be used is counted with its cause and the first place where it was found, and the rest is given. Sessions of Claude Code, Codex
and other agents are handed to the program `atif-make`, which turns them into ATIF. Nothing that a file says is run.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, cast

from buffers.errors import UnderstudyError
from buffers.ledger.schema import UNREADABLE, bounded, check_files
from buffers.log_forms import (
    ATIF,
    SPANS,
    BadRecord,
    Session,
    checked,
    conversation_of_opencode,
    conversation_of_span,
    conversations,
    form_of,
    grown,
    joined,
    spans_of,
)
from buffers.private_text import without_secrets
from buffers.tasks.datasets import SPLITS, STATE, dataset_rows, saved_files
from buffers.tasks.parquet import BadCell, trace_row, without_nulls

MAX_LINE_BYTES = 1 << 26
"""The longest line, and the largest document, in bytes."""
MAX_OPEN = 1024
"""Traces of spans that are kept because more of them may come."""
HEAD_LINES = 5
TOO_DEEP = "record that is nested too deep"
CONVERT_S = 300.0
COLUMNS = (
    "messages", "conversations", "conversation", "system", "tools", "functions", "score", "reward", "source", "id", "session_id",
    "model",
)  # fmt: skip
LONG = b"\0"
"""Stands for a line, or a document, that is too long."""
TEXT, PARQUET, ARROW, LEDGER, ZIP = "JSON", "parquet", "Arrow", "ledger", "zip"
_MAGIC = {
    b"PAR1": PARQUET,
    b"ARROW1": ARROW,
    b"\xff\xff\xff\xff": ARROW,
    b"SQLite format 3\0": LEDGER,
    b"PK\x03\x04": ZIP,
}
_NAMED = {".parquet": PARQUET, ".arrow": ARROW, ".sqlite": LEDGER, ".zip": ZIP}
DATABASES = ("ledger.sqlite", "opencode.db")
UNSHOWN_TOOLS = "session that calls tools which its log does not describe, kept"
NEEDS_ATIF_MAKE = (
    "unknown content (sessions of Claude Code, Codex and others need the program atif-make: pipx install atif-make)"
)


@dataclass(slots=True, kw_only=True)
class Findings:
    """What was found: counts of files by kind, of conversations, answers and models, and of causes, each with its first place."""

    files: Counter[str] = field(default_factory=Counter)
    sessions: int = 0
    answers: int = 0
    models: Counter[str] = field(default_factory=Counter)
    secrets: Counter[str] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def cause(self, cause: str, *, place: str) -> None:
        """Something was left out."""
        self.causes[cause] += 1
        self.first.setdefault(cause, place)


@dataclass(kw_only=True)
class LogReader:
    """`of_ledger(path)`: the conversations of a ledger. `redact`: secrets become their names."""

    found: Findings
    of_ledger: Callable[[Path], Iterator[Session]]
    redact: bool = False
    _known: set[bytes] = field(default_factory=set)
    _spans: OrderedDict[str, list[Session]] = field(default_factory=OrderedDict)

    def read(self, source: Path) -> Iterator[Session]:
        """The conversations of a file, or of all files below a folder. Raises UnderstudyError where there is nothing."""
        if not source.exists():
            raise UnderstudyError(
                f"SOURCE must be a file or a folder, got {source}, which is not there; check the path"
            )
        for file in _files(source):
            try:
                yield from self._of_file(file)
            except (UnderstudyError, OSError, EOFError, zlib.error, *UNREADABLE) as error:
                self.found.cause("file that cannot be read to its end", place=f"{file} ({error})")
        while self._spans:
            yield from self._given(self._spans.popitem(last=False)[1], place="spans")

    def _of_file(self, file: Path) -> Iterator[Session]:
        kind, place = _kind_of(file), str(file)
        named = _NAMED.get(file.suffix, TEXT if file.suffix in (".json", ".jsonl") else kind)
        if kind != named:
            self.found.cause(f"file named {file.suffix} that is {kind}, read as that", place=place)
        if kind == LEDGER:
            yield from self._of_database(file)
        elif kind in (PARQUET, ARROW):
            for number, row in enumerate(dataset_rows(file, columns=COLUMNS)):
                yield from self._of_record(without_nulls(row), place=f"{file}, row {number}", is_first=not number)
        elif kind == ZIP:
            yield from self._of_others(file)
        else:
            yield from self._of_text(file)

    def _of_database(self, file: Path) -> Iterator[Session]:
        """A ledger, or opencode's sessions."""
        check_files(file)
        with closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)) as db:

            def found(words: str, *given: str) -> list[Any]:
                with bounded(db, path=file):
                    return db.execute(words, given).fetchall()

            is_opencode = {("session",), ("message",), ("part",)} <= {*found("SELECT name FROM sqlite_schema")}
            self.found.files["opencode" if is_opencode else LEDGER] += 1
            yield from self._checked(_of_opencode(found) if is_opencode else self.of_ledger(file), place=str(file))

    def _of_text(self, file: Path) -> Iterator[Session]:
        """JSON lines, or one JSON document, by what its first lines are."""
        with _text(file) as source:
            head = [_parsed(line) for line in islice(filter(None, _lines(source)), HEAD_LINES)]
        is_lines = any(isinstance(each, dict) for each in head)
        if not head:
            self.found.cause("empty file", place=str(file))
            return
        if is_lines and not any(isinstance(each, dict) and form_of(each) for each in head):
            yield from self._of_others(file)
        elif is_lines:
            yield from self._of_lines(file)
        else:
            with _text(file) as source:
                text = source.read(MAX_LINE_BYTES + 1)
            document = _parsed(text if len(text) <= MAX_LINE_BYTES else LONG)
            if isinstance(document, list):
                for number, each in enumerate(document):
                    yield from self._of_record(each, place=f"{file}, record {number}", is_first=not number)
            elif isinstance(document, dict) and not form_of(document):
                yield from self._of_others(file)
            elif isinstance(document, dict):
                yield from self._of_record(document, place=str(file), is_first=True)
            else:
                self.found.cause(f"file that is no log ({document})", place=str(file))

    def _of_lines(self, file: Path) -> Iterator[Session]:
        is_first = True
        with _text(file) as source:
            for number, line in enumerate(_lines(source), 1):
                if not line:
                    continue
                record = _parsed(line)
                if isinstance(record, str):
                    self.found.cause(record, place=f"{file}, line {number}")
                    continue
                yield from self._of_record(record, place=f"{file}, line {number}", is_first=is_first)
                is_first = False

    def _of_record(self, record: Any, *, place: str, is_first: bool) -> Iterator[Session]:
        try:
            form = form_of(record) if isinstance(record, dict) else None
            if form is None:
                raise BadRecord("record of no known form")
            self.found.files[form] += is_first
            if form != SPANS:
                yield from self._checked(conversations(record, form=form, source=place), place=place)
                return
            for trace_id, attributes in spans_of(record):
                if (session := conversation_of_span(attributes, trace_id=trace_id)) is not None:
                    yield from self._grow(session, place=place)
        except (BadRecord, RecursionError) as error:
            self.found.cause(str(error) if isinstance(error, BadRecord) else TOO_DEEP, place=place)

    def _grow(self, session: Session, *, place: str) -> Iterator[Session]:
        """Spans repeat the conversation before them: each is joined to the one that it continues."""
        for fresh in self._spelled(iter([session]), place=place):
            known = self._spans.setdefault(session.source, [])
            for number, before in enumerate(known):
                if (longer := grown(before, fresh)) is not None:
                    known[number] = longer
                    break
            else:
                known.append(fresh)
            self._spans.move_to_end(session.source)
        if len(self._spans) > MAX_OPEN:
            yield from self._given(self._spans.popitem(last=False)[1], place=place)

    def _of_others(self, file: Path) -> Iterator[Session]:
        """What `atif-make` makes of a file."""
        program = shutil.which("atif-make", path=os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"])))
        if program is None:
            self.found.cause(NEEDS_ATIF_MAKE, place=str(file))
            return
        with tempfile.TemporaryDirectory(prefix="understudy-import-") as scratch:
            command = [program, "convert", "--output", f"{scratch}/session.json", str(file.absolute())]
            try:
                done = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=CONVERT_S,
                    text=True,
                    errors="replace",
                )
            except subprocess.TimeoutExpired:
                self.found.cause(f"file on which atif-make took more than {CONVERT_S:g} s", place=str(file))
                return
            told = done.stderr.strip().splitlines() or [""]
            if done.returncode:
                unknown = "unable to detect" in done.stderr
                self.found.cause(
                    "unknown content" if unknown else "file that atif-make refuses", place=f"{file} ({told[-1]})"
                )
                return
            form = told[0].removeprefix("detected: ")
            self.found.files[f"{form} (atif-make)"] += 1
            going_on = _calls_that_go_on(file) if form == "codex-rollout" else ()
            for made in sorted(Path(scratch).rglob("*.json")):
                sessions = conversations(_parsed(made.read_bytes()), form=ATIF, source=str(file))
                yield from self._checked((joined(each, calls=going_on) for each in sessions), place=str(file))

    def _checked(self, sessions: Iterator[Session], *, place: str) -> Iterator[Session]:
        yield from self._given(self._spelled(sessions, place=place), place=place)

    def _spelled(self, sessions: Iterator[Session], *, place: str) -> Iterator[Session]:
        for session in sessions:
            causes: Counter[str] = Counter()
            try:
                yield checked(session, causes=causes)
            except (BadRecord, RecursionError) as error:
                self.found.cause(str(error) if isinstance(error, BadRecord) else TOO_DEEP, place=place)
            for cause in causes.elements():
                self.found.cause(cause, place=place)

    def _given(self, sessions: Iterable[Session], *, place: str) -> Iterator[Session]:
        """Those that can be written, each once."""
        for session in sessions:
            session = replace(
                session,
                messages=self._without_secrets(session.messages),
                tools=self._without_secrets(session.tools),
                source=self._without_secrets(session.source),
            )
            try:
                row = row_of(session)
            except BadCell:
                self.found.cause("session of more than 16 MiB, or with text that is no Unicode", place=place)
                continue
            digest = hashlib.blake2b(json.dumps([row["source"], row["messages"]]).encode(), digest_size=16).digest()
            if digest in self._known:
                self.found.cause("session that was there before", place=place)
                continue
            self._known.add(digest)
            if session.messages[-1].get("tool_calls"):
                self.found.cause("session that ends at a call without its result, kept", place=place)
            if not session.tools and any(each.get("tool_calls") for each in session.messages):
                self.found.cause(UNSHOWN_TOOLS, place=place)
            self.found.sessions += 1
            self.found.answers += sum(
                each["role"] == "assistant" and each.get("weight") != 0 for each in session.messages
            )
            self.found.models[session.model or "a model that is not named"] += 1
            yield session

    def _without_secrets(self, value: Any) -> Any:
        if isinstance(value, str):
            return without_secrets(value, self._secret)
        if isinstance(value, list):
            return [self._without_secrets(each) for each in value]
        return {key: self._without_secrets(each) for key, each in value.items()} if isinstance(value, dict) else value

    def _secret(self, name: str, secret: str) -> str:
        self.found.secrets[name] += 1
        return f"[{name}]" if self.redact else secret


def row_of(session: Session) -> dict[str, Any]:
    """A row of a file of demonstrations. Raises BadCell for what a reader of it would refuse."""
    return trace_row(
        session.messages, tools=session.tools, score=session.score, source=session.source, model=session.model
    )


def _of_opencode(found: Callable[..., list[Any]]) -> Iterator[Session]:
    """`found(words, *given)`: the rows that SQL finds in its database."""
    for (name,) in found("SELECT id FROM session ORDER BY time_created, id"):
        rows = found(
            "SELECT message.id, message.data, part.data FROM message JOIN part ON part.message_id = message.id "
            "WHERE message.session_id = ? ORDER BY message.time_created, message.id, part.id",
            name,
        )
        told = (list(each) for _, each in groupby(rows, key=itemgetter(0)))
        yield conversation_of_opencode(((each[0][1], [part for _, _, part in each]) for each in told), source=str(name))


def _calls_that_go_on(rollout: Path) -> set[str]:
    """The calls of Codex that go on with an answer, as nothing was told to the model before them: `atif-make` makes an answer of
    each."""
    found, is_going_on = set[str](), False
    with _text(rollout) as source:
        for record in map(_parsed, _lines(source)):
            item = record.get("payload") if isinstance(record, dict) else None
            if not isinstance(item, dict):
                continue
            kind = str(item.get("type"))
            is_call = kind in ("function_call", "custom_tool_call")
            if is_call and is_going_on:
                found.add(str(item.get("call_id")))
            if is_call or kind == "message" or kind.endswith("_call_output"):
                is_going_on = is_call or item.get("role") == "assistant"
    return found


def _files(source: Path) -> Iterator[Path]:
    """The files of a source in order; of a run and of opencode the database; of a data set, what its state names. Claude Code's
    sub-agents are read with their session."""
    if source.is_file():
        yield source
    for folder, folders, names in os.walk(source):
        folders.sort()
        place = Path(folder)
        if database := next((name for name in DATABASES if name in names), None):
            folders.clear()
            names = [database]
        elif (place / STATE).is_file():
            yield from saved_files(place)
            names = []
        if place.name == "subagents" and place.parent.with_suffix(".jsonl").is_file():
            names = []
        yield from (path for name in sorted({*names} - {SPLITS}) if (path := place / name).is_file())


def _kind_of(file: Path) -> str:
    with file.open("rb") as source:
        head = source.read(16)
    return next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), TEXT)


def _text(file: Path) -> BinaryIO:
    with file.open("rb") as source:
        is_gzip = source.read(2) == b"\x1f\x8b"
    return cast(BinaryIO, gzip.open(file)) if is_gzip else file.open("rb")


def _lines(source: BinaryIO) -> Iterator[bytes]:
    """Each line without its end; of one that is too long, LONG."""
    while line := source.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            while (rest := source.readline(1 << 20)) and not rest.endswith(b"\n"):
                pass
            line = LONG
        yield line.strip()


def _parsed(text: bytes) -> Any:
    """What the JSON text is: an object or a list; else why it is none, in words."""
    if text == LONG:
        return f"line of more than {MAX_LINE_BYTES >> 20} MiB"
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return "broken JSON"
    return found if isinstance(found, dict | list) else "JSON that is no object"
