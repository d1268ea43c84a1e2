"""Rows with the task's hint put in, for the log-probabilities that `cpo` compares with.

Called by `learner.training.trainer`. Invariant: only context is added, in one place before the first trained token, so the trained
tokens keep their number and order. The policy never trains on these ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from learner.training.packing import Sequences


def hinted_sequences(sequences: Sequences, *, hints: Sequence[str | None], tokenizer: Any) -> Sequences:
    """Each row with a user message that holds its hint, before the answer that it trains first; others as they are."""
    prefix = tokenizer(generation_prompt(tokenizer), add_special_tokens=False)["input_ids"]
    ids, masks = [], []
    for row, mask, hint in zip(sequences.ids, sequences.masks, hints, strict=True):
        place = _place(row.tolist(), first=int(np.flatnonzero(mask)[0]), prefix=prefix)
        message = [] if hint is None else tokenizer(_message(hint, tokenizer), add_special_tokens=False)["input_ids"]
        ids.append(np.concatenate([row[:place], np.array(message, dtype=np.int32), row[place:]]))
        masks.append(np.concatenate([mask[:place], np.zeros(len(message), dtype=np.uint8), mask[place:]]))
    return Sequences(ids, masks=masks)


def generation_prompt(tokenizer: Any) -> str:
    """The text that the template puts before an assistant's turn, such as `<|im_start|>assistant\\n`."""
    opening = [{"role": "user", "content": "?"}]
    without = tokenizer.apply_chat_template(opening, tokenize=False)
    return str(tokenizer.apply_chat_template(opening, tokenize=False, add_generation_prompt=True)[len(without) :])


def _place(ids: list[int], *, first: int, prefix: list[int]) -> int:
    """The position before the generation prompt of the answer that starts at `first`, or `first` when there is none."""
    start = first - len(prefix)
    return start if start >= 0 and ids[start:first] == prefix else first


def _message(hint: str, tokenizer: Any) -> str:
    """The hint as the template renders a user message that follows another."""
    opening = [{"role": "user", "content": "?"}]
    without = tokenizer.apply_chat_template(opening, tokenize=False)
    with_hint = tokenizer.apply_chat_template([*opening, {"role": "user", "content": hint}], tokenize=False)
    return str(with_hint[len(without) :])
