"""The page's routes: JSON of runs, figures, episodes; bytes of token windows; events; the files that a browser loads.

Built by `learner.page.serve`, behind `learner.page.access`; docs/page.md has the table, `learner.page.reports` the answers.
Invariants: each answer is read for its request, in a worker thread; nothing is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from buffers.errors import UnderstudyError
from buffers.ledger.reading.episodes import FilterError, Unknown
from buffers.ledger.reading.reader import LedgerUnreadable
from learner.page import reports
from learner.page.episode_page import Query, RunPages
from learner.page.run_set import Changes, RunSet, UnknownRun, here, tick_of
from learner.page.run_view import NoRun

STATIC = Path(__file__).parent / "static"
MOST_RUNS = 20
STATUS: dict[type[UnderstudyError], int] = {
    UnknownRun: 404,
    Unknown: 404,
    LedgerUnreadable: 409,
    NoRun: 409,
    FilterError: 422,
}
OF_A_RUN: dict[str, Callable[[RunPages, Query], Any]] = {
    "": reports.index,
    "/config": reports.config,
    "/scores": reports.scores,
    "/machine": reports.machine,
    "/groups": reports.groups,
    "/groups/{group}": reports.group,
    "/episodes": reports.episode_list,
    "/episodes/order": reports.order,
    "/episodes/{episode}": RunPages.detail,
    "/episodes/{episode}/conversation": RunPages.conversation,
    "/episodes/{episode}/overview": RunPages.overview,
    "/episodes/{episode}/tokens": RunPages.tokens,
    "/untrained": reports.untrained,
    "/findings": lambda run, _: run.findings(),
}
"""Path below /api/runs/{run} -> what answers."""


def build_app(runs: RunSet, *, default: str, about: Mapping[str, str]) -> Starlette:
    """The application, without anything that keeps people out. `default`: the run to open first; `about`: what a figure is, in a
    sentence."""
    changes = Changes(runs)

    def run_list(query: Query) -> dict[str, Any]:
        views = [runs.view(name) for name in runs.ids()]
        return {**_tick(views), "default": default, "runs": [view.entry() for view in views]}

    def metrics(query: Query) -> dict[str, Any]:
        views = [runs.view(name) for name in query.texts("runs")[:MOST_RUNS] or (default,)]
        return {**_tick(views), **reports.metrics(views, query, about=about)}

    def of_run(answer: Callable[[RunPages, Query], Any]) -> Callable[[Query], Any]:
        return lambda query: answer(runs.view(query.text("run")), query)

    async def events(request: Request) -> Response:
        query = Query(request.query_params)
        since = request.headers.get("last-event-id") or query.text("since")
        names = query.texts("runs")[:MOST_RUNS] or (default,)
        return StreamingResponse(changes.stream(names, since=since), media_type="text/event-stream")

    async def index(_: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    return Starlette(
        routes=[
            Route("/", index),
            Route("/api/events", events),
            Route("/api/runs", _answering(run_list)),
            Route("/api/metrics", _answering(metrics)),
            *(Route(f"/api/runs/{{run}}{path}", _answering(of_run(answer))) for path, answer in OF_A_RUN.items()),
            Mount("/static", GZipMiddleware(StaticFiles(directory=STATIC, check_dir=False))),
        ],
        exception_handlers={UnderstudyError: _refused, 404: _unknown},
    )


def _tick(views: list[RunPages]) -> dict[str, str]:
    """What a reader of these figures knows."""
    return {"tick": tick_of({view.run_id: here(view) for view in views})}


def _answering(answer: Callable[[Query], Any]) -> Callable[[Request], Response]:
    """An endpoint that Starlette runs in a worker thread."""

    def endpoint(request: Request) -> Response:
        found = answer(Query({**request.query_params, **request.path_params}))
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
