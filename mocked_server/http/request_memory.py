"""How much memory requests to the model API may hold while they are read and answered: one episode's, and all together.

`model_requests` counts each request here, from before its body is read until its answer has ended. Invariants: a body
is not read before there is room for it, and an episode holds at most `MAX_EPISODE_BYTES` of bodies in
`MAX_EPISODE_REQUESTS` requests. Answers that are kept for retries bound themselves (`client_retries`). Who may call is
not decided here.
"""

from __future__ import annotations

import asyncio

from mocked_server.conversation.live_episodes import EpisodeMemory
from mocked_server.http.request_limits import MAX_BODY_BYTES, BodyRefused

MAX_EPISODE_BYTES = 32 * 1024 * 1024
"""Most bytes of one episode's bodies that are being read or answered."""
MAX_EPISODE_REQUESTS = 256
"""Most requests of one episode that are being read or answered."""
MAX_BODIES_BYTES = 512 * 1024 * 1024
"""Most bytes of the bodies of all episodes. What would exceed it waits, unread."""
SMALL_BYTES = 64 * 1024
"""A body that is no larger does not wait: its connection may have it in its buffer already."""


class BodyRoom:
    """The room for the bodies of all episodes. One event loop."""

    def __init__(self, max_bytes: int = MAX_BODIES_BYTES) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        """Taken now."""
        self._waiting: list[tuple[EpisodeMemory, int, asyncio.Future[None]]] = []

    @property
    def num_waiting(self) -> int:
        """Bodies that wait for room."""
        return len(self._waiting)

    async def take(self, size: int, *, episode: EpisodeMemory) -> None:
        """Returns once there is room for so many bytes, and they are taken."""
        if not self._waiting and self._fits(size):
            self.num_bytes += size
            return
        room = asyncio.get_running_loop().create_future()
        self._waiting.append((episode, size, room))
        try:
            await room
        except asyncio.CancelledError:
            if room.done() and not room.cancelled():
                self.give(size)
            else:
                self._waiting = [each for each in self._waiting if each[2] is not room]
            raise

    def give(self, size: int) -> None:
        """So many bytes are free again. Of the requests that wait, the one whose episode holds least is next: none gets before
        others by asking for more."""
        self.num_bytes -= size
        self._waiting = [each for each in self._waiting if not each[2].done()]
        while self._waiting:
            at = min(range(len(self._waiting)), key=lambda k: self._waiting[k][0].in_flight_bytes)
            _, wanted, room = self._waiting[at]
            if not self._fits(wanted):
                return
            del self._waiting[at]
            self.num_bytes += wanted
            room.set_result(None)

    def _fits(self, size: int) -> bool:
        return self.num_bytes == 0 or self.num_bytes + size <= self._max_bytes


class RequestMemory:
    """What one request holds. `begin` it before its body is read, `end` it when its answer has ended."""

    def __init__(self, episode: EpisodeMemory, room: BodyRoom) -> None:
        self._episode = episode
        self._room = room
        self._num_bytes = 0
        self._taken = 0
        self._ended = False

    async def begin(self, length: int | None) -> None:
        """Waits until there is room for a body of this length; None: not told beforehand. Raises BodyRefused when the episode
        holds too much already."""
        if self._episode.in_flight_requests >= MAX_EPISODE_REQUESTS:
            self._ended = True
            raise BodyRefused(
                429,
                f"an episode may have {MAX_EPISODE_REQUESTS} requests under way at once; wait until one is answered",
            )
        self._episode.in_flight_requests += 1
        if length is not None:
            self.hold(length)
        wanted = MAX_BODY_BYTES if length is None else length
        if wanted > SMALL_BYTES:
            await self._room.take(wanted, episode=self._episode)
            self._taken = wanted

    def hold(self, size: int) -> None:
        """So many bytes more of its body. Raises BodyRefused when its episode holds too much then."""
        self._num_bytes += size
        self._episode.in_flight_bytes += size
        if self._episode.in_flight_bytes > MAX_EPISODE_BYTES:
            raise BodyRefused(
                413,
                f"an episode may have {MAX_EPISODE_BYTES} bytes of requests under way at once, got "
                f"{self._episode.in_flight_bytes}; wait until one is answered, or send less",
            )

    def is_read(self) -> None:
        """The body is here: what was kept free for it and is not needed is free again."""
        if (excess := self._taken - self._num_bytes) > 0:
            self._taken -= excess
            self._room.give(excess)

    def end(self) -> None:
        """Nothing of it is held any more; a second time nothing happens."""
        if self._ended:
            return
        self._ended = True
        self._episode.in_flight_requests -= 1
        self._episode.in_flight_bytes -= self._num_bytes
        if self._taken:
            self._room.give(self._taken)
