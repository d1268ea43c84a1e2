"""Supervised updates of the policy (SFT): cross-entropy on the answers of demonstrations, and the same loss of held-out ones.

Made by `learner.training.trainer` on every rank when an SFT stage begins, and dropped when it ends. Rows are laid out as those of
RL batches, what they share computed once. Invariant: the loss of a batch is the mean over its trained tokens, each weighed as its
conversation, so a conversation that became several rows counts as if it were one. It reads no files and draws nothing: which
conversations are in a batch, and the learning rate, are the caller's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from buffers.records import Float32, Int32, UInt8
from configs.schema import LearnerConfig
from learner.algorithms.losses import cross_entropy
from learner.model import fsdp
from learner.model.fsdp import make_adamw
from learner.model.policy import Policy
from learner.training.layout import Layout
from learner.training.packing import Sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class SftRow:
    """One branch of a conversation."""

    ids: Int32
    """[L]"""
    mask: UInt8
    """[L] 1 where a token of an answer is learned."""
    conversation: int
    """Its number in the file."""
    weight: float = 1.0
    """Weight of its tokens in the loss."""


class SftUpdates:
    """`policy`: sharded; `layout`: how its rows are laid out."""

    def __init__(
        self, policy: Policy, *, layout: Layout, config: LearnerConfig, rank: int, world_size: int, device: torch.device
    ) -> None:
        self._policy = policy
        self._layout = layout
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._device = device
        self.optimizer = make_adamw([{"params": fsdp.trained(policy)}], lr=0.0, moments_on_host=config.offload)

    def step(self, rows: Sequence[SftRow], *, lr: float) -> dict[str, float]:
        """One AdamW update on the rows of a batch; its figures. `sft/loss` is the loss before the update, in nats a token."""
        started = time.monotonic()
        self.optimizer.param_groups[0]["lr"] = lr
        sequences, weights = self._laid_out(rows)
        loss = self._negative(sequences, weights=weights / weights.sum(), learns=True)
        norm = fsdp.update(self._policy, optimizer=self.optimizer, clip=self._config.grad_clip)
        return {
            "sft/loss": loss,
            "policy/grad_norm": norm if np.isfinite(norm) else 0.0,
            "learner/skipped": float(not np.isfinite(norm)),
            "learner/lr": lr,
            "learner/tokens": float(sequences.lengths.sum()),
            "learner/trained_tokens": float(sequences.num_trained),
            "learner/raw_over_unique": sequences.raw_over_unique,
            "time/train_s": time.monotonic() - started,
        }

    def loss(self, rows: Sequence[SftRow]) -> tuple[float, float]:
        """The weighed sum of the rows' negative log-probabilities, and of the weights: of several batches both add up."""
        sequences, weights = self._laid_out(rows)
        with torch.no_grad():
            return self._negative(sequences, weights=weights, learns=False), float(weights.sum())

    def _laid_out(self, rows: Sequence[SftRow]) -> tuple[Sequences, Float32]:
        """The rows as the policy takes them, and the weight of each trained token."""
        plain = Sequences([row.ids for row in rows], masks=[row.mask for row in rows])
        weights = np.repeat(np.array([row.weight for row in rows], np.float32), plain.counts)
        groups = np.array([row.conversation for row in rows], np.int64)
        budget = self._config.token_budget
        return self._layout.lay_out(plain, groups=groups, num_ranks=self._world_size, token_budget=budget), weights

    def _negative(self, sequences: Sequences, *, weights: Float32, learns: bool) -> float:
        """Minus the weighed sum of the trained tokens' log-probabilities, of all ranks; with `learns` its gradient is added up."""
        total = torch.zeros((), device=self._device)
        of_tokens = torch.from_numpy(weights).to(self._device)
        rows = range(len(sequences.ids))
        for piles in sequences.plan(rows, num_ranks=self._world_size, token_budget=self._config.token_budget):
            micro = sequences.micro_batch(piles[self._rank], device=self._device)
            negative = cross_entropy(self._policy(micro, temperature=1.0).logprobs, weights=of_tokens[micro.index])
            if learns:
                (negative * self._world_size).backward()  # FSDP averages over ranks; the sum is wanted
            total += negative.detach()
        return float(fsdp.all_sum(total))
