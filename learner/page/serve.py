"""Serves the page of runs on this machine, until Ctrl-C; and the page of a live run, as its child.

Called by `learner.page.__main__`. The only place of the page that meets the server's parts: its HTTP protocol with deadlines,
its keys, the words for causes. Invariants: it listens on loopback only; it is a process of its own, at low priority beside a run,
and reads files, so that no run waits for it. All that it writes is feedback, which a live run is asked to store.
"""

from __future__ import annotations

import asyncio
import html
import json
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from buffers.errors import UnderstudyError
from buffers.ledger.episode_query import Query
from buffers.ledger.episode_views import FilterError, Unknown
from buffers.ledger.reader import LedgerUnreadable
from buffers.wire.address import is_loopback
from learner.ask import RunAway, RunRefused, ask_run
from learner.page import reports
from learner.page.episode_page import RunPages
from learner.page.metric_columns import meanings
from learner.page.run_set import Changes, RunSet, UnknownRun, find_runs, here, tick_of
from learner.page.run_view import NoRun, read_config
from mocked_server.conversation.chat_history import REMEDY
from mocked_server.http.uvicorn_server import HttpService, bind
from mocked_server.keys import SECRET_FILE, KeyRing, SecretError, read_secret, secret_of_run

# The page's routes: JSON of runs, figures, episodes; bytes of token windows; events; the files that a browser loads.
# Invariants: each answer is read for its request, in a worker thread; no file is written.

