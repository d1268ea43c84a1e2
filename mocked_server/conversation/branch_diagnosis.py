"""Finds out why a round could not continue the answer before it. Called only when that happens; changes nothing.

`diagnose_messages` compares messages (the agent sent something else), `diagnose_tokens` compares tokens (the template
wrote something else).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from buffers.records import Int32
from mocked_server.conversation.branch_causes import BranchCause
from mocked_server.conversation.chat_history import Conversation
from mocked_server.conversation.continuation import Parse, is_reply, parsed_reply
from mocked_server.conversation.live_episodes import LiveEpisode, LiveRound
from mocked_server.conversation.message_match import difference

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
    at = _first_difference(exact, ids)
    broken = next(live for live in parent.chain() if live.total > at)
    sampled_from = broken.total - broken.num_sampled
    sampled = exact[sampled_from : broken.total]
    said = parsed_reply(broken, parse)
    shown = decode(ids[sampled_from : sampled_from + 2 * len(sampled) + 64].tolist())
    thought = said.reasoning or broken.text.partition("<think>")[2].partition("</think>")[0].strip()
    if thought and thought not in shown:
        return BranchCause.TEMPLATE_STRIPS_THINKING
    if at >= sampled_from and shown.startswith(decode(sampled.tolist())):
        return BranchCause.RETOKENIZED
    return BranchCause.TOOL_ARGS_REWRITTEN if said.calls else BranchCause.TEMPLATE_REWRITES_HISTORY


def _first_difference(one: Int32, other: Int32) -> int:
    common = min(len(one), len(other))
    differs = np.flatnonzero(one[:common] != other[:common])
    return int(differs[0]) if len(differs) else common
