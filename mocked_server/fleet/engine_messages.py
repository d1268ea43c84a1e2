"""What an engine's host and its client say to each other over the wire, as msgpack.

Used by `engine_host` and `remote_engine`. Requests have numbers, given by the client; outputs of all of them come together in
batches, each a step of the engine's or more, which the client acknowledges.

    client: generate Asked | abort | apply Order | beat | ack                      (number: of the request, order or batch)
    host:   outputs [Item] | done OrderDone | failed Failure | beat EngineState    (number: of the batch or order)
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from buffers.errors import EngineDied, EngineError, RequestFailed, RequestRefused, UnderstudyError
from mocked_server.fleet.member import EngineFigures, EngineLost

BEAT_S = 1.0
SILENT_S = 10.0
"""A side that was silent for so long has gone: its beats come every second."""
MAX_UNREAD = 16
"""Batches that the client has not acknowledged; further outputs wait in the host, and go together."""


class WireLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities of S positions, the tables of all of them one after the other."""

    is_flat: bool
    """vLLM's FlatLogprobs; else a table for each position."""
    counts: list[int]
    """[S] entries of each position; -1: it has none."""
    token_ids: list[int]
    logprobs: bytes
    """float64 of each entry."""
    ranks: list[int | None]
    texts: list[str | None] | None
    """None: no entry has one."""


class WireExperts(msgspec.Struct, array_like=True, frozen=True):
    """Experts of a completion's tokens, in vLLM's order."""

    shape: tuple[int, int, int]
    width: int
    """Bytes of each."""
    data: bytes


class WireCompletion(msgspec.Struct, array_like=True, frozen=True):
    """What one completion sampled since its last output."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: WireLogprobs | None
    cumulative: float | None
    finish_reason: str | None
    stop_reason: int | str | None
    versions: list[tuple[str, int, int]]
    """(weight version, first token, token after its last), of the whole completion."""
    experts: WireExperts | None = None
    """Those of the whole completion, when it ends."""


class WireOutput(msgspec.Struct, array_like=True, frozen=True):
    """What a request's completions sampled since its last output."""

    completions: list[WireCompletion]
    finished: bool
    prompt_logprobs: WireLogprobs | None
    num_cached_tokens: int | None
    num_preemptions: int | None


class WireSampled(msgspec.Struct, array_like=True, frozen=True):
    """A completion that another engine began: see `member.Sampled`."""

    index: int
    token_ids: list[int]
    logprobs: WireLogprobs | None
    versions: list[tuple[str, int]]
    num_sent_chars: int
    cumulative: float | None


class Asked(msgspec.Struct, array_like=True, frozen=True):
    """A request. `params`: vLLM's SamplingParams; its answer comes in deltas, whatever they say."""

    prompt_token_ids: list[int]
    params: msgspec.Raw
    request_id: str
    sampled: list[WireSampled]
    extra: dict[str, Any]


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """Why a request, or an order, was not answered."""

    kind: str
    text: str
    field: str | None = None
    status: int = 400
    by_itself: bool = False
    """See `EngineLost`."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        for kind in (EngineLost, EngineDied, EngineError, RequestRefused, RequestFailed):
            if isinstance(error, kind):
                more = getattr(error, "field", None), getattr(error, "status", 400), getattr(error, "by_itself", False)
                return cls(kind.__name__, str(error), *more)
        return cls(
            RequestFailed.__name__, f"the engine's host failed on it ({type(error).__name__}: {error}); see its log"
        )

    def error(self) -> UnderstudyError:
        """The error that it was; of EngineLost, which the client tells with what it knows, an EngineError."""
        if self.kind == RequestRefused.__name__:
            return RequestRefused(self.text, field=self.field, status=self.status)
        kinds = {kind.__name__: kind for kind in (EngineDied, RequestFailed)}
        return kinds.get(self.kind, EngineError)(self.text)


class Item(msgspec.Struct, array_like=True, frozen=True):
    """An output of a request, or its end without one."""

    number: int
    output: WireOutput | None
    failure: Failure | None = None


class Order(msgspec.Struct, array_like=True, frozen=True):
    """A method of the engine. `folder`, `version`: of `load_weights`."""

    name: str
    folder: str = ""
    version: int = 0


class EngineState(msgspec.Struct, array_like=True, frozen=True):
    """What an engine is now; comes every second, after each order, and when it dies."""

    figures: dict[str, str | bool | int]
    """The fields of EngineFigures."""
    paused_s: float = 0.0
    """Seconds that the order paused the engine."""

    @classmethod
    def of(cls, figures: EngineFigures, *, paused_s: float = 0.0) -> EngineState:
        return cls({field.name: getattr(figures, field.name) for field in fields(figures)}, paused_s)

    def engine_figures(self) -> EngineFigures:
        """Raises TypeError for fields of another version."""
        return EngineFigures(**self.figures)  # type: ignore[arg-type]


def order_to_load(folder: Path, *, version: int) -> Order:
    return Order("load_weights", str(folder), version)
