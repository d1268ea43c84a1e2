"""Weights on several nodes: real versions, pullers and wire; a node is a folder of its own here, and its address loopback's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from buffers.errors import WeightsError
from buffers.records import Position
from buffers.remote.actor import HERE, ChildActor
from buffers.weights.manifest import MANIFEST, Shard
from buffers.weights.node_weights import NodeWeights, WeightNode, folder_on, same_on
from buffers.weights.store import VersionStore
from buffers.weights.version_server import MAX_READ_BYTES, VersionServer, WireSource
from buffers.wire.address import Way, WireError
from buffers.wire.connection import Connection
from configs.child_processes import python_path
from learner.checkpoints.store import WEIGHTS, Checkpoint
from learner.checkpoints.weight_shards import Published
from learner.checkpoints.weight_sync import WeightSync
from tests.support.patience import PATIENCE_S
from tests.support.weights.made_versions import MadeRanks, Weights, made_weights, moved

SECRET = b"w" * 32
FAR, LATE = "f" * 40, "1a7e" * 10


@dataclass
class SpreadRanks:
    """Two ranks, of which the second is on the node FAR and has nothing of the first one's."""

    weights: Weights = field(default_factory=made_weights)
    last: str | None = None
    ranks: MadeRanks = field(default_factory=lambda: MadeRanks(VersionStore(Path("unused")), num=2))

    async def publish(self, folder: Path, *, base: str | None) -> list[Published]:
        as_patch = base is not None and base == self.last
        there = same_on(folder, FAR)
        there.mkdir(parents=True)
        shards = self.ranks.write(folder, self.weights, as_patch=as_patch)
        (folder / "rank-1.bin").rename(there / "rank-1.bin")
        self.last = folder.name.removeprefix(".")
        return [Published(shard=shard, changed_share=None, description=None) for shard in shards]


class Engines:
    """An engine on each of these nodes, which loads what its node has."""

    def __init__(self, sync: WeightSync, *nodes: str) -> None:
        self._sync, self.nodes = sync, list(nodes)
        self.loaded: dict[str, Weights] = {}

    async def load_weights(self, folder: Path, *, version: int) -> float:
        self.loaded = {
            node: weights_in(self._sync.on_node(folder, node) if node else folder) for node in ("", *self.nodes)
        }
        return 0.0

    async def sleep(self) -> None: ...
    async def wake_up(self) -> None: ...


def weights_in(folder: Path) -> Weights:
    return {name: one.view(torch.uint16).numpy() for name, one in load_file(folder / WEIGHTS).items()}


def same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.fixture
async def sync(tmp_path: Path) -> AsyncIterator[WeightSync]:
    def make(node_id: str, sync: WeightSync) -> WeightNode:
        """In this process, without Ray."""
        options: dict[str, Any] = {"host": "127.0.0.1", "secret": SECRET, "file": WEIGHTS}
        return WeightNode(node_id, ChildActor(HERE, "node", NodeWeights, folder_on(sync.folder, node_id), **options))

    made = WeightSync(tmp_path, secret=SECRET, rank_nodes=lambda: ["", FAR], make_node=make)
    yield made
    await made.close()
    assert not made.folder.exists() and not folder_on(made.folder, FAR).exists()


async def test_shards_of_two_nodes_reach_engines_on_both_and_patches_follow(sync: WeightSync) -> None:
    ranks, engines = SpreadRanks(), Engines(sync, FAR)
    for version in range(4):
        figures = await sync.publish(ranks, engines, version=version)
        assert all(same(found, ranks.weights) for found in engines.loaded.values()) and len(engines.loaded) == 2
        assert (figures["publish/bytes"] < 400) == (version > 0)
        ranks.weights = moved(ranks.weights, share=0.05, seed=version)
    assert len(list(folder_on(sync.folder, FAR).glob("pulled/*"))) == 1


@pytest.mark.seconds
async def test_who_joins_late_begins_with_the_newest_also_when_a_ranks_node_is_gone(sync: WeightSync) -> None:
    ranks, engines = SpreadRanks(), Engines(sync, FAR)
    for version in range(3):
        ranks.weights = moved(ranks.weights, share=0.05, seed=version)
        await sync.publish(ranks, engines, version=version)
    await sync.leave(FAR)
    await sync.join(LATE)
    (folder,) = (sync.folder / "pulled").iterdir()
    assert same(weights_in(sync.on_node(folder, LATE)), ranks.weights)
    ranks.last = None  # they start anew, and publish densely
    engines.nodes = [FAR, LATE]
    ranks.weights = moved(ranks.weights, share=0.5, seed=9)
    await sync.publish(ranks, engines, version=3)
    assert len(engines.loaded) == 3 and all(same(found, ranks.weights) for found in engines.loaded.values())


