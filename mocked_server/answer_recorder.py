"""One prompt's answer while it is sampled: tokens, log-probabilities, text, stop string and weight versions.

`mocked_server.generation` adds every output of the engine to it, once; what comes out goes to the buffer and to the waiting
connection alike, so both know the same answer. `mocked_server.rollout` uses it for the RFC's `generate_sequences`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from buffers.errors import RequestRefused
from buffers.prompt_queue import Response
from buffers.training_rows import ABORTED
from mocked_server.fleet.member import Sampled, logprobs_of


@dataclass(slots=True)
class _Completion:
    """One completion while it grows (n > 1 gives several)."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    stop: str = ""
    finish_reason: str = ABORTED
    spans: Sequence[Any] = ()
    experts: Any = None


class AnswerRecorder:
    """Collects one prompt's outputs (deltas, or a single final one) into responses, one per completion.

    Raises RequestRefused for a token without a finite log-probability: the request's constraints left none to sample.
    """

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._completions: dict[int, _Completion] = {}

    def add(self, output: Any) -> None:
        """Take one engine output."""
        for completion in output.outputs:
            part = self._completions.setdefault(completion.index, _Completion())
            ids = list(completion.token_ids)
            logprobs = logprobs_of(completion, ids)
            if not all(map(math.isfinite, logprobs)):
                raise RequestRefused(
                    f"the constraints of this request must leave a token to sample at every position, got none after "
                    f"{len(part.ids)} tokens; loosen structured_outputs, response_format, allowed_token_ids or bad_words"
                )
            part.ids += ids
            part.logprobs += logprobs
            part.text += completion.text
            if isinstance(completion.stop_reason, str):
                part.stop = completion.stop_reason
            if completion.finish_reason is not None:
                part.finish_reason = completion.finish_reason
            part.spans = completion.weight_versions or part.spans
            part.experts = getattr(completion, "routed_experts", None)  # of a whole answer, with its last output

    def so_far(self, number: int) -> list[Sampled]:
        """Those of `number` completions that have not finished, for an engine that continues them."""
        parts = ((index, self._completions.setdefault(index, _Completion())) for index in range(number))
        return [
            Sampled(
                index=index,
                token_ids=part.ids.copy(),
                logprobs=None,
                versions=[(span.version, span.start) for span in part.spans],
                num_sent_chars=len(part.text),
            )
            for index, part in parts
            if part.finish_reason == ABORTED
        ]

    def end(self, finish_reason: str) -> None:
        """Give completions that have not finished this reason."""
        for part in self._completions.values():
            if part.finish_reason == ABORTED:
                part.finish_reason = finish_reason

    def responses(self, *, version: int) -> list[Response]:
        """The completions by their index. `version` labels tokens without a span of the engine's (those of an aborted
        generation)."""
        return [self._response(part, version) for _, part in sorted(self._completions.items())]

    def _response(self, part: _Completion, version: int) -> Response:
        versions = np.full(len(part.ids), version, np.int32)
        for span in part.spans:
            versions[span.start : span.end] = int(span.version)
        return Response(
            request_id=self._request_id,
            sampled_ids=np.array(part.ids, np.int32),
            logprobs=np.array(part.logprobs, np.float32),
            versions=versions,
            finish_reason=part.finish_reason,
            text=part.text,
            stop=part.stop,
            experts=part.experts,
        )
