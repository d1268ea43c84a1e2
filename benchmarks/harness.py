"""What every benchmark shares: its command line, its report, and processes that end with it.

A benchmark is a function of its arguments and a folder that yields figures, more of them each time; `play` prints them and writes
the report after each, so that what there is stays if the next part fails. `call` runs a function of ours in a process of its own,
or in several that meet as ranks: arguments and answer are JSON (`python -m benchmarks.harness MODULE:FUNCTION IN OUT`).

Invariants: nothing of a process that was started here outlives it. A report's keys are the benchmark's name, its settings, the
machine's cores and load before and after, its figures, and the time that all of it took.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any

from buffers.errors import UnderstudyError

ROOT = Path(__file__).resolve().parent.parent
RUN_LIMIT_S = 1800.0
STOP_S = 60.0
Measure = Callable[[argparse.Namespace, Path], Iterator[Mapping[str, Any]]]


class RunFailed(UnderstudyError):
    """A process of the benchmark ended with an error; without it there is nothing to compare."""


def parser_of(benchmark: str, *, doc: str | None) -> argparse.ArgumentParser:
    """A parser that is called as the module, says the first line of its docstring, and has `--json`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{benchmark}", description=(doc or "").strip().split("\n")[0]
    )
    parser.add_argument("--json", type=Path, default=None, metavar="PATH", help="write all figures there")
    return parser


def play(benchmark: str, arguments: argparse.Namespace, measure: Measure, *, about: str = "") -> int:
    """Measures in a folder that is removed, and reports. Returns the exit code: 1 when a process failed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: what was started is ended, the folder removed
    began, load, figures = time.monotonic(), os.getloadavg(), dict[str, Any]()
    settings = {name: value for name, value in vars(arguments).items() if name != "json"}
    print(f"{os.cpu_count()} cores, load {load[0]:.1f} at the start" + (about and f"; {about}"), flush=True)

    def write() -> None:
        machine = {"cores": os.cpu_count(), "load_before": load, "load_after": os.getloadavg()}
        machine |= {"date": time.strftime("%Y-%m-%d")}
        report = {"benchmark": benchmark, "settings": settings, "machine": machine, **figures}
        report |= {"wall_s": time.monotonic() - began}
        arguments.json.write_text(json.dumps(report, indent=2, default=str) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory(prefix="understudy-bench-") as folder:
        try:
            for more in measure(arguments, Path(folder)):
                figures |= more
                if arguments.json is not None:
                    write()
        except RunFailed as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    for name, value in figures.items():
        if not isinstance(value, (dict, list)):
            print(f"{name:>32}: {value:.4g}" if isinstance(value, float) else f"{name:>32}: {value}")
    return 0


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of figures for a person: a column for each key of the first."""
    cells = [[*rows[0]]] + [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def medians(runs: Sequence[Mapping[str, Any]], *names: str) -> dict[str, float]:
    """The median of each of these figures over the runs."""
    return {name: median(run[name] for run in runs) for name in names}


def taken_s(act: Callable[[], object], *, times: int) -> list[float]:
    """Seconds of each time."""
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - began)
    return seconds


