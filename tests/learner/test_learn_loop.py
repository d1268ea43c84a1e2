"""Rules of learner/learn_loop.py, with a real ledger and pool, and a learner and an engine that only take notes."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from buffers import disk
from buffers.errors import StorageFull
from buffers.ledger.doctor import findings
from buffers.ledger.ledger import Ledger
from buffers.multi_round import MultiRoundBufferDataset
from buffers.records import TrainBatch
from buffers.tasks.task_pool import TaskPool
from configs.load import load_config
from configs.schema import BufferConfig, CheckpointsConfig, GateConfig, RunConfig
from learner.agreement import Disagreement
from learner.checkpoints.store import Checkpoint, CheckpointError, CheckpointStore
from learner.checkpoints.weight_shards import Published
from learner.checkpoints.weight_sync import WeightSync
from learner.learn_loop import LearnLoop, Outputs, Schedule
from learner.lessons import Lessons
from learner.live_versions import Versions
from learner.recovery.restarts import MAX_IN_A_ROW, RestartLimit
from learner.reporting.display import Display
from learner.reporting.run_metrics import History
from learner.reporting.tracker import Tracker
from learner.startup.run_buffers import RunBuffers
from learner.training.ranks import LearnerProcesses, RankDied, RankFailed
from learner.validation import Validation
from mocked_server.generation import GenerationStats
from tests.support.buffer_parts import make_ready, make_round, make_task
from tests.support.patience import PATIENCE_S
from tests.support.weights.made_versions import written

STEP = {"policy/lag_max": 0.0}


def version_of(folder: Path) -> int:
    """Of a version's folder."""
    return int(folder.name.removeprefix(".").split("-")[1])


@dataclass
class FakeRanks:
    """Notes what it is told, in order. `gate`: saving waits for it."""

    told: list[Any] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    full: bool = False
    fails: bool = False
    dies_in: list[str] = field(default_factory=list)
    """Calls in which the processes die, in this order."""

    async def start(self) -> None:
        self.told.append("start")

    async def first(self) -> None:
        self.told.append(("prepare", 0))

    async def load(self, folder: Path) -> None:
        self.told.append(("prepare", int(float(folder.parent.name.partition("-")[2].partition("-")[0]))))

    def _maybe_die(self, call: str) -> None:
        if self.dies_in[:1] == [call]:
            self.dies_in.pop(0)
            raise RankDied(f"learner rank 0 of 1 died in {call}")

    async def until_dead(self) -> None:
        while True:
            await asyncio.sleep(0.01)
            self._maybe_die("idle")

    async def train_step(self, batch: TrainBatch, *, version: int, **live: Any) -> dict[str, float]:
        self._maybe_die("train_step")
        self.told.append(("train", version, batch.group_ids, *live.items()))
        return dict(STEP)

    async def publish(self, folder: Path, *, base: str | None) -> list[Published]:
        self._maybe_die("publish")
        self.told.append(("publish", f"version-{version_of(folder)}"))
        return [Published(shard=written(folder), changed_share=None, description=None)]

    async def token_figures(self) -> str:
        return "figures"

    async def save(self, folder: Path) -> None:
        self._maybe_die("save")
        self.told.append("save")
        await self.gate.wait()
        if self.fails:
            raise RankFailed("this has no shards")
        if self.full:
            folder.mkdir()
            raise StorageFull("No space left on device")
        folder.mkdir()
        self.told.append("saved")

    async def save_pretrained(self, folder: Path) -> None:
        folder.mkdir()

    @property
    def trained(self) -> list[Any]:
        return [one[2] for one in self.told if one[0] == "train"]


class FakeEngine:
    def __init__(self) -> None:
        self.calls: list[str] = []

    async def load_weights(self, folder: Path, *, version: int) -> float:
        assert version_of(folder) == version and (folder / "model.safetensors").is_file()
        self.calls.append(f"load {version}")
        return 0.0

    async def load_adapter(self, folder: Path, *, role: str, version: int) -> float:
        self.calls.append(f"{role} {version}")
        return 0.0

    async def sleep(self) -> None:
        self.calls.append("sleep")

    async def wake_up(self) -> None:
        self.calls.append("wake up")


