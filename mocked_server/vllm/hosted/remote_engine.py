"""`RemoteEngine`: an engine in another process, here or on another machine, used as one in this process.

Made by the pipeline for engines that are placed elsewhere; a `FleetEngine`. A `HostProcess` says how its host (`engine_host`) is
started and ended; all else goes over the wire. Invariants: outputs are those that the engine made, in their order; closing an
iterator aborts its request; a host that ended, or says nothing for `SILENT_S`, is a dead engine: each request under way ends with
EngineLost and all that came of it, and `until_dead` returns.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from buffers.errors import EngineDied, EngineError, RequestFailed, UnderstudyError
from buffers.wire.address import WireError, WireLost
from buffers.wire.client import AsyncClient
from buffers.wire.connection import Connection
from mocked_server.fleet.member import EngineFigures, EngineLost, Sampled
from mocked_server.vllm.hosted.engine_host import SILENT_S, EngineHost
from mocked_server.vllm.hosted.outputs import VLLMCodec, WireOutput

logger = logging.getLogger(__name__)


class HostProcess(Protocol):
    """The process of an engine's host."""

    async def start(self) -> str:
        """Start it; its address on the wire. Raises EngineError, EngineDied."""
        ...

    async def end(self) -> None:
        """End it, whatever it does. Idempotent."""
        ...


