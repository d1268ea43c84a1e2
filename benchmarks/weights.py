"""What a patch of the weights saves, and for how long an engine pauses for new ones.

`python -m benchmarks.weights [--quick] [--parts share pause] [--json PATH]`. Parts:

- share: `patch_share`, bytes of a patch over bytes of all weights: 100 million random weights N(0, 0.02) in bfloat16, after a
  step of AdamW of 1e-6. Its second step: in the first, which is the worst case, each weight moves by the whole rate.
- pause: `paused_vs_today`, an engine's pause at 150 MB of weights over the pause of the way before: vLLM's own
  `pause_generation`, then the same reload of one file. Loads take turns; medians.

It judges nothing. Whether versions arrive bit for bit under kills: `python -m tests.faults.engines.weight_faults`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from benchmarks.engines import engine_of
from benchmarks.harness import parser_of, play
from buffers.weights.manifest import Tensor as TensorOf
from buffers.weights.patch import Bits
from buffers.weights.puller import FolderSource, Puller
from buffers.weights.shard_writer import Part, ShardWriter
from buffers.weights.store import VersionStore, version_name
from configs.tiny_model import make_tiny_model
from learner.checkpoints.store import WEIGHTS
from learner.checkpoints.weight_shards import Published
from learner.checkpoints.weight_sync import WeightSync
from mocked_server.vllm.engine import VLLMEngine, start_fork_server

PAUSE_SHAPE = {"layers": 3, "hidden": 1024, "heads": 8, "kv_heads": 4, "ffn": 2816}
"""144 MB in float32."""
SHARE_TENSORS, SHARE_ELEMENTS, SHARE_STEPS = 26, 2**22, 2
"""109 million weights."""
RATE = 1e-6


def measure_share(folder: Path, *, num_tensors: int) -> dict[str, Any]:
    """A patch of an AdamW step on random weights, against what is dense; pulled and compared by its checksums."""
    (folder / "published").mkdir(parents=True)
    (folder / "pulled").mkdir()
    store, writer = VersionStore(folder / "published"), ShardWriter("rank-0.bin")
    puller = Puller(FolderSource(store.folder), folder / "pulled", file=WEIGHTS)
    shares, changed_shares, seconds = [], [], []
    for step in range(SHARE_STEPS + 1):
        parts = [share_part(number, step=step) for number in range(num_tensors)]
        base, scratch = store.base, store.begin(step)
        change = writer.compare(parts) if step else None
        began = time.monotonic()
        shard = writer.write(scratch, parts, name=version_name(scratch), as_patch=step > 0, pays=True)
        manifest = store.commit(scratch, version=step, base=base, shards=[shard])
        puller.pull(manifest.name)
        seconds.append(time.monotonic() - began)
        if change is not None:
            shares.append(manifest.num_bytes / manifest.dense_bytes)
            changed_shares.append(change.changed / change.elements)
    return {
        "patch_share": shares[-1],
        "patch_share_first_step": shares[0],
        "changed_share": changed_shares[-1],
        "changed_share_first_step": changed_shares[0],
        "weights": num_tensors * SHARE_ELEMENTS,
        "patch_s": seconds[-1],
    }


def share_part(number: int, *, step: int) -> Part:
    tensor = TensorOf(name=f"weight-{number}", dtype="BF16", shape=[SHARE_ELEMENTS])
    return Part(tensor=tensor, start=0, count=SHARE_ELEMENTS, read=partial(after_adam, number, step))


def after_adam(number: int, steps: int) -> Bits:
    """[SHARE_ELEMENTS] bfloat16 bits of random weights after some steps with random gradients."""
    generator = torch.Generator().manual_seed(number)
    weight = torch.nn.Parameter(0.02 * torch.randn(SHARE_ELEMENTS, generator=generator))
    adam = torch.optim.AdamW([weight], lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(steps):
        weight.grad = torch.randn(SHARE_ELEMENTS, generator=generator)
        adam.step()
    bits: Bits = weight.detach().to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    return bits


class OneRank:
    """Publishes a state dict as one rank."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights
        self._writer = ShardWriter("rank-0.bin")

    async def publish(self, folder: Path, *, base: str | None) -> Sequence[Published]:
        parts = [
            Part(
                tensor=TensorOf(name=name, dtype="F32", shape=list(weight.shape)), start=0, count=weight.numel(),
                read=lambda weight=weight: weight.flatten().view(torch.int32).numpy().view(np.uint32),
            )
            for name, weight in self.weights.items()
        ]  # fmt: skip
        shard = self._writer.write(folder, parts, name=version_name(folder), as_patch=False, pays=False)
        return [Published(shard=shard, changed_share=None, description=None)]


async def measure_pause(folder: Path, *, loads: int) -> dict[str, Any]:
    """Both ways take turns on one engine."""
    model = make_tiny_model(folder / "large", **PAUSE_SHAPE)
    lm = AutoModelForCausalLM.from_pretrained(model)
    weights = {name: weight.detach().clone() for name, weight in lm.named_parameters()}
    engine, sync = engine_of(model, max_tokens=256, max_model_len=1024, kv_cache_gb=0.0625), WeightSync(folder)
    await engine.start()
    before = sync.folder / "before"
    before.mkdir()
    ranks, now, then, whole_now, whole_then = OneRank(weights), [], [], [], []
    try:
        for version in range(1, loads + 1):
            began = time.monotonic()
            save_file(weights, before / WEIGHTS, metadata={"format": "pt"})
            then.append(await load_as_before(engine, before, version=version))
            middle = time.monotonic()
            now.append((await sync.publish(ranks, engine, version=version))["publish/paused_s"])
            whole_then.append(middle - began)
            whole_now.append(time.monotonic() - middle)
    finally:
        await engine.close()
        await sync.close()
    return {
        "paused_vs_today": median(now[1:]) / median(then[1:]),
        "paused_s": median(now[1:]),
        "paused_before_s": median(then[1:]),
        "megabytes": sum(weight.nbytes for weight in weights.values()) / 1e6,
        "publish_s": median(whole_now[1:]),
        "publish_before_s": median(whole_then[1:]),
        "paused": now,
        "paused_before": then,
    }


async def load_as_before(engine: VLLMEngine, folder: Path, *, version: int) -> float:
    """What `load_weights` did before versions were pulled: vLLM's own pause around the reload. Returns its seconds."""
    llm, began = engine._llm, time.monotonic()
    await llm.pause_generation(mode="keep", clear_cache=True)
    await llm.collective_rpc("load_published", args=(str(folder),))
    await llm.update_weight_version(str(version))
    await llm.resume_generation()
    return time.monotonic() - began


def measure(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """The parts."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    start_fork_server()
    if "share" in arguments.parts:
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        with tempfile.TemporaryDirectory(prefix="understudy-bench-", dir=memory) as fast:
            yield measure_share(Path(fast), num_tensors=2 if arguments.quick else SHARE_TENSORS)
    if "pause" in arguments.parts:
        yield asyncio.run(measure_pause(folder, loads=3 if arguments.quick else 21))


def main(argv: list[str] | None = None) -> int:
    parser = parser_of("weights", doc=__doc__)
    parser.add_argument("--quick", action="store_true", help="8 million weights, 3 loads")
    parser.add_argument("--parts", nargs="+", choices=["share", "pause"], default=["share", "pause"])
    return play("weights", parser.parse_args(argv), measure)


if __name__ == "__main__":
    sys.exit(main())
