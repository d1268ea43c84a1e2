"""Shortens a tool's answer, as verl does: `left` keeps the left part, `right` the right one, `middle` both ends.

Called by `agents.tools.toolbox`; a limit in tokens is the caller's. Invariant: a text within the limit is not touched, and of a
longer one exactly `limit` characters are kept, beside the mark.
"""

from __future__ import annotations

from typing import Literal

Side = Literal["left", "middle", "right"]
MARK = "(truncated)"


def truncate(text: str, *, limit: int, side: Side) -> str:
    """Cuts `text` to at most `limit` characters, with a mark where something is missing."""
    if len(text) <= limit:
        return text
    if side == "left":
        return f"{text[:limit]}...{MARK}"
    if side == "right":
        return f"{MARK}...{text[len(text) - limit :]}"
    tail = limit // 2
    return f"{text[: limit - tail]}...{MARK}...{text[len(text) - tail :]}"
