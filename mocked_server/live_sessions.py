"""Sessions of agents that nobody starts: which episode a request with a named key belongs to, and when that ends.

A request belongs to the session that its client names (`mocked_server.session_marks`), else to the one of which it continues a
recorded round, else it opens one. Owned by `MockedServer`, on its loop.

Loop row: `run` looks once in a while for sessions that were silent for `silence_s`; those with feedback end, and may be trained;
the others are dropped here and stay open in the ledger, where a later request, or a restart, finds them; those older than
`retention_s` are forgotten there, too.

Invariants: a session is one running episode at a time; side calls (titles, probes, summaries) are episodes of their own, not
trained; a session that was ended continues as another episode of the same name; a session stays with the model that began it; of
a request that is not to be recorded nothing is kept once it was answered.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from buffers.errors import EpisodeError, RequestRefused, UnderstudyError
from buffers.ledger.batches import WAS_FORGOTTEN
from buffers.ledger.forgetting import Forgotten, require_some
from buffers.ledger.ledger import Ledger
from buffers.ledger.sessions import FeedbackTaken, Session
from buffers.private_text import is_private
from buffers.prompt_queue import Prompt, Response
from buffers.records import Episode, Round, Task
from mocked_server.conversation.chat_history import Conversation
from mocked_server.conversation.continuation import Parse, find_parent
from mocked_server.conversation.live_episodes import MAX_KEPT_BYTES, Episodes, LiveEpisode
from mocked_server.http.dialects import Failure
from mocked_server.live_keys import LiveKeys
from mocked_server.next_turn import NextTurn, NextTurnJudge
from mocked_server.request_context import Call
from mocked_server.session_marks import SessionMark, session_mark
from mocked_server.watching import Watching, is_down

logger = logging.getLogger(__name__)

RESTORED = 32
"""Unnamed sessions of a user that are looked at again after a restart, the newest."""
MOST_UNNAMED = 256
"""Unnamed sessions of a user that are compared with a request, the latest heard first."""
LOOK_S = 1.0
FORGOTTEN_TOGETHER = 64
"""Episodes that are forgotten in one transaction, and in one look."""
REWRITTEN_BYTES = 64 * 1024 * 1024
"""The ledger's file is written anew once so much of it, and half of it, was forgotten."""
NOT_RECORDED = b"x-understudy-record"
"""The header of a request of which nothing is to be stored; its value is `none`."""
_NUMBER = re.compile(r"(?<=[0-9a-f])[_-]\d{1,4}$")
"""What vLLM adds to a request's id for the engine: the number of a prompt in it."""


class Policy(Protocol):
    """Which version answers: `learner.live_versions.Versions`."""

    def draw(self) -> int:
        """The version that answers a session that begins."""

    def adapter_of(self, version: int | None) -> tuple[int, str]:
        """The version that answers a session that `version` answered last, and its adapter in engines; None: of no session."""


@dataclass(slots=True, frozen=True)
class Newest:
    """Users are served the newest version, whichever it is. `engine`: knows it."""

    engine: Any

    def draw(self) -> int:
        return int(self.engine.version)

    def adapter_of(self, version: int | None) -> tuple[int, str]:
        return self.draw(), ""


