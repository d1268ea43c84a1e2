"""A model of others, in a process of its own: OpenAI's Chat and Responses APIs and Anthropic's Messages API, whole and streamed.

What it does follows from the last text of the user: `cut` breaks its answer off, `down` is 503, `silent` answers nothing, `locked`
is 401, `wrong` is 400 and tells the key, `call` makes a call where tools are offered; else it answers `up: TEXT`. `POST /asked`
gives what it was asked so far. Run as a program it prints its port.
"""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import httpx

ROOT = Path(__file__).resolve().parents[2]
KEY = "sk-of-the-upstream-0123456789"


class Upstream(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    asked: ClassVar[list[dict[str, Any]]] = []
    lock: ClassVar[threading.Lock] = threading.Lock()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/asked":
            return self._whole(200, self.asked)
        with self.lock:
            self.asked.append({"path": self.path, "headers": list(self.headers.items()), "body": body})
            number = len(self.asked)
        text = _last_text(body)
        if text == "down":
            return self._whole(503, {"error": {"message": "overloaded"}})
        if text == "locked":
            return self._whole(401, {"error": {"message": f"Incorrect API key provided: {KEY}"}})
        if text == "wrong":
            error = {"message": f"no such thing, {KEY}", "code": "bad_thing", "param": "messages"}
            return self._whole(400, {"error": error})
        if text == "silent":
            threading.Event().wait(60.0)
        calls = text == "call" and bool(body.get("tools"))
        path = self.path.partition("?")[0]
        whole, events = {"/v1/messages": _messages, "/v1/responses": _responses}.get(path, _chat)(text, number, calls)
        if not body.get("stream"):
            return self._whole(200, whole, missing=10 if text == "cut" else 0)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        sent = "".join(events[: len(events) // 2] if text == "cut" else events).encode()
        for at in range(0, len(sent), 37):  # events are cut anywhere
            part = sent[at : at + 37]
            self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            self.wfile.flush()
        if text == "cut":
            self.close_connection = True
        else:
            self.wfile.write(b"0\r\n\r\n")

    def _whole(self, status: int, content: Any, *, missing: int = 0) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data) + missing))
        self.end_headers()
        self.wfile.write(data)
        self.close_connection = bool(missing)

    def log_message(self, *_: Any) -> None:
        pass


def _last_text(body: dict[str, Any]) -> str:
    asked = body.get("messages", body.get("input"))
    content = asked[-1].get("content", asked[-1].get("output")) if isinstance(asked, list) else asked
    parts = [part.get("text", part.get("content", "")) for part in content] if isinstance(content, list) else [content]
    return "".join(map(str, parts))


def _chat(text: str, number: int, calls: bool) -> tuple[Any, list[str]]:
    base = {"id": f"chatcmpl-up-{number}", "created": 1, "model": "large"}
    call = {"id": f"call_{number}", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
    message = {"role": "assistant", "content": None if calls else f"up: {text}", "reasoning_content": "hm"}
    message |= {"tool_calls": [call]} if calls else {}
    why = "tool_calls" if calls else "stop"
    whole = {**base, "object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": why}]}
    whole["usage"] = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    deltas: list[dict[str, Any]] = [{"role": "assistant", "reasoning_content": "hm"}]
    if calls:
        begun = {**call, "index": 0, "function": {"name": "look", "arguments": ""}}
        deltas += [{"tool_calls": [begun]}]
        deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": each}}]} for each in ('{"at": ', '"sky"}')]
    else:
        deltas += [{"content": part} for part in ("up: ", text)]
    chunks = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    chunks += [{"index": 0, "delta": {}, "finish_reason": why}]
    events = [json.dumps({**base, "object": "chat.completion.chunk", "choices": [chunk]}) for chunk in chunks]
    return whole, [f"data: {event}\n\n" for event in (*events, "[DONE]")]


def _messages(text: str, number: int, calls: bool) -> tuple[Any, list[str]]:
    base = {"id": f"msg_up_{number}", "type": "message", "role": "assistant", "model": "large", "stop_sequence": None}
    usage = {"input_tokens": 1, "output_tokens": 1}
    block: dict[str, Any] = {"type": "text", "text": f"up: {text}"}
    begun, deltas = {"type": "text", "text": ""}, [{"type": "text_delta", "text": part} for part in ("up: ", text)]
    if calls:
        block = {"type": "tool_use", "id": f"toolu_{number}", "name": "look", "input": {"at": "sky"}}
        begun = {**block, "input": {}}
        deltas = [{"type": "input_json_delta", "partial_json": part} for part in ('{"at": ', '"sky"}')]
    why = "tool_use" if calls else "end_turn"
    told = [
        {"type": "message_start", "message": {**base, "content": [], "stop_reason": None, "usage": usage}},
        {"type": "content_block_start", "index": 0, "content_block": begun},
        *({"type": "content_block_delta", "index": 0, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": why, "stop_sequence": None}, "usage": {"output_tokens": 1}},
        {"type": "message_stop"},
    ]
    whole = {**base, "content": [block], "stop_reason": why, "usage": usage}
    return whole, [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in told]


def _responses(text: str, number: int, calls: bool) -> tuple[Any, list[str]]:
    part = {"type": "output_text", "text": f"up: {text}", "annotations": []}
    item: dict[str, Any] = {
        "type": "message", "id": f"m{number}", "role": "assistant", "status": "completed", "content": [part]
    }  # fmt: skip
    if calls:
        item = {"type": "function_call", "id": f"f{number}", "call_id": f"call_{number}", "name": "look"}
        item |= {"arguments": '{"at": "sky"}', "status": "completed"}
    base = {"id": f"resp_up_{number}", "object": "response", "created_at": 1, "model": "large", "output": []}
    base |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "status": "in_progress"}
    whole = {**base, "status": "completed", "output": [item]}
    delta = {"type": "response.output_text.delta", "item_id": item["id"], "output_index": 0, "content_index": 0}
    delta |= {"delta": f"up: {text}", "logprobs": []}
    told = [{"type": "response.created", "response": base}, *([] if calls else [delta])]
    told += [{"type": "response.completed", "response": whole}]
    lines = [{**event, "sequence_number": at} for at, event in enumerate(told)]
    return whole, [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in lines]


@contextmanager
def scripted_upstream() -> Iterator[str]:
    """Its root, with /v1."""
    command = [sys.executable, "-m", "tests.support.scripted_upstream"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
        finally:
            process.kill()


def asked_of(url: str) -> list[dict[str, Any]]:
    """What it was asked so far: path, headers, body."""
    found: list[dict[str, Any]] = httpx.post(f"{url.removesuffix('/v1')}/asked", json={}).json()
    return found


def main() -> None:
    """Serve until killed."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Upstream)
    server.daemon_threads = True
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
