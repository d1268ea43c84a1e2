"""HTTP to an inference server: JSON requests, and answers that stream as server-sent events.

Called by `mocked_server.servers.vllm_server`, `sglang_server` and `server_engine`. Invariant: every failure of the connection is a
`ServerLost`, and every refusal of the server's a `ServerRefused`; nothing of httpx2's leaves this module.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from buffers.errors import EngineDied, EngineError
from buffers.outgoing import ENGINE, Outgoing

MAX_TEXT_CHARS = 400
"""Most characters of a server's answer in a message."""


class ServerLost(EngineDied):
    """Nobody answers, or the connection broke."""


class ServerRefused(EngineError):
    """The server answered with an error. `status`: of the HTTP answer, or the code in its stream; `text`: its words; `field`: what
    it names as wrong."""

    def __init__(self, status: int, text: str, *, field: str | None = None) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status
        self.text = text
        self.field = field


class ServerClient:
    """`url`: such as http://127.0.0.1:8000. Lives in one event loop; `close` breaks what still streams."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._http = Outgoing(
            ENGINE,
            base_url=self.url,
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,  # no proxy of this process's environment stands before an engine
        )
        self._closing: set[asyncio.Task[None]] = set()

    async def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        """The answer's JSON; None where it has none. Raises ServerLost, ServerRefused."""
        return await self._ask("GET", path, None, timeout_s=timeout_s)

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None) -> Any:
        """The answer's JSON, or None, to this body. Raises as `get`."""
        return await self._ask("POST", path, body, timeout_s=timeout_s)

    async def _ask(self, method: str, path: str, body: Any, *, timeout_s: float | None) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._http.request(method, path, json=body)
        except (httpx2.HTTPError, OSError) as error:
            raise ServerLost(_words(error)) from error
        if answer.is_error:
            raise _refused(answer.status_code, answer.text)
        try:
            return answer.json()
        except (ValueError, RecursionError):
            return None

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The JSON of each event until `[DONE]`; closing it hangs up, which ends the request. Raises ServerLost, ServerRefused."""
        try:
            answer = await self._http.send(self._http.build_request("POST", path, json=body), stream=True)
            try:
                if answer.is_error:
                    raise _refused(answer.status_code, (await answer.aread()).decode(errors="replace"))
                async for line in answer.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    yield _event(data)
            finally:
                await self._hang_up(answer)
        except (httpx2.HTTPError, httpx2.StreamError, OSError) as error:
            raise ServerLost(_words(error)) from error
        raise ServerLost("the connection ended before the answer did")

    async def _hang_up(self, answer: httpx2.Response) -> None:
        """Also when the caller is cancelled meanwhile: over a connection that stays open the server would sample to the end."""
        closing = asyncio.create_task(answer.aclose(), name=f"hang up on {self.url}")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        await asyncio.shield(closing)

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*self._closing, return_exceptions=True)
        await self._http.aclose()


def _event(data: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ServerLost(f"the stream has an event that is no JSON: {data[:MAX_TEXT_CHARS]}") from error
    if not isinstance(event, dict):
        raise ServerLost(f"the stream has an event that is no object: {data[:MAX_TEXT_CHARS]}")
    if (failure := event.get("error")) is not None:
        details = failure if isinstance(failure, dict) else {"message": str(failure)}
        code = details.get("code")
        raise ServerRefused(
            code if isinstance(code, int) else 500, _line(str(details.get("message"))), field=details.get("param")
        )
    return event


def _refused(status: int, text: str) -> ServerRefused:
    """A server's error: OpenAI's form, FastAPI's, SGLang's, or plain text."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return ServerRefused(status, _line(text))
    error = body.get("error", body.get("detail", body.get("message", text))) if isinstance(body, dict) else text
    field = error.get("param") if isinstance(error, dict) else None
    words = error.get("message", error) if isinstance(error, dict) else error
    return ServerRefused(status, _line(str(words)), field=field)


def _line(text: str) -> str:
    return " ".join(text.split())[:MAX_TEXT_CHARS]


def _words(error: Exception) -> str:
    return _line(str(error)) or type(error).__name__


# What a server says of itself, and why it can or cannot be the engine of a run. Invariant: a refusal is one line with the key,
# the rule, the value and the remedy.

KEY = "rollout.engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Needs of a run of its server."""

    max_model_len: int
    vocabulary: int
    """Size of the model's output."""
    temperature: float
    dtype: str
    """`model.dtype`."""
    learns: bool
    """True if it gets new weights after each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """One server."""

    software: str
    """`vLLM 0.32.0`."""
    max_model_len: int | None
    """Longest prompt + generation; None: it does not say."""
    kv_capacity: int
    """Tokens that its cache holds; 0: it does not say."""
    dtypes: Sequence[str] = ()
    """The number format that it computes in, or those of which it is one; none: it does not say."""
    logprobs_before_temperature: bool = False
    """Its log-probabilities are those of the distribution before the temperature."""
    no_weights: str = ""
    """Why it cannot be given weights, and the remedy; empty: it can."""


def check_facts(facts: ServerFacts, *, url: str, needs: Needs) -> None:
    """Raises EngineError where the server cannot do what the run needs."""
    if needs.learns and facts.no_weights:
        raise EngineError(
            f"{KEY} must be a server that takes new weights, got {url} ({facts.software}), which does not: {facts.no_weights}. "
            f"`understudy eval` can use it as it is"
        )
    if facts.max_model_len is not None and facts.max_model_len < needs.max_model_len:
        raise EngineError(
            f"{KEY} must serve prompts and answers of rollout.max_model_len={needs.max_model_len} tokens, got {url}, which serves "
            f"{facts.max_model_len}; set rollout.max_model_len={facts.max_model_len}, or start it with more"
        )
    if needs.learns and facts.logprobs_before_temperature and needs.temperature != 1.0:
        raise EngineError(
            f"{KEY} must give log-probabilities of the distribution that it samples from, got {url}, which gives those before "
            f"rollout.temperature={needs.temperature:g}; start it with --logprobs-mode processed_logprobs"
        )
    if needs.learns and facts.dtypes and needs.dtype not in facts.dtypes:
        served = " or ".join(facts.dtypes)
        raise EngineError(
            f"{KEY} must compute in model.dtype={needs.dtype}, as the learner does, got {url}, which computes in {served}; "
            f"start it with --dtype {needs.dtype}, or set model.dtype to what it has"
        )
