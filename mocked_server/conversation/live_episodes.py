"""Live episodes: what the server remembers of a running episode in order to continue it token for token.

An episode is opened when its task is leased and closed when it is scored, failed or stale; then its memory is dropped.
Each round keeps only its own new ids; a whole prompt is put together from its chain of parents when the next round
needs it. `LiveEpisode.tree` checks by digests, where a round is recorded, that its prompt is what the parent's ids and its own are.
An episode of an earlier process is restored from its rounds in the ledger: a later request continues the exact ids that were
recorded; what cannot be told from the rounds (a stop string that was left out of an answer) only costs the proof by messages, the
ids themselves still prove it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from buffers.errors import EpisodeClosed, RequestRefused, UnknownEpisode
from buffers.records import Episode, Int32, Round
from buffers.training_rows import ABORTED, TokenTree
from mocked_server.client_retries import Answers
from mocked_server.conversation.chat_history import DIGEST_BYTES, BranchCause, ChatOptions, Conversation, ParsedReply

MAX_KEPT_BYTES = 64 * 1024 * 1024
"""Bytes kept of one episode for continuation: about 7,000 rounds of an ordinary agent."""
ROUND_BYTES = 1024
"""Bytes of a round besides its ids and texts."""


@dataclass(slots=True, eq=False)
class EpisodeMemory:
    """Memory of the requests of one episode; `http.request_limits.RequestMemory` counts into it."""

    in_flight_bytes: int = 0
    """Bytes of bodies that are being read or answered."""
    in_flight_requests: int = 0


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class LiveRound:
    """One finished round. `ids` are its new ones: prompt tail, then sampled."""

    parent: LiveRound | None
    ids: Int32
    num_sampled: int
    finish_reason: str
    text: str
    """The sampled text, as it was detokenised (without a stop string)."""
    stop: str = ""
    """The stop string that ended it: sampled, and not told."""
    asked: ChatOptions | None = None
    """None: not a chat."""
    cause: BranchCause | None = None
    """Why it is a branch of its own; None: it is the first, or the only one that continues its parent."""
    said: ParsedReply | None = None
    """The text as the API showed it, once it was needed."""
    round_index: int | None = None
    """Index in the buffer; None: another program generates and records."""
    total: int = 0
    """Number of ids of the whole chain, this round included."""
    children: list[LiveRound] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.total = len(self.ids) + (self.parent.total if self.parent else 0)

    @property
    def tail_ids(self) -> Int32:
        """Its prompt's new ids."""
        return self.ids[: len(self.ids) - self.num_sampled]

    def chain_ids(self) -> Int32:
        """[total] prompt and sampled ids from the root to the end of this round."""
        return np.concatenate([live.ids for live in self.chain()])

    def chain(self) -> list[LiveRound]:
        """The rounds from the root to this one."""
        path = [self]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        return path[::-1]


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class LiveEpisode:
    """A running episode. `by_history` finds the rounds that answered a given history (digest of its messages)."""

    episode: Episode
    worker: str | None = None
    """Name of the worker that leased it, empty for those without one; None: it is played in this project."""
    is_recorded: bool = True
    """False: its requests are answered, and nothing of them is stored or remembered."""
    adapter: Callable[[], str] = str
    """The adapter that a request is answered with now, by name; empty: the newest of the policy."""
    is_watched: bool = False
    """Another model answers it: `serve.upstream`."""
    requests: int = 0
    """Being answered now."""
    heard: float = field(default_factory=time.monotonic)
    """Time of its agent's last sign of life: an answer ended, or it was leased."""
    rounds: list[LiveRound] = field(default_factory=list)
    roots: list[LiveRound] = field(default_factory=list)
    by_history: dict[bytes, list[LiveRound]] = field(default_factory=dict)
    openings: set[bytes] = field(default_factory=set)
    """Digests of the first messages seen."""
    longest: int = 0
    """Messages in the longest history seen."""
    branch_causes: dict[BranchCause, int] = field(default_factory=dict)
    """How often a round could not continue the one before it, by cause."""
    constrained: Counter[str] = field(default_factory=Counter)
    """How often a request changed the distribution that it is sampled from, by field."""
    stops_kept: int = 0
    """How often a prompt held the stop string of the answer that it continues: sampled, and not in the agent's history."""
    answers: Answers = field(default_factory=Answers)
    """Answers kept for automatic retries."""
    kept_bytes: int = 0
    """About what the rounds below take in memory."""
    memory: EpisodeMemory = field(default_factory=EpisodeMemory)
    """Memory of its requests."""
    tree: TokenTree = field(init=False)
    """Verifies the rounds that this process records."""
    _asked: dict[bytes, ChatOptions] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tree = TokenTree(self.episode_id)

    @property
    def episode_id(self) -> str:
        return self.episode.episode_id

    @contextmanager
    def answering(self) -> Iterator[None]:
        """A request with its key is being answered: its agent lives."""
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1
            self.heard = time.monotonic()

    def known(self, asked: ChatOptions) -> ChatOptions:
        """The equal one that is kept already, else `asked`: tool descriptions are long and seldom change."""
        return self._asked.get(asked.identity, asked)

    def check_room(self) -> None:
        """Raises RequestRefused (413) when so much is kept of this episode that no further round of it is served."""
        if self.kept_bytes > MAX_KEPT_BYTES:
            raise RequestRefused(
                f"an episode may leave at most {MAX_KEPT_BYTES:,} bytes of rounds and tool descriptions to remember, got "
                f"{self.kept_bytes:,}; end it and lease a new task",
                status=413,
            )

    def add_round(self, live: LiveRound, *, chat: Conversation | None) -> None:
        """Append a round; `chat` is what it answered (None: a plain completion). Aborted rounds are not remembered: nothing
        can continue them."""
        if live.finish_reason == ABORTED:
            return
        if live.asked is not None:
            if live.asked.identity not in self._asked:
                self.kept_bytes += live.asked.num_chars
            live.asked = self._asked.setdefault(live.asked.identity, live.asked)
        self.kept_bytes += live.ids.nbytes + len(live.text) + ROUND_BYTES
        siblings = live.parent.children if live.parent else self.roots
        if live.cause is None and siblings:
            live.cause = self._why_beside(live, siblings, chat)
        if live.cause is not None:
            self.branch_causes[live.cause] = self.branch_causes.get(live.cause, 0) + 1
        self.stops_kept += live.parent is not None and bool(live.parent.stop)
        self.rounds.append(live)
        siblings.append(live)
        if chat is not None and len(chat) > 0:
            self.by_history.setdefault(chat.digests[-1], []).append(live)
            self.openings.add(chat.digests[1])
            self.longest = max(self.longest, len(chat))

    def restore(self, rounds: Sequence[Round], *, decode: Callable[[list[int]], str]) -> None:
        """Take over the rounds of an earlier process, as its ledger has them."""
        self.tree = TokenTree(self.episode_id, rounds=rounds)
        known: dict[int, LiveRound] = {}
        for round_ in rounds:
            if round_.finish_reason == ABORTED:
                continue
            memo = round_.memo
            inputs, identity = memo[DIGEST_BYTES:_INPUTS_END], memo[_INPUTS_END:_IDENTITY_END]
            known[round_.round_index] = live = LiveRound(
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
            (live.parent.children if live.parent else self.roots).append(live)
            self.rounds.append(live)
            if memo:
                self.by_history.setdefault(memo[:DIGEST_BYTES], []).append(live)

    def matches(self, ids: Int32) -> Iterator[tuple[LiveRound, int]]:
        """Each round for which `ids` begin with all ids before its own, and how many of its own follow there; parents first."""
        open_ = list(self.roots)
        while open_:
            live = open_.pop(0)
            alike = common_prefix(ids[live.total - len(live.ids) : live.total], live.ids)
            yield live, alike
            if alike == len(live.ids):
                open_ += live.children

    def drop(self) -> None:
        """Free its rounds now: timers and requests may still hold the object."""
        for kept in (self.rounds, self.roots, self.by_history, self.openings, self._asked):
            kept.clear()
        self.answers = Answers()

    def _why_beside(self, live: LiveRound, siblings: list[LiveRound], chat: Conversation | None) -> BranchCause:
        """Why there is a second round after the same one (or a second root) although no answer was left out."""
        again = any(np.array_equal(live.tail_ids, other.tail_ids) for other in siblings)
        if again or (chat is not None and chat.digests[-1] in self.by_history):
            return BranchCause.RESAMPLED
        if live.parent is not None:
            return BranchCause.FORKED
        return BranchCause.PROMPT_DIFFERS if chat is None else BranchCause.NEW_CONVERSATION


def common_prefix(one: Int32, other: Int32) -> int:
    """Number of ids that both begin with."""
    common = min(len(one), len(other))
    differs = np.flatnonzero(one[:common] != other[:common])
    return int(differs[0]) if len(differs) else common


class Episodes:
    """All running episodes by id, and why the ended ones are closed."""

    def __init__(self) -> None:
        self._live: dict[str, LiveEpisode] = {}
        self._closed: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._live)

    def open(self, episode: Episode, *, worker: str | None = None) -> LiveEpisode:
        """Start to serve an episode."""
        live = LiveEpisode(episode=episode, worker=worker)
        self._live[episode.episode_id] = live
        return live

    def find(self, episode_id: str) -> LiveEpisode | None:
        """The running episode; None: it has ended, or never was."""
        return self._live.get(episode_id)

    def get(self, episode_id: str) -> LiveEpisode:
        """The running episode; raises EpisodeClosed (with the reason) or UnknownEpisode."""
        live = self._live.get(episode_id)
        if live is not None:
            return live
        reason = self._closed.get(episode_id)
        if reason is not None:
            raise EpisodeClosed(f"episode {episode_id} has ended ({reason}); lease a new task for more model calls")
        raise UnknownEpisode(f"no episode {episode_id}; use the api_key that came with the task")

    def ids(self, *, worker: str | None = None) -> list[str]:
        """Ids of the running episodes: all, or those that this worker leased."""
        return [name for name, live in self._live.items() if worker is None or live.worker == worker]

    def silent(self, seconds: float) -> list[str]:
        """Episodes whose agent was not heard for `seconds`."""
        return [live.episode_id for live in self.quiet(seconds) if live.worker is not None]

    def quiet(self, seconds: float) -> list[LiveEpisode]:
        """Episodes without a request for `seconds`."""
        since = time.monotonic() - seconds
        return [live for live in self._live.values() if live.requests == 0 and live.heard < since]

    def close(self, episode_id: str, reason: str) -> None:
        """Stop serving an episode; closing one that is not open only records the reason."""
        if (live := self._live.pop(episode_id, None)) is not None:
            live.drop()
        self._closed.setdefault(episode_id, reason)

    def forget(self, episode_id: str) -> None:
        """Give up what is remembered of an episode that stays open; it can be restored from the ledger."""
        if (live := self._live.pop(episode_id, None)) is not None:
            live.drop()

    def metrics(self) -> dict[str, Any]:
        """Sizes for the status page."""
        stops = sum(live.stops_kept for live in self._live.values())
        return {"episodes/open": len(self._live), "episodes/closed": len(self._closed), "episodes/stops_kept": stops}


_INPUTS_END, _IDENTITY_END = 2 * DIGEST_BYTES, 4 * DIGEST_BYTES


def memo_of(chat: Conversation | None, cause: BranchCause | None = None) -> bytes:
    """Memo of a chat in the ledger, beside its ids: the digests by which a later request is recognised, then why it could not
    continue the answer before, for people (`buffers.ledger.branches`)."""
    if chat is None:
        return b""
    return chat.digests[-1] + chat.asked.inputs + chat.asked.identity + (cause.value.encode() if cause else b"")
