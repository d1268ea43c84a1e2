"""What a model wrote as a call's arguments: read as JSON, and held against the schema that the model was shown.

Used by `agents.tools.toolbox`. Invariants: the result is a dict that fits the tool's schema; everything else is a BadArguments with
words that the model can act on. A check ends within about `CHECK_S` of processor time, whatever the schema and the arguments are (a
pattern that backtracks, alternatives of alternatives), and other threads run meanwhile: jsonschema_rs 0.60 bounds patterns only,
and holds Python's lock for 40 s where 18 pairs of alternatives are chained. References to schemas elsewhere are never fetched.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any, NoReturn

import regex  # type: ignore[import-untyped]
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError, best_match
from jsonschema.validators import extend
from referencing import Registry
from referencing.exceptions import Unresolvable

from agents.tools.schemas import OpenAIFunctionToolSchema
from buffers.errors import ToolError

MAX_RULE_CHARS = 300
CHECK_S = 2.0
"""Seconds of one thread's processor time; a check that ends well takes a thousandth of it."""
SPEC = "https://json-schema.org/draft/2020-12"


class BadArguments(ValueError):
    """Arguments that no tool is called with; `is_json` tells a wrong form from wrong values."""

    def __init__(self, text: str, *, is_json: bool) -> None:
        super().__init__(text)
        self.is_json = is_json


class _TooLong(Exception):
    """The time for a check is over."""


def check_schema(schema: OpenAIFunctionToolSchema) -> None:
    """Raises ToolError when the parameters are no JSON Schema, which no arguments could be held against."""
    parameters = _parameters(schema)
    try:
        Draft202012Validator.check_schema(parameters)
        if _mentions(parameters, "unevaluatedProperties") and _mentions(parameters, "patternProperties"):
            raise SchemaError("unevaluatedProperties beside patternProperties is not supported")
    except SchemaError as error:
        raise ToolError(
            f"parameters of tool {schema.function.name} must be a JSON Schema ({SPEC}): {error.message[:MAX_RULE_CHARS]} "
            f"at {error.json_path}; correct its tool_schema"
        ) from None
    except RecursionError:
        raise ToolError(
            f"parameters of tool {schema.function.name:.100} must be nested less deeply; flatten them"
        ) from None


