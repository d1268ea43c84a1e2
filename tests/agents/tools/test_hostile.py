"""Tools that misbehave, and arguments that are meant to hurt: each is an outcome of its own call, and others go on."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from agents.tools import arguments
from agents.tools.base_tool import BaseTool
from agents.tools.function_tool import FunctionTool
from agents.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from agents.tools.toolbox import Toolbox, ToolFault
from buffers.errors import ToolError
from tests.support.patience import PATIENCE_S


def schema(name: str, properties: dict[str, Any], **more: Any) -> OpenAIFunctionToolSchema:
    parameters = {"type": "object", "properties": properties, **more}
    return OpenAIFunctionToolSchema.model_validate({"function": {"name": name, "parameters": parameters}})


class Unshown:
    """Neither as text nor in the debugger."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


class UnshownError(BaseException):
    def __str__(self) -> str:
        raise RuntimeError("no")


class Does(BaseTool):
    """Raises or returns what it is told."""

    def __init__(self, what: object, **kwargs: Any) -> None:
        super().__init__({}, kwargs.get("tool_schema") or schema("tool", {}))
        self._what = what

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        if isinstance(self._what, BaseException):
            raise self._what
        return self._what


@pytest.mark.parametrize(
    ("what", "fault", "words"),
    [
        (BaseException("base"), ToolFault.RAISED, "BaseException: base"),
        (GeneratorExit(), ToolFault.RAISED, "GeneratorExit"),
        (BaseExceptionGroup("several", [SystemExit(1)]), ToolFault.RAISED, "several"),
        (UnshownError(), ToolFault.RAISED, "a UnshownError that cannot be shown"),
        (Unshown(), ToolFault.BAD_RESULT, "a Unshown that cannot be shown"),
        ((ToolResponse(text="a"), 10**400, {}), ToolFault.BAD_RESULT, "its interface forbids"),
        ((ToolResponse.model_construct(text=5), 0.0, {}), ToolFault.BAD_RESULT, "its interface forbids"),
    ],
)
async def test_whatever_a_tool_raises_or_returns_is_its_calls_outcome(what, fault, words):
    async with Toolbox([Does(what)]).open() as tools:
        outcome = await tools.call("tool", "{}")
    assert (outcome.ok, outcome.error) == (False, fault)
    assert words in outcome.text


async def test_half_a_surrogate_pair_in_an_answer_reaches_no_tokenizer():
    async with Toolbox([Does((ToolResponse.model_construct(text="a\ud800b"), 0.0, {}))]).open() as tools:
        assert (await tools.call("tool", "{}")).text == "a?b"


def test_a_keyboard_interrupt_that_a_tool_raises_in_a_worker_ends_nothing_but_its_call():
    """A worker's event loop does not run in the main thread, which alone is sent Ctrl-C."""
    outcomes: list[Any] = []

    async def call() -> None:
        async with Toolbox([Does(KeyboardInterrupt())]).open() as tools:
            outcomes.append(await tools.call("tool", "{}"))

    thread = threading.Thread(target=lambda: asyncio.run(call()))
    thread.start()
    thread.join()
    assert [outcome.error for outcome in outcomes] == [ToolFault.RAISED]


async def test_a_function_that_raises_a_cancellation_gives_its_slot_back():
    def cancels() -> str:
        raise asyncio.CancelledError

    tool = FunctionTool(cancels)
    async with Toolbox([tool]).open() as tools:
        outcome = await tools.call("cancels", "{}")
    assert (outcome.error, outcome.text) == (
        ToolFault.RAISED,
        "Error: cancels failed: RuntimeError: CancelledError()",
    )
    (slots,) = tool._threads._slots.values()
    assert slots._value == tool._threads._limit


