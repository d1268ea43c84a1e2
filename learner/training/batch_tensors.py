"""A training batch seen from its trained tokens: what the estimators and losses need, checked and laid out.

Called by `learner.training.trainer` once per step, on every rank alike. Invariants: flat arrays [M] list the trained
tokens row by row, as `sequences` numbers them; a row of the batch that trains nothing, or was sampled greedily, is not
in the table; `fresh` is false for each token that is too old by its own version, or of an answer that is left out. No model and
no mathematics here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from buffers.records import Int32, Row, TrainBatch
from learner.algorithms.losses import role_weights
from learner.training.packing import Sequences
from learner.training.said import Sayings

Number = TypeVar("Number", bound=np.generic)
ID_BITS = 20
"""No vocabulary has more than a million tokens."""


class Tokens(NamedTuple):
    """L tokens of a batch: [L] int64 row of each, and [L] bool: whether it counts."""

    rows: Tensor
    counted: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Echoed:
    """A batch's rows with L tokens: those that are trained, and those that tools, environments and users said."""

    sequences: Sequences
    tokens: Tokens
    """The trained ones do not count."""
    places: Tensor
    """[L] int64 number of a trained token among the M, -1 for others."""
    coef: Tensor
    """[L] float32 coefficient of its cross-entropy; 0 for trained tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTensors:
    """N rows, M trained tokens, K most trained tokens of a row, U scored units (see
    `learner.algorithms.advantages`)."""

    sequences: Sequences
    hints: list[str | None]
    """[N] None: nobody asked, or there is none."""
    echoed: Echoed | None = None
    """None: nobody asked."""
    episodes: npt.NDArray[np.int64]
    """[N] episode (0..E-1, first-seen order) of each row."""
    loss_weights: Tensor
    """[N] float32: an episode's rows share its weight."""
    units: Tensor
    """[N] int64 unit (0..U-1, first-seen order) of each row."""
    scores: Tensor
    """[U] float32."""
    groups: Tensor
    """[U] int64: with roles, those of one group and role."""
    roles: Tensor | None
    """[N] int64 role of each row; None: all rows are of one."""
    earlier: Tensor | None
    """[U] what the sessions of the unit's user scored before; None: not of all."""
    baselines: Tensor | None
    """[U] float32 mean greedy score of the unit's group; None unless every group has a greedy episode."""
    judges: Tensor | None
    """[U, J] float32 score of each judge, nan where it gave none; None when no row has scores by judge."""
    slots: Tensor
    """[N, K] bool; `padded[slots]` is the flat order of the trained tokens."""
    rows: Tensor
    """[M] int64 row of each token."""
    behaviour: Tensor
    """[M] float32."""
    versions: Tensor
    """[M] int64."""
    fresh: Tensor
    """[M] bool."""
    stored: Tensor
    """[M] bool: of a group that was trained before."""
    verifiable: Tensor
    """[M] bool: all that comes before it was computed by the version that sampled it, where experts are recorded."""
    truncated: Tensor
    """[M] bool: of an answer that was cut at the most tokens of a generation."""
    rewards: Tensor
    """[M] float32: the score of a single round on its last token, else 0."""
    ends: Tensor
    """[M] bool: the row's next trained token belongs to another round."""

    def padded(self, flat: Tensor) -> Tensor:
        """[M] -> [N, K], 0 where a row has fewer than K trained tokens."""
        out = torch.zeros(self.slots.shape, dtype=flat.dtype)
        out[self.slots] = flat
        return out

    def weights(self, rows: Sequence[int], *, mode: str, norm: float = 1.0, of: Tokens | None = None) -> Tensor:
        """[M] weight of each token in a mini-batch of these rows; 0 for tokens of other rows and those not fresh. `norm`: see
        `token_weights`. `of`: other tokens of the rows, by themselves."""
        owners, counted = of or (self.rows, self.fresh)
        nothing = torch.zeros(len(self.loss_weights))
        counts = nothing.index_add(0, owners, counted.float())
        chosen = nothing.index_fill(0, torch.tensor(rows), 1.0)
        per_row = role_weights(self.loss_weights * chosen, roles=self.roles, counts=counts, norm=norm, mode=mode)
        return torch.where(counted, per_row[owners], 0.0)


