"""A request of Google's dialect as a chat request: the same messages, tools and limits in OpenAI's words.

Called by `routes`, and by `mocked_server.check` to see what an agent asks for. Invariant: equal conversations give equal messages,
however a client has cut an answer into contents; so a second round continues the first as in the chat dialect. What cannot be
served is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import AliasGenerator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from buffers.errors import RequestRefused
from mocked_server.http.request_fields import MAX_MESSAGES, NO_TOOL_IS_RUN, SEARCH

# A request of Google's dialect as it is sent: its fields by Google's names, in camel case or in snake case. Only the forms are
# checked here; what cannot be served is refused there. Fields that ask for nothing that a model of text would do otherwise
# (media resolution, labels) are not named and not looked at.


class Asked(BaseModel):
    """Names in either spelling; what is written has a chat's."""

    model_config = ConfigDict(
        alias_generator=AliasGenerator(validation_alias=to_camel), populate_by_name=True, extra="ignore"
    )


def _listed(value: Any) -> Any:
    """Google's parser takes a single value where a list is expected, and its examples make use of that."""
    return [value] if isinstance(value, dict) else value


class FunctionCall(Asked):
    """A call that the model made."""

    id: str | None = None
    name: str
    args: dict[str, Any] | None = None


class FunctionResponse(Asked):
    """Result of a call."""

    id: str | None = None
    name: str
    response: dict[str, Any] | None = None
    parts: list[Any] | None = None


class Part(Asked):
    """One piece of a message. `thoughtSignature` comes back from clients that were given one; it says nothing here."""

    text: str | None = None
    thought: bool | None = None
    function_call: FunctionCall | None = None
    function_response: FunctionResponse | None = None
    inline_data: Any = None
    file_data: Any = None
    executable_code: Any = None
    code_execution_result: Any = None


class Content(Asked):
    """One message, or a part of one: clients that stream keep an answer as several."""

    role: str | None = None
    parts: Annotated[list[Part] | None, BeforeValidator(_listed)] = None


class FunctionDeclaration(Asked):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    parameters_json_schema: Any = None


class Tool(Asked):
    """Functions of the agent; everything else that a tool may be is run by Google."""

    model_config = ConfigDict(extra="allow")
    function_declarations: Annotated[list[FunctionDeclaration] | None, BeforeValidator(_listed)] = None


class FunctionCallingConfig(Asked):
    """Rules of calling functions."""

    mode: str | None = None
    allowed_function_names: list[str] | None = None


class ToolConfig(Asked):
    """Rules of using tools."""

    function_calling_config: FunctionCallingConfig | None = None


class ThinkingConfig(Asked):
    """Amount of thought, and if it is shown."""

    include_thoughts: bool | None = None
    thinking_budget: int | None = None
    thinking_level: str | None = None


class GenerationConfig(Asked):
    """Sampling and form of an answer."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = None
    max_output_tokens: int | None = Field(default=None, serialization_alias="max_completion_tokens")
    candidate_count: int | None = Field(default=None, serialization_alias="n")
    stop_sequences: list[str] | None = Field(default=None, serialization_alias="stop")
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


class SafetySetting(Asked):
    """A filter of Google's."""

    category: str | None = None
    threshold: str | None = None


class GenerateContentRequest(Asked):
    """The body of `generateContent` and `streamGenerateContent`."""

    contents: Annotated[list[Content] | None, BeforeValidator(_listed)] = None
    system_instruction: Content | None = None
    tools: Annotated[list[Tool] | None, BeforeValidator(_listed)] = None
    tool_config: ToolConfig | None = None
    generation_config: GenerationConfig | None = None
    safety_settings: list[SafetySetting] | None = None
    cached_content: str | None = None


class CountTokensRequest(Asked):
    """The body of `countTokens`: a conversation, or a whole request."""

    contents: Annotated[list[Content] | None, BeforeValidator(_listed)] = None
    generate_content_request: GenerateContentRequest | None = None


