"""The roles of a run: which of them a model request asks, by its path or by the name of the model in its body, and those that a
server of others answers.

Made by `learner.engines` of the configuration's `roles`; `model_requests` asks `Roles` for each request of a run that has roles.
Invariant: a request is answered by one role of the run, or refused with the list of them. A path's role goes before the model's
name, for agents whose model cannot be set.

A request of a role with an `Upstream` (any OpenAI-compatible API) is passed on as it is, in its own dialect, with the configured
model and key in place of the agent's. Invariants: the key of that server leaves for that server only; what was asked and said is
recorded as a round that is never trained, and is on disk before the last of it leaves for the agent; a server that is not there
ends this request and no other; what takes time in proportion to a message is done beside the event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import httpx2
from starlette.types import Receive, Send

from buffers.errors import ScoreError, UnderstudyError
from buffers.outgoing import CONNECT_S, ROLE, AnswerRefused, Outgoing
from buffers.records import Round
from mocked_server.http.dialects import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    MESSAGES,
    RESPONSES,
    Failure,
    is_anthropic,
    message_of,
)
from mocked_server.http.other_models import ENDS, events_of, objects_of
from mocked_server.http.request_fields import fields_of
from mocked_server.http.request_limits import unless_gone
from mocked_server.request_context import Call, Role

MAX_SHOWN_CHARS = 80
logger = logging.getLogger(__name__)

PASSED_ON = frozenset({CHAT, COMPLETIONS, RESPONSES, MESSAGES, COUNT_TOKENS})
MAX_KEPT_BYTES = 1024 * 1024
"""Bytes of an answer that are looked at for the record; all of it is passed on."""
MAX_EVENT_BYTES = 256 * 1024
"""An event of a stream is held back until it is whole, up to so many bytes of it."""
MAX_KEPT_CHARS = 256 * 1024
"""Characters of a question, and of its answer, that the record has: the last ones."""
TOLD = (b"anthropic-version", b"anthropic-beta", b"openai-beta")
"""Headers of a request that are passed on."""
ANSWERED = ("x-request-id", "request-id", "openai-processing-ms")
"""Headers of an answer that are passed on, beside its type."""
Headers = Sequence[tuple[bytes, bytes]]


class Roles:
    """`trained`, `frozen`: names of those that the policy and other engines of the run play; `others`: those of other servers."""

    def __init__(
        self, *, trained: Sequence[str], frozen: Sequence[str] = (), others: Mapping[str, Upstream] | None = None
    ) -> None:
        self._others = dict(others or {})
        self._roles = {name: Role(name, True) for name in trained}
        self._roles |= {name: Role(name, False) for name in (*frozen, *self._others)}
        self.default = self._roles[trained[0]]
        """The one that is asked where no model is named."""

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, the default first."""
        return tuple(self._roles)

    def settle(self, call: Call, body: bytes) -> bytes:
        """Finds who answers this request, and notes it in the call; the body, with the role for its model. Raises
        Failure."""
        fields = fields_of(body)
        named = call.asked_role or ("" if fields is None else fields.get("model") or "")
        if not named:
            call.role = self.default
            return body
        role = self._roles.get(named) if isinstance(named, str) else None
        if role is None:
            raise Failure(
                404,
                f"model must be one of this run's roles ({', '.join(self.names)}), got {str(named)[:MAX_SHOWN_CHARS]!r}; "
                f"set the model's name to one of them",
                code="model_not_found",
                param="model",
            )
        call.role = role
        if fields is None or "model" not in fields or fields["model"] == role.name:
            return body
        return json.dumps({**fields, "model": role.name}).encode()

    def upstream_of(self, role: Role) -> Upstream | None:
        """What answers for this role instead of the run's engines."""
        return self._others.get(role.name)

    def check_scored(self, name: str) -> None:
        """Raises ScoreError for a name that is no role of the run. One that the policy does not play may have a score, which is
        kept and trains nothing: environments score all speakers, and need not know who is trained."""
        if name not in self._roles:
            raise ScoreError(
                f"role of a score must be one of this run's ({', '.join(self.names)}), got {name[:MAX_SHOWN_CHARS]!r}; score one "
                f"of those, or the whole episode"
            )


class Refused(Failure):
    """Another server answered nothing that could be passed on: it is not there, too slow, or says so."""


