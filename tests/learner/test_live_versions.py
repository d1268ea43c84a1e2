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
from learner.live_gate import Answer, common, level_of, likeness, paired, unpaired
from learner.live_versions import MOST_PLAYS, SERVED, VersionError, Versions
from tests.support.buffer_parts import make_round

TASKS = [Task(task_id=f"t/{number}", prompt=[{"role": "user", "content": "?"}]) for number in range(8)]


class Engines:
    """Remembers what it was given; `newest` is what tasks are played with."""

    def __init__(self) -> None:
        self.newest = -1
        self.served: list[int] = []
        self.adapters: dict[str, int] = {}

    async def load_weights(self, folder: Path, *, version: int) -> float:
        assert (folder / "adapter.bin").read_text() == f"weights {version}"
        self.newest = version
        return 0.0

    async def load_adapter(self, folder: Path, *, role: str, version: int) -> float:
        assert role.startswith(SERVED) and (folder / "adapter.bin").read_text() == f"weights {version}"
        self.served.append(version)
        self.adapters[role] = version
        return 0.0


@asynccontextmanager
async def playing(
    ledger: Ledger, engines: Engines, scores: dict[int, list[float | None]], says=lambda number: (7, 8, 9)
):
    """Plays the gate's tasks: `scores` of each version, None: the episode fails. `says`: the tokens of an answer to a task."""

    async def play() -> None:
        while True:
            for episode in await asyncio.wrap_future(ledger.start_pending(limit=64, version=0)):
                number = int(episode.task.task_id.rpartition("/")[2])
                score = scores[engines.newest][number]
                ledger.put_round(make_round(episode.episode_id, tail=(1, 100 + number), sampled=says(number)))
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
    def __init__(self, folder: Path, *, tasks=TASKS, keeps_sessions=False, **gate) -> None:
        self.folder = folder
        self.keeps_sessions = keeps_sessions
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
            keeps_sessions=self.keeps_sessions,
        )  # fmt: skip

    async def publish(self, version: int) -> None:
        folder = self.folder / f"published-{version}"
        folder.mkdir(parents=True)
        (folder / "adapter.bin").write_text(f"weights {version}")
        await self.engines.load_weights(folder, version=version)
        await self.versions.published(folder, version=version)

    async def offer(self, version: int, entropy: float | None = None, drift=None) -> bool | None:
        await self.publish(version)
        return await self.versions.admit(version, episodes=[f"e{version}"], entropy=entropy, drift=drift)

    def about(self, version: int) -> dict:
        return next(each for each in self.versions.list() if each["version"] == version)


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
        ([0.0] * 8, "it scores 0.000 at the gate, version 0 0.500"),
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


def test_small_losses_do_not_add_up(tmp_path):
    """Each is within the margin of the one before; users would lose all of it."""
    world = World(tmp_path, margin=0.25)

    async def main():
        async with playing(world.ledger, world.engines, {0: [0.9] * 8, 1: [0.7] * 8, 2: [0.5] * 8, 3: [0.66] * 8}):
            await world.publish(0)
            assert await world.offer(1)
            assert not await world.offer(2)
            assert await world.offer(3)

    asyncio.run(main())
    assert "version 0 0.900" in world.about(2)["why"]
    assert (world.about(3)["parent"], world.about(3)["gate"]["against"]) == (1, 0)
    world.ledger.close()


def test_what_an_operator_has_promoted_all_the_same_is_what_others_are_compared_with(world):
    async def main():
        async with playing(world.ledger, world.engines, {0: [0.9] * 8, 1: [0.2] * 8, 2: [0.3] * 8}):
            await world.publish(0)
            assert not await world.offer(1)
            await world.versions.promote(1)
            assert world.versions.pace(9) == world.make().pace(9) == 0.5
            assert world.versions.has_other_weights(1) and not world.versions.has_other_weights(0)
            assert await world.offer(2)
            assert world.versions.pace(9) == 1.0 and not world.versions.has_other_weights(2)
            await world.versions.rollback()
            assert world.versions.has_other_weights(2)

    asyncio.run(main())
    assert world.about(2)["gate"]["against"] == 1


