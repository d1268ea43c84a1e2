"""The page's routes: JSON of runs, figures, episodes; bytes of token windows; events; the files that a browser loads.

Built by `learner.page.serve`, behind `learner.page.access`; docs/page.md has the table. Invariants: each answer is read for its
request, in a worker thread; it is bounded, whatever the query asks for; nothing is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from buffers.errors import UnderstudyError
from buffers.ledger.reading.episode_filter import EpisodeFilter, FilterError
from buffers.ledger.reading.reader import LedgerUnreadable
from buffers.ledger.reading.round_causes import ANY_BREAK, CAUSES
from buffers.ledger.reading.views import Unknown
from learner.page import reports
from learner.page.changes import Changes, here, tick_of
from learner.page.episode_page import EpisodePages
from learner.page.episode_parts.token_window import MOST_TOKENS
from learner.page.findings import Findings
from learner.page.run_files.run_folders import NoRun
from learner.page.run_set import RunSet, UnknownRun
from learner.page.run_view import RunView

STATIC = Path(__file__).parent / "static"
MOST_POINTS = 10_000
MOST_EPISODES = 500
MOST_TURNS = 500
MOST_RUNS = 20
LARGEST_NUMBER, MOST_DIGITS = 2**53, 16
"""What a browser's numbers hold exactly."""
SPAN = "a number or a span such as 10-20"
STATUS: dict[type[UnderstudyError], int] = {
    UnknownRun: 404,
    Unknown: 404,
    LedgerUnreadable: 409,
    NoRun: 409,
    FilterError: 422,
}


