"""Values for the fields of a request: sound ones, wrong ones, and how they are spelled as JSON.

Used by `tests.fuzz.drawn_requests`. Everything is drawn from a `random.Random` that the caller seeds: the same seed
gives the same values. Spelling is our own, as `json.dumps` cannot say `1e400`, a name twice, or a name as escapes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

VOCABULARY = 512
"""Tokens of the tiny model."""
MAX_MODEL_LEN = 512
TURNS_DEEP = 120
"""Below the server's own bound of 128."""


@dataclass(frozen=True, slots=True)
class Raw:
    """JSON text as it is."""

    text: str


@dataclass(frozen=True, slots=True)
class Pairs:
    """An object whose names may come twice, or be spelled as escapes."""

    items: tuple[tuple[str, Any], ...]
    escaped: frozenset[str] = frozenset()


def spelled(value: Any) -> str:
    """The value as JSON text. Lone surrogates and control characters are escapes, as `json.dumps` writes them."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, Pairs):
        names = [escapes(name) if name in value.escaped else json.dumps(name) for name, _ in value.items]
        return "{" + ",".join(f"{name}:{spelled(part)}" for name, (_, part) in zip(names, value.items)) + "}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{json.dumps(str(name))}:{spelled(part)}" for name, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(spelled, value)) + "]"
    return json.dumps(value)


def escapes(name: str) -> str:
    """A JSON string in which each character is an escape: `"\\u006e"` for `n`."""
    return '"' + "".join(f"\\u{ord(character):04x}" for character in name) + '"'


def nested(levels: int, *, inside: Any = 1, name: str = "a") -> Any:
    """Objects in objects."""
    for _ in range(levels):
        inside = {name: inside}
    return inside


# Wrong values

INTEGERS = (
    -1, 0, 1, 2, 3, 15, 16, 17, 19, 20, 21, 63, 64, 65, 127, 128, 129, VOCABULARY - 1, VOCABULARY, VOCABULARY + 1,
    1000, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**70,
    -2, -5, -(2**31), -(2**31) - 1, -(2**63), -(2**63) - 1, -(2**70), 10**30,
)  # fmt: skip
NUMBERS = (
    0.0, -0.0, 0.5, 1.0, 1.5, -1.5, 2.0, 1e-45, 1e-7, 1e7, 3.5e38, 1e308, Raw("NaN"), Raw("Infinity"), Raw("-Infinity"),
    Raw("1e400"), Raw("-1e400"), Raw("1e5"), Raw("-0"), Raw("1E-400"),
)  # fmt: skip
STRINGS = (
    "", " ", "\n", "\x00", "a", "hello", "\ud800", "a\udfffb", "\U0001f600", "é" * 50, "x" * 3000, "a b " * 500,
    "<|im_end|>", "<|im_start|>assistant\n", "<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f"',
    "true", "null", "NaN", "12", "-1", "[1]", "{}", "../../etc", "%s%n{0}{a!r}", "{{ 1/0 }}", "auto", "none", "\u202e",
)  # fmt: skip


def hostile(chance: Random) -> Any:
    """A value that belongs nowhere, or at the border of what belongs."""
    kind = chance.randrange(12)
    if kind < 4:
        return chance.choice(INTEGERS)
    if kind < 6:
        return chance.choice(NUMBERS)
    if kind < 8:
        return chance.choice(STRINGS)
    return chance.choice((_wrong_list, _wrong_object, _wrong_object, _wrong_constant))(chance)


def _wrong_constant(chance: Random) -> Any:
    return chance.choice((None, True, False))


def _wrong_list(chance: Random) -> Any:
    scalar = chance.choice((INTEGERS, NUMBERS, STRINGS, (None, True, [], {})))
    return [chance.choice(scalar) for _ in range(chance.choice((0, 1, 1, 2, 5, 300)))]


def _wrong_object(chance: Random) -> Any:
    if chance.random() < 0.2:
        return nested(chance.choice((2, 30, TURNS_DEEP)), inside=chance.choice(STRINGS))
    return {chance.choice(STRINGS[:12]): chance.choice(INTEGERS + STRINGS) for _ in range(chance.choice((0, 1, 2, 40)))}


def spoilt(value: Any, chance: Random) -> Any:
    """The value with one of its parts, at any depth, replaced, removed or doubled."""
    if isinstance(value, dict) and value and chance.random() < 0.8:
        name = chance.choice(list(value))
        kind = chance.random()
        if kind < 0.15:
            return {key: part for key, part in value.items() if key != name}
        if kind < 0.25:
            return {**value, chance.choice(STRINGS): hostile(chance)}
        return {**value, name: spoilt(value[name], chance)}
    if isinstance(value, list) and value and chance.random() < 0.8:
        index = chance.randrange(len(value))
        if chance.random() < 0.15:
            return [*value, value[index]]
        return [*value[:index], spoilt(value[index], chance), *value[index + 1 :]]
    return hostile(chance)


# Sound values, by the name of their field

SCHEMAS: tuple[Any, ...] = (
    {}, True, False, {"type": "object"}, {"type": "string"}, {"type": "integer"}, {"type": "null"}, {"$ref": "#"},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, {"$ref": "#/nowhere"},
    {"$defs": {"x": {"$ref": "#/$defs/x"}}, "$ref": "#/$defs/x"}, {"$ref": "http://127.0.0.1:9/schema"},
    {"$defs": {"x": {"anyOf": [{"$ref": "#/$defs/y"}]}, "y": {"$ref": "#/$defs/x"}}, "$ref": "#/$defs/x"},
    {"type": "array", "items": {"$ref": "#"}}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {"type": "array", "minItems": 1000, "items": {"type": "null"}}, {"type": "array", "minItems": 2, "maxItems": 1},
    {"enum": []}, {"enum": [1, "a", None]}, {"enum": ["\ud800"]}, {"const": Raw("NaN")}, {"anyOf": []}, {"oneOf": [{}]},
    {"not": {}}, {"allOf": [{"type": "string"}, {"type": "integer"}]}, {"type": ["string", "null"]}, {"type": "nothing"},
    {"type": "string", "pattern": "("}, {"type": "string", "pattern": "^(a+)+$"}, {"type": "string", "pattern": "\\d{2}"},
    {"type": "string", "pattern": "[]"}, {"type": "string", "pattern": "a{5000}"}, {"type": "string", "pattern": "$^"},
    {"type": "string", "minLength": 2**31}, {"type": "string", "minLength": 3, "maxLength": 1},
    {"type": "string", "format": "date"},
    {"type": "string", "minLength": -1}, {"type": "integer", "minimum": 2, "maximum": 1}, {"type": "number", "multipleOf": 0},
    {"type": "integer", "minimum": 2**70}, {"type": "integer", "minimum": Raw("1e400")}, {"type": "number", "minimum": 0.5},
    {"type": "object", "propertyNames": False, "minProperties": 1}, {"type": "object", "properties": {"\ud800": {}}},
    {"type": "object", "properties": {"": {}}, "required": [""]}, {"type": "object", "required": ["missing"]},
    {"type": "object", "patternProperties": {"^x(": {}}}, {"type": "object", "additionalProperties": {"$ref": "#"}},
    {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(60)}}, nested(60, name="items"),
    nested(100, inside={"type": "string"}, name="anyOf"), {"type": "object", "properties": []}, [], "{}", "{", 1,
)  # fmt: skip
REGEXES = (
    "a", "", "a*", "[ab]{2}", "(a|b)+", "(", ")", "[", "\\", "(?=a)b", "\\1", "(?P<x>a)(?P=x)", "a{3,1}", "a{99999}", "^$",
    "\x00", "\ud800", "(((a{0,50}){0,50}){0,50})", "[^\\s\\S]", "$a", "(?i)a", "\\p{L}", "a" * 2000, "(" * 300 + ")" * 300,
    ".*", "[\U0001f600]", "\\bx\\B", "x" + "|x" * 500,
)  # fmt: skip
GRAMMARS = (
    'root ::= "a"', 'root ::= "a" | root', 'root ::= root "a" | root', "root ::= root", 'root ::= ""', "", "root", "root ::=",
    'root ::= "yes" | "no"', 'start: "a"', "root ::= nothing", 'root ::= [a-z]{1000}', 'root ::= "\ud800"', "root ::= [z-a]",
    'root ::= a b\na ::= b\nb ::= a', 'root ::= "a"\nroot ::= "b"', "root ::= " + "(" * 200 + '"a"' + ")" * 200, '?start: "a"+',
    'SELECT ::= "x"', "root ::= [^\\x00-\\U0010ffff]", 'root ::= ("" | "")*', 'root ::= (("a"*)*)*', "%ignore x",
)  # fmt: skip
TAGS = (
    {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f>"]}, {"structures": [], "triggers": []},
    {"structures": [{"begin": "", "schema": {"$ref": "#"}, "end": ""}], "triggers": [""]},
    {"type": "structural_tag", "format": {"type": "any_text"}}, {"type": "structural_tag", "format": {"type": "nothing"}},
    {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"$ref": "#"}}}, {},
    {"format": {"type": "sequence", "elements": []}}, {"format": {"type": "or", "elements": []}},
    {"format": {"type": "const_string", "value": ""}}, {"format": {"type": "triggered_tags", "triggers": [], "tags": []}},
)  # fmt: skip


def token_id(chance: Random) -> int:
    """Mostly one of the vocabulary."""
    return chance.randrange(VOCABULARY) if chance.random() < 0.85 else chance.choice(INTEGERS)


def schema(chance: Random) -> Any:
    """A JSON schema, seldom a good one."""
    return spoilt(chance.choice(SCHEMAS), chance) if chance.random() < 0.2 else chance.choice(SCHEMAS)


def structured(chance: Random) -> dict[str, Any]:
    """vLLM's `structured_outputs`: one kind, seldom two."""
    kinds: dict[str, Callable[[], Any]] = {
        "json": lambda: chance.choice((schema(chance), spelled(schema(chance)))),
        "regex": lambda: chance.choice(REGEXES),
        "grammar": lambda: chance.choice(GRAMMARS),
        "choice": lambda: [chance.choice(STRINGS) for _ in range(chance.choice((0, 1, 2, 3, 200)))],
        "json_object": lambda: chance.choice((True, False)),
        "structural_tag": lambda: spelled(chance.choice(TAGS)),
    }
    names = chance.sample(list(kinds), k=2 if chance.random() < 0.1 else 1)
    found = {name: kinds[name]() for name in names}
    if chance.random() < 0.15:
        more = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern", "_backend")
        found[chance.choice(more)] = chance.choice((True, False, "", "(", "[\n ]*", "guidance", "outlines", None))
    return found


