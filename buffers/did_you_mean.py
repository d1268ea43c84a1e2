"""The remedy for a name that is not there, in every error about one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?`, or what there is when nothing is near."""
    names = sorted(known)
    near = _near(name, names)
    return f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names) or 'none'}"


def one_of(name: str, known: Iterable[str]) -> str:
    """`one of [...], got 'y'`, and the one that was meant, if any is near."""
    names = sorted(known)
    near = _near(name, names)
    return f"one of {names}, got {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def _near(name: str, names: list[str]) -> list[str]:
    return difflib.get_close_matches(name[:200], names, n=1, cutoff=0.5)
