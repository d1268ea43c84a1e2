"""An engine's outputs and interrupted completions as they travel over the wire, and what makes them.

Used by `engine_host`, `remote_engine` and `mocked_server.processes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from mocked_server.fleet.member import Sampled


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


class Outputs(Protocol):
    """One request's outputs, from their deltas."""

    def add(self, delta: WireOutput) -> Any | None:
        """The engine's output for what came; None where the request gets none for it."""
        ...

    def sampled(self) -> list[Sampled]: ...


class Codec(Protocol):
    """What is asked of the engine's own records (`mocked_server.vllm.hosted.outputs`)."""

    def pack_params(self, params: Any) -> msgspec.Raw:
        """SamplingParams on their way. Raises TypeError or ValueError for what cannot travel."""
        ...

    def params_of(self, data: msgspec.Raw, *, as_deltas: bool) -> Any:
        """SamplingParams; `as_deltas`: that ask for deltas, whatever was sent. Raises ValueError or TypeError for what is none."""
        ...

    def shows_logprobs(self, params: Any) -> bool:
        """Whether the request asked to see log-probabilities."""
        ...

    def pack_output(self, output: Any, *, logprobs: bool = True, experts: bool = True) -> WireOutput: ...
    def output_of(self, wire: WireOutput, *, request_id: str) -> Any: ...
    def pack_sampled(self, sampled: Sampled) -> WireSampled: ...
    def sampled_of(self, sampled: WireSampled) -> Sampled: ...
    def rebuilt(
        self, prompt_token_ids: list[int], params: Any, *, request_id: str, sampled: Sequence[Sampled]
    ) -> Outputs: ...
