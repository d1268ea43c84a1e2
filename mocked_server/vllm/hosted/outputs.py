"""vLLM's requests and outputs on the wire, and back into the records that vLLM itself would have made.

Used by `engine_host`, `remote_engine` and `mocked_server.processes`. An engine's host sends deltas only; `Rebuilt` makes of them
what the request asked for: deltas, the whole so far, or one output at the end. Invariant: token ids, log-probabilities, text,
versions and reasons are those of an engine in this process, bit for bit.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from mocked_server.fleet.member import Sampled
from mocked_server.vllm.engine_requests import NUMBERS_ONLY

WHOLE_INTERVAL = 8
"""Tokens between two deltas of an answer that comes as a whole: as many are sampled again, at most, where its host is lost."""


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
    """Part of one completion since its last output."""

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
    """Experts of the whole completion, when it ends."""


class WireOutput(msgspec.Struct, array_like=True, frozen=True):
    """Parts of a request's completions since its last output."""

    completions: list[WireCompletion]
    finished: bool
    prompt_logprobs: WireLogprobs | None
    num_cached_tokens: int | None
    num_preemptions: int | None


class WireSampled(msgspec.Struct, array_like=True, frozen=True):
    """A completion that another engine began: see `mocked_server.fleet.member.Sampled`."""

    index: int
    token_ids: list[int]
    logprobs: WireLogprobs | None
    versions: list[tuple[str, int]]
    num_sent_chars: int
    cumulative: float | None


class VLLMCodec:
    """See the module."""

    def __init__(self) -> None:
        from vllm.sampling_params import SamplingParams

        self._params = msgspec.msgpack.Decoder(SamplingParams)

    def pack_params(self, params: Any) -> msgspec.Raw:
        """Raises TypeError or ValueError for arguments that cannot travel."""
        return msgspec.Raw(msgspec.msgpack.encode(params))

    def params_of(self, data: msgspec.Raw, *, as_deltas: bool) -> Any:
        """SamplingParams; `as_deltas`: that ask for deltas, whatever was sent. Raises ValueError (msgspec's) for what is none."""
        from vllm.sampling_params import RequestOutputKind

        params = self._params.decode(data)
        if as_deltas:
            if params.output_kind is RequestOutputKind.FINAL_ONLY and params.stream_interval is None:
                params.stream_interval = WHOLE_INTERVAL
            params.output_kind = RequestOutputKind.DELTA
        return params

    def shows_logprobs(self, params: Any) -> bool:
        """True if the request asked to see log-probabilities; else the HTTP layer looks at none."""
        return NUMBERS_ONLY not in (params.extra_args or {})

    def output_of(self, wire: WireOutput, *, request_id: str) -> Any:
        """vLLM's RequestOutput that `pack_output` got, of whichever kind; its prompt is not said again."""
        return _output_of(
            wire, [_completion_of(each) for each in wire.completions], request_id=request_id, prompt_token_ids=[],
            prompt_logprobs=logprobs_of(wire.prompt_logprobs),
        )  # fmt: skip

    def pack_output(self, output: Any, *, logprobs: bool = True, experts: bool = True) -> WireOutput:
        """An output, of deltas or whole. `logprobs`, `experts`: with those of its tokens."""
        return WireOutput(
            [_pack_completion(completion, logprobs=logprobs, experts=experts) for completion in output.outputs],
            output.finished,
            pack_logprobs(output.prompt_logprobs),
            output.num_cached_tokens,
            None if output.metrics is None else getattr(output.metrics, "num_preemptions", 0),
        )

    def pack_sampled(self, sampled: Sampled) -> WireSampled:
        """A completion that had not ended."""
        return WireSampled(
            sampled.index, list(sampled.token_ids), pack_logprobs(sampled.logprobs), list(sampled.versions),
            sampled.num_sent_chars, sampled.cumulative,
        )  # fmt: skip

    def sampled_of(self, sampled: WireSampled) -> Sampled:
        return Sampled(
            index=sampled.index,
            token_ids=sampled.token_ids,
            logprobs=logprobs_of(sampled.logprobs),
            versions=sampled.versions,
            num_sent_chars=sampled.num_sent_chars,
            cumulative=sampled.cumulative,
        )

    def rebuilt(
        self, prompt_token_ids: list[int], params: Any, *, request_id: str, sampled: Sequence[Sampled]
    ) -> Rebuilt:
        """Maker of outputs from deltas, for one request."""
        return Rebuilt(prompt_token_ids, params, request_id=request_id, sampled=sampled)


