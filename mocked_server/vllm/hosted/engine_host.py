"""`EngineHost`: an engine as a service on the wire, for another process.

Runs in the process that has the engine (`program`), on that engine's event loop; `remote_engine` calls it.
Invariants: the outputs of a request go in their order; a client that is gone, or was silent for `SILENT_S`, has its requests
aborted; the host never restarts its engine by itself.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec

from buffers.errors import RequestFailed, UnderstudyError
from buffers.wire.address import Way
from buffers.wire.rpc import remote
from buffers.wire.service import Call, Service
from mocked_server.fleet.member import EngineFigures, FleetEngine
from mocked_server.vllm.hosted.outputs import VLLMCodec, WireOutput, WireSampled

logger = logging.getLogger(__name__)

SILENT_S = 10.0
"""A side that was silent for so long has gone: its beats come every second."""


class EngineHost(Service):
    """Listens from `listen` until `aclose`, which ends the engine too."""

    def __init__(
        self, engine: FleetEngine, codec: VLLMCodec, *, secret: bytes, way: Way, host: str = "127.0.0.1"
    ) -> None:
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
