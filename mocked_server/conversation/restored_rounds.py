"""A running episode as the server remembers it, put together again from its rounds in the ledger.

Called by `MockedServer` when an earlier process died and the agents did not. Invariant: a later request of the episode
continues the exact ids that were recorded; what cannot be told from the rounds (a stop string that was left out of an
answer) only costs the proof by messages, the ids themselves still prove it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from buffers.records import Round
from buffers.training_rows import ABORTED
from mocked_server.conversation.branch_causes import BranchCause
from mocked_server.conversation.chat_history import DIGEST_BYTES, ChatOptions, Conversation
from mocked_server.conversation.live_episodes import LiveEpisode, LiveRound

_INPUTS_END, _IDENTITY_END = 2 * DIGEST_BYTES, 4 * DIGEST_BYTES


def memo_of(chat: Conversation | None, cause: BranchCause | None = None) -> bytes:
    """What the ledger keeps of a chat beside its ids: the digests by which a later request is recognised, then why it could not
    continue the answer before, for people (`buffers.ledger.branches`)."""
    if chat is None:
        return b""
    return chat.digests[-1] + chat.asked.inputs + chat.asked.identity + (cause.value.encode() if cause else b"")


def remember(live: LiveEpisode, rounds: Sequence[Round], *, decode: Callable[[list[int]], str]) -> None:
    """Add the rounds of an earlier process to an episode that was just opened."""
    known: dict[int, LiveRound] = {}
    for round_ in rounds:
        if round_.finish_reason == ABORTED:
            continue
        memo = round_.memo
        inputs, identity = memo[DIGEST_BYTES:_INPUTS_END], memo[_INPUTS_END:_IDENTITY_END]
        known[round_.round_index] = again = LiveRound(
            parent=None if round_.parent is None else known[round_.parent],
            ids=np.concatenate([round_.tail_ids, round_.sampled_ids]),
            num_sampled=len(round_.sampled_ids),
            finish_reason=round_.finish_reason,
            text=decode(round_.sampled_ids.tolist()),
            round_index=round_.round_index,
            asked=ChatOptions(template_kwargs={}, tool_choice=None, inputs=inputs, identity=identity, num_chars=0)
            if memo
            else None,
        )
        (again.parent.children if again.parent else live.roots).append(again)
        live.rounds.append(again)
        if memo:
            live.by_history.setdefault(memo[:DIGEST_BYTES], []).append(again)
