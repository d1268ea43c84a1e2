"""The versions that users are served: what the gate lets through, what it refuses, and the way back."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from buffers.ledger.ledger import Ledger
from buffers.records import Task
from configs.schema import GateConfig
from learner.live_versions import SERVED, VersionError, Versions
from tests.support.buffer_parts import make_round

TASKS = [Task(task_id=f"t/{number}", prompt=[{"role": "user", "content": "?"}]) for number in range(8)]


class Engines:
    """Remembers what it was given; `newest` is what tasks are played with."""

    def __init__(self) -> None:
        self.newest = -1
        self.served: list[int] = []

    async def load_weights(self, folder: Path, *, version: int) -> float:
        assert (folder / "adapter.bin").read_text() == f"weights {version}"
        self.newest = version
        return 0.0

    async def load_adapter(self, folder: Path, *, role: str, version: int) -> float:
        assert role == SERVED and (folder / "adapter.bin").read_text() == f"weights {version}"
        self.served.append(version)
        return 0.0


@asynccontextmanager
async def playing(ledger: Ledger, engines: Engines, scores: dict[int, list[float | None]]):
    """Plays the gate's tasks: `scores` of each version, None: the episode fails."""

    async def play() -> None:
        while True:
            for episode in await asyncio.wrap_future(ledger.start_pending(limit=64, version=0)):
                number = int(episode.task.task_id.rpartition("/")[2])
                score = scores[engines.newest][number]
                ledger.put_round(make_round(episode.episode_id))
                if score is None:
                    await asyncio.wrap_future(ledger.fail_episode(episode.episode_id, "no", max_attempts=1))
                else:
                    await asyncio.wrap_future(ledger.notify_score(episode.episode_id, score))
            await asyncio.sleep(0.005)

    task = asyncio.create_task(play())
    try:
        yield
    finally:
        task.cancel()


class World:
    def __init__(self, folder: Path, *, tasks=TASKS, **gate) -> None:
        self.folder = folder
        self.ledger = Ledger(None)
        self.engines = Engines()
        self.said: list[str] = []
        self.gate = GateConfig(**gate)
        self.tasks = tasks
        self.versions = self.make()

    def make(self) -> Versions:
        return Versions(
            self.folder, engines=self.engines, ledger=self.ledger, gate=self.gate,
            tasks=None if self.tasks is None else lambda: self.tasks, say=self.said.append,
        )  # fmt: skip

    async def publish(self, version: int) -> None:
        folder = self.folder / f"published-{version}"
        folder.mkdir(parents=True)
        (folder / "adapter.bin").write_text(f"weights {version}")
        await self.engines.load_weights(folder, version=version)
        await self.versions.published(folder, version=version)

    async def offer(self, version: int, entropy: float | None = None) -> bool:
        await self.publish(version)
        return await self.versions.admit(version, episodes=[f"e{version}"], entropy=entropy)


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path)
    yield world
    world.ledger.close()


HALF = [1.0, 0.0] * 4


def test_a_candidate_that_is_not_worse_is_served(world):
    async def main():
        async with playing(world.ledger, world.engines, {0: HALF, 1: HALF, 2: [1.0] * 8}):
            await world.publish(0)
            assert await world.offer(1)
            assert await world.offer(2)

    asyncio.run(main())
    assert world.engines.served == [0, 1, 2]
    assert [each["state"] for each in world.versions.list()] == ["candidate", "promoted", "promoted"], (
        "the first was served"
    )
    assert world.versions.list()[2]["parent"] == 1
    assert world.versions.list()[2]["sessions"] == ["e2"]


@pytest.mark.parametrize(
    ("scores", "why"),
    [
        ([0.0] * 8, "below -0.05"),
        ([0.0, 1.0] * 4, "below -0.05"),  # as good in the mean, and nothing is certain
        ([None] * 8, "too few of the gate's tasks could be played"),
    ],
)
def test_a_candidate_that_may_be_worse_is_refused_and_the_served_one_stays(world, scores, why):
    async def main():
        async with playing(world.ledger, world.engines, {0: HALF, 1: scores}):
            await world.publish(0)
            assert not await world.offer(1)

    asyncio.run(main())
    assert world.engines.served == [0]
    assert world.engines.newest == 1, "the candidate is trained on"
    assert why in world.versions.list()[1]["why"]
    assert why in world.said[0]


def test_each_task_is_played_as_often_as_asked(tmp_path):
    world = World(tmp_path, samples=3)

    async def main():
        async with playing(world.ledger, world.engines, {0: HALF, 1: HALF}):
            await world.publish(0)
            assert await world.offer(1)

    asyncio.run(main())
    assert world.ledger.counts()["scored/validated"] == 2 * 3 * len(TASKS)
    world.ledger.close()


def test_a_policy_whose_entropy_collapsed_is_refused(tmp_path):
    world = World(tmp_path, tasks=None)

    async def main():
        await world.publish(0)
        assert await world.offer(1, entropy=2.0)
        assert await world.offer(2, entropy=1.3)
        assert not await world.offer(3, entropy=0.7)

    asyncio.run(main())
    world.ledger.close()
    assert world.versions.served == 2


def test_the_way_back_is_to_what_was_served_before(tmp_path):
    world = World(tmp_path, tasks=None)

    async def main():
        await world.publish(0)
        for version in (1, 2):
            assert await world.offer(version)
        assert await world.versions.rollback() == 1
        assert await world.versions.rollback(0) == 0
        with pytest.raises(VersionError, match=r"kept \(0, 1, 2\), got 7"):
            await world.versions.promote(7)

    asyncio.run(main())
    assert world.engines.served == [0, 1, 2, 1, 0]
    again = world.make()
    asyncio.run(again.begin())
    assert world.engines.served[-1] == again.served == 0, "a restart serves what was served"
    world.ledger.close()


def test_what_was_never_offered_is_not_kept(tmp_path):
    """A run that lasts for weeks makes a version with each update."""
    world = World(tmp_path, tasks=None)

    async def main():
        for version in (0, 1, 2):
            await world.publish(version)
        assert await world.offer(3)
        for version in (4, 5):
            await world.publish(version)

    asyncio.run(main())
    assert [each["version"] for each in world.versions.list()] == [0, 3, 5]
    world.ledger.close()


def test_there_is_no_way_back_from_the_first(tmp_path):
    world = World(tmp_path, tasks=None)

    async def main():
        await world.publish(0)
        with pytest.raises(VersionError, match="got only 0"):
            await world.versions.rollback()

    asyncio.run(main())
    world.ledger.close()


def test_a_version_whose_description_is_damaged_is_served_all_the_same(tmp_path):
    world = World(tmp_path, tasks=None)

    async def main():
        await world.publish(0)
        await world.offer(1)
        (tmp_path / "versions" / "v1" / "version.json").write_text("{")
        assert await world.versions.rollback(1) == 1

    asyncio.run(main())
    assert [each["version"] for each in world.versions.list()] == [0]
    assert json.loads((tmp_path / "versions" / "served.json").read_text())["version"] == 1
    world.ledger.close()
