"""A record of a log -> a conversation, and back: chat JSONL (OpenAI's fine-tuning form), ShareGPT, ATIF (Harbor's trajectory, to
1.8), OpenTelemetry's GenAI spans, opencode's messages.

Called by `buffers.tasks.logs`, and by `buffers.ledger.export` the other way. Pure. Invariants: what is written in a form is read
from it as the same conversation; what no text model could have said or seen ends the conversation there, and is counted by name.
Messages are OpenAI's, `content` a text, arguments of calls JSON text; `weight` 0 marks an answer that is context.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from buffers.errors import UnderstudyError

Record = Mapping[str, Any]
Message = dict[str, Any]
ATIF_VERSION = "ATIF-v1.7"
ATIF, CHAT, SHAREGPT, SPANS = "ATIF", "chat messages", "ShareGPT", "OpenTelemetry spans"
CUT_FINISHES = ("length", "max_tokens", "MAX_TOKENS", "model_length")
_SCORES = ("score", "reward")
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "observation": "tool",
}
_ATIF_ROLES = {"system": "system", "user": "user", "agent": "assistant"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A conversation in a log."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    """What its prompt offers, in OpenAI's form."""
    score: float | None = None
    source: str = ""
    """Its name."""
    model: str = ""
    """Whose answers they are; several are joined by commas."""


class BadRecord(UnderstudyError):
    """A record that is no conversation; its text is the cause, and is counted."""


def form_of(record: Record) -> str | None:
    """The form that the record's keys show; None: none of these."""
    if str(record.get("schema_version", "")).startswith("ATIF") and "steps" in record:
        return ATIF
    if "messages" in record:
        return CHAT
    if "conversations" in record or "conversation" in record:
        return SHAREGPT
    if "resourceSpans" in record or ("attributes" in record and record.keys() & {"context", "traceId", "trace_id"}):
        return SPANS
    return None


def conversations(record: Record, *, form: str, source: str) -> Iterator[Session]:
    """Those of a record of ATIF (sub-agents' are their own), chat messages or ShareGPT. Raises BadRecord."""
    if form == ATIF:
        yield _of_atif(record, source=source)
        for part in _dicts(record.get("subagent_trajectories")):
            yield from conversations(part, form=ATIF, source=source)
        return
    if form == SHAREGPT:
        turns = _json(record.get("conversations", record.get("conversation")))
        messages = [_of_sharegpt(turn) for turn in _dicts(turns)]
        if isinstance(record.get("system"), str) and record["system"]:
            messages.insert(0, {"role": "system", "content": record["system"]})
    else:
        messages = [dict(message) for message in _dicts(_json(record["messages"]))]
    tools = record.get("tools") or [{"type": "function", "function": each} for each in _dicts(record.get("functions"))]
    model = record.get("model")
    yield Session(
        messages=messages,
        tools=_dicts(_json(tools)) or None,
        score=_score(record),
        source=next((str(record[key]) for key in ("source", "id", "session_id") if record.get(key)), source),
        model=model if isinstance(model, str) else "",
    )


def _of_sharegpt(turn: Record) -> Message:
    said = str(turn.get("from", turn.get("role")))
    value = turn.get("value", turn.get("content"))
    if said != "function_call":
        return {**turn, "role": _ROLES.get(said, said), "content": value}
    call = _json(value)
    if not isinstance(call, dict):
        raise BadRecord("function_call that is no JSON")
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _of_atif(record: Record, *, source: str) -> Session:
    agent = _object(record.get("agent"))
    messages: list[Message] = []
    models: dict[str, None] = {}
    for step in _dicts(record["steps"]):
        role = _ATIF_ROLES.get(str(step.get("source")), "")
        message: Message = {"role": role, "content": step.get("message")}
        if role == "assistant":
            models[str(step.get("model_name") or agent.get("model_name") or "")] = None
            message["reasoning_content"] = step.get("reasoning_content")
            message["tool_calls"] = [
                {
                    "id": call.get("tool_call_id"),
                    "name": call.get("function_name"),
                    "arguments": _object(call.get("extra")).get("arguments", call.get("arguments")),
                }
                for call in _dicts(step.get("tool_calls"))
            ]
            extra = _object(_object(step.get("metrics")).get("extra"))
            if step.get("is_copied_context") or step.get("llm_call_count") == 0 or extra.get("weight") == 0:
                message["weight"] = 0
        messages.append(message)
        messages += _observed(
            _dicts(_object(step.get("observation")).get("results")), calls=message.get("tool_calls") or []
        )
    extra = _object(record.get("extra"))
    name = record.get("trajectory_id") or record.get("session_id") or source
    return Session(
        messages=messages,
        tools=_dicts(agent.get("tool_definitions")) or None,
        score=_score(extra),
        source=str(name),
        model=", ".join(sorted(models.keys() - {""})),
    )


