"""The model API's routes, and how each dialect spells an error."""

from __future__ import annotations

import json
from typing import Any

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
MODELS = "/v1/models"
GENERATE = "/generate"
"""Token ids in and out, for agent loops."""
SLEEP = "/sleep"
WAKE_UP = "/wake_up"

GENERATING = frozenset({CHAT, COMPLETIONS, RESPONSES, MESSAGES, GENERATE})
ROUTES = GENERATING | {COUNT_TOKENS, MODELS, SLEEP, WAKE_UP}

RETRY_AFTER_S = 5
"""Told to clients while the disk is full."""

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def is_anthropic(path: str) -> bool:
    """Does this route speak Anthropic's dialect?"""
    return path.startswith(MESSAGES)


def kind_of(status: int) -> str:
    """The error type that both dialects use for this HTTP status."""
    return _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")


def error_body(path: str, *, status: int, message: str, code: str | None = None, param: str | None = None) -> bytes:
    """An error as the dialect of `path` spells it. `param`: the field at fault."""
    if is_anthropic(path):
        body: dict[str, Any] = {"type": "error", "error": {"type": kind_of(status), "message": message}}
    else:
        error = {"message": message, "type": kind_of(status), "param": param, "code": code}
        body = {"error": error}
    return json.dumps(body).encode()


def error_event(path: str, *, status: int, message: str, code: str, param: str | None = None) -> bytes:
    """An error at the end of a stream that has begun, as the dialect of `path` spells it."""
    if path == RESPONSES:
        event = {"type": "error", "code": code, "message": message, "param": param, "sequence_number": 0}
        return f"event: error\ndata: {json.dumps(event)}\n\n".encode()
    body = error_body(path, status=status, message=message, code=code, param=param).decode()
    return (f"event: error\ndata: {body}\n\n" if is_anthropic(path) else f"data: {body}\n\ndata: [DONE]\n\n").encode()


def message_of(body: bytes) -> str:
    """What an error of vLLM's HTTP layer says."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")


def as_anthropic(status: int, body: bytes) -> bytes:
    """An error of vLLM's HTTP layer on an Anthropic route, in Anthropic's form: its own checks answer in OpenAI's."""
    return error_body(MESSAGES, status=status, message=message_of(body))
