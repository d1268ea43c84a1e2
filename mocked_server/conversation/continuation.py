"""Token in, token out: the next prompt of a chat is the earlier round's exact ids plus the newly rendered tail.

Called for each chat request by the renderer hook. Two proofs are tried: the request's messages continue an earlier round's
messages and its reply (then only the tail is rendered and tokenised, never the history), or the rendered ids themselves
start with an earlier round's ids. Without a proof the round starts a new branch.

It does not decide what is trained: that follows from the tree of rounds (`buffers.training_rows`).

Where a round could not continue the answer before it, `diagnose_messages` compares messages (the agent sent something else) and
`diagnose_tokens` compares tokens (the template wrote something else); both change nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from buffers.records import Int32
from mocked_server.conversation.chat_history import (
    BranchCause,
    ChatOptions,
    Conversation,
    Message,
    ParsedReply,
    difference,
    joined_text,
    same_text,
)
from mocked_server.conversation.live_episodes import LiveEpisode, LiveRound, common_prefix

Parse = Callable[[str, ChatOptions], ParsedReply]
"""A sampled text and what it was asked with -> how the API showed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """The origin of a round's prompt."""

    parent: LiveRound | None
    tail_ids: Int32
    """Prompt ids after the parent's (all of them without a parent)."""
    chat: Conversation | None = None
    """The request's messages; None for a plain completion."""
    cause: BranchCause | None = None
    """Why the latest answer in the history could not be continued; None when it was, or when this is the first round."""

    @property
    def parent_index(self) -> int | None:
        """Index of the stored round that is continued; None: there is none, or it is not stored."""
        return None if self.parent is None else self.parent.round_index

    def prompt_ids(self) -> Int32:
        """[P] the exact prompt for the engine."""
        return self.tail_ids if self.parent is None else np.concatenate([self.parent.chain_ids(), self.tail_ids])


def parsed_reply(live: LiveRound, parse: Parse) -> ParsedReply:
    """A round's text as the API showed it. Parsed when it is first asked for, then kept."""
    if live.said is None:
        live.said = parse(live.text, live.asked) if live.asked is not None else ParsedReply(live.text.strip())
    return live.said


def is_reply(said: ParsedReply, live: LiveRound, parse: Parse) -> bool:
    """Is this the answer that the round gave?"""
    if same_text(said, live.text) or difference(said, parsed_reply(live, parse)) is None:
        return True
    # Agents that stop at a mark of their own (`</code>`) often put it back: it is what the model said.
    return bool(live.stop) and same_text(said, live.text + live.stop)


def find_parent(live: LiveEpisode, chat: Conversation, parse: Parse) -> tuple[LiveRound, int] | None:
    """The latest round whose history and reply this request repeats, and how many messages that covers."""
    for k in range(len(chat) - 1, 0, -1):
        if (said := chat.replies[k]) is None:
            continue
        for candidate in reversed(live.by_history.get(chat.digests[k], ())):
            if candidate.asked is not None:  # after a restart only digests are known, until an equal request comes
                candidate.asked = live.known(candidate.asked)
            asked_alike = candidate.asked is not None and candidate.asked.inputs == chat.asked.inputs
            if asked_alike and is_reply(said, candidate, parse):
                return candidate, k + 1
    return None


def stand_in(messages: Sequence[Message], covered: int, *, said: str) -> tuple[list[Message], list[Message]]:
    """A short conversation that the template ends as it would end the whole one, up to the assistant message `covered - 1` and
    after it. One user turn stands for the history, so that the cost of a round does not grow with the episode, and `said` for
    what the answer says: it is in the prompt already."""
    answer = messages[covered - 1]
    calls = [
        {**call, "function": {**(call.get("function") or {}), "arguments": json.dumps({"a": said})}}
        for call in answer.get("tool_calls") or ()
    ]
    opening: list[Message] = [{"role": "user", "content": "-"}]
    if (first := messages[0].get("role")) in ("system", "developer"):
        opening.insert(0, {"role": first, "content": "-"})
    speaks = said if joined_text(answer.get("content")) or not calls else ""
    opening.append({"role": "assistant", "content": speaks, **({"tool_calls": calls} if calls else {})})
    return opening, list(messages[covered:])