@dataclass
class Setup:
    loop: LearnLoop
    ranks: FakeRanks
    ledger: Ledger
    pool: TaskPool
    store: CheckpointStore
    engine: FakeEngine
    terminal: io.StringIO

    def said(self) -> str:
        """What was printed, in one line."""
        return " ".join(self.terminal.getvalue().split())


LAG = 9


@asynccontextmanager
async def learning(
    tmp_path: Path,
    ledger: Ledger,
    *,
    start: int = 0,
    replays: int = 0,
    validation: Validation | None = None,
    dies_in: tuple[str, ...] = (),
    started: asyncio.Future[None] | None = None,
    checkpoint: Checkpoint | None = None,
    agreement: Any = None,
    schedule: Mapping[str, bool] | None = None,
    buffer: Mapping[str, Any] | None = None,
    users: Callable[[FakeEngine], Versions] | None = None,
    lessons: Callable[[FakeRanks], Lessons] | None = None,
    **run: Any,
) -> AsyncIterator[Setup]:
    buffer_config = BufferConfig(**{"groups_per_step": 1, "group_size": 1, "max_policy_lag": LAG, **(buffer or {})})
    pool = TaskPool(
        ledger, group_size=1, groups_per_step=buffer_config.groups_per_step, max_policy_lag=buffer_config.max_policy_lag,
        max_running=8, deadline_s=60.0, max_attempts=1, version=start, paused=replays > 0 or started is not None,
    )  # fmt: skip
    rounds = MultiRoundBufferDataset(ledger)
    buffers = RunBuffers(
        ledger=ledger, pool=pool, rounds=rounds, curriculum=None, opened={}, num_again=replays, running=[]
    )
    running = asyncio.create_task(pool.run())
    store = CheckpointStore(tmp_path / "checkpoints", keep=9)
    ranks: Any = FakeRanks(dies_in=list(dies_in))

    engine, weights = FakeEngine(), WeightSync(tmp_path)
    versions = weights.earlier = None if users is None else users(engine)
    restart_limit, terminal = RestartLimit(), io.StringIO()
    learner = LearnerProcesses(ranks, restart_limit=restart_limit, first=ranks.first)
    started = started or asyncio.ensure_future(asyncio.sleep(0))
    with Tracker(tmp_path, start=start) as tracker:
        loop = LearnLoop(
            Schedule(
                run=RunConfig(**run),
                buffer=buffer_config,
                start=start,
                **(schedule or {}),
            ),
            buffers=buffers,
            learner=learner,
            starting=started,
            engine=engine,
            weights=weights,
            store=store,
            outputs=Outputs(
                history=History(load_config(overrides=[f"buffer.max_policy_lag={LAG}"])),
                tracker=tracker,
                display=Display(9, console=Console(file=terminal)),
                generated=GenerationStats(),
            ),
            restart_limit=restart_limit,
            validation=validation,
            checkpoint=checkpoint,
            agreement=agreement,
            versions=versions,
            lessons=None if lessons is None else lessons(ranks),
        )
        yield Setup(loop, ranks, ledger, pool, store, engine, terminal)
    pool.close()
    await running
    await weights.close()