def joined(session: Session, *, calls: Collection[str]) -> Session:
    """`calls`: those that go on with the answer before them, of which they become a part."""
    messages: list[Message] = []
    answer: Message = {}
    for message in session.messages:
        own = message.get("tool_calls") or ()
        if answer and own and own[0]["id"] in calls:
            answer["tool_calls"] = [*answer.get("tool_calls", ()), *own]
            answer["reasoning_content"] = answer.get("reasoning_content") or message.get("reasoning_content")
            continue
        if message["role"] == "assistant":
            answer = message
        messages.append(message)
    return replace(session, messages=messages)


def _observed(results: Sequence[Record], *, calls: Sequence[Message]) -> Iterator[Message]:
    """What a step observed, in its order. What names no call answers those without a result of their own, all together, or is the
    user's where no call is open."""
    named = {str(result.get("source_call_id")) for result in results}
    waiting = [call["id"] for call in calls if str(call["id"]) not in named]
    shared = False
    for result in results:
        call, content = result.get("source_call_id"), result.get("content")
        if call is None and waiting:
            call, shared = waiting.pop(0), True
        yield {"role": "user", "content": content} if call is None else _result(call, content)
    if shared:
        yield from (_result(call, "") for call in waiting)


def _result(call: Any, content: Any) -> Message:
    return {"role": "tool", "content": content, "tool_call_id": call}


# Spans: each has one model call, whose prompt repeats the conversation before it.


def spans_of(record: Record) -> Iterator[tuple[str, dict[str, Any]]]:
    """(trace id, attributes) of each span of a record: OTLP's, or one span as OpenTelemetry's SDKs print it."""
    found = [
        span
        for resource in _dicts(record.get("resourceSpans"))
        for scope in _dicts(resource.get("scopeSpans"))
        for span in _dicts(scope.get("spans"))
    ]
    for span in found or [dict(record)]:
        told = span.get("attributes")
        attributes = dict(told) if isinstance(told, Mapping) else _attributes(told)
        place = {**span, **_object(span.get("context"))}
        yield str(place.get("traceId") or place.get("trace_id")), attributes


def conversation_of_span(attributes: Record, *, trace_id: str) -> Session | None:
    """The conversation of a model call: what was asked is context, the answer is trained. None: a span of something else. Raises
    BadRecord."""
    if attributes.get("gen_ai.operation.name") not in ("chat", "generate_content"):
        return None
    asked, said = (_dicts(_json(attributes.get(f"gen_ai.{side}.messages"))) for side in ("input", "output"))
    if not asked or not said:
        raise BadRecord("span without its messages: its exporter leaves contents out")
    parts = _dicts(_json(attributes.get("gen_ai.system_instructions")))
    messages: list[Message] = [{"role": "system", "content": parts}] if parts else []
    for each in asked:
        messages += [{**message, "weight": 0} for message in _of_parts(each)]
    messages += [{**message, "finish_reason": said[0].get("finish_reason")} for message in _of_parts(said[0])]
    return Session(
        messages=messages,
        tools=_dicts(_json(attributes.get("gen_ai.tool.definitions"))) or None,
        source=str(attributes.get("gen_ai.conversation.id") or trace_id),
        model=str(attributes.get("gen_ai.response.model") or attributes.get("gen_ai.request.model") or ""),
    )


def _of_parts(message: Record) -> Iterator[Message]:
    parts = _dicts(message.get("parts"))
    said: dict[str, list[Any]] = {"reasoning": [], "tool_call": [], "tool_call_response": [], "content": []}
    for part in parts:
        kind = {"thinking": "reasoning"}.get(str(part.get("type")), str(part.get("type")))
        said[kind if kind in said else "content"].append(part)
    for part in said["tool_call_response"]:
        content = part.get("response", part.get("result"))
        yield _result(part.get("id"), content if isinstance(content, str) else json.dumps(content, ensure_ascii=False))
    if said["content"] or not said["tool_call_response"]:
        thought = "\n".join(str(part.get("content")) for part in said["reasoning"])
        message = {"role": message.get("role"), "content": said["content"], "reasoning_content": thought}
        yield {**message, "tool_calls": said["tool_call"]}