def response_format(chance: Random) -> dict[str, Any]:
    """OpenAI's form of the same."""
    kind = chance.choice(("json_schema", "json_schema", "json_object", "text", "structural_tag", "nothing"))
    if kind == "json_schema":
        name = chance.choice(("answer", "", "\ud800"))
        return {"type": kind, "json_schema": {"name": name, "schema": schema(chance), "strict": chance.random() < 0.5}}
    return {"type": kind, **(chance.choice(TAGS) if kind == "structural_tag" else {})}


def tool_choice(chance: Random) -> Any:
    """Chat's; other dialects have their own."""
    named = {"type": "function", "function": {"name": chance.choice(("f", "g", "", "nothing", "\ud800"))}}
    return chance.choice(("none", "auto", "required", named, named))


def tools(chance: Random) -> list[dict[str, Any]]:
    """One or a few functions."""
    return [
        {"type": "function", "function": {"name": chance.choice(("f", "f", "g", "", "\ud800")), "parameters": schema(chance)}}
        for _ in range(chance.choice((0, 1, 1, 2, 20)))
    ]  # fmt: skip


def messages(chance: Random) -> list[dict[str, Any]]:
    """A conversation of any roles in any order."""
    some = []
    for _ in range(chance.choice((0, 1, 2, 3, 6))):
        message: dict[str, Any] = {"role": chance.choice(ROLES), "content": chance.choice((*STRINGS, None, [], PARTS))}
        if message["role"] == "assistant" and chance.random() < 0.5:
            function = {"name": chance.choice(STRINGS), "arguments": chance.choice((*STRINGS, '{"a": 1}', "{}"))}
            message["tool_calls"] = [{"id": chance.choice(STRINGS), "type": "function", "function": function}]
        some.append(message)
    return some


