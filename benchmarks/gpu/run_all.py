"""Everything of the learner that only a GPU can show, in one call: `python -m benchmarks.gpu.run_all [--json PATH]`.

Each part of `benchmarks.gpu.parts` is judged against a limit, and timed, and reported even if another fails. `fsdp`: the same
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.gpu.parts import PARTS, Machine
from benchmarks.harness import RunFailed, parser_of, play
from buffers.errors import UnderstudyError

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
    parser = parser_of("gpu.run_all", doc=__doc__)
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


if __name__ == "__main__":
    sys.exit(main())
