"""What callers hand to the ledger, checked and brought into the form in which it is stored.

Called by `Ledger` in the caller's thread, so that bad input is refused at once and encoding does not hold up the writer.
Pure functions.
"""

from __future__ import annotations

import json
import math
from numbers import Real
from typing import Any

import numpy as np

from buffers.errors import EpisodeError, ScoreError, TaskError
from buffers.ledger.episodes import StoredRound
from buffers.ledger.round_codec import RoundBody, encode
from buffers.ledger.schema import MAX_SCORE
from buffers.records import Round, Task


def checked_score(score: object, *, episode_id: str) -> float:
    """`score` as a float; raises ScoreError for anything but a finite number."""
    try:
        value = float(score) if isinstance(score, Real) and not isinstance(score, bool) else math.nan
    except OverflowError:
        value = math.inf
    if not abs(value) < MAX_SCORE:
        raise ScoreError(
            f"score of episode {episode_id} must be a finite number below {MAX_SCORE:g} in size, got {score!r:.100}; "
            f"report it as failed if it has no score"
        )
    return value


def task_payload(task: Task) -> str:
    fields: dict[str, Any] = {
        "prompt": task.prompt,
        "data_source": task.data_source,
        "ground_truth": task.ground_truth,
        "agent_name": task.agent_name,
        "extra_info": task.extra_info,
    }
    try:
        return json.dumps(fields, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise TaskError(
            f"task {task.task_id!r} must be JSON (finite numbers, text, lists, objects): {error}"
        ) from error


def stored_round(round_: Round) -> StoredRound:
    """The round as the table has it. Raises EpisodeError for numbers that could not be trained."""
    return stored_body(
        body_of(round_),
        episode_id=round_.episode_id,
        round_index=round_.round_index,
        parent=round_.parent,
        finish_reason=round_.finish_reason,
        memo=round_.memo,
        trained=None if round_.trained is None else round_.trained.astype("uint8").tobytes(),
        role=round_.role,
    )


def stored_body(
    arrays: RoundBody,
    *,
    episode_id: str,
    round_index: int,
    parent: int | None,
    finish_reason: str,
    memo: bytes,
    trained: bytes | None = None,
    role: str = "",
    body: bytes | None = None,
) -> StoredRound:
    """Makes what `stored_round` makes from a round's arrays. `body`: their encoded form, where it is known."""
    if np.count_nonzero(np.isfinite(arrays.logprobs)) < arrays.logprobs.size:
        raise EpisodeError(
            f"round {round_index} of episode {episode_id}: logprobs must be finite, got nan or inf; record it with "
            f"finish_reason abort and none"
        )
    num_sampled = len(arrays.sampled_ids)
    max_version = int(arrays.versions.max()) if num_sampled else None
    if num_sampled and (oldest := int(arrays.versions.min())) < 0:
        raise EpisodeError(
            f"round {round_index} of episode {episode_id}: versions must be >= 0, got {oldest}; stamp every sampled token"
        )
    if trained is not None and len(trained) != num_sampled:
        raise EpisodeError(
            f"round {round_index} of episode {episode_id}: trained must have a flag for each of {num_sampled} sampled tokens, "
            f"got {len(trained)}; leave it out where all are trained"
        )
    stored = encode(arrays) if body is None else body
    # By place: a put of many rounds spends a fiftieth of its time on names.
    return StoredRound(
        episode_id, round_index, parent, num_sampled, max_version, finish_reason, stored, memo or None, trained, role
    )


def body_of(round_: Round) -> RoundBody:
    """The arrays of a round."""
    return RoundBody(
        tail_ids=round_.tail_ids,
        sampled_ids=round_.sampled_ids,
        logprobs=round_.logprobs,
        versions=round_.versions,
        experts=round_.experts,
    )