async def until(true: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not true():
            await asyncio.sleep(0.001)


async def test_a_checkpoint_is_written_while_the_next_batch_is_awaited_and_the_next_update_waits_for_it(
    tmp_path: Path,
) -> None:
    ledger = Ledger(None)
    first = make_ready(ledger, task=0)
    async with learning(tmp_path, ledger, steps=2, checkpoints={"every": 1}) as setup:
        running = asyncio.create_task(setup.loop.run())
        await until(lambda: "save" in setup.ranks.told)
        second = make_ready(ledger, task=1)
        await until(lambda: ledger.counts()["groups/leased"] == 1)  # sampled while the checkpoint is written
        assert setup.ranks.trained == [(first,)]
        setup.ranks.gate.set()
        await running
        assert setup.ranks.trained == [(first,), (second,)]
        assert setup.ranks.told.index("saved") < setup.ranks.told.index(("train", 1, (second,)))
        assert [one.position.step for one in setup.store.all()] == [1, 2]
        assert setup.store.all()[0].score == 1.0
    ledger.close()


async def test_stored_groups_join_batches_and_are_in_them_again_after_the_learner_died(tmp_path: Path) -> None:
    ledger = Ledger(None)
    fresh = [make_ready(ledger, task=task) for task in range(4)]
    replay = {"share": 0.5, "only": "all", "times": 2, "oldest": 9}
    buffer = {"groups_per_step": 4, "max_policy_lag": 0, "replay": replay}
    async with learning(tmp_path, ledger, steps=4, checkpoints={"every": 0}, buffer=buffer) as setup:
        setup.ranks.gate.set()
        running = asyncio.create_task(setup.loop.run())
        await until(
            lambda: setup.loop.step == 1 and setup.pool.admissible() == 2
        )  # two of four places are of stored groups
        setup.ranks.dies_in = ["publish"]
        fresh += [make_ready(ledger, task=task, version=1) for task in (4, 5)]
        await until(lambda: setup.loop.step == 2 and setup.pool.admissible() == 2)
        fresh += [make_ready(ledger, task=task, version=2) for task in (6, 7)]
        await until(lambda: setup.loop.step == 3 and setup.pool.admissible() == 2)
        fresh += [make_ready(ledger, task=task, version=3) for task in (8, 9)]
        await running
    first, second = tuple(fresh[:4]), (*fresh[4:6], *fresh[2:4])
    third, fourth = (*fresh[6:8], *fresh[4:6]), (*fresh[8:], *fresh[6:8])
    assert setup.ranks.trained == [first, second, first, second, third, fourth]
    assert ledger.run(findings).result() == []
    ledger.close()


async def test_lost_steps_are_made_again_before_anything_new_starts(tmp_path: Path) -> None:
    ledger = Ledger(None)
    groups = [make_ready(ledger, task=task) for task in range(3)]
    start = ledger.position().result()
    for step in (1, 2):
        batch = ledger.claim(1, min_version=0).result()
        assert batch is not None
        ledger.commit_step(batch.lease_id, step=step, version=step).result()
    replays = ledger.restore(start).result()
    async with learning(tmp_path, ledger, replays=replays, steps=4, checkpoints={"every": 0}) as setup:
        setup.ranks.gate.set()
        await setup.pool.put([make_task(9)])
        asked = asyncio.create_task(setup.pool.lease(wait_s=20.0))
        running = asyncio.create_task(setup.loop.run())
        episode = await asked
        assert episode is not None and episode.task.task_id == "t:9"
        assert setup.ranks.trained[:2] == [(groups[0],), (groups[1],)]  # before the lease was given
        await until(lambda: setup.loop.step == 3)
        assert setup.ranks.trained == [(group,) for group in groups]
        assert setup.loop.stop() is True
        await running
        newest = setup.store.newest()
        assert newest is not None and newest.position == replace(start, lineage=1, step=3)
    ledger.close()


async def test_steps_beyond_those_that_were_lost_are_sampled_as_they_become_ready(tmp_path: Path) -> None:
    """A claim does not wait, and a learner that dies during it is not seen: only what is there already is claimed."""
    ledger = Ledger(None)
    groups = [make_ready(ledger, task=task) for task in range(3)]
    start = ledger.position().result()
    batch = ledger.claim(1, min_version=0).result()
    assert batch is not None
    ledger.commit_step(batch.lease_id, step=1, version=1).result()
    replays = ledger.restore(start).result()
    assert replays == 1
    async with learning(tmp_path, ledger, replays=replays, steps=3, checkpoints={"every": 0}) as setup:
        setup.ranks.gate.set()
        rounds, sampled = setup.loop._rounds, []
        sample = rounds.sample

        async def noted(num_groups: int, **options: Any) -> TrainBatch:
            batch = await sample(num_groups, **options)
            sampled.append(batch.group_ids)
            return batch

        rounds.sample = noted  # type: ignore[method-assign]
        await setup.loop.run()
        assert setup.ranks.trained == [(group,) for group in groups]
        assert sampled == [(group,) for group in groups[1:]]
    ledger.close()


async def test_the_last_step_that_is_made_again_is_published_and_those_before_it_are_not(tmp_path: Path) -> None:
    ledger = Ledger(None)
    for task in range(4):
        make_ready(ledger, task=task)
    async with learning(tmp_path, ledger, steps=4, checkpoints={"every": 0}) as setup:
        setup.ranks.gate.set()
        running = asyncio.create_task(setup.loop.run())
        await until(lambda: setup.loop.step == 3)
        setup.ranks.dies_in.append("train_step")
        await running
        told = setup.ranks.told
        done = 4 if "version-4" in [one[1] for one in told[: told.index("start")]] else 3
        again = [one[1] for one in told[told.index("start") :] if one[0] == "publish"]
        assert again == [f"version-{step}" for step in range(done, 5)]
    ledger.close()


def checkpoint_of(ledger: Ledger, tmp_path: Path, *, step: int) -> Checkpoint:
    return Checkpoint(folder=tmp_path, position=replace(ledger.position().result(), step=step), score=None)


@pytest.mark.seconds
@pytest.mark.parametrize("replays", [0, LAG, LAG + 1])
async def test_a_resumed_run_plays_while_its_learner_starts_unless_its_episodes_would_be_too_old(
    tmp_path: Path, replays: int
) -> None:
    ledger = Ledger(None)
    group = make_ready(ledger, task=0)
    started = asyncio.get_running_loop().create_future()
    checkpoint = checkpoint_of(ledger, tmp_path, step=1)
    async with learning(
        tmp_path,
        ledger,
        start=1,
        replays=replays,
        started=started,
        checkpoint=checkpoint,
        steps=2,
        checkpoints={"every": 0},
    ) as setup:
        setup.ranks.gate.set()
        await setup.pool.put([make_task(9)])
        running = asyncio.create_task(setup.loop.run())
        assert (await setup.pool.lease(wait_s=0.2) is None) == (replays > LAG)
        assert setup.ranks.told == []
        started.set_result(None)
        await running
        # The engine has the checkpoint's weights: they are not published once more.
        assert [one for one in setup.ranks.told if one[0] in ("train", "publish")] == [
            ("train", 1, (group,)),
            ("publish", "version-2"),
        ]
    ledger.close()


@pytest.mark.seconds
async def test_a_new_run_plays_only_after_its_learner_has_started_and_published(tmp_path: Path) -> None:
    ledger = Ledger(None)
    started = asyncio.get_running_loop().create_future()
    async with learning(tmp_path, ledger, started=started, steps=1, checkpoints={"every": 0}) as setup:
        await setup.pool.put([make_task(9)])
        running = asyncio.create_task(setup.loop.run())
        assert await setup.pool.lease(wait_s=0.2) is None and setup.ranks.told == []
        started.set_result(None)
        assert await setup.pool.lease(wait_s=20.0) is not None
        assert setup.ranks.told == [("publish", "version-0")]
        assert setup.loop.stop() is True
        setup.ranks.gate.set()
        await running
    ledger.close()


async def test_a_learner_that_cannot_start_ends_the_run(tmp_path: Path) -> None:
    ledger = Ledger(None)
    started = asyncio.get_running_loop().create_future()
    started.set_exception(RankFailed("no such model"))
    async with learning(tmp_path, ledger, started=started, steps=1, checkpoints={"every": 0}) as setup:
        with pytest.raises(RankFailed, match="no such model"):
            await setup.loop.run()
    ledger.close()


async def test_a_learner_that_dies_while_it_waits_for_a_batch_is_started_again_at_once(tmp_path: Path) -> None:
    ledger = Ledger(None)
    async with learning(tmp_path, ledger, dies_in=("idle",), steps=1, checkpoints={"every": 0}) as setup:
        setup.ranks.gate.set()
        running = asyncio.create_task(setup.loop.run())
        await until(lambda: "start" in setup.ranks.told)  # without any batch
        group = make_ready(ledger, task=0)
        await running
        assert setup.ranks.told[:3] == [("publish", "version-0"), "start", ("prepare", 0)]
        assert setup.ranks.trained == [(group,)]
    ledger.close()


@pytest.mark.seconds
@pytest.mark.parametrize("call", ["train_step", "publish", "save"])
async def test_a_learner_that_dies_goes_on_from_the_newest_checkpoint_and_loses_no_batch(
    tmp_path: Path, call: str
) -> None:
    ledger = Ledger(None)
    groups = [make_ready(ledger, task=task) for task in range(5)]
    async with learning(tmp_path, ledger, steps=5, checkpoints={"every": 2}) as setup:
        setup.ranks.gate.set()
        running = asyncio.create_task(setup.loop.run())
        await until(lambda: setup.loop.step == 3)
        setup.ranks.dies_in.append(call)
        await running
        told = setup.ranks.told
        again = told[told.index("start") :]
        checkpoint = 4 if ("train", 4, (groups[4],)) in told[: told.index("start")] and call != "save" else 2
        assert again[1] == ("prepare", checkpoint)
        assert [one for one in again if one[0] == "train"] == [
            ("train", step, (groups[step],)) for step in range(checkpoint, 5)
        ], "what was trained after the checkpoint is trained again, in the same order"
        published = [one[1] for one in told if one[0] == "publish"]
        assert sorted(set(published)) == [f"version-{step}" for step in range(6)]
        counts = ledger.counts()
        assert counts["groups/trained"] == 5 and counts["groups/leased"] == counts["groups/ready"] == 0
        newest = setup.store.newest()
        assert newest is not None and newest.position.step == 5
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5], "each step is reported once"
    assert lines[-1]["restarts/learner"] == 1.0
    ledger.close()


