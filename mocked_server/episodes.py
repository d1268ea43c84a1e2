"""Live episodes: what the server remembers of a running episode in order to continue it token for token.

An episode is opened when its task is leased and closed when it is scored, failed or stale; then its memory is dropped. Each round
keeps only its own new ids; a whole prompt is put together from its chain of parents when the next round needs it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from buffers.errors import EpisodeClosed, UnknownEpisode
from buffers.records import Episode, Int32


@dataclass(slots=True, kw_only=True)
class LiveRound:
    """One finished round. `ids` are its new ones: prompt tail, then sampled."""

    index: int
    parent: LiveRound | None
    ids: Int32
    finish_reason: str
    reply_text: str
    total: int
    """Number of ids of the whole chain, this round included."""

    def chain_ids(self) -> Int32:
        """[total] prompt and sampled ids from the root to the end of this round."""
        parts: list[Int32] = []
        at: LiveRound | None = self
        while at is not None:
            parts.append(at.ids)
            at = at.parent
        return np.concatenate(parts[::-1])


@dataclass(slots=True, kw_only=True)
class LiveEpisode:
    """A running episode. `by_history` finds the rounds that answered a given history (digest of its messages)."""

    episode: Episode
    rounds: list[LiveRound] = field(default_factory=list)
    by_history: dict[bytes, list[LiveRound]] = field(default_factory=dict)
    breaks: dict[str, int] = field(default_factory=dict)
    """Cause -> how often a round could not continue an earlier one."""

    @property
    def episode_id(self) -> str:
        return self.episode.episode_id

    def add_round(
        self, *, parent: LiveRound | None, ids: Int32, finish_reason: str, reply_text: str, history: bytes | None
    ) -> LiveRound:
        """Append a round; `history` is the digest of the messages it answered (None: not a chat)."""
        total = len(ids) + (parent.total if parent else 0)
        live = LiveRound(
            index=len(self.rounds),
            parent=parent,
            ids=ids,
            finish_reason=finish_reason,
            reply_text=reply_text,
            total=total,
        )
        self.rounds.append(live)
        if history is not None and finish_reason != "abort":
            self.by_history.setdefault(history, []).append(live)
        return live


class Episodes:
    """All running episodes by id, and why the ended ones are closed."""

    def __init__(self) -> None:
        self._live: dict[str, LiveEpisode] = {}
        self._closed: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._live)

    def open(self, episode: Episode) -> LiveEpisode:
        """Start to serve an episode."""
        live = LiveEpisode(episode=episode)
        self._live[episode.episode_id] = live
        return live

    def get(self, episode_id: str) -> LiveEpisode:
        """The running episode; raises EpisodeClosed (with the reason) or UnknownEpisode."""
        live = self._live.get(episode_id)
        if live is not None:
            return live
        reason = self._closed.get(episode_id)
        if reason is not None:
            raise EpisodeClosed(f"episode {episode_id} has ended ({reason}); lease a new task for more model calls")
        raise UnknownEpisode(f"no episode {episode_id}; use the api_key that came with the task")

    def close(self, episode_id: str, reason: str) -> None:
        """Stop serving an episode; closing one that is not open only records the reason."""
        self._live.pop(episode_id, None)
        self._closed.setdefault(episode_id, reason)

    def metrics(self) -> dict[str, Any]:
        """Sizes for the status page."""
        return {"episodes/open": len(self._live), "episodes/closed": len(self._closed)}