@dataclass(slots=True)
class _Completion:
    """One completion as far as it came."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: Any = None
    text: str = ""
    num_sent_chars: int = 0
    cumulative: float | None = None
    versions: list[tuple[str, int, int]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    experts: WireExperts | None = None
    output: Any = None
    """Its CompletionOutput, if it had ended on another engine."""


class Rebuilt:
    """One request's outputs, from their deltas."""

    def __init__(
        self, prompt_token_ids: list[int], params: Any, *, request_id: str, sampled: Sequence[Sampled]
    ) -> None:
        from vllm.sampling_params import RequestOutputKind

        self._prompt_token_ids = prompt_token_ids
        self._request_id = request_id
        self._kind = params.output_kind
        self._is_delta = params.output_kind is RequestOutputKind.DELTA
        self._is_whole = params.output_kind is RequestOutputKind.FINAL_ONLY
        self._num = params.n
        self._prompt_logprobs: Any = None
        self._parts: dict[int, _Completion] = {one.index: _begun(one) for one in sampled}

    def add(self, delta: WireOutput) -> Any | None:
        """vLLM's RequestOutput for what came; None where the request gets none for it."""
        for completion in delta.completions:
            self._grow(completion)
        prompt = logprobs_of(delta.prompt_logprobs)
        if self._is_delta or prompt or self._prompt_logprobs is None:  # vLLM tells them once
            self._prompt_logprobs = prompt
        if self._is_delta:
            return self._output([_completion_of(completion) for completion in delta.completions], delta)
        if self._is_whole and not delta.finished:
            return None
        indexes = sorted(self._parts) if self._is_whole else [completion.index for completion in delta.completions]
        return self._output([self._whole(index) for index in indexes], delta)

    def sampled(self) -> list[Sampled]:
        """All completions as far as they came, for another engine; empty: nothing was sampled."""
        if not any(part.token_ids for part in self._parts.values()):
            return []
        return [
            Sampled(
                index=index,
                token_ids=part.token_ids,
                logprobs=part.logprobs,
                versions=[(version, start) for version, start, _ in part.versions],
                num_sent_chars=part.num_sent_chars + (len(part.text) if self._is_delta else 0),
                cumulative=part.cumulative,
                output=self._whole(index) if part.finish_reason is not None else part.output,
            )
            for index in range(self._num)
            for part in [self._parts.setdefault(index, _Completion())]
        ]

    def _grow(self, delta: WireCompletion) -> None:
        part = self._parts.setdefault(delta.index, _Completion())
        part.token_ids += delta.token_ids
        part.text += delta.text
        logprobs = logprobs_of(delta.logprobs)
        if part.logprobs is None:
            part.logprobs = logprobs
        elif logprobs is not None:
            part.logprobs.extend(logprobs)
        part.cumulative = delta.cumulative
        part.versions = delta.versions or part.versions
        part.finish_reason, part.stop_reason = delta.finish_reason, delta.stop_reason
        part.experts = delta.experts

    def _whole(self, index: int) -> Any:
        from vllm.outputs import CompletionOutput

        part = self._parts[index]
        if part.output is not None:
            return part.output
        return CompletionOutput(
            index=index, text=part.text, token_ids=part.token_ids, cumulative_logprob=part.cumulative,
            logprobs=part.logprobs, finish_reason=part.finish_reason, stop_reason=part.stop_reason,
            weight_versions=_spans(part.versions), routed_experts=_experts_of(part.experts),
        )  # fmt: skip

    def _output(self, completions: list[Any], delta: WireOutput) -> Any:
        return _output_of(
            delta, completions, request_id=self._request_id, prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs,
        )  # fmt: skip


def _output_of(wire: WireOutput, completions: list[Any], **rest: Any) -> Any:
    """vLLM's RequestOutput of these completions; what is not among `rest` is the wire's."""
    from vllm.outputs import RequestOutput

    preemptions = wire.num_preemptions
    return RequestOutput(
        **rest, prompt=None, outputs=completions, finished=wire.finished, num_cached_tokens=wire.num_cached_tokens,
        metrics=None if preemptions is None else SimpleNamespace(num_preemptions=preemptions),  # type: ignore[arg-type]
    )  # fmt: skip


