"""One rank of the learner where each role is a policy of its own: an adapter on the base that all of them share.

Started by `learner.training.ranks` in the place of `Trainer`. One adapter is in the model at a time; the others' matrices, and each
role's optimizer, counters and earlier versions, wait beside it and are exchanged, so a role is trained exactly as a single policy
is. A role's version is the number of its updates. Invariants: a role is updated once rows of `groups_per_step` groups wait for it,
and by its own rows only; one whose rows are too few keeps its weights and its version, and the others go on; a token is too old by
the versions of the role that sampled it. The base is never trained.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from buffers.records import Row, TrainBatch
from configs.schema import LearnerConfig
from learner.checkpoints import training_state, weight_shards
from learner.checkpoints.store import ADAPTERS, COUNTERS, VERSIONS
from learner.checkpoints.weight_shards import Published
from learner.model import fsdp
from learner.reporting.token_figures import ARRAYS, TokenFigures
from learner.training.batch_tensors import check_rows
from learner.training.trainer import Progress, Trainer

# The rows of one role that wait until they are a batch. Rows come with the groups of each step; a group in which the role said
# nothing adds none. Invariants: the rows of a group stay together; each is taken once; what `write` stored, `read` gives back
# bit for bit.

FILE = "waiting.npz"
_ARRAYS = ("ids", "mask", "logprobs", "versions", "rounds")
_EXPERTS = ("experts", "expert_versions")
"""Not of every row."""
_NUMBERS = (
    "episode_id", "group_id", "score", "loss_weight", "branch_score", "role", "role_score", "greedy", "hint", "judges",
    "baseline", "times_trained",
)  # fmt: skip
_LINES = "lines"


class WaitingRows:
    """Begins empty."""

    def __init__(self) -> None:
        self._groups: dict[int, list[Row]] = {}

    @property
    def num_groups(self) -> int:
        """Groups in which the role has something to learn."""
        return len(self._groups)

    def add(self, rows: Iterable[Row], *, min_version: int, min_stored: int) -> int:
        """Rows of this role. Returns how many groups are left out: all that the role sampled there is older than `min_version`, or
        in a stored group than `min_stored`. One that waits already is not added again."""
        found: dict[int, list[Row]] = {}
        for row in rows:
            found.setdefault(row.group_id, []).append(row)
        num_stale = 0
        for group_id, own in found.items():
            if group_id in self._groups:
                continue
            trained = [row for row in own if not row.greedy and row.num_trained]
            if any(bool((row.versions >= (min_stored if row.times_trained else min_version)).any()) for row in trained):
                self._groups[group_id] = own
            else:
                num_stale += bool(trained)
        return num_stale

    def take(self) -> list[Row]:
        """All of them, in the order of their groups; none waits afterwards."""
        rows = [row for own in self._groups.values() for row in own]
        self._groups = {}
        return rows


def write_waiting(folder: Path, waiting: Mapping[str, WaitingRows]) -> None:
    """Writes the rows of all roles into `folder`."""
    rows = [row for own in waiting.values() for group in own._groups.values() for row in group]
    lines = [
        {name: getattr(row, name) for name in _NUMBERS}
        | {"round_scores": list(row.round_scores.items()), "truncated": list(row.truncated)}
        for row in rows
    ]
    arrays: dict[str, Any] = {
        f"{number}.{name}": array
        for number, row in enumerate(rows)
        for name in (*_ARRAYS, *_EXPERTS)
        if (array := getattr(row, name)) is not None
    }
    arrays[_LINES] = np.frombuffer(json.dumps(lines).encode(), dtype=np.uint8)
    np.savez(folder / FILE, **arrays)


def read_waiting(folder: Path, *, roles: Iterable[str]) -> dict[str, WaitingRows]:
    """What `write` stored, by role."""
    found = {role: WaitingRows() for role in roles}
    with np.load(folder / FILE, allow_pickle=False) as stored:
        lines: list[dict[str, Any]] = json.loads(stored[_LINES].tobytes())
        for number, line in enumerate(lines):
            scores, truncated = dict(map(tuple, line.pop("round_scores"))), tuple(line.pop("truncated"))
            arrays = {name: stored[f"{number}.{name}"] for name in _ARRAYS}
            experts = {name: stored.get(f"{number}.{name}") for name in _EXPERTS}
            row = Row(**line, **arrays, **experts, round_scores=scores, truncated=truncated)
            found[row.role]._groups.setdefault(row.group_id, []).append(row)
    return found


LARGEST = ("policy/max_logprob_diff", "policy/is_weight_max", "policy/lag_max")
ADDED = ("learner/tokens", "learner/trained_tokens", "learner/echo_tokens", "time/prepare_s", "time/train_s")
"""Metrics of which a step has the largest or the sum over its roles; of the others it has the mean, weighed by trained tokens."""


class RoleTrainer(Trainer):
    """`roles`: the names of those that are trained, at least one; `groups_per_step`: groups of a role's batch, at least. The rest:
    see `Trainer`."""

    def __init__(self, config: LearnerConfig, *, roles: Sequence[str], groups_per_step: int, **settings: Any) -> None:
        super().__init__(config, **settings)
        self._groups_per_step = groups_per_step
        self._present = roles[0]
        """The role whose adapter is in the model."""
        self._all: dict[str, Progress] = {role: self._progress() for role in roles}
        self._own = self._all[self._present]
        self._apart: dict[str, fsdp.Shards] = {}
        """The adapters of the other roles."""
        self._waiting = {role: WaitingRows() for role in roles}
        self._begin_alike()

    def _begin_alike(self) -> None:
        """All roles begin with the adapter that is in the model."""
        self._apart = {
            role: fsdp.clone_shards(self._policy, device=self._place) for role in self._all if role != self._present
        }

    def _enter(self, role: str) -> None:
        """Puts the role's adapter into the model, and its counters beside it."""
        if role == self._present:
            return
        self._apart[self._present] = fsdp.clone_shards(self._policy, device=self._place)
        fsdp.load_shards(self._policy, shards=self._apart.pop(role))
        self._present, self._own = role, self._all[role]

    def end_sft(self) -> None:
        """See `Trainer.end_sft`: all roles begin with what it has learned."""
        super().end_sft()
        self._begin_alike()

    def versions(self) -> dict[str, int]:
        """The present version of each role: its updates since SFT."""
        return {role: own.steps for role, own in self._all.items()}

    def train_step(
        self, batch: TrainBatch, *, version: int, pace: float = 1.0, has_gone_back: bool = False
    ) -> dict[str, float]:
        """The rows of a step's groups go to their roles, and those that have a batch are updated. `version` is the step's number,
        by which no role counts.

        Raises ValueError, before any change, for a batch with a score or log-probability that is not finite."""
        check_rows(batch.rows)
        figures, tokens = dict[str, float](), dict[int, TokenFigures]()
        trained = dict[str, dict[str, float]]()
        for role, waiting in self._waiting.items():
            own = [row for row in batch.rows if row.role == role]
            steps = self._all[role].steps
            num_stale = waiting.add(
                own, min_version=steps - self._keep_versions + 1, min_stored=steps - self._replay_lag
            )
            num_groups = waiting.num_groups
            if num_groups >= self._groups_per_step:
                self._enter(role)
                rows = TrainBatch(rows=waiting.take(), lease_id=batch.lease_id)
                trained[role] = super().train_step(
                    rows, version=self._own.steps, pace=pace, has_gone_back=has_gone_back
                )
                tokens |= _by_row(rows.rows, self._token_figures)
            figures |= {
                f"adapter/{role}/version": float(self._all[role].steps),
                f"adapter/{role}/groups_waiting": float(waiting.num_groups),
                f"adapter/{role}/groups_trained": float(num_groups if role in trained else 0),
                f"adapter/{role}/groups_too_old": float(num_stale),
            }
        for role, metrics in trained.items():
            figures |= {f"adapter/{role}/{name}": value for name, value in metrics.items()}
        self._token_figures = _in_order(batch.rows, tokens)
        return figures | of_all(trained)

    def logprobs_of(self, ids: Sequence[int], *, last: int, role: str = "") -> list[float]:
        """See `Trainer.logprobs_of`. `role`: whose policy; empty: that of the last call."""
        self._enter(role or self._present)
        return super().logprobs_of(ids, last=last)

    def publish(self, folder: Path, *, base: str | None = None, role: str = "") -> Published:
        """See `Trainer.publish`, of this role's adapter."""
        self._enter(role)
        return super().publish(folder, base=base)

    def save_pretrained(self, folder: Path) -> None:
        """Writes the base as a Hugging Face folder, with `adapters/<role>` below it, which peft and vLLM load, and their versions.
        All ranks call this; rank 0 writes."""
        if self._sft is not None:
            self._begin_alike()
        writer = self._rank == 0
        base = weight_shards.gather_policy(self._policy, dtype=self._dtype, keep=writer, scaling=0.0)
        adapters = {}
        for role in self._all:
            self._enter(role)
            assert self._adapter is not None, "configs.schema: an adapter for each role needs learner.lora.rank"
            adapter = weight_shards.gather_adapter(self._policy.lm, config=self._adapter, keep=writer)
            if adapter is not None:
                adapters[f"{ADAPTERS}/{role}"] = adapter
        if writer:
            weight_shards.write_folder(
                folder, source=Path(self._source), weights=base, value_head={}, adapters=adapters,
                dtype=self._dtype,
            )  # fmt: skip
            (folder / ADAPTERS / VERSIONS).write_text(json.dumps(self.versions()) + "\n", encoding="utf-8")

    def save(self, folder: Path) -> None:
        """Writes a folder for each role, and the rows that wait. All ranks call this."""
        if self._sft is not None:
            return super().save(folder)
        for role in self._all:
            self._enter(role)
            super().save(folder / role)
        if self._rank == 0:
            write_waiting(folder, self._waiting)

    def load(self, folder: Path) -> None:
        """See `Trainer.load`. Raises ValueError, before any change, for a checkpoint of other roles."""
        if self._sft is not None:
            return super().load(folder)
        there = sorted(path.name for path in folder.iterdir() if (path / COUNTERS).is_file())
        if there != sorted(self._all):
            raise ValueError(
                f"checkpoint {folder} must have an adapter for each of the roles {', '.join(self._all)}, got "
                f"{', '.join(there) or 'one policy'}; resume with the roles and the learner.lora.per_role that it was saved with"
            )
        for role in self._all:
            self._enter(role)
            super().load(folder / role)
        self._waiting = read_waiting(folder, roles=self._all)

    def _learned(self) -> dict[str, training_state.Learned]:
        """Adapters alone: the base is the same in all checkpoints."""
        return {name: replace(part, trained_only=True) for name, part in super()._learned().items()}


