"""What each figure of a step is, in a sentence: the tables of docs/metrics.md, where a checkout has them.

Used by `learner.page.serve`. An installed package has no documents: then nothing is said of figures.
"""

from __future__ import annotations

import re
from pathlib import Path

METRICS = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"
_NAME = re.compile(r"`([\w/.-]+/[\w/.<>-]+)`")
_CELLS = 4
"""The cells of a row: names, unit, meaning, what is healthy."""


def meanings(file: Path = METRICS) -> dict[str, str]:
    """Figure -> sentence."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        return {}
    found: dict[str, str] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if line.startswith("| `") and len(cells) >= _CELLS - 1:
            unit, meaning, healthy = [*cells[1:], ""][:3]
            said = f"{meaning} ({unit})" + (f"; healthy: {healthy.strip(' |')}" if healthy.strip(" |") else "")
            for name in _NAME.findall(cells[0]):
                found.setdefault(name, said.replace("`", ""))
    return found
