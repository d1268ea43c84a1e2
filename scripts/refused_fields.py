"""Writes what the model API refuses, and what it ignores, into docs/agents.md: a table of the server's own rules for each.

`python scripts/refused_fields.py`: prints both. `--write`: puts them where they belong.
"""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mocked_server.http import gemini_requests  # noqa: E402
from mocked_server.http.dialects import CHAT, COMPLETIONS, MESSAGES, RESPONSES  # noqa: E402
from mocked_server.http.request_fields import IGNORED, RULES  # noqa: E402

PAGE = ROOT / "docs" / "agents.md"
NAMES = {CHAT: "Chat", COMPLETIONS: "Completions", RESPONSES: "Responses", MESSAGES: "Messages"}


def refused() -> str:
    """A row for each remedy and the dialects that have it."""
    rules = [(rule.field, NAMES[path], rule.remedy) for path in NAMES for rule in RULES[path]]
    rules += [(field, "Google", remedy) for field, remedy in gemini_requests.REFUSED.items()]
    dialects: dict[tuple[str, str], list[str]] = {}
    for field, dialect, remedy in rules:
        dialects.setdefault((field, remedy), []).append(dialect)
    fields: dict[tuple[str, str], list[str]] = {}
    for (field, remedy), where in dialects.items():
        told = "all but Google's" if where == [*NAMES.values()] else ", ".join(where)
        fields.setdefault((told, remedy), []).append(field)
    lines = (
        f"| {', '.join(f'`{name}`' for name in names)} | {where} | {remedy} |"
        for (where, remedy), names in fields.items()
    )
    return "\n".join(chain(("| field | where | instead |", "|---|---|---|"), lines)) + "\n"


def ignored() -> str:
    """A row for each rule."""
    lines = (f"| {what} | {where} | {effect} |" for what, where, effect in IGNORED)
    return "\n".join(chain(("| what | where | what happens |", "|---|---|---|"), lines)) + "\n"


def page() -> str:
    """docs/agents.md with both tables."""
    text = PAGE.read_text(encoding="utf-8")
    for mark, table in (("refused", refused()), ("ignored", ignored())):
        before, _, rest = text.partition(f"<!-- {mark} -->\n")
        text = f"{before}<!-- {mark} -->\n{table}<!-- /{mark} -->{rest.partition(f'<!-- /{mark} -->')[2]}"
    return text


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(refused() + ignored(), end="")
