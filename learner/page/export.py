"""`understudy page RUN --export FILE`: the page with a snapshot of runs, as one HTML file that opens without a server.

Called by `learner.page.serve`. The page's own modules become entries of an import map, its styles a style element, and the
snapshot a block of JSON. Invariants: nothing that an agent wrote can end that block; the file runs these scripts only (their
hashes are in its policy), and asks no other host for anything.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import posixpath
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from buffers.disk import replacing
from buffers.errors import UnderstudyError
from learner.page.metric_columns import meanings as metric_meanings
from learner.page.routes import STATIC
from learner.page.run_set import RunSet
from learner.page.snapshot import snapshot

PREFIX = "page/"
"""The modules' names in the import map begin so."""
_IMPORT = re.compile(r'(?P<before>\b(?:from|import)\s*)"(?P<path>\.{1,2}/[^"\n]+\.js)"')
_STYLE = re.compile(r'<link rel="stylesheet" href="static/(?P<path>[\w./-]+)">\n?')
_LEFT_OUT = re.compile(r'<link rel="(?:icon|modulepreload)"[^>]*>\n?')
_SCRIPT = re.compile(r'<script type="module" src="static/(?P<path>[\w./-]+)"></script>')


class ExportError(UnderstudyError):
    """The file cannot be made."""


def export(named: Sequence[Path], *, to: Path, episodes: int, meanings: Mapping[str, str]) -> str:
    """Write the file, whole or not at all; what was written, in a line. `episodes`: so many of each run. Raises ExportError."""
    if episodes < 0:
        raise ExportError(f"--episodes must be >= 0, got {episodes}; leave it out for 24")
    runs = RunSet(named, meanings=meanings)
    try:
        found = snapshot(runs, episodes=episodes, about=metric_meanings())
    finally:
        runs.close()
    left_out = [(name, error) for name, run in found["runs"].items() for error in run.pop("left_out")]
    text = page_of(found, static=STATIC)
    try:
        with replacing(to) as scratch:
            scratch.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ExportError(f"--export must be a file that can be written, got {to} ({error.strerror})") from error
    number = sum(len(run["episodes"]) for run in found["runs"].values())
    return (
        f"{to}: {len(found['runs'])} run(s), {number} episodes, {to.stat().st_size / 1e6:.1f} MB; open it in a browser"
    ) + (f"; {len(left_out)} left out, as of {left_out[0][0]}: {left_out[0][1]}" if left_out else "")


def page_of(found: Mapping[str, Any], *, static: Path) -> str:
    """The HTML of the page in the folder `static`, with this snapshot in it."""
    page = (static / "index.html").read_text(encoding="utf-8")
    script = _SCRIPT.search(page)
    if script is None:
        raise ExportError(f"{static / 'index.html'} must load one module; install understudy again")
    styles = [(static / path).read_text(encoding="utf-8") for path in _STYLE.findall(page)]
    style = "\n".join(styles)
    modules = json.dumps({"imports": modules_of(static)}, sort_keys=True)
    start = f"import {json.dumps(PREFIX + script['path'])};"
    policy = (
        f"default-src 'none'; script-src {_hash(modules)} {_hash(start)} data:; style-src {_hash(style)}; img-src data:; "
        f"base-uri 'none'; form-action 'none'"
    )
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy, quote=True)}">\n'
        f"<style>{style}</style>\n"
        f'<script type="importmap">{modules}</script>\n'
    )
    body = (
        f'<script type="application/json" id="snapshot">{_data(found)}</script>\n<script type="module">{start}</script>'
    )
    page = _LEFT_OUT.sub("", _STYLE.sub("", page))
    before, _, after = page.partition("</head>")
    charset, rest = _after_charset(before)
    after = _SCRIPT.sub(lambda _: body, after)
    return f"{charset}{head}{rest}</head>{after}"


def modules_of(static: Path) -> dict[str, str]:
    """Name -> data URL of each module; imports between them are by these names. A module that is imported twice is one."""
    found = {}
    for file in sorted(static.rglob("*.js")):
        path = file.relative_to(static).as_posix()
        text = file.read_text(encoding="utf-8")
        renamed = _IMPORT.sub(lambda match, path=path: _named(match, of=path, static=static), text)  # type: ignore[misc]
        found[PREFIX + path] = "data:text/javascript;base64," + base64.b64encode(renamed.encode()).decode()
    return found


def _named(match: re.Match[str], *, of: str, static: Path) -> str:
    path = posixpath.normpath(posixpath.join(posixpath.dirname(of), match["path"]))
    if not (static / path).is_file():
        raise ExportError(f"{of} must import modules of the page, got {match['path']}; install understudy again")
    return f'{match["before"]}"{PREFIX}{path}"'


def _after_charset(head: str) -> tuple[str, str]:
    """The head up to what says how it is encoded, and the rest: the policy comes before all that it is about."""
    mark = '<meta charset="utf-8">\n'
    before, found, rest = head.partition(mark)
    return (before + found, rest) if found else (head, "")


def _data(found: Mapping[str, Any]) -> str:
    """JSON that no text in it can end."""
    text = json.dumps(found, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
