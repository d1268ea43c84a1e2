"""vLLM's HTTP server (`vllm serve --enable-scale-out`) as an engine: its routes, requests and replies.

Called by `mocked_server.servers.server_engine`. Tokens come from `/inference/v1/generate`, which takes vLLM's own SamplingParams
and gives ids, log-probabilities, ranks and, at the end of an answer, the weight version of each token. Weights are given through
the routes of vLLM's development mode (VLLM_SERVER_DEV_MODE=1). Supported: vllm >= 0.32, < 0.34.

Invariant: what is asked is what `AsyncLLM` would ask its engine; log-probabilities arrive unrounded.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from buffers.errors import EngineError, RequestRefused
from mocked_server.servers.http_client import KEY, ServerClient, ServerFacts, ServerRefused
from mocked_server.vllm.engine_arguments import WORKER_EXTENSION
from mocked_server.vllm.engine_requests import Completion, Tokens

GENERATE = "/inference/v1/generate"
NO_LOGPROB = -9999.0
"""vLLM's HTTP layer sends it in the place of minus infinity."""
MAX_LOGPROBS = 20
"""vLLM's default of --max-logprobs."""
OURS = ("output_kind", "flat_logprobs", "extra_args", "skip_clone", "output_text_buffer_length", "n", "detokenize")
"""Fields of SamplingParams that this process has in hand, and the server need not know."""
DEV_MODE = "start it with VLLM_SERVER_DEV_MODE=1 in its environment"
EXTENSION = f"start it with --worker-extension-cls {WORKER_EXTENSION}"


class VLLMServer:
    """One server. `identify` comes first."""

    alive = "/health"
    """Path of the question whether it lives, which costs nothing."""

    def __init__(self, client: ServerClient) -> None:
        self.answers = "/health"
        """Path of a question that its engine answers between two steps."""
        self._client = client
        self._has_extension = False
        self._model: str | None = None

    @classmethod
    async def recognise(cls, client: ServerClient) -> str | None:
        """The version of the vLLM that answers; None: another server does."""
        try:
            info = await client.get("/version", timeout_s=30.0)
        except ServerRefused:
            return None
        return str(info["version"]) if isinstance(info, dict) and "version" in info else None

    async def identify(self) -> ServerFacts:
        """What it says of itself. Raises ServerLost, ServerRefused."""
        software = f"vLLM {await self.recognise(self._client)}"
        (model, *_) = (await self._client.get("/v1/models"))["data"]
        self._model = model["id"]
        try:
            config = (await self._client.get("/server_info?config_format=json"))["vllm_config"]
        except ServerRefused:
            return ServerFacts(
                software=software, max_model_len=model.get("max_model_len"), kv_capacity=0, no_weights=DEV_MODE
            )
        self.answers = "/is_sleeping"  # asks the engine, where /health asks the HTTP process alone
        self._has_extension = config["parallel_config"].get("worker_extension_cls") == WORKER_EXTENSION
        on_cpu = config.get("device_config", {}).get("device") == "cpu"
        return ServerFacts(
            software=software,
            max_model_len=model.get("max_model_len"),
            kv_capacity=config["cache_config"].get("kv_cache_size_tokens") or 0,
            dtypes=[str(config["model_config"]["dtype"]).removeprefix("torch.")],
            logprobs_before_temperature=config["model_config"].get("logprobs_mode") != "processed_logprobs",
            # Without it a CPU's packed copy of a tied output matrix would keep the old weights.
            no_weights=EXTENSION if on_cpu and not self._has_extension else "",
        )

    def check(self, params: Any) -> None:
        """Raises RequestRefused for what these routes cannot do."""
        if params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None:
            raise RequestRefused(
                f"prompt_logprobs cannot be had from the server that {KEY} names; leave them out",
                field="prompt_logprobs",
            )

    async def sample(self, completion: Completion) -> AsyncGenerator[Tokens, None]:
        """Sample one completion. Raises ServerLost, ServerRefused."""
        body = {
            "request_id": completion.id,
            "model": self._model,
            "token_ids": completion.prompt_token_ids,
            "sampling_params": wire_params(completion.params),
            "stream": True,
            "stream_options": {"include_usage": True},
            **completion.extra,
        }
        last: Tokens | None = None
        async with aclosing(self._client.events(GENERATE, body)) as events:
            async for event in events:
                for choice in event["choices"]:
                    tokens = tokens_of(choice, wanted=completion.params.logprobs)
                    if tokens.finish_reason is None:
                        yield tokens
                    else:
                        last = tokens
                if (usage := event.get("usage")) is not None and last is not None:
                    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
                    last = replace(last, num_cached_tokens=cached)
        if last is not None:
            yield last

    async def pause(self) -> None:
        """Freeze what it samples, and drop its cached keys and values."""
        await self._client.post("/pause?mode=keep&clear_cache=true")

    async def load(self, folder: Path, *, version: int) -> None:
        """Load the weights of a folder; tokens are labelled with `version` from now on. Raises ServerRefused."""
        if self._has_extension:
            call: Mapping[str, Any] = {"method": "load_published", "args": [str(folder)]}
        else:
            call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self._client.post("/collective_rpc", call)
        await self._client.post("/update_weight_version", {"new_version": str(version)})

    async def resume(self) -> None:
        """Undo `pause`."""
        await self._client.post("/resume")


def wire_params(params: Any) -> dict[str, Any]:
    """vLLM's SamplingParams as JSON: the public fields that differ from their defaults."""
    public = _public(msgspec.to_builtins(params))
    wire = {name: value for name, value in public.items() if name not in OURS}
    if not params.stop:
        wire["detokenize"] = False  # its text is not read
    if params.logprobs is not None and params.logprobs > 0:
        # The sampled token counts among them where it is not one of the likeliest.
        wire["logprobs"] = min(params.logprobs + 1, max(params.logprobs, MAX_LOGPROBS))
    return wire


def _public(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _public(each) for name, each in value.items() if not str(name).startswith("_") and each is not None
        }
    return value


def tokens_of(choice: Mapping[str, Any], *, wanted: int | None) -> Tokens:
    """A choice of an event. `wanted`: log-probabilities at each position beside the sampled token's. Raises EngineError for one
    that lacks them."""
    ids = choice["token_ids"] or []
    entries = (choice.get("logprobs") or {}).get("content") or []
    if wanted is not None and [entry["token_id"] for entry in entries] != ids:
        raise EngineError(f"{KEY} must give a log-probability for each token, got {len(entries)} for {len(ids)} tokens")
    spans = choice.get("weight_versions")
    return Tokens(
        token_ids=ids,
        logprobs=[_row(entry, wanted or 0) for entry in entries],
        ranks=[entry.get("rank") or 0 for entry in entries],
        finish_reason=choice.get("finish_reason"),
        stop_reason=choice.get("stop_reason"),
        versions=None if spans is None else [(span["version"], span["start"]) for span in spans],
    )


def _row(entry: Mapping[str, Any], wanted: int) -> list[tuple[int, float]]:
    """The sampled token's own, then the likeliest by rank."""
    own = (entry["token_id"], _value(entry["logprob"]))
    if wanted == 0:
        return [own]
    ranked = sorted(entry["top_logprobs"], key=lambda one: one.get("rank") or math.inf)
    best = [(one["token_id"], _value(one["logprob"])) for one in ranked]
    if wanted > 0:
        best = best[:wanted]
        best += best[-1:] * (wanted - len(best))
    return [own, *best]


def _value(logprob: float) -> float:
    return -math.inf if logprob == NO_LOGPROB else logprob