class Parameters:
    """The query of a request, read by type. Raises FilterError naming the parameter."""

    def __init__(self, request: Request) -> None:
        self._given: Mapping[str, str] = request.query_params

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
        if not given:
            return None
        return number_of(given, name=name, kind=kind)

    def span(self, name: str) -> tuple[int, int] | None:
        """`12` or `10-20`."""
        given = self._given.get(name, "")
        first, _, last = given.partition("-")
        if not given:
            return None
        return number_of(first, name=name, kind=int, rule=SPAN), number_of(
            last or first, name=name, kind=int, rule=SPAN
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


def episode_filter(query: Parameters) -> EpisodeFilter:
    """The filter that a query asks for. Raises FilterError."""
    cause = query.text("cause")
    if cause and cause != "any" and cause not in CAUSES:
        raise FilterError(f"cause must be any, or of {', '.join(CAUSES)}, got {cause!r:.40}")
    return EpisodeFilter(
        steps=query.span("step"),
        task=query.text("task") or None,
        text=query.text("q"),
        group=query.maybe("group", int),
        states=query.texts("state"),
        group_states=query.texts("group_state"),
        score=(query.maybe("min_score", float), query.maybe("max_score", float)),
        reason=query.text("reason") or None,
        agent=query.text("agent") or None,
        tokens=(query.maybe("min_tokens", int), query.maybe("max_tokens", int)),
        rounds=(query.maybe("min_rounds", int), query.maybe("max_rounds", int)),
        causes=0 if not cause else ANY_BREAK if cause == "any" else 1 << CAUSES.index(cause),
        untrained=query.text("untrained") == "1",
    )


class Api:
    """The routes' answers. Methods are called in worker threads."""

    def __init__(self, runs: RunSet, *, default: str, about: Mapping[str, str]) -> None:
        """`default`: the run to open first; `about`: what a figure is, in a sentence."""
        self._runs = runs
        self._default = default
        self._about = about
        self._findings = Findings()

    def runs(self, request: Request) -> dict[str, Any]:
        views = [self._runs.view(name) for name in self._runs.ids()]
        known = {view.run_id: here(view) for view in views}
        return {"tick": tick_of(known), "default": self._default, "runs": [view.entry() for view in views]}

    def run(self, request: Request) -> dict[str, Any]:
        return reports.run_index(self._view(request))

    def config(self, request: Request) -> dict[str, Any]:
        return reports.run_config(self._view(request))

    def metrics(self, request: Request) -> dict[str, Any]:
        query = Parameters(request)
        names = query.texts("runs")[:MOST_RUNS] or (self._default,)
        views = [self._runs.view(name) for name in names]
        known = {view.run_id: here(view) for view in views}
        found = reports.metrics(
            views,
            names=query.texts("names") or None,
            first=query.maybe("from", int),
            last=query.maybe("to", int),
            most=query.number("points", 2000, most=MOST_POINTS, least=1),
            about=self._about,
        )
        return {"tick": tick_of(known), **found}

    def scores(self, request: Request) -> dict[str, Any]:
        query = Parameters(request)
        return reports.score_spread(
            self._view(request),
            first=query.maybe("from", int),
            last=query.maybe("to", int),
            most=query.number("points", 500, most=MOST_POINTS, least=1),
        )

    def machine(self, request: Request) -> dict[str, Any]:
        query = Parameters(request)
        return self._view(request).machine(
            since=query.maybe("since", float) or 0.0, points=query.number("points", 600, most=MOST_POINTS, least=1)
        )

    def groups(self, request: Request) -> dict[str, Any]:
        query = Parameters(request)
        return reports.groups(
            self._view(request),
            states=query.texts("state") or ("open", "ready"),
            after=query.maybe("cursor", int),
            limit=query.number("limit", 200, most=MOST_EPISODES, least=1),
        )

    def group(self, request: Request) -> dict[str, Any]:
        pages = self._pages(request)
        group = number_of(request.path_params["group"], name="group", kind=int)
        return reports.group(self._view(request), group, record=pages.record)

    def episodes(self, request: Request) -> dict[str, Any]:
        query = Parameters(request)
        view, pages = self._view(request), self._pages(request)
        view.look_on()
        if seqs := query.texts("seqs")[:MOST_EPISODES]:
            known = [int(seq) for seq in seqs if seq.isascii() and seq.isdigit() and len(seq) < MOST_DIGITS]
            return {"episodes": pages.shown(known)}
        found = view.search(
            episode_filter(query),
            order=query.text("sort", "newest"),
            limit=query.number("limit", 100, most=MOST_EPISODES, least=1),
            cursor=query.text("cursor") or None,
        )
        return {
            "episodes": pages.shown(found.places),
            "next": found.next,
            "total": found.total,
            "indexed": view.looked_at,
            "facets": found.facets,
        }

    def order(self, request: Request) -> bytes:
        query = Parameters(request)
        return self._view(request).order(episode_filter(query), order=query.text("sort", "newest"))

    def episode(self, request: Request) -> dict[str, Any]:
        return self._pages(request).detail(request.path_params["episode"])

    def conversation(self, request: Request) -> dict[str, Any]:
        query = Parameters(request)
        return self._pages(request).conversation(
            request.path_params["episode"],
            branch=query.number("branch", 0, most=1 << 30),
            start=query.number("start", 0, most=1 << 40),
            count=query.number("count", 200, most=MOST_TURNS, least=1),
        )

    def overview(self, request: Request) -> dict[str, Any]:
        query = Parameters(request)
        return self._pages(request).overview(
            request.path_params["episode"],
            branch=query.number("branch", 0, most=1 << 30),
            buckets=query.number("buckets", 400, most=MOST_POINTS, least=1),
        )

    def tokens(self, request: Request) -> bytes:
        query = Parameters(request)
        return self._pages(request).tokens(
            request.path_params["episode"],
            branch=query.number("branch", 0, most=1 << 30),
            start=query.number("start", 0, most=1 << 40),
            count=query.number("count", MOST_TOKENS, most=MOST_TOKENS, least=1),
        )

    def untrained(self, request: Request) -> dict[str, Any]:
        return reports.untrained(self._view(request))

    def findings(self, request: Request) -> dict[str, Any]:
        return asdict(self._findings.of(self._view(request).folder))

    def _view(self, request: Request) -> RunView:
        return self._runs.view(request.path_params["run"])

    def _pages(self, request: Request) -> EpisodePages:
        return self._runs.pages(request.path_params["run"])


def build_app(runs: RunSet, *, default: str, about: Mapping[str, str]) -> Starlette:
    """The application, without anything that keeps people out."""
    api, changes = Api(runs, default=default, about=about), Changes(runs)
    run = "/api/runs/{run}"
    answers: dict[str, Callable[[Request], Any]] = {
        "/api/runs": api.runs,
        "/api/metrics": api.metrics,
        run: api.run,
        f"{run}/config": api.config,
        f"{run}/scores": api.scores,
        f"{run}/machine": api.machine,
        f"{run}/groups": api.groups,
        f"{run}/groups/{{group}}": api.group,
        f"{run}/episodes": api.episodes,
        f"{run}/episodes/order": api.order,
        f"{run}/episodes/{{episode}}": api.episode,
        f"{run}/episodes/{{episode}}/conversation": api.conversation,
        f"{run}/episodes/{{episode}}/overview": api.overview,
        f"{run}/episodes/{{episode}}/tokens": api.tokens,
        f"{run}/untrained": api.untrained,
        f"{run}/findings": api.findings,
    }

    async def events(request: Request) -> Response:
        query = Parameters(request)
        since = request.headers.get("last-event-id") or query.text("since")
        names = query.texts("runs")[:MOST_RUNS] or (default,)
        return StreamingResponse(changes.stream(names, since=since), media_type="text/event-stream")

    async def index(_: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    return Starlette(
        routes=[
            Route("/", index),
            Route("/api/events", events),
            *(Route(path, _answering(answer)) for path, answer in answers.items()),
            Mount("/static", GZipMiddleware(StaticFiles(directory=STATIC, check_dir=False))),
        ],
        exception_handlers={UnderstudyError: _refused, 404: _unknown},
    )


def _answering(answer: Callable[[Request], Any]) -> Callable[[Request], Response]:
    """An endpoint that Starlette runs in a worker thread."""

    def endpoint(request: Request) -> Response:
        found = answer(request)
        if isinstance(found, bytes):
            return Response(found, media_type="application/octet-stream")
        return json_response(found)

    return endpoint


def json_response(found: Any, *, status: int = 200) -> Response:
    """JSON that holds no NaN; what could end a script is no matter here, as nothing of it is put into a page's text."""
    text = json.dumps(found, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(text.encode("utf-8", errors="replace"), status_code=status, media_type="application/json")


async def _refused(_: Request, error: Exception) -> Response:
    status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), 500)
    return json_response({"error": str(error)}, status=status)


async def _unknown(request: Request, _: Exception) -> Response:
    return json_response({"error": f"there is nothing at {request.url.path[:100]}"}, status=404)