def longest_prefix(live: LiveEpisode, ids: Int32) -> LiveRound | None:
    """The longest earlier round, the latest of equals, that these ids start with."""
    best: LiveRound | None = None
    for live_round, alike in live.matches(ids):
        if alike == len(live_round.ids) and (best is None or live_round.total >= best.total):
            best = live_round
    return best


def continue_tokens(
    live: LiveEpisode, rendered_ids: Sequence[int] | Int32, *, chat: Conversation | None = None
) -> Continuation:
    """Continue the longest earlier round that these ids start with, or start a new branch. `cause` is left to the caller."""
    ids = np.array(rendered_ids, np.int32)
    parent = longest_prefix(live, ids)
    return Continuation(parent=parent, tail_ids=ids[parent.total :] if parent else ids, chat=chat)


SHORTEST_COMPACTED = 4
"""A history of fewer messages than this is a beginning, not something that was shortened."""


def diagnose_messages(live: LiveEpisode, chat: Conversation, parse: Parse) -> BranchCause | None:
    """The first thing in `chat` that the episode's earlier rounds do not know; None in the first round."""
    if not live.rounds or not len(chat):
        return None
    known = [k for k in range(len(chat), 0, -1) if chat.digests[k] in live.by_history]
    if not known:
        return _unknown_history(live, chat, parse)
    shared = known[0]
    if shared == len(chat):
        return BranchCause.RESAMPLED
    answers = live.by_history[chat.digests[shared]]
    if (said := chat.replies[shared]) is None:
        return BranchCause.HISTORY_COMPACTED if len(chat) < live.longest else BranchCause.REPLY_DROPPED
    if any(is_reply(said, answer, parse) for answer in answers):
        alike = any(answer.asked is not None and answer.asked.inputs == chat.asked.inputs for answer in answers)
        return BranchCause.HISTORY_EDITED if alike else BranchCause.TOOLS_CHANGED
    return difference(said, parsed_reply(answers[-1], parse))


def _unknown_history(live: LiveEpisode, chat: Conversation, parse: Parse) -> BranchCause:
    """No earlier request's messages begin this one: is it another conversation, or the same one changed?"""
    first_known = chat.digests[1] in live.openings
    shorter = len(chat) < live.longest and live.longest >= SHORTEST_COMPACTED
    told_before = {(said.content, said.calls) for said in (parsed_reply(earlier, parse) for earlier in live.rounds)}
    told_before |= {(earlier.text.strip(), ()) for earlier in live.rounds}
    if any(said is not None and (said.content, said.calls) in told_before for said in chat.replies):
        if not first_known and chat.messages[0].get("role") in ("system", "developer"):
            return BranchCause.SYSTEM_CHANGED
        return BranchCause.HISTORY_COMPACTED if shorter else BranchCause.HISTORY_EDITED
    return BranchCause.HISTORY_COMPACTED if first_known and shorter else BranchCause.NEW_CONVERSATION


def diagnose_tokens(
    parent: LiveRound, rendered_ids: Sequence[int], *, parse: Parse, decode: Callable[[list[int]], str]
) -> BranchCause:
    """The messages continue `parent`, but the rendered prompt does not begin with its exact ids."""
    ids = np.array(rendered_ids, np.int32)
    exact = parent.chain_ids()
    at = common_prefix(exact, ids)
    broken = next(live for live in parent.chain() if live.total > at)
    sampled_from = broken.total - broken.num_sampled
    sampled = exact[sampled_from : broken.total]
    said = parsed_reply(broken, parse)
    shown = decode(ids[sampled_from : sampled_from + 2 * len(sampled) + 64].tolist())
    thought = said.reasoning or broken.text.partition("<think>")[2].partition("</think>")[0].strip()
    if thought and thought not in shown:
        return BranchCause.TEMPLATE_STRIPS_THINKING
    is_alike = at >= sampled_from and shown.startswith(decode(sampled.tolist()))
    return BranchCause.RETOKENIZED if is_alike else BranchCause.TEMPLATE_REWRITES_HISTORY
