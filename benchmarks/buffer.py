"""How fast the buffer is, fsync on, beside what it could be at most and beside TransferQueue in memory.

    python -m benchmarks.buffer [--rows 2048] [--largest 1000000] [--without-rivals] [--json PATH]

Rows have 2,048 tokens. Puts come from another process, over the endpoint, and are on disk when they are answered; memcpy and
Arrow IPC to memory are measured in the same run. Plain SQLite with the same settings takes turns with the ledger in one process:
with the rows' arrays as they are and a checksum (`put64_vs_sqlite`: the ratio of the medians), and with the ledger's smaller
bodies (`put64_vs_sqlite_same_bytes`). TransferQueue runs in an environment of
its own in `.venv/rivals/transferqueue`, which is made when it is missing and borrows this one's packages. All figures are
medians; the machine's other work is in them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks import buffer_parts as parts
from benchmarks.harness import ROOT, RunFailed, call, parser_of, play
from buffers.ledger.ledger import Ledger
from buffers.remote.ledger_server import LedgerServer

RIVAL = "TransferQueue==0.1.11"
NEEDS = ("tensordict", "pyvers", "omegaconf", "hydra-core")
RIVAL_SIDE = ROOT / "benchmarks" / "rivals" / "transfer_queue_side.py"
CLAIM_GROUPS = 8
KILL_BYTES = 1 << 30


def durable_figures(folder: Path, *, rows: int, tokens: int) -> dict[str, float]:
    """The ledger: put 64 and put 1 from another process, then claim, read and commit batches of 64."""
    with Ledger(folder / "put.sqlite") as ledger:
        endpoint = LedgerServer(ledger, secret=parts.SECRET)
        episodes = parts.open_episodes(ledger, number=rows + parts.BATCH)
        single = parts.open_episodes(ledger, number=201, first=rows + parts.BATCH)
        put = partial(call, parts.put_rows, folder=folder, endpoint=str(endpoint.address), tokens=tokens)
        (put64,), (put1,) = put(size=parts.BATCH, episodes=episodes), put(size=1, episodes=single)
        endpoint.close()
        cycle = parts.train_batches(ledger, episodes=episodes, size=parts.BATCH)
    return {
        "put64_rows_s": parts.BATCH / median(put64),
        "put1_p50_ms": median(put1) * 1e3,
        "put1_p99_ms": sorted(put1)[int(len(put1) * 0.99)] * 1e3,
        "claim_read_commit64_p50_ms": median(cycle) * 1e3,
    }


def limits(folder: Path, *, rows: int, tokens: int) -> dict[str, float]:
    """What the same rows cost without a ledger."""
    times = rows // parts.BATCH
    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else folder
    arrow = Path(tempfile.mkdtemp(dir=memory)) / "rows.arrow"
    with ThreadPoolExecutor(1) as pool:  # as the endpoint's: who waits in another than the main thread commits himself
        put64 = pool.submit(parts.paired_puts, folder, times=times, size=parts.BATCH, tokens=tokens).result()
        put1 = pool.submit(parts.paired_puts, folder, times=200, size=1, tokens=tokens).result()
    seconds = {name: median(times) for name, times in put64.items()}
    figures = {
        "memcpy_rows_s": parts.BATCH / median(parts.memory_copies(times=times, tokens=tokens)),
        "arrow_memory_rows_s": parts.BATCH / median(parts.arrow_writes(arrow, times=times, tokens=tokens)),
        "put64_here_rows_s": parts.BATCH / seconds["ledger"],
        "sqlite64_rows_s": parts.BATCH / seconds["raw"],
        "put64_vs_sqlite": seconds["raw"] / seconds["ledger"],
        "put64_vs_sqlite_same_bytes": seconds["same_bytes"] / seconds["ledger"],
        "sqlite1_p50_ms": 1e3 * median(put1["raw"]),
    }
    arrow.unlink()
    arrow.parent.rmdir()
    return figures


def claim_figures(folder: Path, *, largest: int) -> dict[str, float]:
    """A claim of 8 groups when so many are ready."""
    figures, groups = {}, 10_000
    while groups <= largest:
        path = folder / f"claim-{groups}.sqlite"
        parts.fill(path, groups=groups)
        with Ledger(path) as ledger:
            times = parts.claims(ledger, times=60, size=CLAIM_GROUPS)[10:]
        figures[f"claim_ms_1e{len(str(groups)) - 1}"] = median(times) * 1e3
        path.unlink()
        groups *= 10
    return figures


def reopen_figure(folder: Path, *, tokens: int, size: int) -> dict[str, float]:
    """Seconds from opening a ledger of `size` bytes, whose owner was killed, to the first answer."""
    path = folder / "killed.sqlite"
    with suppress(RunFailed):
        call(parts.fill_and_die, folder=folder, path=path, size=size, tokens=tokens)
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
        yield limits(folder, rows=arguments.rows, tokens=arguments.tokens)
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


if __name__ == "__main__":
    sys.exit(main())
