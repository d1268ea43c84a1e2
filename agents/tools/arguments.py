"""What a model wrote as a call's arguments: read as JSON, and held against the schema that the model was shown.

Used by `agents.tools.episode_tools`. Invariant: whatever comes out is a dict that fits the tool's schema; everything else is a
BadArguments with words that the model can act on. References to schemas elsewhere are never fetched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from referencing import Registry
from referencing.exceptions import Unresolvable

from agents.tools.schemas import OpenAIFunctionToolSchema
from buffers.errors import ToolError

MAX_RULE_CHARS = 300
SPEC = "https://json-schema.org/draft/2020-12"


class BadArguments(ValueError):
    """Arguments that no tool is called with; `is_json` tells a wrong form from wrong values."""

    def __init__(self, text: str, *, is_json: bool) -> None:
        super().__init__(text)
        self.is_json = is_json


def check_schema(schema: OpenAIFunctionToolSchema) -> None:
    """Raises ToolError when the parameters are no JSON Schema, which no arguments could be held against."""
    try:
        Draft202012Validator.check_schema(_parameters(schema))
    except SchemaError as error:
        raise ToolError(
            f"parameters of tool {schema.function.name} must be a JSON Schema ({SPEC}): {error.message[:MAX_RULE_CHARS]} "
            f"at {error.json_path}; correct its tool_schema"
        ) from None


def read_arguments(given: str | Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as a dict; no text at all is none. Raises BadArguments."""
    if not isinstance(given, str):
        return dict(given)
    try:
        found = json.loads(given, parse_constant=_refuse) if given.strip() else {}
    except (ValueError, RecursionError) as error:
        rule = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise BadArguments(f"the arguments must be JSON: {rule}", is_json=False) from None
    if not isinstance(found, dict):
        raise BadArguments(f"the arguments must be a JSON object, got {type(found).__name__}", is_json=False)
    return found


def check_arguments(arguments: dict[str, Any], *, schema: OpenAIFunctionToolSchema) -> None:
    """Raises BadArguments naming the one that fits worst, and what the tool takes."""
    validator = Draft202012Validator(_parameters(schema), registry=Registry())
    try:
        worst = best_match(validator.iter_errors(arguments))
    except RecursionError:
        raise BadArguments("the arguments are nested too deeply", is_json=True) from None
    except Unresolvable as error:
        raise BadArguments(f"the tool's schema refers to what is not in it: {error}", is_json=True) from None
    if worst is not None:
        place = worst.json_path.removeprefix("$").removeprefix(".")
        rule = f"{place}: {_short(worst.message)}" if place else _short(worst.message)
        takes = ", ".join(schema.function.parameters.properties) or "nothing"
        raise BadArguments(f"{rule} (the tool takes: {takes})", is_json=True)


def _parameters(schema: OpenAIFunctionToolSchema) -> dict[str, Any]:
    return schema.function.parameters.model_dump(exclude_unset=True)


def _short(text: str) -> str:
    """The rule stands at the end, the value that breaks it at the start."""
    half = MAX_RULE_CHARS // 2
    return text if len(text) <= MAX_RULE_CHARS else f"{text[:half]} ... {text[-half:]}"


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")