class Watched:
    """Conversations with another model."""

    number = 0

    async def wait(self, number: int) -> None:
        await until(lambda: self.number >= number)

    def rows(self) -> Iterator[dict[str, Any]]:
        yield from ({"source": f"s{each}"} for each in range(self.number))


def live_parts(
    folder: Path, ledger: Ledger, watched: Watched, *, more: int = 0
) -> tuple[Callable[[FakeEngine], Versions], Callable[[FakeRanks], Lessons]]:
    """Of a live run: versions without a gate, and lessons of two conversations; `more`: come during each of them."""

    def users(engine: FakeEngine) -> Versions:
        return Versions(folder, engines=engine, ledger=ledger, gate=GateConfig(every=1), tasks=None, say=print)

    def lessons(ranks: FakeRanks) -> Lessons:
        async def teach(file: Path, _: Path) -> dict[str, float]:
            ranks.told.append(("lesson", len(file.read_text().splitlines())))
            watched.number += more
            return {}

        return Lessons(
            folder, watched=watched, ledger=ledger, every=2, weigh=lambda _: {"weight": 1.0}, teach=teach, say=print
        )

    return users, lessons


async def test_lessons_that_are_always_due_leave_every_other_step_to_batches(tmp_path: Path) -> None:
    ledger, watched = Ledger(None), Watched()
    users, lessons = live_parts(tmp_path, ledger, watched, more=2)
    watched.number = 2
    for task in range(3):
        make_ready(ledger, task=task)
    async with learning(tmp_path, ledger, users=users, lessons=lessons, steps=6) as setup:
        setup.ranks.gate.set()
        await setup.loop.run()
        kinds = [one[0] for one in setup.ranks.told if one[0] in ("train", "lesson")]
        assert kinds in (["train", "lesson"] * 3, ["lesson", "train"] * 3)
    ledger.close()