def _by_row(rows: Sequence[Row], figures: TokenFigures | None) -> dict[int, TokenFigures]:
    """The figures of each row's trained tokens, by the row's id in this process."""
    if figures is None:
        return {}
    own = [row for row in rows if row.num_trained and not row.greedy]
    ends = np.cumsum([row.num_trained for row in own])
    return {
        id(row): TokenFigures(**{name: getattr(figures, name)[end - row.num_trained : end] for name in ARRAYS})
        for row, end in zip(own, ends)
    }


def _in_order(rows: Sequence[Row], found: Mapping[int, TokenFigures]) -> TokenFigures:
    """Those of a step's rows, in their order; unknown and without weight where a row was not trained in this step."""
    own = [row for row in rows if row.num_trained and not row.greedy]
    parts = {name: [np.empty(0, np.uint8 if name == "weighed" else np.float32)] for name in ARRAYS}
    for row in own:
        unknown = np.full(row.num_trained, np.nan, np.float32)
        nothing = TokenFigures(
            learner=unknown, start=unknown, advantage=unknown, weighed=np.zeros(row.num_trained, np.uint8)
        )
        for name in ARRAYS:
            parts[name].append(getattr(found.get(id(row), nothing), name))
    return TokenFigures(**{name: np.concatenate(some) for name, some in parts.items()})


def of_all(trained: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The metrics of a step, of those of the roles that were updated in it."""
    names = dict.fromkeys(name for metrics in trained.values() for name in metrics)
    found = dict[str, float]()
    for name in names:
        values = [(metrics[name], metrics["learner/trained_tokens"]) for metrics in trained.values() if name in metrics]
        if name in LARGEST:
            found[name] = max(value for value, _ in values)
        elif name in ADDED:
            found[name] = sum(value for value, _ in values)
        else:
            found[name] = sum(value * tokens for value, tokens in values) / sum(tokens for _, tokens in values)
    return found
