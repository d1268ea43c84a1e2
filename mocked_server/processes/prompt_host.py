"""`PromptHost`: the run as a service for its other server processes: gives them episodes, and has their prompts generated.

Held by `server_processes`, on the run's event loop; `run_link` calls it. A prompt that comes over the wire enters the same queue as
those of the run's own requests, so `mocked_server.generation` generates, records and stores it in the same way. Invariants: an
answer's end is sent once its rounds are on disk; the answers to one request go in their order, and the end of an episode after its
rounds; what a process that is gone had asked for is given up, as if its agents had hung up; after `lose` nothing that it said is
done any more.
"""

from __future__ import annotations

import asyncio
import logging
import queue
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import msgspec

from buffers.errors import EngineError, EpisodeError, UnderstudyError
from buffers.prompt_queue import Prompt, PromptQueue, QueueClosed, Response, Sampling
from buffers.records import Int32, Round
from buffers.remote.messages import WireEpisode
from buffers.wire.address import Way
from buffers.wire.rpc import remote
from buffers.wire.service import Call, Caller, Service
from mocked_server.conversation.live_episodes import Episodes, LiveEpisode
from mocked_server.http.model_requests import ModelRequests
from mocked_server.vllm.hosted.outputs import VLLMCodec, WireOutput

logger = logging.getLogger(__name__)

SILENT_S = 30.0
"""A side that was silent for so long has gone: its beats come every second."""
Adoption = tuple[WireEpisode, list[Round]] | str
"""An episode with its stored rounds; then, why it ended."""


class Generated(msgspec.Struct, array_like=True, frozen=True):
    """A part of a request's answer: an output of the engine's, the last one with the responses that are stored."""

    output: WireOutput | None
    responses: list[Response]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of a server process, sent every second."""

    episodes_open: int
    requests: int
    """Model calls answered since its start."""
    forwarded: int
    """Requests passed on to another process since its start."""
    refused: dict[str, int]
    """Reason -> requests refused for it since the last time."""
    cpu_s: float
    """Processor time since its start."""


class RunServer(Protocol):
    """The run's own server as server processes use it."""

    episodes: Episodes
    prompt_queue: PromptQueue
    model_requests: ModelRequests

    @property
    def base_url(self) -> str: ...
    @property
    def is_full(self) -> bool: ...


class _Reply:
    """The way back to a request that waits in a server process (`buffers.prompt_queue.Reply`). Used on the run's event loop."""

    def __init__(self, call: Call[Generated], live: LiveEpisode, *, pack: Callable[[Any], WireOutput]) -> None:
        self.abandoned = False
        self._call = call
        self._pack = pack
        self._on_abandon: list[Callable[[], object]] = []
        self._answering = ExitStack()
        self._answering.enter_context(live.answering())
        call.on_abort = self._abandon

    def push(self, output: Any) -> None:
        """Send one output; more follow."""
        if self._call.is_open:
            self._call.push(Generated(self._pack(output), []))

    def finish(self, *responses: Response, last: Any = None) -> None:
        """The answer is complete, and stored."""
        if self._call.is_open:
            self._answering.close()
            output = None if last is None else self._pack(last)
            flat = [replace(response, experts=None) for response in responses]  # no request asks for them
            self._call.push(Generated(output, flat), is_last=True)

    def fail(self, error: Exception) -> None:
        """There is no answer. No effect on one that has ended."""
        self._answering.close()
        if isinstance(error, queue.Full | QueueClosed):  # as the HTTP layer answers it: unavailable for now
            error = EngineError(str(error))
        self._call.fail(error)

    def on_abandon(self, callback: Callable[[], object]) -> None:
        """Call `callback()` when the agent hangs up; at once if it already has."""
        if self.abandoned:
            callback()
        else:
            self._on_abandon.append(callback)

    def _abandon(self) -> None:
        """The agent hung up, or its server process is gone."""
        self.abandoned = True
        self._answering.close()
        for callback in self._on_abandon:
            callback()


