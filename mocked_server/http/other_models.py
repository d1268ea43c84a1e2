"""What an agent asked a model of others, and what that said: requests and answers of OpenAI's Chat and Responses APIs and of
Anthropic's Messages API, whole or as a stream of events, in OpenAI's form of chats.

Called by `mocked_server.http.roles` and `mocked_server.watching`. Pure. Invariant: whatever another server says, nothing is raised:
what cannot be read is not there. What no text model could have said or seen stays in its place, for `buffers.log_forms` to judge.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

from mocked_server.conversation.chat_history import joined_text
from mocked_server.http.dialects import CHAT, MESSAGES, RESPONSES

Message = dict[str, Any]
DIGEST_BYTES = 16
ENDS = re.compile(
    rb"^(?:data: ?(?:\[DONE\]|\{\"error\")|event: ?(?:error|message_stop|response\.(?:completed|incomplete|failed)))",
    re.MULTILINE,
)
"""The beginning of a stream's last event."""
_UNREADABLE = (AttributeError, LookupError, TypeError, ValueError)


class Asked(NamedTuple):
    """A conversation up to the answer that is asked for."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None

    @property
    def opening(self) -> list[Message]:
        """What was said before a model said anything."""
        return list(takewhile(lambda message: message.get("role") != "assistant", self.messages))

    @property
    def is_new(self) -> bool:
        """No model has said anything in it."""
        return len(self.opening) == len(self.messages)


@dataclass(slots=True)
class Said:
    """An answer. `message`: None where there is none that is whole."""

    id: str = ""
    message: Message | None = None
    model: str = ""

    @property
    def text(self) -> str:
        """Text for the record: its words, then its calls."""
        if self.message is None:
            return ""
        calls = self.message.get("tool_calls")
        return joined_text(self.message.get("content")) + (json.dumps(calls, ensure_ascii=False) if calls else "")


def asked_of(path: str, fields: Mapping[str, Any]) -> Asked | None:
    """None: it is no chat, or its beginning lies with the other server."""
    try:
        return _asked_of(path, fields)
    except _UNREADABLE:
        return None


def _asked_of(path: str, fields: Mapping[str, Any]) -> Asked | None:
    if path == CHAT and isinstance(fields.get("messages"), list):
        return Asked(objects_of(fields["messages"]), objects_of(fields.get("tools")) or None)
    if path == MESSAGES and isinstance(fields.get("messages"), list):
        system = fields.get("system")
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        for each in objects_of(fields["messages"]):
            messages += _of_blocks(each)
        return Asked(messages, [_anthropic_tool(tool) for tool in objects_of(fields.get("tools"))] or None)
    if path == RESPONSES and not (fields.get("previous_response_id") or fields.get("conversation")):
        given, system = fields.get("input"), fields.get("instructions")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else objects_of(given)
        messages = [{"role": "system", "content": system}] if system else []
        tools = [tool for tool in objects_of(fields.get("tools")) if tool.get("type") == "function"]
        return Asked(messages + _of_items(items), tools or None) if items else None
    return None


def said_of(path: str, answer: bytes) -> Said:
    """The answer to a request of this path."""
    events = [event for event in events_of(answer.decode(errors="replace")) if isinstance(event, dict)]
    try:
        return {MESSAGES: _messages_answer, RESPONSES: _responses_answer}.get(path, _chat_answer)(events)
    except _UNREADABLE:
        return Said()


def _chat_answer(events: Sequence[dict[str, Any]]) -> Said:
    said, texts, thoughts, calls, reason = Said(), list[str](), list[str](), dict[int, dict[str, str]](), None
    for event in events:
        said.id, said.model = said.id or str(event.get("id") or ""), said.model or str(event.get("model") or "")
        for choice in objects_of(event.get("choices")):
            if choice.get("index", 0) != 0:
                continue
            (part,) = objects_of([choice.get("message") or choice.get("delta")]) or [{}]
            texts += [part["content"]] if isinstance(part.get("content"), str) else []
            thought = part.get("reasoning_content") or part.get("reasoning")
            thoughts += [thought] if isinstance(thought, str) else []
            for place, call in enumerate(objects_of(part.get("tool_calls"))):
                known = calls.setdefault(call.get("index", place), {"id": "", "name": "", "arguments": ""})
                (function,) = objects_of([call.get("function")]) or [{}]
                known["id"] = known["id"] or str(call.get("id") or "")
                known["name"] += str(function.get("name") or "")
                known["arguments"] += str(function.get("arguments") or "")
            reason = choice.get("finish_reason") or reason
    if reason is not None:
        said.message = _answer(texts, thoughts, calls=calls.values(), reason=reason)
    return said


def _messages_answer(events: Sequence[dict[str, Any]]) -> Said:
    said, blocks, arguments, reason, is_over = Said(), dict[int, dict[str, Any]](), dict[int, str](), None, False
    for event in events:
        kind, place, delta = event.get("type"), event.get("index", 0), event.get("delta")
        begun = event if kind == "message" else event.get("message")
        if isinstance(begun, dict):
            said.id, said.model = str(begun.get("id") or ""), str(begun.get("model") or "")
            blocks |= dict(enumerate(objects_of(begun.get("content"))))
            reason = begun.get("stop_reason") or reason
        if kind == "content_block_start" and isinstance(event.get("content_block"), dict):
            blocks[place] = dict(event["content_block"])
        elif kind == "content_block_delta" and isinstance(delta, dict):
            block = blocks.setdefault(place, {})
            for name in ("text", "thinking"):
                if isinstance(delta.get(name), str):
                    block[name] = str(block.get(name) or "") + delta[name]
            arguments[place] = arguments.get(place, "") + str(delta.get("partial_json") or "")
        elif kind == "message_delta" and isinstance(delta, dict):
            reason = delta.get("stop_reason") or reason
        is_over = is_over or kind in ("message", "message_stop")
    for place, text in arguments.items():
        if text:
            blocks[place]["input"] = text
    if is_over:
        (message,) = _of_blocks({"role": "assistant", "content": [blocks[place] for place in sorted(blocks)]})
        said.message = {**message, "finish_reason": reason}
    return said


def _responses_answer(events: Sequence[dict[str, Any]]) -> Said:
    said = Said()
    for event in events:
        whole = event.get("response") if "response" in event else event
        if not isinstance(whole, dict) or "output" not in whole:
            continue
        said.id, said.model = str(whole.get("id") or ""), str(whole.get("model") or "")
        if whole.get("status") in ("completed", "incomplete"):
            messages = _of_items([*objects_of(whole["output"])])
            cut = {"finish_reason": "length"} if whole["status"] == "incomplete" else {}
            said.message = {**messages[0], **cut} if len(messages) == 1 else None
    return said


def _answer(
    texts: Iterable[str], thoughts: Iterable[str], *, calls: Iterable[Mapping[str, str]], reason: Any = None
) -> Message:
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if thought := "".join(thoughts):
        message["reasoning_content"] = thought
    if made := [_call(call["id"], name=call["name"], arguments=call["arguments"]) for call in calls]:
        message["tool_calls"] = made
    return message if reason is None else {**message, "finish_reason": reason}


def _call(name_of_call: Any, *, name: Any, arguments: Any) -> Message:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return {"id": str(name_of_call or ""), "type": "function", "function": {"name": str(name or ""), "arguments": text}}


def _of_blocks(message: Message) -> list[Message]:
    """The messages that one of Anthropic's stands for: results of tools are their own."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    blocks = objects_of(content)
    kinds = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
    parts = [block for block in blocks if block.get("type") == "text" or block.get("type") not in kinds]
    results = [
        {"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": block.get("content") or ""}
        for block in blocks
        if block.get("type") == "tool_result"
    ]
    if role != "assistant":
        return results + ([{"role": role, "content": parts}] if parts or not results else [])
    thoughts = [str(block.get("thinking") or "") for block in blocks if block.get("type") == "thinking"]
    calls = [block for block in blocks if block.get("type") == "tool_use"]
    said: Message = {"role": "assistant", "content": parts}
    said |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    made = [_call(call.get("id"), name=call.get("name"), arguments=call.get("input")) for call in calls]
    return [{**said, "tool_calls": made} if made else said]