ROLES = ("user", "user", "assistant", "assistant", "system", "developer", "tool", "function", "nobody", "")
PARTS = [{"type": "text", "text": "Where?"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
XARGS = ("a", "kv_transfer_params", "numbers_only", "truncate", "")
TEMPLATE_NAMES = (
    "enable_thinking", "messages", "tools", "add_generation_prompt", "raise_exception", "namespace", "text", "a", "tokenize",
    "continue_final_message", "return_dict", "chat_template", "conversation", "padding", "truncation", "max_length",
)  # fmt: skip
SOUND: dict[str, Callable[[Random], Any]] = {
    "logit_bias": lambda c: {
        str(token_id(c)): c.choice((0, 1, 5, 100, -100, 0.5, 101, *NUMBERS)) for _ in range(c.choice((1, 3, 300)))
    },
    "allowed_token_ids": lambda c: [token_id(c) for _ in range(c.choice((0, 1, 2, 40)))],
    "stop_token_ids": lambda c: [token_id(c) for _ in range(c.choice((0, 1, 2, 40)))],
    "logprob_token_ids": lambda c: [token_id(c) for _ in range(c.choice((1, 2, 40)))],
    "bad_words": lambda c: [c.choice(STRINGS) for _ in range(c.choice((1, 2, 40)))],
    "stop": lambda c: c.choice((c.choice(STRINGS), [c.choice(STRINGS) for _ in range(c.choice((0, 1, 4, 5)))])),
    "stop_sequences": lambda c: [c.choice(STRINGS) for _ in range(c.choice((0, 1, 4)))],
    "min_tokens": lambda c: c.choice((0, 1, 3, 8, 9, 512)),
    "max_tokens": lambda c: c.choice((1, 2, 4, 8, 9, 511, 512, 513, 0, 2**31)),
    "max_completion_tokens": lambda c: c.choice((1, 2, 8, 0, -1, 2**63)),
    "max_output_tokens": lambda c: c.choice((1, 2, 8, 0, -1, 2**63)),
    "n": lambda c: c.choice((1, 2, 3, 8, 16, 17, 0, -1, 128, 16385)),
    "seed": lambda c: c.choice((0, 7, -1, 2**31, 2**63 - 1, -(2**63), 2**63, 2**64, None)),
    "top_logprobs": lambda c: c.choice((0, 1, 5, 20, 21, -1, 512, 100_000)),
    "logprobs": lambda c: c.choice((True, False, 0, 1, 5, 20, 21, -1)),
    "prompt_logprobs": lambda c: c.choice((None, 0, 1, -1, 512)),
    "top_k": lambda c: c.choice((0, -1, 1, 50, 512, 2**31, 2**63)),
    "top_p": lambda c: c.choice((1.0, 0.5, 0.0, 1e-9, 1.1, -0.1)),
    "min_p": lambda c: c.choice((0.0, 0.5, 1.0, 1.1)),
    "temperature": lambda c: c.choice((0.0, 1.0, 1e-9, 2.0, 100.0, -1.0)),
    "presence_penalty": lambda c: c.choice((0.0, 2.0, -2.0, 2.1, 1e30)),
    "frequency_penalty": lambda c: c.choice((0.0, 2.0, -2.0, 2.1, 1e30)),
    "repetition_penalty": lambda c: c.choice((1.0, 0.0, 1e-30, 2.0, 1e30, -1.0)),
    "messages": messages,
    "prompt": lambda c: c.choice((c.choice(STRINGS), [token_id(c)] * 3, [[5], [token_id(c)]], ["a", c.choice(STRINGS)], [])),
    "structured_outputs": structured,
    "response_format": response_format,
    "tools": tools,
    "tool_choice": tool_choice,
    "vllm_xargs": lambda c: {c.choice(XARGS): c.choice((1, "x", [1], 1.5, 2**70))},
    "chat_template_kwargs": lambda c: {c.choice(TEMPLATE_NAMES): hostile(c)},
    "thinking_token_budget": lambda c: c.choice((0, 1, -1, 2**31)),
    "priority": lambda c: c.choice((0, 1, -1, 2**31, 2**63 - 1, -(2**63))),
    "repetition_detection": lambda c: {
        "max_pattern_size": c.choice((0, 1, 4, 2**31, -1)), "min_pattern_size": c.choice((0, 1, 5)),
        "min_count": c.choice((0, 2, -1)),
    },
    "stream_options": lambda c: c.choice(({"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}, {})),
    "stream_interval": lambda c: c.choice((1, 2, 0, -1, 2**63)),
    "request_id": lambda c: c.choice(("same", "", "a" * 300, "é", "\ud800", "x/y")),
    "cache_salt": lambda c: c.choice(("salt", "x" * 1025, "\ud800", "")),
    "chat_template": lambda c: c.choice(("{{ 1/0 }}", "{% for x in range(9) %}a{% endfor %}", "{{", "")),
    "reasoning_effort": lambda c: c.choice(("none", "low", "high", "max", "nothing")),
}  # fmt: skip
"""Field -> a value of about the right form; borders of what is allowed are among them."""
