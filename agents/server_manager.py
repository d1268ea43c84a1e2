"""`AsyncLLMServerManager`: the model for agent loops, over HTTP: `POST /generate` of the MockedServer, token ids in and out.

Made by `agents.workers.worker` and handed to agent loops, which call `generate` (verl's names). There is one server; which engine
answers is its fleet's matter. A connection that breaks and answers 502 to 504 are asked again for `PATIENCE_S`, so that a loop does
not see a server that is started again; other refusals are AgentError with the server's words. It keeps nothing.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Sequence
from typing import Any, Self

import httpx2

from buffers.errors import AgentError, UnderstudyError
from buffers.outgoing import RUN, Outgoing

logger = logging.getLogger(__name__)

PAUSE_S = 2.0
"""Seconds before a request is sent again."""
PATIENCE_S = 60.0
"""Seconds in which a request is sent again before it fails."""
MAX_CONNECTIONS = 1024


class ServerUnavailable(UnderstudyError):
    """The server cannot be reached, or its engines cannot."""


class TokenOutput(list[int]):
    """[S] the sampled ids (verl's older loops use the list, newer ones `token_ids`), and what is known of them."""

    def __init__(
        self,
        token_ids: Sequence[int],
        *,
        log_probs: Sequence[float] = (),
        stop_reason: str = "completed",
        versions: Sequence[int] = (),
        num_preempted: int = 0,
        is_trained: bool = True,
    ) -> None:
        super().__init__(token_ids)
        self.log_probs = list(log_probs)
        """[S] natural logarithms under the policy that sampled, at the run's temperature."""
        self.stop_reason = stop_reason
        """`completed`, `length` or `aborted`."""
        self.versions = list(versions)
        """[S] policy version that sampled each id."""
        self.num_preempted = num_preempted
        self.is_trained = is_trained
        """True if the policy answered; False: another role of the run."""

    @property
    def token_ids(self) -> list[int]:
        """[S] the ids."""
        return list(self)


class AsyncLLMServerManager:
    """`base_url`: root of the server, without /v1. `worker_key`: for requests that belong to no episode, and for sleep."""

    def __init__(self, base_url: str, *, worker_key: str = "", patience_s: float = PATIENCE_S) -> None:
        self.base_url = base_url
        self._worker_key = self._api_key = worker_key
        self._patience_s = patience_s
        limits = httpx2.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS)
        # No limit on the answer's time: the episode's deadline ends a generation that takes too long.
        self._client = Outgoing(RUN, base_url=base_url, limits=limits, trust_env=False)

    def keyed(self, api_key: str) -> Self:
        """The same connections, for the episode that `api_key` opens: its rounds are recorded there."""
        view = copy.copy(self)
        view._api_key = api_key or self._worker_key
        return view

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], model: str = "", **_: Any
    ) -> TokenOutput:
        """Sample after `prompt_ids` [P]. `request_id` is verl's: the server knows its episodes by their keys. `model`: a role of
        the run; empty: the first of them. Raises ServerUnavailable when the server did not answer within the patience, AgentError
        when it refuses the request."""
        body = {"prompt_ids": prompt_ids, "sampling_params": sampling_params, **({"model": model} if model else {})}
        until = time.monotonic() + self._patience_s
        while True:
            try:
                return TokenOutput(**await self._post("/generate", body, key=self._api_key))
            except ServerUnavailable as error:
                if time.monotonic() + PAUSE_S > until:
                    raise ServerUnavailable(
                        f"the model server did not answer within {self._patience_s:.0f} s: {error}; see the run's log"
                    ) from error
                logger.warning("a request is sent again: %s", error)
            await asyncio.sleep(PAUSE_S)

    async def wake_up(self) -> None:
        """Weights and caches back into the engines' memory: vLLM's wake_up."""
        await self._post("/wake_up", {}, key=self._worker_key)

    async def sleep(self) -> None:
        """vLLM's sleep, level 1: weights wait in main memory, the cache is dropped."""
        await self._post("/sleep", {}, key=self._worker_key)

    async def close(self) -> None:
        """End the connections."""
        await self._client.aclose()

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
