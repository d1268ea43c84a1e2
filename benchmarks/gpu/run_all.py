"""Everything of the learner that only a GPU can show, in one call: `python -m benchmarks.gpu.run_all [--json PATH]`.

Three parts, each judged against a limit and reported even if another fails. `speed`: the learner benchmark in bfloat16 at two
widths, with the share of the measured matrix-product rate. `fsdp`: the same update in float32 on all GPUs (at most two) over
NCCL and on one CPU rank over gloo. `logprobs`: packed rows in bfloat16 against float32 row by row, and a short
run with vLLM: what the engine recorded against what the learner computes. Without a GPU it says so and ends with exit
code 2; `--device cpu` goes through the same motions on small models, for the script's own sake.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.learner import ROOT, Bench, long_tailed_rows
from benchmarks.processes.learner_side import Rows
from buffers.errors import UnderstudyError
from configs.tiny_model import make_tiny_model
from learner.model.load import load_policy
from learner.training.packing import Sequences, plan

NO_GPU = 2
TARGET_SHARE = 0.4
"""Share of the matrix-product rate, at models 1,000 wide and up."""
MOST_NORM_DIFFERENCE = 1e-3
"""Relative difference of gradient norms in float32 between NCCL and gloo."""
MOST_MEAN_LOGPROB_DIFFERENCE = 0.02
"""Difference in nats: bfloat16 has 8 bits, and a logit of 5 an error of 0.02."""
PART_LIMIT_S = 1800.0


class PartFailed(UnderstudyError):
    """A part ended with an error or missed its limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The device that the parts run on. `small`: sizes for a CPU."""

    device: str
    dtype: str
    small: bool

    @property
    def num_ranks(self) -> int:
        return 1 if self.small else min(2, torch.cuda.device_count())


def speed(machine: Machine, *, folder: Path) -> dict[str, Any]:
    """Raises PartFailed when the share of the rate is below the target."""
    found: dict[str, Any] = {}
    sizes = [(64, 2, 4)] if machine.small else [(1024, 16, 8), (2048, 16, 16)]
    load = [("rows", 8), ("longest", 128), ("steps", 1), ("repeats", 1)] if machine.small else []
    load = load or [("rows", 128), ("longest", 4096), ("token-budget", 16384)]
    for hidden, layers, heads in sizes:
        path = folder / f"speed-{hidden}.json"
        command = [sys.executable, "-m", "benchmarks.learner", "--json", str(path), "--device", machine.device]
        command += ["--dtype", machine.dtype, "--sides", "packed", "padded", "sorted_padded"]
        for name, value in [("hidden", hidden), ("layers", layers), ("heads", heads), *load]:
            command += [f"--{name}", str(value)]
        run_command(command)
        report = json.loads(path.read_text())
        del report["parts"]
        found[f"hidden_{hidden}"] = report
    shares = [report["share_of_matmul_rate"] for report in found.values()]
    if not machine.small and max(shares) < TARGET_SHARE:
        raise PartFailed(f"share_of_matmul_rate must be >= {TARGET_SHARE}, got {shares}; figures: {json.dumps(found)}")
    return found


def fsdp(machine: Machine, *, folder: Path) -> dict[str, Any]:
    """Gradient norms of three updates, one after another. Raises PartFailed when they differ."""
    long_tailed_rows(num=16, longest=256, seed=1).write(folder / "rows.npz")
    model = make_tiny_model(folder / "fsdp", hidden=64 if machine.small else 256, layers=2)
    norms = {}
    sides = {"gloo": ("cpu", "packed"), "nccl": (machine.device, "packed" if machine.num_ranks == 1 else "two_ranks")}
    for name, (device, side) in sides.items():
        bench = Bench(
            folder=folder,
            model=model,
            steps=2,
            token_budget=1024,
            device=device,
            dtype="float32",
            gradient_checkpointing=False,
        )
        figures = bench.run(side)
        norms[name] = [step["grad_norm"] for step in (figures["warm_up"], *figures["steps"])]
    differences = [abs(one / two - 1.0) for one, two in zip(norms["gloo"], norms["nccl"], strict=True)]
    if max(differences) > MOST_NORM_DIFFERENCE:
        raise PartFailed(f"gradient norms must differ by at most {MOST_NORM_DIFFERENCE}, got {norms}")
    return {"ranks": machine.num_ranks, "grad_norms": norms, "largest_difference": max(differences)}


def logprobs(machine: Machine, *, folder: Path) -> dict[str, Any]:
    """Raises PartFailed when the mean difference is above the limit."""
    model = make_tiny_model(folder / "logprobs", hidden=64 if machine.small else 512, layers=2, heads=4)
    rows = long_tailed_rows(num=16, longest=128 if machine.small else 2048, seed=2)
    expected = _row_logprobs(model, rows, device="cpu", dtype="float32", packed=False)
    found = _row_logprobs(model, rows, device=machine.device, dtype=machine.dtype, packed=True)
    difference = (found - expected).abs()
    figures: dict[str, Any] = {"mean": float(difference.mean()), "max": float(difference.max())}
    if not machine.small:
        figures["engine"] = _engine_agreement(machine, folder=folder)
    means = [figures["mean"], *([figures["engine"]["mean"]] if "engine" in figures else [])]
    if max(means) > MOST_MEAN_LOGPROB_DIFFERENCE:
        raise PartFailed(f"the mean difference must be <= {MOST_MEAN_LOGPROB_DIFFERENCE} nats, got {figures}")
    return figures


def _row_logprobs(model: Path, rows: Rows, *, device: str, dtype: str, packed: bool) -> torch.Tensor:
    """[M] of the trained tokens, in float32 on the CPU."""
    policy = load_policy(model, device=torch.device(device)).to(getattr(torch, dtype))
    batch = rows.batch().rows
    sequences = Sequences([row.ids for row in batch], masks=[row.mask for row in batch])
    budget = 4096 if packed else 1
    found = torch.zeros(sequences.num_trained)
    for piles in plan(sequences.lengths, rows=range(len(batch)), num_ranks=1, token_budget=budget):
        micro = sequences.micro_batch(piles[0], device=torch.device(device))
        with torch.no_grad():
            outputs = policy(micro, temperature=1.0)
        found[micro.index.cpu()] = outputs.logprobs.float().cpu()
    return found


def _engine_agreement(machine: Machine, *, folder: Path) -> dict[str, float]:
    """Three steps of the demo with the real engine; what its steps say of recorded and recomputed log-probabilities."""
    settings = [f"run.dir={folder}", "run.name=engine", "run.steps=3", f"model.dtype={machine.dtype}"]
    run_command([sys.executable, "-m", "learner.run", *settings])
    lines = [json.loads(line) for line in (folder / "engine" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "policy/mean_logprob_diff" in line]
    means, largest = ([step[f"policy/{name}_logprob_diff"] for step in steps] for name in ("mean", "max"))
    return {"mean": sum(means) / len(means), "max": max(largest)}


def run_command(command: list[str]) -> None:
    """Runs it in the checkout, its output shown. Raises PartFailed."""
    code = subprocess.run(command, cwd=ROOT, timeout=PART_LIMIT_S, check=False).returncode
    if code != 0:
        raise PartFailed(f"a command must end with exit code 0, got {code}: {' '.join(command)}")


PARTS: dict[str, Callable[..., dict[str, Any]]] = {"speed": speed, "fsdp": fsdp, "logprobs": logprobs}


def main(argv: list[str] | None = None) -> int:
    """Run the parts, print what they found, write the JSON file. 1: a part failed. 2: no GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.run_all", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--json", type=Path, default=None, metavar="PATH", help="write all figures there")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument(
        "--device", default="cuda", choices=["cuda", "cpu"], help="cpu: small sizes, no limits on speed"
    )
    arguments = parser.parse_args(argv)
    small = arguments.device == "cpu"
    if not small and not torch.cuda.is_available():
        print(
            f"benchmarks.gpu needs an NVIDIA GPU, got torch {torch.__version__} without one; run it on a machine with a GPU "
            f"after `make setup` there, or try the script with --device cpu",
            file=sys.stderr,
        )
        return NO_GPU
    machine = Machine(device=arguments.device, dtype="float32" if small else "bfloat16", small=small)
    report: dict[str, Any] = {"device": "cpu" if small else torch.cuda.get_device_name(), "failed": {}}
    with tempfile.TemporaryDirectory(prefix="understudy-gpu-") as folder:
        for name in arguments.parts:
            try:
                report[name] = PARTS[name](machine, folder=Path(folder))
                print(f"{name}: {json.dumps(report[name])}", flush=True)
            except (UnderstudyError, subprocess.TimeoutExpired) as error:
                report["failed"][name] = str(error)
                print(f"{name}: failed: {error}", file=sys.stderr, flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
