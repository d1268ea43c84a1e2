"""What is done to a request's body before vLLM's HTTP layer reads it: fields that cannot be served are refused by name,
null fields of chat messages are dropped, and earlier answers in a Responses input are given a text.

Pure functions over bytes, called by `model_requests`. A body is parsed here only if it mentions a word of interest;
what is malformed is left to vLLM, which answers in the dialect's form.

The names of vLLM's tool and reasoning parsers, without which tools are refused, are read from vLLM's own tables without importing
vLLM, which takes seconds: `check_parser` is called before a run starts. Where vLLM has no such table any more nothing is known, and
nothing is refused for it.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from buffers.did_you_mean import nearest
from buffers.errors import UnderstudyError
from mocked_server.http.dialects import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Failure
from mocked_server.http.request_limits import MAX_CONTAINERS, shape_of

MAX_MESSAGES = 4096
"""Most objects in a list of a request, such as the messages of a conversation: pydantic takes the event loop's time for each, up to
0.1 ms, and no model reads so many."""
_ESCAPED_ASCII = re.compile(rb"\\u00[2-7]")
"""`\\u0065` for `e`: such a body may name a field that its bytes do not show."""


def _anything(value: Any) -> bool:
    return bool(value)


def _leaves_something_out(management: Any) -> bool:
    """Anthropic's context management, unless each of its edits keeps all: then there is nothing to do."""
    edits = management.get("edits") if isinstance(management, dict) else management
    if not isinstance(edits, list):
        return bool(edits)
    return any(not isinstance(edit, dict) or edit.get("keep") != "all" for edit in edits)


def _ends_with_an_answer(messages: Any) -> bool:
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and last.get("role") == "assistant"


SEARCH = ("web_search", "googleSearch", "google_search")
"""Beginnings of the types of tools that search the web."""
_RUN_ELSEWHERE = (
    *SEARCH, "file_search", "code_interpreter", "mcp", "image_generation", "web_fetch", "code_execution", "tool_search_tool",
)  # fmt: skip
"""Beginnings of the types of tools that OpenAI or Anthropic run."""


def _kind(tool: Any) -> str:
    return str(tool.get("type") or "") if isinstance(tool, dict) else ""


def _run_elsewhere(tools: Any) -> str | None:
    """The type of the first tool that nobody runs here. A search that is offered beside other tools is left out of the offer
    (`servable`): Codex offers one in every request, and plays without."""
    kinds = [_kind(tool) for tool in tools] if isinstance(tools, list) else []
    has_others = not all(kind.startswith(SEARCH) for kind in kinds)
    return next(
        (kind for kind in kinds if kind.startswith(_RUN_ELSEWHERE) and not (has_others and kind.startswith(SEARCH))),
        None,
    )


def _chooses_elsewhere(choice: Any) -> str | None:
    return kind if (kind := _kind(choice)).startswith(_RUN_ELSEWHERE) else None


def _is_session(arguments: Any) -> bool:
    """Nothing, or what names a session only: some clients send it to any vLLM."""
    return not arguments or (isinstance(arguments, dict) and set(arguments) == {"session_id"})


@dataclass(frozen=True, slots=True)
class _Rule:
    field: str
    remedy: str
    refuses: Callable[[Any], bool | str | None] = _anything
    """A text names the part of the field that is refused."""


