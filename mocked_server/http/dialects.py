"""The model API's routes, and how each dialect spells an error."""

from __future__ import annotations

import json
import re
from typing import Any

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
GENERATE = "/generate"
"""Token ids in and out, for agent loops."""
SLEEP = "/sleep"
WAKE_UP = "/wake_up"

TOKENIZE = "/tokenize"
"""A route of vLLM's application that is not open to agents: a prompt's length, for `GEMINI_COUNT`."""

GEMINI_ROUTES = frozenset({GEMINI, GEMINI_STREAM, GEMINI_COUNT})
GENERATING = frozenset({CHAT, COMPLETIONS, RESPONSES, MESSAGES, GEMINI, GEMINI_STREAM, GENERATE})
ROUTES = GENERATING | {COUNT_TOKENS, GEMINI_COUNT, MODELS, SLEEP, WAKE_UP}
SERVED = ROUTES - GEMINI_ROUTES | {TOKENIZE}
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
    if (named := _GOOGLES.fullmatch(path)) is None:
        return path, {}
    return f"/v1beta/models/*:{named[2]}", {"model": named[1]}


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


def error_event(path: str, *, status: int, message: str, code: str, param: str | None = None) -> bytes:
    """An error at the end of a stream that has begun, as the dialect of `path` spells it."""
    if path == RESPONSES:
        event = {"type": "error", "code": code, "message": message, "param": param, "sequence_number": 0}
        return f"event: error\ndata: {json.dumps(event)}\n\n".encode()
    body = error_body(path, status=status, message=message, code=code, param=param).decode()
    if is_google(path):
        return f"data: {body}\r\n\r\n".encode()
    return (f"event: error\ndata: {body}\n\n" if is_anthropic(path) else f"data: {body}\n\ndata: [DONE]\n\n").encode()


def message_of(body: bytes) -> str:
    """What an error of vLLM's HTTP layer says."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")


def respelled(path: str, status: int, body: bytes) -> bytes:
    """An error of vLLM's HTTP layer as the dialect of `path` spells it: its own checks answer in OpenAI's form."""
    return error_body(path, status=status, message=message_of(body)) if is_anthropic(path) or is_google(path) else body
