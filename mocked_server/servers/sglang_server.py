"""SGLang's HTTP server as an engine: its native routes, requests and replies.

Called by `mocked_server.servers.server_engine`. Tokens come from `/generate` with `input_ids` and `return_logprob`; weights from
`/update_weights_from_disk`, between `/pause_generation` in the mode `retract` (what runs goes back into the queue, and is computed
again under the new weights) and `/continue_generation`. The names are those of sglang 0.5.23; tests/mocked_server/servers holds
them to its published classes. Log-probabilities are those after the temperature, unless the server has
SGLANG_RETURN_ORIGINAL_LOGPROB in its environment, which it does not tell.

Invariant: a message of the server's is read once, whether its streams repeat what came before (the default) or not.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from buffers.errors import EngineError, RequestRefused
from mocked_server.servers.facts import KEY, ServerFacts
from mocked_server.servers.http_client import ServerClient, ServerRefused
from mocked_server.vllm.served_requests import Completion, Tokens

NOT_HERE = ("structured_outputs", "bad_words", "allowed_token_ids", "logprob_token_ids", "thinking_token_budget")
"""Fields of vLLM's SamplingParams that SGLang has in another form, or not at all."""
DTYPES = {"auto": ["float16", "bfloat16"], "half": ["float16"], "float": ["float32"]}
"""Its names for number formats that are not torch's; `auto` is the model's own, unless that is float32."""


class SGLangServer:
    """One server. See `mocked_server.servers.server_engine.Server`."""

    alive = "/model_info"
    answers = "/health"  # it samples one token for it

    def __init__(self, client: ServerClient) -> None:
        self._client = client

    @classmethod
    async def recognise(cls, client: ServerClient) -> str | None:
        """The path of its model; None: another server answers."""
        try:
            told = await client.get("/model_info", timeout_s=30.0)
        except ServerRefused:
            return None
        return str(told["model_path"]) if isinstance(told, dict) and "model_path" in told else None

    async def identify(self) -> ServerFacts:
        """What it says of itself."""
        told = await self._client.get("/server_info")
        dtype = told.get("dtype")
        return ServerFacts(
            software=f"SGLang {told.get('version', '')}".strip(),
            max_model_len=told.get("context_length"),
            kv_capacity=int(told.get("max_total_num_tokens") or 0),
            dtypes=DTYPES.get(dtype, [dtype]) if dtype else (),
        )

    def check(self, params: Any) -> None:
        """Raises RequestRefused for what SGLang cannot do, or does otherwise than vLLM."""
        for name in NOT_HERE:
            if getattr(params, name):
                raise RequestRefused(f"{name} cannot be had from SGLang, which {KEY} names; leave it out", field=name)
        if params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None:
            raise RequestRefused(
                f"prompt_logprobs cannot be had from the server that {KEY} names; leave them out",
                field="prompt_logprobs",
            )
        if params.ignore_eos and params.stop_token_ids:
            raise RequestRefused(
                "stop_token_ids have no effect beside ignore_eos with SGLang; leave one of them out",
                field="stop_token_ids",
            )
        if params.logprobs == -1:
            raise RequestRefused(
                "logprobs must be at most 20 with SGLang, got -1, the whole vocabulary; ask for fewer", field="logprobs"
            )

    async def sample(self, completion: Completion) -> AsyncGenerator[Tokens, None]:
        """Sample one completion. Raises ServerLost, ServerRefused."""
        params = completion.params
        body = {
            "rid": completion.id,
            "input_ids": completion.prompt_token_ids,
            "sampling_params": wire_params(params),
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": params.logprobs or 0,
            "stream": True,
        }
        num_read = 0
        async with aclosing(self._client.events("/generate", body)) as events:
            async for event in events:
                tokens = tokens_of(event, params, num_read=num_read)
                num_read += len(tokens.token_ids)
                if tokens.token_ids or tokens.finish_reason is not None:
                    yield tokens

    async def pause(self) -> None:
        """Put what it samples back into its queue."""
        await self._client.post("/pause_generation", {"mode": "retract"})

    async def load(self, folder: Path, *, version: int) -> None:
        """Load the weights of a folder, drop its cached keys and values, and label tokens with `version` from now on."""
        told = await self._client.post(
            "/update_weights_from_disk",
            {
                "model_path": str(folder),
                "weight_version": str(version),
                "flush_cache": True,
                "abort_all_requests": False,
            },
        )
        if not told.get("success"):
            raise ServerRefused(400, str(told.get("message")))

    async def resume(self) -> None:
        """Undo `pause`."""
        await self._client.post("/continue_generation", {})


def wire_params(params: Any) -> dict[str, Any]:
    """vLLM's SamplingParams in SGLang's names. Everything is said: a server may prefer values of its own for what is left out."""
    wire = {
        "max_new_tokens": params.max_tokens,
        "min_new_tokens": params.min_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k if params.top_k > 0 else -1,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "ignore_eos": params.ignore_eos,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "n": 1,
    }
    if params.stop:
        wire["stop"] = params.stop
    if params.stop_token_ids:
        wire["stop_token_ids"] = params.stop_token_ids
    if params.seed is not None:
        wire["sampling_seed"] = params.seed
    if params.logit_bias:
        wire["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    return wire


def tokens_of(event: Mapping[str, Any], params: Any, *, num_read: int) -> Tokens:
    """What an event has beyond the first `num_read` tokens. Raises EngineError for tokens without log-probabilities, ServerRefused
    for a request that SGLang gave up."""
    meta = event["meta_info"]
    ids, done = event["output_ids"], meta["completion_tokens"]
    entries = meta.get("output_token_logprobs") or []
    tops = meta.get("output_top_logprobs") or []
    repeats = len(ids) == done  # else it has the new ones only
    start = num_read if repeats else 0
    new, entries, tops = ids[start:], entries[start:], tops[start:]
    if num_read + len(new) != done or [entry[1] for entry in entries[: len(new)]] != new:
        raise EngineError(
            f"{KEY} must give a log-probability for each token, got {len(new)} tokens after {num_read} of {done}, with "
            f"{len(entries)} log-probabilities"
        )
    rows = [[(int(entry[1]), float(entry[0]))] for entry in entries[: len(new)]]
    num_top = params.logprobs or 0
    for row, top in zip(rows, tops):
        row += [(int(entry[1]), float(entry[0])) for entry in (top or [])[:num_top]]
    rows = [row + row[-1:] * (1 + num_top - len(row)) for row in rows]
    finish = meta.get("finish_reason")
    if finish and finish["type"] == "abort" and finish.get("status_code"):
        raise ServerRefused(int(finish["status_code"]), str(finish.get("message")))
    spans = meta.get("weight_versions")
    return Tokens(
        token_ids=new,
        logprobs=rows,
        ranks=[1 + sum(value > row[0][1] for _, value in row[1:]) if num_top else 0 for row in rows],
        finish_reason=None if finish is None else finish["type"],
        stop_reason=None if finish is None else _stop_reason(finish, params),
        versions=None if spans is None else [(span["version"], span["start"]) for span in spans],
        num_cached_tokens=meta.get("cached_tokens"),
    )


def _stop_reason(finish: Mapping[str, Any], params: Any) -> int | str | None:
    """The stop string or token that was asked for; the end of the text is no reason, as with vLLM."""
    matched = finish.get("matched")
    if isinstance(matched, int) and matched not in (params.stop_token_ids or ()):
        return None
    return matched if isinstance(matched, int | str) else None
