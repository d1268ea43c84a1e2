"""Everything of the learner that only a GPU can show, in one call: `python -m benchmarks.gpu [--json PATH]`.

Each of `PARTS` is judged against a limit, and timed, and reported even if another fails. `fsdp`: the same
updates in float32 over NCCL (on all GPUs, at most two) and on one CPU rank over gloo. `logprobs`: packed rows against float32 row
by row. `speed`: packed rows against padded ones, and the share of the measured matrix-product rate. `tree`: the prefix tree.
`memory`: what a rank takes beside what `--dry-run` says. `engine`: what vLLM alone recorded against what the learner computes,
before and after new weights. `run`: the same in the first steps of the demo. Without a GPU it says so and ends with exit code 2;
`--device cpu` goes through the same motions on small models, without the last two, for the script's own sake.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.harness import ROOT, RunFailed, parser_of, play, whole_run
from benchmarks.learner import long_tailed_rows, run_side
from benchmarks.learner_costs import QWEN3_06B, Shape, peaks, predicted_items, qwen3
from benchmarks.learner_sides import MEDIUM, MIB, SMALL, TreeShape, grad_difference, measure_tree, policy_logprobs
from buffers.errors import UnderstudyError
from configs.tiny_model import make_tiny_model
from learner.placement.memory import CUDA_BYTES, total

NO_GPU = 2
WITH_ENGINE = ("engine", "run")
"""Parts that start vLLM."""


def measure(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Run the parts, print what they found. Raises RunFailed in the end when a part failed."""
    small = arguments.device == "cpu"
    machine = Machine(device=arguments.device, dtype="float32" if small else "bfloat16", small=small)
    failed, seconds = dict[str, str](), dict[str, float]()
    yield {
        "device": "cpu" if small else torch.cuda.get_device_name(), "torch": torch.__version__,
        "transformers": transformers.__version__, "date": time.strftime("%Y-%m-%d"), "failed": failed, "seconds": seconds,
    }  # fmt: skip
    for name in arguments.parts or [part for part in PARTS if not (small and part in WITH_ENGINE)]:
        began = time.monotonic()
        (scratch := folder / name).mkdir()
        try:
            found = PARTS[name](machine, folder=scratch)
            print(f"{name}: {json.dumps(found)}", flush=True)
            yield {name: found}
        except (UnderstudyError, OSError, RuntimeError, TypeError, ValueError, subprocess.TimeoutExpired) as error:
            failed[name] = f"{type(error).__name__}: {error}"
            print(f"{name}: failed: {failed[name]}", file=sys.stderr, flush=True)
        seconds[name] = round(time.monotonic() - began, 1)
        print(f"{name}: {seconds[name]} s", flush=True)
        yield {"failed": failed, "seconds": seconds}
    if failed:
        raise RunFailed(f"parts failed: {', '.join(failed)}")


def main(argv: list[str] | None = None) -> int:
    """1: a part failed. 2: no GPU."""
    parser = parser_of("gpu", doc=__doc__)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=None, help="these only")
    parser.add_argument(
        "--device", default="cuda", choices=["cuda", "cpu"], help="cpu: small sizes, no limits on speed"
    )
    arguments = parser.parse_args(argv)
    if arguments.device != "cpu" and not torch.cuda.is_available():
        print(
            f"benchmarks.gpu needs an NVIDIA GPU, got torch {torch.__version__} without one; run it on a machine with a GPU "
            f"after `make setup` there, or try the script with --device cpu",
            file=sys.stderr,
        )
        return NO_GPU
    return play("gpu", arguments, measure)


# The parts: what each runs, the figures that it gives, and the limit that it is held to. A part needs nothing of another, and
# what trains is in a process of its own, so that a part finds the card's memory free. Sizes are large enough for an H100 to be
# busy, and small enough that all parts without an engine end within five minutes there.