Message = dict[str, Any]
Body = TypeVar("Body", bound=Asked)

NOT_TEXT = ("inline_data", "file_data", "executable_code", "code_execution_result")
UNFILTERED = frozenset({None, "OFF", "BLOCK_NONE", "HARM_BLOCK_THRESHOLD_UNSPECIFIED"})
PLAIN_RESULTS = ({"output"}, {"result"})
"""Names under which clients wrap a result that is a text: the model reads the text."""
CHOICES = {"AUTO": "auto", "VALIDATED": "auto", "NONE": "none", "ANY": "required", "MODE_UNSPECIFIED": "auto"}
"""VALIDATED would force calls into their schema, which is not the policy's choice then; see `mocked_server.vllm.sampling_rules`."""
MAX_PROBLEMS = 5
SAMPLING = (
    *("temperature", "top_p", "top_k", "max_output_tokens", "candidate_count", "stop_sequences", "seed"),
    *("presence_penalty", "frequency_penalty"),
)
"""Fields that a chat has too."""
_ONLY_TEXT = "only text is served"
REFUSED = {
    "cachedContent": "no conversation is kept for the agent; send the whole one as contents",
    "safetySettings": "nothing is held back here; set BLOCK_NONE",
    "tools": NO_TOOL_IS_RUN,
    "allowedFunctionNames": "name one function with mode ANY, or offer only those in tools",
    "responseLogprobs": "the server records them; ask for logprobs by chat completions",
    "responseMimeType": "use application/json with a schema, or text/plain",
    "responseModalities": _ONLY_TEXT,
    "speechConfig": _ONLY_TEXT,
    "imageConfig": _ONLY_TEXT,
    "functionResponse.parts": "only text is served; put the result into response",
    "inlineData": "only text and function calls are served",
    "fileData": "only text and function calls are served",
    "executableCode": "only text and function calls are served",
    "codeExecutionResult": "only text and function calls are served",
}
"""Field -> what to do instead."""


def generation_of(body: Any, *, model: str, streams: bool) -> dict[str, Any]:
    """The chat request of a `generateContent` body. Raises RequestRefused."""
    asked = _read(GenerateContentRequest, body)
    config = asked.generation_config or GenerationConfig()
    if asked.cached_content:
        raise _unsupported("cachedContent")
    _check_safety(asked)
    chat = _conversation(asked, model=model) | _sampling(config)
    if (tools := chat.get("tools")) and (choice := _tool_choice(asked.tool_config, tools)) is not None:
        chat["tool_choice"] = choice
    if (form := _response_format(config)) is not None:
        chat["response_format"] = form
    if streams:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    return chat


def count_of(body: Any, *, model: str) -> dict[str, Any]:
    """What of a `countTokens` body is rendered, as the chat request of the same prompt. Raises RequestRefused."""
    asked = _read(CountTokensRequest, body)
    return _conversation(asked.generate_content_request or GenerateContentRequest(contents=asked.contents), model=model)


def shows_thoughts(body: Any) -> bool:
    """Does the agent want to see thoughts? `body`: one that `generation_of` has taken."""
    config = _read(GenerateContentRequest, body).generation_config
    thinking = None if config is None else config.thinking_config
    return thinking is not None and thinking.include_thoughts is True


def _read(kind: type[Body], body: Any) -> Body:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        problems = [
            f"{'.'.join(str(part) for part in each['loc']) or 'the body'}: {each['msg']}"
            for each in error.errors(include_url=False, include_input=False, include_context=False)[:MAX_PROBLEMS]
        ]
        raise RequestRefused("; ".join(problems)) from None


def _unsupported(field: str, *, part: str = "", got: str | None = None) -> RequestRefused:
    name = f"{field}.{part}" if part else field
    said = "" if got is None else f", got {got}"
    return RequestRefused(f"{name} is not supported: {REFUSED[field]}{said}", field=name)


