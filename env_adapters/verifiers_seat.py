"""A seat in a `verifiers` environment that is played from outside.

Used by `env_adapters.verifiers_env`. The package's agents run a model; a seat hands each turn through a `Channel` to the
model under training and waits for its text. It stands for the package's `Agent`, `Interaction` and rollout as an
environment's `run` uses them: `agents.<name>.run(task)`, `agents.<name>.interaction(task)` with `turn`, `trace` and `close`.
Invariants: what was said is in the trace, in order; stop conditions are asked before each model turn, as in the package; a
trace is scored once, when its exchange ends, without a sandbox (`runtime=None`).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from env_adapters.adapter import Message


class Channel:
    """The channel of a seat's turns and the model's texts: one at a time, in turn."""

    def __init__(self) -> None:
        self._said: asyncio.Queue[list[Message]] = asyncio.Queue(maxsize=1)
        self._answers: asyncio.Queue[str | None] = asyncio.Queue(maxsize=2)
        self._is_cut = False

    async def ask(self, messages: list[Message]) -> str | None:
        """The model's answer to these messages; None when the exchange was cut."""
        if self._is_cut:
            return None
        await self._said.put(messages)
        return await self._answers.get()

    async def said(self) -> list[Message]:
        """The next messages to the seat."""
        return await self._said.get()

    def answer(self, text: str) -> None:
        """The model's text for the last turn."""
        self._answers.put_nowait(text)

    def cut(self) -> None:
        """The model says nothing more: this turn and all later ones have no answer."""
        if not self._is_cut:
            self._is_cut = True
            self._answers.put_nowait(None)


class Seat:
    """The one agent of an environment. Ended exchanges are added to `traces`."""

    trainable = True

    def __init__(self, name: str, *, config: Any, channel: Channel, traces: list[Any]) -> None:
        self.name = name
        self.config = config
        self._channel = channel
        self._traces = traces

    async def run(self, task: Any, **_: Any) -> Any:
        """One turn of a task that opens the conversation itself."""
        async with self.interaction(task) as exchange:
            await exchange.turn()
        return exchange.trace

    @asynccontextmanager
    async def interaction(self, task: Any, **_: Any) -> AsyncIterator[Exchange]:
        """An exchange turn by turn; it is scored when the context ends."""
        exchange = Exchange(task, seat=self, channel=self._channel)
        await _call(task.setup, trace=exchange.trace, runtime=None)
        yield exchange
        self._traces.append(await exchange.close())


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
        """Whether a limit or one of the task's stop conditions on its trace holds."""
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
