"""Followers play exactly the version that is as old as they ask for."""

import asyncio
from pathlib import Path

from learner.checkpoints.weight_sync import EarlierVersions, Follower


class Engine:
    """Remembers what it was given."""

    def __init__(self) -> None:
        self.loaded: list[tuple[int, str]] = []

    async def load_weights(self, folder: Path, *, version: int) -> float:
        self.loaded.append((version, (folder / "weights").read_text()))
        return 0.0


def published(tmp_path: Path, version: int) -> Path:
    folder = tmp_path / "published"
    folder.mkdir(exist_ok=True)
    (folder / "weights").write_text(f"weights {version}")
    return folder


def test_each_follower_stays_its_age_behind_and_older_versions_go(tmp_path: Path) -> None:
    near, far = Engine(), Engine()
    (own := tmp_path / "earlier").mkdir()
    earlier = EarlierVersions(own, followers=[Follower(near, 1), Follower(far, 3)], say=print)

    async def run() -> None:
        await earlier.begin(checkpoint=None)
        for version in range(6):
            await earlier.published(published(tmp_path, version), version=version)

    asyncio.run(run())
    assert near.loaded == [(version, f"weights {version}") for version in range(5)]
    assert far.loaded == [(version, f"weights {version}") for version in range(3)]
    assert sorted(path.name for path in own.iterdir()) == [f"version-{version}" for version in (2, 3, 4, 5)]


def test_a_run_that_is_resumed_goes_on_with_what_it_kept_up_to_its_checkpoint(tmp_path: Path) -> None:
    (own := tmp_path / "earlier").mkdir()

    async def run(engine: Engine, *, first: int, last: int, checkpoint: int | None) -> None:
        earlier = EarlierVersions(own, followers=[Follower(engine, 2)], say=print)
        await earlier.begin(checkpoint=None if checkpoint is None else (published(tmp_path, checkpoint), checkpoint))
        for version in range(first, last + 1):
            await earlier.published(published(tmp_path, version), version=version)

    asyncio.run(run(Engine(), first=0, last=5, checkpoint=None))
    again = Engine()
    asyncio.run(run(again, first=5, last=6, checkpoint=4))
    assert again.loaded == [(3, "weights 3"), (4, "weights 4")]  # 2 is gone: it was too old for version 5