def _of_items(items: Iterable[Mapping[str, Any]]) -> list[Message]:
    """Items of the Responses API: a thought, words and calls in a row are one message."""
    messages: list[Message] = []

    def turn() -> Message:
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        return messages[-1]

    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call":
            call = _call(item.get("call_id"), name=item.get("name"), arguments=item.get("arguments"))
            turn().setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            call_id = str(item.get("call_id"))
            messages.append({"role": "tool", "tool_call_id": call_id, "content": item.get("output") or ""})
        elif kind == "reasoning":
            thought = joined_text(objects_of(item.get("content")) or objects_of(item.get("summary")))
            if thought:
                turn()["reasoning_content"] = thought
        elif kind == "message" and item.get("role") == "assistant":
            own = turn()
            own["content"] = own["content"] + joined_text(item.get("content"))
        elif kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
    return messages


def _anthropic_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool.get("name"), "description": tool.get("description")}
    function["parameters"] = tool.get("input_schema")
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def digests(messages: Iterable[Message]) -> list[bytes]:
    """Digests of the conversation up to each message: alike where roles, words and calls are, however a client spells them."""
    chain, prefixes = hashlib.blake2b(digest_size=DIGEST_BYTES), list[bytes]()
    for message in messages:
        calls = [
            (function.get("name"), _value(function.get("arguments")))
            for call in objects_of(message.get("tool_calls"))
            if isinstance(function := call.get("function"), dict)
        ]
        content = message.get("content")
        if isinstance(content, list):
            parts = [
                str(part["text"]) if isinstance(part.get("text"), str) else _text(part) for part in objects_of(content)
            ]
            content = "\n".join(parts)
        chain.update(f"{message.get('role')}\0{str(content or '').strip()}\0{_text(calls)}\1".encode(errors="replace"))
        prefixes.append(chain.digest())
    return prefixes


def _value(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return text


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def events_of(answer: str) -> Iterator[Any]:
    """JSON values of an answer: the data of its events, or all of it."""
    lines = [line.removeprefix("data:") for line in answer.splitlines() if line.startswith("data:")] or [answer]
    for line in lines:
        try:
            yield json.loads(line)
        except (ValueError, RecursionError):
            continue


def objects_of(value: Any) -> list[dict[str, Any]]:
    """The objects of a list; none where it is no list: another server says what it likes."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
