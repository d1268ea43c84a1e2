"""What the tiny model says while an agent is tried out (`mocked_server.check.trial`): valid tool calls first, then a
final answer.

An untrained model says nothing that an agent could act on. So each request is given a line, which the real engine is
then made to sample: the tokens, their log-probabilities and everything around them are real, only the words are ours.
Pure functions.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from mocked_server.http.dialects import CHAT, MESSAGES, RESPONSES

LINE = "rehearsal_line"
"""Key of the line in `Call.extra_args`, which reaches the engine in every dialect."""
TOOL_ROUNDS = 3
"""Tool results in a conversation after which the model answers in words. The second of these rounds calls two tools at once."""
ANSWER = "Done. The answer is 42."
MAX_DEPTH = 6

Fields = dict[str, Any]


def line_for(path: str, fields: Fields) -> str:
    """A tool call (as hermes writes it), an example of the requested format, or a short answer."""
    tools = _tools(path, fields)
    results = _num_results(path, fields)
    choice = fields.get("tool_choice")
    name = _named(choice)
    forced = name is not None or choice in ("required", {"type": "any"})
    if tools and choice not in ("none", {"type": "none"}) and (forced or results < TOOL_ROUNDS):
        called = [tools[results % len(tools)]] if name is None else [tool for tool in tools if tool[0] == name]
        if results == 1 and not forced and fields.get("parallel_tool_calls") is not False:
            called = [tools[1 % len(tools)], tools[2 % len(tools)]]
        return "\n".join(_call(tool, example(schema)) for tool, schema in called)
    schema = _output_schema(path, fields)
    return ANSWER if schema is None else json.dumps(example(schema))


def example(schema: Any, *, root: Any = None, depth: int = 0) -> Any:
    """The smallest value that a JSON schema describes, as far as its common words say."""
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return "example"
    root = schema if root is None else root
    for word in ("const", "default"):
        if schema.get(word) is not None:
            return schema[word]
    for word in ("enum", "examples"):
        if schema.get(word):
            return schema[word][0]
    for word in ("anyOf", "oneOf", "allOf"):
        if schema.get(word):
            return example(schema[word][0], root=root, depth=depth + 1)
    if "$ref" in schema:
        return example(_referred(root, schema["$ref"]), root=root, depth=depth + 1)
    return _by_type(schema, root=root, depth=depth)


def _by_type(schema: Fields, *, root: Any, depth: int) -> Any:
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind == "object" or "properties" in schema:
        needed = schema.get("required", list(schema.get("properties", {})))
        properties = schema.get("properties", {})
        return {name: example(properties.get(name), root=root, depth=depth + 1) for name in needed}
    if kind == "array":
        return [example(schema.get("items"), root=root, depth=depth + 1)] * max(1, int(schema.get("minItems", 1)))
    if kind in ("integer", "number"):
        return schema.get("minimum", 1)
    return {"boolean": True, "null": None}.get(str(kind), "example")


def _referred(root: Any, reference: str) -> Any:
    for word in reference.removeprefix("#/").split("/"):
        root = root.get(word) if isinstance(root, dict) else None
    return root


def _call(name: str, arguments: Any) -> str:
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def _tools(path: str, fields: Fields) -> list[tuple[str, Any]]:
    """(name, schema of its arguments) of each function that the request offers."""
    found = []
    for tool in fields.get("tools") or ():
        if path == CHAT:
            tool = tool.get("function", {})
        elif path == RESPONSES and tool.get("type") != "function":
            continue  # tools that a server runs
        schema = tool.get("input_schema") if path == MESSAGES else tool.get("parameters")
        if "name" in tool:
            found.append((str(tool["name"]), schema or {"type": "object"}))
    return found


def _num_results(path: str, fields: Fields) -> int:
    """Turns of the conversation that bring tool results."""
    if path == RESPONSES:
        items = fields.get("input")
        kinds = [str(item.get("type")) for item in items if isinstance(item, dict)] if isinstance(items, list) else []
        brings = [kind.endswith("_call_output") for kind in kinds]
    elif path == MESSAGES:
        parts = [m.get("content") for m in fields.get("messages") or ()]
        brings = [isinstance(p, list) and any(block.get("type") == "tool_result" for block in p) for p in parts]
    else:
        brings = [message.get("role") == "tool" for message in fields.get("messages") or ()]
    return sum(now and not before for before, now in zip([False, *brings], brings, strict=False))


def _named(choice: Any) -> str | None:
    if not isinstance(choice, dict):
        return None
    name = choice.get("name") or (choice.get("function") or {}).get("name")
    return None if name is None else str(name)


def _output_schema(path: str, fields: Fields) -> Any:
    """The JSON schema that the answer must follow; None: free text."""
    if path == RESPONSES:
        wanted = (fields.get("text") or {}).get("format") or {}
    elif path == MESSAGES:
        wanted = (fields.get("output_config") or {}).get("format") or {}
    else:
        wanted = fields.get("response_format") or {}
    if wanted.get("type") == "json_object":
        return {"type": "object"}
    if wanted.get("type") != "json_schema":
        return None
    return (wanted.get("json_schema") or wanted).get("schema")


# An environment that says yes to everything, for an agent that is tried out: what `ENV_ADDRESS` names in `mocked_server.check`.
# The real one (`env.command`) is not started there: its scores mean nothing for a model that says made-up words. Each HTTP
# request is answered with 200 and `ENV_ANSWER`, each other line with `ENV_ANSWER` as a line.

ENV_ANSWER = {
    "done": True,
    "score": 0.0,
    "reward": 0.0,
    "observation": "",
    "messages": [{"role": "user", "content": "Hi"}],
}
METHODS = (b"GET ", b"POST ", b"PUT ", b"PATCH ", b"DELETE ", b"HEAD ", b"OPTIONS ")
MAX_BODY_BYTES = 1 << 24


class StandInEnvironment:
    """`num_messages`: how many it has answered."""

    def __init__(self) -> None:
        self.address = ""
        self.num_messages = 0

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[StandInEnvironment]:
        """Serve on a free port of loopback until the context ends."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=MAX_BODY_BYTES)
        host, port = server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        try:
            yield self
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ValueError, EOFError):  # the agent left, or speaks something else
            while line := await reader.readline():
                self.num_messages += 1
                body = json.dumps(ENV_ANSWER).encode()
                if line.startswith(METHODS):
                    await _read_request(reader)
                    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
                    writer.write(head.encode() + body)
                else:
                    writer.write(body + b"\n")
                await writer.drain()
        writer.close()


async def _read_request(reader: asyncio.StreamReader) -> None:
    """The rest of its head, and its body."""
    length = 0
    while (header := (await reader.readline()).strip()) != b"":
        name, _, value = header.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    if length:
        await reader.readexactly(min(length, MAX_BODY_BYTES))
