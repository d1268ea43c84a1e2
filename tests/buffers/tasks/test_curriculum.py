"""Rules of buffers/tasks/curriculum.py: tasks near a pass rate of 1/2 first, and the same draws after any interruption."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffers.ledger.ledger import Ledger
from buffers.records import GroupOutcome, Position, Task
from buffers.tasks.curriculum import CANDIDATES, Curriculum, Rule, id_hash
from buffers.tasks.parquet import write_tasks
from buffers.tasks.task_order import endless_tasks
from tests.support.buffer_parts import make_round, make_task

RULES: tuple[Rule, ...] = ("thompson", "pass_rate")
FILE_ROWS = 12


def tasks_of(path: Path, curriculum: Curriculum, *, opened: dict[str, int] | None = None) -> Iterator[Task]:
    if not path.is_file():
        write_tasks(path, [make_task(number) for number in range(FILE_ROWS)])
    return endless_tasks({path: 1.0}, seed=3, opened=opened or {}, curriculum=curriculum)


def number_of(task_id: str) -> int:
    return int(task_id.rpartition(":")[2])


def outcome(
    group_id: int, task: int, *, passes: float, of: int = 8, state: str = "trained", version: int = 0
) -> GroupOutcome:
    return GroupOutcome(
        group_id=group_id, task_id=f"t:{task}", state=state, num_scored=of, passes=passes, version=version
    )  # fmt: skip


class Play:
    """A synchronous run of steps of two groups of four on a ledger: tasks are drawn, scored by their number, and trained. Every
    group of a task 0, 4 or 8 has equal scores, and is dropped."""

    def __init__(self, folder: Path, *, rule: Rule) -> None:
        self.folder, self.rule, self.step, self.lineages = folder, rule, 0, 0
        self.saved: Position | None = None
        self.open()

    def open(self) -> None:
        self.ledger = Ledger(self.folder / "ledger.sqlite", drop_zero_variance=True)
        if self.saved is not None:
            self.ledger.restore(self.saved).result()
            self.step = self.saved.step
        opened = self.ledger.times_opened().result()
        history = self.ledger.group_outcomes(0).result()
        self.curriculum = Curriculum(self.rule, seed=3, history=history, version=self.step)
        self.tasks = tasks_of(self.folder / "t.parquet", self.curriculum, opened=opened)
        self.instances = Counter(opened)

    def kill(self) -> None:
        self.ledger.close()
        self.open()

    def save(self) -> None:
        self.saved = self.ledger.position().result()

    def play_group(self) -> None:
        (task,) = islice(self.tasks, 1)
        self.ledger.put_tasks([task]).result()
        self.ledger.open_group(task.task_id, instance=self.instances[task.task_id], group_size=4).result()
        self.instances[task.task_id] += 1
        self.score_pending()

    def score_pending(self) -> None:
        for episode in self.ledger.start_pending(limit=99, version=self.step).result():
            self.ledger.put_round(make_round(episode.episode_id, version=self.step)).result()
            number = number_of(episode.task.task_id)
            self.ledger.notify_score(episode.episode_id, float(episode.sample_index < number % 4)).result()

    def advance(self) -> None:
        """One group more, or one step."""
        self.score_pending()
        batch = self.ledger.claim(2, min_version=0).result()
        if batch is None:
            return self.play_group()
        self.step += 1
        self.ledger.commit_step(batch.lease_id, step=self.step, version=self.step).result()
        self.curriculum.learn(self.ledger.group_outcomes(self.curriculum.since).result(), version=self.step)

    def drawn(self) -> list[str]:
        return [group.task_id for group in self.ledger.group_outcomes(0).result()]


@pytest.mark.seconds
@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=8, deadline=None)
@given(st.lists(st.sampled_from(["go", "go", "go", "go", "save", "kill"]), max_size=40))
def test_a_run_that_is_killed_at_any_time_draws_what_an_undisturbed_one_draws(
    rule: Rule, tmp_path_factory: pytest.TempPathFactory, acts: list[str]
) -> None:
    plain, disturbed = (Play(tmp_path_factory.mktemp("play"), rule=rule) for _ in range(2))
    for act in [*acts, "kill", "go"]:
        {"go": disturbed.advance, "save": disturbed.save, "kill": disturbed.kill}[act]()
    drawn = disturbed.drawn()
    while len(plain.drawn()) < len(drawn):
        plain.advance()
    assert plain.drawn() == drawn
    for play in (plain, disturbed):
        play.ledger.close()


@pytest.mark.seconds
@pytest.mark.parametrize(("rule", "least"), [("thompson", 0.6), ("pass_rate", 0.15)])
def test_the_task_of_which_half_pass_is_drawn_most_until_its_scores_are_old(
    tmp_path: Path, rule: Rule, least: float
) -> None:
    history = [outcome(n + 1, n, passes=8.0 if n else 4.0) for n in range(FILE_ROWS)]

    def share(version: int) -> float:
        drawn = []
        for seed in range(300):
            curriculum = Curriculum(rule, seed=seed, history=history)
            curriculum.learn([], version=version)
            drawn.append(next(tasks_of(tmp_path / "t.parquet", curriculum)).task_id == "t:0")
        return sum(drawn) / len(drawn)

    assert share(0) > least > 1 / FILE_ROWS
    assert share(300) == pytest.approx(1 / FILE_ROWS, abs=0.06)


def test_a_task_under_way_is_drawn_again_only_where_all_are(tmp_path: Path) -> None:
    tasks = tasks_of(tmp_path / "t.parquet", Curriculum("thompson", seed=0))
    first = [task.task_id for task in islice(tasks, FILE_ROWS + 1)]
    assert len(set(first[:FILE_ROWS])) == FILE_ROWS and first[-1] in first[:FILE_ROWS]


def test_a_group_that_was_given_up_counts_once_a_later_one_is_trained(tmp_path: Path) -> None:
    curriculum = Curriculum("thompson", seed=0)
    tasks = tasks_of(tmp_path / "t.parquet", curriculum)
    next(tasks)
    dropped, failed = outcome(1, 0, passes=8.0, state="evicted"), outcome(2, 1, passes=0.0, of=0, state="evicted")
    curriculum.learn([dropped, failed, outcome(3, 2, passes=1.0, state="ready")], version=1)
    next(tasks)
    assert curriculum.since == 1 and curriculum.figures()["sampler/tasks"] == 0
    curriculum.learn([dropped, failed, outcome(3, 2, passes=1.0), outcome(4, 3, passes=1.0, state="open")], version=2)
    next(tasks)
    assert curriculum.since == 4 and curriculum.figures()["sampler/tasks"] == 2, "what failed says nothing of its task"
    curriculum.learn([outcome(4, 3, passes=1.0)], version=3)
    assert curriculum.since == 5


def test_steps_that_are_made_again_teach_nothing_twice(tmp_path: Path) -> None:
    """The learner died: groups that were trained are ready again, and trained again."""
    curriculum = Curriculum("thompson", seed=0)
    tasks = tasks_of(tmp_path / "t.parquet", curriculum)
    opened = outcome(1, 0, passes=8.0, state="open")
    for state in ("trained", "ready", "trained"):
        curriculum.learn([opened, outcome(2, 1, passes=8.0, state=state)], version=1)
        next(tasks)
    (rates,) = curriculum._files
    assert rates.passes.sum() == 8.0


def test_what_is_drawn_is_said_of_the_version_before(tmp_path: Path) -> None:
    curriculum = Curriculum("pass_rate", seed=0)
    tasks = tasks_of(tmp_path / "t.parquet", curriculum)
    ids = [task.task_id for task in islice(tasks, FILE_ROWS)]
    assert curriculum.figures() == {"sampler/tasks": 0.0}
    curriculum.learn([outcome(n + 1, number_of(one), passes=8.0) for n, one in enumerate(ids)], version=1)
    assert curriculum.figures() | {"sampler/tasks": 0} == {
        "sampler/pass_rate": 0.5,
        "sampler/new_share": 1.0,
        "sampler/tasks": 0,
    }
    next(tasks)
    curriculum.learn([], version=2)
    figures = curriculum.figures()
    assert figures["sampler/new_share"] == 0.0 and figures["sampler/tasks"] == FILE_ROWS
    assert 0.85 < figures["sampler/pass_rate"] < 0.95, "(1 + 8 kept) of (2 + 8 kept)"


def test_a_million_tasks_take_35_bytes_each_and_a_draw_looks_at_some() -> None:
    number = 1_000_000
    curriculum = Curriculum("thompson", seed=0)
    rates = curriculum.add_file("large:", np.random.default_rng(0).integers(2**63, size=number).astype(np.uint64))
    arrays = (rates.ids, rates.rows, rates.passes, rates.fails, rates.versions, rates.running, rates.tried)
    assert sum(each.nbytes for each in arrays) <= 35 * number
    looked_at: list[int] = []

    class Draws:
        def integers(self, high: int, *, size: int) -> np.ndarray:
            return np.arange(size)

        def beta(self, passes: np.ndarray, fails: np.ndarray) -> np.ndarray:
            looked_at.append(len(passes))
            return passes / (passes + fails)

    rates.draw("thompson", version=0, draws=Draws())  # type: ignore[arg-type]
    assert looked_at == [CANDIDATES]
    assert len({curriculum.draw(rates, number=each) for each in range(20)}) == 20


def test_rows_with_the_same_id_are_one_task(tmp_path: Path) -> None:
    curriculum = Curriculum("thompson", seed=0)
    rates = curriculum.add_file("t:", np.array([id_hash("a"), id_hash("b"), id_hash("a")], np.uint64))
    assert sorted(curriculum.draw(rates, number=each) for each in range(2)) == [0, 1]