def test_what_was_judged_and_is_made_again_stays_as_it_was(world):
    """The learner died before its state was saved; it is trained again as fast as it was, and users have what they had."""

    async def main():
        async with playing(world.ledger, world.engines, {0: HALF, 1: [0.0] * 8, 2: HALF}):
            await world.publish(0)
            assert not await world.offer(1)
            assert world.versions.pace(2) == 0.5
            assert await world.offer(2)
            for versions in (world.versions, world.make()):
                known, files = versions.list(), sorted(versions._folder.rglob("*"))
                assert (versions.pace(2), versions.pace(3)) == (0.5, 1.0)
                for version, verdict in ((1, False), (2, True)):
                    await versions.published(world.folder / "published-0", version=version)
                    assert await versions.admit(version, episodes=[], entropy=None) is verdict
                assert versions.has_other_weights(2), "feedback may have changed meanwhile"
                assert [each | {"made_again": True} for each in known[1:]] == versions.list()[1:]
                assert sorted(versions._folder.rglob("*")) == files and world.engines.served == [0, 2]

    asyncio.run(main())
    assert (world.folder / "versions" / "v2" / "adapter.bin").read_text() == "weights 2"


def test_one_that_had_passed_when_the_run_died_is_served(world):
    async def main():
        async with playing(world.ledger, world.engines, {0: HALF, 1: HALF}):
            await world.publish(0)
            assert await world.offer(1)
            (world.folder / "versions" / "served.json").write_text(
                json.dumps({"version": 0, "history": [{"version": 0}]})
            )
            versions = world.make()
            assert await versions.admit(1, episodes=[], entropy=None) and versions.served == 1

    asyncio.run(main())


