"""Agents of `benchmarks.conversations`: a conversation by the clients of OpenAI and Anthropic, and over HTTP in Google's dialect.

Each keeps its history in its own dialect, as programs with that client do: what it was told goes back. `told` is the same answer
as a chat message, for templates. Streams are put together by the client where it does that, else part by part.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import httpx
from anthropic import Anthropic
from openai import OpenAI

TOOL = "look"
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
LIMIT_S = 120.0


class Agent(ABC):
    """`streams`: it asks for streams. `habit`: what it does to its history, see HABITS. `tools`: it offers one."""

    def __init__(self, base_url: str, key: str, *, streams: bool, habit: str, tools: bool) -> None:
        self.streams, self.habit, self.tools = streams, habit, tools
        self.history: list[Any] = []
        self.connect(base_url, key)

    client: Any
    part = "text"
    """The type of a text in a list of parts."""

    def connect(self, base_url: str, key: str) -> None:
        self.client = OpenAI(base_url=f"{base_url}/v1", api_key=key, max_retries=0, timeout=LIMIT_S)

    def content(self, text: str) -> Any:
        return [{"type": self.part, "text": text}] if self.habit == "parts" else text

    def say(self, text: str) -> None:
        self.history.append({"role": "user", "content": self.content(text)})

    @abstractmethod
    def results(self, told: Any, text: str) -> None:
        """The same result to each call of `told`."""

    @abstractmethod
    def ask(self) -> Any:
        """The model's answer as a chat message: `content`, and `tool_calls` where there are some. It is in the history."""

    def close(self) -> None:
        self.client.close()

    def respelled(self, arguments: str) -> str:
        """Arguments of a call as this agent writes them back."""
        if self.habit != "respelled":
            return arguments
        try:
            return json.dumps(json.loads(arguments), indent=1, ensure_ascii=True)
        except ValueError:
            return arguments


def message_of(content: str, calls: list[tuple[str, str, str]]) -> dict[str, Any]:
    """Calls are (id, name, arguments)."""
    listed = [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls]
    return {"role": "assistant", "content": content} | ({"tool_calls": listed} if calls else {})


class ChatAgent(Agent):
    def results(self, told: Any, text: str) -> None:
        self.history += [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in told["tool_calls"]]

    def ask(self) -> Any:
        asked: dict[str, Any] = {"model": "policy", "messages": self.history}
        if self.tools:
            asked["tools"] = [{"type": "function", "function": {"name": TOOL, "parameters": SCHEMA}}]
        content, calls = self._streamed(asked) if self.streams else self._whole(asked)
        back = message_of(content, [(i, n, self.respelled(a)) for i, n, a in calls])
        self.history.append(back | {"content": self.content(content)} if content else back | {"content": None})
        return message_of(content, calls)

    def _whole(self, asked: Any) -> tuple[str, list[tuple[str, str, str]]]:
        message = self.client.chat.completions.create(**asked).choices[0].message
        calls = [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()]
        return message.content or "", calls

    def _streamed(self, asked: Any) -> tuple[str, list[tuple[str, str, str]]]:
        content, calls = "", dict[int, list[str]]()
        for chunk in self.client.chat.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                content += choice.delta.content or ""
                for part in choice.delta.tool_calls or ():
                    call = calls.setdefault(part.index, ["", "", ""])
                    call[0] = call[0] or part.id or ""
                    if part.function is not None:
                        call[1] += part.function.name or ""
                        call[2] += part.function.arguments or ""
        return content, [(i, n, a) for i, n, a in calls.values()]


