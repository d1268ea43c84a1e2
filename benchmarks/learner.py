"""The learner's speed: a GRPO update on packed rows against padded ones, against TRL's, as a prefix tree, and on two ranks.

`python -m benchmarks.learner [--quick] [--json PATH]`. All sides train the same small model on the same rows of long-tailed
length, each in a process of its own, one after another and in turn; a side's time is the median over its steps, without
the first. `update` is forward, backward, clipping and AdamW; `step` has the pass for the log-probabilities before the
update as well. Speed-ups are quotients of update times. `rank_peak_share` and
`predicted_peak_error` are about memory, see `benchmarks.learner_costs`; `mfu_cpu` and `outside_share` about what else a step takes
its time for, see `benchmarks.learner_costs`; the figures of the prefix tree, see `benchmarks.learner_sides`.

The padded sides are the product with other micro-batches: `padded` takes rows as they come, as many as fit the token
budget when all are as long as the longest; `sorted_padded` puts rows of like length together. TRL comes from an
environment of its own in `.venv/rivals/trl`, made when it is missing. Invariant: each side may compute at most
`--token-budget` tokens at once, on one thread per process. It judges nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.harness import ROOT, RunFailed, call, medians, parser_of, play, run_to_end, table
from benchmarks.learner_costs import measure_efficiency, measure_long_row, measure_memory
from benchmarks.learner_sides import MEDIUM, SMALL, Rows, TreeShape, measure_tree, train
from configs.tiny_model import VOCAB_SIZE, make_tiny_model
from learner.model.layers import Work, matmul_rate
from learner.model.load import empty_model

TRL = "trl==1.16.0"
TRL_ENVIRONMENT = ROOT / ".venv" / "rivals" / "trl"
TRL_SIDE = ROOT / "benchmarks" / "rivals" / "trl_side.py"
COMPARED = ("packed", "padded", "sorted_padded", "trl", "two_ranks")
GROUP_SIZE = 8
MEDIAN_TOKENS, SPREAD = 150, 1.1
"""Sigma of the rows' log-normal lengths: one in ten is over four times the median."""
APART = ("tree", "memory", "efficiency", "long_row")
"""Sides with a model of their own, which are not compared with the others."""
SAMPLED, OBSERVED = 24, 16
"""Tokens of a round that the policy sampled, and that the environment answered."""


