"""What DAPO does to the scores of a batch before advantages are computed (arXiv:2503.14476).

Called by `learner.learn_loop` with `data.reward_manager=dapo`. Pure functions; the batch's own scores are what is reported.
Groups whose episodes all scored the same never get here: the ledger drops them (`Ledger(drop_zero_variance=True)`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np

from buffers.records import Row, TrainBatch

SOFT_SHARE = 0.2
"""Last part of the allowed length in which the penalty grows from 0 to 1 (4,096 of 20,480 tokens in the paper)."""


def overlong_penalty(length: int, *, max_tokens: int) -> float:
    """0 up to the soft part of `max_tokens`, then linear, -1 at `max_tokens` and beyond (equation 13)."""
    soft = max(SOFT_SHARE * max_tokens, 1.0)
    return -min(max((length - (max_tokens - soft)) / soft, 0.0), 1.0)


def with_overlong_penalty(batch: TrainBatch, *, max_tokens: int) -> tuple[TrainBatch, float]:
    """The batch with each episode's score lowered for its longest generation, and the mean penalty over fresh episodes. With roles:
    of each role.

    A branch with a score of its own is lowered for the longest generation that it trains itself.
    """
    longest: dict[tuple[str, str], int] = defaultdict(int)
    for row in batch.rows:
        of = row.episode_id, row.role
        longest[of] = max(longest[of], _longest_round(row))
    penalties = {of: overlong_penalty(length, max_tokens=max_tokens) for of, length in longest.items()}
    rows = [_lowered(row, penalty=penalties[row.episode_id, row.role], max_tokens=max_tokens) for row in batch.rows]
    fresh = {(row.episode_id, row.role) for row in batch.fresh.rows}
    return replace(batch, rows=rows), sum(penalties[of] for of in fresh) / max(len(fresh), 1)


def _lowered(row: Row, *, penalty: float, max_tokens: int) -> Row:
    branch = row.branch_score
    if branch is not None:
        branch += overlong_penalty(_longest_round(row), max_tokens=max_tokens)
    role = None if row.role_score is None else row.role_score + penalty
    return replace(row, score=row.score + penalty, branch_score=branch, role_score=role)


def _longest_round(row: Row) -> int:
    """Tokens of the longest generation that this row trains."""
    rounds = row.rounds[row.mask == 1]
    return int(np.unique(rounds, return_counts=True)[1].max()) if len(rounds) else 0
