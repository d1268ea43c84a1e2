"""Keeps the page to holders of a one-time link, whose browser gets a cookie, or of a run's admin key; adds strict headers.

Pure ASGI around all routes of `learner.page.serve`. Invariants: without one of the two, nothing is answered but that; a link opens
once; a request under another host's name (a page of others that resolves to this machine) is refused; the method is GET or HEAD.
"""

from __future__ import annotations

import html
import json
import secrets
import time
from collections.abc import Callable, Sequence
from http.cookies import CookieError, SimpleCookie

from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
            answer = _refused(421, path, "this page is served to this machine only, under 127.0.0.1 or localhost")
        elif scope["method"] not in ("GET", "HEAD"):
            answer = _refused(405, path, "only GET is answered: the page changes nothing")
        elif path.startswith(OPEN):
            answer = self._open(path.removeprefix(OPEN), headers)
        elif not self._is_let_in(headers):
            answer = _refused(401, path, CLOSED)
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
            return _refused(401, OPEN, CLOSED)
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
        if any([_same(session, given) for session in self._sessions]):
            return True
        scheme, _, key = headers.get(b"authorization", "").partition(" ")
        return scheme.lower() == "bearer" and any([_same(known, key.strip()) for known in self._admin_keys()])


def _same(one: str, other: str) -> bool:
    return secrets.compare_digest(one.encode(), other.encode("utf-8", errors="replace"))


def _with_headers(send: Send) -> Send:
    async def guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *HEADERS]}
        await send(message)

    return guarded


def _refused(status: int, path: str, text: str) -> Response:
    if path.startswith("/api/"):
        return Response(json.dumps({"error": text}), status, media_type="application/json")
    page = f'<!doctype html><meta charset="utf-8"><title>understudy</title><p>{html.escape(text)}</p>'
    return HTMLResponse(page, status)
