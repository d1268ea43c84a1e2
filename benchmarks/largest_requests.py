"""How long a server is deaf while it reads the largest requests that it takes, of each kind.

`python -m benchmarks.largest_requests [--model PATH] [--max-model-len 8192] [--only NAME ...] [--json PATH]`: the server with an
engine that does nothing; without a model a tiny one of two million positions. Each request is sent alone, and `/health` asked all
the while: `worst_s` is the longest that it took, `status` what the request was answered with. A longer context lets more of each
through to where it is rendered and tokenized.

It judges nothing. Invariant: each body is as large as its kind may be, in bytes or in what it holds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.gateway import servers
from benchmarks.harness import parser_of, play
from benchmarks.processes.gateway_server import Settings
from configs.tiny_model import make_tiny_model
from mocked_server.http.dialects import CHAT, COMPLETIONS, COUNT_TOKENS, GENERATE, MESSAGES, RESPONSES
from mocked_server.http.request_fields import MAX_MESSAGES
from mocked_server.http.request_limits import MAX_BODY_BYTES, MAX_CONTAINERS, MAX_STRINGS, MAX_VALUES

GOOGLE = "/v1beta/models/policy:generateContent"
POSITIONS = 2**21
PAUSE_S = 0.02
LIMIT_S = 600.0


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


async def asked(url: str, key: str, path: str, body: bytes) -> dict[str, Any]:
    """`status` of the answer to this request, and the longest `worst_s` that `/health` took meanwhile."""
    headers = {"x-api-key": key, "content-type": "application/json"}
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, trust_env=False) as client:
        await client.get("/health")
        asking = asyncio.create_task(client.post(path, content=body, headers=headers))
        waits = []
        while not asking.done():
            began = time.perf_counter()
            (await client.get("/health")).raise_for_status()
            waits.append(time.perf_counter() - began)
            await asyncio.wait({asking}, timeout=PAUSE_S)
        return {"status": asking.result().status_code, "worst_s": round(max(waits), 3), "mib": len(body) >> 20}


def measure(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """The requests, one after another."""
    model = arguments.model or make_tiny_model(folder / "model", positions=POSITIONS)
    chosen = {name: each for name, each in bodies().items() if name.startswith(tuple(arguments.only) or "")}
    settings = Settings(model=str(model), episodes=len(chosen), max_model_len=arguments.max_model_len)
    found = dict[str, Any]()
    (scratch := folder / "servers").mkdir()
    with servers(settings, folder=scratch, kinds=("understudy",)) as (server,):
        for name, (path, body) in chosen.items():
            (key,) = server.plan(agents=1, rounds=1, first="", later="", max_tokens=1).keys
            found[name] = asyncio.run(asked(server.base_url, key, path, body))
            print(f"{name:26} {found[name]['worst_s']:7.3f} s  {found[name]['status']}", flush=True)
            yield {"requests": found}


def main() -> int:
    parser = parser_of("largest_requests", doc=__doc__)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="begin of the names of some requests")
    return play("largest_requests", parser.parse_args(), measure)


if __name__ == "__main__":
    sys.exit(main())