@pytest.mark.seconds
async def test_a_version_that_was_judged_before_the_learner_died_is_not_judged_again(tmp_path: Path) -> None:
    """Of those that are made again, versions 2 (a lesson) and 3 (a batch), users have sessions already."""
    ledger, watched = Ledger(None), Watched()
    users, lessons = live_parts(tmp_path, ledger, watched)
    groups = [make_ready(ledger, task=0)]
    async with learning(tmp_path, ledger, users=users, lessons=lessons, steps=4) as setup:
        setup.ranks.gate.set()
        running = asyncio.create_task(setup.loop.run())
        versions = setup.loop._users
        assert versions is not None
        await until(lambda: versions.served == 1 and any(one.position.step == 1 for one in setup.store.all()))
        setup.ranks.dies_in.append("save")
        watched.number = 2
        await until(lambda: versions.served == 2 and "start" in setup.ranks.told)
        watched.number = 3  # one more does not make the lesson another
        await until(lambda: any(one.position.step == 2 for one in setup.store.all()))
        setup.ranks.dies_in.append("save")
        groups += [make_ready(ledger, task=1, version=2), make_ready(ledger, task=2, version=2)]
        await running
        told = [one for one in setup.ranks.told if one[0] in ("train", "lesson")]
        assert told == [
            ("train", 0, (groups[0],), ("pace", 1.0), ("has_gone_back", False)), ("lesson", 2), ("lesson", 2),
            *[("train", 2, (groups[1],), ("pace", 1.0), ("has_gone_back", True))] * 2,
            ("train", 3, (groups[2],), ("pace", 1.0), ("has_gone_back", True)),
        ]  # fmt: skip
        judged = [each for each in versions.list() if each["version"]]
        assert [(each["state"], each["parent"]) for each in judged] == [("promoted", each) for each in range(4)]
        assert [call for call in setup.engine.calls if call.startswith("served")] == [f"served {n}" for n in range(5)]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4], "each step is reported once"
    ledger.close()


