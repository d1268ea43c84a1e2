"""`EngineHost`: an engine as a service on the wire, for another process.

Runs in the process that has the engine (`mocked_server.vllm.hosted`), on that engine's event loop; `remote_engine` calls it.
Invariants: the outputs of a request go in their order; a client that is gone, or was silent for `SILENT_S`, has its requests
aborted; the host never restarts its engine by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Protocol

import msgspec

from buffers.errors import RequestFailed, UnderstudyError
from buffers.wire.address import Way
from buffers.wire.rpc import remote
from buffers.wire.service import Call, Service
from mocked_server.fleet.member import EngineFigures, FleetEngine, Sampled

logger = logging.getLogger(__name__)

SILENT_S = 10.0
"""A side that was silent for so long has gone: its beats come every second."""


class EngineHost(Service):
    """Listens from `listen` until `aclose`, which ends the engine too."""

    def __init__(self, engine: FleetEngine, codec: Codec, *, secret: bytes, way: Way, host: str = "127.0.0.1") -> None:
        super().__init__(name=f"engine {engine.name}", secret=secret, way=way, host=host, silent_s=SILENT_S)
        self._engine = engine
        self._codec = codec
        self._dying: asyncio.Task[None] | None = None

    async def aclose(self) -> None:
        await super().aclose()
        await self._engine.close()

    def state(self) -> EngineFigures:
        """Figures of the engine; they also come at once when it dies."""
        return self._engine.figures()

    @remote
    def generate(
        self,
        call: Call[WireOutput],
        prompt_token_ids: list[int],
        params: msgspec.Raw,
        request_id: str,
        sampled: list[WireSampled],
        extra: dict[str, Any],
    ) -> None:
        """See `FleetEngine.generate`. `params`: vLLM's SamplingParams; outputs come in deltas, whatever they say."""

        async def stream() -> None:
            """The border around one request: what it raises goes to its client, and ends nothing else."""
            try:
                outputs = self._engine.generate(
                    prompt_token_ids, self._codec.params_of(params, as_deltas=True), request_id=request_id,
                    sampled=[self._codec.sampled_of(each) for each in sampled], **extra,
                )  # fmt: skip
                async with aclosing(outputs):
                    async for output in outputs:
                        packed = self._codec.pack_output(output)
                        call.push(packed, is_last=packed.finished)
                call.fail(RequestFailed(f"the engine ended request {request_id} without its last output"))
            except UnderstudyError as error:
                call.fail(error)
            except (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, OSError) as error:
                logger.exception("request %s failed", request_id)
                call.fail(
                    RequestFailed(f"the engine's host failed on it ({type(error).__name__}: {error}); see its log")
                )

        task = self.start_task(stream(), name=f"host {request_id}")
        call.on_abort = task.cancel

    @remote
    async def start_engine(self) -> None:
        """See `FleetEngine.start`."""
        await self._engine.start()
        self._watch()

    @remote
    async def restart_engine(self) -> None:
        """See `FleetEngine.restart`."""
        await self._engine.restart()
        self._watch()

    @remote
    async def load_weights(self, folder: str, version: int) -> float:
        """See `FleetEngine.load_weights`."""
        return await self._engine.load_weights(Path(folder), version=version)

    @remote
    async def sleep(self) -> None:
        """See `FleetEngine.sleep`."""
        await self._engine.sleep()

    @remote
    async def wake_up(self) -> None:
        """See `FleetEngine.wake_up`."""
        await self._engine.wake_up()

    @remote
    async def close_engine(self) -> None:
        """See `FleetEngine.close`."""
        await self._engine.close()

    def _watch(self) -> None:
        if self._dying is not None:
            self._dying.cancel()
        self._dying = self.start_task(self._tell_death(), name="tell the engine's death")

    async def _tell_death(self) -> None:
        await self._engine.until_dead()
        self._beat()


# An engine's outputs and interrupted completions as they travel over the wire, and what makes them.


class WireLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities of S positions, the tables of all of them one after the other."""

    is_flat: bool
    """vLLM's FlatLogprobs; else a table for each position."""
    counts: list[int]
    """[S] entries of each position; -1: it has none."""
    token_ids: list[int]
    logprobs: bytes
    """float64 of each entry."""
    ranks: list[int | None]
    texts: list[str | None] | None
    """None: no entry has one."""


class WireExperts(msgspec.Struct, array_like=True, frozen=True):
    """Experts of a completion's tokens, in vLLM's order."""

    shape: tuple[int, int, int]
    width: int
    """Bytes of each."""
    data: bytes


class WireCompletion(msgspec.Struct, array_like=True, frozen=True):
    """What one completion sampled since its last output."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: WireLogprobs | None
    cumulative: float | None
    finish_reason: str | None
    stop_reason: int | str | None
    versions: list[tuple[str, int, int]]
    """(weight version, first token, token after its last), of the whole completion."""
    experts: WireExperts | None = None
    """Those of the whole completion, when it ends."""


class WireOutput(msgspec.Struct, array_like=True, frozen=True):
    """What a request's completions sampled since its last output."""

    completions: list[WireCompletion]
    finished: bool
    prompt_logprobs: WireLogprobs | None
    num_cached_tokens: int | None
    num_preemptions: int | None


class WireSampled(msgspec.Struct, array_like=True, frozen=True):
    """A completion that another engine began: see `member.Sampled`."""

    index: int
    token_ids: list[int]
    logprobs: WireLogprobs | None
    versions: list[tuple[str, int]]
    num_sent_chars: int
    cumulative: float | None


class Outputs(Protocol):
    """One request's outputs, from their deltas."""

    def add(self, delta: WireOutput) -> Any | None:
        """The engine's output for what came; None where the request gets none for it."""
        ...

    def sampled(self) -> list[Sampled]: ...


class Codec(Protocol):
    """What is asked of the engine's own records (`mocked_server.vllm.hosted.outputs`)."""

    def pack_params(self, params: Any) -> msgspec.Raw:
        """SamplingParams on their way. Raises TypeError or ValueError for what cannot travel."""
        ...

    def params_of(self, data: msgspec.Raw, *, as_deltas: bool) -> Any:
        """SamplingParams; `as_deltas`: that ask for deltas, whatever was sent. Raises ValueError or TypeError for what is none."""
        ...

    def shows_logprobs(self, params: Any) -> bool:
        """Whether the request asked to see log-probabilities."""
        ...

    def pack_output(self, output: Any, *, logprobs: bool = True, experts: bool = True) -> WireOutput: ...
    def output_of(self, wire: WireOutput, *, request_id: str) -> Any: ...
    def pack_sampled(self, sampled: Sampled) -> WireSampled: ...
    def sampled_of(self, sampled: WireSampled) -> Sampled: ...
    def rebuilt(
        self, prompt_token_ids: list[int], params: Any, *, request_id: str, sampled: Sequence[Sampled]
    ) -> Outputs: ...
