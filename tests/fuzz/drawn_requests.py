"""Requests drawn from vLLM's own request models: each field of a dialect, with sound and wrong values, one to three at once.

`request(number, seed=...)` is the same for the same two numbers; the first are the attacks that are known by name
(`tests.fuzz.known_attacks`). Used by `tests.fuzz.real_engine`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from pydantic import TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from mocked_server.http.dialects import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    GEMINI,
    GEMINI_COUNT,
    GEMINI_STREAM,
    GENERATE,
    MESSAGES,
    RESPONSES,
)
from mocked_server.http.gemini_requests import CountTokensRequest, GenerateContentRequest
from tests.fuzz.hostile_values import INTEGERS, NUMBERS, SOUND, STRINGS, Pairs, hostile, spelled, spoilt
from tests.fuzz.known_attacks import CASES, QUESTION, THOUGHT, THOUGHTFUL

GOOGLE, GOOGLE_STREAM, GOOGLE_COUNT = (path.replace("*", "policy") for path in (GEMINI, GEMINI_STREAM, GEMINI_COUNT))
GOOGLE_STREAM += "?alt=sse"
GOOGLES_QUESTION = [{"role": "user", "parts": [{"text": "Where?"}]}]
PLAIN: dict[str, dict[str, Any]] = {
    CHAT: {"model": "policy", "messages": QUESTION, "max_tokens": 4},
    COMPLETIONS: {"model": "policy", "prompt": "Where?", "max_tokens": 4},
    RESPONSES: {"model": "policy", "input": "Where?", "max_output_tokens": 4},
    MESSAGES: {"model": "policy", "messages": QUESTION, "max_tokens": 4},
    COUNT_TOKENS: {"model": "policy", "messages": QUESTION},
    GOOGLE: {"contents": GOOGLES_QUESTION, "generationConfig": {"maxOutputTokens": 4}},
    GOOGLE_STREAM: {"contents": GOOGLES_QUESTION, "generationConfig": {"maxOutputTokens": 4}},
    GOOGLE_COUNT: {"contents": GOOGLES_QUESTION},
    GENERATE: {"prompt_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4}},
}
"""Path -> a body that is served."""
AFTER_REASONING: dict[str, dict[str, Any]] = {
    CHAT: {"messages": THOUGHTFUL},
    COMPLETIONS: {"prompt": THOUGHT},
    RESPONSES: {"input": THOUGHT},
    MESSAGES: {"messages": THOUGHTFUL},
    COUNT_TOKENS: {},
    GOOGLE: {"contents": [{"role": "user", "parts": [{"text": THOUGHT}]}]},
    GOOGLE_STREAM: {"contents": [{"role": "user", "parts": [{"text": THOUGHT}]}]},
    GOOGLE_COUNT: {},
}
"""The other half of the requests: see `THOUGHT`."""
SHARES = {
    CHAT: 34, COMPLETIONS: 20, RESPONSES: 14, MESSAGES: 10, COUNT_TOKENS: 4, GOOGLE: 8, GOOGLE_STREAM: 6, GOOGLE_COUNT: 2,
    GENERATE: 18,
}  # fmt: skip
STREAMING = {CHAT, COMPLETIONS, RESPONSES, MESSAGES}
REACH_THE_ENGINE = 5
"""So much likelier than others is a field that shapes the sampling: see `SOUND`."""
LEVELS = 6
"""How deep a value drawn from a schema goes."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is sent, by whom."""

    number: int
    name: str
    path: str
    body: bytes
    by_worker: bool = False
    """With the worker's key instead of an episode's."""
    times: int = 1
    """Sent so many times in a row."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a request: its JSON schema ({} where there is none) with its definitions."""

    name: str
    schema: dict[str, Any]

    def draw(self, chance: Random) -> Any:
        """A value, mostly of about the right form."""
        kind = chance.random()
        if kind < 0.2:
            return hostile(chance)
        sound = SOUND.get(self.name)
        if sound is not None and chance.random() < 0.85:
            value = sound(chance)
        else:
            value = of_schema(self.schema, chance, definitions=self.schema.get("$defs", {}))
        return spoilt(value, chance) if kind < 0.4 else value


@cache
def fields(path: str) -> tuple[Field, ...]:
    """The fields of this dialect, as the vLLM that is installed has them."""
    from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.sampling_params import SamplingParams

    if path == GENERATE:
        return tuple(Field(name, schema_of(kind)) for name, kind in SamplingParams.__annotations__.items())
    model = {
        CHAT: ChatCompletionRequest,
        COMPLETIONS: CompletionRequest,
        RESPONSES: ResponsesRequest,
        MESSAGES: AnthropicMessagesRequest,
        COUNT_TOKENS: AnthropicCountTokensRequest,
        GOOGLE: GenerateContentRequest,
        GOOGLE_STREAM: GenerateContentRequest,
        GOOGLE_COUNT: CountTokensRequest,
    }[path]
    return tuple(Field(name, schema_of(field.annotation)) for name, field in model.model_fields.items())


def schema_of(kind: Any) -> dict[str, Any]:
    """{} for a type that JSON cannot say."""
    try:
        return TypeAdapter(kind).json_schema()
    except (PydanticUserError, PydanticSchemaGenerationError):
        return {}


