"""Environments that misbehave, for tests: each is named for what it does. `EchoEnv` behaves."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from env_adapters.adapter import EnvAdapter, Step, user
from env_adapters.guarded_calls import WorkerThread
from tests.support.patience import PATIENCE_S


class Strange(Exception):
    """Known to nobody: what a library may raise."""


class EchoEnv(EnvAdapter):
    """Says what it was reset with, then repeats each action; done at `stop`. The score counts actions."""

    def __init__(self, *, observation: str = "") -> None:
        self.observation = observation
        self.actions: list[str] = []

    async def reset(self, task: dict[str, Any], *, seed: int) -> list[dict[str, Any]]:
        return [user(f"seed {seed} truth {task.get('ground_truth')}")]

    async def step(self, action: str) -> Step:
        self.actions.append(action)
        return Step(messages=[user(self.observation or f"you said {action}")], done=action == "stop", reward=0.5)

    async def score(self) -> float:
        return float(len(self.actions))


class Hangs(EchoEnv):
    async def step(self, action: str) -> Step:
        await asyncio.Event().wait()
        raise AssertionError


class HangsInAThread(EchoEnv):
    """Until it is closed."""

    async def step(self, action: str) -> Step:
        self.release = threading.Event()
        self.thread = WorkerThread("hangs")
        await self.thread.call(lambda: self.release.wait(PATIENCE_S))
        raise AssertionError

    async def close(self) -> None:
        await self.thread.end(lambda: None)  # does not wait for the call that hangs
        self.release.set()


class Crashes(EchoEnv):
    async def step(self, action: str) -> Step:
        raise Strange("at line one\nand two")


class Exits(EchoEnv):
    """A library that ends the process, in a thread."""

    async def step(self, action: str) -> Step:
        thread = WorkerThread("exits")
        try:
            await thread.call(lambda: exit(3))
        finally:
            await thread.end(lambda: None)
        raise AssertionError


class GivesNonsense(EchoEnv):
    async def step(self, action: str) -> Step:
        return Step(messages=[{"role": "user", "content": 7}], done=False)


class ScoresNaN(EchoEnv):
    async def score(self) -> float:
        return float("nan")
