"""A request of Google's dialect as it is sent: its fields by Google's names, in camel case or in snake case.

Read by `chat_request`. Only the forms are checked here; what cannot be served is refused there. Fields that ask for nothing that a
model of text would do otherwise (media resolution, labels) are not named and not looked at.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic.alias_generators import to_camel


class Fields(BaseModel):
    """Names in either spelling."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore")


def _listed(value: Any) -> Any:
    """Google's parser takes a single value where a list is expected, and its examples make use of that."""
    return [value] if isinstance(value, dict) else value


class FunctionCall(Fields):
    """A call that the model made."""

    id: str | None = None
    name: str
    args: dict[str, Any] | None = None


class FunctionResponse(Fields):
    """What came of a call."""

    id: str | None = None
    name: str
    response: dict[str, Any] | None = None
    parts: list[Any] | None = None


class Part(Fields):
    """One piece of a message. `thoughtSignature` comes back from clients that were given one; it says nothing here."""

    text: str | None = None
    thought: bool | None = None
    function_call: FunctionCall | None = None
    function_response: FunctionResponse | None = None
    inline_data: Any = None
    file_data: Any = None
    executable_code: Any = None
    code_execution_result: Any = None


class Content(Fields):
    """One message, or a part of one: clients that stream keep an answer as several."""

    role: str | None = None
    parts: Annotated[list[Part] | None, BeforeValidator(_listed)] = None


class FunctionDeclaration(Fields):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    parameters_json_schema: Any = None


class Tool(Fields):
    """Functions of the agent; everything else that a tool may be is run by Google."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="allow")
    function_declarations: Annotated[list[FunctionDeclaration] | None, BeforeValidator(_listed)] = None


class FunctionCallingConfig(Fields):
    """Whether functions may or must be called."""

    mode: str | None = None
    allowed_function_names: list[str] | None = None


class ToolConfig(Fields):
    """How tools are used."""

    function_calling_config: FunctionCallingConfig | None = None


class ThinkingConfig(Fields):
    """How much is thought, and whether it is shown."""

    include_thoughts: bool | None = None
    thinking_budget: int | None = None
    thinking_level: str | None = None


class GenerationConfig(Fields):
    """How an answer is sampled and what form it has."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = None
    max_output_tokens: int | None = None
    candidate_count: int | None = None
    stop_sequences: list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    response_mime_type: str | None = None
    response_schema: dict[str, Any] | None = None
    response_json_schema: Any = None
    response_logprobs: bool | None = None
    logprobs: int | None = None
    response_modalities: list[str] | None = None
    speech_config: Any = None
    image_config: Any = None
    thinking_config: ThinkingConfig | None = None


class SafetySetting(Fields):
    """What Google would hold back."""

    category: str | None = None
    threshold: str | None = None


class GenerateContentRequest(Fields):
    """The body of `generateContent` and `streamGenerateContent`."""

    contents: Annotated[list[Content] | None, BeforeValidator(_listed)] = None
    system_instruction: Content | None = None
    tools: Annotated[list[Tool] | None, BeforeValidator(_listed)] = None
    tool_config: ToolConfig | None = None
    generation_config: GenerationConfig | None = None
    safety_settings: list[SafetySetting] | None = None
    cached_content: str | None = None


class CountTokensRequest(Fields):
    """The body of `countTokens`: a conversation, or a whole request."""

    contents: Annotated[list[Content] | None, BeforeValidator(_listed)] = None
    generate_content_request: GenerateContentRequest | None = None