@cache
def all_fields() -> tuple[Field, ...]:
    """Of all dialects: one may let through what belongs to another."""
    found = {field.name: field for path in PLAIN for field in fields(path)}
    return tuple(found[name] for name in sorted(found))


def of_schema(schema: Any, chance: Random, *, definitions: dict[str, Any], level: int = 0) -> Any:
    """A value that a JSON schema allows, as far as it says so with the words that pydantic writes."""
    if not isinstance(schema, dict) or level > LEVELS:
        return chance.choice(STRINGS)
    if "$ref" in schema:
        found = definitions.get(schema["$ref"].split("/")[-1], {})
        return of_schema(found, chance, definitions=definitions, level=level + 1)
    for word in ("anyOf", "oneOf", "allOf"):
        if word in schema:
            return of_schema(chance.choice(schema[word]), chance, definitions=definitions, level=level)
    if "const" in schema or "enum" in schema:
        return chance.choice(schema.get("enum", [schema.get("const")]))
    kind = schema.get("type")
    if kind == "object":
        return _object(schema, chance, definitions=definitions, level=level)
    if kind == "array":
        some = range(chance.choice((0, 1, 1, 2, 3)))
        return [of_schema(schema.get("items"), chance, definitions=definitions, level=level + 1) for _ in some]
    scalars: dict[str, Sequence[Any]] = {
        "string": STRINGS, "integer": INTEGERS, "number": INTEGERS + NUMBERS, "boolean": (True, False), "null": (None,),
    }  # fmt: skip
    return chance.choice(scalars[kind]) if kind in scalars else hostile(chance)


def _object(schema: dict[str, Any], chance: Random, *, definitions: dict[str, Any], level: int) -> dict[str, Any]:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    value = {
        name: of_schema(part, chance, definitions=definitions, level=level + 1)
        for name, part in properties.items()
        if name in required or chance.random() < 0.3
    }
    if isinstance(more := schema.get("additionalProperties"), dict) or not properties:
        name = chance.choice(STRINGS[:8])
        value[name] = of_schema(more or {}, chance, definitions=definitions, level=level + 1)
    return value


def request(number: int, *, seed: int) -> Request:
    """Number `number` of this seed's requests."""
    if number < len(CASES):
        case = CASES[number]
        return Request(number, case.name, case.path, spelled(case.body).encode(), times=case.times)
    chance = Random(f"{seed}:{number}")
    (path,) = chance.choices(list(SHARES), weights=list(SHARES.values()))
    known = all_fields() if chance.random() < 0.08 else fields(path)
    weights = [REACH_THE_ENGINE if field.name in SOUND else 1 for field in known]
    drawn = chance.choices(known, weights=weights, k=chance.choice((1, 1, 2, 2, 3)))
    values = {field.name: field.draw(chance) for field in drawn}
    if path in STREAMING and chance.random() < 0.3:
        values.setdefault("stream", True)
    if "top_logprobs" in values and path == CHAT:
        values.setdefault("logprobs", True)
    if "tool_choice" in values or chance.random() < 0.03:
        values.setdefault("tools", SOUND["tools"](chance))
    by_worker = path == GENERATE and chance.random() < 0.1
    name = "+".join(values)
    return Request(number, name, path, _body(path, values, chance), by_worker=by_worker)


def _body(path: str, values: dict[str, Any], chance: Random) -> bytes:
    if path == GENERATE:
        params = _object_of({"max_tokens": 4}, values, chance)
        ids = (
            [chance.randrange(512) for _ in range(chance.choice((1, 3, 50, 600)))] if chance.random() < 0.1 else [5, 6]
        )
        outer = {"prompt_ids": hostile(chance) if chance.random() < 0.03 else ids, "sampling_params": params}
        return _broken(spelled(outer).encode(), chance)
    plain = PLAIN[path] | ({} if chance.random() < 0.5 else AFTER_REASONING[path])
    return _broken(spelled(_object_of(plain, values, chance)).encode(), chance)


def _object_of(plain: dict[str, Any], values: dict[str, Any], chance: Random) -> Pairs:
    """Seldom a name comes twice, or is written as escapes: both mean the same to a JSON parser, not to a search for words."""
    items = list((plain | values).items())
    if chance.random() < 0.04:
        name = chance.choice([name for name, _ in items])
        items.append((name, hostile(chance)))
    if chance.random() < 0.03:
        chance.shuffle(items)
    escaped = frozenset(values) if chance.random() < 0.06 else frozenset[str]()
    return Pairs(tuple(items), escaped)


def _broken(body: bytes, chance: Random) -> bytes:
    """Seldom the bytes themselves are wrong."""
    if chance.random() > 0.015:
        return body
    at = chance.randrange(len(body))
    return chance.choice(
        (body[:at], body[:at] + b"\xff" + body[at:], b"\xef\xbb\xbf" + body, b"", body + b"{}", b"[" + body)
    )


def shown(body: bytes, *, most: int = 600) -> str:
    """The body for a reader: runs of a character or of a part are counted, and the middle of a long one is left out."""
    text = body.decode(errors="backslashreplace")
    text = re.sub(r"(.{1,12}?)\1{30,}", lambda run: f"{run[1]}...({len(run[0]) // len(run[1])} times)", text[:20_000])
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]} ({len(body)} bytes)"
