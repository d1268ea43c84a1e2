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
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import buffer_parts as parts
from buffers.ledger.ledger import Ledger
from buffers.remote.ledger_server import LedgerServer

ROOT = Path(__file__).resolve().parent.parent
RIVAL = "TransferQueue==0.1.11"
NEEDS = ("tensordict", "pyvers", "omegaconf", "hydra-core")
RIVAL_SIDE = ROOT / "benchmarks" / "rivals" / "transfer_queue_side.py"
RIVAL_LIMIT_S = 600.0
CLAIM_GROUPS = 8
KILL_BYTES = 1 << 30


def durable_figures(folder: Path, *, rows: int, tokens: int) -> dict[str, float]:
    """The ledger: put 64 and put 1 from another process, then claim, read and commit batches of 64."""
    with Ledger(folder / "put.sqlite") as ledger:
        endpoint = LedgerServer(ledger, secret=parts.SECRET)
        episodes = parts.open_episodes(ledger, number=rows + parts.BATCH)
        single = parts.open_episodes(ledger, number=201, first=rows + parts.BATCH)
        put64 = _other_process(str(endpoint.address), size=parts.BATCH, tokens=tokens, episodes=episodes)
        put1 = _other_process(str(endpoint.address), size=1, tokens=tokens, episodes=single)
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
            times = list(parts.claims(ledger, times=60, size=CLAIM_GROUPS))[10:]
        figures[f"claim_ms_1e{len(str(groups)) - 1}"] = median(times) * 1e3
        path.unlink()
        groups *= 10
    return figures


def reopen_figure(folder: Path, *, tokens: int, size: int) -> dict[str, float]:
    """Seconds from opening a ledger of `size` bytes, whose owner was killed, to the first answer."""
    path = folder / "killed.sqlite"
    code = (
        "import sys; from pathlib import Path; from benchmarks import buffer_parts as parts\n"
        "from buffers.ledger.ledger import Ledger\n"
        "from buffers.ledger.encode import stored_round\n"
        "ledger, number = Ledger(Path(sys.argv[1])), 0\n"
        "while Path(sys.argv[1]).stat().st_size < int(sys.argv[2]):\n"
        "    names = parts.open_episodes(ledger, number=64, first=number); number += 64\n"
        "    ledger.put_rounds([stored_round(parts.row(name, tokens=int(sys.argv[3]))) for name in names]).result()\n"
        "print('full', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(path), str(size), str(tokens)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "full\n"
        os.kill(child.pid, signal.SIGKILL)
    began = time.perf_counter()
    with Ledger(path, resume_episodes=True) as ledger:
        ledger.position().result()
        seconds = time.perf_counter() - began
    figures = {"reopen_s": seconds, "reopen_bytes": float(path.stat().st_size)}
    path.unlink()
    return figures


def rival_figures(rivals: Path, *, tokens: int) -> dict[str, float]:
    """TransferQueue, in memory."""
    done = subprocess.run(
        [str(_rival_python(rivals)), str(RIVAL_SIDE), "--tokens", str(tokens)],
        capture_output=True,
        text=True,
        timeout=RIVAL_LIMIT_S,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"TransferQueue's side failed; leave it out with --without-rivals:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
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


def _other_process(address: str, *, size: int, tokens: int, episodes: Sequence[str]) -> list[float]:
    command = [sys.executable, "-m", "benchmarks.buffer_parts", address, str(size), str(tokens)]
    done = subprocess.run([*command, *episodes], cwd=ROOT, capture_output=True, text=True, check=True)
    seconds: list[float] = json.loads(done.stdout)
    return seconds


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything, in one folder that is removed afterwards."""
    figures: dict[str, Any] = {"tokens": options.tokens, "rows": options.rows, "load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(prefix="understudy-buffer-", dir=options.folder) as name:
        folder = Path(name)
        figures |= limits(folder, rows=options.rows, tokens=options.tokens)
        figures |= durable_figures(folder, rows=options.rows, tokens=options.tokens)
        if not options.without_rivals:
            figures |= rival_figures(options.rivals, tokens=options.tokens)
            figures["put64_vs_transferqueue"] = figures["put64_rows_s"] / figures["transferqueue_put64_rows_s"]
        figures |= claim_figures(folder, largest=options.largest)
        figures |= reopen_figure(folder, tokens=options.tokens, size=options.reopen_bytes)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=2048, help="rows put in batches of 64")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--largest", type=int, default=1_000_000, help="ready groups of the largest claim")
    parser.add_argument("--reopen-bytes", type=int, default=KILL_BYTES)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="on the disk that is measured")
    parser.add_argument("--rivals", type=Path, default=ROOT / ".venv" / "rivals")
    parser.add_argument("--without-rivals", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = measure(options)
    for key, value in figures.items():
        print(f"{key:<30}{value:>14,.3f}")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
