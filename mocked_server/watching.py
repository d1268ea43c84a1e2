"""Sessions of users that another model answers (`serve.upstream`), watched, so that the policy learns to answer them.

Owned by `LiveSessions`, on its loop. What a session asks, and the answers, lie in `RUN/watched/EPISODE.jsonl` until it is silent;
then its conversations are lines of `RUN/watched/demonstrations.jsonl`, in OpenAI's form, for SFT. Invariants: what was asked and
said is recorded as rounds that are never trained; only answers that the other model gave here are learned, each in one
conversation; the file grows by whole lines; a crash loses no exchange whose answer was whole.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.types import Receive, Scope, Send

from buffers.disk import replacing, why_refused
from buffers.ledger.ledger import Ledger
from buffers.ledger.sessions import Session
from buffers.log_forms import BadRecord, checked
from buffers.log_forms import Session as Conversation
from configs.schema import UpstreamConfig
from mocked_server.http.dialects import CHAT, MESSAGES, RESPONSES, Failure
from mocked_server.http.other_models import Asked, Message, asked_of, digests, said_of
from mocked_server.http.roles import Refused, Upstream
from mocked_server.request_context import LARGE_BYTES, Call

logger = logging.getLogger(__name__)

FOLDER, DEMONSTRATIONS, ROLE = "watched", "demonstrations.jsonl", "upstream"
MOST_KEPT_BYTES = 16 << 20
"""Bytes of an answer beyond which nothing of it is learned."""
MOST_KNOWN = 4096
"""Answers of a user's unnamed sessions that a request is compared with, the latest."""
PATHS = {None: (CHAT, RESPONSES, MESSAGES), "openai": (CHAT, RESPONSES), "anthropic": (MESSAGES,)}


@dataclass(slots=True, eq=False)
class _Seen:
    """A session that is under way. `places`: the conversation up to each message -> (exchange, messages) that hold it."""

    user: str
    heard: float
    is_side: bool = False
    running: int = 0
    exchanges: int = 0
    places: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    tools: Any = None