TARGET_SHARE = 0.4
"""Share of the matrix-product rate, at models 2,000 wide."""
MOST_NORM_DIFFERENCE = 1e-3
"""Relative difference of gradient norms in float32 between NCCL and gloo."""
MOST_MEAN_LOGPROB_DIFFERENCE = 0.02
"""Difference in nats between engine and learner: bfloat16 has 8 bits, and a logit of 5 an error of 0.02."""
MOST_FLOAT32_DIFFERENCE = 1e-4
MOST_OF_CPU = 1.25
"""In bfloat16 the device may be so many times as far from float32 as a CPU is."""
ENGINE_ARGS = {"enforce_eager": True}
"""Nothing is compiled: an engine is up in seconds."""
MOST_TREE_DIFFERENCE = {"float32": 1e-4, "bfloat16": 0.05}
"""Of the gradient of a tree from that of its rows, as a share of its norm."""
COMMAND_LIMIT_S = 900.0
QWEN3_17B = {"hidden": 2048, "layers": 28, "heads": 16, "kv_heads": 8, "ffn": 6144}
LONG_ROWS = (4096,) * 8
ON_GPU = {
    "checkpointing": Shape(
        model=QWEN3_17B,
        lengths=LONG_ROWS,
        lag=1,
        dtype="bfloat16",
        learner={"gradient_checkpointing": True, "kl": {"coef": 0.01}, "token_budget": 16384},
    ),
    "plain": Shape(model=QWEN3_06B, lengths=LONG_ROWS, dtype="bfloat16", learner={"token_budget": 8192}),
}
"""What `gpu_1` trains, and a model of 0.6B whose activations are kept."""
ON_CPU = {"plain": Shape(model={"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 128}, lengths=(64,) * 4)}


class PartFailed(UnderstudyError):
    """A part ended with an error or missed its limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The device that the parts run on. `small`: sizes for a CPU."""

    device: str
    dtype: str
    small: bool

    @property
    def card(self) -> str:
        """Where a single rank is."""
        return "cuda:0" if self.device == "cuda" else self.device

    @property
    def num_ranks(self) -> int:
        return 1 if self.small else min(2, torch.cuda.device_count())


def speed(machine: Machine, *, folder: Path) -> dict[str, Any]:
    """The learner benchmark, packed rows against padded ones. Raises PartFailed when the share of the rate is below the target."""
    path = folder / "speed.json"
    command = [sys.executable, "-m", "benchmarks.learner", "--json", str(path), "--device", machine.device]
    command += ["--dtype", machine.dtype, "--sides", "packed", "padded", "sorted_padded", "--repeats", "1"]
    sizes = {"hidden": 2048, "layers": 8, "heads": 16, "rows": 128, "longest": 4096, "token-budget": 16384, "steps": 2}
    if machine.small:
        sizes = {"hidden": 64, "layers": 2, "heads": 4, "rows": 8, "longest": 128, "steps": 1}
    for name, value in sizes.items():
        command += [f"--{name}", str(value)]
    run_command(command)
    report: dict[str, Any] = json.loads(path.read_text())
    for side in report["parts"].values():
        del side["runs"]
    share = report["share_of_matmul_rate"]
    return judged(report, held=machine.small or share >= TARGET_SHARE, rule=f"share_of_matmul_rate >= {TARGET_SHARE}")


def fsdp(machine: Machine, *, folder: Path) -> dict[str, Any]:
    """Gradient norms of three updates, one after another: over gloo on a CPU, over NCCL. Raises PartFailed when they differ."""
    long_tailed_rows(num=16, longest=256, seed=1).write(folder / "rows.npz")
    model = make_tiny_model(folder / "fsdp", hidden=64 if machine.small else 256, layers=2)
    norms = {}
    sides = {"gloo": ("cpu", "packed"), "nccl": (machine.device, "packed" if machine.num_ranks == 1 else "two_ranks")}
    for name, (device, side) in sides.items():
        figures = run_side(
            side, folder=folder, model=model, steps=2, token_budget=1024, device=device, dtype="float32",
            gradient_checkpointing=False,
        )  # fmt: skip
        norms[name] = [step["grad_norm"] for step in (figures["warm_up"], *figures["steps"])]
    largest = max(abs(one / two - 1.0) for one, two in zip(norms["gloo"], norms["nccl"], strict=True))
    found = {"ranks": machine.num_ranks, "grad_norms": norms, "largest_difference": largest}
    return judged(found, held=largest <= MOST_NORM_DIFFERENCE, rule=f"largest_difference <= {MOST_NORM_DIFFERENCE}")


def logprobs(machine: Machine, *, folder: Path) -> dict[str, Any]:
    """Packed rows against float32 row by row on a CPU. Raises PartFailed when the device is farther from it than float32 explains,
    or in bfloat16 than a CPU is."""
    model = make_tiny_model(folder / "logprobs", hidden=64 if machine.small else 512, layers=2, heads=4)
    rows = long_tailed_rows(num=16, longest=128 if machine.small else 2048, seed=2).sequences()
    expected = policy_logprobs(model, rows, device="cpu", dtype="float32", token_budget=1)
    figures: dict[str, Any] = {}
    for device in dict.fromkeys([machine.device, "cpu"]):
        for dtype in ("float32", "bfloat16"):
            apart = (policy_logprobs(model, rows, device=device, dtype=dtype, token_budget=4096) - expected).abs()
            figures[f"{dtype} on {device}"] = {"mean": float(apart.mean()), "max": float(apart.max())}
    wide, half, usual = (
        figures[name] for name in (f"float32 on {machine.device}", f"bfloat16 on {machine.device}", "bfloat16 on cpu")
    )
    held = wide["max"] <= MOST_FLOAT32_DIFFERENCE and half["mean"] <= MOST_OF_CPU * usual["mean"]
    rule = f"float32 within {MOST_FLOAT32_DIFFERENCE}, bfloat16 within {MOST_OF_CPU} times that of a CPU"
    return judged(figures | {"max": wide["max"]}, held=held, rule=rule)


def engine(machine: Machine, *, folder: Path) -> dict[str, Any]:
    """vLLM alone: what it recorded against what the learner computes, before and after other weights were loaded in place. Raises
    PartFailed when the mean difference is above the limit."""
    tiny = [make_tiny_model(folder / f"tiny-{seed}", seed=seed) for seed in range(2)]
    found = {"tiny, float32": _engine_alone(tiny, dtype="float32", folder=folder)}
    if not machine.small:
        found[f"tiny, {machine.dtype}"] = _engine_alone(tiny, dtype=machine.dtype, folder=folder)
        larger = [qwen3(folder / f"larger-{seed}", QWEN3_06B, device=machine.device, seed=seed) for seed in range(2)]
        found[f"0.6B, {machine.dtype}"] = _engine_alone(larger, dtype=machine.dtype, folder=folder)
    means = [one["mean"] for each in found.values() for name, one in each.items() if "against" in name]
    return held_logprobs({**found, "mean": max(means)})


def _engine_alone(models: list[Path], *, dtype: str, folder: Path) -> dict[str, Any]:
    out = folder / "engine.json"
    side = [sys.executable, "-m", "benchmarks.engine_side", "--models", *map(str, models), "--out", str(out)]
    run_command([*side, "--dtype", dtype, "--engine-args", json.dumps(ENGINE_ARGS)])
    figures: dict[str, Any] = json.loads(out.read_text())
    return figures


def run(machine: Machine, *, folder: Path) -> dict[str, Any]:
    """Steps of the demo, all of it on one card, in both dtypes: what its steps say of recorded and recomputed log-probabilities,
    and what they took. Raises PartFailed when the mean difference is above the limit."""
    found: dict[str, Any] = {}
    for dtype in dict.fromkeys([machine.dtype, "float32"]):
        args = f"rollout.engine_args={json.dumps(ENGINE_ARGS)}"
        lines = whole_run(folder, dtype, "run.steps=8", f"model.dtype={dtype}", args)
        steps = [step for step in lines if "policy/mean_logprob_diff" in step]
        means, largest = ([step[f"policy/{name}_logprob_diff"] for step in steps] for name in ("mean", "max"))
        found[dtype] = {"mean": sum(means) / len(means), "max": max(largest), "steps": steps}
    return held_logprobs(found | {"mean": found[machine.dtype]["mean"]})


def tree(machine: Machine, *, folder: Path) -> dict[str, Any]:
    """What the prefix tree saves, and how far its gradients are from the rows'. Raises PartFailed when they differ."""
    small = make_tiny_model(folder / "tree_small", **SMALL)
    apart = {
        dtype: grad_difference(small, device=machine.device, dtype=dtype)
        for dtype in dict.fromkeys(["float32", machine.dtype])
    }
    print(f"tree against rows on {machine.device}: {apart}", flush=True)
    on_cpu, on_gpu = (
        TreeShape(scale=200.0, prompt=64, answer=8),
        TreeShape(scale=8.0, prompt=8192, answer=512, apart=256),
    )
    found = measure_tree(
        folder=folder,
        shape=on_cpu if machine.small else on_gpu,
        model=SMALL if machine.small else {**MEDIUM, "hidden": 1024, "ffn": 3072, "heads": 16, "kv_heads": 8},
        repeats=1 if machine.small else 3,
        token_budget=4608 if machine.small else 32768,
        device=machine.card,
        dtype=machine.dtype,
    )
    held = all(difference <= MOST_TREE_DIFFERENCE[dtype] for dtype, difference in apart.items())
    return judged(found | {"tree_grad_diff_here": apart}, held=held, rule=f"differences <= {MOST_TREE_DIFFERENCE}")


def memory(machine: Machine, *, folder: Path) -> dict[str, Any]:
    """What a rank takes, beside what `--dry-run` says of it, and what its steps take. Judges nothing."""
    found = {}
    for name, shape in (ON_CPU if machine.small else ON_GPU).items():
        model = qwen3(folder / f"memory-{name}", shape.model, device=machine.device)
        (took,) = peaks(shape, folder=folder, model=model, device=machine.card)
        items = predicted_items(shape, model=model, on_gpu=not machine.small)
        said = (total(items) - (0 if machine.small else CUDA_BYTES)) / MIB
        parts = {item.name: round(item.size / MIB) for item in items}
        found[name] = took | {"predicted_mb": said, "error": said / took["peak_mb"] - 1.0, "predicted_parts_mb": parts}
        print(f"{name:>14}: took {took}, predicted {said:.0f} MB without CUDA, {said / took['peak_mb'] - 1:+.1%}")
    return found


def run_command(command: list[str]) -> None:
    """Runs it in the checkout, its output shown. Raises PartFailed."""
    code = subprocess.run(command, cwd=ROOT, timeout=COMMAND_LIMIT_S, check=False).returncode
    if code != 0:
        raise PartFailed(f"a command must end with exit code 0, got {code}: {' '.join(command)}")


def held_logprobs(figures: dict[str, Any]) -> dict[str, Any]:
    held = figures["mean"] <= MOST_MEAN_LOGPROB_DIFFERENCE
    return judged(figures, held=held, rule=f"mean <= {MOST_MEAN_LOGPROB_DIFFERENCE} nats")


def judged(figures: dict[str, Any], *, held: bool, rule: str) -> dict[str, Any]:
    """The figures. Raises PartFailed with them when the rule is not held."""
    if not held:
        raise PartFailed(f"must have {rule}, got {json.dumps(figures)}")
    return figures


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "fsdp": fsdp,
    "logprobs": logprobs,
    "speed": speed,
    "tree": tree,
    "memory": memory,
    "engine": engine,
    "run": run,
}


if __name__ == "__main__":
    sys.exit(main())
