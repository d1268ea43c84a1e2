"""How fast the buffer is, fsync on, beside plain SQLite and beside TransferQueue in memory.

    python -m benchmarks.buffer [--rows 2048] [--largest 1000000] [--without-rivals] [--json PATH]

Rows have 2,048 tokens. Puts come from another process, over the endpoint, and are on disk when they are answered. Plain
SQLite with the same settings takes turns with the ledger in one process, with the rows' arrays as they are and a checksum
(`put64_vs_sqlite`: the ratio of the medians). TransferQueue runs in an environment of its own in
`.venv/rivals/transferqueue`, which is made when it is missing and borrows this one's packages. All figures are medians; the
machine's other work is in them.
"""

from __future__ import annotations

import argparse
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.harness import ROOT, RunFailed, call, parser_of, play, taken_s
from buffers.ledger.encode import encode, stored_round
from buffers.ledger.ledger import Ledger
from buffers.ledger.schema import open_database
from buffers.records import Round, Task
from buffers.remote.ledger_server import LedgerServer
from buffers.remote.remote_ledger import ANSWER_S
from buffers.wire.client import Client

RIVAL = "TransferQueue==0.1.11"
NEEDS = ("tensordict", "pyvers", "omegaconf", "hydra-core")
RIVAL_SIDE = ROOT / "benchmarks" / "rivals" / "transfer_queue_side.py"
CLAIM_GROUPS = 8
KILL_BYTES = 1 << 30


def durable_figures(folder: Path, *, rows: int, tokens: int) -> dict[str, float]:
    """The ledger: put 64 and put 1 from another process."""
    with Ledger(folder / "put.sqlite") as ledger:
        endpoint = LedgerServer(ledger, secret=SECRET)
        episodes = open_episodes(ledger, number=rows + BATCH)
        single = open_episodes(ledger, number=201, first=rows + BATCH)
        put = partial(call, put_rows, folder=folder, endpoint=str(endpoint.address), tokens=tokens)
        (put64,), (put1,) = put(size=BATCH, episodes=episodes), put(size=1, episodes=single)
        endpoint.close()
    return {"put64_rows_s": BATCH / median(put64), "put1_p50_ms": median(put1) * 1e3}


def limit(folder: Path, *, rows: int, tokens: int) -> dict[str, float]:
    """What the same rows cost without a ledger."""
    with ThreadPoolExecutor(1) as pool:  # as the endpoint's: who waits in another than the main thread commits himself
        seconds = pool.submit(paired_puts, folder, times=rows // BATCH, tokens=tokens).result()
    ledger, plain = map(median, seconds)
    return {"put64_here_rows_s": BATCH / ledger, "sqlite64_rows_s": BATCH / plain, "put64_vs_sqlite": plain / ledger}


def claim_figures(folder: Path, *, largest: int) -> dict[str, float]:
    """A claim of 8 groups when so many are ready."""
    figures, groups = {}, 10_000
    while groups <= largest:
        path = folder / f"claim-{groups}.sqlite"
        fill(path, groups=groups)
        with Ledger(path) as ledger:
            times = claims(ledger, times=60, size=CLAIM_GROUPS)[10:]
        figures[f"claim_ms_1e{len(str(groups)) - 1}"] = median(times) * 1e3
        path.unlink()
        groups *= 10
    return figures


def reopen_figure(folder: Path, *, tokens: int, size: int) -> dict[str, float]:
    """Seconds from opening a ledger of `size` bytes, whose owner was killed, to the first answer."""
    path = folder / "killed.sqlite"
    with suppress(RunFailed):
        call(fill_and_die, folder=folder, path=path, size=size, tokens=tokens)
    assert path.stat().st_size >= size, (folder / "call.log").read_text()
    began = time.perf_counter()
    with Ledger(path, resume_episodes=True) as ledger:
        ledger.position().result()
        seconds = time.perf_counter() - began
    figures = {"reopen_s": seconds, "reopen_bytes": float(path.stat().st_size)}
    path.unlink()
    return figures


def rival_figures(rivals: Path, *, folder: Path, tokens: int) -> dict[str, float]:
    """TransferQueue, in memory. Raises RunFailed: leave it out with --without-rivals."""
    (found,) = call(RIVAL_SIDE, python=_rival_python(rivals), folder=folder, tokens=tokens, times=20)
    return {f"transferqueue_{name}": value for name, value in found.items()}


def _rival_python(rivals: Path) -> Path:
    folder = rivals / "transferqueue"
    python = folder / "bin" / "python"
    if not (folder / "ready").is_file():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        site = next((folder / "lib").glob("python*/site-packages"))
        ours = [path for path in sys.path if path.endswith("site-packages")]
        (site / "borrowed.pth").write_text("\n".join(ours), encoding="utf-8")
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site)]
        subprocess.run([*install, RIVAL, *NEEDS], check=True)
        (folder / "ready").touch()
    return python


