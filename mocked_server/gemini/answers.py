"""Answers of the chat dialect in Google's: whole ones, and streams of events.

Called by `routes`. A function call is sent when it is complete, as Google's clients expect; text and thoughts as they come. The
last chunk has the finish reasons and what was used. Nothing is decided here: ids, texts and reasons are the chat route's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mocked_server.conversation.message_match import arguments_of

REASONS = {"stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS"}

Fields = dict[str, Any]


@dataclass(slots=True)
class _Call:
    """A function call of which parts have come."""

    id: str | None = None
    name: str = ""
    arguments: str = ""

    def part(self) -> Fields:
        """The part of a content that says it."""
        call: Fields = {"name": self.name, "args": arguments_of(self.arguments)}
        return {"functionCall": call if self.id is None else {"id": self.id, **call}}


@dataclass(slots=True)
class _Candidate:
    """One answer of a stream so far."""

    reason: str | None = None
    calls: dict[int, _Call] = field(default_factory=dict)


def whole_answer(chat: Mapping[str, Any], *, shows_thoughts: bool) -> Fields:
    """The answer of `generateContent` to what the chat route answered."""
    candidates = []
    for choice in chat["choices"]:
        message = choice["message"]
        parts = _said(message, shows_thoughts=shows_thoughts)
        for call in message.get("tool_calls") or ():
            function = call["function"]
            parts.append(_Call(call.get("id"), function["name"], function["arguments"]).part())
        candidates.append(_candidate(choice["index"], parts, reason=choice.get("finish_reason")))
    return _response(chat, candidates, usage=chat.get("usage"))


class StreamedAnswer:
    """The chunks of one stream. `take` each chunk of the chat route's, in order."""

    def __init__(self, *, shows_thoughts: bool) -> None:
        self._shows_thoughts = shows_thoughts
        self._candidates: dict[int, _Candidate] = {}

    def take(self, chunk: Mapping[str, Any]) -> Fields | None:
        """What to tell now; None: nothing yet."""
        candidates = []
        for choice in chunk.get("choices") or ():
            index, delta = choice["index"], choice.get("delta") or {}
            candidate = self._candidates.setdefault(index, _Candidate())
            candidate.reason = choice.get("finish_reason") or candidate.reason
            for call in delta.get("tool_calls") or ():
                _add(candidate.calls.setdefault(call["index"], _Call()), call)
            if parts := _said(delta, shows_thoughts=self._shows_thoughts):
                candidates.append(_candidate(index, parts, reason=None))
        if (usage := chunk.get("usage")) is not None and not chunk.get("choices"):
            candidates = [
                _candidate(index, [call.part() for call in one.calls.values()], reason=one.reason)
                for index, one in sorted(self._candidates.items())
            ]
        else:
            usage = None
        return _response(chunk, candidates, usage=usage) if candidates else None


def _add(call: _Call, delta: Mapping[str, Any]) -> None:
    function = delta.get("function") or {}
    call.id = delta.get("id") or call.id
    call.name += function.get("name") or ""
    call.arguments += function.get("arguments") or ""


def _said(message: Mapping[str, Any], *, shows_thoughts: bool) -> list[Fields]:
    parts: list[Fields] = []
    if shows_thoughts and (thought := message.get("reasoning") or message.get("reasoning_content")):
        parts.append({"text": thought, "thought": True})
    if text := message.get("content"):
        parts.append({"text": text})
    return parts


def _candidate(index: int, parts: list[Fields], *, reason: str | None) -> Fields:
    candidate: Fields = {"content": {"role": "model", "parts": parts or [{"text": ""}]}, "index": index}
    return candidate if reason is None else {**candidate, "finishReason": REASONS.get(reason, "OTHER")}


def _response(chat: Mapping[str, Any], candidates: list[Fields], *, usage: Mapping[str, Any] | None) -> Fields:
    answer: Fields = {"candidates": candidates, "modelVersion": chat.get("model"), "responseId": chat.get("id")}
    if usage is not None:
        answer["usageMetadata"] = {
            "promptTokenCount": usage.get("prompt_tokens", 0),
            "candidatesTokenCount": usage.get("completion_tokens") or 0,
            "totalTokenCount": usage.get("total_tokens", 0),
        }
    return answer
