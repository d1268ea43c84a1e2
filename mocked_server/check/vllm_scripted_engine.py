"""An engine that samples the line which `mocked_server.check.report` put into a request: vLLM's own, made to say the words.

Used by `mocked_server.check.trial`. The line is spelled in tokens that no tokenizer would give (pieces of random length, encoded
one by one), as a sampling model does: what depends on encoding text again is found out. Only what is sampled is forced: with
`REHEARSAL_ARGUMENTS` the recorded log-probabilities are the model's own, so they can be compared with a learner's.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from buffers.records import Row
from mocked_server.check.report import LINE
from mocked_server.fleet.engine_fleet import EngineFleet
from mocked_server.vllm.engine import VLLMEngine

FORCED = "forced_ids"
"""Key of the tokens to sample, in the `extra_args` of a request."""
MAX_PIECE = 8
"""Longest piece of a line that is encoded on its own, in characters."""


class ForcedTokens(AdapterLogitsProcessor):  # type: ignore[misc]  # vllm is not typed for us
    """Runs in the engine's process: leaves each request that has FORCED one token to choose from."""

    def is_argmax_invariant(self) -> bool:
        """It changes what greedy sampling takes."""
        return False

    def new_req_logits_processor(self, params: Any) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        """None for requests that are free."""
        ids = (params.extra_args or {}).get(FORCED)
        return (
            None if ids is None else lambda output_ids, logits: _only(logits, ids[min(len(output_ids), len(ids) - 1)])
        )


REHEARSAL_ARGUMENTS = {
    "logits_processors": [f"{ForcedTokens.__module__}:{ForcedTokens.__name__}"],
    "logprobs_mode": "raw_logprobs",
}
"""Values that vLLM's arguments must have for `TrialEngine`."""


def _only(logits: torch.Tensor, token: int) -> torch.Tensor:
    forced = torch.full_like(logits, float("-inf"))
    forced[token] = 0.0
    return forced


def spelled(line: str, *, encode: Callable[[str], list[int]], seed: int) -> list[int]:
    """Token ids of `line`, put together from pieces of random length."""
    rng, ids, at = random.Random(seed), list[int](), 0
    while at < len(line):
        end = at + rng.randint(1, MAX_PIECE)
        ids += encode(line[at:end])
        at = end
    return ids


class TrialEngine(EngineFleet):
    """A fleet of one started `VLLMEngine` whose arguments hold REHEARSAL_ARGUMENTS."""

    def __init__(self, engine: VLLMEngine, *, tokenizer: Any) -> None:
        super().__init__([engine])
        self._tokenizer = tokenizer
        self._num_lines = 0

    def generate(self, prompt_token_ids: list[int], params: Any, **more: Any) -> AsyncGenerator[Any, None]:
        """See `EngineFleet.generate`; samples the words of the request's line."""
        line = (params.extra_args or {}).pop(LINE, None)
        if line is not None:
            self._num_lines += 1
            ids = spelled(line, encode=self._encode, seed=self._num_lines)
            params.extra_args = {**(params.extra_args or {}), FORCED: [*ids, self._tokenizer.eos_token_id]}
            params.structured_outputs = None  # the line follows the schema; a grammar would change log-probabilities
        return super().generate(prompt_token_ids, params, **more)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


# The proof of exactness: log-probabilities computed again by the Hugging Face model, against those that the engine recorded.


def token_logprobs(model: torch.nn.Module, row: Row) -> torch.Tensor:
    """[T-1] log-probability of each token of the row but the first, given those before it, at temperature 1."""
    ids = torch.tensor(row.ids[None]).long()
    logits = model(ids).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


def max_logprob_diff(folder: Path, rows: Sequence[Row]) -> float:
    """Largest difference, over the sampled tokens of the rows, between the recorded log-probability and the one that
    the model in `folder` gives (float32, on CPU). 0 when nothing was sampled."""
    own: Any = getattr(transformers, AutoConfig.from_pretrained(folder, trust_remote_code=False).architectures[0])
    model = own.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()  # it leaves nothing out
    worst = 0.0
    for row in rows:
        sampled = torch.tensor(row.mask[1:] == 1)
        if sampled.any():
            with torch.no_grad():
                mine = token_logprobs(model, row)
            recorded = torch.tensor(row.logprobs[1:])
            worst = max(worst, float((mine - recorded)[sampled].abs().max()))
    return worst
