"""`understudy page RUN --export FILE`: the page with a snapshot of runs, as one HTML file that opens without a server.

Called by `learner.page.serve`. The snapshot has all figures, and some episodes with their tokens. The page's own modules become
entries of an import map, its styles a style element, and the snapshot a block of JSON. Invariants: what looks like a key, or is the
value of an environment variable that is named like one, is nowhere in it: not in a text, and not in the tokens of a branch that
says it; nothing that an agent wrote can end that block; the file runs these scripts only (their hashes are in its policy), and asks
no other host for anything.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import posixpath
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from buffers.disk import replacing
from buffers.errors import UnderstudyError
from buffers.ledger import episode_views
from buffers.ledger.branches import ANY_BREAK
from buffers.ledger.episode_query import LARGEST_NUMBER, MOST_POINTS, Query
from buffers.ledger.episode_views import SESSION_STATES, EpisodeFilter
from learner.page import reports
from learner.page.episode_page import MOST_TURNS, RunPages
from learner.page.metric_columns import meanings
from learner.page.reports import LEFT_OUT, has_secret_name
from learner.page.run_set import RunSet
from learner.page.serve import STATIC
from learner.page.token_window import packed_text

PREFIX = "page/"
"""The modules' names in the import map begin so."""
_IMPORT = re.compile(r'(?P<before>\b(?:from|import)\s*)"(?P<path>\.{1,2}/[^"\n]+\.js)"')
_STYLE = re.compile(r'<link rel="stylesheet" href="static/(?P<path>[\w./-]+)">\n?')
_NOT_INLINED = re.compile(r'<link rel="(?:icon|modulepreload)"[^>]*>\n?')
_SCRIPT = re.compile(r'<script type="module" src="static/(?P<path>[\w./-]+)"></script>')