class ResponsesAgent(Agent):
    part = "input_text"

    def results(self, told: Any, text: str) -> None:
        self.history += [
            {"type": "function_call_output", "call_id": call["id"], "output": text} for call in told["tool_calls"]
        ]

    def ask(self) -> Any:
        asked: dict[str, Any] = {"model": "policy", "input": self.history, "store": False}
        if self.tools:
            asked["tools"] = [{"type": "function", "name": TOOL, "parameters": SCHEMA, "strict": False}]
        if self.streams:
            done = "response.output_item.done"
            items = [event.item for event in self.client.responses.create(**asked, stream=True) if event.type == done]
        else:
            items = self.client.responses.create(**asked).output
        content, calls = "", []
        for item in items:
            back = item.model_dump(exclude_none=True)
            if item.type == "message":
                content += "".join(part.text for part in item.content)
            elif item.type == "function_call":
                calls.append((item.call_id, item.name, item.arguments))
                back["arguments"] = self.respelled(item.arguments)
            self.history.append(back)
        return message_of(content, calls)


class MessagesAgent(Agent):
    def connect(self, base_url: str, key: str) -> None:
        self.client = Anthropic(base_url=base_url, api_key=key, max_retries=0, timeout=LIMIT_S)

    def results(self, told: Any, text: str) -> None:
        content = [{"type": "tool_result", "tool_use_id": call["id"], "content": text} for call in told["tool_calls"]]
        self.history.append({"role": "user", "content": content})

    def ask(self) -> Any:
        asked: dict[str, Any] = {"model": "policy", "messages": self.history, "max_tokens": 512}
        if self.tools:
            asked["tools"] = [{"name": TOOL, "input_schema": SCHEMA}]
        if self.streams:
            with self.client.messages.stream(**asked) as stream:
                message = stream.get_final_message()
        else:
            message = self.client.messages.create(**asked)
        blocks = [block.model_dump(exclude_none=True) for block in message.content]
        self.history.append({"role": "assistant", "content": blocks})
        calls = [(b["id"], b["name"], json.dumps(b["input"])) for b in blocks if b["type"] == "tool_use"]
        return message_of("".join(b["text"] for b in blocks if b["type"] == "text"), calls)


class GoogleAgent(Agent):
    def connect(self, base_url: str, key: str) -> None:
        url = f"{base_url}/v1beta/models/policy"
        self.client = httpx.Client(base_url=url, headers={"x-goog-api-key": key}, timeout=LIMIT_S)

    def say(self, text: str) -> None:
        self.history.append({"role": "user", "parts": [{"text": text}]})

    def results(self, told: Any, text: str) -> None:
        parts = [
            {"functionResponse": {"name": call["function"]["name"], "response": {"output": text}}}
            for call in told["tool_calls"]
        ]
        self.history.append({"role": "user", "parts": parts})

    def ask(self) -> Any:
        asked: dict[str, Any] = {"contents": self.history}
        if self.tools:
            asked["tools"] = [{"functionDeclarations": [{"name": TOOL, "parametersJsonSchema": SCHEMA}]}]
        way = ":streamGenerateContent?alt=sse" if self.streams else ":generateContent"
        answer = self.client.post(f"{self.client.base_url}".rstrip("/") + way, json=asked)
        if answer.is_error:
            raise RuntimeError(answer.text)
        bodies = (
            [answer.json()]
            if not self.streams
            else [
                json.loads(line.removeprefix("data: "))
                for line in answer.text.splitlines()
                if line.startswith("data: ")
            ]
        )
        contents = [
            candidate["content"]
            for body in bodies
            for candidate in body.get("candidates", ())
            if candidate.get("content", {}).get("parts")
        ]
        parts = [part for content in contents for part in content["parts"]]
        self.history += contents
        calls = [
            (f"call{k}", call["name"], json.dumps(call.get("args", {})))
            for k, call in enumerate(part["functionCall"] for part in parts if "functionCall" in part)
        ]
        return message_of("".join(part.get("text", "") for part in parts), calls)


DIALECTS: dict[str, Callable[..., Agent]] = {
    "chat": ChatAgent,
    "responses": ResponsesAgent,
    "messages": MessagesAgent,
    "google": GoogleAgent,
}
HABITS = ("as it came", "parts", "respelled")
"""What was told goes back as it came; the user's texts and answers as lists of parts; arguments of calls are written anew."""