def grown(before: Session, now: Session) -> Session | None:
    """`before` with what `now` adds to it; None: `now` does not continue it."""
    old, new = (["".join(_said(message)) for message in session.messages] for session in (before, now))
    if new[: len(old)] != old:
        return None
    return replace(now, messages=[*before.messages, *now.messages[len(old) :]], tools=now.tools or before.tools)


def _said(message: Message) -> Iterator[str]:
    yield f"{message['role']} {message['content']}"
    for call in message.get("tool_calls", ()):
        yield f" {call['function']['name']} {json.dumps(_json(call['function']['arguments']), sort_keys=True)}"


def _attributes(told: Any) -> dict[str, Any]:
    """OTLP's list of keys and values."""
    return {str(each.get("key")): _any(_object(each.get("value"))) for each in _dicts(told)}


def _any(value: Record) -> Any:
    """A value of OTLP's JSON."""
    kind, inner = next(iter(value.items()), ("", None))
    if kind == "arrayValue":
        return [_any(each) for each in _dicts(_object(inner).get("values"))]
    return _attributes(_object(inner).get("values")) if kind == "kvlistValue" else inner


# opencode: a message is a record, and so is each of its parts; a call and its result are one part.


def conversation_of_opencode(told: Iterable[tuple[Any, Sequence[Any]]], *, source: str) -> Session:
    """`told`: the JSON of each message, and of its parts. Each `step-start` is a call of the model."""
    messages: list[Message] = []
    models: dict[str, None] = {}
    for text, texts in told:
        message, parts = _object(_json(text)), _dicts(list(map(_json, texts)))
        if message.get("role") == "user":
            shown = [part for part in parts if part.get("type") != "agent" and not _is_text_file(part)]
            content = [part | {"type": part.get("mime", part.get("type"))} for part in shown]
            messages.append({"role": "user", "content": content})
            continue
        models[str(message.get("modelID") or "")] = None
        answer: Message = {}
        for part in parts:
            kind, state = part.get("type"), _object(part.get("state"))
            if kind == "step-start" or not answer:
                answer = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
                answer |= {"finish_reason": message.get("finish"), "weight": 0 if message.get("error") else None}
                messages.append(answer)
            if kind in ("text", "reasoning"):
                answer["content" if kind == "text" else "reasoning_content"] += str(part.get("text", ""))
            elif kind == "tool":
                call = {"id": part.get("callID"), "name": part.get("tool"), "arguments": state.get("input")}
                answer["tool_calls"].append(call)
                messages += [_result(part.get("callID"), state[key]) for key in ("output", "error") if key in state]
    return Session(messages=messages, source=source, model=", ".join(sorted(models.keys() - {""})))


def _is_text_file(part: Record) -> bool:
    """One that stands as text beside it."""
    return str(part.get("mime")).startswith(("text/", "application/x-directory"))


# What all forms share: one spelling of messages, and the rules that end a conversation.


def checked(session: Session, *, causes: Counter[str]) -> Session:
    """The conversation in one spelling, as far as it can be learned from; why it ends there, or has answers that are left out, is
    counted. Raises BadRecord for one without an answer."""
    kept: list[Message] = []
    waiting: list[str] = []
    cut = ""
    for message in session.messages:
        try:
            plain = _plain(message, causes=causes, number=len(kept))
            if plain["role"] == "tool":
                waiting.remove(plain.setdefault("tool_call_id", waiting[0] if waiting else ""))
            elif waiting:
                cut = "call without its result"
        except BadRecord as error:
            cut = str(error)
        except ValueError:
            cut = "result without its call"
        if cut:
            break
        kept.append(plain)
        waiting += [call["id"] for call in plain.get("tool_calls", ())]
    if cut:
        causes[cut] += 1
    if "," in session.model:
        causes["answers of several models"] += 1
    if not any(message["role"] == "assistant" and message.get("weight") != 0 for message in kept):
        raise BadRecord(f"no answer{' before: ' + cut if cut else ''}")
    tools = [
        tool if "function" in tool else {"type": "function", "function": _without_type(tool)}
        for tool in session.tools or ()
    ]
    return replace(session, messages=kept, tools=tools or None)


def _without_type(tool: Record) -> Record:
    return {name: value for name, value in tool.items() if name != "type"}


