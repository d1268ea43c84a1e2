"""The run's side of its other server processes: gives them episodes, has their prompts generated, and tells what ended.

Held by `server_processes`, on the run's event loop. A prompt that comes over the wire enters the same queue as those of the run's
own requests, so `mocked_server.generation` generates, records and stores it in the same way. Invariants: an answer's end is sent
once its rounds are on disk; the answers to one request go in their order; what a process that is gone had asked for is given up,
as if its agents had hung up; after `lose` nothing that it said is done any more.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import msgspec
import numpy as np

from buffers.errors import EpisodeError, UnderstudyError
from buffers.prompt_queue import Prompt, PromptQueue, QueueClosed, Response
from buffers.records import Round
from buffers.wire.address import Way, WireAddress
from buffers.wire.listener import Listener, Peer
from buffers.wire.session import Message
from mocked_server.conversation.live_episodes import Episodes, LiveEpisode
from mocked_server.fleet.engine_messages import WireOutput
from mocked_server.processes.messages import (
    MAX_UNREAD,
    SILENT_S,
    Adopted,
    Figures,
    Item,
    RunState,
    WireFailure,
    WirePrompt,
    WireResponse,
)
from mocked_server.request_context import Sampling

logger = logging.getLogger(__name__)

_PROMPTS = msgspec.msgpack.Decoder(list[tuple[int, WirePrompt]])
_FIGURES = msgspec.msgpack.Decoder(Figures)
_TEXT = msgspec.msgpack.Decoder(str)
_NUMBER = msgspec.msgpack.Decoder(int)


class PromptCodec(Protocol):
    """What the host needs to know of the engine's own records (`mocked_server.vllm.hosted.outputs`)."""

    def params_as_sent(self, data: msgspec.Raw) -> Any:
        """SamplingParams. Raises ValueError or TypeError for what is none."""
        ...

    def pack_output(self, output: Any, *, logprobs: bool = True, experts: bool = True) -> WireOutput: ...
    def shows_logprobs(self, params: Any) -> bool:
        """Whether the request asked to see log-probabilities."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSide:
    """What the host asks of the run's own server. `rounds`: of the ledger."""

    episodes: Episodes
    prompts: PromptQueue
    rounds: Callable[[str], Future[list[Round]]]
    is_full: Callable[[], bool]
    on_refused: Callable[[dict[str, int]], object] = lambda _: None
    """Gets the reasons for which server processes refused requests, with how often."""


@dataclass(slots=True, eq=False)
class _Client:
    """One server process: its requests under way, and what waits to be sent to it."""

    peer: Peer
    process: int | None = None
    replies: dict[int, _Reply] = field(default_factory=dict)
    waiting: list[Item] = field(default_factory=list)
    sent: int = 0
    read: int = 0
    """Batches sent, and those that were acknowledged."""
    is_due: bool = False
    """They will be sent soon."""
    figures: Figures | None = None


class _Reply:
    """The way back to a request that waits in a server process (`buffers.prompt_queue.Reply`). Used on the run's event loop."""

    def __init__(
        self, number: int, live: LiveEpisode, *, pack: Callable[[Any], WireOutput], send: Callable[[Item], None]
    ) -> None:
        self.abandoned = False
        self._number = number
        self._pack = pack
        self._send = send
        self._on_abandon: list[Callable[[], object]] = []
        self._ended = False
        self._answering = ExitStack()
        self._answering.enter_context(live.answering())

    def push(self, output: Any) -> None:
        """Send one output; more follow."""
        if not self._ended:
            self._send(Item(self._number, self._pack(output)))

    def finish(self, *responses: Response, last: Any = None) -> None:
        """The answer is complete, and stored."""
        if not self._ended:
            output = None if last is None else self._pack(last)
            self._end(Item(self._number, output, [WireResponse.of(response) for response in responses]))

    def fail(self, error: Exception) -> None:
        """There is no answer. No effect on one that has ended."""
        if not self._ended:
            self._end(Item(self._number, None, failure=WireFailure.of(error)))

    def on_abandon(self, callback: Callable[[], object]) -> None:
        """Call `callback()` when the agent hangs up; at once if it already has."""
        if self.abandoned:
            callback()
        else:
            self._on_abandon.append(callback)

    def abandon(self) -> None:
        """The agent hung up, or its server process is gone."""
        if self.abandoned or self._ended:
            return
        self.abandoned = True
        self._answering.close()
        for callback in self._on_abandon:
            callback()

    def _end(self, item: Item) -> None:
        self._ended = True
        self._answering.close()
        self._send(item)


