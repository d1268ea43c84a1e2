"""The learner's speed: a GRPO update on packed rows against padded ones, against TRL's, as a prefix tree, and on two ranks.

`python -m benchmarks.learner [--quick] [--json PATH]`. All sides train the same small model on the same rows of long-tailed
length, each in a process of its own, one after another and in turn; a side's time is the median over its steps, without
the first. `update` is forward, backward, clipping and AdamW; `step` has the pass for the log-probabilities before the
update as well. Speed-ups are quotients of update times unless their name says otherwise. `rank_peak_share` and
`predicted_peak_error` are about memory, see `benchmarks.learner_memory`; `mfu_cpu` and `outside_share` about what else a step takes
its time for, see `benchmarks.learner_efficiency`; the figures of the prefix tree, see `benchmarks.prefix_tree`.

The padded sides are the product with other micro-batches: `padded` takes rows as they come, as many as fit the token
budget when all are as long as the longest; `sorted_padded` puts rows of like length together. TRL comes from an
environment of its own in `.venv/rivals/trl`, made when it is missing. Invariant: each side may compute at most
`--token-budget` tokens at once, on one thread per process. It judges nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.harness import Report, end_on_sigterm, parser_of
from benchmarks.learner_efficiency import measure_efficiency
from benchmarks.learner_memory import Ranks, measure_long_row, measure_memory
from benchmarks.prefix_tree import MEDIUM, SMALL, TreeShape, measure_tree
from benchmarks.processes.learner_side import Rows
from buffers.errors import UnderstudyError
from configs.tiny_model import VOCAB_SIZE, make_tiny_model
from learner.model.load import empty_model
from learner.model.operations import Work, matmul_rate

ROOT = Path(__file__).resolve().parent.parent
TRL = "trl==1.16.0"
TRL_ENVIRONMENT = ROOT / ".venv" / "rivals" / "trl"
TRL_SIDE = ROOT / "benchmarks" / "rivals" / "trl_side.py"
SIDE_LIMIT_S = 1200.0
LONG_ROW_LIMIT_S = 6 * 3600.0
GROUP_SIZE = 8
MEDIAN_TOKENS, SPREAD = 150, 1.1
"""Sigma of the rows' log-normal lengths: one in ten is over four times the median."""
APART = ("tree", "memory", "efficiency", "long_row")
"""Sides with a model of their own, which are not compared with the others."""
SAMPLED, OBSERVED = 24, 16
"""Tokens of a round that the policy sampled, and that the environment answered."""


class SideFailed(UnderstudyError):
    """A side ended with an error; without it there is nothing to compare."""


