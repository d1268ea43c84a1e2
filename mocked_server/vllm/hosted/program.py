"""The process of an engine's host, as an actor: makes a vLLM engine and serves it over the wire, until its starter ends it or dies.

`ChildHost` is a child of this process; on another node it is one of a Ray actor there, which an `ActorHost` starts. Ray places that
actor and gives it its cards (`CUDA_VISIBLE_DEVICES`, which the child inherits); no request and no output goes through Ray. The
engine starts when the client says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.context import SpawnContext

from buffers.errors import EngineDied, EngineError, UnderstudyError
from buffers.remote.actor import Actor, ActorDied, ChildActor
from buffers.wire.address import way_to
from configs.fork_server import ending_with_us
from mocked_server.vllm.engine import VLLMEngine, start_fork_server
from mocked_server.vllm.engine_arguments import EngineSettings, make_args, make_vllm_config
from mocked_server.vllm.hosted.engine_host import EngineHost
from mocked_server.vllm.hosted.outputs import VLLMCodec

START_S = 600.0
"""Seconds for the process to import vLLM and to listen: on processors with much else to do it takes minutes, and one that ends is
seen at once."""
END_S = 10.0
"""Seconds for an actor to end its child before it is killed."""
TITLE = "understudy::engine_host"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings:
    """Settings of a host. `host`, `trusted`: see `buffers.wire.address.way_to`."""

    engine: EngineSettings
    secret: bytes = field(repr=False)
    name: str = "e0"
    host: str = "127.0.0.1"
    trusted: bool = False
    count_preemptions: bool = False
    timeout_s: float = 120.0


class HostProgram:
    """The host in its process."""

    def __init__(self, settings: HostSettings) -> None:
        self._settings = settings

    async def start(self) -> str:
        """The address where it listens, with an engine that has not started. Raises EngineError for arguments that vLLM refuses."""
        settings = self._settings
        vllm_config = await asyncio.to_thread(lambda: make_vllm_config(make_args(settings.engine)))
        engine = VLLMEngine(
            vllm_config, count_preemptions=settings.count_preemptions, timeout_s=settings.timeout_s, name=settings.name
        )
        way = way_to(settings.host, trusted=settings.trusted)
        self._host = EngineHost(engine, VLLMCodec(), secret=settings.secret, way=way, host=settings.host)
        self._host.listen(asyncio.get_running_loop())
        return str(self._host.address)


class ActorHost:
    """A `HostProcess` of `remote_engine`. `make`: starts an actor with a `start` that gives the host's address."""

    def __init__(self, name: str, make: Callable[[], Actor]) -> None:
        self.actor: Actor | None = None
        """None: it does not run."""
        self._name, self._make = name, make

    async def start(self) -> str:
        """Returns its address once it listens. Raises EngineDied when its process or its node died, else EngineError."""
        await self.end()
        self.actor = self._make()
        what = f"the host of engine {self._name}"
        try:
            address: str = await asyncio.wait_for(self.actor.call("start"), START_S)
        except EngineError:
            raise
        except TimeoutError as error:
            await self.end()
            raise EngineError(f"{what} must listen within {START_S:.0f} s, but did not") from error
        except UnderstudyError as error:
            is_death = type(error) is ActorDied  # not one that no node has room for
            raise (EngineDied if is_death else EngineError)(f"{what} did not start: {error}") from error
        return address

    async def end(self) -> None:
        """End it, whatever it does, and what it has started."""
        actor, self.actor = self.actor, None
        if actor is not None:
            with suppress(UnderstudyError, TimeoutError):  # it is dead, or its node is
                await asyncio.wait_for(actor.call("end"), END_S)
            actor.kill()


class ChildHost(ActorHost):
    """The host in a child of this process, whose log is this one's. It has a fork server of its own, so that its engine is back
    sooner after a death."""

    def __init__(self, settings: HostSettings) -> None:
        context = ending_with_us(SpawnContext(), [], prepare=start_fork_server)
        super().__init__(settings.name, partial(ChildActor, context, f"{TITLE}_{settings.name}", HostProgram, settings))

    async def end(self) -> None:
        actor, self.actor = self.actor, None
        if isinstance(actor, ChildActor):
            await actor.stop()