def read_arguments(given: str | Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as a dict; no text at all is none. Raises BadArguments."""
    if isinstance(given, Mapping):
        return dict(given)
    if not isinstance(given, str):
        raise BadArguments(f"the arguments must be a JSON object, got {type(given).__name__}", is_json=False)
    try:
        arguments = json.loads(given, parse_constant=_refuse, parse_float=_finite) if given.strip() else {}
    except (ValueError, RecursionError) as error:
        rule = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise BadArguments(f"the arguments must be JSON: {rule}", is_json=False) from None
    if not isinstance(arguments, dict):
        raise BadArguments(f"the arguments must be a JSON object, got {type(arguments).__name__}", is_json=False)
    return arguments


def check_arguments(arguments: dict[str, Any], *, schema: OpenAIFunctionToolSchema) -> None:
    """Raises BadArguments naming the one that fits worst, and what the tool takes."""
    ends = _ends.set(time.thread_time() + CHECK_S)
    try:
        worst = best_match(_Validator(_parameters(schema), registry=Registry()).iter_errors(arguments))
    except (RecursionError, _TooLong) as error:
        rule = "are nested too deeply" if isinstance(error, RecursionError) else "take too long to check; write less"
        raise BadArguments(f"the arguments {rule}", is_json=True) from None
    except ArithmeticError:
        raise BadArguments("the arguments hold a number that is too large", is_json=True) from None
    except Unresolvable as error:
        raise BadArguments(f"the tool's schema refers to what is not in it: {error}", is_json=True) from None
    except regex.error as error:
        raise BadArguments(f"a pattern of the tool's schema cannot be read: {error}", is_json=True) from None
    finally:
        _ends.reset(ends)
    if worst is not None:
        place = worst.json_path.removeprefix("$").removeprefix(".")
        rule = f"{place}: {_short(worst.message)}" if place else _short(worst.message)
        takes = ", ".join(schema.function.parameters.properties) or "nothing"
        raise BadArguments(f"{rule} (the tool takes: {takes})", is_json=True)


_ends: ContextVar[float] = ContextVar("_ends")
"""The time at which the present check has to end, by this thread's processor time."""
Keyword = Callable[[Any, Any, Any, Any], Iterable[ValidationError] | None]


def _left_s() -> float:
    left = _ends.get() - time.thread_time()
    if left <= 0.0:
        raise _TooLong
    return left


def _timed(
    keyword: Keyword, validator: object, value: object, instance: object, schema: object
) -> Iterator[ValidationError]:
    """The keyword's errors, looking at the clock before each of them."""
    _left_s()
    for error in keyword(validator, value, instance, schema) or ():
        _left_s()
        yield error


def _matches(pattern: str, text: str) -> bool:
    """Python's own `re` cannot be interrupted, nor do other threads run meanwhile."""
    try:
        return regex.search(pattern, text, timeout=_left_s(), concurrent=True) is not None
    except TimeoutError:
        raise _TooLong from None


def _pattern(validator: Any, pattern: str, instance: object, _: object) -> Iterator[ValidationError]:
    if isinstance(instance, str) and not _matches(pattern, instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(
    validator: Any, patterns: Mapping[str, Any], instance: object, _: object
) -> Iterator[ValidationError]:
    named = instance.items() if isinstance(instance, dict) else ()
    for pattern, subschema in patterns.items():
        for name, value in named:
            if _matches(pattern, name):
                yield from validator.descend(value, subschema, path=name, schema_path=pattern)


def _additional_properties(
    validator: Any, allowed: Any, instance: object, schema: Mapping[str, Any]
) -> Iterator[ValidationError]:
    named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    others = [name for name in instance if name not in named] if isinstance(instance, dict) else []
    extra = [name for name in others if not any(_matches(pattern, name) for pattern in patterns)]
    if isinstance(allowed, dict):
        for name in extra:
            yield from validator.descend(instance[name], allowed, path=name)  # type: ignore[index]
    elif not allowed and extra:
        listed = f"{', '.join(map(repr, extra))} {'was' if len(extra) == 1 else 'were'}"
        yield ValidationError(f"Additional properties are not allowed ({listed} unexpected)")


def _unique_items(validator: Any, unique: bool, instance: object, _: object) -> Iterator[ValidationError]:
    """Checks for equal items in linear time."""
    if unique and isinstance(instance, list) and len({_key(item) for item in instance}) < len(instance):
        yield ValidationError(f"{instance!r:.200} has non-unique elements")


def _key(value: object) -> object:
    """Equal for what JSON Schema calls equal: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, dict):
        return "object", frozenset((name, _key(item)) for name, item in value.items())
    if isinstance(value, list):
        return "list", *map(_key, value)
    return isinstance(value, bool), value


_OWN: dict[str, Keyword] = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "uniqueItems": _unique_items,
}
_Validator: Any = extend(
    Draft202012Validator,
    {name: partial(_timed, keyword) for name, keyword in {**Draft202012Validator.VALIDATORS, **_OWN}.items()},
)


def _mentions(schema: object, keyword: str) -> bool:
    if isinstance(schema, dict):
        return keyword in schema or any(_mentions(value, keyword) for value in schema.values())
    return isinstance(schema, list) and any(_mentions(value, keyword) for value in schema)


def _parameters(schema: OpenAIFunctionToolSchema) -> dict[str, Any]:
    return schema.function.parameters.model_dump(exclude_unset=True)


def _short(text: str) -> str:
    """The rule stands at the end, the value that breaks it at the start."""
    half = MAX_RULE_CHARS // 2
    return text if len(text) <= MAX_RULE_CHARS else f"{text[:half]} ... {text[-half:]}"


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _refuse(digits[:20])


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")
