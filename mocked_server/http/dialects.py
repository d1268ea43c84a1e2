"""The model API's routes, how each dialect spells an error, and which HTTP answer an error of ours is.

A `Failure` is the one way to refuse a request: `attribution` and `model_requests` answer with it, vLLM's application (`serving`)
makes one of what it raises.
"""

from __future__ import annotations

import json
import queue
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.responses import Response
from starlette.types import Send

from buffers.errors import EngineError, EpisodeError, RequestFailed, RequestRefused, UnderstudyError
from buffers.prompt_queue import QueueClosed

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
GEMINI = "/v1beta/models/*:generateContent"
"""Google's dialect; the star stands for the model's name, which is in the path (`route_of`)."""
GEMINI_STREAM = "/v1beta/models/*:streamGenerateContent"
GEMINI_COUNT = "/v1beta/models/*:countTokens"
MODELS = "/v1/models"
MODEL = "/v1/models/*"
GEMINI_MODELS = "/v1beta/models"
GEMINI_MODEL = "/v1beta/models/*"
GENERATE = "/generate"
"""Token ids in and out, for agent loops."""
SLEEP = "/sleep"
WAKE_UP = "/wake_up"

TOKENIZE = "/tokenize"
"""A route of vLLM's application that is not open to agents: a prompt's length, for `GEMINI_COUNT`."""

GEMINI_ROUTES = frozenset({GEMINI, GEMINI_STREAM, GEMINI_COUNT})
GENERATING = frozenset({CHAT, COMPLETIONS, RESPONSES, MESSAGES, GEMINI, GEMINI_STREAM, GENERATE})
MODEL_ROUTES = frozenset({MODELS, MODEL, GEMINI_MODELS, GEMINI_MODEL})
"""They are asked by GET, all others by POST."""
ROUTES = GENERATING | MODEL_ROUTES | {COUNT_TOKENS, GEMINI_COUNT, SLEEP, WAKE_UP}
SERVED = ROUTES - GEMINI_ROUTES - MODEL_ROUTES | {MODELS, TOKENIZE}
"""Routes of vLLM's application."""

RETRY_AFTER_S = 5
"""Told to clients while the disk is full."""

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
_GOOGLES = re.compile(r"/v1(?:beta|alpha)?/models/([^:]+):(generateContent|streamGenerateContent|countTokens)")
_MODELS = re.compile(r"(/v1|/v1(?:beta|alpha))/models(?:/([^:]+))?")
_GOOGLES_FIELDS = {
    "max_completion_tokens": "maxOutputTokens",
    "max_tokens": "maxOutputTokens",
    "tool_choice": "functionCallingConfig",
    "top_p": "topP",
    "top_k": "topK",
    "stop": "stopSequences",
    "presence_penalty": "presencePenalty",
    "frequency_penalty": "frequencyPenalty",
    "response_format": "responseSchema",
    "reasoning_effort": "thinkingConfig",
}
"""Chat's names of fields, of which errors speak."""
_FIELDS = re.compile(rf"\b(?:{'|'.join(_GOOGLES_FIELDS)})\b")
_GOOGLES_STATUS = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
}


def route_of(path: str) -> tuple[str, dict[str, str]]:
    """(which of `ROUTES` it is, what its path names); a path that is none of them as it is."""
    if (named := _GOOGLES.fullmatch(path)) is not None:
        return f"/v1beta/models/*:{named[2]}", {"model": named[1]}
    if (named := _MODELS.fullmatch(path)) is None:
        return path, {}
    route = MODELS if named[1] == "/v1" else GEMINI_MODELS
    return (route, {}) if named[2] is None else (f"{route}/*", {"model": named[2]})


