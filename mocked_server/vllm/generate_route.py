"""`POST /generate`: token ids in, token ids out, for agent loops (verl's `AsyncLLMServer.generate`).

    {"prompt_ids": [int, ...], "sampling_params": {"max_tokens": 64, "stop": ["</code>"]}}
    -> {"token_ids": [...], "log_probs": [...], "versions": [...], "stop_reason": "completed" | "length", "num_preempted": 0}

With an episode's key the generation is a round of that episode, like any other; with the worker's key nothing is
recorded. Temperature and the rest of the distribution are the run's: what loops pass for them is accepted and has no
effect. `POST /sleep` and `POST /wake_up` (worker's key) are the engine's, where the server has one.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Protocol
from uuid import uuid4

import msgspec

from buffers.did_you_mean import one_of
from buffers.errors import RequestRefused
from mocked_server.http.dialects import GENERATE
from mocked_server.http.failures import request_refused
from mocked_server.request_context import LARGE_BYTES, AnswerPart
from mocked_server.vllm.engine import refusal_of


class Honoured(msgspec.Struct):
    """The sampling parameters that have an effect, with their types; ranges are vLLM's."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    seed: int | None = None


HONOURED = Honoured.__struct_fields__
PINNED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logprobs", "n", "detokenize")
"""verl's loops pass these; the run decides."""
STOP_REASONS = {"stop": "completed", "length": "length", "abort": "aborted"}


class Sleeper(Protocol):
    """An engine that can give its memory back for a while."""

    async def sleep(self) -> None: ...
    async def wake_up(self) -> None: ...


class Client(Protocol):
    """The way into the prompt queue (`mocked_server.vllm.serving`)."""

    sleeper: Sleeper | None

    async def generate_tokens(self, prompt_ids: list[int], params: Any, *, request_id: str) -> AnswerPart: ...


class TokenRoute:
    """`client`: the way into the prompt queue."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def answer(self, request: Any) -> Any:
        """The route (starlette)."""
        from starlette.responses import JSONResponse

        try:
            body = await request.body()
            is_large = len(body) > LARGE_BYTES
            prompt_ids, params = await asyncio.to_thread(self._read, body) if is_large else self._read(body)
            answer = await self._client.generate_tokens(prompt_ids, params, request_id=f"generate-{uuid4().hex}")
            return JSONResponse(_body_of(answer))
        except (ValueError, TypeError) as error:
            refusal = error if isinstance(error, RequestRefused) else RequestRefused(str(error))
            return request_refused(refusal).response(GENERATE)

    async def sleep(self, _: Any) -> Any:
        """The route: the engine's cache is given back, and its weights wait in main memory where it can do that."""
        from starlette.responses import Response

        if self._client.sleeper is not None:
            await self._client.sleeper.sleep()
        return Response(status_code=200)

    async def wake_up(self, _: Any) -> Any:
        """The route: the engine is as before `sleep`."""
        from starlette.responses import Response

        if self._client.sleeper is not None:
            await self._client.sleeper.wake_up()
        return Response(status_code=200)

    def _read(self, body: bytes) -> tuple[list[int], Any]:
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        try:
            fields = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the body must be JSON, got {body[:60]!r} ({error}); send prompt_ids") from error
        if not isinstance(fields, dict) or set(fields) - {"prompt_ids", "sampling_params"}:
            raise ValueError(
                f"the body must hold prompt_ids and sampling_params, got {str(fields)[:80]}; send these two"
            )
        ids = fields.get("prompt_ids")
        if not isinstance(ids, list) or not ids or not all(type(one) is int and abs(one) < 2**31 for one in ids):
            raise ValueError(f"prompt_ids must be a list of token ids, not empty, got {str(ids)[:80]}; send integers")
        given = fields.get("sampling_params") or {}
        if not isinstance(given, dict):
            raise ValueError(f"sampling_params must be an object, got {str(given)[:80]}; send {{}}")
        for name in given:
            if name not in HONOURED and name not in PINNED:
                raise ValueError(f"sampling_params must hold {one_of(name[:60], HONOURED)}")
        honoured = {name: value for name, value in given.items() if name in HONOURED and value is not None}
        try:
            msgspec.convert(honoured, Honoured)
            return ids, SamplingParams(**honoured, output_kind=RequestOutputKind.FINAL_ONLY)
        except (msgspec.ValidationError, VLLMClientError, ValueError, TypeError, OverflowError) as error:
            raise refusal_of(error) from error


def _body_of(answer: AnswerPart) -> dict[str, Any]:
    assert answer.responses is not None
    (found,), metrics = answer.responses, answer.output.metrics
    return {
        "token_ids": found.sampled_ids.tolist(),
        "log_probs": found.logprobs.tolist(),
        "versions": found.versions.tolist(),
        "stop_reason": STOP_REASONS.get(found.finish_reason, found.finish_reason),
        "num_preempted": 0 if metrics is None else getattr(metrics, "num_preemptions", 0),
    }
