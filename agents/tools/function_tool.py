"""A plain typed function as a tool: `@function_tool` above it, or `function: module.function` in the tools' YAML.

Used by authors of functions that the model may call; loaded by `agents.tools.tool_file`. The schema comes from the signature
(pydantic) and the docstring (plain, Google, NumPy or reST): its first part describes the tool, its parameters' lines theirs.
Invariant: the function gets arguments of the types that it annotates, or is not called. A sync function runs in a thread. It keeps
nothing between calls: state for an episode needs a class (`agents.tools.base_tool`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, get_type_hints, overload

from docstring_parser import parse as parse_docstring
from pydantic import BaseModel, ConfigDict, Field, PydanticSchemaGenerationError, ValidationError, create_model
from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_json

from agents.tools.base_tool import BaseTool
from agents.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from buffers.errors import ToolError
from env_adapters.guarded_calls import Threads

Function = Callable[..., Any]


class _Untitled(GenerateJsonSchema):
    """The schema without the title that pydantic makes of each name: the model would read everything twice."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


class FunctionTool(BaseTool):
    """`function`, sync or async, as a tool named `name` (its own name)."""

    def __init__(self, function: Function, *, name: str | None = None, config: dict[str, Any] | None = None) -> None:
        self.function = function
        self._arguments = _arguments_model(function)
        self._threads = Threads()
        super().__init__(config or {}, _schema(function, self._arguments, name=name or function.__name__))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function, as it was before it became a tool."""
        return self.function(*args, **kwargs)

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """A function has no state for an episode, so it takes no `create_kwargs`."""
        if named := sorted(set(kwargs.get("create_kwargs", kwargs))):
            raise ToolError(f"tool {self.name} is a function and takes no create_kwargs, got {named}; write a class")
        return await super().create(instance_id)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Call the function; what it returns becomes text: a string as it is, anything else as JSON."""
        try:
            model = self._arguments.model_validate(parameters)
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise ToolError(f"arguments of {self.name}: {problems}") from None
        arguments = {str(field.alias): getattr(model, key) for key, field in type(model).model_fields.items()}
        if inspect.iscoroutinefunction(self.function):
            value = await self.function(**arguments)
        else:
            value = await self._threads.run(partial(self.function, **arguments))
            if inspect.isawaitable(value):  # an async function behind a decorator
                value = await value
        return _response(value), 0.0, {}


@overload
def function_tool(function: Function) -> FunctionTool: ...
@overload
def function_tool(*, name: str) -> Callable[[Function], FunctionTool]: ...
def function_tool(
    function: Function | None = None, *, name: str | None = None
) -> FunctionTool | Callable[[Function], FunctionTool]:
    """Decorator: `@function_tool`, or `@function_tool(name="...")`."""
    if function is not None:
        return FunctionTool(function, name=name)
    return partial(FunctionTool, name=name)


def _response(value: Any) -> ToolResponse:
    if isinstance(value, ToolResponse):
        return value
    if value is None:
        return ToolResponse(text="")
    return ToolResponse(text=value if isinstance(value, str) else to_json(value, fallback=str).decode())


def _arguments_model(function: Function) -> type[BaseModel]:
    """The function's parameters as a pydantic model. Raises ToolError naming the parameter that cannot be one."""
    described = {p.arg_name: p.description for p in parse_docstring(inspect.getdoc(function) or "").params}
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise _no_schema(function, error) from error
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ToolError(
                f"parameter {name} of tool {function.__name__} must have a name to call it by; remove * or /"
            )
        if name not in hints:
            raise ToolError(
                f"parameter {name} of tool {function.__name__} must be annotated; write {name}: str, or its type"
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        # Behind an alias: a parameter may be named like something that every pydantic model has.
        fields[f"p{len(fields)}"] = (hints[name], Field(default, alias=name, description=described.get(name)))
    try:
        return create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **fields)
    except PydanticSchemaGenerationError as error:
        raise _no_schema(function, error) from error


def _schema(function: Function, arguments: type[BaseModel], *, name: str) -> OpenAIFunctionToolSchema:
    try:
        parameters = arguments.model_json_schema(schema_generator=_Untitled)
    except PydanticInvalidForJsonSchema as error:
        raise _no_schema(function, error) from error
    parameters = {"properties": {}, **{key: value for key, value in parameters.items() if key != "title"}}
    described = parse_docstring(inspect.getdoc(function) or "").description or ""
    return OpenAIFunctionToolSchema.of(name, described.strip(), parameters)


def _no_schema(function: Function, error: Exception) -> ToolError:
    rule = str(error).splitlines()[0]
    return ToolError(
        f"parameters of tool {function.__name__} must be types that JSON can carry: {rule}; change the annotation"
    )