async def fault_of(given: Any, *, properties: dict[str, Any], name: Any = "tool", **more: Any) -> ToolFault | None:
    tool = Does((ToolResponse(text="ok"), 0.0, {}), tool_schema=schema("tool", properties, **more))
    async with Toolbox([tool]).open() as tools:
        return (await tools.call(name, given)).error


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (None, ToolFault.BAD_JSON),
        ([1], ToolFault.BAD_JSON),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", ToolFault.BAD_JSON),
        ('{"a": ' + "9" * 10_000 + "}", ToolFault.BAD_JSON),
        ('{"a": 1e999}', ToolFault.BAD_JSON),
        ('{"a": ' + "9" * 400 + "}", ToolFault.BAD_ARGUMENTS),  # no float holds it
        ('{"b": "' + "x" * 10_000_000 + '"}', None),
    ],
)
async def test_arguments_that_are_no_json_or_too_large_are_the_models_fault(given, fault):
    assert await fault_of(given, properties={"a": {"multipleOf": 0.5}}) == fault


async def test_a_name_that_is_no_text_is_an_unknown_tool():
    assert await fault_of("{}", properties={}, name=["tool"]) == ToolFault.UNKNOWN_TOOL


@pytest.mark.parametrize(
    ("given", "more"),
    [
        ({"a": "a" * 400 + "b"}, {"properties": {"a": {"type": "string", "pattern": "^(a|aa)+$"}}}),
        ({"a" * 400 + "b": 1}, {"properties": {}, "patternProperties": {"^(a|aa)+$": {}}}),
        (
            {"a": json.loads("[" * 40 + "]" * 40)},
            {
                "properties": {"a": {"$ref": "#/$defs/x"}},
                "$defs": {"x": {"anyOf": [{"minItems": 1, "items": {"$ref": "#/$defs/x"}}] * 2}},
            },
        ),
    ],
)
async def test_a_check_that_takes_too_long_is_given_up(monkeypatch, given, more):
    monkeypatch.setattr(arguments, "CHECK_S", 0.05)
    properties = more.pop("properties")
    assert await fault_of(json.dumps(given), properties=properties, **more) == ToolFault.BAD_ARGUMENTS


async def test_other_episodes_go_on_while_arguments_are_checked(monkeypatch):
    checked, seen = threading.Event(), threading.Event()

    def check(*_: object, **__: object) -> None:
        seen.set()
        assert checked.wait(PATIENCE_S)

    monkeypatch.setattr("agents.tools.toolbox.check_arguments", check)
    call = asyncio.create_task(fault_of("{}", properties={}))
    await asyncio.to_thread(seen.wait, 30)
    checked.set()  # by the event loop, which was not held up
    assert await call is None


@pytest.mark.parametrize(
    ("items", "unique"),
    [
        ([{"a": 1}, {"a": 1.0}], False),
        ([1, True, [1], [True], "1", {"a": [1]}, {"a": [True]}, None], True),
        ([{"n": number} for number in range(20_000)], True),  # two by two that takes minutes
    ],
)
async def test_unique_items_are_told_apart_as_json_schema_does(items, unique):
    fault = await fault_of(json.dumps({"a": items}), properties={"a": {"uniqueItems": True}})
    assert (fault is None) == unique


async def test_keywords_with_patterns_hold():
    properties: dict[str, Any] = {"a": {"pattern": "^[0-9]+$"}}
    more = {"patternProperties": {"^x_": {"type": "integer"}}, "additionalProperties": False}
    for given, fits in [
        ({"a": "12"}, True),
        ({"a": "1a"}, False),
        ({"a": 5}, True),
        ({"x_1": 1}, True),
        ({"x_1": "1"}, False),
        ({"y": 1}, False),
    ]:
        assert (await fault_of(json.dumps(given), properties=properties, **more) is None) == fits, given
    typed = {"additionalProperties": {"type": "integer"}}
    assert await fault_of('{"y": 1}', properties={}, **typed) is None
    assert await fault_of('{"y": "1"}', properties={}, **typed) == ToolFault.BAD_ARGUMENTS


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        ({"patternProperties": {"a": {}}, "unevaluatedProperties": False}, "is not supported"),
        ({"allOf": [json.loads('{"not": ' * 900 + "{}" + "}" * 900)]}, "nested less deeply"),
    ],
)
def test_a_schema_that_cannot_be_checked_in_time_is_refused(more, rule):
    with pytest.raises(ToolError, match=rule):
        Toolbox([Does(None, tool_schema=schema("tool", {}, **more))])