FORMAT = 1
MOST_BRANCHES = 4
"""Branches of an episode that are written."""
_ALL = Query({"points": str(MOST_POINTS)})
_KEYS = re.compile(
    r"\bus-[\w.~-]{3,200}-[0-9a-f]{32}\b"  # the run's own: mocked_server/keys.py
    r"|\b(?:sk|pk|rk)-[A-Za-z0-9_-]{16,}|\bhf_[A-Za-z0-9]{20,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}"
    r"|\bAKIA[0-9A-Z]{16}\b|\bxox[abps]-[\w-]{10,}|\bAIza[\w-]{30,}|\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,}"
    r"|(?i:bearer )[\w.~+/-]{16,}=*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_LEAST_SECRET = 8
"""Characters of an environment variable's value that is looked for."""


class ExportError(UnderstudyError):
    """The file cannot be made."""


def export(named: Sequence[Path], *, to: Path, episodes: int, causes: Mapping[str, str]) -> str:
    """Write the file, whole or not at all; what was written, in a line. `episodes`: so many of each run; `causes`: what a break's
    cause means. Raises ExportError."""
    if episodes < 0:
        raise ExportError(f"--episodes must be >= 0, got {episodes}; leave it out for 24")
    runs = RunSet(named, meanings=causes)
    try:
        found = snapshot(runs, episodes=episodes)
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
    page = _NOT_INLINED.sub("", _STYLE.sub("", page))
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


class Secrets:
    """`environment`: variables that may hold some."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._values = sorted(
            {value for name, value in environment.items() if has_secret_name(name) and len(value) >= _LEAST_SECRET},
            key=len,
            reverse=True,
        )
        self._home = str(Path.home())

    def are_in(self, text: str) -> bool:
        """Whether something would be left out."""
        return _KEYS.search(text) is not None or any(value in text for value in self._values)

    def without(self, value: Any) -> Any:
        """JSON with each of them replaced, in names too; the user's home folder is `~`."""
        if isinstance(value, str):
            for secret in self._values:
                value = value.replace(secret, LEFT_OUT)
            value = _KEYS.sub(LEFT_OUT, value)
            return value.replace(self._home, "~") if len(self._home) > 1 else value
        if isinstance(value, dict):
            return {self.without(name): self.without(item) for name, item in value.items()}
        return [self.without(item) for item in value] if isinstance(value, list) else value


def snapshot(runs: RunSet, *, episodes: int) -> dict[str, Any]:
    """`episodes`: so many of each run. `left_out` of a run, why something of it is not in it, is not for the file."""
    hidden = Secrets(os.environ)
    views = [runs.view(name) for name in runs.ids()]
    figures = reports.metrics(views, _ALL, about=meanings())
    found = {}
    for view in views:
        told = view.findings()
        held_back = {"findings": told["findings"], "available": told["available"]}
        whole = {**_run(view), "metrics": figures["runs"][view.run_id], "findings": held_back}
        shown = _episodes(view, number=episodes, hidden=hidden)
        if told["why"] and told["why"] not in shown["left_out"]:
            shown["left_out"].insert(0, told["why"])
        found[view.run_id] = hidden.without(whole) | shown
    return {
        "format": FORMAT,
        "made_at": time.time(),
        "default": views[0].run_id,
        "runs": found,
        "names": figures["names"],
        "about": figures["about"],
    }


def _run(view: RunPages) -> dict[str, Any]:
    """All but figures and episodes."""
    return {
        "run": {**view.entry(), "folder": view.folder.name},
        "index": {**reports.index(view, _ALL), "folder": view.folder.name},
        "config": reports.config(view, _ALL),
        "scores": _or_empty(reports.scores, view),
        "machine": reports.machine(view, _ALL),
        "untrained": _or_empty(reports.untrained, view) or {"reasons": []},
        "versions": reports.versions(view, _ALL),
    }


def _or_empty(answer: Callable[[RunPages, Query], dict[str, Any]], view: RunPages) -> dict[str, Any]:
    """Nothing where the run has no ledger here."""
    try:
        return answer(view, _ALL)
    except UnderstudyError:
        return {}


def _episodes(view: RunPages, *, number: int, hidden: Secrets) -> dict[str, Any]:
    found: dict[str, Any] = {
        "episodes": [], "details": {}, "group_details": {}, "groups": [], "conversations": {}, "tokens": {}, "overviews": {},
        "left_out": [],
    }  # fmt: skip
    chosen, details = [], {}
    try:
        view.look()
        groups = reports.groups(view, _ALL)["groups"]
        candidates = sampled(view, number=number)
    except UnderstudyError as error:
        found["left_out"].append(str(error))
        return found
    for one in candidates:
        try:
            detail = view.detail(Query({"episode": one["episode_id"]}))
            if (key := str(one["group_id"])) not in found["group_details"]:
                found["group_details"][key] = hidden.without(reports.group(view, Query({"group": key})))
        except UnderstudyError as error:
            found["left_out"].append(str(error))
            continue
        details[one["episode_id"]] = detail
        chosen.append(one)
    found["episodes"], found["details"] = hidden.without(chosen), hidden.without(details)
    known = {group["group_id"] for group in groups}
    more = [each["group"] for each in found["group_details"].values() if each["group"]["group_id"] not in known]
    found["groups"] = hidden.without(groups) + more
    for name, detail in details.items():
        for branch in range(min(len(detail["branches"]), MOST_BRANCHES)):
            _add_branch(found, view, name, branch, hidden=hidden)
    return found


def _add_branch(found: dict[str, Any], view: RunPages, name: str, branch: int, *, hidden: Secrets) -> None:
    key = f"{name}/{branch}"
    query = Query({"episode": name, "branch": str(branch), "count": str(MOST_TURNS)})
    try:
        talk = view.conversation(query)
        window = view.tokens(Query({"episode": name, "branch": str(branch)}))
    except UnderstudyError:  # no tokenizer on this machine
        return
    found["conversations"][key] = hidden.without(talk)
    if not hidden.are_in(packed_text(window)):
        found["tokens"][key] = base64.b64encode(window).decode()
        found["overviews"][key] = view.overview(query)


def sampled(view: RunPages, *, number: int) -> list[dict[str, Any]]:
    """So many episodes: the best and the worst of steps over the whole run, then broken, untrained and long ones."""
    spread = max(1, (number + 2) // 3)
    found: dict[int, dict[str, Any]] = {}
    with view.ledger() as db:
        trained = sorted({step for step, _ in episode_views.trained_scores(db, first=1, last=LARGEST_NUMBER)})
        wanted = [
            (EpisodeFilter(steps=(step, step), states=("scored",)), order, 1)
            for step in trained[::-1][:: max(1, len(trained) // spread)][:spread]
            for order in ("-score", "score")
        ]
        wanted += [
            (EpisodeFilter(causes=ANY_BREAK), "newest", spread // 2),
            (EpisodeFilter(untrained=True), "newest", spread // 2),
            (EpisodeFilter(states=("scored",)), "-tokens", spread // 2),
            (EpisodeFilter(session_states=SESSION_STATES), "heard", number)
            if view.serves
            else (EpisodeFilter(states=("scored",)), "newest", number),
        ]
        for each, order, limit in wanted:
            for one in episode_views.search(db, each, order=order, limit=limit, cursor=None).episodes:
                found.setdefault(one.seq, asdict(one))
        return list(found.values())[:number]