def _begun(sampled: Sampled) -> _Completion:
    return _Completion(
        token_ids=list(sampled.token_ids),
        logprobs=None if sampled.logprobs is None else sampled.logprobs[:],
        num_sent_chars=sampled.num_sent_chars,
        cumulative=sampled.cumulative,
        versions=[(version, start, start) for version, start in sampled.versions],
        output=sampled.output,
    )


def _pack_completion(completion: Any, *, logprobs: bool, experts: bool) -> WireCompletion:
    return WireCompletion(
        completion.index,
        completion.text,
        list(completion.token_ids),
        pack_logprobs(completion.logprobs) if logprobs else None,
        completion.cumulative_logprob,
        completion.finish_reason,
        completion.stop_reason,
        [(span.version, span.start, span.end) for span in completion.weight_versions or ()],
        None
        if (used := completion.routed_experts) is None or not experts
        else WireExperts(used.shape, used.itemsize, used.tobytes()),
    )


def _experts_of(wire: WireExperts | None) -> Any:
    """Raises ValueError for what does not fit together."""
    return None if wire is None else np.frombuffer(wire.data, f"<u{wire.width}").reshape(wire.shape)


def _completion_of(delta: WireCompletion) -> Any:
    from vllm.outputs import CompletionOutput

    return CompletionOutput(
        index=delta.index, text=delta.text, token_ids=delta.token_ids, cumulative_logprob=delta.cumulative,
        logprobs=logprobs_of(delta.logprobs), finish_reason=delta.finish_reason, stop_reason=delta.stop_reason,
        weight_versions=_spans(delta.versions), routed_experts=_experts_of(delta.experts),
    )  # fmt: skip


def _spans(versions: list[tuple[str, int, int]]) -> list[Any] | None:
    from vllm.outputs import WeightVersionSpan

    return [WeightVersionSpan(version, start, end) for version, start, end in versions] or None


def pack_logprobs(logprobs: Any) -> WireLogprobs | None:
    """vLLM's log-probabilities of some positions, flat or a table for each."""
    if logprobs is None:
        return None
    if hasattr(logprobs, "start_indices"):
        counts = [end - start for start, end in zip(logprobs.start_indices, logprobs.end_indices)]
        ids, values, ranks, texts = logprobs.token_ids, logprobs.logprobs, logprobs.ranks, logprobs.decoded_tokens
    else:
        counts = [-1 if table is None else len(table) for table in logprobs]
        entries = [(token, entry) for table in logprobs if table for token, entry in table.items()]
        ids = [token for token, _ in entries]
        values = [entry.logprob for _, entry in entries]
        ranks = [entry.rank for _, entry in entries]
        texts = [entry.decoded_token for _, entry in entries]
    shown_texts = list(texts) if any(text is not None for text in texts) else None
    return WireLogprobs(
        hasattr(logprobs, "start_indices"), counts, list(ids), array("d", values).tobytes(), list(ranks), shown_texts
    )


def logprobs_of(wire: WireLogprobs | None) -> Any:
    """The log-probabilities that `pack_logprobs` got. Raises ValueError for what does not fit together."""
    if wire is None:
        return None
    from vllm.logprobs import FlatLogprobs, Logprob

    values = array("d")
    values.frombytes(wire.logprobs)
    num = sum(count for count in wire.counts if count > 0)
    texts = wire.texts or [None] * num
    if not num == len(values) == len(wire.token_ids) == len(wire.ranks) == len(texts):
        raise ValueError(f"log-probabilities must have {num} ids, values, ranks and texts, got {len(values)} values")
    ends = list(accumulate(max(count, 0) for count in wire.counts))
    starts = [end - max(count, 0) for end, count in zip(ends, wire.counts)]
    if wire.is_flat:
        return FlatLogprobs(
            start_indices=starts, end_indices=ends, token_ids=wire.token_ids, logprobs=values.tolist(),
            ranks=wire.ranks, decoded_tokens=list(texts),
        )  # fmt: skip
    return [
        None
        if count < 0
        else {
            wire.token_ids[place]: Logprob(values[place], wire.ranks[place], texts[place])
            for place in range(start, end)
        }
        for count, start, end in zip(wire.counts, starts, ends)
    ]
