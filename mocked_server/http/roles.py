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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import httpx2
from starlette.types import Send

from buffers.errors import ScoreError, UnderstudyError
from buffers.outgoing import ROLE, AnswerRefused, Outgoing
from mocked_server.http.dialects import CHAT, COMPLETIONS, COUNT_TOKENS, MESSAGES, RESPONSES, Failure, is_anthropic
from mocked_server.http.request_fields import fields_of
from mocked_server.request_context import Call, Role

MAX_SHOWN_CHARS = 80
logger = logging.getLogger(__name__)

PASSED_ON = frozenset({CHAT, COMPLETIONS, RESPONSES, MESSAGES, COUNT_TOKENS})
MAX_KEPT_BYTES = 1024 * 1024
"""Bytes of an answer that are looked at for the record; all of it is passed on."""
MAX_KEPT_CHARS = 256 * 1024
"""Characters of a question, and of its answer, that the record has: the last ones."""


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


class Upstream:
    """`url`: its root, with /v1; `model`: its name there; `key`: for it, empty for none."""

    def __init__(self, url: str, *, model: str, key: str) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._headers = {"Authorization": f"Bearer {key}", "x-api-key": key} if key else {}
        self._http = Outgoing(ROLE)
        self.record: Callable[..., Future[None]] | None = None
        """`mocked_server.generation.Generation.record`."""
        self.encode: Callable[[str], list[int]] = lambda _: []
        """A text as the policy's tokenizer has it."""

    async def close(self) -> None:
        """End its connections."""
        await self._http.aclose()

    async def answer(self, call: Call, path: str, body: bytes, *, send: Send) -> None:
        """Ask the other server, and pass on what it says as it comes. Raises Failure before anything was sent."""
        fields = await call.apart(fields_of, body)
        if fields is None or path not in PASSED_ON:
            what = "a JSON object" if path in PASSED_ON else f"for one of {', '.join(sorted(PASSED_ON))}"
            raise Failure(400, f"a request of role {call.role.name} must be {what}")
        call.generates = True
        headers = {**self._headers, "content-type": "application/json"}
        if is_anthropic(path):
            headers["anthropic-version"] = "2023-06-01"
        kept, held, has_begun, is_whole = bytearray(), b"", False, False
        try:
            # Escaped: an agent's text may be no Unicode.
            content = (await call.apart(json.dumps, {**fields, "model": self._model})).encode()
            request = self._http.build_request("POST", self._url + path, content=content, headers=headers)
            response = await self._http.send(request, stream=True)
            try:
                has_begun = True
                kind = response.headers.get("content-type", "application/json")
                start = {"type": "http.response.start", "status": response.status_code}
                await send({**start, "headers": [(b"content-type", kind.encode())]})
                async for chunk in response.aiter_bytes():
                    kept += chunk[: MAX_KEPT_BYTES - len(kept)]
                    if held:
                        await send({"type": "http.response.body", "body": held, "more_body": True})
                    held = chunk
                is_whole = response.status_code == httpx2.codes.OK
            finally:
                await response.aclose()
        except httpx2.HTTPError as error:
            cause = str(error) if isinstance(error, AnswerRefused) else type(error).__name__
            why = f"the server of role {call.role.name} gave no {'whole ' if has_begun else ''}answer ({cause})"
            logger.warning("episode %s: %s", call.live.episode_id, why)
            if not has_begun:
                raise Failure(502, why, code="upstream_unavailable") from error
            return  # one that has begun stays without its end, so that the agent's client sees it break off
        await self._keep(call, path, fields, bytes(kept), is_whole=is_whole)
        await send({"type": "http.response.body", "body": held})

    async def _keep(self, call: Call, path: str, fields: dict[str, Any], answer: bytes, *, is_whole: bool) -> None:
        if self.record is None or path == COUNT_TOKENS or not is_whole:
            return
        asked, said = await asyncio.to_thread(self._ids, fields, answer)
        with suppress(UnderstudyError):  # the episode has ended meanwhile; it is logged where it is stored
            stored = self.record(call.live.episode_id, role=call.role.name, asked=asked, said=said)
            await asyncio.wrap_future(stored)

    def _ids(self, fields: dict[str, Any], answer: bytes) -> tuple[list[int], list[int]]:
        """(what was asked, what was said) as ids."""
        asked = fields.get("messages", fields.get("input", fields.get("prompt", "")))
        texts = (json.dumps(asked, ensure_ascii=False), text_of(answer))
        asked_ids, said_ids = (self.encode(text[-MAX_KEPT_CHARS:].encode(errors="replace").decode()) for text in texts)
        return asked_ids, said_ids


def text_of(answer: bytes) -> str:
    """What an answer says, of any dialect, whole or as a stream of events."""
    return "".join(text for event in _events(answer.decode(errors="replace")) for text in _texts(event))


def _events(answer: str) -> Iterator[Any]:
    lines = [line.removeprefix("data:") for line in answer.splitlines() if line.startswith("data:")] or [answer]
    for line in lines:
        try:
            yield json.loads(line)
        except (ValueError, RecursionError):
            continue


def _texts(event: Any) -> Iterator[str]:
    if not isinstance(event, dict):
        return
    if isinstance(delta := event.get("delta"), str) and "text" in str(event.get("type")):  # Responses, as a stream
        yield delta
    elif isinstance(delta, dict) and isinstance(delta.get("text"), str):  # Messages, as a stream
        yield delta["text"]
    for choice in _objects(event.get("choices")):
        (said,) = _objects([choice.get("message") or choice.get("delta")]) or [choice]
        yield from (str(said[name]) for name in ("content", "text") if isinstance(said.get(name), str))
    items = _objects(event.get("output"))  # Responses
    for part in (*_objects(event.get("content")), *(part for item in items for part in _objects(item.get("content")))):
        if isinstance(part.get("text"), str):
            yield part["text"]


def _objects(value: Any) -> list[dict[str, Any]]:
    """The objects of a list; none where it is no list: another server says what it likes."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
