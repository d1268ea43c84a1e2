"""What the run's process and its server processes say to each other over the wire, as msgpack.

Used by `prompt_host` (the run's side) and `run_link` (a server process's side). Requests have numbers, given by the server process;
what is answered to several of them goes together in batches, of which it acknowledges several together.

    server process: hello process | prompts [[number, WirePrompt]] | abandon number | adopt episode | beat Figures | ack
    the run:        answers [Item] | adopted Adopted | closed [episode, reason] | beat RunState

Invariant: a prompt arrives as it was put, and a response as generation made it: ids, log-probabilities and versions bit for bit.
"""

from __future__ import annotations

import queue
from typing import Any

import msgspec
import numpy as np

import buffers.errors
from buffers.errors import EngineError, RequestRefused, UnderstudyError
from buffers.ledger.encode import stored_round
from buffers.ledger.round_codec import decode
from buffers.prompt_queue import QueueClosed, Response
from buffers.records import Episode, Round
from buffers.remote.messages import WireEpisode, WireRound
from mocked_server.fleet.engine_messages import WireOutput

BEAT_S = 1.0
SILENT_S = 30.0
"""A side that was silent for so long has gone: its beats come every second."""
MAX_UNREAD = 32
"""Batches of answers that a server process has not acknowledged; further ones wait, and go together."""
ACK_EVERY = 8
"""Batches that are acknowledged together."""


class WirePrompt(msgspec.Struct, array_like=True, frozen=True):
    """A prompt on its way to generation. `params`: vLLM's SamplingParams."""

    request_id: str
    episode_id: str
    group_id: int | None
    prompt_token_ids: bytes
    """int32 of each."""
    params: msgspec.Raw
    extra: dict[str, Any]
    parent: int | None
    memo: bytes
    first_trained: int | None


class WireResponse(msgspec.Struct, array_like=True, frozen=True):
    """A `Response` on its way to the request that waits."""

    sampled_ids: bytes
    logprobs: bytes
    versions: bytes
    finish_reason: str
    text: str | None
    stop: str
    round_index: int | None

    @classmethod
    def of(cls, response: Response) -> WireResponse:
        return cls(
            response.sampled_ids.tobytes(), response.logprobs.tobytes(), response.versions.tobytes(),
            response.finish_reason, response.text, response.stop, response.round_index,
        )  # fmt: skip

    def response(self, request_id: str) -> Response:
        """What `of` got."""
        return Response(
            request_id=request_id,
            sampled_ids=np.frombuffer(self.sampled_ids, np.int32),
            logprobs=np.frombuffer(self.logprobs, np.float32),
            versions=np.frombuffer(self.versions, np.int32),
            finish_reason=self.finish_reason,
            text=self.text,
            stop=self.stop,
            round_index=self.round_index,
        )


class WireFailure(msgspec.Struct, array_like=True, frozen=True):
    """An error of this project's on its way: its kind by name."""

    kind: str
    text: str
    field: str | None = None
    status: int = 400

    @classmethod
    def of(cls, error: BaseException) -> WireFailure:
        if isinstance(error, RequestRefused):
            return cls(RequestRefused.__name__, str(error), error.field, error.status)
        if isinstance(error, queue.Full | QueueClosed):  # as the HTTP layer answers it: unavailable for now
            return cls(EngineError.__name__, str(error))
        kind = next(
            (each.__name__ for each in type(error).__mro__ if each.__name__ in _PLAIN), UnderstudyError.__name__
        )
        return cls(kind, str(error))

    def error(self) -> UnderstudyError:
        """The error that it was."""
        if self.kind == RequestRefused.__name__:
            return RequestRefused(self.text, field=self.field, status=self.status)
        return _PLAIN.get(self.kind, UnderstudyError)(self.text)


_PLAIN: dict[str, type[UnderstudyError]] = {
    name: kind
    for name, kind in vars(buffers.errors).items()
    if isinstance(kind, type) and issubclass(kind, UnderstudyError) and kind.__init__ is Exception.__init__
}


class Item(msgspec.Struct, array_like=True, frozen=True):
    """A part of a request's answer: an output, the end with its responses, or why there is none."""

    number: int
    output: WireOutput | None
    responses: list[WireResponse] | None = None
    failure: WireFailure | None = None


class Adopted(msgspec.Struct, array_like=True, frozen=True):
    """The episode that a server process asked for, with the rounds that are stored of it; or why there is none."""

    episode: WireEpisode | None
    rounds: list[WireRound]
    failure: WireFailure | None = None

    @classmethod
    def of(cls, episode: Episode, rounds: list[Round]) -> Adopted:
        return cls(WireEpisode.of(episode), [WireRound.of(stored_round(round_)) for round_ in rounds])


class Figures(msgspec.Struct, array_like=True, frozen=True):
    """What a server process tells of itself every second."""

    episodes_open: int
    requests: int
    """Model calls answered since its start."""
    forwarded: int
    """Requests passed on to another process since its start."""
    refused: dict[str, int]
    """Reason -> requests refused for it since the last time."""
    cpu_s: float
    """Processor time since its start."""


class RunState(msgspec.Struct, array_like=True, frozen=True):
    """What the run tells its server processes every second."""

    is_full: bool
    """The ledger's disk takes nothing more for now."""


def round_of(wire: WireRound) -> Round:
    """The round that `Adopted.of` got."""
    arrays = decode(wire.body)
    return Round(
        episode_id=wire.episode_id, round_index=wire.round_index, parent=wire.parent, tail_ids=arrays.tail_ids,
        sampled_ids=arrays.sampled_ids, logprobs=arrays.logprobs, versions=arrays.versions,
        finish_reason=wire.finish_reason, memo=wire.memo,
        trained=None if wire.trained is None else np.frombuffer(wire.trained, np.uint8),
    )  # fmt: skip