def token_table(
    batch: TrainBatch, *, min_version: int, min_stored: int | None = None, mask_truncated: bool = False
) -> BatchTensors:
    """Checks a batch and lays it out by trained token. Raises ValueError naming the episode and the rule.

    Tokens that a version before `min_version` sampled are not fresh (of stored groups: before `min_stored`); with `mask_truncated`,
    nor are those of answers that were cut.
    """
    rows = trained_rows(batch)
    check_rows(batch.rows)
    picked = [row.mask.astype(bool) for row in rows]
    versions = _flat([row.versions[own] for row, own in zip(rows, picked)], dtype=np.int32)
    stored = np.repeat([row.times_trained > 0 for row in rows], [row.num_trained for row in rows])
    fresh = versions >= np.where(stored, min_version if min_stored is None else min_stored, min_version)
    if not fresh.any():
        raise ValueError(
            f"batch {batch.lease_id}: must hold at least one trained token of version {min_version} or later, "
            f"got {len(versions)} older ones in {len(batch.rows)} rows"
        )
    sequences = Sequences(
        [row.ids for row in rows],
        masks=[row.mask for row in rows],
        experts=[row.experts for row in rows],
        labels=[_labels(row) for row in rows],
    )
    roles = _numbered([row.role for row in rows])
    units, scores, groups = _units(rows)
    owners = np.repeat(np.arange(len(rows)), sequences.counts)
    rounds = _flat([row.rounds[own] for row, own in zip(rows, picked)], dtype=np.int32)
    truncated = _flat([np.isin(row.rounds[own], row.truncated) for row, own in zip(rows, picked)], dtype=np.bool_)
    ends = (owners[:-1] == owners[1:]) & (rounds[:-1] != rounds[1:])
    return BatchTensors(
        sequences=sequences,
        hints=[None] * len(rows),
        episodes=_numbered([row.episode_id for row in rows]),
        loss_weights=torch.tensor([row.loss_weight for row in rows], dtype=torch.float32),
        units=units,
        scores=scores,
        groups=groups,
        roles=torch.from_numpy(roles) if roles.any() else None,
        baselines=_baselines(batch.rows, rows, units=units),
        earlier=_earlier(rows, units=units),
        judges=_judges(rows, units=units),
        slots=torch.from_numpy(np.arange(sequences.counts.max()) < sequences.counts[:, None]),
        rows=torch.from_numpy(owners),
        behaviour=torch.from_numpy(_flat([row.logprobs[own] for row, own in zip(rows, picked)], dtype=np.float32)),
        versions=torch.from_numpy(versions).long(),
        fresh=torch.from_numpy(fresh & ~truncated if mask_truncated else fresh),
        stored=torch.from_numpy(stored),
        verifiable=torch.from_numpy(_flat([_verifiable(row)[own] for row, own in zip(rows, picked)], dtype=np.bool_)),
        truncated=torch.from_numpy(truncated),
        rewards=torch.from_numpy(np.concatenate([_round_rewards(row) for row in rows])),
        ends=torch.from_numpy(np.append(ends, False)),
    )


def echo_of(rows: Sequences, *, sayings: Sayings, coefs: Mapping[str, float]) -> Echoed:
    """The rows of a table with what was said between their answers, where its role has a coefficient."""
    own = [np.zeros(len(ids), np.float32) for ids in rows.ids]
    for coef, ids, mask in zip(own, rows.ids, rows.masks):
        for role, start, stop in sayings.of(ids, mask=mask):
            coef[start:stop] = coefs[role]
    masks = [(mask | (coef > 0.0)).astype(np.uint8) for coef, mask in zip(own, rows.masks)]
    flat = torch.from_numpy(np.concatenate([coef[mask == 1] for coef, mask in zip(own, masks)]))
    sequences = Sequences(rows.ids, masks=masks, experts=rows.experts, labels=rows.labels)
    owners = torch.from_numpy(np.repeat(np.arange(len(masks)), sequences.counts))
    sampled = flat == 0.0
    places = torch.where(sampled, sampled.cumsum(0) - 1, -1)
    return Echoed(sequences=sequences, tokens=Tokens(owners, ~sampled), places=places, coef=flat)


def trained_rows(batch: TrainBatch) -> list[Row]:
    """The rows of a batch that are in its table."""
    return [row for row in batch.rows if row.num_trained > 0 and not row.greedy]


def _labels(row: Row) -> Int32:
    """[T] the token's id; above its bits, where experts are recorded, those of the version whose router chose them."""
    if row.expert_versions is None:
        return row.ids
    return np.asarray(row.ids + (row.expert_versions % 2 ** (31 - ID_BITS) << ID_BITS), dtype=np.int32)


def _verifiable(row: Row) -> npt.NDArray[np.bool_]:
    """[T] see `BatchTensors.verifiable`."""
    if row.expert_versions is None:
        return np.ones(len(row.ids), dtype=np.bool_)
    least, most = np.minimum.accumulate(row.expert_versions), np.maximum.accumulate(row.expert_versions)
    return np.append(False, (least == most)[:-1])


