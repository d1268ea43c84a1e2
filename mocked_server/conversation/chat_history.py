"""A chat request as it is compared with the earlier ones of its episode: its messages, and a digest of every prefix of them.

Built once for each chat request by the renderer hook; nothing of it is kept but single digests. Two requests have the
same digest up to message k when their first k messages say the same, however the client spells them (see `message_match`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mocked_server.conversation.message_match import Message, ParsedReply, joined_text, reply_of

DIGEST_BYTES = 16
TEMPLATE_INPUTS = ("tools", "documents", "reasoning_effort")
"""What a template may write before the first message; a change of it changes the beginning of every prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What a chat was asked with besides its messages. Equal ones are shared by the rounds of an episode."""

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