_EXACT = "the server keeps the exact tokens itself; leave it out"
_STATELESS = "no conversation is kept for the agent; send the whole conversation as input"
_ONE_SAMPLE = "each token must be sampled from the policy; use n for several answers"
NO_TOOL_IS_RUN = "no tool is run here; declare a function of the agent's own"
_TOOLS = (_Rule("tools", NO_TOOL_IS_RUN, _run_elsewhere), _Rule("tool_choice", NO_TOOL_IS_RUN, _chooses_elsewhere))
_COMMON = (
    _Rule("use_beam_search", _ONE_SAMPLE),
    _Rule("prompt_embeds", "a prompt must be text or tokens"),
    _Rule("prompt_logprobs", "only sampled tokens have log-probabilities", lambda value: value is not None),
    _Rule("echo", "the prompt is the agent's own; leave it out"),
    _Rule("truncate_prompt_tokens", "shorten the conversation instead", lambda value: value is not None),
    _Rule("return_token_ids", _EXACT),
    _Rule("kv_transfer_params", _EXACT),
    _Rule("logprob_token_ids", "use top_logprobs"),
    _Rule("thinking_token_budget", "use max_tokens"),
    _Rule("logits_processors", "use logit_bias"),
    _Rule("structured_outputs", "it must be an object", lambda value: not isinstance(value, dict | None)),
    _Rule("vllm_xargs", "no plugin of sampling is loaded; leave it out", lambda value: not _is_session(value)),
    _Rule("repetition_detection", "use stop or max_tokens"),
    _Rule("best_of", _ONE_SAMPLE, lambda value: value not in (None, 1)),
)
RULES: dict[str, tuple[_Rule, ...]] = {
    CHAT: (
        *_COMMON,
        *_TOOLS,
        _Rule("functions", "it was replaced by tools; use those"),
        _Rule("function_call", "it was replaced by tool_choice; use that"),
        _Rule("audio", "only text is served"),
        _Rule("modalities", "only text is served", lambda value: value not in (None, [], ["text"])),
        _Rule("web_search_options", "no search is offered; give the agent a tool"),
        _Rule("chat_template", "the model's own template is used; leave it out"),
    ),
    COMPLETIONS: (*_COMMON, _Rule("suffix", "the model completes at the end only")),
    RESPONSES: (
        *_COMMON,
        *_TOOLS,
        _Rule("previous_response_id", _STATELESS),
        _Rule("conversation", _STATELESS),
        _Rule("background", "answers are given on the request's own connection; leave it out"),
        _Rule("prompt", "no prompt templates are kept; send instructions and input"),
        _Rule("max_tool_calls", "the agent calls its tools itself; leave it out", lambda value: value is not None),
    ),
    MESSAGES: (
        *_COMMON,
        *_TOOLS,
        _Rule("mcp_servers", "the agent calls its tools itself; leave it out"),
        _Rule("container", "no code is run here; leave it out"),
        _Rule("messages", "an answer that the agent began is not continued; end with the user's", _ends_with_an_answer),
        _Rule("context_management", "send the conversation as the model shall see it", _leaves_something_out),
    ),
}


