"""Which engine serves a request: sticky by episode, balanced by the tokens that episodes hold. Pure: no engine is called.

Owned by `mocked_server.fleet.engine_fleet`. Rules: an episode's first call goes to the engine whose live episodes hold the fewest
tokens; the episodes of one group prefer the engine of the group's others, whose cache has their prompt; later calls stay, whose
history that engine's cache holds. An episode is moved when its engine leaves, lags, or is overloaded: above its share by a
ratio and by a number of episodes. Invariants: an engine that lags more versions than allowed takes no call; a call is sent to an
engine that takes calls, or to none.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

OVERLOAD_RATIO = 1.25
OVERLOAD_EPISODES = 8
"""An engine is overloaded when it holds more than this ratio of the mean, and this many mean episodes more."""


@dataclass(slots=True)
class _Episode:
    """A live episode: where it is, and what its last prompt held."""

    engine: str
    group: int | None
    tokens: int


@dataclass(slots=True)
class _Seat:
    """An engine that takes calls."""

    version: int
    episodes: int = 0
    tokens: int = 0
    last_chosen: int = 0
    moved_in: int = 0


class Routes:
    """`max_policy_lag`: versions that an engine may be behind the newest; None: any."""

    def __init__(self, *, max_policy_lag: int | None = None) -> None:
        self._max_policy_lag = max_policy_lag
        self._seats: dict[str, _Seat] = {}
        self._episodes: dict[str, _Episode] = {}
        self._groups: dict[int, Counter[str]] = {}
        """Group -> engine -> its live episodes there."""
        self._moved_in: Counter[str] = Counter()
        self._newest = 0
        self._chosen = 0

    def join(self, engine: str, *, version: int) -> None:
        """It takes calls; those that it serves already stay."""
        if engine in self._seats:
            self._seats[engine].version = version
            return
        self._seats[engine] = _Seat(version)
        for episode in self._episodes.values():
            if episode.engine == engine:
                self._seats[engine].episodes += 1
                self._seats[engine].tokens += episode.tokens

    def leave(self, engine: str) -> None:
        """It takes no calls; its episodes are moved with their next one, unless it is back by then."""
        self._seats.pop(engine, None)

    def publish(self, version: int) -> None:
        """The newest version of the policy."""
        self._newest = version

    def moved_in(self, engine: str) -> int:
        """Episodes that came to it from another engine."""
        return self._moved_in[engine]

    def choose(self, episode_id: str, *, group: int | None, tokens: int) -> str | None:
        """The engine for a call whose prompt has so many tokens; None: none takes calls now."""
        if not (open_ := self.open()):
            return None
        known = self._episodes.get(episode_id)
        if known is None:
            engine = self._place(group, open_)
            self._episodes[episode_id] = _Episode(engine, group, 0)
            self._count(engine, group, episodes=1)
        else:
            engine = known.engine
            if engine not in open_ or self._should_leave(known, tokens, open_):
                engine = self._least(open_)
            if engine != known.engine:
                self._count(known.engine, known.group, episodes=-1, tokens=-known.tokens)
                known.engine, known.tokens = engine, 0
                self._count(engine, known.group, episodes=1)
                self._moved_in[engine] += 1
        self.grow(episode_id, tokens)
        self._chosen += 1
        self._seats[engine].last_chosen = self._chosen
        return engine

    def open(self) -> dict[str, _Seat]:
        """The engines that take calls now."""
        return {name: seat for name, seat in self._seats.items() if self._is_fresh(seat)}

    def grow(self, episode_id: str, tokens: int) -> None:
        """The episode holds so many tokens now."""
        if (episode := self._episodes.get(episode_id)) is not None:
            self._count(episode.engine, None, tokens=tokens - episode.tokens)
            episode.tokens = tokens

    def forget(self, episode_id: str) -> None:
        """The episode has ended."""
        if (episode := self._episodes.pop(episode_id, None)) is not None:
            self._count(episode.engine, episode.group, episodes=-1, tokens=-episode.tokens)

    def _is_fresh(self, seat: _Seat) -> bool:
        return self._max_policy_lag is None or seat.version >= self._newest - self._max_policy_lag

    def _place(self, group: int | None, open_: dict[str, _Seat]) -> str:
        beside = self._groups.get(group, Counter()) if group is not None else Counter()
        for engine, _ in beside.most_common():
            if engine in open_ and not self._is_overloaded(open_[engine], open_):
                return engine
        return self._least(open_)

    def _least(self, open_: dict[str, _Seat]) -> str:
        return min(open_, key=lambda name: (open_[name].tokens, open_[name].episodes, open_[name].last_chosen, name))

    def _should_leave(self, episode: _Episode, tokens: int, open_: dict[str, _Seat]) -> bool:
        """Its engine is overloaded, and the move leaves the other one with less than it has."""
        here = open_[episode.engine]
        if not self._is_overloaded(here, open_):
            return False
        return min(seat.tokens for seat in open_.values()) + tokens < here.tokens

    def _is_overloaded(self, seat: _Seat, open_: dict[str, _Seat]) -> bool:
        tokens = sum(other.tokens for other in open_.values())
        episodes = sum(other.episodes for other in open_.values())
        mean = tokens / len(open_)
        return seat.tokens > OVERLOAD_RATIO * mean and (
            (seat.tokens - mean) * episodes > OVERLOAD_EPISODES * tokens  # in mean episodes
        )

    def _count(self, engine: str, group: int | None, *, episodes: int = 0, tokens: int = 0) -> None:
        if (seat := self._seats.get(engine)) is not None:
            seat.episodes += episodes
            seat.tokens += tokens
        if group is not None and episodes:
            engines = self._groups.setdefault(group, Counter())
            engines[engine] += episodes
            if engines[engine] <= 0:
                del engines[engine]
            if not engines:
                del self._groups[group]
