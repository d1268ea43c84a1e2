"""The proof of exactness: log-probabilities computed again by the Hugging Face model, against those that the engine recorded.

Used by `mocked_server.check.trial` and by tests; a run measures the same with the learner's own model
(`max_logprob_diff`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig

from buffers.records import Row


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
