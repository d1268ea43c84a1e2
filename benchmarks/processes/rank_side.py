"""What the processes that train have in common: their flags, their trainer, and how they end.

Called by the sides of `benchmarks.learner` beside it. It measures nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn, TypeVar

from configs.schema import LearnerConfig
from learner.training.trainer import Trainer

SomeTrainer = TypeVar("SomeTrainer", bound=Trainer)


def rank_parser(
    program: str, *, about: str | None, files: Iterable[str] = ("rows", "model", "out")
) -> argparse.ArgumentParser:
    """Flags of one rank. `about`: the program's docstring, of which the first line is shown."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=(about or "").split("\n")[0])
    for name in files:
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--address", required=True, help="host:port where the ranks meet")
    for name, default in (("rank", 0), ("world-size", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    return parser


def make_trainer(
    kind: type[SomeTrainer], config: LearnerConfig, *, arguments: argparse.Namespace, keep_versions: int = 1
) -> SomeTrainer:
    """The trainer of the rank that the flags of `rank_parser` name."""
    return kind(
        config,
        model_path=str(arguments.model),
        dtype=arguments.dtype,
        temperature=1.0,
        seed=0,
        keep_versions=keep_versions,
        address=arguments.address,
        rank=arguments.rank,
        world_size=arguments.world_size,
        device=arguments.device,
    )


def end(main: Callable[[], int]) -> NoReturn:
    """Runs `main` and ends the process: threads of torch.distributed that still run sometimes abort an orderly exit."""
    code = main()
    sys.stdout.flush()
    os._exit(code)
