"""What `benchmarks.buffer` times: the ledger, the limits beside it, and a ledger filled with many groups.

Every function returns seconds. Rows have `tokens` tokens, a quarter of them prompt. `put_rows` and `fill_and_die` are called in
processes of their own.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.harness import taken_s
from buffers.ledger.encode import body_of, stored_round
from buffers.ledger.ledger import Ledger
from buffers.ledger.round_codec import encode
from buffers.ledger.schema import open_database
from buffers.records import Round, Task
from buffers.remote.ledger_server import LedgerServer
from buffers.remote.remote_ledger import ANSWER_S, put_stored
from buffers.wire.client import Client

SECRET = b"benchmark" * 4
BATCH = 64


def row(episode_id: str, *, tokens: int, index: int = 0) -> Round:
    sampled = tokens - tokens // 4
    return Round(
        episode_id=episode_id,
        round_index=index,
        parent=None,
        tail_ids=np.arange(tokens - sampled, dtype=np.int32),
        sampled_ids=np.arange(sampled, dtype=np.int32),
        logprobs=np.linspace(-2, 0, sampled, dtype=np.float32),
        versions=np.zeros(sampled, dtype=np.int32),
    )


def open_episodes(ledger: Ledger, *, number: int, first: int = 0) -> list[str]:
    """Running episodes of one group each."""
    ledger.put_tasks([Task(task_id=f"t{first + n}", prompt=[]) for n in range(number)]).result()
    for n in range(number):
        ledger.open_group(f"t{first + n}", instance=0, group_size=1)
    return [episode.episode_id for episode in ledger.start_pending(limit=number, version=0).result()]


def put_rows(*, endpoint: str, episodes: list[str], size: int, tokens: int, **_: Any) -> list[float]:
    """Sends rounds from this process over the wire: each put is on disk when it is answered. The first one is not counted."""
    seconds = []
    with Client(endpoint, LedgerServer, secret=SECRET, answer_s=ANSWER_S) as client:
        for start in range(0, len(episodes) - size + 1, size):
            rounds = [row(name, tokens=tokens) for name in episodes[start : start + size]]
            began = time.perf_counter()
            errors = put_stored(client, [stored_round(each) for each in rounds])
            seconds.append(time.perf_counter() - began)
            assert not any(errors), errors
    return seconds[1:]


def fill_and_die(*, path: str, size: int, tokens: int, **_: Any) -> None:
    """Fills a ledger up to `size` bytes, then SIGKILLs its owner: this process."""
    ledger, number = Ledger(Path(path)), 0
    while Path(path).stat().st_size < size:
        names = open_episodes(ledger, number=BATCH, first=number)
        ledger.put_rounds([stored_round(row(name, tokens=tokens)) for name in names]).result()
        number += BATCH
    os.kill(os.getpid(), signal.SIGKILL)


def train_batches(ledger: Ledger, *, episodes: list[str], size: int) -> list[float]:
    """Claim, read and commit batches of `size` rows."""
    for episode_id in episodes:
        ledger.notify_score(episode_id, 1.0)
    seconds, step = [], ledger.position().result().step
    for _ in range(len(episodes) // size):
        step += 1
        began = time.perf_counter()
        batch = ledger.claim(size, min_version=0).result()
        assert batch is not None
        ledger.commit_step(batch.lease_id, step=step, version=step).result()
        seconds.append(time.perf_counter() - began)
    return seconds


def raw(round_: Round) -> bytes:
    """A row as a program without a ledger stores it: its arrays as they are, and a checksum."""
    arrays = (round_.tail_ids.data, round_.sampled_ids.data, round_.logprobs.data, round_.versions.data)
    crc = 0
    for array in arrays:
        crc = zlib.crc32(array, crc)
    return b"".join((crc.to_bytes(4, "little"), *arrays))


def same_bytes(round_: Round) -> bytes:
    """A row as the ledger stores it."""
    return encode(body_of(round_))


class PlainSQLite:
    """The limit: the same rows into one table, one transaction for each put, as durable."""

    def __init__(self, path: Path, *, encoded: Callable[[Round], bytes]) -> None:
        self._encoded = encoded
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        for pragma in ("page_size = 16384", "journal_mode = WAL", "synchronous = FULL"):
            self._db.execute(f"PRAGMA {pragma}")
        self._db.execute("CREATE TABLE row(id INTEGER PRIMARY KEY, body BLOB NOT NULL)")

    def put(self, rounds: list[Round]) -> float:
        began = time.perf_counter()
        bodies = [(self._encoded(one),) for one in rounds]
        self._db.execute("BEGIN IMMEDIATE")
        self._db.executemany("INSERT INTO row(body) VALUES (?)", bodies)
        self._db.execute("COMMIT")
        return time.perf_counter() - began

    def close(self) -> None:
        self._db.close()


def paired_puts(folder: Path, *, times: int, size: int, tokens: int) -> dict[str, list[float]]:
    """The ledger's puts and those of plain SQLite, in turns, in this process: the disk and the machine are the same for all."""
    plain = {
        name: PlainSQLite(folder / f"{name}-{size}.sqlite", encoded=encoded)
        for name, encoded in (("raw", raw), ("same_bytes", same_bytes))
    }
    seconds: dict[str, list[float]] = {"ledger": [], **{name: [] for name in plain}}
    with Ledger(folder / f"paired-{size}.sqlite") as ledger:
        episodes = open_episodes(ledger, number=times * size)
        for start in range(0, len(episodes), size):
            rounds = [row(name, tokens=tokens) for name in episodes[start : start + size]]
            began = time.perf_counter()
            errors = ledger.put_rounds([stored_round(one) for one in rounds]).result()
            seconds["ledger"].append(time.perf_counter() - began)
            assert not any(errors), errors
            for name, sqlite in plain.items():
                seconds[name].append(sqlite.put(rounds))
    for sqlite in plain.values():
        sqlite.close()
    return seconds