async def test_a_learner_that_always_dies_ends_the_run(tmp_path: Path) -> None:
    ledger = Ledger(None)
    make_ready(ledger, task=0)
    async with learning(tmp_path, ledger, steps=1, dies_in=("train_step",) * 9) as setup:
        setup.ranks.gate.set()
        with pytest.raises(RankDied, match="died in train_step"):
            await setup.loop.run()
        assert setup.ranks.told.count("start") == MAX_IN_A_ROW
    ledger.close()


async def test_a_checkpoint_waits_for_its_disk_and_leaves_nothing_there_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "LOOK_S", 0.01)
    ledger = Ledger(None)
    make_ready(ledger, task=0)
    async with learning(tmp_path, ledger, steps=1) as setup:
        setup.ranks.full = True
        setup.ranks.gate.set()
        running = asyncio.create_task(setup.loop.run())
        await until(lambda: setup.ranks.told.count("save") >= 3)
        await until(lambda: not list(setup.store.folder.iterdir()))
        setup.ranks.full = False
        await running
        assert [one.position.step for one in setup.store.all()] == [1]
        said = setup.said()
        assert said.count("the checkpoint of step 1 waits for its disk: No space left on device; once") == 1
        assert said.count("the checkpoint of step 1 is written") == 1
    ledger.close()


