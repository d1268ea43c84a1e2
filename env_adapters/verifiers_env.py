"""An environment of the `verifiers` package (0.4, the taskset API `verifiers.v1`): its tasks, its `run`, its rewards.

Made by `env_adapters.adapter`; `python -m env_adapters.verifiers_env --taskset ID --out FILE` writes its tasks as a task file. The
only owner of verifiers, which is an extra of its own. The environment's `run(task, agents)` is left as it is: it gets a seat
in place of the package's agent, and what it says to that seat becomes the model's messages. Invariants: the row is the task's
`extra_info.index`; the score is the sum of the weighted rewards of its trace, after its `finalize`; what was said is in the trace,
in order; stop conditions are asked before each model turn, as in the package; a trace is scored once, when its exchange ends,
without a sandbox (`runtime=None`). Not supported, and refused by name: several agents, tool servers, and tasks or rewards that need
a sandbox.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import itertools
import json
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from buffers.errors import EnvError
from buffers.records import Task
from buffers.tasks.parquet import write_tasks
from env_adapters.adapter import EnvAdapter, Message, Step
from env_adapters.guarded_calls import Threads

LOADING = Threads(name="verifiers taskset")
"""Reading rows may block."""


class VerifiersEnv(EnvAdapter):
    """`taskset`: the id of an installed taskset package, `options` its configuration; `env`: an environment to pair it with."""

    def __init__(self, *, taskset: str, options: Mapping[str, Any] | None = None, env: str = "") -> None:
        self._config = json.dumps({"id": env, "taskset": {"id": taskset, **(options or {})}}, sort_keys=True)
        self._channel = Channel()
        self._playing: asyncio.Task[float] | None = None

    async def reset(self, task: dict[str, Any], *, seed: int) -> list[Message]:
        index = task.get("extra_info", {}).get("index")
        if not isinstance(index, int) or index < 0:
            raise EnvError(
                f"extra_info.index of task {task.get('task_id')} must name a row of the taskset, got {index!r}; write the tasks "
                "with python -m env_adapters.verifiers_env",
                reason="environment reset: bad task",
            )
        rows = await LOADING.run(lambda: _rows(self._config))
        row = await LOADING.run(lambda: rows.at(index))
        _check(row, rows.env)
        self._playing = asyncio.create_task(self._play(rows.env, row), name="verifiers environment")
        return (await self._next()).messages

    async def step(self, action: str) -> Step:
        self._channel.answers.put_nowait(action)
        return await self._next()

    async def score(self) -> float:
        """The score; before the environment's end the exchange is cut, and what exists of it is scored."""
        assert self._playing is not None, "reset() first"
        self._channel.cut()
        return await self._playing

    async def close(self) -> None:
        if self._playing is not None and not self._playing.done():
            self._playing.cancel()
            with suppress(asyncio.CancelledError):
                await self._playing

    async def _next(self) -> Step:
        """Messages of the environment to its seat; done when its `run` has ended instead."""
        assert self._playing is not None
        said = asyncio.create_task(self._channel.said.get())
        try:
            await asyncio.wait({said, self._playing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not said.done():
                said.cancel()
        if said.done() and not said.cancelled():
            return Step(messages=said.result(), done=False)
        reward = self._playing.result()
        return Step(messages=[], done=True, reward=reward)

    async def _play(self, env: Any, row: Any) -> float:
        from verifiers.v1.episode import EnvInfo, Episode
        from verifiers.v1.trace import TraceTask

        ((name, spec),) = env._agent_specs.items()
        traces: list[Any] = []
        agents = SimpleNamespace(**{name: Seat(name, config=spec, channel=self._channel, traces=traces)})
        await env.setup(agents)
        await env.run(row, agents)
        about = TraceTask(type=type(row).__name__, data=row.data, key=row.key, hash=row.hash)
        episode = Episode(env=EnvInfo(id=env.config.env_id), task=about, traces=traces)
        await env.finalize(row, episode)
        return float(sum(trace.reward for trace in episode.traces))


class Channel:
    """The channel of a seat's turns and the model's texts: one at a time, in turn."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[list[Message]] = asyncio.Queue(maxsize=1)
        self.answers: asyncio.Queue[str | None] = asyncio.Queue(maxsize=2)
        self._is_cut = False

    async def ask(self, messages: list[Message]) -> str | None:
        """The model's answer to these messages; None when the exchange was cut."""
        if self._is_cut:
            return None
        await self.said.put(messages)
        return await self.answers.get()

    def cut(self) -> None:
        """The model says nothing more: this turn and all later ones have no answer."""
        if not self._is_cut:
            self._is_cut = True
            self.answers.put_nowait(None)


@dataclass(eq=False)
class Seat:
    """The one agent of an environment. It hands each turn through a `Channel` to the model under training and waits for its text.

    It stands for the package's `Agent`, `Interaction` and rollout as an environment's `run` uses them: `agents.<name>.run(task)`,
    `agents.<name>.interaction(task)` with `turn`, `trace` and `close`. Ended exchanges are added to `traces`."""

    name: str
    config: Any
    channel: Channel
    traces: list[Any]
    trainable = True

    async def run(self, task: Any, **_: Any) -> Any:
        """One turn of a task that opens the conversation itself."""
        async with self.interaction(task) as exchange:
            await exchange.turn()
        return exchange.trace

    @asynccontextmanager
    async def interaction(self, task: Any, **_: Any) -> AsyncIterator[Exchange]:
        """An exchange turn by turn; it is scored when the context ends."""
        exchange = Exchange(task, seat=self, channel=self.channel)
        await _call(task.setup, trace=exchange.trace, runtime=None)
        yield exchange
        self.traces.append(await exchange.close())


class Exchange:
    """One conversation on a task, with its trace."""

    def __init__(self, task: Any, *, seat: Seat, channel: Channel) -> None:
        from verifiers.v1.state import state_cls
        from verifiers.v1.trace import AgentInfo, Trace, TraceTask

        about = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        self.trace: Any = Trace(
            task=about, state=state_cls(type(task))(), agent=AgentInfo(config=seat.config, name=seat.name)
        )
        self._task = task
        self._max_turns = seat.config.max_turns
        self._channel = channel
        self._over = False
        self._closed = False

    async def turn(self, message: Any = None) -> Any:
        """Say this to the model, or the task's own prompt; its answer as a Segment, a terminated one when there is none."""
        from verifiers.v1.agent import Segment
        from verifiers.v1.types import AssistantMessage, UserMessage

        if self._over or self._closed:
            raise RuntimeError("the exchange is over")
        began = bool(self.trace.nodes)
        said = [UserMessage(content=message)] if isinstance(message, str) else list(message or [])
        if not began:
            said = [*opening(self._task.data), *said]
        said = [_typed(one) for one in said]
        text = None if not said or await self._stopped() else await self._channel.ask(plain(said))
        if text is None:
            self._over = True
            return Segment(messages=[], terminated=True)
        reply = AssistantMessage(content=text)
        self._record(said, sampled=False)
        self._record([reply], sampled=True)
        return Segment(messages=[reply], root_reply=text)

    async def close(self) -> Any:
        """End the exchange and score it, once."""
        if not self._closed:
            self._closed = True
            self.trace.stop("user_closed")
            await _call(self._task.finalize, trace=self.trace, runtime=None)
            await self._task.score(self.trace, None)
            self.trace.ok = True
        return self.trace

    async def _stopped(self) -> bool:
        """True if a limit or one of the task's stop conditions on its trace holds."""
        from verifiers.v1.session import call_hook, hook_boundary
        from verifiers.v1.trace import Trace

        if self._max_turns is not None and self.trace.num_turns >= self._max_turns:
            self.trace.stop("max_turns")
            return True
        for stop in self._task.hooks("stop"):
            if hook_boundary(stop, allow_trace=True) is Trace and await call_hook(stop, {Trace: self.trace}):
                self.trace.stop(stop.__name__)
                return True
        return False

    def _record(self, messages: list[Any], *, sampled: bool) -> None:
        from verifiers.v1.graph import MessageNode

        for message in messages:
            parent = len(self.trace.nodes) - 1
            self.trace.nodes.append(
                MessageNode(parent=parent if parent >= 0 else None, message=message, sampled=sampled)
            )


def opening(data: Any) -> list[Any]:
    """A task's own first messages: its system prompt and its prompt."""
    from verifiers.v1.types import SystemMessage, UserMessage

    system = [SystemMessage(content=data.system_prompt)] if data.system_prompt else []
    prompt = [UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt or [])
    return [*system, *prompt]


def plain(messages: list[Any]) -> list[Message]:
    """Messages as an adapter gives them: role and text."""
    from verifiers.v1.types import content_text

    return [{"role": one.role, "content": content_text(one.content)} for one in messages]


def _typed(message: Any) -> Any:
    from verifiers.v1.dialects import parse_message

    return parse_message(message) if isinstance(message, dict) else message


async def _call(hook: Any, **available: Any) -> None:
    """A task's hook, with those of the arguments that it names."""
    result = hook(**{name: available[name] for name in inspect.signature(hook).parameters if name in available})
    if inspect.isawaitable(result):
        await result


class _Rows:
    """A loaded environment and the tasks of it that were read so far. An infinite taskset is read as far as it is asked for."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self._unread: Iterator[Any] = iter(env.taskset)
        self._read: list[Any] = []
        self._lock = threading.Lock()

    def at(self, index: int) -> Any:
        with self._lock:
            self._read += itertools.islice(self._unread, max(0, index + 1 - len(self._read)))
        if index >= len(self._read):
            raise EnvError(
                f"extra_info.index must be below the taskset's {len(self._read)} rows, got {index}; write the tasks again",
                reason="environment reset: bad task",
            )
        return self._read[index]

    def first(self, number: int | None) -> list[Any]:
        with self._lock:
            self._read += itertools.islice(self._unread, None if number is None else max(0, number - len(self._read)))
        return self._read[:number]


@lru_cache(maxsize=8)
def _rows(config: str) -> _Rows:
    """Loaded once for all episodes: the package's environments are values that episodes share."""
    try:
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config
    except ImportError as error:
        raise EnvError(
            f"environment verifiers needs the package verifiers, which is not there ({error}); "
            "pip install 'verifiers>=0.4,<0.5'",
            reason="environment reset: not installed",
        ) from error
    try:
        return _Rows(load_environment(resolve_env_config(json.loads(config))))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise EnvError(
            f"verifiers must be able to load {config}, got {type(error).__name__}: {error}",
            reason="environment reset: make",
        ) from error


def _check(row: Any, env: Any) -> None:
    """Refuse what a seat without a sandbox cannot play: a reward that was left out would be a wrong score."""
    wanting = [
        fn.__name__
        for fn in row.hooks("reward")
        if (given := inspect.signature(fn).parameters.get("runtime")) is not None
        and given.default is inspect.Parameter.empty
    ]
    rules = {
        "one agent": len(env._agent_specs) == 1,
        "no sandbox": not row.NEEDS_CONTAINER and not wanting,
        "no tool servers": not row.toolsets(row.config) and not env.taskset.toolsets(env.taskset.config),
    }
    broken = [rule for rule, holds in rules.items() if not holds]
    if broken:
        raise EnvError(
            f"verifiers environment {env.config.env_id!r} must have {' and '.join(broken)} to be played here; run it as an agent "
            "program instead (agents.command)",
            reason="environment reset: not supported",
        )


def tasks_of(taskset: str, *, options: Mapping[str, Any], env: str, number: int | None) -> list[Task]:
    """The rows of a taskset as tasks that VerifiersEnv plays."""
    rows = _rows(json.dumps({"id": env, "taskset": {"id": taskset, **options}}, sort_keys=True))
    if number is None and not rows.env.taskset.bounded:
        raise EnvError(f"taskset {taskset} has no end: the number of tasks must be given; add --number")
    tasks = []
    for index, row in enumerate(rows.first(number)):
        shown = plain(opening(row.data)) or [{"role": "user", "content": row.data.name or f"{taskset} {index}"}]
        info = {"index": index, "name": row.data.name or ""}
        tasks.append(
            Task(
                task_id=f"{taskset}:{index}", prompt=shown, data_source=taskset, agent_name="env_agent", extra_info=info
            )
        )
    return tasks


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the rows of a verifiers taskset as a task file.")
    parser.add_argument("--taskset", required=True, help="id of an installed taskset package")
    parser.add_argument("--env", default="", help="id of an environment to pair it with")
    parser.add_argument("--options", type=json.loads, default={}, help="JSON object: the taskset's configuration")
    parser.add_argument("--number", type=int, help="how many rows; all of a finite taskset when left out")
    parser.add_argument("--out", type=Path, required=True, help="parquet file to write")
    given = parser.parse_args()
    try:
        tasks = tasks_of(given.taskset, options=given.options, env=given.env, number=given.number)
    except EnvError as error:
        parser.exit(1, f"error: {error}\n")
    write_tasks(given.out, tasks)
    print(f"{given.out}: {len(tasks)} tasks")


if __name__ == "__main__":
    main()