@dataclass(eq=False, repr=False)  # a secret stands in no log
class RemoteEngine:
    """See the module. `weights`: (folder, version) to begin with. `locate`: the folder that its host reads in place of one here."""

    host: HostProcess
    codec: VLLMCodec
    _: KW_ONLY
    secret: bytes
    name: str = "e0"
    weights: tuple[Path, int] | None = None
    locate: Callable[[Path], Path] = lambda folder: folder

    def __post_init__(self) -> None:
        self.version = 0
        self._life = 0
        self._client: AsyncClient | None = None
        self._is_up = False
        self._dead = asyncio.Event()
        self._dead.set()
        self._figures = self._before = _nothing(self.name)
        """Figures of the present process, and sums of those before."""

    @property
    def is_up(self) -> bool:
        """It takes requests."""
        return self._is_up and self._client is not None and self._client.lost is None

    async def start(self) -> None:
        """Start its host's process, and the engine in it. Raises EngineDied when it ended meanwhile, else EngineError."""
        self._life += 1
        address = await self.host.start()
        try:
            connection = await asyncio.to_thread(Connection, address, secret=self.secret)
        except WireLost as error:
            raise EngineDied(f"the host of engine {self.name} ended before it could be reached: {error}") from error
        except WireError as error:
            raise EngineError(f"the host of engine {self.name} cannot be asked: {error}") from error
        self._client = AsyncClient(
            connection, EngineHost, name=f"the host of engine {self.name}", silent_s=SILENT_S, on_state=self._see,
            on_lost=self._lose, lost_as=_HostLost,
        )  # fmt: skip
        await self._load_first()
        await self._order(EngineHost.start_engine)
        self._be_up()

    async def restart(self) -> None:
        """A new engine process in place of a dead one, in the same host if that answers. Raises as `start`."""
        self._is_up = False
        if self._client is None or self._client.lost is not None:
            await self.close()
            await self.start()
            return
        self._life += 1
        await self._load_first()  # told again: the host may never have heard
        await self._order(EngineHost.restart_engine)
        self._be_up()

    async def _load_first(self) -> None:
        if (weights := self.weights) is not None:
            await self._order_to_load(*weights)

    async def _order_to_load(self, folder: Path, version: int) -> float:
        paused_s: float = await self._order(EngineHost.load_weights, folder=str(self.locate(folder)), version=version)
        return paused_s

    def _be_up(self) -> None:
        self._is_up = True
        self._dead = asyncio.Event()

    def _see(self, figures: EngineFigures) -> None:
        """What the host says of its engine."""
        self._figures = figures
        self.version = figures.version
        if self._is_up and not figures.is_up:
            self._is_up = False
            self._dead.set()

    def _lose(self) -> None:
        """The host is lost."""
        self._is_up = False
        self._dead.set()
        self._before, self._figures = self._sum(), _nothing(self.name)

    async def until_dead(self) -> None:
        """Returns when its present process is gone."""
        await self._dead.wait()

    async def close(self) -> None:
        """End the engine and its host's process; what it was still answering ends with EngineLost."""
        self._is_up = False
        client, self._client = self._client, None
        if client is not None:
            with suppress(UnderstudyError, TimeoutError):
                await asyncio.wait_for(client.call(EngineHost.close_engine), SILENT_S)
            await client.close()
        self._dead.set()
        await self.host.end()

    async def generate(
        self,
        prompt_token_ids: list[int],
        params: Any,
        *,
        request_id: str,
        sampled: Sequence[Sampled] = (),
        **extra: Any,
    ) -> AsyncGenerator[Any, None]:
        """See `FleetEngine.generate`. Raises RequestRefused, RequestFailed, EngineLost."""
        life = (self.name, self._life)
        client = self._client
        if client is None or not self.is_up:
            raise EngineLost(f"engine {self.name} is down", life=life, sampled=sampled)
        rebuilt = self.codec.rebuilt(prompt_token_ids, params, request_id=request_id, sampled=sampled)
        items: asyncio.Queue[tuple[WireOutput, UnderstudyError | None, bool]] = asyncio.Queue()
        try:
            number = client.begin(
                EngineHost.generate, lambda *item: items.put_nowait(item), prompt_token_ids=prompt_token_ids,
                params=self.codec.pack_params(params), request_id=request_id, extra=extra,
                sampled=[self.codec.pack_sampled(each) for each in sampled if each.output is None],
            )  # fmt: skip
        except (TypeError, ValueError, OverflowError) as error:
            raise RequestFailed(f"request {request_id} cannot be sent to engine {self.name}: {error}") from error
        is_last = False
        try:
            while not is_last:
                delta, failure, is_last = await items.get()
                if isinstance(failure, EngineLost | _HostLost):
                    by_itself = isinstance(failure, EngineLost) and failure.by_itself
                    raise EngineLost(str(failure), life=life, sampled=rebuilt.sampled(), by_itself=by_itself)
                if failure is not None:
                    raise failure
                if (output := rebuilt.add(delta)) is not None:
                    yield output
        finally:
            client.abort(number)

    async def load_weights(self, folder: Path, *, version: int) -> float:
        """Sample with these weights from now on. One that is down gets them with its restart; one that starts, before it is up.
        Returns the seconds that it paused."""
        self.weights = folder, version
        if self._client is not None and self._client.lost is None:
            try:
                return await self._order_to_load(folder, version)
            except _HostLost:
                pass
            except EngineError as error:  # it has none that are whole: it starts anew, where these are
                logger.error("engine %s is ended, as it could not load version %d: %s", self.name, version, error)
                await self.host.end()
        return 0.0

    async def sleep(self) -> None:
        """Give memory back until `wake_up`. No effect on one that is down."""
        await self._order_if_up(EngineHost.sleep)

    async def wake_up(self) -> None:
        """Undo `sleep`."""
        await self._order_if_up(EngineHost.wake_up)

    def figures(self) -> EngineFigures:
        """The figures that the host told last, a second ago at most."""
        figures = self._sum()
        return replace(figures, name=self.name, is_up=self.is_up, version=self.version, restarts=max(0, self._life - 1))

    def _sum(self) -> EngineFigures:
        now, before = self._figures, self._before
        totals = ("sampled_tokens", "prompt_tokens", "cached_tokens", "preemptions")
        return replace(now, **{each: getattr(now, each) + getattr(before, each) for each in totals})

    async def _order_if_up(self, method: Callable[..., Any]) -> None:
        if self.is_up:
            with suppress(_HostLost):
                await self._order(method)

    async def _order(self, method: Callable[..., Any], **arguments: Any) -> Any:
        """Have the host do this. Raises what that raised, as an EngineError, or _HostLost."""
        assert self._client is not None
        try:
            return await self._client.call(method, **arguments)
        except EngineError:
            raise
        except UnderstudyError as error:
            what = method.__name__.removesuffix("_engine")
            raise EngineError(f"engine {self.name} could not {what}: {error}") from error


def _nothing(name: str) -> EngineFigures:
    return EngineFigures(
        name=name, is_up=False, version=0, running=0, waiting=0, tokens_held=0, kv_capacity=0, sampled_tokens=0,
        prompt_tokens=0, cached_tokens=0, preemptions=0, restarts=0,
    )  # fmt: skip


class _HostLost(EngineDied):
    """The host was lost before it had done what it was asked."""