def fields_of(body: bytes) -> dict[str, Any] | None:
    """None: it is no JSON object, which is left to vLLM's HTTP layer to say."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def refused(path: str, body: bytes) -> Failure | None:
    """The first field of this request that cannot be served; None when all can, or when the body is not a JSON object."""
    if (too_many := _too_many(body)) is not None:
        return too_many
    is_spelled_out = _ESCAPED_ASCII.search(body) is None
    rules = [rule for rule in RULES.get(path, ()) if not is_spelled_out or rule.field.encode() in body]
    if not rules or (fields := fields_of(body)) is None:
        return None
    for rule in rules:
        if refusal := rule.refuses(fields.get(rule.field)):
            field = f"{rule.field}.{refusal[:50]}" if isinstance(refusal, str) else rule.field
            return _unsupported(field, f"{field} is not supported: {rule.remedy}")
    return None


def _unsupported(field: str, message: str) -> Failure:
    return Failure(400, message, code="unsupported_field", param=field)


def _too_many(body: bytes) -> Failure | None:
    """Refusal of what would take too long to read: a long list of objects, or arguments of calls, which are JSON in a string."""
    if body.count(b"{") + body.count(b"[") <= MAX_MESSAGES or (fields := fields_of(body)) is None:
        return None
    for name, value in fields.items():
        number = sum(isinstance(each, dict) for each in value) if isinstance(value, list) else 0
        if number > MAX_MESSAGES:
            return _unsupported(name, f"{name} must be at most {MAX_MESSAGES:,}, got {number:,}; send fewer")
    shapes = [shape_of(text.encode(errors="replace")) for text in _arguments(fields)]
    number = sum(max(shape.num_containers, shape.num_strings // 8) for shape in shapes)
    if number > MAX_CONTAINERS:
        message = f"arguments of tool calls may have {MAX_CONTAINERS:,} objects and lists, got {number:,}; send less"
        return _unsupported("arguments", message)
    return None


def _arguments(value: Any) -> Iterator[str]:
    """Arguments of all tool calls that are text."""
    if isinstance(value, list):
        for each in value:
            yield from _arguments(each)
    elif isinstance(value, dict):
        for name, each in value.items():
            if name == "arguments" and isinstance(each, str):
                yield each
            else:
                yield from _arguments(each)


def servable(path: str, body: bytes) -> bytes:
    """The body without what clients may say and vLLM cannot take. Chat: null fields of messages, since clients dump answers
    with all fields that they know. Responses: null fields, and earlier answers that refused something, or said nothing, which are
    text as others. All: searches that are offered beside other tools."""
    words = {CHAT: (b"null",), RESPONSES: (b"null", b"assistant")}.get(path, ())
    offers_search = path in RULES and b'"web_search' in body
    if not (offers_search or any(word in body for word in words)) or (fields := fields_of(body)) is None:
        return body
    changed = fields if path != RESPONSES else {name: value for name, value in fields.items() if value is not None}
    if offers_search and isinstance(tools := fields.get("tools"), list):
        changed = {**changed, "tools": [tool for tool in tools if not _kind(tool).startswith(SEARCH)]}
    for owner, name, change in ((CHAT, "messages", _set_fields), (RESPONSES, "input", _text_of_answer)):
        items = changed.get(name)
        if path == owner and isinstance(items, list) and all(isinstance(item, dict) for item in items):
            changed = {**changed, name: [change(item) for item in items]}
    return body if changed == fields else json.dumps(changed).encode()


def _set_fields(message: dict[str, Any]) -> dict[str, Any]:
    needed = () if message.get("role") == "assistant" else ("content",)
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        message = {**message, "tool_calls": [_with_arguments(call) for call in calls]}
    return {name: value for name, value in message.items() if value is not None or name in needed}


def _with_arguments(call: Any) -> Any:
    """The call with empty arguments for null, which clients make of a stream that ended before them."""
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict) and function.get("arguments", "") is None:
        return {**call, "function": {**function, "arguments": "{}"}}
    return call


def _text_of_answer(item: dict[str, Any]) -> dict[str, Any]:
    parts = item.get("content")
    if item.get("role") != "assistant" or "id" not in item or not isinstance(parts, list):
        return item
    texts = [
        {"type": "output_text", "text": part.get("refusal"), "annotations": []}
        if isinstance(part, dict) and part.get("type") == "refusal"
        else part
        for part in parts
    ]
    return {**item, "content": texts or [{"type": "output_text", "text": "", "annotations": []}]}


TABLES = {
    "server.tool_parser": ("tool_parsers", "_TOOL_PARSERS_TO_REGISTER"),
    "server.reasoning_parser": ("reasoning", "_REASONING_PARSERS_TO_REGISTER"),
}
"""Configuration key -> package of vLLM, and the name of its table there."""


@cache
def parser_names(key: str) -> tuple[str, ...]:
    """Values of this configuration key, sorted."""
    package, table = TABLES[key]
    spec = find_spec("vllm")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = [file for place in places if (file := Path(place) / package / "__init__.py").is_file()]
    for node in ast.walk(ast.parse(files[0].read_text(encoding="utf-8"))) if files else ():
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [table]:
            return tuple(sorted(ast.literal_eval(node.value)))
    return ()


def check_parser(key: str, name: str | None) -> None:
    """Raises UnderstudyError for a parser that vLLM does not have."""
    known = parser_names(key)
    if name and known and name not in (*known, "auto"):
        raise UnderstudyError(f"{key} must be the name of one of vLLM's parsers, got {name!r}; {nearest(name, known)}")


def tools_need_a_parser() -> str:
    """Why a request with tools cannot be served, and the remedy."""
    return (
        "the request offers tools, which needs server.tool_parser (how the model writes a call), and it is null, or auto found "
        "none that reads what the model's chat template writes; set it to "
        f"the one of the model (hermes for Qwen) of {', '.join(parser_names('server.tool_parser'))}"
    )