class PromptHost:
    """Listens from `start` until `close`. `on_silent`: called with the number of a process that said nothing for `SILENT_S`."""

    def __init__(
        self, run: RunSide, codec: PromptCodec, *, secret: bytes, on_silent: Callable[[int], object] = lambda _: None
    ) -> None:
        self._run = run
        self._codec = codec
        self._secret = secret
        self._on_silent = on_silent
        self._clients: dict[Peer, _Client] = {}
        self._owners: dict[str, _Client] = {}
        """Episode -> the server process that has it."""
        self._begun: set[str] = set()
        """Episodes of which rounds may be stored."""
        self._adopting: set[asyncio.Task[None]] = set()
        self._listener: Listener | None = None

    @property
    def address(self) -> WireAddress:
        assert self._listener is not None, "start() first"
        return self._listener.address

    def start(self) -> None:
        """Take connections, on the running event loop. Raises OSError."""
        loop = self._loop = asyncio.get_running_loop()

        def soon(work: Any, *arguments: Any) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(work, *arguments)

        def take(peer: Peer, message: Message) -> None:
            soon(self._take, peer, message.kind, message.number, bytes(message.body))

        self._listener = Listener(
            secret=self._secret, way=Way.LOCAL, name="server processes", on_message=take,
            on_tick=lambda: soon(self._beat), on_gone=lambda peer: soon(self._forget, peer),
        )  # fmt: skip

    async def close(self) -> None:
        """End all connections and what was asked over them."""
        if self._listener is not None:
            await asyncio.to_thread(self._listener.close)
        for client in list(self._clients.values()):
            self._forget(client.peer)
        for task in self._adopting:
            task.cancel()
        await asyncio.gather(*self._adopting, return_exceptions=True)

    def begun(self, episode_id: str) -> None:
        """Rounds are stored of this episode: an earlier process of the run had it."""
        self._begun.add(episode_id)

    def closed(self, episode_id: str, reason: str) -> None:
        """The episode has ended: its owner serves it no longer."""
        self._begun.discard(episode_id)
        if (client := self._owners.pop(episode_id, None)) is not None:
            client.peer.send("closed", (episode_id, reason))

    def lose(self, process: int) -> None:
        """This process has ended. What it said before and was not looked at yet is not done."""
        for client in [each for each in self._clients.values() if each.process == process]:
            self._end(client.peer, "this process has ended")
            self._forget(client.peer)

    def figures(self, process: int) -> Figures | None:
        """What this process told last; None: nothing since it was started."""
        return next((each.figures for each in self._clients.values() if each.process == process), None)

    # What server processes say

    def _take(self, peer: Peer, kind: str, number: int, body: bytes) -> None:
        if peer.is_gone:
            return
        client = self._clients.setdefault(peer, _Client(peer))
        try:
            match kind:
                case "prompts":
                    for each, asked in _PROMPTS.decode(body):
                        self._put(client, each, asked)
                case "abandon":
                    if (reply := client.replies.pop(number, None)) is not None:
                        reply.abandon()
                case "ack":
                    client.read = max(client.read, number)
                    self._flush(client)
                case "adopt":
                    adopting = asyncio.create_task(self._adopt(client, number, _TEXT.decode(body)), name="adopt")
                    self._adopting.add(adopting)
                    adopting.add_done_callback(self._adopting.discard)
                case "beat":
                    client.figures = figures = _FIGURES.decode(body)
                    self._run.on_refused(figures.refused)
                case "hello":
                    client.process = _NUMBER.decode(body)
                    client.peer.send("beat", self._state())
                case _:
                    raise UnderstudyError(f"a server process must ask for prompts or adopt, got {kind:.40}")
        except (UnderstudyError, ValueError) as error:
            logger.error("server process %s said what cannot be said: %s", client.process, error)
            self._end(peer, str(error))
            self._forget(peer)

    def _put(self, client: _Client, number: int, asked: WirePrompt) -> None:
        """Queue a prompt; what cannot be queued is answered."""
        send = partial(self._send, client)
        try:
            live = self._run.episodes.get(asked.episode_id)
            params = self._codec.params_as_sent(asked.params)
            shows = self._codec.shows_logprobs(params)
            pack = partial(self._codec.pack_output, logprobs=shows, experts=False)
            reply = client.replies[number] = _Reply(number, live, pack=pack, send=send)
        except EpisodeError as error:
            send(Item(number, None, failure=WireFailure.of(error)))
            return
        prompt = Prompt(
            request_id=asked.request_id,
            episode_id=asked.episode_id,
            group_id=asked.group_id,
            prompt_token_ids=np.frombuffer(asked.prompt_token_ids, np.int32),
            sampling=Sampling(params=params, extra=asked.extra),
            reply=reply,
            parent=asked.parent,
            memo=asked.memo,
            first_trained=asked.first_trained,
        )
        self._begun.add(asked.episode_id)
        try:
            self._run.prompts.put(prompt)
        except (queue.Full, QueueClosed) as error:
            reply.fail(error)

    async def _adopt(self, client: _Client, number: int, episode_id: str) -> None:
        """Give the episode to this process, if it runs."""
        try:
            self._run.episodes.get(episode_id)
            rounds = await asyncio.wrap_future(self._run.rounds(episode_id)) if episode_id in self._begun else []
            # It may have ended meanwhile. From here on to the answer nothing is awaited: `closed` comes after it.
            adopted = Adopted.of(self._run.episodes.get(episode_id).episode, rounds)
            if client.peer in self._clients:
                self._owners[episode_id] = client
        except UnderstudyError as error:
            adopted = Adopted(None, [], WireFailure.of(error))
        client.peer.send("adopted", adopted, number=number)

    # What is said to them

    def _send(self, client: _Client, item: Item) -> None:
        if item.responses is not None or item.failure is not None:
            client.replies.pop(item.number, None)
        client.waiting.append(item)
        if not client.is_due:
            client.is_due = True
            # After the tasks that this step of the engine's has woken: so theirs go together.
            self._loop.call_soon(self._loop.call_soon, self._flush, client)

    def _flush(self, client: _Client) -> None:
        client.is_due = False
        if client.waiting and client.sent - client.read < MAX_UNREAD:
            client.sent += 1
            client.peer.send("answers", client.waiting, number=client.sent)
            client.waiting = []

    def _state(self) -> RunState:
        return RunState(self._run.is_full())

    def _beat(self) -> None:
        state, silent = self._state(), time.monotonic() - SILENT_S
        for client in list(self._clients.values()):
            if client.peer.heard_at < silent and client.figures is not None and client.process is not None:
                logger.error("server process %d was silent for %.0f s", client.process, SILENT_S)
                process = client.process
                self.lose(process)
                self._on_silent(process)
            else:
                client.peer.send("beat", state)

    def _end(self, peer: Peer, why: str) -> None:
        if (listener := self._listener) is not None:
            listener.call(partial(listener.end, peer, why))

    def _forget(self, peer: Peer) -> None:
        if (client := self._clients.pop(peer, None)) is None:
            return
        peer.is_gone = True
        self._owners = {name: owner for name, owner in self._owners.items() if owner is not client}
        for reply in list(client.replies.values()):
            reply.abandon()