class Watching:
    """`folder`: the run's. `num_promoted`: versions that users are served because they passed the gate, the served one and those
    before it."""

    def __init__(
        self, upstream: Upstream, *, folder: Path, ledger: Ledger, settings: UpstreamConfig, num_promoted: Callable[[], int],
        seed: int = 0,
    ) -> None:  # fmt: skip
        self.upstream = upstream
        self.folder = folder / FOLDER
        self._ledger = ledger
        self._settings = settings
        self._num_promoted = num_promoted
        self._random = random.Random(seed or None)
        self._paths = PATHS[settings.dialect]
        self._seen: dict[str, _Seen] = {}
        self._known: dict[str, OrderedDict[bytes, str]] = {}
        """User -> an unnamed conversation up to an answer -> its session."""
        self._counts: Counter[str] = Counter()
        self._more = asyncio.Event()
        self.number = 0
        """Demonstrations in the file."""
        self.keeps: Callable[[Any], bool] = lambda _: True
        """False for an answer that is not to be recorded."""
        self._begin()

    # Who answers

    @property
    def share(self) -> float:
        """Share of the sessions that begin now."""
        settings = self._settings
        return min(settings.share, max(settings.floor, settings.share - settings.step * self._num_promoted()))

    @property
    def can_be_left_out(self) -> bool:
        """Users were served a version that has passed the gate."""
        return self._num_promoted() > 0

    def draws(self, path: str) -> bool:
        """True if the other model answers a session that begins now, in this dialect."""
        return path in self._paths and self._random.random() < self.share

    async def read(self, path: str, body: Mapping[str, Any]) -> tuple[Asked, list[bytes]] | None:
        """The conversation of a request that the other model can answer, and its digests."""

        def read() -> tuple[Asked, list[bytes]] | None:
            asked = asked_of(path, body)
            return None if asked is None else (asked, digests(asked.messages))

        many = any(isinstance(each, list) and len(each) > 32 for each in body.values())
        return None if path not in self._paths else await asyncio.to_thread(read) if many else read()

    def find(self, user: str, chain: Sequence[bytes]) -> str | None:
        """The unnamed session that the conversation continues; empty: one of the policy's."""
        known = self._known.get(user, OrderedDict[bytes, str]())
        return next((known[digest] for digest in reversed(chain) if digest in known), None)

    def draws_alike(self, opening: Sequence[bytes]) -> bool:
        """`draws` for a conversation of which nothing is stored, by how it begins: the same for all its turns, while the share
        stays."""
        return bool(opening) and int.from_bytes(opening[-1][:4]) < self.share * (1 << 32)

    # What is asked and said

    async def answer(
        self, call: Call, scope: Scope, body: bytes, *, user: str, session: Session | None, receive: Receive, send: Send
    ) -> None:
        """Pass a request on, and record what is said; nothing of no session. Raises Failure before anything was sent."""
        path: str = scope["path"]
        if path not in self._paths:
            raise Failure(
                400,
                f"a session that {ROLE} answers must go on in a dialect that it speaks ({', '.join(self._paths)}), got {path}; "
                f"begin another session",
            )
        name, seen = call.live.episode_id, _Seen(user, time.monotonic(), is_side=False)
        if session is not None:
            seen = self._seen.setdefault(name, _Seen(user, time.monotonic(), session.is_side))

        async def keep(fields: dict[str, Any], answer: bytes) -> None:
            if session is not None:
                await self._keep(name, seen, path, fields, answer, is_named=bool(session.name))

        seen.running += 1
        self._counts["requests"] += 1
        try:
            await self.upstream.answer(
                call, path, body, receive=receive, send=send, headers=scope["headers"], query=scope.get("query_string", b""),
                most=MOST_KEPT_BYTES, on_whole=keep,
            )  # fmt: skip
        except Refused as failure:
            self._counts["slow" if failure.status == 504 else "down" if is_down(failure) else "refused"] += 1
            raise
        finally:
            seen.running -= 1
            seen.heard = time.monotonic()

    def is_untouched(self, episode_id: str) -> bool:
        """Nothing was said in this session, and nothing is about to be."""
        seen = self._seen.get(episode_id)
        return seen is None or not (seen.running or seen.exchanges)

    def give_up(self, episode_id: str) -> None:
        """The policy answers this session."""
        self._seen.pop(episode_id, None)
        self._counts["taken_over"] += 1

    async def _keep(
        self, name: str, seen: _Seen, path: str, fields: dict[str, Any], answer: bytes, *, is_named: bool
    ) -> None:
        is_large = len(answer) > LARGE_BYTES
        said = await asyncio.to_thread(said_of, path, answer) if is_large else said_of(path, answer)
        is_kept = self.keeps([said.text, said.message])
        given = await self.read(path, fields)
        asked = fields.get("messages", fields.get("input", ""))
        round_ = await self.upstream.keep(name, role=ROLE, asked=asked, said=said.text) if is_kept else None
        if round_ is not None and said.id:
            self._ledger.name_answer(request_id=said.id, episode_id=name, round_index=round_.round_index)
        if given is None or said.message is None or len(answer) >= MOST_KEPT_BYTES:
            self._counts["unreadable"] += is_kept
            return
        (messages, tools), chain = given
        whole = digests([*messages, said.message])
        if is_kept and not seen.is_side:
            line = self._exchange(seen, messages, chain, said=said.message, tools=tools)
            await self._written(self._append, self.folder / f"{name}.jsonl", [{**line, "model": said.model}])
        if is_kept:
            self._place(seen, whole)
        if not is_named:
            self.remember(seen.user, whole[-1], name)

    def _exchange(
        self, seen: _Seen, messages: Sequence[Message], chain: Sequence[bytes], *, said: Message, tools: Any
    ) -> dict[str, Any]:
        """The line of an exchange: what it adds to an earlier one. Answers in it that were not given here are context."""
        known = next((at for at in range(len(chain), 0, -1) if chain[at - 1] in seen.places), 0)
        of, keep = seen.places[chain[known - 1]] if known else (-1, 0)
        added = [{**each, "weight": 0} if each.get("role") == "assistant" else each for each in messages[known:]]
        line: dict[str, Any] = {"user": seen.user, "of": of, "keep": keep, "messages": added, "said": said}
        if tools != seen.tools:
            seen.tools = line["tools"] = tools
        return line

    def _place(self, seen: _Seen, whole: Sequence[bytes]) -> None:
        for at, digest in enumerate(whole):
            seen.places.setdefault(digest, (seen.exchanges, at + 1))
        seen.exchanges += 1

    def remember(self, user: str, digest: bytes, name: str) -> None:
        """An unnamed conversation up to here is of this session; empty: of one that the policy answers."""
        known = self._known.setdefault(user, OrderedDict())
        known[digest] = name
        known.move_to_end(digest)
        while len(known) > MOST_KNOWN:
            known.popitem(last=False)

    def forget(self, episodes: Collection[str]) -> None:
        """Drop what was written of these sessions."""
        for name in episodes:
            self._seen.pop(name, None)
            (self.folder / f"{name}.jsonl").unlink(missing_ok=True)
        for path in self.folder.rglob(DEMONSTRATIONS):  # those of a lesson too
            rows = list(lines_of(path))
            kept = [row for row in rows if row["source"] not in episodes]
            if len(kept) < len(rows):
                with replacing(path) as scratch:
                    scratch.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
            if path.parent == self.folder:
                self.number = len(kept)

    # What is learned

    async def write_silent(self, silence_s: float) -> None:
        """Make demonstrations of the sessions that were silent for so long."""
        since = time.monotonic() - silence_s
        for name in [name for name, seen in self._seen.items() if not seen.running and seen.heard < since]:
            seen = self._seen.pop(name)
            path = self.folder / f"{name}.jsonl"
            if seen.is_side or not path.is_file():
                continue
            scores = await asyncio.wrap_future(self._ledger.session_scores(episode_id=name))
            score = scores[0].score if scores else None
            await self._written(self._demonstrate, path, score)

    def _demonstrate(self, path: Path, score: float | None) -> None:
        rows, causes = [], Counter[str]()
        for conversation in _conversations(list(lines_of(path)), name=path.stem):
            try:
                whole = checked(conversation, causes=causes)
            except BadRecord as error:
                causes[str(error)] += 1
                continue
            line = {"messages": whole.messages, "tools": whole.tools, "source": whole.source, "model": whole.model}
            rows.append({**line, **weighed(score, min_score=self._settings.min_score)})
        for cause, number in causes.items():
            logger.info("watched session %s: %d: %s", path.stem, number, cause)
        self._counts["left_out"] += not rows
        if rows:
            self._append(self.folder / DEMONSTRATIONS, rows)
            self.number += len(rows)
        path.unlink()

    def rows(self) -> Iterator[dict[str, Any]]:
        """The demonstrations, the oldest first."""
        return lines_of(self.folder / DEMONSTRATIONS)

    async def wait(self, number: int) -> None:
        """Wait until there are so many demonstrations."""
        while self.number < number:
            self._more.clear()
            await self._more.wait()

    async def _written(self, write: Callable[..., None], *arguments: Any) -> None:
        """A disk that does not take it costs a demonstration, and no request its answer."""
        try:
            await asyncio.to_thread(write, *arguments)
        except OSError as error:
            if not why_refused(error):
                raise
            self._counts["left_out"] += 1
            logger.warning("a watched session could not be written: %s", error)
        self._more.set()

    def _append(self, path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
        """Whole lines: what a crash left of one goes first."""
        with path.open("a+b") as file:
            end = file.seek(0, os.SEEK_END)
            while end and _byte(file, end - 1) != b"\n":
                end -= 1
            file.truncate(end)
            file.write("".join(f"{json.dumps(row)}\n" for row in rows).encode())
            file.flush()
            os.fsync(file.fileno())

    def _begin(self) -> None:
        """What an earlier process left: sessions under way, and which answers the unnamed ones gave."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for row in lines_of(self.folder / DEMONSTRATIONS):
            self.number += 1
            self._recall(row["source"], [row["messages"]])
        for path in self.folder.glob("*.jsonl"):
            if path.name == DEMONSTRATIONS or not (lines := list(lines_of(path))):
                continue
            seen = self._seen[path.stem] = _Seen(lines[0]["user"], time.monotonic())
            wholes = [each for each, _ in _wholes(lines)]
            for whole in wholes:
                self._place(seen, digests(whole))
            self._recall(path.stem, wholes)

    def _recall(self, name: str, wholes: Sequence[Sequence[Message]]) -> None:
        for messages in wholes:
            for message, digest in zip(messages, digests(messages), strict=True):
                if message.get("role") == "assistant" and message.get("weight") != 0:
                    self.remember(name.rpartition("-")[0], digest, name)

    async def close(self) -> None:
        """End the connections."""
        await self.upstream.close()

    def figures(self) -> dict[str, float]:
        """Counts since the start."""
        counts = ("requests", "down", "slow", "refused", "taken_over", "unreadable", "left_out")
        return {
            "upstream/share": self.share,
            "upstream/sessions": len(self._seen),
            "upstream/demonstrations": self.number,
            "upstream/cut": self.upstream.cut,
            **{f"upstream/{name}": self._counts[name] for name in counts},
        }


def is_down(failure: Failure) -> bool:
    """True if it is the other server's fault, and no matter of this request."""
    return failure.status in (408, 429) or failure.status >= 500


def weighed(score: float | None, *, min_score: float) -> dict[str, float | None]:
    """The score of a demonstration, and its weight: 0 below the least score, and up to twice as much above it as without one."""
    if score is None:
        return {"score": None, "weight": 1.0}
    return {"score": score, "weight": 0.0 if score < min_score else 1.0 + min(1.0, score - min_score)}


def _conversations(lines: Sequence[Mapping[str, Any]], *, name: str) -> Iterator[Conversation]:
    """Conversations of a session: what no later exchange continues. An answer that stands in two is learned from the first."""
    wholes = _wholes(lines)
    continued = {line["of"] for line in lines if line["of"] >= 0 and line["keep"] == len(wholes[line["of"]][0])}
    learned: set[int] = set()
    for at, (messages, tools) in enumerate(wholes):
        if at in continued:
            continue
        mine = [{**each, "weight": 0} if id(each) in learned else each for each in messages]
        learned |= {id(each) for each in messages}
        models = sorted({str(line.get("model") or "") for line in lines} - {""})
        yield Conversation(messages=mine, tools=tools, source=name, model=", ".join(models))


def _wholes(lines: Sequence[Mapping[str, Any]]) -> list[tuple[list[Message], Any]]:
    """Each exchange's messages, its answer the last, and its tools."""
    wholes: list[tuple[list[Message], Any]] = []
    tools: Any = None
    for line in lines:
        before = wholes[line["of"]][0][: line["keep"]] if line["of"] >= 0 else []
        tools = line.get("tools", tools)
        wholes.append(([*before, *line["messages"], line["said"]], tools))
    return wholes


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file; none where there is no file."""
    if path.is_file():
        with path.open("rb") as file:
            yield from (json.loads(line) for line in file if line.endswith(b"\n"))


def _byte(file: Any, at: int) -> bytes:
    file.seek(at)
    return bytes(file.read(1))