def test_the_more_were_refused_the_surer_the_next_one_must_be(tmp_path):
    """Else one of many that are as bad passes by chance."""
    world = World(tmp_path, margin=0.6)
    noisy = [1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    scores = {0: HALF, **dict.fromkeys((1, 2, 3), [0.0] * 4 + [1.0, -4.0] * 2), 4: noisy}

    async def main():
        async with playing(world.ledger, world.engines, scores):
            await world.publish(0)
            for version in (1, 2, 3, 4):
                assert not await world.offer(version)

    assert world.versions.pace(9) == 1.0
    asyncio.run(main())
    assert world.versions.pace(9) == 1 / 16
    levels = [world.about(version)["gate"]["level"] for version in (1, 2, 3, 4)]
    assert levels == pytest.approx([0.05 / 2, 0.05 / 6, 0.05 / 12, 0.05 / 20])
    differences = [one - other for one, other in zip(noisy, HALF, strict=True)]
    assert paired(differences, level=0.25).least > -0.6 > paired(differences, level=levels[3]).least
    assert world.versions.figures() == {
        "live/gate_candidates": 4, "live/gate_refused": 4, "live/gate_refused_in_a_row": 4, "live/gate_refused_for_score": 4,
        "live/gate_difference": pytest.approx(-0.125), "live/gate_likeness": 1.0, "live/gate_sessions": 0,
    }  # fmt: skip
    world.ledger.close()


def test_the_version_that_others_are_compared_with_plays_until_it_is_known_well(tmp_path):
    """One that was promoted for a lucky play would stand in the way of all that follow."""
    world = World(tmp_path, samples=2, margin=0.6)
    plays = []

    class Scores(dict):
        def __getitem__(self, version):
            plays.append(version)
            return [1.0 if version == 1 and plays.count(1) <= 16 else 0.5] * 8

    async def main():
        async with playing(world.ledger, world.engines, Scores()):
            await world.publish(0)
            for version in range(1, MOST_PLAYS + 3):
                assert await world.offer(version)

    asyncio.run(main())
    assert plays.count(1) == MOST_PLAYS * 16
    assert world.about(1)["plays"] == MOST_PLAYS
    assert world.about(MOST_PLAYS + 2)["gate"]["parent_mean"] == pytest.approx(0.5 + 0.5 / MOST_PLAYS)
    world.ledger.close()


def test_a_candidate_that_drifted_from_the_model_is_refused(world):
    given = []

    async def drift(answers):
        given.extend(answers)
        return 2.0 if len(given) <= 8 else 2.1

    async def main():
        async with playing(world.ledger, world.engines, {0: HALF, 1: HALF, 2: HALF}):
            await world.publish(0)
            assert await world.offer(1, drift=drift)
            assert not await world.offer(2, drift=drift)

    asyncio.run(main())
    assert given[0] == Answer([1, 100, 7, 8, 9], [0, 0, 1, 1, 1])
    assert world.about(2)["why"] == "it is 2.1 nats per token from the model, above 2"
    assert (world.about(2)["refused_for"], world.about(2)["gate"]["drift"]) == ("drift", 2.1)


@pytest.mark.parametrize(("first", "passes"), [((7, 8, 9), True), (None, False)])
def test_a_candidate_that_says_the_same_everywhere_is_refused_unless_it_always_did(world, first, passes):
    unlike = lambda number: (number, 50 + number)  # noqa: E731

    async def main():
        says = (lambda number: first) if first else unlike
        async with playing(world.ledger, world.engines, {0: HALF, 1: HALF}, says):
            await world.publish(0)
            assert await world.offer(1)
        async with playing(world.ledger, world.engines, {1: HALF, 2: HALF}, lambda number: (7, 8, 9)):
            assert await world.offer(2) is passes

    asyncio.run(main())
    assert world.about(2)["gate"]["likeness"] == 1.0
    assert passes or "alike by 1.000, above 0.85; those of the first candidate by 0.000" in world.about(2)["why"]


def test_answers_are_alike_by_their_longest_common_subsequence():
    assert common([1, 2, 3, 4], [2, 9, 4, 1]) == 2
    assert common([1] * 100, [1] * 70) == 70
    two = [Answer([0, 1, 2, 3], [0, 0, 1, 1]), Answer([5, 6, 2], [0, 0, 1]), Answer([5, 6, 3], [0, 0, 1])]
    assert likeness(two) == pytest.approx(2 / 3), "the last two have the same prompt"
    assert likeness(two[1:]) is None


def test_bounds_are_students():
    assert paired([1.0, 2.0, 3.0, 4.0, 5.0], level=0.05).least == pytest.approx(3 - 2.132 * 0.5**0.5, abs=0.01)
    assert unpaired([1.0, 3.0], [0.0, 0.0], level=0.05).least < -3
    assert sum(level_of(tried) for tried in range(10_000)) == pytest.approx(0.05, abs=1e-5)


async def sessions(world: World, *scores: tuple[int, float]) -> None:
    """Sessions of these versions begin, and get a score."""
    for version, score in scores:
        name = f"ann-{len(world.said)}-{id(object())}-{next(NAMES)}"
        await asyncio.wrap_future(
            world.ledger.open_session(episode_id=name, user="ann", name="", is_side=False, version=version)
        )
        world.ledger.put_round(make_round(name))
        await asyncio.wrap_future(world.ledger.give_feedback(user="ann", session=name, score=score))
        await asyncio.wrap_future(world.ledger.settle_session(episode_id=name, words_count=False))


NAMES = iter(range(10**6))


async def tried(world: World, scores: list[tuple[int, float]]) -> bool | None:
    """Offers version 1, and has these sessions while it is tried."""
    await world.publish(0)
    offered = asyncio.create_task(world.offer(1))
    while world.versions.adapter_of(1) != (1, ""):
        await asyncio.sleep(0)
    assert {world.versions.draw() for _ in range(200)} == {0, 1}
    assert world.versions.adapter_of(0) == world.versions.adapter_of(None) == (0, SERVED)
    await sessions(world, *scores)
    promoted = await offered
    assert world.versions.draw() == world.versions.adapter_of(1)[0] == world.versions.served
    return promoted


@pytest.mark.parametrize(
    ("scores", "promoted", "why"),
    [
        ([(0, 0.5), (1, 0.5)] * 4, True, ""),
        ([(0, 1.0), (1, 0.0)] * 4, False, "people give its sessions 0.000, those of version 0 1.000"),
        # nothing is certain after four of each, and all is after eight
        ([(0, 0.0), (1, 1.0), (0, 1.0), (1, 0.0)] * 2 + [(0, 0.0), (1, 1.0)] * 12, True, ""),
    ],
)
def test_a_candidate_is_tried_on_a_share_of_the_sessions(tmp_path, scores, promoted, why):
    world = World(tmp_path, tasks=None, session_share=0.5, sessions=4)
    assert asyncio.run(tried(world, scores)) is promoted
    assert world.about(1)["state"] == ("promoted" if promoted else "refused")
    assert why in world.about(1)["why"]
    assert world.about(1)["trial"]["sessions"] in (4, 8, 16)
    assert world.versions.served == promoted
    world.ledger.close()


def test_sessions_of_before_of_side_calls_and_of_other_versions_do_not_count(tmp_path):
    world = World(tmp_path, tasks=None, session_share=0.5, sessions=2, session_hours=0.2 / 3600)

    async def main():
        await sessions(world, *[(0, 0.0), (1, 1.0)] * 4)
        await asyncio.sleep(0.01)
        return await tried(world, [(0, 0.0), (1, 1.0), (2, 1.0), (2, 1.0)])

    assert asyncio.run(main()) is False
    assert "1 of its sessions and 1 of version 0 had feedback in" in world.about(1)["why"]
    assert world.about(1)["refused_for"] == "sessions"
    world.ledger.close()


def test_the_end_of_the_run_and_an_operator_end_a_trial(tmp_path):
    world = World(tmp_path, tasks=None, session_share=0.5)

    async def main():
        await world.publish(0)
        for version, end in ((1, lambda: world.versions.promote(0)), (2, None)):
            offered = asyncio.create_task(world.offer(version))
            while world.versions.adapter_of(version)[1] != "":
                await asyncio.sleep(0)
            if end is not None:
                await world.versions.promote(1)
                assert not await offered
            else:
                world.versions.stop()
                assert await offered is None

    asyncio.run(main())
    assert "an operator has promoted version 1 meanwhile" in world.about(1)["why"]
    assert world.about(2)["state"] == "candidate"
    world.ledger.close()


def test_sessions_keep_the_last_four_versions_that_were_served(tmp_path):
    world = World(tmp_path, tasks=None, keeps_sessions=True)

    async def main():
        await world.publish(0)
        for version in range(1, 4):
            assert await world.offer(version)
        assert [world.versions.adapter_of(version)[0] for version in range(4)] == [0, 1, 2, 3]
        await world.versions.promote(0)
        assert world.engines.served == [0, 1, 2, 3], "it is in the engines"
        assert await world.offer(4)

    asyncio.run(main())
    assert sorted(world.engines.adapters.values()) == [0, 2, 3, 4]
    assert world.versions.adapter_of(1) == world.versions.adapter_of(4)
    again = world.make()
    asyncio.run(again.begin())
    assert [again.adapter_of(version)[0] for version in range(5)] == [0, 4, 2, 3, 4]
    assert again.draw() == 4
    world.ledger.close()


def test_sessions_move_on_where_they_do_not_keep_their_version(tmp_path):
    world = World(tmp_path, tasks=None)

    async def main():
        await world.publish(0)
        assert await world.offer(1)

    asyncio.run(main())
    assert world.versions.adapter_of(0) == (1, SERVED)
    world.ledger.close()
