"""A server process's way to its run: prompts go out, answers come back, episodes are asked for.

Held by `server_process`, on its event loop; calls `prompt_host`. `RunLink` is what `QueueClient` takes for its prompt queue.
Invariants: outputs reach their request in order; when the run is gone every request that waits fails, and `until_lost` returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from buffers.errors import EngineError, UnderstudyError
from buffers.prompt_queue import Prompt
from buffers.records import Episode, Round
from buffers.wire.client import AsyncClient
from buffers.wire.connection import Connection
from mocked_server.processes.prompt_host import SILENT_S, Adoption, Figures, Generated, PromptHost
from mocked_server.vllm.hosted.outputs import VLLMCodec


class RunLink:
    """See the module. `on_closed(episode_id, reason)`: the run says that an episode ended. `figures`: sent every second, once
    there are some."""

    def __init__(
        self,
        connection: Connection,
        codec: VLLMCodec,
        *,
        process: int,
        on_closed: Callable[[str, str], object],
        figures: Callable[[], Figures | None],
    ) -> None:
        self.is_full = False
        self._codec = codec
        self._on_closed = on_closed
        self._gone = asyncio.Event()
        self._client = AsyncClient(
            connection, PromptHost, name="the run", silent_s=SILENT_S, on_state=self._see,
            lost_as=EngineError, on_lost=self._gone.set, figures=figures,
        )  # fmt: skip
        self._client.tell(PromptHost.join, process=process)

    def _see(self, is_full: bool) -> None:
        self.is_full = is_full

    def put(self, prompt: Prompt) -> None:
        """Send a prompt to be generated; its reply gets what comes of it. Raises EngineError when the run is gone."""
        assert prompt.episode_id is not None, "a server process has prompts of its episodes only"

        def take(part: Generated, error: UnderstudyError | None, is_last: bool) -> None:
            if error is not None:
                prompt.reply.fail(error)
                return
            output = part.output and self._codec.output_of(part.output, request_id=prompt.request_id)
            if is_last:
                prompt.reply.finish(*part.responses, last=output)
            else:
                prompt.reply.push(output)

        number = self._client.begin(
            PromptHost.generate, take, request_id=prompt.request_id, episode_id=prompt.episode_id,
            group_id=prompt.group_id, prompt_token_ids=prompt.prompt_token_ids,
            params=self._codec.pack_params(prompt.sampling.params), extra=dict(prompt.sampling.extra),
            parent=prompt.parent, memo=prompt.memo, first_trained=prompt.first_trained,
        )  # fmt: skip
        prompt.reply.on_abandon(lambda: self._client.abort(number))

    async def adopt(self, episode_id: str) -> tuple[Episode, list[Round]]:
        """Ask for an episode: it, and the rounds that are stored of it. Raises EpisodeError; EngineError when the run is gone."""
        adopted: asyncio.Future[tuple[Episode, list[Round]]] = asyncio.get_running_loop().create_future()

        def take(part: Adoption, error: UnderstudyError | None, _: bool) -> None:
            if isinstance(part, str):
                self._on_closed(episode_id, part)
            elif adopted.done():
                return
            elif error is not None:
                adopted.set_exception(error)
            else:
                adopted.set_result((part[0].episode(), part[1]))

        self._client.begin(PromptHost.adopt, take, episode_id=episode_id)
        return await adopted

    async def until_lost(self) -> str:
        """Why the run is gone, once it is."""
        await self._gone.wait()
        return self._client.lost or ""

    async def close(self) -> None:
        """End the connection."""
        await self._client.close()
