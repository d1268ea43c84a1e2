"""What the gate of a live run judges by: how sure it is that scores are not worse, and how alike answers are.

Used by `learner.live_versions`. Pure functions of what was played, or said by users. A level is the chance of an error that is
allowed, one-sided; bounds are Student's.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import NormalDist, fmean, variance
from typing import NamedTuple

LEVEL = 0.05
"""Chance at most that of all candidates in a row, each of which scores `margin` below what it is compared with, one passes."""
MOST_ANSWERS = 64
"""Answers that are compared with one another."""
MOST_TOKENS = 512
"""First tokens of an answer that are compared."""


class Answer(NamedTuple):
    """One branch of a played episode: all its ids, 1 in `mask` where the policy sampled the token."""

    ids: Sequence[int]
    mask: Sequence[int]

    @property
    def prompt(self) -> tuple[int, ...]:
        """What stands before the first sampled token."""
        return tuple(self.ids[: list(self.mask).index(1)])

    @property
    def sampled(self) -> list[int]:
        return [token for token, own in zip(self.ids, self.mask, strict=True) if own][:MOST_TOKENS]


class Bounds(NamedTuple):
    """A mean difference, and what the true one is above and below with certainty."""

    least: float
    mean: float
    most: float


def level_of(tried: int) -> float:
    """The level of a candidate before which `tried` were refused: over any number of them the levels add up to `LEVEL`."""
    return LEVEL / ((tried + 1) * (tried + 2))


def paired(differences: Sequence[float], *, level: float) -> Bounds:
    """Bounds of the mean of differences task by task, at least two."""
    error = sqrt(variance(differences) / len(differences))
    return _bounds(fmean(differences), error=error, freedom=len(differences) - 1, level=level)


def unpaired(one: Sequence[float], other: Sequence[float], *, level: float) -> Bounds:
    """Bounds of the mean of one sample less that of another, at least two each (Welch)."""
    parts = [variance(each) / len(each) for each in (one, other)]
    below = sum(part**2 / (len(each) - 1) for part, each in zip(parts, (one, other), strict=True))
    freedom = sum(parts) ** 2 / below if below else 1.0
    return _bounds(fmean(one) - fmean(other), error=sqrt(sum(parts)), freedom=freedom, level=level)


def _bounds(mean: float, *, error: float, freedom: float, level: float) -> Bounds:
    """Student's quantile from the normal one (Abramowitz and Stegun 26.7.5: within 5 % from 3 degrees of freedom on)."""
    z = NormalDist().inv_cdf(1 - level)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    reach = (z + first / freedom + second / freedom**2 + third / freedom**3) * error
    return Bounds(mean - reach, mean, mean + reach)


def likeness(answers: Sequence[Answer]) -> float | None:
    """How alike answers to different prompts are: the mean over pairs of ROUGE-L's F-measure on their tokens, from 0 to 1 (the
    same). None: all prompts are the same."""
    step = max(1, len(answers) // MOST_ANSWERS)
    said = [(each.prompt, each.sampled) for each in answers[::step][:MOST_ANSWERS] if any(each.mask)]
    pairs = [
        2 * common(one, other) / (len(one) + len(other))
        for number, (prompt, one) in enumerate(said)
        for another, other in said[:number]
        if prompt != another
    ]
    return fmean(pairs) if pairs else None


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common subsequence, a row of the table in the bits of one number (Crochemore et al., 2001)."""
    places: dict[int, int] = {}
    for place, token in enumerate(one):
        places[token] = places.get(token, 0) | 1 << place
    whole = (1 << len(one)) - 1
    row = whole
    for token in other:
        met = row & places.get(token, 0)
        row = (row + met | row - met) & whole
    return len(one) - row.bit_count()
