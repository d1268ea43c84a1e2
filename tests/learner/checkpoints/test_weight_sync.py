"""Rules of learner/checkpoints/weight_sync.py: real versions and a real puller process, made-up ranks and engine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from buffers.errors import WeightsError
from buffers.weights.shard_writer import ShardWriter
from buffers.weights.store import VersionStore
from learner.checkpoints.store import WEIGHTS
from learner.checkpoints.weight_shards import Published
from learner.checkpoints.weight_sync import WeightSync
from tests.support.weights.made_versions import MadeRanks, Weights, made_weights, moved


@dataclass
class TwoRanks:
    """Write `weights`, as patches against the version that they wrote last where that is the base."""

    weights: Weights = field(default_factory=made_weights)
    last: str | None = None
    bases: list[str | None] = field(default_factory=list)
    ranks: MadeRanks = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """As new processes: they remember nothing."""
        self.ranks, self.last = MadeRanks(VersionStore(Path("unused")), num=2), None

    async def publish(self, folder: Path, *, base: str | None) -> list[Published]:
        as_patch = base is not None and base == self.last
        self.bases.append(base if as_patch else None)
        shards = self.ranks.write(folder, self.weights, as_patch=as_patch)
        self.last = folder.name.removeprefix(".")
        return [Published(shard=shard, changed_share=0.5 if as_patch else None, description=None) for shard in shards]


@dataclass
class NotingEngine:
    """Remembers what it was given."""

    loaded: list[tuple[int, Weights]] = field(default_factory=list)
    folder: Path | None = None

    async def load_weights(self, folder: Path, *, version: int) -> float:
        weights = load_file(folder / WEIGHTS)
        self.loaded.append((version, {name: one.view(torch.uint16).numpy() for name, one in weights.items()}))
        self.folder = folder
        return 0.25

    async def sleep(self) -> None: ...
    async def wake_up(self) -> None: ...


@pytest.fixture
async def sync(tmp_path: Path) -> AsyncIterator[WeightSync]:
    made = WeightSync(tmp_path)
    yield made
    await made.close()
    assert not made.folder.exists()


def has(engine: NotingEngine, version: int, weights: Weights) -> bool:
    found, bits = engine.loaded[-1]
    return found == version and all(np.array_equal(bits[name], weights[name]) for name in weights)


async def test_each_version_reaches_the_engine_and_says_what_it_cost(sync: WeightSync) -> None:
    ranks, engine = TwoRanks(), NotingEngine()
    figures = await sync.publish(ranks, engine, version=0)
    assert has(engine, 0, ranks.weights)
    assert figures == {"publish/bytes": 2 * 816, "publish/paused_s": 0.25}
    for version in range(1, 4):
        ranks.weights = moved(ranks.weights, share=0.05, seed=version)
        figures = await sync.publish(ranks, engine, version=version)
        assert has(engine, version, ranks.weights)
        assert figures["publish/changed_share"] == 0.5 and figures["publish/bytes"] < 400
    assert ranks.bases[0] is None and None not in ranks.bases[1:]
    pulled = sync.folder / "pulled"
    assert [path for path in pulled.iterdir()] == [engine.folder], "one dense copy, for an engine that starts again"


@pytest.mark.seconds
async def test_a_puller_that_is_killed_is_started_again(sync: WeightSync) -> None:
    ranks, engine = TwoRanks(), NotingEngine()
    for version in range(6):
        ranks.weights = moved(ranks.weights, share=0.05, seed=version)
        publishing = asyncio.create_task(sync.publish(ranks, engine, version=version))
        await asyncio.sleep(0.002 * version)  # before, in the middle, and after
        if (pid := sync._puller.pid) is not None:
            with suppress(ProcessLookupError):  # killed before, and not yet replaced
                os.kill(pid, signal.SIGKILL)
        await publishing
        assert has(engine, version, ranks.weights)
    assert ranks.bases.count(None) == 1


@pytest.mark.seconds
async def test_a_puller_that_dies_of_each_call_ends_in_an_error(sync: WeightSync) -> None:
    (sync.folder / "pulled" / ".no-folder").touch()  # where it starts it removes folders of this kind
    with pytest.raises(WeightsError, match=r"the puller of the weights must pull .* but died 3 times"):
        await sync.publish(TwoRanks(), NotingEngine(), version=0)


async def test_ranks_that_are_new_publish_densely(sync: WeightSync) -> None:
    ranks, engine = TwoRanks(), NotingEngine()
    await sync.publish(ranks, engine, version=0)
    ranks.restart()
    ranks.weights = moved(ranks.weights, share=0.05, seed=1)
    await sync.publish(ranks, engine, version=1)
    assert has(engine, 1, ranks.weights)
    await sync.publish(ranks, engine, version=2)
    assert [base is None for base in ranks.bases] == [True, True, False]


@pytest.mark.parametrize("where", ["published", "pulled"])
async def test_a_version_that_cannot_be_made_is_published_again_densely(
    sync: WeightSync, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    ranks, engine = TwoRanks(), NotingEngine()
    await sync.publish(ranks, engine, version=0)
    ranks.weights = moved(ranks.weights, share=0.05, seed=1)
    if where == "pulled":  # the node's own copy is damaged
        (weights,) = (sync.folder / "pulled").rglob(WEIGHTS)
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
    else:  # what a rank wrote is
        damage_next_patch(ranks)
    await sync.publish(ranks, engine, version=1)
    assert has(engine, 1, ranks.weights)
    assert ranks.bases[1] is not None and ranks.bases[2] is None
    assert "version 1 is published again, densely: " in caplog.text


def damage_next_patch(ranks: TwoRanks) -> None:
    write = ranks.ranks.write

    def damaged(folder: Path, weights: Weights, **options: Any) -> Any:
        shards = write(folder, weights, **options)
        path = folder / shards[1].file
        content = bytearray(path.read_bytes())
        content[0] ^= 1
        path.write_bytes(content)
        ranks.ranks.write = write  # type: ignore[method-assign]
        return shards

    ranks.ranks.write = damaged  # type: ignore[method-assign]


async def test_no_room_for_a_dense_version_ends_in_one_line(sync: WeightSync, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ShardWriter, "_piece", full)
    with pytest.raises(WeightsError, match=r"^version version-000000-\w+ must have .* MB of room in .*--shm-size\)$"):
        await sync.publish(TwoRanks(), NotingEngine(), version=0)
