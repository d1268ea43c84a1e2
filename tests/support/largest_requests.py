"""The largest requests that a server takes, of each kind: as large as its kind may be, in bytes or in what it holds."""

from __future__ import annotations

import json

from mocked_server.http.dialects import CHAT, COMPLETIONS, COUNT_TOKENS, GENERATE, MESSAGES, RESPONSES
from mocked_server.http.request_fields import MAX_MESSAGES
from mocked_server.http.request_limits import MAX_BODY_BYTES, MAX_CONTAINERS, MAX_STRINGS, MAX_VALUES

GOOGLE = "/v1beta/models/policy:generateContent"


def bodies(model: str = "policy") -> dict[str, tuple[str, bytes]]:
    """Name -> path and body."""
    start, user = f'{{"model":"{model}","max_tokens":3,', '"messages":[{"role":"user","content":"a"}]'

    def text(path: str, before: str, after: str) -> tuple[str, bytes]:
        room = MAX_BODY_BYTES - len(before) - len(after)
        return path, (before + "word " * (room // 5) + after).encode()

    def many(path: str, before: str, each: str, after: str, *, number: int) -> tuple[str, bytes]:
        return path, (before + ",".join([each] * number) + after).encode()

    def items(path: str, name: str, each: str, *, filled: bool = True) -> tuple[str, bytes]:
        """As many as one list may have; `filled`: with text, up to the most bytes."""
        room = MAX_BODY_BYTES // MAX_MESSAGES - len(each) - 2 if filled else 0
        return many(
            path, f'{start}"{name}":[', each.replace("@", "w " * (room // 2) or "a"), "]}", number=MAX_MESSAGES - 1
        )

    part, parts = '{"type":"text","text":"a"}', MAX_CONTAINERS - 8
    call = '{"id":"a","type":"function","function":{"name":"f","arguments":"{}"}}'
    asked = f'{start}"messages":[{{"role":"user","content":"a"}},{{"role":"assistant","content":"","tool_calls":['
    deep = json.dumps('{"a":[' + ",".join(["{}"] * (MAX_CONTAINERS - 8)) + "]}")
    return {
        "chat: text": text(CHAT, f'{start}"messages":[{{"role":"user","content":"', '"}]}'),
        "chat: messages": items(CHAT, "messages", '{"role":"user","name":null,"content":"@"}'),
        "chat: answers": items(CHAT, "messages", '{"role":"assistant","content":"@"}'),
        "chat: parts": many(CHAT, f'{start}"messages":[{{"role":"user","content":[', part, "]}]}", number=parts),
        "chat: calls": many(CHAT, asked, call, "]}]}", number=MAX_MESSAGES),
        "chat: arguments": (
            CHAT,
            (asked + call.replace('"{}"', deep) + "]},{" + '"role":"user","content":"a"}]}').encode(),
        ),
        "chat: tools": items(CHAT, "tools", '{"type":"function","function":{"name":"f"}}', filled=False),
        "chat: template arguments": text(CHAT, f'{start}{user},"chat_template_kwargs":{{"a":"', '"}}'),
        "chat: numbers": many(CHAT, f'{start}{user},"x":[', "1", "]}", number=MAX_VALUES - 16),
        "chat: no messages": items(CHAT, "messages", '{"a":1}', filled=False),
        "chat: no parts": many(CHAT, f'{start}"messages":[{{"role":"user","content":[', '{"a":1}', "]}]}", number=parts),
        "chat: a message that is none": text(CHAT, f'{start}"messages":[{{"a":"', '"}]}'),
        "completions: text": text(COMPLETIONS, f'{start}"prompt":"', '"}'),
        "completions: ids": many(COMPLETIONS, f'{start}"prompt":[', "1", "]}", number=MAX_VALUES - 16),
        "completions: prompts": many(COMPLETIONS, f'{start}"prompt":[', '"a"', "]}", number=MAX_STRINGS - 16),
        "responses: text": text(RESPONSES, f'{start}"input":"', '"}'),
        "responses: messages": items(RESPONSES, "input", '{"type":"message","role":"user","content":"@"}'),
        "responses: calls": items(
            RESPONSES, "input", '{"type":"function_call","call_id":"a","name":"b","arguments":"{}"}', filled=False
        ),
        "responses: no items": items(RESPONSES, "input", '{"a":1}', filled=False),
        "responses: no parts": many(
            RESPONSES, f'{start}"input":[{{"type":"message","role":"user","content":[', '{"a":1}', "]}]}", number=parts
        ),
        "messages: text": text(MESSAGES, f'{start}"messages":[{{"role":"user","content":"', '"}]}'),
        "responses: an item that is none": text(RESPONSES, f'{start}"input":[{{"a":"', '"}]}'),
        "messages: messages": items(MESSAGES, "messages", '{"role":"user","content":"@"}'),
        "messages: parts": many(MESSAGES, f'{start}"messages":[{{"role":"user","content":[', part, "]}]}", number=parts),
        "messages: no messages": items(MESSAGES, "messages", '{"a":1}', filled=False),
        "count_tokens: text": text(COUNT_TOKENS, f'{{"model":"{model}","messages":[{{"role":"user","content":"', '"}]}'),
        "generate: ids": many(GENERATE, '{"prompt_ids":[', "1", "]}", number=MAX_VALUES - 16),
        "google: text": text(GOOGLE, '{"contents":[{"role":"user","parts":[{"text":"', '"}]}]}'),
        "google: parts": many(GOOGLE, '{"contents":[{"role":"user","parts":[', '{"text":"a"}', "]}]}", number=parts),
    }  # fmt: skip