def memory_copies(*, times: int, tokens: int) -> list[float]:
    return taken_s(np.zeros(BATCH * len(encode(body_of(row("x", tokens=tokens)))), dtype=np.uint8).copy, times=times)


def arrow_writes(path: Path, *, times: int, tokens: int) -> list[float]:
    """Arrow IPC into shared memory, without any durability."""
    rounds = [body_of(row("x", tokens=tokens)) for _ in range(BATCH)]
    names = ("tail_ids", "sampled_ids", "logprobs", "versions")

    def write() -> None:
        table = pa.table({name: [getattr(body, name) for body in rounds] for name in names})
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)

    return taken_s(write, times=times)


def fill(path: Path, *, groups: int) -> None:
    """A ledger with so many ready groups, of one short row each: what a claim has to find its way in."""
    Ledger(path).close()
    db, owner = open_database(path)
    body = encode(body_of(row("x", tokens=8)))
    db.execute("PRAGMA synchronous = OFF")
    db.execute("BEGIN")
    db.execute("INSERT INTO task VALUES ('t', '{\"prompt\": []}')")
    for table, columns, values in (
        ("grp", "group_id, task_id, instance, size, min_size", lambda n: (n, "t", n, 1, 1)),
        ("episode", "episode_id, group_id, sample_index, attempt, num_rounds, num_tokens, max_version",
         lambda n: (f"{n}-0-0", n, 0, 0, 1, 6, 0)),
        ("round", "episode_id, round_index, num_sampled, finish_reason, body", lambda n: (f"{n}-0-0", 0, 6, "stop", body)),
        ("score", "episode_id, value, verdict", lambda n: (f"{n}-0-0", 1.0, "stored")),
    ):  # fmt: skip
        marks = ", ".join("?" * len(columns.split(",")))
        db.executemany(f"INSERT INTO {table}({columns}) VALUES ({marks})", map(values, range(1, groups + 1)))
    db.execute("UPDATE episode SET state = 'scored', score = 1.0")
    db.execute("UPDATE grp SET num_scored = 1, state = 'ready', max_version = 0")
    db.execute("COMMIT")
    db.close()
    if owner is not None:
        owner.close()


def claims(ledger: Ledger, *, times: int, size: int) -> list[float]:
    """Seconds of each claim of `size` groups; they stay leased."""

    def claim() -> None:
        assert ledger.claim(size, min_version=0).result() is not None

    return taken_s(claim, times=times)