STATIC = Path(__file__).parent / "static"
MOST_RUNS = 20
SOURCE = "page"
"""Source of the feedback that is given here: one voice, however many look at the page."""
MOST_BODY_BYTES = 1 << 16
STATUS: dict[type[UnderstudyError], int] = {
    UnknownRun: 404,
    Unknown: 404,
    LedgerUnreadable: 409,
    NoRun: 409,
    FilterError: 422,
    RunRefused: 422,
    RunAway: 502,
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
    "/versions": reports.versions,
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

    async def feedback(request: Request) -> Response:
        view = await asyncio.to_thread(runs.view, request.path_params["run"])
        try:
            given = json.loads(await request.body())
            said = {name: given[name] for name in ("round_index", "score", "text") if given.get(name) is not None}
            body = {**said, "session": given["session"], "source": SOURCE}
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise FilterError(
                "feedback must be an object with session, and score or text; see POST /feedback"
            ) from None
        await asyncio.to_thread(view.require_feedback)
        return json_response(await ask_run(view.folder, "scorer", "feedback", body))

    async def index(_: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    return Starlette(
        routes=[
            Route("/", index),
            Route("/api/events", events),
            Route("/api/runs", _answering(run_list)),
            Route("/api/metrics", _answering(metrics)),
            *(Route(f"/api/runs/{{run}}{path}", _answering(of_run(answer))) for path, answer in OF_A_RUN.items()),
            Route("/api/runs/{run}/feedback", feedback, methods=["POST"]),
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


HOST = "127.0.0.1"
NICE = 10
LINGER_S = 60.0
"""A page whose run was killed stays so long after its last reader."""
FAREWELL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What the run tells its page's process, on its standard input: the listening socket, the folders, the first link."""

    descriptor: int
    folders: list[str]
    link: str


def serve(named: Sequence[Path], *, port: int) -> int:
    """The page of these runs until Ctrl-C. Raises NoRun, ServerError."""
    return asyncio.run(_serve_until_stopped(named, port=port))


def serve_for_run() -> int:
    """The page of a live run, started by `learner.session` when it is asked for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which ends this process
    os.nice(NICE)
    return asyncio.run(_serve_for_run())


def break_meanings() -> dict[str, str]:
    """What each cause of a break means."""
    return {cause.value: sentence for cause, sentence in REMEDY.items()}


async def _serve_until_stopped(named: Sequence[Path], *, port: int) -> int:
    found = find_runs(named)
    with bind(HOST, port) as listening:
        at = listening.getsockname()[1]

        def say(link: str) -> None:
            print(f"understudy page: {url(at, link)}", flush=True)

        link = secrets.token_urlsafe(32)
        print(f"{len(found)} run(s): {', '.join(list(found)[:8])}{' ...' if len(found) > 8 else ''}")
        say(link)
        print("the link opens once; a new one follows here. Ctrl-C ends the page", flush=True)
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        async with serving(listening, named, link=link, new_link=say):
            await stop.wait()
    return 0


@asynccontextmanager
async def serving(
    listening: socket.socket, named: Sequence[Path], *, link: str, new_link: Callable[[str], object]
) -> AsyncIterator[Access]:
    """The page on a listening socket, for a block. `link`: the first one's secret; `new_link`: takes that of the next."""
    runs = RunSet(named, meanings=break_meanings())
    access = Access(
        build_app(runs, default=runs.ids()[0], about=meanings()),
        port=listening.getsockname()[1],
        links=[link],
        admin_keys=lambda: admin_keys([runs.view(name).folder for name in runs.ids()]),
        new_link=new_link,
    )
    service = HttpService(access, sockets=[listening])
    await service.start()
    try:
        yield access
    finally:
        await service.close()
        await asyncio.to_thread(runs.close)


def url(port: int, link: str) -> str:
    """The address of a one-time link."""
    return f"http://{HOST}:{port}{OPEN}{link}"


def admin_keys(folders: Sequence[Path]) -> list[str]:
    """The admin keys of these runs, as far as there are some: none is made here."""
    found = []
    for folder in folders:
        host = str(read_config(folder).get("server", {}).get("host", HOST))
        try:
            if not is_loopback(host):
                found.append(KeyRing(secret_of_run(folder, host=host)).admin)
            elif (folder / SECRET_FILE).is_file():
                found.append(KeyRing(read_secret(folder / SECRET_FILE)).admin)
        except (SecretError, OSError):
            continue
    return found


async def _serve_for_run() -> int:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    orders = Orders(**json.loads(await reader.readline()))

    def say(link: str) -> None:
        with suppress(BrokenPipeError):  # the run is gone
            print(link, flush=True)

    with socket.socket(fileno=orders.descriptor) as listening:
        async with serving(listening, list(map(Path, orders.folders)), link=orders.link, new_link=say) as access:
            if await reader.read(1):
                await asyncio.sleep(FAREWELL_S)  # open pages receive how the run ended
            else:
                await _linger(access)
    return 0


async def _linger(access: Access) -> None:
    """The run was killed: wait until no reader was there for a while."""
    while True:
        left_s = access.last_used + LINGER_S - time.monotonic()
        if left_s <= 0.0:
            return
        await asyncio.sleep(left_s)


# `Access` keeps the page to holders of a one-time link, whose browser gets a cookie, or of a run's admin key; adds strict headers.
# Pure ASGI around all routes. Invariants: without one of the two, nothing is answered but that; a link opens once; a request under
# another host's name (a page of others that resolves to this machine) is refused; the method is GET or HEAD, or a POST of feedback,
# of at most MOST_BODY_BYTES, which a page of another origin (also of another port here) cannot send.

COOKIE = "understudy_page"
OPEN = "/open/"
POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
NAMES = ("127.0.0.1", "localhost", "[::1]")
CLOSED = (
    "This page needs a one-time link, and each opens once. A live run shows a new one in its panel; or start "
    "`understudy page RUN` in a terminal, which prints one."
)
MOST_SESSIONS = 100


class Access:
    """`links`: secrets of links that are open already. `admin_keys`: those of the runs that are shown, asked for each time.
    `new_link` takes the secret of the next link when one was used."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        port: int,
        links: Sequence[str],
        admin_keys: Callable[[], Sequence[str]],
        new_link: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._app = app
        self._cookie = f"{COOKIE}_{port}"  # a browser sends cookies to all ports of a host
        self._hosts = {f"{name}:{port}" for name in NAMES}
        self._links = list(links)
        self._admin_keys = admin_keys
        self._new_link = new_link
        self._sessions: list[str] = []
        self._answering = 0
        self._used = time.monotonic()

    @property
    def last_used(self) -> float:
        """Monotonic time of the last request that was let in; now, while one is being answered."""
        return time.monotonic() if self._answering else self._used

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        path: str = scope["path"]
        answer: ASGIApp = self._app
        if headers.get(b"host") not in self._hosts:
            answer = _kept_out(421, path, "this page is served to this machine only, under 127.0.0.1 or localhost")
        elif scope["method"] not in ("GET", "HEAD") and not _is_feedback(scope):
            answer = _kept_out(405, path, "only GET is answered, and POST of feedback: the page changes nothing else")
        elif path.startswith(OPEN):
            answer = self._open(path.removeprefix(OPEN), headers)
        elif not self._is_let_in(headers):
            answer = _kept_out(401, path, CLOSED)
        elif scope["method"] == "POST" and (wrong := self._wrong_with(headers)):
            answer = _kept_out(403, path, wrong)
        if answer is not self._app:
            await answer(scope, receive, _with_headers(send))
            return
        self._answering += 1
        try:
            await self._app(scope, receive, _with_headers(send))
        finally:
            self._answering -= 1
            self._used = time.monotonic()

    def _open(self, given: str, headers: dict[bytes, str]) -> Response:
        """Answers a link: its browser gets a cookie, once. One that has a cookie already needs no link."""
        link = next((link for link in self._links if _same(link, given)), None)
        if link is None and not self._is_let_in(headers):
            return _kept_out(401, OPEN, CLOSED)
        # Not a redirect: a browser that came from another site's link would not send a strict cookie along with that.
        opened = HTMLResponse(
            '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url=/"><title>understudy</title>'
        )
        if link is not None:
            self._links.remove(link)
            session = secrets.token_urlsafe(32)
            self._sessions = [*self._sessions, session][-MOST_SESSIONS:]
            opened.headers["set-cookie"] = f"{self._cookie}={session}; Path=/; HttpOnly; SameSite=Strict"
            following = secrets.token_urlsafe(32)
            self._links.append(following)
            self._new_link(following)
        return opened

    def _is_let_in(self, headers: dict[bytes, str]) -> bool:
        try:
            cookie = SimpleCookie(headers.get(b"cookie", "")).get(self._cookie)
        except CookieError:
            cookie = None
        given = "" if cookie is None else cookie.value
        return self._has_key(headers) or any([_same(session, given) for session in self._sessions])

    def _has_key(self, headers: dict[bytes, str]) -> bool:
        scheme, _, key = headers.get(b"authorization", "").partition(" ")
        return scheme.lower() == "bearer" and any([_same(known, key.strip()) for known in self._admin_keys()])

    def _wrong_with(self, headers: dict[bytes, str]) -> str:
        """Why what is sent may not be written; empty: it may. A browser says which page sends it, and a program needs a key."""
        origin, size = headers.get(b"origin"), headers.get(b"content-length", "")
        here = [f"{scheme}://{headers[b'host']}" for scheme in ("http", "https")]  # a proxy may have the certificate
        if origin not in here if origin is not None else not self._has_key(headers):
            return "feedback must come from this page itself, or with the run's admin key"
        if headers.get(b"content-type", "").partition(";")[0].strip().lower() != "application/json":
            return "feedback must be application/json"
        if not (size.isascii() and size.isdigit() and len(size) < 9 and int(size) <= MOST_BODY_BYTES):
            return f"feedback must say its length, of at most {MOST_BODY_BYTES} bytes"
        return ""


def _is_feedback(scope: Scope) -> bool:
    path: str = scope["path"]
    return scope["method"] == "POST" and path.startswith("/api/runs/") and path.endswith("/feedback")


def _same(one: str, other: str) -> bool:
    return secrets.compare_digest(one.encode(), other.encode("utf-8", errors="replace"))


def _with_headers(send: Send) -> Send:
    async def guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *HEADERS]}
        await send(message)

    return guarded


def _kept_out(status: int, path: str, text: str) -> Response:
    if path.startswith("/api/"):
        return Response(json.dumps({"error": text}), status, media_type="application/json")
    page = f'<!doctype html><meta charset="utf-8"><title>understudy</title><p>{html.escape(text)}</p>'
    return HTMLResponse(page, status)