async def test_ctrl_c_does_not_wait_for_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "LOOK_S", 0.01)
    ledger = Ledger(None)
    make_ready(ledger, task=0)
    async with learning(tmp_path, ledger, steps=1) as setup:
        setup.ranks.full = True
        setup.ranks.gate.set()
        running = asyncio.create_task(setup.loop.run())
        await until(lambda: setup.ranks.told.count("save") >= 2)
        setup.loop.stop()
        with pytest.raises(CheckpointError, match=r"step 1 could not be written .*No space left.*; free space"):
            await running
        assert setup.store.all() == []
    ledger.close()


async def test_the_engine_sleeps_while_the_learner_updates_where_it_is_to(tmp_path: Path) -> None:
    ledger = Ledger(None)
    for task in range(2):
        make_ready(ledger, task=task)
    async with learning(tmp_path, ledger, steps=2, schedule={"sleep": True}) as setup:
        setup.ranks.gate.set()
        await setup.loop.run()
        assert setup.engine.calls == ["load 0", "sleep", "wake up", "load 1", "sleep", "wake up", "load 2"]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all("time/sleep_s" in line for line in lines if "reward/mean" in line)
    ledger.close()


async def test_figures_of_tokens_are_kept_before_their_groups_are_shown_as_trained(tmp_path: Path) -> None:
    ledger = Ledger(None)
    for task in range(2):
        make_ready(ledger, task=task)
    kept = []

    class Files:
        def add(self, batch: TrainBatch, figures: str, *, step: int) -> None:
            kept.append((step, figures, ledger.counts()["groups/trained"]))

    async with learning(tmp_path, ledger, steps=2, checkpoints={"every": 0}) as setup:
        files: Any = Files()
        setup.loop._out = replace(setup.loop._out, tokens=files)
        setup.ranks.gate.set()
        await setup.loop.run()
    assert kept == [(1, "figures", 0), (2, "figures", 1)]
    ledger.close()


async def test_told_to_stop_before_its_first_step_it_trains_nothing(tmp_path: Path) -> None:
    ledger = Ledger(None)
    make_ready(ledger, task=0)
    async with learning(tmp_path, ledger, steps=1) as setup:
        setup.ranks.gate.set()
        assert setup.loop.stop() is False
        await setup.loop.run()
        assert setup.ranks.trained == [] and ledger.counts()["groups/ready"] == 1
    ledger.close()


async def test_validation_goes_on_beside_training_and_the_last_weights_are_validated_too(tmp_path: Path) -> None:
    ledger = Ledger(None)
    validation = Validation(ledger, tasks=lambda: [make_task(50), make_task(51)], every=2, samples=1)
    for task in range(3):
        make_ready(ledger, task=task)

    async def play(*scores: float) -> None:
        for score in scores:
            episode = await setup.pool.lease(wait_s=20.0)
            assert episode is not None and episode.greedy and episode.task.task_id.startswith("val/")
            ledger.put_round(make_round(episode.episode_id))
            await until(lambda: setup.loop.step == 3)  # training does not wait for it
            await asyncio.wrap_future(ledger.notify_score(episode.episode_id, score))

    saving = CheckpointsConfig(every=2)
    async with learning(tmp_path, ledger, steps=3, validation=validation, checkpoints=saving) as setup:
        setup.ranks.gate.set()
        running = asyncio.create_task(setup.loop.run())
        await play(0.0, 1.0)
        await play(0.5, 1.0)
        await running
        assert len(setup.ranks.trained) == 3 and ledger.counts()["groups/validated"] == 4
        newest = setup.store.newest()
        assert newest is not None and newest.score == 0.75  # the best checkpoint is the best validated one
        by_step = {saved.position.step: saved.score for saved in setup.store.all()}
        assert by_step == {2: None, 3: 0.75}, "each by the validation of its own weights"
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = [(line["val/step"], line["val/mean"], line["val/skipped"]) for line in lines if "val/step" in line]
    assert found == [(0.0, 0.5, 1.0), (3.0, 0.75, 1.0)]  # that of step 2 was due while the first was under way
    assert [line["step"] for line in lines if "reward/mean" in line] == [1, 2, 3]
    ledger.close()