def long_tailed_rows(*, num: int, longest: int, seed: int) -> Rows:
    """`num` rows of 16 to `longest` tokens: a prompt, then rounds of sampled and observed tokens; one row has all `longest`."""
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.normal(np.log(MEDIAN_TOKENS), SPREAD, num)).astype(np.int64).clip(16, longest)
    lengths[rng.integers(num)] = longest
    prompts = np.minimum(64, lengths // 2)
    masks = []
    for length, prompt in zip(lengths, prompts, strict=True):
        place = np.arange(length) - prompt
        masks.append(((place >= 0) & (place % (SAMPLED + OBSERVED) < SAMPLED)).astype(np.uint8))
    return Rows(
        ids=rng.integers(0, VOCAB_SIZE, int(lengths.sum())).astype(np.int32),
        mask=np.concatenate(masks),
        lengths=lengths,
        prompts=prompts,
        scores=rng.integers(0, 2, num).astype(np.float32),
        groups=np.arange(num) // GROUP_SIZE,
    )


def trl_python(*, log: Path) -> Path:
    """The interpreter of TRL's environment, made with our versions of torch and transformers. Raises SideFailed."""
    python, ready = TRL_ENVIRONMENT / "bin" / "python", TRL_ENVIRONMENT / ".ready"
    wanted = [f"{name}=={version(name).split('+')[0]}" for name in ("torch", "transformers")]
    if not ready.exists():
        print(f"making {TRL_ENVIRONMENT} with {TRL}, once", flush=True)
        run_to_end([[sys.executable, "-m", "venv", str(TRL_ENVIRONMENT)]], log=log)
        run_to_end([[str(python), "-m", "pip", "install", "--quiet", *wanted, TRL]], log=log)
        ready.touch()
    return python


def run_to_end(commands: list[list[str]], *, log: Path, limit_s: float = SIDE_LIMIT_S) -> None:
    """Runs the commands side by side in the checkout. Raises SideFailed with the end of what the first to fail said."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    started, sinks = [], []
    try:
        for number, command in enumerate(commands):
            sink = log.with_suffix(f".{number}.log").open("w+", encoding="utf-8")
            sinks.append(sink)
            started.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=sink, stderr=subprocess.STDOUT))
        deadline = time.monotonic() + limit_s
        for command, process, sink in zip(commands, started, sinks, strict=True):
            if process.wait(timeout=deadline - time.monotonic()) != 0:
                sink.seek(0)
                raise SideFailed(
                    f"a side must end with exit code 0, got {process.returncode}; try it by hand: {shlex.join(command)}\n"
                    f"its output ends:\n{sink.read()[-2000:]}"
                )
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()
        for sink in sinks:
            sink.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Settings of all sides, and where their files are."""

    folder: Path
    model: Path
    steps: int
    token_budget: int
    device: str
    dtype: str
    gradient_checkpointing: bool

    def run(self, side: str) -> dict[str, Any]:
        """One process of this side (two for `two_ranks`), and its figures. Raises SideFailed."""
        out = self.folder / "figures.json"
        out.unlink(missing_ok=True)
        load = os.getloadavg()[0]
        run_to_end(self._commands(side, out=out), log=self.folder / side)
        figures: dict[str, Any] = json.loads(out.read_text())
        figures["load"] = (load, os.getloadavg()[0])
        update_s = median(step["update_s"] for step in figures["steps"])
        print(f"{side:>14}: {update_s:.3f} s an update, load {load:.1f} to {figures['load'][1]:.1f}", flush=True)
        return figures

    def _commands(self, side: str, *, out: Path) -> list[list[str]]:
        shared = ["--rows", self.folder / "rows.npz", "--model", self.model, "--out", out, "--steps", self.steps]
        shared += ["--token-budget", self.token_budget, "--device", self.device, "--dtype", self.dtype]
        shared += ["--gradient-checkpointing"] * self.gradient_checkpointing
        if side == "trl":
            return [[str(word) for word in (trl_python(log=self.folder / "install"), TRL_SIDE, *shared)]]
        num_ranks, way = (2, "packed") if side == "two_ranks" else (1, side)
        meeting = ["--address", free_address(), "--world-size", num_ranks]
        ours = [sys.executable, "-m", "benchmarks.processes.learner_side", way, *shared, *meeting]
        ranks = [[*ours, "--rank", rank] for rank in range(num_ranks)]
        if self.device == "cuda":  # each rank on a GPU of its own
            ranks = [[*command, "--device", f"cuda:{rank}"] for rank, command in enumerate(ranks)]
        return [[str(word) for word in command] for command in ranks]


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def measure(bench: Bench, *, sides: list[str], repeats: int, rows: Rows) -> dict[str, Any]:
    """All sides in turn, `repeats` times, and what they give together."""
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    failed: dict[str, str] = {}
    for _ in range(repeats):
        for side in sides:
            try:
                runs[side].append(bench.run(side))
            except SideFailed as error:
                if side == "packed":
                    raise
                print(f"{side:>14}: left out: {error}", file=sys.stderr, flush=True)
                failed[side] = str(error)
    parts = {side: summarise(done, rows=rows) for side, done in runs.items() if done}
    return {**compare(parts), "failed": failed, "parts": parts}


def summarise(runs: list[dict[str, Any]], *, rows: Rows) -> dict[str, Any]:
    """Medians over all steps of all runs; tokens per second of updating."""
    steps = [step for run in runs for step in run["steps"]]
    medians = {name: median(step[name] for step in steps) for name in ("step_s", "update_s", "cpu_s")}
    return {
        **medians,
        "trained_tokens_per_s": float(rows.mask.sum()) / medians["update_s"],
        "tokens_per_s": float(rows.lengths.sum()) / medians["update_s"],
        "peak_memory_mb": median(run["peak_memory_mb"] for run in runs),
        "padding_share": runs[0]["padding_share"],
        "grad_norm": runs[0]["warm_up"]["grad_norm"],
        "runs": runs,
    }


def compare(parts: dict[str, Any]) -> dict[str, Any]:
    """How many times as fast as each rival packed rows are, by wall time of an update, and by CPU time of a whole step."""
    ours = parts["packed"]
    figures = {"trained_tokens_per_s": ours["trained_tokens_per_s"], "peak_memory_mb": ours["peak_memory_mb"]}
    for side in ("padded", "sorted_padded", "trl"):
        if side in parts:
            figures[f"speedup_vs_{side}"] = parts[side]["update_s"] / ours["update_s"]
            figures[f"speedup_vs_{side}_whole_step"] = parts[side]["step_s"] / ours["step_s"]
            figures[f"speedup_vs_{side}_cpu"] = parts[side]["cpu_s"] / ours["cpu_s"]
            figures[f"grad_norm_difference_{side}"] = abs(parts[side]["grad_norm"] / ours["grad_norm"] - 1.0)
    if "two_ranks" in parts:
        figures["speedup_2_ranks"] = ours["update_s"] / parts["two_ranks"]["update_s"]
        figures["grad_norm_difference_2_ranks"] = abs(parts["two_ranks"]["grad_norm"] / ours["grad_norm"] - 1.0)
    return figures


HEADER = (
    f"{'side':>14} {'update s':>9} {'step s':>8} {'CPU s':>8} {'trained tok/s':>13} {'tok/s':>8} {'padding':>8} "
    f"{'peak MB':>8} {'speed-up of packed':>19}"
)


def table(parts: dict[str, Any]) -> str:
    """The results for a person."""
    lines = [HEADER]
    for side, part in parts.items():
        lines.append(
            f"{side:>14} {part['update_s']:9.3f} {part['step_s']:8.3f} {part['cpu_s']:8.3f} "
            f"{part['trained_tokens_per_s']:13.0f} {part['tokens_per_s']:8.0f} {part['padding_share']:8.1%} "
            f"{part['peak_memory_mb']:8.0f} {part['update_s'] / parts['packed']['update_s']:18.2f}x"
        )
    return "\n".join(lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = parser_of("learner", doc=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="fewer rows and steps, once, without TRL, memory and efficiency"
    )
    parser.add_argument(
        "--sides",
        nargs="+",
        default=None,
        help="tree, memory, efficiency, packed, with packed padded sorted_padded trl two_ranks; long_row only if named",
    )
    for name, default, meaning in (
        ("rows", 64, "rows of the batch, a multiple of 8"),
        ("longest", 2048, "tokens of the longest row"),
        ("token-budget", 8192, "most tokens that a side computes at once"),
        ("hidden", 128, "width of the model"),
        ("layers", 2, "its layers"),
        ("heads", 4, "its attention heads; half as many for keys and values"),
        ("steps", 2, "steps of each run that count"),
        ("repeats", 3, "runs of each side"),
        ("tree-token-budget", 4608, "most tokens at once of the prefix tree's sides, which have a larger model"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} (default {default})")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--gradient-checkpointing", action="store_true")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.rows, arguments.steps, arguments.repeats = min(arguments.rows, 24), 1, 1
    if arguments.rows % GROUP_SIZE or arguments.rows < GROUP_SIZE:
        parser.error(f"--rows must be a multiple of {GROUP_SIZE}, got {arguments.rows}")
    everything = ["packed", "padded", "sorted_padded", "trl", "two_ranks", *APART]
    left_out = {"long_row", "trl"} if arguments.quick else {"long_row"}
    if arguments.quick or arguments.device != "cpu":
        left_out |= {"memory", "efficiency"}
    arguments.sides = arguments.sides or [side for side in everything if side not in left_out]
    compared = set(arguments.sides) - set(APART)
    if not set(arguments.sides) <= set(everything) or (compared and "packed" not in arguments.sides):
        parser.error(
            f"--sides must be of {' '.join(everything)}, the others with packed, got {' '.join(arguments.sides)}"
        )
    return arguments


def _tree(arguments: argparse.Namespace, *, folder: Path) -> dict[str, Any]:
    """The prefix tree's figures: with a medium model, or in a hurry with a small one on shorter rows."""
    short = TreeShape(scale=200.0, prompt=512, answer=64)
    return measure_tree(
        lambda commands: run_to_end(commands, log=folder / "tree"),
        trl=None if arguments.quick else trl_python(log=folder / "install"),
        folder=folder,
        shape=short if arguments.quick else TreeShape(),
        model=SMALL if arguments.quick else MEDIUM,
        repeats=arguments.repeats,
        token_budget=arguments.tree_token_budget,
        device=arguments.device,
        dtype=arguments.dtype,
    )


def main(argv: list[str] | None = None) -> int:
    """Measure, print the table, write the JSON file."""
    arguments = parse(argv)
    end_on_sigterm()
    rows = long_tailed_rows(num=arguments.rows, longest=arguments.longest, seed=0)
    about = f"{len(rows.lengths)} rows of {rows.lengths.min()} to {rows.lengths.max()} tokens"
    report = Report("learner", about=f"{about}, {rows.lengths.sum()} in all, {rows.mask.sum()} trained")
    shape = {"hidden": arguments.hidden, "layers": arguments.layers, "ffn": 2 * arguments.hidden}
    shape |= {"heads": arguments.heads, "kv_heads": max(1, arguments.heads // 2)}
    with tempfile.TemporaryDirectory(prefix="understudy-bench-") as name:
        folder = Path(name)
        rows.write(folder / "rows.npz")
        bench = Bench(
            folder=folder,
            model=make_tiny_model(folder / "model", **shape),
            steps=arguments.steps,
            token_budget=arguments.token_budget,
            device=arguments.device,
            dtype=arguments.dtype,
            gradient_checkpointing=arguments.gradient_checkpointing,
        )
        work = Work.of(empty_model(bench.model))
        sides = [side for side in arguments.sides if side not in APART]
        results: dict[str, Any] = {}
        try:
            if sides:
                results = measure(bench, sides=sides, repeats=arguments.repeats, rows=rows)
            if "tree" in arguments.sides:
                results |= _tree(arguments, folder=folder)
            if "memory" in arguments.sides:
                ranks = Ranks(folder, run_to_end=run_to_end, address=free_address)
                results |= measure_memory(ranks, folder=folder)
            if "long_row" in arguments.sides:
                patient = partial(run_to_end, limit_s=LONG_ROW_LIMIT_S)
                ranks = Ranks(folder, run_to_end=patient, address=free_address)
                results |= measure_long_row(ranks, folder=folder)
            if "efficiency" in arguments.sides:
                results |= measure_efficiency(
                    lambda commands: run_to_end(commands, log=folder / "efficiency"),
                    folder=folder, address=free_address(), repeats=arguments.repeats,
                )  # fmt: skip
        except SideFailed as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    if sides:
        rate = matmul_rate(device=arguments.device, dtype=arguments.dtype)
        flops = work.update_flops(
            tokens=int(rows.lengths.sum()), squares=int((rows.lengths**2).sum()), trained=int(rows.mask.sum())
        )
        results["matmul_flops_per_s"] = rate
        results["share_of_matmul_rate"] = flops / results["parts"]["packed"]["update_s"] / rate
        print(table(results["parts"]))
        print(f"packed: {results['share_of_matmul_rate']:.1%} of the matrix-product rate of {rate / 1e12:.3g} TFLOP/s")
    settings = {name: str(value) for name, value in vars(arguments).items()} | shape
    report.write(arguments.json, settings=settings, figures=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
