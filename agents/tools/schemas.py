"""What a tool says about itself (OpenAI's function schema) and what it answers. The names are verl's (`verl/tools/schemas.py`).

Used by every tool, and by `agents.tools.toolbox`, which hands the schemas to the chat template and shortens the answers. Invariant:
a schema keeps every JSON Schema keyword that it was given, so what the model is shown is what its arguments are checked against. It
checks nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator

Side = Literal["left", "middle", "right"]
MARK = "(truncated)"


class OpenAIFunctionParametersSchema(BaseModel):
    """A function's parameters as a JSON Schema object; further keywords (`$defs`, `additionalProperties`) are kept."""

    model_config = ConfigDict(extra="allow")

    type: str = "object"
    properties: dict[str, dict[str, Any]] = Field(default_factory=dict)
    required: list[str] = Field(default_factory=list)


class OpenAIFunctionSchema(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = Field(default_factory=OpenAIFunctionParametersSchema)
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    """A tool, as it stands in the `tools` of a chat request."""

    type: Literal["function"] = "function"
    function: OpenAIFunctionSchema

    @classmethod
    def of(cls, name: str, description: str, parameters: Mapping[str, Any]) -> Self:
        """A function's schema; `parameters`: a JSON Schema object."""
        fields = {"name": name, "description": description, "parameters": parameters}
        return cls(function=OpenAIFunctionSchema.model_validate(fields))

    def as_openai(self) -> dict[str, Any]:
        """The dict that a chat template and an OpenAI client take; what was not given is left out."""
        return {"type": self.type, **self.model_dump(exclude_unset=True, exclude_none=True)}


class ToolResponse(BaseModel):
    """Answer of a tool. Text only: a response with an image or a video is refused when it is made."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    @field_validator("image", "video")
    @classmethod
    def _text_only(cls, value: list[Any] | None) -> list[Any] | None:
        if value:
            raise ValueError("a tool response must be text, got an image or a video; describe it in `text`")
        return value


def truncate(text: str, *, limit: int, side: Side) -> str:
    """At most `limit` characters of `text`, beside a mark where something is missing. As verl has it, `left` keeps the left part,
    `right` the right one, `middle` both ends. A limit in tokens is the caller's."""
    if len(text) <= limit:
        return text
    if side == "left":
        return f"{text[:limit]}...{MARK}"
    if side == "right":
        return f"{MARK}...{text[len(text) - limit :]}"
    tail = limit // 2
    return f"{text[: limit - tail]}...{MARK}...{text[len(text) - tail :]}"
