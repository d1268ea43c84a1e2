"""Rules of learner/checkpoints/weight_sync.py: real versions and real pullers, made-up ranks and engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from learner.checkpoints.store import ADAPTER_WEIGHTS, ADAPTERS, VERSIONS
from learner.checkpoints.weight_shards import Published
from learner.checkpoints.weight_sync import RoleWeights
from tests.support.weights.made_versions import written


@dataclass
class NotingRanks:
    """Has a version of each role."""

    there: dict[str, int]
    asked: list[str] = field(default_factory=list)

    async def versions(self) -> dict[str, int]:
        return dict(self.there)

    async def publish(self, folder: Path, *, base: str | None, role: str = "") -> Sequence[Published]:
        self.asked.append(role)
        return [Published(shard=written(folder), changed_share=None, description=f'{{"of": "{role}"}}')]


@dataclass
class NotingEngine:
    """Remembers which adapter of which role it was given."""

    loaded: list[tuple[str, int, str]] = field(default_factory=list)

    async def load_weights(self, folder: Path, *, version: int) -> float:
        raise AssertionError("a role's adapter is no policy's")

    async def load_adapter(self, folder: Path, *, role: str, version: int) -> float:
        assert (folder / ADAPTER_WEIGHTS).is_file()
        self.loaded.append((role, version, (folder / "adapter_config.json").read_text()))
        return 0.25

    async def sleep(self) -> None: ...
    async def wake_up(self) -> None: ...


@pytest.fixture
async def sync(tmp_path: Path) -> AsyncIterator[RoleWeights]:
    model = tmp_path / "model"
    for role in ("a", "b"):
        (model / ADAPTERS / role).mkdir(parents=True)
        (model / ADAPTERS / role / ADAPTER_WEIGHTS).write_bytes(b"")
        (model / ADAPTERS / role / "adapter_config.json").write_text("saved")
    (model / ADAPTERS / VERSIONS).write_text(json.dumps({"a": 3, "b": 0}))
    made = RoleWeights(tmp_path, roles=["a", "b"], saved=model)
    yield made
    await made.close()
    assert not made.folder.exists()


@pytest.mark.seconds
async def test_a_role_is_published_when_its_version_is_new_and_the_others_are_left_alone(sync: RoleWeights) -> None:
    ranks, engine = NotingRanks({"a": 0, "b": 0}), NotingEngine()
    figures = await sync.publish(ranks, engine, version=0)
    assert engine.loaded == [("a", 0, '{"of": "a"}'), ("b", 0, '{"of": "b"}')]
    assert figures["publish/paused_s"] == 0.25 and figures["publish/bytes"] > 0
    assert figures["adapter/a/publish_s"] >= figures["adapter/a/swap_s"] > 0
    engine.loaded.clear()
    ranks.there["b"] = 1
    figures = await sync.publish(ranks, engine, version=5)
    assert [one[:2] for one in engine.loaded] == [("b", 1)], "by its own version, not by the step"
    assert "adapter/a/swap_s" not in figures
    engine.loaded.clear()
    assert (await sync.publish(ranks, engine, version=6))["publish/bytes"] == 0.0
    assert engine.loaded == []
    sync.renew()
    await sync.publish(ranks, engine, version=6)
    assert [one[:2] for one in engine.loaded] == [("a", 0), ("b", 1)], "new processes may round otherwise"


async def test_engines_begin_with_the_saved_adapters_which_are_not_published_again(sync: RoleWeights) -> None:
    ranks, engine = NotingRanks({"a": 3, "b": 1}), NotingEngine()
    await sync.load_saved(engine)
    assert engine.loaded == [("a", 3, "saved"), ("b", 0, "saved")]
    await sync.publish(ranks, engine, version=4)
    assert ranks.asked == ["b"]