@dataclass
class Comparison:
    """Stands for `learner.agreement.Agreement`. `fails_at`: the batch of this number is found wrong."""

    told: list[Any]
    fails_at: int = 0
    batches: int = 0

    async def probe(self, ranks: FakeRanks) -> float:
        self.told.append("probe")
        return 0.0

    def check_batch(self, metrics: dict[str, float], *, num_tokens: int) -> None:
        assert num_tokens > 0
        self.batches += 1
        if self.batches == self.fails_at:
            raise Disagreement("off", difference=1.0, remedy="look")


async def test_engines_are_compared_with_the_first_weights_and_the_first_that_an_update_made(tmp_path: Path) -> None:
    ledger = Ledger(None)
    groups = [make_ready(ledger, task=task) for task in range(3)]
    comparison = Comparison(told=[])
    async with learning(tmp_path, ledger, steps=3, agreement=comparison, checkpoints={"every": 0}) as setup:
        comparison.told = setup.ranks.told
        setup.ranks.gate.set()
        await setup.loop.run()
        told = [one for one in setup.ranks.told if one == "probe" or one[0] in ("train", "publish")]
        trained = [("train", version, (group,)) for version, group in enumerate(groups)]
        assert told == [
            ("publish", "version-0"), "probe", trained[0], ("publish", "version-1"), "probe", trained[1],
            ("publish", "version-2"), trained[2], ("publish", "version-3"),
        ]  # fmt: skip
    ledger.close()


async def test_an_update_that_moves_nothing_does_not_take_the_place_of_the_first_that_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(None)
    for task in range(3):
        make_ready(ledger, task=task)
    comparison = Comparison(told=[])

    async with learning(tmp_path, ledger, steps=3, agreement=comparison, checkpoints={"every": 0}) as setup:
        train_step = setup.ranks.train_step

        async def moves_at_the_second(batch: TrainBatch, *, version: int) -> dict[str, float]:
            return {**await train_step(batch, version=version), "policy/grad_norm": 1.0 * (version == 1)}

        monkeypatch.setattr(setup.ranks, "train_step", moves_at_the_second)
        comparison.told = setup.ranks.told
        setup.ranks.gate.set()
        await setup.loop.run()
        told = [one if one == "probe" else one[1] for one in setup.ranks.told if one == "probe" or one[0] == "publish"]
        assert told == ["version-0", "probe", "version-1", "version-2", "probe", "version-3"]
    ledger.close()


async def test_a_batch_that_engine_and_learner_do_not_agree_on_ends_the_run_and_is_not_recorded(tmp_path: Path) -> None:
    ledger = Ledger(None)
    for task in range(2):
        make_ready(ledger, task=task)
    comparison = Comparison(told=[], fails_at=2)
    async with learning(tmp_path, ledger, steps=2, agreement=comparison, checkpoints={"every": 0}) as setup:
        with pytest.raises(Disagreement):
            await setup.loop.run()
        assert ledger.position().result().step == 1
        assert setup.engine.calls == ["load 0", "load 1"]
    ledger.close()


async def test_what_cannot_be_saved_ends_the_run_before_its_first_step(tmp_path: Path) -> None:
    for fails in (True, False):
        ledger = Ledger(None)
        make_ready(ledger, task=0)
        async with learning(
            tmp_path / str(fails), ledger, steps=1, schedule={"tries_save": True}, checkpoints={"every": 0}
        ) as setup:
            setup.ranks.gate.set()
            setup.ranks.fails = fails
            if fails:
                with pytest.raises(RankFailed, match="no shards"):
                    await setup.loop.run()
                assert setup.ranks.trained == []
            else:
                await setup.loop.run()
                told = [one if isinstance(one, str) else one[0] for one in setup.ranks.told]
                assert told.index("saved") < told.index("train"), "the first update waits for it"
                assert [one.position.step for one in setup.store.all()] == [1], "it is not kept"
        ledger.close()
