"""Chats as token ids: the opening of a conversation, and what a template writes after an answer of the model.

Used by agent loops. Invariant: what was sampled is never rendered again. A tail (tool results, an environment's words)
is cut from a rendering of a stand-in conversation of three turns, so it has no system prompt and its cost does not grow
with the episode; several tool results in one list are rendered together, as the template groups them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from jinja2 import TemplateError

from buffers.errors import AgentError

Message = Mapping[str, Any]
STAND_IN = "an-answer-f81d4fae"
"""An answer that no template changes and no message holds; what follows it is the tail."""
SAID = "words-f81d4fae"
"""What a message says, for finding whether it is shown."""


def opening_ids(tokenizer: Any, messages: Sequence[Message], *, tools: Sequence[Any] | None) -> list[int]:
    """[P] ids of a conversation, up to where the model answers. Raises AgentError when the template refuses it."""
    return _encode(tokenizer, _render(tokenizer, messages, tools=tools, prompt=True))


def tail_ids(
    tokenizer: Any, messages: Sequence[Message], *, tools: Sequence[Any] | None, after: int | None
) -> list[int]:
    """[T] ids that follow an answer: the end of its turn, `messages`, and the opening of the next answer.

    `after`: the last sampled id. None: the token that ends a turn. It is left out, with the control tokens before it, where it is
    among those that follow the answer first.
    Raises AgentError when the template cannot write these messages after an answer.
    """
    ids = _encode(tokenizer, _text_after_answer(tokenizer, messages, tools=tools))
    marks = set(tokenizer.get_added_vocab().values())
    sampled = _encode(tokenizer, _closing(tokenizer, tools=tools))[:1] if after is None else [after]
    first = list(takewhile(marks.__contains__, ids))
    return ids[first.index(*sampled) + 1 :] if set(first).intersection(sampled) else ids


def _text_after_answer(tokenizer: Any, messages: Sequence[Message], *, tools: Sequence[Any] | None) -> str:
    opening: list[Message] = [{"role": "user", "content": "-"}, {"role": "assistant", "content": STAND_IN}]
    try:
        text = _render(tokenizer, [*opening, *messages], tools=tools, prompt=True)
        told = [{**message, "content": SAID} for message in messages]
        is_shown = _render(tokenizer, [*opening, *told], tools=tools, prompt=True).count(SAID) >= len(messages)
    except AgentError:
        is_shown = False
    return text.split(STAND_IN, 1)[1] if is_shown else _text_after_calls(tokenizer, messages, tools=tools)


def _text_after_calls(tokenizer: Any, messages: Sequence[Message], *, tools: Sequence[Any] | None) -> str:
    """The text of these messages after a call, for templates that take a tool's result only after one."""
    calls: list[Message] = []
    answers: list[Message] = []
    for number, message in enumerate(messages):
        if message.get("role") != "tool":
            answers.append(message)
            continue
        call_id = f"call{number:05d}"  # nine letters and digits: what Mistral's templates ask for
        function: dict[str, Any] = {"name": message.get("name") or "tool", "arguments": {}}
        calls.append({"id": call_id, "type": "function", "function": function})
        answers.append({**message, "tool_call_id": call_id, "name": function["name"]})
    opening: list[Message] = [
        {"role": "user", "content": "-"},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    before = _render(tokenizer, opening, tools=tools, prompt=False)
    text = _render(tokenizer, [*opening, *answers], tools=tools, prompt=True)
    told = [{**answer, "content": SAID} for answer in answers]
    shown = _render(tokenizer, [*opening, *told], tools=tools, prompt=True).count(SAID)
    if not text.startswith(before) or shown < len(answers):
        raise AgentError(
            "the model's chat template must write a tool's result after its call, got another beginning, or nothing of it; use "
            "another template"
        )
    closing = _closing(tokenizer, tools=tools)
    if not before.endswith(closing):  # calls have an end of their own
        marks = "|".join(map(re.escape, tokenizer.get_added_vocab())) or "(?!)"
        closing = found[0] if (found := re.search(f"(?:{marks})+$", before)) else closing
    return closing + text[len(before) :]


def _closing(tokenizer: Any, *, tools: Sequence[Any] | None) -> str:
    """Text of the template after an answer that ends a conversation."""
    opening: list[Message] = [{"role": "user", "content": "-"}, {"role": "assistant", "content": STAND_IN}]
    return _render(tokenizer, opening, tools=tools, prompt=False).rpartition(STAND_IN)[2]


def _render(tokenizer: Any, messages: Sequence[Message], *, tools: Sequence[Any] | None, prompt: bool) -> str:
    shown = copy.deepcopy(list(messages))
    if not re.search("[\"']developer[\"']", str(getattr(tokenizer, "chat_template", ""))):  # as vLLM for others' agents
        shown = [{**each, "role": "system"} if each.get("role") == "developer" else each for each in shown]
    try:
        return str(
            tokenizer.apply_chat_template(
                shown,
                tools=list(tools) if tools else None,
                add_generation_prompt=prompt,
                tokenize=False,
            )
        )
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise AgentError(
            f"the model's chat template refuses the messages: {error}; they are {messages!r:.200}"
        ) from error


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))