class Upstream:
    """`url`: its root, with /v1; `model`: its name there, empty: as it was asked for; `key`: for it, empty for none; `who`: what it
    is called in errors, None: by its role. `silence_s`: seconds between two parts of an answer."""

    def __init__(
        self, url: str, *, model: str, key: str, who: str | None = None, silence_s: float | None = None
    ) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._key = key
        self._who = who
        self._headers = {"Authorization": f"Bearer {key}", "x-api-key": key} if key else {}
        limits = {} if silence_s is None else {"timeout": httpx2.Timeout(silence_s, connect=min(CONNECT_S, silence_s))}
        self._http = Outgoing(ROLE, **limits)
        self.cut = 0
        """Answers that broke off after they had begun."""
        self.record: Callable[..., tuple[Round, Future[None]]] | None = None
        """`mocked_server.generation.Generation.record`."""
        self.encode: Callable[[str], list[int]] = lambda _: []
        """A text as the policy's tokenizer has it."""

    async def close(self) -> None:
        """End its connections."""
        await self._http.aclose()

    async def answer(
        self, call: Call, path: str, body: bytes, *, receive: Receive, send: Send, headers: Headers = (), query: bytes = b"",
        on_whole: Callable[[dict[str, Any], bytes], Awaitable[None]] | None = None, most: int = MAX_KEPT_BYTES,
    ) -> None:  # fmt: skip
        """Ask the other server, and pass on what it says as it comes: of a stream whole events. Raises Refused before anything was
        sent. `headers`, `query`: of the request; of the headers those in `TOLD` are passed on. `on_whole`: given the request's
        fields and up to `most` bytes of a whole answer, before the last of it leaves; None: it is recorded as the call's role. When
        the client hangs up, so does this request, and nothing is recorded."""
        who = self._who or f"the server of role {call.role.name}"
        fields = await call.apart(fields_of, body)
        if fields is None or path not in PASSED_ON:
            what = "a JSON object" if path in PASSED_ON else f"for one of {', '.join(sorted(PASSED_ON))}"
            raise Failure(400, f"a request of {who.removeprefix('the server of ')} must be {what}")
        call.generates = True
        passing = _Passing(send, most=most, is_stream=bool(fields.get("stream")))
        try:
            request = await self._request(call, path, fields, headers=headers, query=query)
            if not await unless_gone(receive, self._pass_on(request, passing, who=who)):
                return None
        except httpx2.HTTPError as error:
            cause = str(error) if isinstance(error, AnswerRefused) else type(error).__name__
            why = f"{who} gave no {'whole ' if passing.has_begun else ''}answer ({cause})"
            logger.warning("episode %s: %s", call.live.episode_id, why)
            is_slow = isinstance(error, httpx2.TimeoutException)
            failure = Refused(
                504 if is_slow else 502, why, code="upstream_timeout" if is_slow else "upstream_unavailable"
            )
            if not passing.has_begun:
                raise failure from error
            return await self._break_off(passing, failure, path)
        if passing.is_events and not passing.has_end:
            return await self._break_off(passing, Refused(502, f"{who} gave no whole answer (its stream ended)"), path)
        await (on_whole or partial(self._keep, call, path))(fields, bytes(passing.kept))
        await passing.end()

    async def _pass_on(self, request: httpx2.Request, passing: _Passing, *, who: str) -> bool:
        """True: all of the answer came. Raises Refused."""
        response = await self._http.send(request, stream=True)
        try:
            if response.status_code >= httpx2.codes.BAD_REQUEST:
                raise self._refusal(response, await response.aread(), who=who)
            await passing.begin(response)
            async for chunk in response.aiter_bytes():
                await passing.take(chunk)
        finally:
            await response.aclose()
        return True

    async def _break_off(self, passing: _Passing, failure: Failure, path: str) -> None:
        """An answer that has begun ends with an error where it is a stream, else without its end: its client sees it break off."""
        self.cut += 1
        if passing.is_events:
            await passing.end(failure.event(path))

    async def _request(
        self, call: Call, path: str, fields: dict[str, Any], *, headers: Headers, query: bytes
    ) -> httpx2.Request:
        own = {**self._headers, "content-type": "application/json"}
        if is_anthropic(path):
            own["anthropic-version"] = "2023-06-01"
        own |= {name.decode(): value.decode("latin-1") for name, value in headers if name in TOLD}
        asked = {**fields, "model": self._model} if self._model else fields
        content = (await call.apart(json.dumps, asked)).encode()  # escaped: an agent's text may be no Unicode
        url = self._url + path + (f"?{query.decode('latin-1')}" if query else "")
        return self._http.build_request("POST", url, content=content, headers=own)

    def _refusal(self, response: httpx2.Response, body: bytes, *, who: str) -> Refused:
        """What an error says, for the agent: never this run's key, and nothing of the key's own state."""
        status = response.status_code
        if status in (httpx2.codes.UNAUTHORIZED, httpx2.codes.FORBIDDEN):
            logger.error("%s refuses the run's key (%d)", who, status)
            return Refused(502, f"{who} refuses the key of this run ({status})", code="upstream_unavailable")
        if self._key:
            body = body.replace(self._key.encode(), b"***")
        (error,) = objects_of([next(events_of(body.decode(errors="replace")), None)]) or [{}]
        (error,) = objects_of([error.get("error")]) or [error]
        wait = response.headers.get("retry-after", "")
        may_again = status in (httpx2.codes.REQUEST_TIMEOUT, httpx2.codes.CONFLICT, httpx2.codes.TOO_MANY_REQUESTS)
        return Refused(
            status, message_of(body)[:MAX_KEPT_CHARS], code=_name(error.get("code")), param=_name(error.get("param")),
            retry_after_s=int(wait) if wait.isdigit() else 1 if may_again else None,
        )  # fmt: skip

    async def _keep(self, call: Call, path: str, fields: dict[str, Any], answer: bytes) -> None:
        if path != COUNT_TOKENS:
            asked = fields.get("messages", fields.get("input", fields.get("prompt", "")))
            said = await asyncio.to_thread(text_of, answer)
            await self.keep(call.live.episode_id, role=call.role.name, asked=asked, said=said)

    async def keep(self, episode_id: str, *, role: str, asked: Any, said: str) -> Round | None:
        """Record a question and its answer, as a round that is not trained. None: it is not, as the episode has ended."""

        def ids() -> tuple[list[int], ...]:
            texts = (json.dumps(asked, ensure_ascii=False), said)
            return tuple(self.encode(text[-MAX_KEPT_CHARS:].encode(errors="replace").decode()) for text in texts)

        if self.record is None:
            return None
        asked_ids, said_ids = await asyncio.to_thread(ids)
        with suppress(UnderstudyError):  # the episode has ended meanwhile; it is logged where it is stored
            round_, stored = self.record(episode_id, role=role, asked=asked_ids, said=said_ids)
            await asyncio.wrap_future(stored)
            return round_
        return None


