"""A plain typed function as a tool: schema from signature and docstring, arguments of its types, threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from agents.tools.function_tool import FunctionTool, function_tool
from agents.tools.toolbox import Toolbox, ToolFault
from buffers.errors import ToolError
from tests.support.patience import PATIENCE_S


class Place(BaseModel):
    """Somewhere."""

    city: str


@dataclass
class Weather:
    """How it is."""

    city: str
    degrees: float


@function_tool
def weather(place: Place, unit: Literal["C", "F"] = "C", days: Annotated[int, Field(ge=1, le=7)] = 1) -> list[Weather]:
    """Tells the weather.

    More about it.

    Args:
        place: where.
        unit (str): of the degrees.

    Returns:
        how it is.
    """
    return [Weather(place.city, 20.5 if unit == "C" else 68.9)] * days


def numpy_style(query: str) -> str:
    """Finds text.

    Parameters
    ----------
    query : str
        what to find
    """
    return query


async def plain(copy: str, model_config: str = "") -> str:
    """Echoes; its parameters are named like something that pydantic has."""
    await asyncio.sleep(0)
    return copy + model_config


def test_the_schema_says_what_signature_and_docstring_say():
    assert weather.tool_schema is not None
    function = weather.tool_schema.as_openai()["function"]
    assert function["name"] == "weather" and function["description"] == "Tells the weather.\n\nMore about it."
    parameters = function["parameters"]
    assert parameters["required"] == ["place"] and parameters["additionalProperties"] is False
    assert parameters["properties"]["unit"] == {
        "type": "string",
        "enum": ["C", "F"],
        "default": "C",
        "description": "of the degrees.",
    }
    assert parameters["properties"]["place"]["description"] == "where."
    assert parameters["$defs"]["Place"]["properties"] == {"city": {"type": "string"}}
    assert "title" not in parameters


def test_numpy_docstrings_and_undecorated_functions_do():
    schema = FunctionTool(numpy_style).tool_schema
    assert schema is not None and schema.as_openai() == {
        "type": "function",
        "function": {
            "name": "numpy_style",
            "description": "Finds text.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string", "description": "what to find"}},
                "required": ["query"],
                "additionalProperties": False,
            },
        },
    }


async def test_arguments_arrive_in_their_types_and_results_as_text():
    async with Toolbox([weather, FunctionTool(plain, name="echo")]).open() as tools:
        outcome = await tools.call("weather", '{"place": {"city": "Bonn"}, "days": 2}')
        assert outcome.text == '[{"city":"Bonn","degrees":20.5},{"city":"Bonn","degrees":20.5}]'
        assert (await tools.call("echo", {"copy": "é", "model_config": "!"})).text == "é!"
        for arguments, rule in [
            ({"place": {"city": 3}}, "place.city: 3 is not of type 'string'"),
            ({"place": {"city": "B"}, "days": 9}, "days: 9 is greater than the maximum of 7"),
            ({"place": {"city": "B"}, "unit": "K"}, "unit: 'K' is not one of ['C', 'F']"),
            ({"place": {"city": "B"}, "day": 1}, "'day' was unexpected"),
        ]:
            outcome = await tools.call("weather", arguments)
            assert outcome.error is ToolFault.BAD_ARGUMENTS and rule in outcome.text
    assert weather(Place(city="Bonn"))[0].degrees == 20.5, "and it is still a function"


@pytest.mark.parametrize(
    ("function", "rule"),
    [
        (lambda query: query, "parameter query of tool <lambda> must be annotated"),
        (lambda *rest: rest, "parameter rest of tool <lambda> must have a name"),
    ],
)
def test_a_function_without_a_schema_is_refused(function, rule):
    with pytest.raises(ToolError, match=rule):
        FunctionTool(function)


def test_a_type_that_json_cannot_carry_is_refused():
    def wait(lock: threading.Lock, rest: Iterator[int]) -> None: ...

    with pytest.raises(ToolError, match="parameters of tool wait must be types that JSON can carry"):
        FunctionTool(wait)


@pytest.mark.seconds
async def test_a_hanging_function_stops_neither_the_loop_nor_others():
    ends, started = threading.Event(), threading.Semaphore(0)

    def hang(number: int) -> str:
        """Waits."""
        started.release()
        ends.wait(PATIENCE_S)
        return str(number)

    def quick() -> str:
        """Answers."""
        return "quick"

    async with Toolbox([FunctionTool(hang), FunctionTool(quick)], call_deadline_s=1.0).open() as tools:
        calls = [tools.call("hang", {"number": number}) for number in range(80)]
        *hanging, answered = await asyncio.gather(*calls, tools.call("quick", {}))
        ends.set()
    assert {outcome.error for outcome in hanging} == {ToolFault.DEADLINE}
    assert answered.text == "quick"
    num_started = sum(started.acquire(blocking=False) for _ in range(80))
    assert num_started == 64, "no more threads than that are left behind"


async def test_a_function_takes_no_create_kwargs():
    with pytest.raises(ToolError, match=r"takes no create_kwargs, got \['a'\]"):
        async with Toolbox([FunctionTool(numpy_style)]).open(tools_kwargs={"numpy_style": {"create_kwargs": {"a": 1}}}):
            pass