def _plain(message: Message, *, causes: Counter[str], number: int) -> Message:
    """Raises BadRecord for a message that no text model says or sees."""
    role = _ROLES.get(str(message.get("role")), str(message.get("role")).replace("function", "tool"))
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise BadRecord(f"role {role!r:.40}")
    plain: Message = {"role": role, "content": _text(message.get("content"))}
    if role == "tool":
        return plain | ({"tool_call_id": str(message["tool_call_id"])} if message.get("tool_call_id") else {})
    if role != "assistant":
        return plain
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        plain["reasoning_content"] = _text(reasoning)
    calls = _dicts(message.get("tool_calls")) or _dicts([message.get("function_call")])
    if calls:
        plain["tool_calls"] = [_call(call, default=f"call_{number}_{n}") for n, call in enumerate(calls)]
    is_cut = message.get("finish_reason") in CUT_FINISHES
    is_empty = not (plain["content"] or calls)
    causes["answer cut in the middle"] += is_cut
    causes["empty answer"] += is_empty
    return plain | ({"weight": 0} if message.get("weight") == 0 or is_cut or is_empty else {})


def _call(call: Record, *, default: str) -> Message:
    function = _object(call.get("function", call))
    arguments, name = function.get("arguments"), function.get("name")
    if not isinstance(name, str):
        raise BadRecord("call without a name")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return {"id": str(call.get("id") or default), "type": "function", "function": {"name": name, "arguments": text}}


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content if isinstance(content, list) else [content]:
        text = part if isinstance(part, str) else _object(part).get("text", _object(part).get("content"))
        if not isinstance(text, str):
            kind = str(_object(part).get("modality") or _object(part).get("type") or "part without text")
            raise BadRecord(next((each for each in ("image", "audio", "video") if each in kind), kind[:40]))
        texts.append(text)
    return "\n".join(texts)


def to_messages(session: Session) -> dict[str, Any]:
    """The conversation as a line of chat messages."""
    record = {name: getattr(session, name) for name in ("messages", "tools", "score", "source", "model")}
    return {name: value for name, value in record.items() if value not in (None, "")}


def to_atif(
    session: Session, *, metrics: Sequence[dict[str, Any]] = (), extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The conversation as an ATIF document. `metrics`: those of each answer, in order; `extra`: more of the document's."""
    steps: list[dict[str, Any]] = []
    told = iter(metrics)
    for message in session.messages:
        if message["role"] == "tool" and steps and "tool_calls" in steps[-1]:
            result = {"source_call_id": message["tool_call_id"], "content": message["content"]}
            steps[-1].setdefault("observation", {"results": []})["results"].append(result)
            continue
        source = {"assistant": "agent", "user": "user"}.get(message["role"], "system")
        step: dict[str, Any] = {"step_id": len(steps) + 1, "source": source, "message": message["content"]}
        if source == "agent":
            step |= {key: message[key] for key in ("reasoning_content",) if key in message}
            if calls := message.get("tool_calls"):
                step["tool_calls"] = [_atif_call(call) for call in calls]
            figures = next(told, {})
            if message.get("weight") == 0:
                figures = {**figures, "extra": {**figures.get("extra", {}), "weight": 0}}
            if figures:
                step["metrics"] = figures
        steps.append(step)
    agent = {"name": "understudy", "version": "unknown", "model_name": session.model, "tool_definitions": session.tools}
    more = {**(extra or {}), **({} if session.score is None else {"score": session.score})}
    document = {
        "schema_version": ATIF_VERSION,
        "trajectory_id": session.source,
        "agent": {name: value for name, value in agent.items() if value},
        "steps": steps,
        "extra": more,
    }
    return {name: value for name, value in document.items() if value}


def _atif_call(call: Message) -> dict[str, Any]:
    """A call as ATIF has it; its own spelling of the arguments is kept where another would be read from the form."""
    text, name = call["function"]["arguments"], call["function"]["name"]
    arguments = _json(text)
    if not isinstance(arguments, dict):
        arguments = {}
    written = {"tool_call_id": call["id"], "function_name": name, "arguments": arguments}
    return written if json.dumps(arguments, ensure_ascii=False) == text else {**written, "extra": {"arguments": text}}


def _score(record: Record) -> float | None:
    found = next((record[key] for key in _SCORES if isinstance(record.get(key), int | float)), None)
    return None if found is None else float(found)


def _json(value: Any) -> Any:
    """A value that may be written as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


def _object(value: Any) -> Record:
    return value if isinstance(value, Mapping) else {}


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [dict(each) for each in value if isinstance(each, Mapping)] if isinstance(value, list | tuple) else []
