"""The blocks of a page, in its order, and what the page's source says about each.

A block is fenced or, in shell commands, indented by four. What becomes of it follows from what it is:

- Python or YAML whose first line is `# NAME` is the file of that name;
- `bash`, `sh` and indented lines are commands;
- `text` whose first line is `$ COMMAND` is a command and what it prints; other `text` is what the commands before it print.

A comment `<!-- ... -->` on the line above says what cannot be read off it, in parts with `;` between:

- `not run: REASON`, and what it would bring here if it ran: `brings: FOLDER OF THE CHECKOUT as FOLDER`;
- `until: TEXT`: Ctrl-C is pressed once that is printed;
- `meanwhile, from: TEXT`: once that is printed it goes on beside the blocks that follow, until the page's end;
- `figures vary`: numbers of the output below differ from run to run;
- `exits with N`: the last command's exit code.

A line `...` of an output stands for any lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
SHELL = ("bash", "sh")
_FENCED = r"^(?P<fence>```)(?P<kind>\w*)\n(?P<fenced>.*?)^```$"
_INDENTED = r"(?:(?<=\n\n)|(?<=-->\n))(?P<indented>(?: {4}[^\n]*\n|\n(?= {4}))+)"
_BLOCK = re.compile(rf"(?:^<!-- (?P<said>[^\n]*) -->\n+)?(?:{_FENCED}|{_INDENTED})", flags=re.M | re.S)
_NAME = re.compile(r"# ([\w.-]+\.\w+)(?=[\s:,])")
_PARTS = {
    "not run": re.compile(r"not run: (.+)"),
    "brings": re.compile(r"brings: (\S+ as \S+)"),
    "until": re.compile(r"until: (.+)"),
    "meanwhile": re.compile(r"meanwhile, from: (.+)"),
    "vary": re.compile(r"(figures) vary"),
    "exit": re.compile(r"exits with (\d+)"),
}
_FIGURE = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block of a page, as it stands there."""

    page: str
    line: int
    """Of its first line in the page, counted from 1."""
    kind: str
    """Its language; `bash` where it is indented."""
    text: str
    said: dict[str, str] = field(default_factory=dict)
    """What the comment above it says: `not run`, `brings`, `until`, `meanwhile`, `vary`, `exit`."""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def name(self) -> str:
        """The file that it is; empty: none."""
        named = _NAME.match(self.text) if self.kind in ("python", "yaml") else None
        return named[1] if named else ""

    @property
    def commands(self) -> str:
        """What is played; empty: nothing."""
        if self.kind in SHELL:
            return self.text
        return self.text.partition("\n")[0][2:] + "\n" if self.is_transcript else ""

    @property
    def is_transcript(self) -> bool:
        return self.kind == "text" and self.text.startswith("$ ")

    @property
    def output(self) -> str:
        """What it says is printed; empty: nothing is said."""
        if self.kind != "text":
            return ""
        return self.text.partition("\n")[2] if self.is_transcript else self.text

    def is_printed(self, printed: str) -> bool:
        """Whether that is its output."""
        lines = []
        for line in self.output.strip("\n").splitlines():
            if line == "...":
                lines.append(r"(?:.*\n)*?")
            elif "vary" in self.said:
                words = (
                    r"\s+".join(map(re.escape, part.split(" "))) for part in _FIGURE.split(re.sub(" +", " ", line))
                )
                lines.append(_FIGURE.pattern.join(words) + r" *\n")
            else:
                lines.append(re.escape(line.rstrip()) + r" *\n")
        return re.fullmatch("".join(lines), printed.strip("\n") + "\n") is not None


def blocks_of(page: str, *, text: str | None = None) -> list[Block]:
    """The blocks of a page. `text`: its source, where it is no page of the project's. Raises ValueError for a comment that says
    what nobody knows."""
    source = (ROOT / page).read_text(encoding="utf-8") if text is None else text
    return list(_read(page, source))


def _read(page: str, source: str) -> Iterator[Block]:
    for found in _BLOCK.finditer(source):
        fenced = found["fence"] is not None
        start = found.start("fenced" if fenced else "indented")
        text = found["fenced"] if fenced else re.sub(r"^ {4}", "", found["indented"], flags=re.M)
        line = source.count("\n", 0, start) + 1
        yield Block(
            page=page,
            line=line,
            kind=found["kind"] if fenced else "bash",
            text=text,
            said=dict(_said(found["said"] or "", place=f"{page}:{line}")),
        )


def _said(comment: str, *, place: str) -> Iterator[tuple[str, str]]:
    if comment.startswith("/") or not comment:
        return
    for part in comment.split("; "):
        known = [(name, match[1]) for name, form in _PARTS.items() if (match := form.fullmatch(part))]
        if not known:
            raise ValueError(f"{place}: a comment above a block must be one of {list(_PARTS)}, got {part!r}")
        yield known[0]