def spoken(path: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
    """A route whose dialect this request speaks: where the path does not say it, the client's headers do."""
    names = {name for name, _ in headers}
    if path.startswith(("/v1beta", "/v1alpha")) or b"x-goog-api-key" in names:
        return path if is_google(path) else GEMINI
    return MESSAGES if is_anthropic(path) or b"anthropic-version" in names else path


def is_anthropic(path: str) -> bool:
    """Does this route speak Anthropic's dialect?"""
    return path.startswith(MESSAGES)


def is_google(path: str) -> bool:
    """Does this route speak Google's dialect?"""
    return path in GEMINI_ROUTES


def kind_of(status: int) -> str:
    """The error type that both dialects use for this HTTP status."""
    return _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")


def error_body(path: str, *, status: int, message: str, code: str | None = None, param: str | None = None) -> bytes:
    """An error as the dialect of `path` spells it. `param`: the field at fault."""
    if is_anthropic(path):
        body: dict[str, Any] = {"type": "error", "error": {"type": kind_of(status), "message": message}}
    elif is_google(path):
        named = _GOOGLES_STATUS.get(status, "INTERNAL" if status >= 500 else "INVALID_ARGUMENT")
        body = {"error": {"code": status, "message": message, "status": named}}
    else:
        error = {"message": message, "type": kind_of(status), "param": param, "code": code}
        body = {"error": error}
    return json.dumps(body).encode()


def error_event(path: str, *, status: int, message: str, code: str | None, param: str | None = None) -> bytes:
    """An error at the end of a stream that has begun, as the dialect of `path` spells it."""
    if path == RESPONSES:
        event = {"type": "error", "code": code, "message": message, "param": param, "sequence_number": 0}
        return f"event: error\ndata: {json.dumps(event)}\n\n".encode()
    body = error_body(path, status=status, message=message, code=code, param=param).decode()
    if is_google(path):
        return f"data: {body}\r\n\r\n".encode()
    return (f"event: error\ndata: {body}\n\n" if is_anthropic(path) else f"data: {body}\n\ndata: [DONE]\n\n").encode()


def message_of(body: bytes) -> str:
    """Message of an error of vLLM's HTTP layer."""
    try:
        error = json.loads(body)
        return str(error["error"]["message"] if "error" in error else error["detail"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")


def too_long(number: int, limit: int) -> str:
    """Refusal of a prompt of so many tokens, in vLLM's words."""
    return (
        f"This model's maximum context length is {limit} tokens. However, your prompt contains {number} input tokens, which "
        "leaves no room for an answer. Please reduce the length of the input prompt."
    )


_TOO_LONG = re.compile(
    r"maximum context length is (\d+) tokens\. However, your prompt contains (?:at least )?(\d+) (input tokens|characters)"
)
"""`too_long`, or what vLLM says before it counts all tokens. Clients shorten a conversation at words of their dialect."""


def respelled(path: str, status: int, body: bytes) -> bytes:
    """An error of vLLM's HTTP layer as the dialect of `path` spells it: its own checks answer in OpenAI's form."""
    message, code = message_of(body), None
    if (match := _TOO_LONG.search(message)) is not None:
        limit = int(match[1])
        number = int(match[2]) if match[3] == "input tokens" else limit + 1
        code, status = "context_length_exceeded", 400
        if is_anthropic(path):
            message = f"prompt is too long: {number} tokens > {limit} maximum"
        elif is_google(path):
            message = f"The input token count ({number}) exceeds the maximum number of tokens allowed ({limit})."
    if is_google(path):
        message = _FIELDS.sub(lambda named: _GOOGLES_FIELDS[named[0]], message)
    elif code is None and not is_anthropic(path) and b'"error"' in body:
        return body
    return error_body(path, status=status, message=message, code=code)


def models_body(path: str, served: Sequence[Mapping[str, Any]], *, one: bool) -> bytes:
    """Models as the dialect of `path` lists them, or the one that was asked for. `served`: in vLLM's form."""
    listed: list[dict[str, Any]]
    if is_google(path):
        listed = [
            {
                "name": f"models/{model['id']}",
                "displayName": model["id"],
                "version": "1",
                "inputTokenLimit": model["max_model_len"],
                "outputTokenLimit": model["max_model_len"],
                "supportedGenerationMethods": [route.rpartition(":")[2] for route in sorted(GEMINI_ROUTES)],
            }
            for model in served
        ]
        whole: dict[str, Any] = {"models": listed}
    elif is_anthropic(path):
        listed = [
            {
                "type": "model",
                "id": model["id"],
                "display_name": model["id"],
                "created_at": datetime.fromtimestamp(model["created"], UTC).isoformat(timespec="seconds"),
            }
            for model in served
        ]
        ends = {"first_id": listed[0]["id"], "last_id": listed[-1]["id"]} if listed else {}
        whole = {"data": listed, "has_more": False, **ends}
    else:
        listed = [dict(model) for model in served]
        whole = {"object": "list", "data": listed}
    return json.dumps(listed[0] if one else whole).encode()


class Failure(UnderstudyError):
    """The answer to a request that is not served. `code`, `param`: as in OpenAI's dialect; `closes`: the connection ends, the rest
    of the request is not read."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
        closes: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self._headers = {"content-type": "application/json", **({"connection": "close"} if closes else {})}
        if retry_after_s is not None:
            self._headers["retry-after"] = str(retry_after_s)
        elif status < 500:
            self._headers["x-should-retry"] = "false"

    async def answer(self, send: Send, path: str) -> None:
        """Send all of it."""
        response = self.response(path)
        await send({"type": "http.response.start", "status": self.status, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body})

    def event(self, path: str) -> bytes:
        """The same at the end of a stream that has begun."""
        return error_event(path, status=self.status, message=self.message, code=self.code, param=self.param)

    def response(self, path: str) -> Response:
        """The answer in the dialect of `path`."""
        body = error_body(path, status=self.status, message=self.message, code=self.code, param=self.param)
        return Response(body, status_code=self.status, headers=self._headers)


FAILURES = (EngineError, EpisodeError, Failure, QueueClosed, RequestFailed, RequestRefused, queue.Full)
"""Errors that `failure_of` knows."""


def failure_of(error: BaseException | None) -> Failure | None:
    """None: it is none of `FAILURES`."""
    message = str(error)
    match error:
        case Failure():
            return error
        case RequestRefused():
            return Failure(error.status, message, code="invalid_request", param=error.field)
        case RequestFailed():
            return Failure(500, message, code="server_error")
        case EpisodeError():
            return Failure(403, message, code="episode_closed")
        case EngineError() | QueueClosed() | queue.Full():
            return Failure(503, message, code="engine_unavailable", retry_after_s=1)
        case _:
            return None
