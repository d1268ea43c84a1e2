"""A chat request as it is compared with the earlier ones of its episode: its messages, and a digest of every prefix of them; and
the names of what may differ, why a round could not continue the round before it.

Built once for each chat request by the renderer hook; nothing of it is kept but single digests. Two requests have the
same digest up to message k when their first k messages say the same, however the client spells them.

Clients never send an answer back byte for byte: they serialise tool arguments again, add or drop null fields, wrap text in content
parts, trim it, drop the reasoning. All of that is the same answer; other words, other calls or other argument values are not.

A break is never a loss: the round starts a new branch, which is a training row of its own. It costs: the shared history is computed
again, and the row trains fewer tokens.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class BranchCause(StrEnum):
    """Recorded with each round that starts a branch; `REMEDY` has the advice."""

    NEW_CONVERSATION = "new_conversation"
    RESAMPLED = "resampled"
    FORKED = "forked"
    REPLY_DROPPED = "reply_dropped"
    CONTENT_EDITED = "content_edited"
    REASONING_EDITED = "reasoning_edited"
    TOOL_ARGS_REWRITTEN = "tool_args_rewritten"
    TOOL_CALLS_CHANGED = "tool_calls_changed"
    HISTORY_COMPACTED = "history_compacted"
    HISTORY_EDITED = "history_edited"
    SYSTEM_CHANGED = "system_changed"
    TOOLS_CHANGED = "tools_changed"
    TEMPLATE_STRIPS_THINKING = "template_strips_thinking"
    TEMPLATE_REWRITES_HISTORY = "template_rewrites_history"
    RETOKENIZED = "retokenized"
    PROMPT_DIFFERS = "prompt_differs"


EXPECTED = frozenset({BranchCause.NEW_CONVERSATION, BranchCause.RESAMPLED, BranchCause.FORKED})
"""Branches that an agent means to have: sub-agents, parallel calls, several samples of one prompt."""

_EXACT_HISTORY = (
    "if server.replay_match is strict, set it to tolerant, which keeps what was sampled; if it is tolerant, the template does not "
    "show where an answer ends: use one that does, or train the branches as they are"
)
REMEDY: dict[BranchCause, str] = {
    BranchCause.NEW_CONVERSATION: "another conversation of the same episode (a sub-agent, a parallel call): nothing to change",
    BranchCause.RESAMPLED: "the same request again: nothing to change if the agent means to sample several answers",
    BranchCause.FORKED: "the agent went on in two ways from one answer: nothing to change if it explores on purpose",
    BranchCause.REPLY_DROPPED: (
        "the agent asked again without its last answer; keep the answer in the history to train both in one row"
    ),
    BranchCause.CONTENT_EDITED: "the agent changed the text of an answer before sending it back; send it back as it came",
    BranchCause.REASONING_EDITED: "the agent changed the reasoning of an answer; send it back as it came, or leave it out",
    BranchCause.TOOL_ARGS_REWRITTEN: "the arguments of a tool call came back with other values; send back the call as it came",
    BranchCause.TOOL_CALLS_CHANGED: "tool calls were dropped, added or renamed before they were sent back; send back all of them",
    BranchCause.HISTORY_COMPACTED: "the agent shortened its history; raise its context limit, or train the branches as they are",
    BranchCause.HISTORY_EDITED: "an earlier message changed between two requests; keep messages as they were first sent",
    BranchCause.SYSTEM_CHANGED: (
        "the system prompt changed between two requests (a clock, a counter?); keep it constant in an episode"
    ),
    BranchCause.TOOLS_CHANGED: "the tools or template arguments changed between two requests; offer the same ones in every request",
    BranchCause.TEMPLATE_STRIPS_THINKING: f"the chat template drops earlier reasoning; {_EXACT_HISTORY}",
    BranchCause.TEMPLATE_REWRITES_HISTORY: f"the chat template writes earlier turns in another way; {_EXACT_HISTORY}",
    BranchCause.RETOKENIZED: f"the history's text gives other tokens than were sampled; {_EXACT_HISTORY}",
    BranchCause.PROMPT_DIFFERS: (
        "the prompt does not begin with the tokens of an earlier one and its completion, as no text does: the end of the "
        "completion is not in it; ask for chat completions, or send all tokens as the prompt"
    ),
}


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


DIGEST_BYTES = 16
TEMPLATE_INPUTS = ("tools", "documents", "reasoning_effort")
"""Inputs that a template may write before the first message; a change of one changes the beginning of every prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Options of a chat besides its messages. Equal ones are shared by the rounds of an episode."""

    template_kwargs: dict[str, Any]
    tool_choice: Any
    inputs: bytes
    """Digest of the template's inputs."""
    identity: bytes
    """Equal for requests that are rendered and parsed alike."""
    num_chars: int
    """Characters of `template_kwargs` as JSON."""

    @classmethod
    def of(cls, template_kwargs: dict[str, Any], tool_choice: Any) -> ChatOptions:
        """`template_kwargs`: what the chat template is given, tools included."""
        written = _canonical_json([template_kwargs.get(name) for name in TEMPLATE_INPUTS])
        rest = {name: value for name, value in template_kwargs.items() if name not in TEMPLATE_INPUTS}
        other = _canonical_json([rest, str(tool_choice)])
        inputs = _digest(written)
        return cls(
            template_kwargs=template_kwargs,
            tool_choice=tool_choice,
            inputs=inputs,
            identity=inputs + _digest(other),
            num_chars=len(written) + len(other),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """See the module."""

    messages: Sequence[Message]
    digests: Sequence[bytes]
    """digests[k] identifies messages[:k]."""
    replies: Sequence[ParsedReply | None]
    """Assistant messages as answers; None for the others."""
    asked: ChatOptions

    @classmethod
    def of(cls, messages: Sequence[Message], asked: ChatOptions) -> Conversation:
        """One pass over the messages. Some of vLLM's request types hold objects for them (harmony's)."""
        messages = [each if isinstance(each, dict) else each.model_dump() for each in messages]
        running = hashlib.blake2b(digest_size=DIGEST_BYTES)
        digests = [running.digest()]
        replies = [reply_of(message) if message.get("role") == "assistant" else None for message in messages]
        calls: dict[str, int] = {}
        for message, reply in zip(messages, replies, strict=True):
            running.update(_canonical(message, reply, calls).encode())
            digests.append(running.digest())
        return cls(messages=messages, digests=digests, replies=replies, asked=asked)

    def __len__(self) -> int:
        return len(self.messages)

    @property
    def last_answer(self) -> int | None:
        """Index of the last assistant message."""
        return next((k for k in range(len(self) - 1, -1, -1) if self.replies[k] is not None), None)


def _canonical(message: Message, said: ParsedReply | None, calls: dict[str, int]) -> str:
    """One text for all spellings of a message. `calls` numbers the tool calls seen so far: ids differ from client to client."""
    role = message.get("role")
    if said is not None:
        for call in message.get("tool_calls") or ():
            calls.setdefault(str(call.get("id")), len(calls))
        return json.dumps([role, said.content, said.calls])
    answers = message.get("tool_call_id")
    name = message.get("name")
    return json.dumps([role, _content(message.get("content")), name, calls.get(str(answers), answers)], default=str)


def _content(content: Any) -> Any:
    """Text as a string. Several parts stay several: templates put something between them. Images and the like stay whole."""
    if not isinstance(content, list):
        return joined_text(content)
    parts = [part["text"] if isinstance(part, dict) and "text" in part else part for part in content]
    return parts[0] if len(parts) == 1 else parts


def _canonical_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
