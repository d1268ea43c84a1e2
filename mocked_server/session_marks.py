"""Stub, until the table is here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SessionMark:
    """What a request says of its session."""

    name: str
    is_side: bool
    why: str


def session_mark(path: str, headers: Sequence[tuple[bytes, bytes]], body: Mapping[str, Any]) -> SessionMark:
    """The mark of a request."""
    for name, value in headers:
        if name == b"x-session-id":
            return SessionMark(value.decode("latin-1")[:200], False, "x-session-id header")
    return SessionMark("", False, "")