@pytest.mark.seconds
async def test_a_node_that_has_lost_its_base_is_left_and_joins_again(sync: WeightSync) -> None:
    ranks, engines = SpreadRanks(), Engines(sync, FAR)
    await sync.publish(ranks, engines, version=0)
    await sync.join(LATE)
    shutil.rmtree(folder_on(sync.folder, LATE))
    engines.nodes = [FAR]
    ranks.weights = moved(ranks.weights, share=0.05, seed=1)
    await sync.publish(ranks, engines, version=1)
    await sync.join(LATE)
    (folder,) = (sync.folder / "pulled").iterdir()
    assert same(weights_in(sync.on_node(folder, LATE)), ranks.weights)


async def test_the_checkpoint_that_a_run_resumes_is_read_where_it_is(sync: WeightSync, tmp_path: Path) -> None:
    model = tmp_path / "step" / "model"
    model.mkdir(parents=True)
    (model / WEIGHTS).write_bytes(b"x")
    position = Position(step=4, lineage=0, run_id="r")
    folder, _ = sync.saved(Checkpoint(folder=tmp_path / "step", position=position, score=None))
    assert sync.on_node(folder, FAR) == model.resolve()


HOLDER = """
import sys, time
from pathlib import Path
from buffers.weights.node_weights import NodeWeights
held = NodeWeights(Path(sys.argv[1]), host="127.0.0.1", secret=b"w" * 32, file="model.safetensors")
print("ready", flush=True)
time.sleep(3600)
"""


@pytest.mark.seconds
def test_what_a_node_holds_goes_with_its_process_however_that_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "held")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": python_path()}
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        assert (tmp_path / "held" / "pulled").is_dir()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    until = time.monotonic() + PATIENCE_S
    while (tmp_path / "held").exists():
        assert time.monotonic() < until, "it outlives its process"
        time.sleep(0.02)


@pytest.fixture
def served(tmp_path: Path):
    store = VersionStore(tmp_path / "published")
    store.folder.mkdir()
    manifest = MadeRanks(store, num=2).publish(made_weights(), version=1)
    server = VersionServer(store.folder, secret=SECRET, host="127.0.0.1")
    yield server, manifest, store
    server.close()


def test_only_files_of_versions_can_be_read(served, tmp_path: Path) -> None:
    server, manifest, store = served
    (tmp_path / "secret.bin").write_text("nothing of yours")
    (store.folder / manifest.name / "link.bin").symlink_to(tmp_path / "secret.bin")
    for name, file in (
        ("../..", "secret.bin"),
        (manifest.name, "../../secret.bin"),
        (manifest.name, "notes.txt"),
        (manifest.name, "link.bin"),
        (manifest.name, "gone.bin"),
    ):
        with Connection(server.address, secret=SECRET) as connection:
            connection.send("read", {"name": name, "file": file, "offset": 0, "size": 10}, number=1)
            try:
                message = connection.receive(5.0)
            except WireError:
                continue
            assert message is not None and message.kind == "answer", (name, file)
            value, error, _ = msgspec.msgpack.decode(message.body)
            assert value is None and error is not None, (name, file)
    with Connection(server.address, secret=SECRET) as connection:
        asked = {"name": manifest.name, "file": MANIFEST, "offset": 0, "size": MAX_READ_BYTES + 1}
        connection.send("read", asked, number=1)
        with pytest.raises(WireError, match="a read must have"):
            connection.receive(5.0)
    with pytest.raises(WireError, match=r"prove that they know the run's secret"):
        Connection(server.address, secret=b"x" * 32)


def test_a_source_says_what_it_could_not_get(served, tmp_path: Path) -> None:
    server, manifest, _ = served
    source = WireSource(tmp_path / "none", secret=SECRET)
    source.turn_to(str(server.address), {})
    assert source.manifest(manifest.name) == manifest
    gone = Shard(file="rank-7.bin", size=10, tensors=[], pieces=[])
    with pytest.raises(WeightsError, match=r"rank-7.bin of version .* must come from local:.*No such file"):
        source.fetch(manifest.name, gone, to=tmp_path / "x")
    server.close()
    with pytest.raises(WeightsError, match=r"manifest.json of version .* must come from local:.* and did not"):
        source.manifest(manifest.name)
    source.close()


def test_a_large_shard_comes_in_parts(tmp_path: Path) -> None:
    name = "version-000001-0a1b2c3d"
    (tmp_path / "from" / name).mkdir(parents=True)
    content = np.random.default_rng(0).bytes(3 * MAX_READ_BYTES + 12345)
    (tmp_path / "from" / name / "rank-0.bin").write_bytes(content)
    server = VersionServer(tmp_path / "from", secret=SECRET, host="127.0.0.1")
    assert server.address.way is Way.LOCAL
    source = WireSource(tmp_path / "none", secret=SECRET)
    source.turn_to(str(server.address), {})
    source.fetch(name, Shard(file="rank-0.bin", size=len(content), tensors=[], pieces=[]), to=tmp_path / "got")
    source.close()
    server.close()
    assert (tmp_path / "got").read_bytes() == content
