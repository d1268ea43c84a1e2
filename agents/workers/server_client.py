"""A model server over HTTP, for agent loops: `POST /generate` of the MockedServer, token ids in and out.

Used by `agents.workers.worker`. A connection that breaks, and answers 502 to 504, are ServerUnavailable; other refusals
are AgentError with the server's words. It keeps nothing.
"""

from __future__ import annotations

from typing import Any, Self

import httpx2

from agents.server_manager import ServerUnavailable, TokenOutput
from buffers.errors import AgentError
from buffers.outgoing import RUN, Outgoing


class ModelServerClient:
    """`base_url`: root of the server, without /v1. `worker_key`: for requests that belong to no episode, and for sleep."""

    def __init__(self, base_url: str, *, worker_key: str = "", max_connections: int = 1024) -> None:
        self.base_url = base_url
        self._worker_key = worker_key
        limits = httpx2.Limits(max_connections=max_connections, max_keepalive_connections=max_connections)
        # No limit on the answer's time: the episode's deadline ends a generation that takes too long.
        self._client = Outgoing(RUN, base_url=base_url, limits=limits, trust_env=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], api_key: str
    ) -> TokenOutput:
        """See `AsyncLLMServerManager.generate`."""
        body = {"prompt_ids": prompt_ids, "sampling_params": sampling_params}
        answer = await self._post("/generate", body, key=api_key or self._worker_key)
        return TokenOutput(
            answer["token_ids"],
            log_probs=answer["log_probs"],
            stop_reason=answer["stop_reason"],
            versions=answer["versions"],
            num_preempted=answer["num_preempted"],
        )

    async def healthy(self) -> bool:
        """Does it answer?"""
        try:
            return (await self._client.get("/health")).status_code == 200
        except httpx2.TransportError:
            return False

    async def wake_up(self) -> None:
        """vLLM's wake_up."""
        await self._post("/wake_up", {}, key=self._worker_key)

    async def sleep(self) -> None:
        """vLLM's sleep, level 1: weights wait in main memory, the cache is dropped."""
        await self._post("/sleep", {}, key=self._worker_key)

    async def _post(self, path: str, body: dict[str, Any], *, key: str) -> Any:
        try:
            reply = await self._client.post(path, json=body, headers={"x-api-key": key})
        except httpx2.TransportError as error:
            raise ServerUnavailable(f"{self.base_url}{path} cannot be reached: {error!r}") from error
        if reply.status_code in (502, 503, 504):
            raise ServerUnavailable(f"{self.base_url}{path} answered {reply.status_code}: {_message(reply)}")
        if reply.status_code >= 400:
            raise AgentError(f"the model server refused {path}: {_message(reply)}")
        return reply.json() if reply.content else None


def _message(reply: httpx2.Response) -> str:
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return reply.text[:500]
