"""The content of one answer to an agent, and whether a message that it sends back later is that answer.

Pure functions over chat messages. Clients never send an answer back byte for byte: they serialise tool arguments again,
add or drop null fields, wrap text in content parts, trim it, drop the reasoning. All of that is the same answer; other
words, other calls or other argument values are not.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from mocked_server.conversation.branch_causes import BranchCause

Message = dict[str, Any]

HALF = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which no encoding has."""
THOUGHT_BEGINS, THOUGHT_ENDS = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """An answer as the API shows it. Arguments are canonical JSON; texts are trimmed at both ends."""

    content: str
    calls: tuple[tuple[str, str], ...] = ()
    """(name, arguments) in order."""
    reasoning: str = ""


def reply_of(message: Message) -> ParsedReply:
    """The assistant message of a request, as an answer."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        calls.append((str(function.get("name")), canonical_arguments(function.get("arguments"))))
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    return ParsedReply(joined_text(message.get("content")).strip(), tuple(calls), str(reasoning or "").strip())


def same_text(said: ParsedReply, text: str) -> bool:
    """Is what this message says the plain text `text`, as far as one can tell without a parser?"""
    if said.calls:
        return False
    if said.content in (text.strip(), *_without_thought(text)):
        return True
    # A thought that the template opened: many clients put its mark back.
    return THOUGHT_ENDS in text and said.content.removeprefix(THOUGHT_BEGINS).strip() == text.strip()


def _without_thought(text: str) -> list[str]:
    """The text without its first reasoning, which many clients cut out where no reasoning parser is set, and without what ends one
    that the template opened. In one pass: an expression that also takes the spaces before it needs a time that grows with their
    square."""
    before, begins, rest = text.partition(THOUGHT_BEGINS)
    _, ends, after = rest.partition(THOUGHT_ENDS)
    cut = [(before.rstrip() + after).strip()] if begins and ends else []
    _, is_opened, after = before.partition(THOUGHT_ENDS)
    return [*cut, (after + begins + rest).strip()] if is_opened else cut


def difference(said: ParsedReply, told: ParsedReply) -> BranchCause | None:
    """Why what this message says is not the answer `told`; None when it is."""
    if told.reasoning and not said.reasoning and said.content.startswith(THOUGHT_BEGINS):
        thought, _, content = said.content.removeprefix(THOUGHT_BEGINS).partition(THOUGHT_ENDS)
        said = ParsedReply(content.strip(), said.calls, thought.strip())
    if said.content != told.content:
        return BranchCause.CONTENT_EDITED
    if said.reasoning and said.reasoning != told.reasoning:
        return BranchCause.REASONING_EDITED
    if said.calls == told.calls:
        return None
    if [name for name, _ in said.calls] == [name for name, _ in told.calls]:
        return BranchCause.TOOL_ARGS_REWRITTEN
    return BranchCause.TOOL_CALLS_CHANGED


def joined_text(content: Any) -> str:
    """The text of a message's content: a string, a list of text parts, or nothing."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text") or "") if isinstance(part, dict) else str(part) for part in content)


def sendable(text: str) -> str:
    """The text with halves of surrogate pairs as JSON spells them: within JSON it is the same."""
    return text.encode(errors="backslashreplace").decode()


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments of a call as an object that every client can read. What is none (other JSON, numbers that JSON does not have,
    half of a surrogate pair) is given as text."""
    try:
        arguments = json.loads(text) if text.strip() not in ("", "null") else {}
        json.dumps(arguments, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        arguments = text
    return arguments if isinstance(arguments, dict) else {"arguments": text}


def canonical_arguments(arguments: Any) -> str:
    """One text for all spellings of the same arguments: spaces, key order, 1 or 1.0, nothing or {}, text in an object or not."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    if text.strip() in ("", "null"):
        return "{}"
    try:
        value = json.loads(text, parse_float=_number)
        given = value.get("arguments") if isinstance(value, dict) else None
        if isinstance(given, str) and value == arguments_of(given):
            return canonical_arguments(given)
        # A client may get half of a pair spelled out (`sendable`), and sends that back.
        written = json.dumps(value, sort_keys=True, ensure_ascii=False)
        return HALF.sub(lambda half: f"\\\\u{ord(half[0]):x}", written)
    except (ValueError, RecursionError):
        return text  # no JSON, or deeper and with longer numbers than Python reads: compared as the text that it is


def _number(text: str) -> float:
    """JavaScript clients write 1.0 as 1."""
    value = float(text)
    return int(value) if value.is_integer() else value
