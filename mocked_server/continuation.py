"""Token in, token out: the next prompt of a chat is the earlier round's exact ids plus the newly rendered tail.

Called for each chat request by the renderer hook. Two proofs are tried: the request's messages continue an earlier round's
messages and its reply (then only the tail is rendered and tokenised, never the history), or the rendered ids themselves start with
an earlier round's ids. Without a proof the round starts a new branch, and the cause is counted.

It does not decide what is trained: that follows from the tree of rounds (`buffers.rows`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from buffers.records import Int32
from mocked_server.episodes import LiveEpisode, LiveRound

Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """Where a round's prompt comes from."""

    parent: LiveRound | None
    tail_ids: Int32
    """Prompt ids after the parent's (all of them without a parent)."""
    history: bytes | None
    """Digest of the request's messages; None for a plain completion."""
    cause: str | None = None
    """Why no earlier round could be continued; None when one was, or when this is the first."""

    def prompt_ids(self) -> list[int]:
        """The exact prompt for the engine."""
        if self.parent is None:
            return [int(i) for i in self.tail_ids]
        ids: list[int] = np.concatenate([self.parent.chain_ids(), self.tail_ids]).tolist()
        return ids


def text_of(content: Any) -> str:
    """Message content as text: a string, a list of text parts, or nothing."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)


def canonical(message: Message) -> str:
    """One text for all spellings that clients give the same message: parts or string, null fields, re-serialised arguments."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except json.JSONDecodeError:
                pass  # not JSON: compared as the text that it is
        calls.append([function.get("name"), arguments])
    content = message.get("content")
    if isinstance(content, list) and any(isinstance(part, dict) and part.get("type") != "text" for part in content):
        shown: Any = content  # images and the like: compared whole
    else:
        shown = text_of(content)
    fields = [message.get("role"), shown, calls, message.get("name"), message.get("tool_call_id")]
    return json.dumps(fields, sort_keys=True, ensure_ascii=False, default=str)


def history_digests(messages: Sequence[Message], extra: Any) -> list[bytes]:
    """digests[k] identifies messages[:k] under the template inputs `extra` (tools and the like)."""
    running = hashlib.blake2b(json.dumps(extra, sort_keys=True, default=str).encode(), digest_size=16)
    digests = [running.digest()]
    for message in messages:
        running.update(canonical(message).encode())
        digests.append(running.digest())
    return digests


def reply_matches(message: Message, live: LiveRound) -> bool:
    """Is this assistant message the reply that the round gave?"""
    if message.get("role") != "assistant" or message.get("tool_calls"):
        return False
    return text_of(message.get("content")) == live.reply_text


def find_parent(
    live: LiveEpisode, messages: Sequence[Message], digests: Sequence[bytes]
) -> tuple[LiveRound, int] | None:
    """The latest round whose history and reply this request repeats, and how many messages that covers."""
    for k in range(len(messages) - 1, 0, -1):
        if messages[k].get("role") != "assistant":
            continue
        for candidate in reversed(live.by_history.get(digests[k], ())):
            if reply_matches(messages[k], candidate):
                return candidate, k + 1
    return None


def stand_in(messages: Sequence[Message], covered: int) -> list[Message]:
    """A short conversation that the template ends as it would end the whole one: one user turn stands for the history before
    the assistant message `covered - 1`. So the cost of a round does not grow with the episode."""
    return [{"role": "user", "content": "-"}, *messages[covered - 1 :]]


def tail_of(rendered_ids: Sequence[int], *, eos: int, num_turns_closed: int, parent: LiveRound) -> Int32 | None:
    """The prompt ids that follow the parent's sampled ids, cut from the rendered stand-in.

    `num_turns_closed`: end-of-turn tokens up to and including the one that ends the assistant message. The tail begins with that
    token when the model did not sample it (its answer was cut short). None: the template closes turns in another way.
    """
    ids = np.array(rendered_ids, np.int32)
    ends = np.flatnonzero(ids == eos)
    if num_turns_closed < 1 or len(ends) < num_turns_closed:
        return None
    at = int(ends[num_turns_closed - 1])
    return ids[at + 1 :] if int(parent.ids[-1]) == eos else ids[at:]


def continue_tokens(
    live: LiveEpisode, rendered_ids: Sequence[int], *, history: bytes | None = None, cause: str | None = None
) -> Continuation:
    """Continue the longest earlier round that these ids start with, or start a new branch."""
    ids = np.array(rendered_ids, np.int32)
    for candidate in sorted(live.rounds, key=lambda r: r.total, reverse=True):
        if candidate.finish_reason == "abort" or candidate.total >= len(ids):
            continue
        if np.array_equal(candidate.chain_ids(), ids[: candidate.total]):
            return Continuation(parent=candidate, tail_ids=ids[candidate.total :], history=history)
    if cause is None and live.rounds:
        cause = "history_differs"
    return Continuation(parent=None, tail_ids=ids, history=history, cause=cause)