class _Passing:
    """An answer on its way through. Held back: of a stream, an event that is not whole yet, and one that may be the last; of
    another answer, its last part."""

    def __init__(self, send: Send, *, most: int, is_stream: bool) -> None:
        self._send = send
        self._most = most
        self._held = b""
        self.kept = bytearray()
        self.has_begun = False
        self.is_events = is_stream
        """Its client reads events."""
        self.has_end = False
        """A stream's last event has come."""

    async def begin(self, response: httpx2.Response) -> None:
        self.has_begun = True
        kind = response.headers.get("content-type", "application/json")
        self.is_events = self.is_events and "event-stream" in kind
        headers = [(name.encode(), response.headers[name].encode()) for name in ANSWERED if name in response.headers]
        start = {"type": "http.response.start", "status": response.status_code}
        await self._send({**start, "headers": [(b"content-type", kind.encode()), *headers]})

    async def take(self, chunk: bytes) -> None:
        self.kept += chunk[: self._most - len(self.kept)]
        if not self.is_events:
            now, self._held = self._held, chunk
        else:
            text = self._held + chunk
            whole = _whole(text)
            last = _whole(text[: whole - 1]) if whole else 0
            is_last = ENDS.search(text, last, whole) is not None
            self.has_end = self.has_end or is_last
            at = last if is_last else whole
            at = at if len(text) - at < MAX_EVENT_BYTES else len(text)
            now, self._held = text[:at], text[at:]
        if now:
            await self._send({"type": "http.response.body", "body": now, "more_body": True})

    async def end(self, instead: bytes | None = None) -> None:
        """Send what was held back, or this in its place."""
        await self._send({"type": "http.response.body", "body": self._held if instead is None else instead})


def _whole(text: bytes) -> int:
    """Bytes up to the end of the last event that is whole."""
    return max(text.rfind(end) + len(end) if end in text else 0 for end in (b"\n\n", b"\r\n\r\n", b"\r\r"))


def _name(value: Any) -> str | None:
    return value[:MAX_SHOWN_CHARS] if isinstance(value, str) else None


def text_of(answer: bytes) -> str:
    """What an answer says, of any dialect, whole or as a stream of events."""
    return "".join(text for event in events_of(answer.decode(errors="replace")) for text in _texts(event))


def _texts(event: Any) -> Iterator[str]:
    if not isinstance(event, dict):
        return
    if isinstance(delta := event.get("delta"), str) and "text" in str(event.get("type")):  # Responses, as a stream
        yield delta
    elif isinstance(delta, dict) and isinstance(delta.get("text"), str):  # Messages, as a stream
        yield delta["text"]
    for choice in objects_of(event.get("choices")):
        (said,) = objects_of([choice.get("message") or choice.get("delta")]) or [choice]
        yield from (str(said[name]) for name in ("content", "text") if isinstance(said.get(name), str))
    items = objects_of(event.get("output"))  # Responses
    for part in (
        *objects_of(event.get("content")),
        *(part for item in items for part in objects_of(item.get("content"))),
    ):
        if isinstance(part.get("text"), str):
            yield part["text"]