@dataclass(slots=True, eq=False)
class _User:
    """What is known of one user. `door`: holds what a request has before its session is known, and all of one of which nothing is
    stored; `watched_door`: of such a one that the other model answers."""

    name: str
    door: LiveEpisode
    watched_door: LiveEpisode
    named: dict[tuple[str, bool], LiveEpisode] = field(default_factory=dict)
    unnamed: list[LiveEpisode] = field(default_factory=list)
    """The latest heard last."""
    opening: defaultdict[tuple[str, bool], asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    is_restored: bool = False


@dataclass(slots=True, eq=False)
class _Open:
    user: _User
    session: Session
    version: int
    """The one that answered it last."""


class LiveSessions:
    """`policy`: which version answers a session; `roles`: the users with an adapter of their own. `restore`: makes an episode of
    what the ledger has of it. `on_ended(episode_id, reason)`: an episode has ended."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        keys: LiveKeys,
        episodes: Episodes,
        silence_s: float,
        retention_s: float | None = None,
        words_count: bool,
        policy: Policy,
        roles: Sequence[str] = (),
        decode: Callable[[list[int]], str] = str,
        restore: Callable[[Episode, list[Round]], LiveEpisode],
        on_ended: Callable[[str, str], object],
        watching: Watching | None = None,
        patterns: Sequence[re.Pattern[str]] | None = None,
    ) -> None:
        """`watching`: answers a share of the sessions by another model. None: the policy answers all. `patterns`: what has a match,
        or a secret, is not stored; None: all is."""
        self.watching = watching
        self._patterns = patterns
        if watching is not None:
            watching.keeps = self._keeps
        self.keys = keys
        self._ledger = ledger
        self._episodes = episodes
        self._silence_s = silence_s
        self._retention_s = retention_s
        self._words_count = words_count
        self._policy = policy
        self._roles = roles
        self._restore = restore
        self._on_ended = on_ended
        self._users: dict[str, _User] = {}
        self.judge: NextTurnJudge | None = None
        """Told each answer with what was said next; None: nobody is."""
        self._decode = decode
        self._open: dict[str, _Open] = {}
        """Episode -> what it is of."""
        self._num_unrecorded = self._num_forgotten = 0
        self._forgotten_bytes = 0
        """Since the ledger's file was written anew."""
        self._owes_overwriting = self._owes_whole = False
        """What was forgotten is still in the file, or in its log."""

    def role_of(self, user: str) -> str:
        """The role that answers this user: its own where it has one, else the first. Empty: there are none."""
        return user if user in self._roles else next(iter(self._roles), "")

    def judges_episode(self) -> LiveEpisode:
        """What the judge of the next turn asks as: the version that users are served answers, and nothing is recorded."""
        return LiveEpisode(
            episode=_episode(Session("judge", 0, "", False), user=""), is_recorded=False, adapter=self._served
        )

    def door_of(self, user: str) -> LiveEpisode:
        """What holds a request of this user until its session is known; it is no episode of the ledger."""
        return self._user(user).door

    def chooser(
        self, user: str, path: str, headers: list[tuple[bytes, bytes]]
    ) -> Callable[
        [Mapping[str, Any]], Awaitable[LiveEpisode | Callable[[Conversation, Parse], Awaitable[LiveEpisode]]]
    ]:
        """What finds the session of a request by its body; by its messages, once they are rendered, where its client names none.
        What is not to be recorded stays at a door. Raises RequestRefused."""
        is_excluded = self._is_excluded(user, headers)

        async def choose(
            body: Mapping[str, Any],
        ) -> LiveEpisode | Callable[[Conversation, Parse], Awaitable[LiveEpisode]]:
            mark = session_mark(path, headers, body)
            if is_excluded or self.is_private([body, mark.name, mark.client]):
                return await self._unrecorded(self._user(user), mark, path, body, is_excluded=is_excluded)
            if mark.name:
                return await self._of_name(self._user(user), mark, path)
            if (live := await self._of_watched(self._user(user), mark, path, body)) is not None:
                return live
            if "messages" in body or "input" in body or "contents" in body:
                return partial(self._of_chat, self._user(user), mark)
            return await self._begin(self._user(user), mark)

        return choose

    def _is_excluded(self, user: str, headers: list[tuple[bytes, bytes]]) -> bool:
        given = [value for name, value in headers if name == NOT_RECORDED]
        if wrong := [value for value in given if value.strip().lower() != b"none"]:
            raise RequestRefused(
                f"{NOT_RECORDED.decode()} must be none, got {wrong[0].decode('latin-1')!r:.60}; leave it out to be recorded"
            )
        return bool(given) or self.keys.is_excluded(user)

    def is_private(self, value: Any) -> bool:
        """True if a JSON value has what is not to be stored."""
        return self._patterns is not None and is_private(value, self._patterns, decode=self._decode)

    def _keeps(self, answer: Any) -> bool:
        """False, and counted, for an answer that is not to be stored, nor what it was asked."""
        is_hidden = self.is_private({"messages": answer})
        self._num_unrecorded += is_hidden
        return not is_hidden

    def keeps(self, response: Response) -> bool:
        """False for one that is not to be stored: for its text, or for its ids, which have more of it."""
        return self._patterns is None or self._keeps([response.text, self._decode(response.sampled_ids.tolist())])

    async def _unrecorded(
        self, user: _User, mark: SessionMark, path: str, body: Mapping[str, Any], *, is_excluded: bool
    ) -> LiveEpisode:
        """The door at which a request is answered of which nothing is stored: by whom its session is, or would be."""
        self._num_unrecorded += 1
        if self.watching is None:
            return user.door
        for is_side in sorted({mark.is_side, False}, reverse=True) if mark.name else ():
            if (live := user.named.get((mark.name, is_side))) is not None:
                return user.watched_door if live.is_watched else user.door
            running = self._ledger.running_sessions(user=user.name, name=mark.name, is_side=is_side)
            if found := await asyncio.wrap_future(running):
                return user.watched_door if found[0].is_watched else user.door
        if (given := await self.watching.read(path, body)) is None:
            return user.door
        asked, chain = given
        if not asked.is_new and (known := self.watching.find(user.name, chain)) is not None:
            return user.watched_door if known else user.door
        others = {name: each for name, each in body.items() if name not in ("messages", "input")}
        begins_so = is_excluded or self.is_private([{"messages": asked.opening, **others}, mark.name, mark.client])
        is_drawn = begins_so and self.watching.draws_alike(chain[: len(asked.opening)])
        return user.watched_door if is_drawn else user.door

    def _user(self, name: str) -> _User:
        if name not in self._users:
            nowhere = _episode(Session(f"live-{name}", 0, "", False), user=name)
            door = partial(LiveEpisode, episode=nowhere, is_recorded=False, adapter=self._served)
            self._users[name] = _User(name, door(), door(is_watched=True))
        return self._users[name]

    async def _of_name(self, user: _User, mark: SessionMark, path: str) -> LiveEpisode:
        place = (mark.name, mark.is_side)
        async with user.opening[place]:
            live = user.named.get(place)
            if live is None:
                found = await asyncio.wrap_future(
                    self._ledger.running_sessions(user=user.name, name=mark.name, is_side=mark.is_side)
                )
                if found and (self.watching is not None or not found[0].is_watched):
                    live = await self._resume(user, found[0])
            if live is None or live.kept_bytes > MAX_KEPT_BYTES:
                main = user.named.get((mark.name, False)) if mark.is_side else None
                live = await self._begin(user, mark, is_watched=self._draws(path) if main is None else main.is_watched)
        return live

    def _draws(self, path: str) -> bool:
        return self.watching is not None and self.watching.draws(path)

    async def _of_watched(
        self, user: _User, mark: SessionMark, path: str, body: Mapping[str, Any]
    ) -> LiveEpisode | None:
        """The session that another model answers, or is to answer; None: the policy is asked. Only a conversation in which no model
        has said anything may begin one."""
        given = None if self.watching is None else await self.watching.read(path, body)
        if self.watching is None or given is None:
            return None
        asked, chain = given
        if not (known := self.watching.find(user.name, chain)):
            if asked.is_new and self._draws(path):
                return await self._begin(user, mark, is_watched=True)
            if chain:
                self.watching.remember(user.name, chain[-1], "")
            return None
        if known in self._open and (live := self._episodes.find(known)) is not None:
            return live
        found = await asyncio.wrap_future(
            self._ledger.running_sessions(user=user.name, name="", is_side=mark.is_side, episode_id=known)
        )
        return await self._resume(user, found[0]) if found else None

    async def watch(self, call: Call, scope: Scope, body: bytes, *, receive: Receive, send: Send) -> bool:
        """Have the other model answer a request of a session that it answers. False: it is down, and the session that begins is the
        policy's. Raises Failure before anything was sent."""
        live, known = call.live, self._open.get(call.live.episode_id)
        if self.watching is None or (known is None and live.is_recorded):
            raise Failure(409, "another model has begun this session, and is not asked any more; begin another session")
        session, user = (None, "") if known is None else (known.session, known.user.name)
        try:
            await self.watching.answer(call, scope, body, session=session, user=user, receive=receive, send=send)
        except Failure as failure:
            is_left_out = is_down(failure) and self.watching.can_be_left_out
            if known is None or session is None or not (is_left_out and self.watching.is_untouched(live.episode_id)):
                raise
            if not await asyncio.wrap_future(self._ledger.take_over(episode_id=live.episode_id)):
                raise
            live.is_watched = False
            if not (session.name or session.is_side):
                known.user.unnamed.append(live)
            self.watching.give_up(live.episode_id)
            return False
        return True

    async def _of_chat(self, user: _User, mark: SessionMark, chat: Conversation, parse: Parse) -> LiveEpisode:
        """The session of which a round is continued, the latest heard first."""
        if not mark.is_side:
            if not user.is_restored:
                user.is_restored = True
                found = await asyncio.wrap_future(
                    self._ledger.running_sessions(user=user.name, name="", limit=RESTORED)
                )
                for session in reversed(found):
                    if session.episode_id not in self._open and not session.is_watched:
                        await self._resume(user, session)
            for live in sorted(user.unnamed, key=lambda each: each.heard, reverse=True)[:MOST_UNNAMED]:
                if live.kept_bytes <= MAX_KEPT_BYTES and find_parent(live, chat, parse) is not None:
                    return live
        return await self._begin(user, mark)

    async def _begin(self, user: _User, mark: SessionMark, *, is_watched: bool = False) -> LiveEpisode:
        session = await asyncio.wrap_future(
            self._ledger.open_session(
                episode_id=f"{user.name}-{secrets.token_hex(6)}",
                user=user.name,
                name=mark.name,
                is_side=mark.is_side,
                version=self._policy.draw(),
                is_watched=is_watched,
                client=mark.client,
            )
        )
        return self._took(user, session, self._episodes.open(_episode(session, user=user.name)))

    async def _resume(self, user: _User, session: Session) -> LiveEpisode:
        rounds = await asyncio.wrap_future(self._ledger.rounds(session.episode_id))
        return self._took(user, session, self._restore(_episode(session, user=user.name), rounds))

    def _took(self, user: _User, session: Session, live: LiveEpisode) -> LiveEpisode:
        self._open[session.episode_id] = known = _Open(user, session, session.version)
        live.adapter, live.is_watched = partial(self._answering, known), session.is_watched
        if session.name:
            user.named[session.name, session.is_side] = live
        elif not (session.is_side or session.is_watched):
            user.unnamed.append(live)
        return live

    def _answering(self, known: _Open) -> str:
        known.version, adapter = self._policy.adapter_of(known.version)
        return adapter

    def _served(self) -> str:
        return self._policy.adapter_of(None)[1]

    def recorded(self, prompt: Prompt, round_: Round) -> None:
        """A round was stored: the client has read the id of its request in its answer."""
        if round_.episode_id in self._open:
            request_id = _NUMBER.sub("", prompt.request_id)
            self._ledger.name_answer(
                request_id=request_id, episode_id=round_.episode_id, round_index=round_.round_index
            )
            if self.judge is not None and round_.parent is not None:
                self._show(round_, to=self.judge)

    def _show(self, round_: Round, *, to: NextTurnJudge) -> None:
        live = self._episodes.find(round_.episode_id)
        answer = next((each for each in live.rounds if each.round_index == round_.parent), None) if live else None
        if answer is not None and round_.parent is not None:
            said = self._decode(round_.tail_ids.tolist())
            to.look(NextTurn(round_.episode_id, round_.parent, answer.text, said))

    async def feedback(self, **said: Any) -> FeedbackTaken:
        """See `buffers.ledger.sessions.give_feedback`. A session that is not open here any more ends by it. Raises EpisodeError
        for what is not to be stored."""
        if self.is_private(said.get("text")):
            raise EpisodeError(
                "feedback must have nothing that serve.private_patterns keeps out; say it in other words"
            )
        taken = await asyncio.wrap_future(self._ledger.give_feedback(**said))
        if taken.trains and taken.episode_id not in self._open:
            await self._settle(taken.episode_id)
        return taken

    async def run(self) -> None:
        """Ends silent sessions, and forgets old ones, until cancelled."""
        while True:
            await asyncio.sleep(min(LOOK_S, self._silence_s / 4))
            if self.watching is not None:
                await self.watching.write_silent(self._silence_s)
            await self.look()

    async def look(self) -> None:
        """End or drop the sessions that are silent, and forget some that are old."""
        for live in self._episodes.quiet(self._silence_s):
            if (known := self._open.get(live.episode_id)) is not None and not live.requests:
                # Before anything is waited for: a request that comes meanwhile makes it anew, of what the ledger has.
                self._drop(known, live)
                self._episodes.forget(live.episode_id)
                self._on_ended(live.episode_id, "silent")
                await self._settle(live.episode_id)
        try:
            await self._forget_old()
        except UnderstudyError as error:
            logger.warning("old sessions were not forgotten, which is tried again: %s", error)

    async def forget(self, *, user: str = "", session: str = "", episode_id: str = "") -> Forgotten:
        """Forget an episode, or a user's sessions (empty: everybody's), all of them or one by its name; what is generated for
        them ends. Raises UnknownEpisode, and UnderstudyError where the ledger's file could not be written anew."""
        found = (
            [episode_id]
            if episode_id
            else await asyncio.wrap_future(self._ledger.episodes_of(user=user, session=session))
        )
        require_some(found, user=user, session=session)
        for each in found:
            self._on_ended(each, WAS_FORGOTTEN)
            if (known := self._open.get(each)) is not None and (live := self._episodes.find(each)) is not None:
                self._drop(known, live)
            self._episodes.forget(each)
        taken = Forgotten()
        for start in range(0, len(found), FORGOTTEN_TOGETHER):
            taken = taken.plus(await self._forget_episodes(found[start : start + FORGOTTEN_TOGETHER]))
        self._owes_whole = True
        await self._overwrite()
        return taken

    async def _forget_old(self) -> None:
        """Some of those that are older than what is kept, and those that were in a batch when they were to be forgotten."""
        age_s = self._retention_s
        old = await asyncio.wrap_future(self._ledger.expired_sessions(age_s=age_s, limit=FORGOTTEN_TOGETHER))
        closed = [each for each in old if each not in self._open]
        # What people said of one before a restart is learned from first.
        if found := [each for each in closed if not await self._settle(each)]:
            await self._forget_episodes(found)
            size = self._ledger.path.stat().st_size if self._ledger.path else 0
            self._owes_whole |= self._forgotten_bytes > max(REWRITTEN_BYTES, size // 2)
        if self._owes_overwriting:
            await self._overwrite()

    async def _forget_episodes(self, episode_ids: list[str]) -> Forgotten:
        taken = await asyncio.wrap_future(self._ledger.forget_episodes(episode_ids=episode_ids))
        if self.watching is not None:
            await asyncio.to_thread(self.watching.forget, episode_ids)
        self._num_forgotten += len(taken.episodes)
        self._forgotten_bytes += taken.num_bytes
        self._owes_overwriting = True
        return taken

    async def _overwrite(self) -> None:
        await asyncio.to_thread(self._ledger.overwrite, whole=self._owes_whole)
        if self._owes_whole:
            self._forgotten_bytes = 0
        self._owes_overwriting = self._owes_whole = False

    def _drop(self, known: _Open, live: LiveEpisode) -> None:
        session = known.session
        del self._open[session.episode_id]
        if session.name:
            known.user.named.pop((session.name, session.is_side), None)
            known.user.opening.pop((session.name, session.is_side), None)
        elif live in known.user.unnamed:
            known.user.unnamed.remove(live)

    async def _settle(self, episode_id: str) -> bool:
        """End it if anything was said of it; a disk that does not take that is tried again after the next silence."""
        try:
            ended = await asyncio.wrap_future(
                self._ledger.settle_session(episode_id=episode_id, words_count=self._words_count)
            )
        except UnderstudyError as error:
            logger.warning("session %s was not ended: %s", episode_id, error)
            return False
        return ended

    def figures(self) -> dict[str, float]:
        """Users and sessions that were heard of lately; requests of which nothing was stored, and episodes that were forgotten."""
        found: dict[str, float] = {
            "live/users": len(self._users),
            "live/sessions": len(self._open),
            "live/unrecorded": self._num_unrecorded,
            "live/forgotten": self._num_forgotten,
        }
        found |= {} if self.watching is None else self.watching.figures()
        return found | (self.judge.figures() if self.judge else {})


def _episode(session: Session, *, user: str) -> Episode:
    task = Task(task_id=f"live/{user}", prompt=[], data_source=user)
    return Episode(episode_id=session.episode_id, task=task, group_id=session.group_id, sample_index=0)
