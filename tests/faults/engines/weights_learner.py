"""One learner rank of `weight_faults`: real shards of a real model, whose weights are made up but follow from their version.

`python -m tests.faults.engines.weights_learner --model FOLDER --address HOST:PORT --rank R --world-size N`. For each line that it
reads, {"version": v, "folder": path, "base": name or null}, it brings its weights to version v, publishes them as the trainer
does, and writes a line: the shard and the share of changed elements. It trains nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from zlib import crc32

import msgspec
import torch
from torch import Tensor

from learner.checkpoints.weight_shards import WeightShards
from learner.model import fsdp
from learner.model.load import load_policy

CHANGED, SIZE = 0.02, 0.05
"""Share of the elements that a version changes, and the standard deviation of what is added to them."""


def changed(name: str, weight: Tensor, *, version: int) -> Tensor:
    """The tensor of a version, from that of the version before."""
    generator = torch.Generator().manual_seed(version * 2**32 + crc32(name.encode()))
    picked = torch.rand(weight.shape, generator=generator) < CHANGED
    return torch.where(picked, weight + SIZE * torch.randn(weight.shape, generator=generator), weight)


def main() -> int:
    """Answers until the input ends."""
    parser = argparse.ArgumentParser()
    for name, kind in (("model", Path), ("address", str), ("rank", int), ("world-size", int)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cpu")
    mesh = fsdp.join(arguments.address, rank=arguments.rank, world_size=arguments.world_size, device=device)
    policy = load_policy(arguments.model, device=device)
    whole = {name: weight.detach().clone() for name, weight in policy.lm.named_parameters()}
    fsdp.shard(policy, layers=policy.layers, mesh=mesh, dtype=torch.float32)
    shards = WeightShards(
        policy, dtype=torch.float32, rank=arguments.rank, world_size=arguments.world_size, adapter=None
    )
    version = 0
    print("ready", flush=True)
    for line in sys.stdin:
        call = json.loads(line)
        while version < call["version"]:
            version += 1
            whole = {name: changed(name, weight, version=version) for name, weight in whole.items()}
        for part in fsdp.local_ranges(policy.lm):
            flat = whole[part.name].flatten()
            part.local.copy_(flat[part.start : part.start + part.local.numel()].view(part.local.shape))
        written = shards.publish(Path(call["folder"]), base=call["base"])
        answer = {"shard": msgspec.to_builtins(written.shard), "changed_share": written.changed_share}
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
