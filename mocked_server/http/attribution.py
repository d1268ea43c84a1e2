"""Which episode does a request belong to, and which server process serves it? Answered from its API key or its URL, without
touching the agent.

Pure ASGI, in front of vLLM's application and of our own routes. The key is taken from `Authorization: Bearer`, `x-api-key`,
`x-goog-api-key`, the `key` of a query in Google's dialect, or a path prefix `/e/<key>/v1/...` (for agents whose key cannot be set),
where a role may follow: `/e/<key>/<role>/v1/...`. Model routes without a valid key of a running episode are answered here, in the
dialect's own error form; nothing of them is recorded.

`Forward` passes requests on to another server process of the run, and its answers back, as they come: nothing is held back, neither
of a body nor of a streamed answer; a client that hangs up ends its request at the owner too; an answer that breaks off there breaks
off here. `mocked_server.processes` has one for each process that owns episodes, and for the run's own, which has the tasks and the
scores.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Protocol
from urllib.parse import parse_qs

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from buffers.errors import EpisodeClosed, EpisodeError, RequestRefused, UnknownEpisode
from mocked_server.conversation.live_episodes import Episodes, LiveEpisode
from mocked_server.http.dialects import (
    GENERATE,
    GENERATING,
    MODEL_ROUTES,
    RETRY_AFTER_S,
    ROUTES,
    SLEEP,
    WAKE_UP,
    Failure,
    is_google,
    route_of,
    spoken,
)
from mocked_server.http.request_limits import unless_gone
from mocked_server.keys import PREFIX, KeyRing
from mocked_server.request_context import Call, ChooseByBody, current_call

PATH_PREFIX = "/e/"
OPEN_TO_ALL_KEYS = MODEL_ROUTES
OPEN_TO_WORKERS = frozenset({GENERATE, SLEEP, WAKE_UP})
"""Paths that a worker's key opens without an episode: what is generated is the caller's own, and is not recorded."""
CLOSED_TO_EPISODES = frozenset({SLEEP, WAKE_UP})


def key_of(scope: Scope) -> tuple[str | None, str]:
    """(key, path without the key's prefix) of a request."""
    path: str = scope["path"]
    if path.startswith(PATH_PREFIX):
        key, slash, rest = path[len(PATH_PREFIX) :].partition("/")
        return key, slash + rest
    keys = []
    for name, value in scope["headers"]:
        if name in (b"x-api-key", b"x-goog-api-key"):
            keys.append(value.decode("latin-1"))
        elif name == b"authorization" and value[:7].lower() == b"bearer ":
            keys.append(value[7:].decode("latin-1").strip())
    if (query := scope.get("query_string")) and is_google(route_of(path)[0]):
        keys += parse_qs(query.decode("latin-1")).get("key", ())
    # Some clients send both headers, one of them with a placeholder.
    return next((key for key in keys if key.startswith(PREFIX)), keys[0] if keys else None), path


def role_of(path: str) -> tuple[str, str]:
    """(role, path without it) of what follows the key in a path; no role where what would be left is no model route."""
    role, slash, rest = path[1:].partition("/")
    return (role, slash + rest) if route_of(slash + rest)[0] in ROUTES else ("", path)


class UserKeys(Protocol):
    """`mocked_server.live_keys.LiveKeys`."""

    def user_of(self, key: str) -> str | None: ...


class UserSessions(Protocol):
    """`mocked_server.live_sessions.LiveSessions`."""

    @property
    def keys(self) -> UserKeys: ...
    def role_of(self, user: str) -> str: ...
    def door_of(self, user: str) -> LiveEpisode: ...
    def chooser(self, user: str, path: str, headers: list[tuple[bytes, bytes]]) -> ChooseByBody: ...


@dataclass(slots=True)
class Attribution:
    """ASGI application: sets `current_call` for model requests of running episodes and refuses the others; hands all other
    paths to `others`."""

    models: ASGIApp
    _: KW_ONLY
    others: ASGIApp
    keys: KeyRing
    episodes: Episodes
    is_full: Callable[[], bool] = bool
    """Nothing more can be recorded for now."""
    elsewhere: Callable[[str, str], ASGIApp | None] | None = None
    """Forward of a model request with this key to this path to another server process; None where it is served here."""
    find: Callable[[str], Awaitable[LiveEpisode]] | None = None
    """Gets an episode that is not known here yet."""
    has_roles: bool = False
    """A path may name a role after the key."""
    sessions: UserSessions | None = None
    """Knows the keys of users, whose agents nobody starts. None: there are none."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.others(scope, receive, send)
            return
        key, path = key_of(scope)
        role = ""
        if self.has_roles and path != scope["path"] and route_of(path)[0] not in ROUTES:
            role, path = role_of(path)
        path, named = route_of(path)
        if self.has_roles:
            role = role or named.get("model", "")
        elsewhere = self.elsewhere(key, path) if self.elsewhere and key is not None and path in ROUTES else None
        try:
            _check_offered(scope, path)
            if elsewhere is not None:
                await elsewhere(scope, receive, send)
                return
            if named or path != scope["path"]:
                scope = {**scope, "path": path, "raw_path": path.encode(), "path_params": named}
            if path not in ROUTES:
                await self.others(scope, receive, send)
                return
            call = await self._call(key, path, scope["headers"])
        except Failure as failure:
            await failure.answer(send, spoken(path, scope["headers"]))
            return
        if call is not None:
            call.asked_role = role or call.asked_role
        token = current_call.set(call)
        try:
            with nullcontext() if call is None else call.held:
                if call is not None:
                    call.join(call.live)
                await self.models(scope, receive, send)
        finally:
            current_call.reset(token)

    async def _call(self, key: str | None, path: str, headers: list[tuple[bytes, bytes]]) -> Call | None:
        """None: no episode is asked for. Raises Failure."""
        try:
            call = await self._opened(key, path, headers)
        except EpisodeClosed as error:
            raise Failure(403, str(error), code="episode_closed") from error
        except RequestRefused as error:
            raise Failure(error.status, str(error), code="invalid_request") from error
        except EpisodeError as error:
            raise Failure(401, str(error), code="invalid_api_key") from error
        if path in GENERATING and self.is_full():
            why = "nothing more can be recorded for now: the ledger's disk is full, or its file is locked; send the request later"
            raise Failure(503, why, code="storage_full", retry_after_s=RETRY_AFTER_S)
        return call

    async def _opened(self, key: str | None, path: str, headers: list[tuple[bytes, bytes]]) -> Call | None:
        if key is None:
            raise UnknownEpisode("no API key was sent; set OPENAI_API_KEY to the api_key that came with the task")
        if self.sessions is not None and (user := self.sessions.keys.user_of(key)) is not None:
            if path not in GENERATING:
                return None
            return Call(
                self.sessions.door_of(user),
                by_body=self.sessions.chooser(user, path, headers),
                asked_role=self.sessions.role_of(user),
            )
        episode_id = self.keys.episode_of(key)
        if episode_id is not None and path not in CLOSED_TO_EPISODES:
            return Call(self.episodes.get(episode_id) if self.find is None else await self.find(episode_id))
        is_worker = self.keys.worker_of(key) is not None
        if path in OPEN_TO_WORKERS and is_worker:
            return None
        others = (self.keys.scorer, self.keys.admin)
        if path in OPEN_TO_ALL_KEYS and (is_worker or any(self.keys.same(key, other) for other in others)):
            return None
        raise UnknownEpisode("the API key opens no episode; use the api_key that came with the task")


def _check_offered(scope: Scope, path: str) -> None:
    """Raises Failure for a path of the model API that is none of `ROUTES`, or is asked in another way."""
    method = "GET" if path in MODEL_ROUTES else "POST"
    if not path.startswith("/v1") or (path in ROUTES and scope["method"] == method):
        return
    if path in ROUTES:
        message = f"{scope['path']} is asked by {method}, got {scope['method']}; send it so"
        raise Failure(405, message, code="method_not_allowed")
    offered = ", ".join(sorted(route for route in ROUTES if route.startswith("/v1")))
    raise Failure(404, f"{scope['method']} {scope['path']} is not offered; use one of {offered}", code="not_found")


logger = logging.getLogger(__name__)

HOP_BY_HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer",
    b"transfer-encoding", b"upgrade",
})  # fmt: skip
"""Headers of one connection (RFC 9110, section 7.6.1)."""
MAX_IDLE = 64
"""Connections that are kept for the next request."""
_UNAVAILABLE = "the server process of this episode does not answer; send the request again"


class Forward:
    """Passes requests on to `url`. `headers`: added to each, in place of those of the same name."""

    def __init__(self, url: str, *, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self._url = httpx.URL(url)
        self._headers = list(headers)
        self._not_sent = HOP_BY_HOP | {b"host"} | {name for name, _ in headers}
        self._transport = httpx.AsyncHTTPTransport(
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=MAX_IDLE)
        )
        self.count = 0
        """Requests passed on."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # there are no others
            await send({"type": "websocket.close"})
            return
        self.count += 1
        read = asyncio.Event()
        await unless_gone(receive, self._relay(scope, _body(receive, read), send), read=read)

    async def close(self) -> None:
        """End the connections that are kept."""
        await self._transport.aclose()

    async def _relay(self, scope: Scope, body: AsyncGenerator[bytes, None], send: Send) -> None:
        try:
            response = await self._transport.handle_async_request(self._request(scope, body))
        except httpx.TransportError as error:
            logger.warning("a request could not be passed on to %s: %r", self._url, error)
            failure = Failure(503, _UNAVAILABLE, code="server_unavailable", retry_after_s=RETRY_AFTER_S)
            await failure.answer(send, scope["path"])
            return
        finally:
            await body.aclose()
        try:
            headers = [
                (name.lower(), value)
                for name, value in response.headers.raw
                if name.lower() not in HOP_BY_HOP and name.lower() not in (b"date", b"server")  # uvicorn's own
            ]
            await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
            assert isinstance(response.stream, httpx.AsyncByteStream)
            async for part in response.stream:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await response.aclose()

    def _request(self, scope: Scope, body: AsyncIterator[bytes]) -> httpx.Request:
        query: bytes = scope["query_string"]
        target = scope.get("raw_path") or scope["path"].encode()
        url = self._url.copy_with(raw_path=target + (b"?" + query if query else b""))
        headers = [(name, value) for name, value in scope["headers"] if name not in self._not_sent]
        named = {name for name, _ in scope["headers"]}
        has_body = b"content-length" in named or b"transfer-encoding" in named
        host = (b"host", self._url.netloc)
        return httpx.Request(
            scope["method"], url, headers=[host, *headers, *self._headers], content=body if has_body else None
        )


async def _body(receive: Receive, read: asyncio.Event) -> AsyncGenerator[bytes, None]:
    """The body as it comes; `read` once all of it was taken."""
    try:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise asyncio.CancelledError
            if part := message.get("body", b""):
                yield part
            if not message.get("more_body", False):
                return
    finally:
        read.set()
