"""Reasoning Gym by name: refused by name where the package is missing; what it does when it is there, tests/outside plays."""

from __future__ import annotations

import pytest

from buffers.errors import TaskError
from buffers.records import Task
from buffers.tasks import reasoning_gym_tasks
from env_adapters.scoring.rewards import Rewards


@pytest.fixture(autouse=True)
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasoning_gym_tasks, "is_installed", lambda: False)


def test_tasks_of_a_package_that_is_missing_are_refused_with_what_to_install() -> None:
    with pytest.raises(
        ValueError, match=r"chain_sum needs the package reasoning-gym, got none; pip install reasoning-gym"
    ):
        next(reasoning_gym_tasks.task_rows("reasoning_gym://chain_sum"))


def test_its_scorer_is_refused_too() -> None:
    with pytest.raises(TaskError, match=r"data\.scorer=reasoning_gym needs the package reasoning-gym"):
        Rewards("reasoning_gym")


def test_a_task_of_another_source_cannot_be_judged_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasoning_gym_tasks, "is_installed", lambda: True)
    rewards = Rewards("reasoning_gym")
    with pytest.raises(TaskError, match="judges tasks of reasoning_gym://, got one of 'gsm8k'"):
        rewards.check(Task(task_id="1", prompt=[], data_source="gsm8k", ground_truth="3"))
    entry = {"settings": "{}", "index": 0}
    rewards.check(Task(task_id="1", prompt=[], data_source="reasoning_gym://chain_sum", extra_info=entry))
