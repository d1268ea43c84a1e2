"""Objects and functions on the nodes of a Ray cluster, and what Ray's errors of them say.

Used by whatever places something there. Ray starts, finds and ends the processes; what they answer one another goes over the wire.
It reads Ray's words: what a constructor raised comes as text only, and so does what held the memory of a machine.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from itertools import dropwhile
from typing import Any

import ray
from ray.exceptions import ActorUnschedulableError, OutOfMemoryError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from buffers.errors import UnderstudyError
from buffers.remote.actor import REFUSALS, Actor, ActorDied, ActorRefused, CallFailed

ENDINGS = (RayActorError, ActorUnschedulableError, OutOfMemoryError)
"""Errors of an actor that is no more: of its process, of its place, and of Ray's memory monitor."""
OURS = ("agents.", "buffers.", "configs.", "env_adapters.", "learner.", "mocked_server.")
"""Modules whose errors are this project's."""
SHOWN_USERS = 3
MOST_CHARS = 60
_MEMORY = re.compile(r"was ([\d.]+)GB used / ([\d.]+)GB limit")
_OWN_MEMORY = re.compile(r"Selected to kill: .*actual memory used=([\d.]+)GB")
_USER = re.compile(r"^(\d+)\t([\d.]+)\t(.+)$", re.MULTILINE)


class ActorUnplaced(ActorDied):
    """No node has room for the actor, or its node is gone."""


def on_node(node_id: str, *, environment: Mapping[str, str], num_gpus: int = 0) -> dict[str, Any]:
    """Ray's options of what runs there. `environment`: of its process; `num_gpus`: cards that Ray counts for it, on a machine
    without any 0."""
    return {
        "num_cpus": 0, "num_gpus": num_gpus, "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
        "runtime_env": {"env_vars": dict(environment)},
    }  # fmt: skip


class RayActor(Actor):
    """`make(*arguments, **options)` where `place` (`on_node`) says."""

    def __init__(self, place: Mapping[str, Any], make: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        self.handle = ray.remote(make).options(max_restarts=0, **place).remote(*arguments, **options)
        """Ray's own."""

    def call(self, method: str, *arguments: Any, **options: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(_answer(getattr(self.handle, method).remote(*arguments, **options)))

    def ready(self) -> asyncio.Future[Any]:
        return self.call("__ray_ready__")

    def kill(self) -> None:
        ray.kill(self.handle)


def called_on(place: Mapping[str, Any], function: Callable[..., Any], *arguments: Any) -> Any:
    """Ray's reference to what the function gives there; `answer_of` waits for it."""
    return ray.remote(function).options(max_retries=0, **place).remote(*arguments)


def stored_once(value: object) -> Any:
    """The value as an argument of calls of several actors."""
    return ray.put(value)


async def _answer(reference: Any) -> Any:
    try:
        return await reference
    except RayError as error:
        raise meaning(error) from None


def answer_of(reference: Any, *, timeout_s: float) -> Any:
    """What was called, for threads. Raises as an actor's `call`, and UnderstudyError after this time."""
    try:
        return ray.get(reference, timeout=timeout_s)
    except RayError as error:
        raise meaning(error) from None


def meaning(error: RayError) -> UnderstudyError:
    """The error that an `Actor` raises in place of Ray's."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        return cause if isinstance(cause, UnderstudyError) else CallFailed(f"{type(cause).__name__}: {cause}")
    if (refused := refusal(error)) is not None:
        return ActorRefused(refused)
    if isinstance(error, ActorUnschedulableError):
        return ActorUnplaced(in_short(error))
    return (ActorDied if isinstance(error, ENDINGS) else UnderstudyError)(in_short(error))


def refusal(error: BaseException | None) -> str | None:
    """The sentence with which the actor's constructor refused what it was given, as another start would too. None: it did not."""
    if not (isinstance(error, RayActorError) and error.actor_init_failed):
        return None
    raised = _raised(error)
    name, _, sentence = raised.partition(": ")
    if name.startswith(OURS):
        return sentence
    return raised if name in REFUSALS else None


def _raised(error: RayActorError) -> str:
    """What the constructor raised, as `Class: text`, out of Ray's words and the calls that led there."""
    lines = str(error).splitlines()
    last_call = max((number for number, line in enumerate(lines) if line.startswith('  File "')), default=0)
    return "\n".join(dropwhile(lambda line: line.startswith(" "), lines[last_call + 1 :]))


def in_short(error: BaseException) -> str:
    """Why the actor ended, in one line."""
    text = _raised(error) if isinstance(error, RayActorError) and error.actor_init_failed else str(error)
    if (memory := _MEMORY.search(text)) is None:
        return " ".join(text.split())
    own = _OWN_MEMORY.search(text)
    users = [f"{size} GB {command.strip()[:MOST_CHARS]} ({pid})" for pid, size, command in _USER.findall(text)]
    return (
        f"Ray's memory monitor ended it, as {memory[1]} of the machine's {memory[2]} GB were taken: "
        + (f"{own[1]} GB by itself; " if own else "")
        + f"most by {', '.join(users[:SHOWN_USERS])}"
    )
