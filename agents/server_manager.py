"""`AsyncLLMServerManager`: which engine answers a request. Token ids in, token ids out.

Made by `agents.workers.worker` over the run's servers and handed to agent loops, which call `generate`. The first round
of a `request_id` goes to the server with the fewest requests under way, later ones to the same server, whose prefix
cache holds what came before (the last `max_cache_size` ids are remembered). A server that fails or does not answer its
health check takes no new requests until it answers again; a request that it dropped is sent to another one, so a loop
never sees it, unless no server is left.

Invariant: a request that waits for one server never holds up a request to another.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from buffers.errors import UnderstudyError

logger = logging.getLogger(__name__)

MAX_CACHE_SIZE = 10_000
PROBE_S = 2.0
"""A server that failed is asked for its health at most this often."""
HEALTH_DEADLINE_S = 2.0
PATIENCE_S = 60.0
"""How long a request waits for some server to come back before it fails."""


class ServerUnavailable(UnderstudyError):
    """A server cannot be reached, or died while it answered: another one may be asked."""


class TokenOutput(list[int]):
    """[S] the sampled ids (verl's older loops use the list, newer ones `token_ids`), and what is known of them."""

    def __init__(
        self,
        token_ids: Sequence[int],
        *,
        log_probs: Sequence[float] = (),
        stop_reason: str = "completed",
        versions: Sequence[int] = (),
        num_preempted: int = 0,
    ) -> None:
        super().__init__(token_ids)
        self.log_probs = list(log_probs)
        """[S] natural logarithms under the policy that sampled, at the run's temperature."""
        self.stop_reason = stop_reason
        """`completed`, `length` or `aborted`."""
        self.versions = list(versions)
        """[S] policy version that sampled each id."""
        self.num_preempted = num_preempted

    @property
    def token_ids(self) -> list[int]:
        """[S] the ids."""
        return list(self)


class AsyncLLMServer(Protocol):
    """One engine, wherever it runs. Errors: ServerUnavailable (ask another one); anything else is the request's own."""

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], api_key: str
    ) -> TokenOutput: ...
    async def healthy(self) -> bool: ...
    async def wake_up(self) -> None: ...
    async def sleep(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Place:
    """A server, and what is known of it."""

    server: AsyncLLMServer
    running: int = 0
    failed_at: float | None = None
    """Time of its last failure; None: it is well."""
    probe: asyncio.Task[bool] | None = None


@dataclass(slots=True)
class _Routes:
    """Shared by the managers of all episodes of a worker."""

    places: list[_Place]
    sticky: OrderedDict[str, _Place] = field(default_factory=OrderedDict)
    next: int = 0
    num_failovers: int = 0


class AsyncLLMServerManager:
    """See the module. `keyed` gives the view of one episode, whose rounds are recorded under its key."""

    def __init__(
        self,
        servers: Sequence[AsyncLLMServer],
        *,
        max_cache_size: int = MAX_CACHE_SIZE,
        api_key: str = "",
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not servers:
            raise UnderstudyError("AsyncLLMServerManager needs at least one server, got none; start an engine first")
        self._routes = _Routes([_Place(server) for server in servers])
        self._max_cache_size = max_cache_size
        self._api_key = api_key
        self._patience_s = patience_s
        self._clock = clock

    def keyed(self, api_key: str) -> Self:
        """The same servers and routes, for the episode that `api_key` opens."""
        view = type(self).__new__(type(self))
        view.__dict__.update(self.__dict__)
        view._api_key = api_key
        return view

    @property
    def num_failovers(self) -> int:
        """Requests that were sent to another server because theirs failed."""
        return self._routes.num_failovers

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        """Sample after `prompt_ids` [P]. `request_id`: of the episode, for the sticky route. Raises ServerUnavailable
        when no server answered within the patience; what a server says about the request itself is raised as it is."""
        until = self._clock() + self._patience_s
        while True:
            place = self._choose(request_id)
            if place is None:
                await self._until_one_is_well(until)
                continue
            place.running += 1
            try:
                return await place.server.generate(
                    request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, api_key=self._api_key
                )
            except ServerUnavailable as error:
                self._fail(place, error)
                if self._clock() >= until:
                    raise
            finally:
                place.running -= 1

    async def check_health(self) -> int:
        """Ask all servers; how many are well."""
        return sum(await asyncio.gather(*(self._probe(place) for place in self._routes.places)))

    async def wake_up(self) -> None:
        """Weights and caches back into the engines' memory."""
        await asyncio.gather(*(place.server.wake_up() for place in self._routes.places))

    async def sleep(self) -> None:
        """Give the engines' caches back until `wake_up`."""
        await asyncio.gather(*(place.server.sleep() for place in self._routes.places))

    def _choose(self, request_id: str) -> _Place | None:
        """The server of this request, or the least loaded one that is well (in turn among equals); None when none is."""
        routes = self._routes
        place = routes.sticky.pop(request_id, None)
        if place is None or place.failed_at is not None:
            well = [other for other in routes.places if other.failed_at is None]
            if not well:
                return None
            fewest = min(other.running for other in well)
            equals = [other for other in well if other.running == fewest]
            place = equals[routes.next % len(equals)]
            routes.next += 1
        routes.sticky[request_id] = place
        if len(routes.sticky) > self._max_cache_size:
            routes.sticky.popitem(last=False)
        return place

    def _fail(self, place: _Place, error: ServerUnavailable) -> None:
        logger.warning("a server failed, its requests go to others: %s", error)
        place.failed_at = self._clock()
        self._routes.num_failovers += 1
        if place.probe is None or place.probe.done():
            place.probe = asyncio.create_task(self._recover(place), name="probe a server")

    async def _recover(self, place: _Place) -> bool:
        """Ask for its health until it is well; not at once: a server whose disk is full is healthy, and refuses all the same."""
        await asyncio.sleep(PROBE_S)
        while not await self._probe(place):  # noqa: ASYNC110  another program's health: no event says when it changes
            await asyncio.sleep(PROBE_S)
        return True

    async def _probe(self, place: _Place) -> bool:
        try:
            well = await asyncio.wait_for(place.server.healthy(), HEALTH_DEADLINE_S)
        except (TimeoutError, ServerUnavailable):
            well = False
        place.failed_at = None if well else self._clock()
        return well

    async def _until_one_is_well(self, until: float) -> None:
        probes = {place.probe for place in self._routes.places if place.probe is not None}
        left = until - self._clock()
        if left <= 0 or not probes:
            raise ServerUnavailable(
                f"none of {len(self._routes.places)} servers answered within {self._patience_s:.0f} s; see the run's log"
            )
        await asyncio.wait(probes, timeout=left, return_when=asyncio.FIRST_COMPLETED)