def measure(arguments: argparse.Namespace, _: Path) -> Iterator[dict[str, float]]:
    """Everything, in one folder on the disk that is measured; it is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="understudy-buffer-", dir=arguments.folder) as name:
        folder = Path(name)
        yield limit(folder, rows=arguments.rows, tokens=arguments.tokens)
        durable = durable_figures(folder, rows=arguments.rows, tokens=arguments.tokens)
        yield durable
        if not arguments.without_rivals:
            rival = rival_figures(arguments.rivals, folder=folder, tokens=arguments.tokens)
            yield rival | {"put64_vs_transferqueue": durable["put64_rows_s"] / rival["transferqueue_put64_rows_s"]}
        yield claim_figures(folder, largest=arguments.largest)
        yield reopen_figure(folder, tokens=arguments.tokens, size=arguments.reopen_bytes)


def main() -> int:
    parser = parser_of("buffer", doc=__doc__)
    parser.add_argument("--rows", type=int, default=2048, help="rows put in batches of 64")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--largest", type=int, default=1_000_000, help="ready groups of the largest claim")
    parser.add_argument("--reopen-bytes", type=int, default=KILL_BYTES)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="on the disk that is measured")
    parser.add_argument("--rivals", type=Path, default=ROOT / ".venv" / "rivals")
    parser.add_argument("--without-rivals", action="store_true")
    return play("buffer", parser.parse_args(), measure)


# What is timed. Rows have `tokens` tokens, a quarter of them prompt. `put_rows` and `fill_and_die` are called in processes of their
# own.

SECRET = b"benchmark" * 4
BATCH = 64


def row(episode_id: str, *, tokens: int) -> Round:
    sampled = tokens - tokens // 4
    return Round(
        episode_id=episode_id,
        round_index=0,
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
    with Client(endpoint, secret=SECRET, answer_s=ANSWER_S) as client:
        for start in range(0, len(episodes) - size + 1, size):
            rounds = [row(name, tokens=tokens) for name in episodes[start : start + size]]
            began = time.perf_counter()
            outcomes = client.call(LedgerServer.put_rounds, rounds=[stored_round(each) for each in rounds])
            seconds.append(time.perf_counter() - began)
            assert not any(refusal for _, refusal in outcomes), outcomes
    return seconds[1:]


def fill_and_die(*, path: str, size: int, tokens: int, **_: Any) -> None:
    """Fills a ledger up to `size` bytes, then SIGKILLs its owner: this process."""
    ledger, number = Ledger(Path(path)), 0
    while Path(path).stat().st_size < size:
        names = open_episodes(ledger, number=BATCH, first=number)
        ledger.put_rounds([stored_round(row(name, tokens=tokens)) for name in names]).result()
        number += BATCH
    os.kill(os.getpid(), signal.SIGKILL)


def raw(round_: Round) -> bytes:
    """A row as a program without a ledger stores it: its arrays as they are, and a checksum."""
    arrays = (round_.tail_ids.data, round_.sampled_ids.data, round_.logprobs.data, round_.versions.data)
    crc = 0
    for array in arrays:
        crc = zlib.crc32(array, crc)
    return b"".join((crc.to_bytes(4, "little"), *arrays))


class PlainSQLite:
    """The limit: the same rows into one table, one transaction for each put, as durable."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        for pragma in ("page_size = 16384", "journal_mode = WAL", "synchronous = FULL"):
            self._db.execute(f"PRAGMA {pragma}")
        self._db.execute("CREATE TABLE row(id INTEGER PRIMARY KEY, body BLOB NOT NULL)")

    def put(self, rounds: list[Round]) -> None:
        bodies = [(raw(one),) for one in rounds]
        self._db.execute("BEGIN IMMEDIATE")
        self._db.executemany("INSERT INTO row(body) VALUES (?)", bodies)
        self._db.execute("COMMIT")

    def close(self) -> None:
        self._db.close()


def paired_puts(folder: Path, *, times: int, tokens: int) -> tuple[list[float], list[float]]:
    """Seconds of the ledger's puts and of those of plain SQLite, in turns, in this process: the disk and the machine are the same
    for both."""
    plain, seconds = PlainSQLite(folder / "plain.sqlite"), (list[float](), list[float]())
    with Ledger(folder / "paired.sqlite") as ledger:
        episodes = open_episodes(ledger, number=times * BATCH)
        for start in range(0, len(episodes), BATCH):
            rounds = [row(name, tokens=tokens) for name in episodes[start : start + BATCH]]

            def put(rounds: list[Round] = rounds) -> None:
                errors = ledger.put_rounds([stored_round(one) for one in rounds]).result()
                assert not any(errors), errors

            for taken, act in zip(seconds, (put, partial(plain.put, rounds)), strict=True):
                taken += taken_s(act, times=1)
    plain.close()
    return seconds


def fill(path: Path, *, groups: int) -> None:
    """A ledger with so many ready groups, of one short row each: what a claim has to find its way in."""
    Ledger(path).close()
    db, owner = open_database(path)
    body = encode(row("x", tokens=8))
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


if __name__ == "__main__":
    sys.exit(main())