class PromptHost(Service):
    """Listens from `listen` until `aclose`. `rounds`: of an episode, as stored; `on_dead`: called with the number of a process that
    said nothing for `SILENT_S`."""

    def __init__(
        self,
        run: RunServer,
        codec: VLLMCodec,
        *,
        rounds: Callable[[str], Future[list[Round]]],
        secret: bytes,
        on_dead: Callable[[int], object] = lambda _: None,
    ) -> None:
        super().__init__(name="the run", secret=secret, way=Way.LOCAL, silent_s=SILENT_S)
        self._server = run
        self._rounds = rounds
        self._codec = codec
        self._on_dead = on_dead
        self._joined: dict[int, Caller] = {}
        """Server process -> its connection."""
        self._figures: dict[Caller, Figures] = {}
        self._adopted: dict[str, Call[Adoption]] = {}
        """Episode -> the call of the server process that has it."""
        self._begun: set[str] = set()
        """Episodes of which rounds may be stored."""

    def begun(self, episode_id: str) -> None:
        """Rounds are stored of this episode: an earlier process of the run had it."""
        self._begun.add(episode_id)

    def closed(self, episode_id: str, reason: str) -> None:
        """The episode has ended: its owner serves it no longer."""
        self._begun.discard(episode_id)
        if (call := self._adopted.pop(episode_id, None)) is not None:
            call.push(reason, is_last=True)

    def lose(self, process: int) -> None:
        """This process has ended. What it said before and was not looked at yet is not done."""
        if (caller := self._joined.pop(process, None)) is not None:
            self._figures.pop(caller, None)
            self.end(caller, "this process has ended")

    def figures(self, process: int) -> Figures | None:
        """Last figures of this process; None: none since it was started."""
        caller = self._joined.get(process)
        return None if caller is None or caller.peer.is_gone else self._figures.get(caller)

    def state(self) -> bool:
        """The ledger's disk takes nothing more for now."""
        return self._server.is_full

    def on_silent(self, caller: Caller) -> None:
        """One that has sent nothing yet does not serve: what it imports may keep it from saying anything."""
        process = next((number for number, each in self._joined.items() if each is caller), None)
        if process is not None and caller in self._figures:
            logger.error("server process %d was silent for %.0f s", process, SILENT_S)
            self.lose(process)
            self._on_dead(process)

    # What server processes call

    @remote
    def join(self, sender: Caller, process: int) -> None:
        """It is this server process."""
        self._joined[process] = sender

    @remote
    def beat(self, sender: Caller, figures: Figures | None = None) -> None:
        if figures is not None:
            self._figures[sender] = figures
            self._server.model_requests.refused.update(figures.refused)

    @remote
    def generate(
        self,
        call: Call[Generated],
        request_id: str,
        episode_id: str,
        group_id: int | None,
        prompt_token_ids: Int32,
        params: msgspec.Raw,
        extra: dict[str, Any],
        parent: int | None,
        memo: bytes,
        first_trained: int | None,
    ) -> None:
        """Queue a prompt; what cannot be queued is answered. `params`: vLLM's SamplingParams."""
        try:
            live = self._server.episodes.get(episode_id)
        except EpisodeError as error:
            call.fail(error)
            return
        sent = self._codec.params_of(params, as_deltas=False)
        pack = partial(self._codec.pack_output, logprobs=self._codec.shows_logprobs(sent), experts=False)
        reply = _Reply(call, live, pack=pack)
        prompt = Prompt(
            request_id=request_id,
            episode_id=episode_id,
            group_id=group_id,
            prompt_token_ids=prompt_token_ids,
            sampling=Sampling(params=sent, extra=extra),
            reply=reply,
            parent=parent,
            memo=memo,
            first_trained=first_trained,
        )
        self._begun.add(episode_id)
        try:
            self._server.prompt_queue.put(prompt)
        except (queue.Full, QueueClosed) as error:
            reply.fail(error)

    @remote
    def adopt(self, call: Call[Adoption], episode_id: str) -> None:
        """Give the episode to this process, if it runs; later say why it ended."""

        async def give() -> None:
            try:
                self._server.episodes.get(episode_id)
                rounds = await asyncio.wrap_future(self._rounds(episode_id)) if episode_id in self._begun else []
                episode = self._server.episodes.get(episode_id).episode  # it may have ended meanwhile
            except UnderstudyError as error:
                call.fail(error)
                return
            call.push((WireEpisode.of(episode), [replace(each, experts=None) for each in rounds]))
            if call.is_open:
                self._adopted[episode_id] = call
                call.on_abort = lambda: self._adopted.get(episode_id) is call and self._adopted.pop(episode_id)

        self.start_task(give(), name="adopt")
