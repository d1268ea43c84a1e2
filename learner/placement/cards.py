"""The nodes and their GPUs that a run may use: those of this machine, or those that `--gpus` describes.

Called by `learner.placement.plan` and `learner.run`. Neither torch nor CUDA is loaded: NVIDIA's own `nvidia-smi` knows the cards. A
card's number here is its place among those that CUDA_VISIBLE_DEVICES leaves.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from buffers.errors import UnderstudyError

ADDRESS = "RAY_ADDRESS"
GIB = 2**30
ASK_S = 20.0
"""`nvidia-smi` takes seconds where the driver is not kept loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine of a run; the first of several is the run's own."""

    cards: tuple[int, ...] = ()
    """Bytes of memory of each of its GPUs; empty: it has none."""
    devices: tuple[str, ...] = ()
    """What CUDA calls each of them, for CUDA_VISIBLE_DEVICES; empty: they are described, or counted by Ray, only."""
    id: str = ""
    """Ray's name of it; empty: it is in no cluster."""
    address: str = "127.0.0.1"
    """The address at which the other nodes reach it."""
    is_alive: bool = True


def in_cluster(ledger_node: str) -> bool:
    """Whether a run joins a Ray cluster: RAY_ADDRESS names one, or the ledger is on a node of one (`buffer.node`)."""
    return bool(ledger_node or os.environ.get(ADDRESS))


def described(text: str) -> list[Node]:
    """`80`: one card of 80 GiB; `8x80`: a node with 8 such; `2x8x80`: 2 such nodes. Raises UnderstudyError for anything else."""
    found = re.fullmatch(r"(?:(?:(\d+)x)?(\d+)x)?(\d+(?:\.\d+)?)", text)
    nodes, cards, gib = (int(found[1] or 1), int(found[2] or 1), float(found[3])) if found else (0, 0, 0.0)
    if not (nodes and cards and gib):
        raise UnderstudyError(
            f"--gpus must be [NODES x] [CARDS x] GIB, got {text!r}; for example 8x80: 8 cards of 80 GiB, 2x8x80: two such nodes"
        )
    return [Node(cards=(int(gib * GIB),) * cards)] * nodes


def own_node(*, has_gpu: bool) -> Node:
    """This machine with its cards; none where torch sees no GPU. Raises UnderstudyError where only torch sees them."""
    node = of_this_machine() if has_gpu else Node()
    if has_gpu and not node.cards:
        raise UnderstudyError(
            "a run on GPUs needs nvidia-smi to list them, got no card from it though torch sees one; install the tools of NVIDIA's "
            "driver, or hide the cards: CUDA_VISIBLE_DEVICES="
        )
    return node


def of_this_machine(*, environment: Mapping[str, str] = os.environ) -> Node:
    """Its NVIDIA GPUs, but for those that CUDA_VISIBLE_DEVICES hides; without `nvidia-smi` there are none."""
    command = ["nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return Node()
    return visible(asked.stdout, environment.get("CUDA_VISIBLE_DEVICES"))


def visible(listed: str, names: str | None) -> Node:
    """`listed`: a line for each card, `0, GPU-1b2c, 81559` (MiB); `names`: CUDA_VISIBLE_DEVICES, None: all are."""
    lines = [[word.strip() for word in line.split(",")] for line in listed.splitlines() if line.count(",") == 2]
    sizes = {index: int(mib) * 2**20 for index, _, mib in lines if mib.isdigit()}
    by_uuid = {uuid: index for index, uuid, _ in lines}
    devices: list[str] = []
    for name in [*sizes] if names is None else names.split(","):
        index = next((index for uuid, index in by_uuid.items() if name and uuid.startswith(name)), name.strip())
        if index not in sizes:  # CUDA sees none behind one that is not there
            break
        devices.append(index)
    return Node(cards=tuple(sizes[index] for index in devices), devices=tuple(devices))