def _flat(parts: list[npt.NDArray[Number]], *, dtype: type[Number]) -> npt.NDArray[Number]:
    """One array of all parts; an empty one of none."""
    return np.concatenate([np.empty(0, dtype=dtype), *parts])


def _numbered(names: Sequence[object]) -> npt.NDArray[np.int64]:
    """Names as numbers, in first-seen order."""
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int64)


def _units(rows: list[Row]) -> tuple[Tensor, Tensor, Tensor]:
    """[N] unit of each row, [U] its score and group: a branch with a score of its own is a unit, an episode's other rows of
    one role together are one. Units are compared with those of the same group and role."""
    names = [
        (row.episode_id, row.role, None if row.branch_score is None else number) for number, row in enumerate(rows)
    ]
    units = _numbered(names)
    firsts = [rows[line] for line in np.unique(units, return_index=True)[1]]
    groups = np.array([row.group_id for row in firsts], dtype=np.int64)
    if any(row.role for row in firsts):
        groups = _numbered([(row.group_id, row.role) for row in firsts])
    return (
        torch.from_numpy(units),
        torch.tensor([row.own_score for row in firsts], dtype=torch.float32),
        torch.from_numpy(groups),
    )


def _judges(rows: list[Row], *, units: Tensor) -> Tensor | None:
    """[U, J] scores by judge, in the order of their names; a branch's own score is that of one more judge, without a name."""
    own = [row.branch_score is not None or row.role_score is not None for row in rows]
    given = [{"": row.own_score} if alone else row.judges or {"": row.score} for row, alone in zip(rows, own)]
    if not any(row.judges for row in rows):
        return None
    names = sorted({name for judges in given for name in judges})
    table = torch.full((int(units.max()) + 1, len(names)), torch.nan)
    for unit, judges in zip(units.tolist(), given):
        for name, score in judges.items():
            table[unit, names.index(name)] = score
    return table


def _earlier(rows: list[Row], *, units: Tensor) -> Tensor | None:
    """What the sessions of each unit's user scored before, or None when one has none."""
    firsts = [rows[line] for line in np.unique(units.numpy(), return_index=True)[1]]
    before = [row.baseline for row in firsts if row.baseline is not None]
    return torch.tensor(before, dtype=torch.float32) if len(before) == len(firsts) else None


def _baselines(everything: list[Row], rows: list[Row], *, units: Tensor) -> Tensor | None:
    """The greedy score of each unit's group and role, or None when one lacks it. `everything`: the trained rows and the greedy."""
    greedy: dict[tuple[int, str], dict[str, float]] = {}
    for row in everything:
        if row.greedy:
            score = row.score if row.role_score is None else row.role_score
            greedy.setdefault((row.group_id, row.role), {})[row.episode_id] = score
    firsts = [rows[line] for line in np.unique(units.numpy(), return_index=True)[1]]
    if not {(row.group_id, row.role) for row in firsts} <= greedy.keys():
        return None
    means = {of: sum(scores.values()) / len(scores) for of, scores in greedy.items()}
    return torch.tensor([means[row.group_id, row.role] for row in firsts], dtype=torch.float32)


def _round_rewards(row: Row) -> npt.NDArray[np.float32]:
    """[m] the row's round scores, each on the round's last trained token."""
    rounds = row.rounds[row.mask.astype(bool)]
    rewards = np.zeros(len(rounds), dtype=np.float32)
    for round_index, score in row.round_scores.items():
        places = np.flatnonzero(rounds == round_index)
        if not len(places):
            raise ValueError(
                f"round_scores of episode {row.episode_id} must name rounds that the row trains, got {round_index}; "
                f"put that score on the row that does"
            )
        rewards[places[-1]] = score
    return rewards


def check_rows(rows: Sequence[Row]) -> None:
    """Raises ValueError for the first row with a score or log-probability that is not finite."""
    for row in rows:
        _check_row(row)


def _check_row(row: Row) -> None:
    scores = [row.score, *row.round_scores.values(), *(row.judges or {}).values()]
    scores += [score for score in (row.branch_score, row.role_score) if score is not None]
    bad = [score for score in scores if not np.isfinite(score)]
    if bad:
        raise ValueError(f"score of episode {row.episode_id} must be finite, got {bad[0]}; check its environment")
    if not np.isfinite(row.logprobs).all():
        first = row.logprobs[~np.isfinite(row.logprobs)][0]
        raise ValueError(
            f"logprobs of episode {row.episode_id} must be finite, got {first}; check the engine that sampled it"
        )
    if row.num_trained > 0 and row.mask[0]:
        raise ValueError(
            f"mask[0] of episode {row.episode_id} must be 0, got 1; the first token is never sampled: it has no prefix"
        )
