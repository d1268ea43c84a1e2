"""Hints: words from which the policy would have answered better, and rows with them put in.

Called by `learner.training.trainer`: the policy that has read a row's hint teaches the one that has not. Invariant: only context is
added, in one place before the first trained token, so the trained tokens keep their number and order. The policy never trains on
these ids.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from buffers.records import MAX_HINT_CHARS, Row
from learner.training.packing import Sequences
from learner.training.said import Sayings, generation_prompt

BETTER = "A better answer was:\n"
SAID = "After your answer you will read:\n"


def hints_of(rows: Sequence[Row], *, sources: Collection[str], sayings: Sayings, tokenizer: Any) -> list[str | None]:
    """The hint of each row, of all its sources; None: it has none."""
    best: dict[tuple[int, str], Row] = {}
    for row in rows:
        leader = best.setdefault((row.group_id, row.role), row)
        if row.own_score > leader.own_score:
            best[row.group_id, row.role] = row
    found = []
    for row in rows:
        leader = best[row.group_id, row.role]
        parts = [row.hint or ""] if "hint" in sources else []
        if "said" in sources and (said := sayings.text(row.ids, mask=row.mask)):
            parts.append(SAID + said)
        if "sibling" in sources and leader.own_score > row.own_score:
            parts.append(BETTER + _answers(leader, tokenizer=tokenizer))
        found.append("\n".join(filter(None, parts))[:MAX_HINT_CHARS] or None)
    return found


def _answers(row: Row, *, tokenizer: Any) -> str:
    """What the row trains, an answer a line."""
    trained = np.flatnonzero(row.mask)
    answers = np.split(row.ids[trained], np.flatnonzero(np.diff(trained) > 1) + 1)
    return "\n".join(tokenizer.decode(answer.tolist(), skip_special_tokens=True).strip() for answer in answers)


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