def long_tailed_rows(*, num: int, longest: int, seed: int) -> Rows:
    """`num` rows of 16 to `longest` tokens: a prompt, then rounds of sampled and observed tokens; one row has all `longest`."""
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.normal(np.log(MEDIAN_TOKENS), SPREAD, num)).astype(np.int64).clip(16, longest)
    lengths[rng.integers(num)] = longest
    prompts = np.minimum(64, lengths // 2)
    masks = []
    for length, prompt in zip(lengths, prompts, strict=True):
        place = np.arange(length) - prompt
        masks.append((place >= 0) & (place % (SAMPLED + OBSERVED) < SAMPLED))
    ids = np.split(rng.integers(0, VOCAB_SIZE, int(lengths.sum())), np.cumsum(lengths)[:-1])
    return Rows.of(ids, masks=masks, scores=rng.integers(0, 2, num), groups=np.arange(num) // GROUP_SIZE)


def trl_python(*, log: Path) -> Path:
    """The interpreter of TRL's environment, made with our versions of torch and transformers. Raises RunFailed."""
    python, ready = TRL_ENVIRONMENT / "bin" / "python", TRL_ENVIRONMENT / ".ready"
    wanted = [f"{name}=={version(name).split('+')[0]}" for name in ("torch", "transformers")]
    if not ready.exists():
        print(f"making {TRL_ENVIRONMENT} with {TRL}, once", flush=True)
        run_to_end([sys.executable, "-m", "venv", str(TRL_ENVIRONMENT)], log=log)
        run_to_end([str(python), "-m", "pip", "install", "--quiet", *wanted, TRL], log=log)
        ready.touch()
    return python


def run_side(side: str, *, folder: Path, **given: Any) -> dict[str, Any]:
    """One process of this side (two for `two_ranks`) on the rows in the folder, and its figures. `given`: model, steps,
    token_budget, device, dtype and gradient_checkpointing. Raises RunFailed."""
    given |= {"folder": folder, "rows": folder / "rows.npz"}
    load = os.getloadavg()[0]
    if side == "trl":
        figures, *_ = call(TRL_SIDE, python=trl_python(log=folder / "install"), **given)
    else:
        ranks, way = (2, "packed") if side == "two_ranks" else (1, side)
        figures, *_ = call(train, ranks=ranks, way=way, **given)
    figures["load"] = (load, os.getloadavg()[0])
    update_s = median(step["update_s"] for step in figures["steps"])
    print(f"{side:>14}: {update_s:.3f} s an update, load {load:.1f} to {figures['load'][1]:.1f}", flush=True)
    return dict(figures)


def measure_sides(
    run: Callable[[str], dict[str, Any]], *, sides: list[str], repeats: int, rows: Rows
) -> dict[str, Any]:
    """All sides in turn, `repeats` times, and what they give together."""
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    failed: dict[str, str] = {}
    for _ in range(repeats):
        for side in sides:
            try:
                runs[side].append(run(side))
            except RunFailed as error:
                if side == "packed":
                    raise
                print(f"{side:>14}: left out: {error}", file=sys.stderr, flush=True)
                failed[side] = str(error)
    parts = {side: summarise(done, rows=rows) for side, done in runs.items() if done}
    return {**compare(parts), "failed": failed, "parts": parts}


def summarise(runs: list[dict[str, Any]], *, rows: Rows) -> dict[str, Any]:
    """Medians over all steps of all runs; tokens per second of updating."""
    steps = [step for run in runs for step in run["steps"]]
    middle = medians(steps, "step_s", "update_s")
    return {
        **middle,
        "trained_tokens_per_s": float(rows.mask.sum()) / middle["update_s"],
        "tokens_per_s": float(rows.lengths.sum()) / middle["update_s"],
        "peak_memory_mb": median(run["peak_memory_mb"] for run in runs),
        "grad_norm": runs[0]["warm_up"]["grad_norm"],
        "runs": runs,
    }


def compare(parts: dict[str, Any]) -> dict[str, Any]:
    """How many times as fast as each rival packed rows are, by the time of an update."""
    ours = parts["packed"]
    figures = {"trained_tokens_per_s": ours["trained_tokens_per_s"], "peak_memory_mb": ours["peak_memory_mb"]}
    for side in ("padded", "sorted_padded", "trl"):
        if side in parts:
            figures[f"speedup_vs_{side}"] = parts[side]["update_s"] / ours["update_s"]
            figures[f"grad_norm_difference_{side}"] = abs(parts[side]["grad_norm"] / ours["grad_norm"] - 1.0)
    if "two_ranks" in parts:
        figures["speedup_2_ranks"] = ours["update_s"] / parts["two_ranks"]["update_s"]
        figures["grad_norm_difference_2_ranks"] = abs(parts["two_ranks"]["grad_norm"] / ours["grad_norm"] - 1.0)
    return figures


def shown(parts: dict[str, Any]) -> str:
    """The results for a person."""
    names = ("update_s", "step_s", "trained_tokens_per_s", "tokens_per_s", "peak_memory_mb")
    packed = parts["packed"]["update_s"]
    return table(
        [
            {"side": side, **{name: part[name] for name in names}, "packed": f"{part['update_s'] / packed:.2f}x"}
            for side, part in parts.items()
        ]
    )


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
    everything = [*COMPARED, *APART]
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


def measure(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """The sides that are compared, then those with models of their own."""
    sides = [side for side in arguments.sides if side not in APART]
    if sides:
        yield _compared(arguments, folder=folder, sides=sides)
    if "tree" in arguments.sides:
        yield measure_tree(
            trl=None if arguments.quick else trl_python(log=folder / "install"),
            folder=folder,
            shape=TreeShape(scale=200.0, prompt=512, answer=64) if arguments.quick else TreeShape(),
            model=SMALL if arguments.quick else MEDIUM,
            repeats=arguments.repeats,
            token_budget=arguments.tree_token_budget,
            device=arguments.device,
            dtype=arguments.dtype,
        )
    if "memory" in arguments.sides:
        yield measure_memory(folder=folder)
    if "long_row" in arguments.sides:
        yield measure_long_row(folder=folder)
    if "efficiency" in arguments.sides:
        yield measure_efficiency(folder=folder, repeats=arguments.repeats)


def _compared(arguments: argparse.Namespace, *, folder: Path, sides: list[str]) -> dict[str, Any]:
    rows = long_tailed_rows(num=arguments.rows, longest=arguments.longest, seed=0)
    rows.write(folder / "rows.npz")
    print(
        f"{len(rows.lengths)} rows of {rows.lengths.min()} to {rows.lengths.max()} tokens, {rows.lengths.sum()} in all, "
        f"{rows.mask.sum()} trained",
        flush=True,
    )
    shape = {"hidden": arguments.hidden, "layers": arguments.layers, "ffn": 2 * arguments.hidden}
    shape |= {"heads": arguments.heads, "kv_heads": max(1, arguments.heads // 2)}
    given = {name: getattr(arguments, name) for name in ("steps", "token_budget", "device", "dtype")}
    given |= {"model": make_tiny_model(folder / "model", **shape)}
    given |= {"gradient_checkpointing": arguments.gradient_checkpointing}
    results = measure_sides(
        lambda side: run_side(side, folder=folder, **given), sides=sides, repeats=arguments.repeats, rows=rows
    )
    rate = matmul_rate(device=arguments.device, dtype=arguments.dtype)
    flops = Work.of(empty_model(given["model"])).update_flops(**rows.work)
    share = flops / results["parts"]["packed"]["update_s"] / rate
    print(shown(results["parts"]))
    return results | {"matmul_flops_per_s": rate, "share_of_matmul_rate": share}


def main(argv: list[str] | None = None) -> int:
    return play("learner", parse(argv), measure)


if __name__ == "__main__":
    sys.exit(main())
