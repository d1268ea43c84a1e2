"""Models by name and cards by size, for the tests of the plan."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from learner.placement.memory import ModelShape, read_shape
from learner.placement.plan import GIB, Node

MODELS = Path(__file__).parent / "models"
"""Folders with a config.json and nothing else."""


@cache
def shape(name: str) -> ModelShape:
    return read_shape(MODELS / name)


def node(*, cards: int, gib: float = 80, alive: bool = True) -> Node:
    return Node(cards=(int(gib * GIB),) * cards, devices=tuple(map(str, range(cards))), is_alive=alive)
