"""An engine that samples the line which `mocked_server.check.report` put into a request: vLLM's own, made to say the words.

Used by `mocked_server.check.trial`. The line is spelled in tokens that no tokenizer would give (control tokens, and between them
pieces of random length, encoded one by one), as a sampling model does: what depends on encoding text again is found out. Only what
is sampled is forced: with `REHEARSAL_ARGUMENTS` the recorded log-probabilities are the model's own, and
can be compared with a learner's.
"""

from __future__ import annotations

import random
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from buffers.records import Row
from configs.model_folder import read_json
from mocked_server.check.report import LINE, hermes
from mocked_server.fleet.engine_fleet import EngineFleet
from mocked_server.vllm.engine import VLLMEngine
from mocked_server.vllm.tool_calls import said

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


def spelled(line: str, *, tokenizer: Any, seed: int) -> list[int]:
    """Token ids of `line`: its control tokens, and between them pieces of random length."""
    rng, ids = random.Random(seed), list[int]()
    marks = {text: number for text, number in tokenizer.get_added_vocab().items() if text.strip()}
    each = "|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or "(?!)"
    for piece in re.split(f"({each})", line):
        at = 0
        if piece in marks:
            ids.append(marks[piece])
            continue
        while at < len(piece):
            end = at + rng.randint(1, MAX_PIECE)
            ids += tokenizer.encode(piece[at:end], add_special_tokens=False)
            at = end
    return ids


class OwnForm:
    """How the model in a folder says things: in its chat template's form, with the token by which it ends what it said. Calls are
    said as hermes where the template does not show them, or `reads_calls` is false."""

    def __init__(self, folder: Path, *, reads_calls: bool) -> None:
        self._reads_calls = reads_calls
        self.tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        ends = read_json(folder / "generation_config.json").get("eos_token_id")
        self.stops = {self.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}

    def __call__(self, message: Mapping[str, Any]) -> str:
        """The text, up to its end where that is not the tokenizer's own. Of calls that the template cannot show together, the
        first."""
        calls = message.get("tool_calls") or ()
        if calls and not self._reads_calls:
            return hermes(message)
        ends = [self.tokenizer.decode(stop) for stop in self.stops]
        for shown in (message, {**message, "tool_calls": calls[:1]}):
            if (told := said(self.tokenizer, shown))[0]:
                return told[0] + next((end for end in ends if told[1].startswith(end)), "")
        return hermes(message)


class TrialEngine(EngineFleet):
    """A fleet of one started `VLLMEngine` whose arguments hold REHEARSAL_ARGUMENTS. `stops`: tokens of which one ends a line, where
    it has none of them the tokenizer's own is added."""

    def __init__(self, engine: VLLMEngine, *, tokenizer: Any, stops: Set[int] = frozenset()) -> None:
        super().__init__([engine])
        self._tokenizer = tokenizer
        self._stops = stops
        self._num_lines = 0

    def generate(self, prompt_token_ids: list[int], params: Any, **more: Any) -> AsyncGenerator[Any, None]:
        """See `EngineFleet.generate`; samples the words of the request's line."""
        line = (params.extra_args or {}).pop(LINE, None)
        if line is not None:
            self._num_lines += 1
            ids = spelled(line, tokenizer=self._tokenizer, seed=self._num_lines)
            ids += [] if ids and ids[-1] in self._stops else [self._tokenizer.eos_token_id]
            params.extra_args = {**(params.extra_args or {}), FORCED: ids}
            params.structured_outputs = None  # the line follows the schema; a grammar would change log-probabilities
        return super().generate(prompt_token_ids, params, **more)


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