def _check_safety(asked: GenerateContentRequest) -> None:
    for setting in asked.safety_settings or ():
        if setting.threshold not in UNFILTERED:
            raise _unsupported("safetySettings", got=f"{setting.threshold:.100}")


def _conversation(asked: GenerateContentRequest, *, model: str) -> dict[str, Any]:
    messages = _Messages()
    if (system := asked.system_instruction) is not None:
        messages.add_system(system)
    if not asked.contents:
        raise RequestRefused("contents must hold at least one message, got none", field="contents")
    for content in asked.contents:
        messages.add(content)
    chat: dict[str, Any] = {"model": model, "messages": messages.messages}
    if tools := _tools(asked.tools or ()):
        chat["tools"] = tools
    return chat


class _Messages:
    """Contents become messages: an answer is one message however it was cut, each result of a function is one of its own."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._num_calls = 0
        self._unanswered: list[tuple[str, str]] = []
        """(id, function's name) of calls whose result has not come yet."""

    def add_system(self, content: Content) -> None:
        """Add the system's message, before all others."""
        parts = [{"type": "text", "text": _text_of(part)} for part in content.parts or ()]
        if parts:
            self._put({"role": "system", "content": _simplest(parts)})

    def add(self, content: Content) -> None:
        """The next content."""
        if content.role == "model":
            self._add_answer(content.parts or [])
        elif content.role in (None, "", "user", "function"):
            self._add_turn(content.parts or [])
        else:
            raise RequestRefused(f"role must be user or model, got {content.role[:50]!r}", field="contents.role")

    def _add_answer(self, parts: Iterable[Part]) -> None:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self._put({"role": "assistant", "content": ""})
        answer = self.messages[-1]
        for part in parts:
            if part.function_call is not None:
                call = part.function_call
                identity = call.id or f"call_{self._num_calls}"
                self._num_calls += 1
                self._unanswered.append((identity, call.name))
                function = {"name": call.name, "arguments": _as_json(call.args or {}, field="functionCall.args")}
                answer.setdefault("tool_calls", []).append({"id": identity, "type": "function", "function": function})
            elif part.thought:
                answer["reasoning"] = answer.get("reasoning", "") + _text_of(part)
            else:
                answer["content"] += _text_of(part)

    def _add_turn(self, parts: Iterable[Part]) -> None:
        texts: list[dict[str, Any]] = []
        for part in parts:
            if part.function_response is None:
                texts.append({"type": "text", "text": _text_of(part)})
                continue
            result = part.function_response
            self._put({"role": "tool", "tool_call_id": self._answered(result), "content": _result_text(result)})
        if texts:
            self._put({"role": "user", "content": _simplest(texts)})

    def _answered(self, result: FunctionResponse) -> str:
        """The id of the call that this is the result of: by its id, else the first of its name that has none yet."""
        by_id = [call for call in self._unanswered if call[0] == result.id]
        by_name = [call for call in self._unanswered if call[1] == result.name]
        if not (calls := by_id or by_name):
            return result.id or result.name
        self._unanswered.remove(calls[0])
        return calls[0][0]

    def _put(self, message: Message) -> None:
        self.messages.append(message)
        if len(self.messages) > MAX_MESSAGES:
            raise RequestRefused(
                f"contents must be at most {MAX_MESSAGES:,} messages, got more; send fewer", field="contents"
            )


def _text_of(part: Part) -> str:
    for name in NOT_TEXT:
        if getattr(part, name) is not None:
            raise _unsupported(to_camel(name))
    return part.text or ""


def _simplest(texts: list[dict[str, Any]]) -> Any:
    return texts[0]["text"] if len(texts) == 1 else texts


def _result_text(result: FunctionResponse) -> str:
    if result.parts:
        raise _unsupported("functionResponse.parts")
    response = result.response or {}
    if set(response) in PLAIN_RESULTS and isinstance(text := next(iter(response.values())), str):
        return text
    return _as_json(response, field="functionResponse.response")


def _as_json(value: Any, *, field: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise RequestRefused(f"{field} must be JSON, which has no NaN and no Infinity", field=field) from None


def _tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    functions = []
    has_functions = any(tool.function_declarations for tool in tools)
    for tool in tools:
        others = [name for name, value in (tool.model_extra or {}).items() if value is not None]
        if left := sorted(name for name in others if not (has_functions and name.startswith(SEARCH))):
            raise _unsupported("tools", part=left[0][:50])
        for declared in tool.function_declarations or ():
            function = declared.model_dump(include={"name", "description"}, exclude_none=True)
            if declared.parameters_json_schema is not None:
                function["parameters"] = declared.parameters_json_schema
            elif declared.parameters is not None:
                function["parameters"] = json_schema_of(declared.parameters)
            functions.append({"type": "function", "function": function})
    return functions


def _tool_choice(config: ToolConfig | None, tools: list[dict[str, Any]]) -> Any:
    calling = None if config is None else config.function_calling_config
    if calling is None:
        return None
    mode = calling.mode or "AUTO"
    if mode not in CHOICES:
        raise RequestRefused(f"mode must be one of {', '.join(CHOICES)}, got {mode[:50]!r}", field="toolConfig")
    allowed, offered = set(calling.allowed_function_names or ()), {tool["function"]["name"] for tool in tools}
    if mode != "NONE" and (unknown := sorted(allowed - offered)):
        raise RequestRefused(
            f"allowedFunctionNames must be declared in tools, got {unknown[0][:100]!r}; declare it, or leave it out",
            field="allowedFunctionNames",
        )
    if mode == "NONE" or not allowed or allowed == offered:
        return CHOICES[mode]
    if mode == "ANY" and len(allowed) == 1:
        return {"type": "function", "function": {"name": allowed.pop()}}
    raise _unsupported("allowedFunctionNames")


def _sampling(config: GenerationConfig) -> dict[str, Any]:
    if config.response_logprobs or config.logprobs is not None:
        raise _unsupported("responseLogprobs")
    if any(kind.upper() not in ("TEXT", "MODALITY_UNSPECIFIED") for kind in config.response_modalities or ()):
        raise _unsupported("responseModalities")
    for name, value in (("speechConfig", config.speech_config), ("imageConfig", config.image_config)):
        if value:
            raise _unsupported(name)
    asked = config.model_dump(include=set(SAMPLING), exclude_none=True, by_alias=True)
    if (top_k := asked.get("top_k")) is not None and top_k.is_integer():
        asked["top_k"] = int(top_k)
    effort = _effort(config.thinking_config)
    return asked if effort is None else {**asked, "reasoning_effort": effort}


def _effort(thinking: ThinkingConfig | None) -> str | None:
    """Budgets are left to the model, as Google's are ("a guide"), but for none at all."""
    if thinking is None:
        return None
    if thinking.thinking_budget == 0:
        return "none"
    level = (thinking.thinking_level or "").lower()
    return None if level in ("", "thinking_level_unspecified") else level


def _response_format(config: GenerationConfig) -> dict[str, Any] | None:
    schema = config.response_json_schema
    if schema is None and config.response_schema is not None:
        schema = json_schema_of(config.response_schema)
    kind = config.response_mime_type
    if kind not in (None, "", "text/plain", "application/json"):
        raise _unsupported("responseMimeType", got=f"{kind:.50}")
    if schema is not None:
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return {"type": "json_object"} if kind == "application/json" else None


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
    translated = {
        name: _value(name, value) for name, value in fields.items() if name not in LEFT_OUT and value is not None
    }
    if translated.get("type") == "type_unspecified":
        del translated["type"]
    if fields.get("nullable") is True:
        if isinstance(translated.get("type"), str):
            translated["type"] = [translated["type"], "null"]
        if isinstance(translated.get("enum"), list):
            translated["enum"] = [*translated["enum"], None]
    return translated


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
