"""`Query`: which episodes of a run are wanted, as texts by name, read by type and within bounds.

Used by the page's routes and by `buffers.ledger.cli`: the same names mean the same in both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from buffers.ledger.branches import ANY_BREAK, CAUSES
from buffers.ledger.episode_views import EpisodeFilter, FilterError

MOST_POINTS = 10_000
LARGEST_NUMBER, MOST_DIGITS = 2**53, 16
"""What a browser's numbers hold exactly."""
EPISODE_KEYS = (
    "step", "task", "q", "group", "state", "group_state", "min_score", "max_score", "reason", "agent", "min_tokens", "max_tokens",
    "min_rounds", "max_rounds", "cause", "untrained", "user", "session_state", "feedback",
)  # fmt: skip
"""What episodes are chosen by. Of a step, a span such as 10-20; of a state, several with commas."""
SPAN = "a number or a span such as 10-20"


class Query:
    """What a request asks for, by its path and its parameters, read by type. Raises FilterError naming the parameter."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = given

    def text(self, name: str, default: str = "") -> str:
        return self._given.get(name, default)

    def texts(self, name: str) -> tuple[str, ...]:
        return tuple(part for part in self._given.get(name, "").split(",") if part)

    def number(self, name: str, default: int, *, most: int, least: int = 0) -> int:
        """A whole number in a range; larger ones are cut to it."""
        found = self.maybe(name, int)
        return default if found is None else min(max(found, least), most)

    def maybe(self, name: str, kind: Callable[[str], Any]) -> Any:
        """None: it is not given."""
        given = self._given.get(name, "")
        return number_of(given, name=name, kind=kind) if given else None

    def span(self, name: str) -> tuple[int, int] | None:
        """`12` or `10-20`."""
        given = self._given.get(name, "")
        first, _, last = given.partition("-")
        if not given:
            return None
        return number_of(first, name=name, kind=int, rule=SPAN), number_of(
            last or first, name=name, kind=int, rule=SPAN
        )

    def window(self, *, default: int, most: int) -> tuple[int, int]:
        """`start` and `count`."""
        return self.number("start", 0, most=1 << 40), self.number("count", default, most=most, least=1)

    def episode_filter(self) -> EpisodeFilter:
        """The episodes that it asks for, by EPISODE_KEYS."""
        cause = self.text("cause")
        if cause and cause != "any" and cause not in CAUSES:
            raise FilterError(f"cause must be any, or of {', '.join(CAUSES)}, got {cause!r:.40}")
        return EpisodeFilter(
            steps=self.span("step"),
            task=self.text("task") or None,
            text=self.text("q"),
            group=self.maybe("group", int),
            states=self.texts("state"),
            group_states=self.texts("group_state"),
            score=(self.maybe("min_score", float), self.maybe("max_score", float)),
            reason=self.text("reason") or None,
            agent=self.text("agent") or None,
            tokens=(self.maybe("min_tokens", int), self.maybe("max_tokens", int)),
            rounds=(self.maybe("min_rounds", int), self.maybe("max_rounds", int)),
            causes=0 if not cause else ANY_BREAK if cause == "any" else 1 << CAUSES.index(cause),
            untrained=self.text("untrained") == "1",
            user=self.text("user") or None,
            session_states=self.texts("session_state"),
            feedback={"1": True, "0": False}.get(self.text("feedback")),
        )


def number_of(text: str, *, name: str, kind: Callable[[str], Any], rule: str = "a number") -> Any:
    """The number that a text is, such as the databases have. Raises FilterError naming the parameter."""
    try:
        found = kind(text)
    except ValueError:
        found = None
    if found is None or found != found or abs(found) > LARGEST_NUMBER:
        raise FilterError(f"{name} must be {rule}, got {text!r:.40}; leave it out for no limit")
    return found
