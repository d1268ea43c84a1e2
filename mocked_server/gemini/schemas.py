"""Google's schemas (a part of OpenAPI 3.0) as JSON schemas. Pure functions, used by `chat_request`."""

from __future__ import annotations

from typing import Any

from pydantic.alias_generators import to_camel

LEFT_OUT = frozenset({"propertyOrdering", "nullable", "example", "format"})
NUMBERS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})
"""64-bit numbers, which Google's JSON spells as strings."""


def json_schema_of(schema: Any) -> Any:
    """`{"type": "STRING", "nullable": true}` -> `{"type": ["string", "null"]}`, and so on within."""
    if not isinstance(schema, dict):
        return schema
    fields = {
        to_camel(name) if "_" in name and not name.startswith("$") else name: value for name, value in schema.items()
    }
    told = {name: _value(name, value) for name, value in fields.items() if name not in LEFT_OUT and value is not None}
    if told.get("type") == "type_unspecified":
        del told["type"]
    if fields.get("nullable") is True:
        if isinstance(told.get("type"), str):
            told["type"] = [told["type"], "null"]
        if isinstance(told.get("enum"), list):
            told["enum"] = [*told["enum"], None]
    return told


def _value(name: str, value: Any) -> Any:
    if name == "type" and isinstance(value, str):
        return value.lower()
    if name in NUMBERS and isinstance(value, str) and value.isdecimal() and len(value) < 20:
        return int(value)
    if name in ("properties", "$defs", "defs") and isinstance(value, dict):
        return {each: json_schema_of(part) for each, part in value.items()}
    if name in ("items", "additionalProperties"):
        return json_schema_of(value)
    if name in ("anyOf", "prefixItems") and isinstance(value, list):
        return [json_schema_of(part) for part in value]
    return value