def in_turn(sides: Mapping[str, Callable[[], float]], *, repeats: int) -> dict[str, list[float]]:
    """What each side gives each time; every other time they go in the opposite order: moods of the machine cancel out."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats):
        for name in sorted(sides, reverse=repeat % 2 == 1):
            taken[name].append(sides[name]())
    return taken


def free_port() -> int:
    """A port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_to_end(
    *commands: Sequence[str],
    log: Path,
    started: Callable[[int], None] = lambda _: None,
    limit_s: float = RUN_LIMIT_S,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Runs programs side by side in the checkout; asks them to stop when we are. Raises RunFailed with the end of their output,
    TimeoutExpired after `limit_s`. `started` is called with each process id."""
    processes: list[subprocess.Popen[bytes]] = []
    deadline = time.monotonic() + limit_s
    try:
        with log.open("wb") as sink:  # a file: a pipe would stay open as long as any process of a killed run lives
            for command in commands:
                processes.append(
                    subprocess.Popen(
                        command, cwd=ROOT, env={"OMP_NUM_THREADS": "1", **os.environ, **(environment or {})},
                        stdout=sink, stderr=subprocess.STDOUT, start_new_session=True,
                    )
                )  # fmt: skip
                started(processes[-1].pid)
        for command, process in zip(commands, processes, strict=True):
            if process.wait(timeout=deadline - time.monotonic()) != 0:
                raise RunFailed(
                    f"a process must end with exit code 0, got {process.returncode}; try it by hand: {shlex.join(command)}\n"
                    f"its output ends:\n{log.read_text(errors='replace')[-2000:]}"
                )
    finally:
        for process in processes:
            if process.poll() is None:
                _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """A clean stop where it comes in time; nothing of the run outlives this."""
    process.terminate()
    try:
        process.wait(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def whole_run(folder: Path, name: str, *settings: str, config: str = "demo", **options: Any) -> list[dict[str, Any]]:
    """`python -m learner.run` to its end, as `folder / name`; the figures of its steps. `options`: of `run_to_end`."""
    words = ["--config", config, f"run.dir={folder}", f"run.name={name}", *settings]
    command = [sys.executable, "-m", "learner.run", *words]
    run_to_end(command, log=folder / f"{name}.log", **options)
    return [line for line in metric_lines(folder / name) if "reward/mean" in line]


def metric_lines(run: Path) -> list[dict[str, Any]]:
    """The figures of a run, as they came: of its steps, and of validations that ended later; a line is whole once it has an end."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


@contextmanager
def scripted_model(answer: Callable[[str], str], *, port: int = 0) -> Iterator[str]:
    """The root of an API like OpenAI's chat completions. `answer`: what it says to the text of the last message, one at a time."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        number = 0

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                message = {"role": "assistant", "content": answer(request["messages"][-1]["content"])}
                Handler.number += 1
                head = {"id": f"chatcmpl-{Handler.number}", "object": "chat.completion", "created": 1}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            body = json.dumps({**head, "model": request["model"], "choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


def call(
    function: Callable[..., Any] | Path,
    *,
    folder: Path,
    ranks: int = 1,
    python: Path | str = sys.executable,
    limit_s: float = RUN_LIMIT_S,
    started: Callable[[int], None] = lambda _: None,
    **arguments: Any,
) -> list[Any]:
    """Runs a function in `ranks` processes, which meet at `address`; returns what each answers. A path: a script that another
    `python` runs, with the same words. Raises RunFailed."""
    given, outs = folder / "call.json", [folder / f"answer-{rank}.json" for rank in range(ranks)]
    meeting = {"address": f"127.0.0.1:{free_port()}", "world_size": ranks}
    given.write_text(json.dumps({**meeting, **arguments}, default=str), encoding="utf-8")
    if isinstance(function, Path):
        words = [str(python), str(function), str(given)]
    else:
        module = function.__module__ if function.__module__ != "__main__" else sys.modules["__main__"].__spec__.name
        words = [str(python), "-m", "benchmarks.harness", f"{module}:{function.__name__}", str(given)]
    run_to_end(
        *([*words, str(out), str(rank)] for rank, out in enumerate(outs)),
        log=folder / "call.log", limit_s=limit_s, started=started, environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    )  # fmt: skip
    return [json.loads(out.read_text(encoding="utf-8")) for out in outs]


def main() -> None:
    """The other end of `call`."""
    name, given, out, rank = sys.argv[1:]
    module, _, function = name.partition(":")
    arguments = json.loads(Path(given).read_text(encoding="utf-8"))
    answer = getattr(importlib.import_module(module), function)(rank=int(rank), **arguments)
    Path(out).write_text(json.dumps(answer, default=str), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # threads of torch.distributed that still run sometimes abort an orderly exit


if __name__ == "__main__":
    main()
