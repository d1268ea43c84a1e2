"""Sessions of agents that nobody starts: which episode a request with a named key belongs to, and when that ends.

A request belongs to the session that its client names (`mocked_server.session_marks`), else to the one of which it continues a
recorded round, else it opens one. Owned by `MockedServer`, on its loop.

Loop row: `run` looks once in a while for sessions that were silent for `silence_s`; those with feedback end, and may be trained;
the others are forgotten here and stay open in the ledger, where a later request, or a restart, finds them.

Invariants: a session is one running episode at a time; side calls (titles, probes, summaries) are episodes of their own, not
trained; a session that was ended continues as another episode of the same name; a session stays with the model that began it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from starlette.types import Scope, Send

from buffers.errors import UnderstudyError
from buffers.ledger.ledger import Ledger
from buffers.ledger.sessions import FeedbackTaken, Session
from buffers.prompt_queue import Prompt
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
_NUMBER = re.compile(r"(?<=[0-9a-f])[_-]\d{1,4}$")
"""What vLLM adds to a request's id for the engine: the number of a prompt in it."""


class Settings(Protocol):
    """The section `serve` of the configuration."""

    silence_s: float


@dataclass(slots=True, eq=False)
class _User:
    """What is known of one user. `door`: holds what a request has before its session is known."""

    name: str
    door: LiveEpisode
    named: dict[tuple[str, bool], LiveEpisode] = field(default_factory=dict)
    unnamed: list[LiveEpisode] = field(default_factory=list)
    """The latest heard last."""
    opening: defaultdict[tuple[str, bool], asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    is_restored: bool = False


@dataclass(slots=True, eq=False)
class _Open:
    user: _User
    session: Session


class LiveSessions:
    """`version`: the one that users are served, now, and `adapter` its name in the engine. `restore`: makes an episode of what the
    ledger has of it. `on_ended(episode_id, reason)`: an episode has ended."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        keys: LiveKeys,
        episodes: Episodes,
        silence_s: float,
        words_count: bool,
        version: Callable[[], int],
        adapter: str,
        decode: Callable[[list[int]], str],
        restore: Callable[[Episode, list[Round]], LiveEpisode],
        on_ended: Callable[[str, str], object],
        watching: Watching | None = None,
    ) -> None:
        """`watching`: answers a share of the sessions by another model. None: the policy answers all."""
        self.watching = watching
        self.keys = keys
        self._ledger = ledger
        self._episodes = episodes
        self._silence_s = silence_s
        self._words_count = words_count
        self._version = version
        self._adapter = adapter
        self._restore = restore
        self._on_ended = on_ended
        self._users: dict[str, _User] = {}
        self.judge: NextTurnJudge | None = None
        """Told each answer with what was said next; None: nobody is."""
        self._decode = decode
        self._open: dict[str, _Open] = {}
        """Episode -> what it is of."""

    def door_of(self, user: str) -> LiveEpisode:
        """What holds a request of this user until its session is known; it is no episode of the ledger."""
        return self._user(user).door

    def chooser(
        self, user: str, path: str, headers: list[tuple[bytes, bytes]]
    ) -> Callable[
        [Mapping[str, Any]], Awaitable[LiveEpisode | Callable[[Conversation, Parse], Awaitable[LiveEpisode]]]
    ]:
        """What finds the session of a request by its body; by its messages, once they are rendered, where its client names none."""

        async def choose(
            body: Mapping[str, Any],
        ) -> LiveEpisode | Callable[[Conversation, Parse], Awaitable[LiveEpisode]]:
            mark = session_mark(path, headers, body)
            if mark.name:
                return await self._of_name(self._user(user), mark, path)
            if (live := await self._of_watched(self._user(user), mark, path, body)) is not None:
                return live
            if "messages" in body or "input" in body or "contents" in body:
                return partial(self._of_chat, self._user(user), mark)
            return await self._begin(self._user(user), mark)

        return choose

    def _user(self, name: str) -> _User:
        if name not in self._users:
            self._users[name] = _User(
                name, LiveEpisode(episode=_episode(Session(f"live-{name}", 0, "", False), user=name))
            )
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
        if (known := self.watching.find(user.name, chain)) is None:
            return await self._begin(user, mark, is_watched=True) if asked.is_new and self._draws(path) else None
        if known in self._open and (live := self._episodes.find(known)) is not None:
            return live
        found = await asyncio.wrap_future(
            self._ledger.running_sessions(user=user.name, name="", is_side=mark.is_side, episode_id=known)
        )
        return await self._resume(user, found[0]) if found else None

    async def watch(self, call: Call, scope: Scope, body: bytes, *, send: Send) -> bool:
        """Have the other model answer a request of a session that it answers. False: it is down, and the session that begins is the
        policy's. Raises Failure before anything was sent."""
        live, known = call.live, self._open.get(call.live.episode_id)
        if self.watching is None or known is None:
            raise Failure(409, "another model has begun this session, and is not asked any more; begin another session")
        session = known.session
        try:
            await self.watching.answer(
                call, scope, body, user=known.user.name, is_named=bool(session.name), is_side=session.is_side, send=send
            )
        except Failure as failure:
            if not (is_down(failure) and self.watching.can_be_left_out and self.watching.is_untouched(live.episode_id)):
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
                version=self._version(),
                is_watched=is_watched,
            )
        )
        return self._took(user, session, self._episodes.open(_episode(session, user=user.name)))

    async def _resume(self, user: _User, session: Session) -> LiveEpisode:
        rounds = await asyncio.wrap_future(self._ledger.rounds(session.episode_id))
        return self._took(user, session, self._restore(_episode(session, user=user.name), rounds))

    def _took(self, user: _User, session: Session, live: LiveEpisode) -> LiveEpisode:
        live.adapter, live.is_watched = self._adapter, session.is_watched
        self._open[session.episode_id] = _Open(user, session)
        if session.name:
            user.named[session.name, session.is_side] = live
        elif not (session.is_side or session.is_watched):
            user.unnamed.append(live)
        return live

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

    async def feedback(
        self,
        *,
        user: str | None,
        session: str,
        response_id: str,
        round_index: int | None,
        score: float | None,
        text: str,
        source: str,
    ) -> FeedbackTaken:
        """See `buffers.ledger.sessions.give_feedback`. A session that is not open here any more ends by it."""
        taken = await asyncio.wrap_future(
            self._ledger.give_feedback(
                user=user,
                session=session,
                response_id=response_id,
                round_index=round_index,
                score=score,
                text=text,
                source=source,
            )
        )
        if taken.trains and taken.episode_id not in self._open:
            await self._settle(taken.episode_id)
        return taken

    async def run(self) -> None:
        """Ends and forgets silent sessions, until cancelled."""
        while True:
            await asyncio.sleep(min(LOOK_S, self._silence_s / 4))
            if self.watching is not None:
                await self.watching.write_silent(self._silence_s)
            for live in self._episodes.quiet(self._silence_s):
                if (known := self._open.get(live.episode_id)) is not None and not live.requests:
                    self._forget(known, live)
                    if known.session.is_side or not await self._settle(live.episode_id):
                        self._episodes.forget(live.episode_id)

    def _forget(self, known: _Open, live: LiveEpisode) -> None:
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
        if ended:
            self._episodes.close(episode_id, "scored")
            self._on_ended(episode_id, "scored")
        return ended

    def figures(self) -> dict[str, float]:
        """Users and sessions that were heard of lately."""
        found: dict[str, float] = {"live/users": len(self._users), "live/sessions": len(self._open)}
        found |= {} if self.watching is None else self.watching.figures()
        return found | (self.judge.figures() if self.judge else {})


def _episode(session: Session, *, user: str) -> Episode:
    task = Task(task_id=f"live/{user}", prompt=[], data_source=user)
    return Episode(episode_id=session.episode_id, task=task, group_id=session.group_id, sample_index=0)
