"""Published weights as tensors, by the way that engines get them: a rank's shards, a version, the puller's dense file."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from buffers.weights.puller import FolderSource, Puller
from buffers.weights.store import VersionStore
from learner.checkpoints.weight_shards import Published
from learner.training.ranks import LearnerRanks
from learner.training.trainer import Trainer

FILE = "model.safetensors"


def published(trainer: Trainer) -> dict[str, torch.Tensor]:
    """What a trainer of one rank publishes, dense."""
    with tempfile.TemporaryDirectory() as folder:
        store = VersionStore(Path(folder))
        scratch = store.begin(0)
        return _pulled(store, scratch, [trainer.publish(scratch)])


async def published_by(ranks: LearnerRanks) -> dict[str, torch.Tensor]:
    """What several ranks publish, dense."""
    with tempfile.TemporaryDirectory() as folder:
        store = VersionStore(Path(folder))
        scratch = store.begin(0)
        return _pulled(store, scratch, await ranks.publish(scratch))


def _pulled(store: VersionStore, scratch: Path, written: Sequence[Published]) -> dict[str, torch.Tensor]:
    manifest = store.commit(scratch, version=0, base=None, shards=[one.shard for one in written])
    pulled = store.folder / "pulled"
    pulled.mkdir()
    weights = load_file(Puller(FolderSource(store.folder), pulled, file=FILE).pull(manifest.name) / FILE)
    return {name: weight.clone() for name, weight in weights.items()}
