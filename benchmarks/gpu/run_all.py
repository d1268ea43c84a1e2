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
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.gpu.parts import PARTS, Machine
from buffers.errors import UnderstudyError

NO_GPU = 2
WITH_ENGINE = ("engine", "run")
"""Parts that start vLLM."""


def main(argv: list[str] | None = None) -> int:
    """Run the parts, print what they found, write the JSON file after each. 1: a part failed. 2: no GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.run_all", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--json", type=Path, default=None, metavar="PATH", help="write all figures there")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=None, help="these only")
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
    report: dict[str, Any] = {
        "benchmark": "gpu",
        "device": "cpu" if small else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "failed": {},
        "seconds": {},
    }
    for name in arguments.parts or [part for part in PARTS if not (small and part in WITH_ENGINE)]:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="understudy-gpu-") as folder:
            try:
                report[name] = PARTS[name](machine, folder=Path(folder))
                print(f"{name}: {json.dumps(report[name])}", flush=True)
            except (UnderstudyError, OSError, RuntimeError, TypeError, ValueError, subprocess.TimeoutExpired) as error:
                report["failed"][name] = f"{type(error).__name__}: {error}"
                print(f"{name}: failed: {report['failed'][name]}", file=sys.stderr, flush=True)
        report["seconds"][name] = round(time.monotonic() - began, 1)
        print(f"{name}: {report['seconds'][name]} s", flush=True)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
