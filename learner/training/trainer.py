"""One rank of the learner: from a batch of scored rows to new weights.

Started by `learner.training.ranks`, one per process; a plain class. Each rank holds the whole batch; only forward and backward
passes are divided, and what they give is summed over ranks, so every rank computes the same advantages and any number
of ranks the same weights (up to rounding). Invariants: the weights stay finite (an update whose gradient is not is
skipped and counted); each log-probability in the loss was computed by the weights that its name says. Does not fetch
batches or know of the engine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from buffers.records import TrainBatch
from configs.schema import LearnerConfig
from learner.algorithms.advantages import ESTIMATORS, AdvantageInputs, calibrated_evidence, explained_variance
from learner.algorithms.kl import KLCoefficient, kl_estimate
from learner.algorithms.losses import VALUE_CLIP, Loss, Targets, actor_loss, value_loss
from learner.checkpoints import hf_export, training_state
from learner.model import fsdp
from learner.model.lora import LoraConfig, add_adapter
from learner.model.policy import Policy, TokenOutputs, load_policy
from learner.training.batch_tensors import BatchTensors, token_table
from learner.training.hinted_rows import hinted_sequences
from learner.training.packing import MicroBatch, Sequences, plan, split_minibatches
from learner.training.step_metrics import StepMetrics
from learner.training.warm_start import load_traces, train_on_traces

VALUE_HEAD_LR_RATIO = 10.0
REFERENCE = "reference"
"""Name of the reference weights in a checkpoint; older versions are named by their number."""


class Trainer:
    """`address` (host:port) is where the ranks meet. `keep_versions` = max_policy_lag + 1: as many versions can be checked, and
    tokens of older ones are not trained."""

    def __init__(
        self,
        config: LearnerConfig,
        *,
        model_path: str,
        dtype: str,
        temperature: float,
        seed: int,
        keep_versions: int,
        address: str,
        rank: int,
        world_size: int,
        device: str,
    ) -> None:
        self._config = config
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._temperature = temperature
        self._seed = seed
        self._keep_versions = keep_versions
        self._rank = rank
        self._world_size = world_size
        self._device = torch.device(device)
        self._estimator = ESTIMATORS[config.advantage]
        self._mesh = fsdp.join(address, rank=rank, world_size=world_size, device=self._device)
        critic = config.critic if self._estimator.needs_critic else "none"
        self._adapter: LoraConfig | None = None
        self._tokenizer = AutoTokenizer.from_pretrained(model_path)
        self._policy = self._load(model_path, value_head=critic == "shared")
        self._optimizer = self._adamw(self._policy, lr=config.lr)
        self._critic = self._load(model_path, value_head=True) if critic == "separate" else None
        self._critic_optimizer = self._adamw(self._critic, lr=config.critic_lr) if self._critic is not None else None
        self._kl = KLCoefficient(config.kl.coef, target=config.kl.target, horizon=config.kl.horizon)
        self._history: dict[int, fsdp.Shards] = {}
        self._reference: fsdp.Shards | None = None
        self._steps = 0

    def warm_start(self, traces_path: Path, *, steps: int, batch_size: int, lr: float, seed: int) -> dict[str, float]:
        """Supervised learning on a parquet file of traces; a separate critic starts from the same weights."""
        metrics = train_on_traces(
            self._policy,
            traces=load_traces(traces_path, tokenizer=self._tokenizer),
            steps=steps,
            batch_size=batch_size,
            lr=lr,
            lr_warmup_steps=self._config.lr_warmup_steps,
            grad_clip=self._config.grad_clip,
            token_budget=self._config.token_budget,
            seed=seed,
            rank=self._rank,
            world_size=self._world_size,
        )
        if self._critic is not None:
            fsdp.load_shards(self._critic.lm, shards=fsdp.clone_shards(self._policy.lm))
        return metrics

    def train_step(self, batch: TrainBatch, *, version: int) -> dict[str, float]:
        """One step on a batch. `version` is that of the weights before it (0 after the warm start).

        Raises ValueError, before any change, for a batch with a score or log-probability that is not finite.
        """
        started = time.monotonic()
        table = token_table(batch, min_version=version - self._keep_versions + 1)
        shares = table.weights(range(len(table.hints)), mode="token-mean")
        if self._config.kl.coef > 0.0 and self._reference is None:
            self._reference = fsdp.clone_shards(self._policy)
        logprobs, entropy, values = self._sweep(table.sequences, critic=True)
        metrics = self._check_logprobs(table, logprobs=logprobs, version=version)
        if self._config.check_logprobs:
            self._remember(version)
        targets, kl_taken = self._targets(table, shares=shares, logprobs=logprobs, values=values)
        prepared = time.monotonic()
        metrics |= self._update(table, targets=targets) | kl_taken
        if self._config.kl.coef > 0.0:
            metrics["policy/kl_coef"] = self._kl.value
            self._kl.update(metrics["policy/kl_ref"], num_episodes=len(np.unique(table.episodes)))
        if self._estimator.needs_critic:
            metrics["critic/explained_variance"] = explained_variance(values, returns=targets.returns.cpu())
            metrics["critic/value_mean"] = float(values.mean())
        self._steps += 1
        lags = (version - table.versions).float()
        return metrics | {
            "policy/entropy": float((shares * entropy).sum()),
            "policy/lag_mean": float(lags.mean()),
            "policy/lag_max": float(lags.max()),
            "policy/too_old_share": float((~table.fresh).float().mean()),
            "learner/tokens": float(table.sequences.lengths.sum()),
            "learner/trained_tokens": float(table.sequences.num_trained),
            "time/prepare_s": prepared - started,
            "time/train_s": time.monotonic() - started,
        }

    def publish(self, path: Path) -> None:
        """Writes the weights for the engine, in the model's dtype. All ranks call this; rank 0 writes."""
        weights = self._weights()
        if self._rank == 0:
            hf_export.write_weights(path, weights=weights)

    def save_pretrained(self, folder: Path) -> None:
        """Writes a Hugging Face folder (and `critic/value_head.safetensors`). All ranks call this; rank 0 writes."""
        writer = self._rank == 0
        critic = self._critic or self._policy
        weights = self._weights()
        # the head's own names, as seen from its root: a module inside an FSDP root is gathered the same way
        head = (
            hf_export.gather(critic.value_head, dtype=torch.float32, keep=writer)
            if critic.value_head is not None
            else {}
        )
        adapter = (
            None
            if self._adapter is None
            else hf_export.gather_adapter(self._policy.lm, config=self._adapter, keep=writer)
        )
        if writer:
            hf_export.write_folder(
                folder,
                lm=self._policy.lm,
                tokenizer=self._tokenizer,
                weights=weights,
                value_head=head,
                adapter=adapter,
                dtype=self._dtype,
            )

    def save(self, folder: Path) -> None:
        """Writes all that `load` needs to resume bit for bit. All ranks call this."""
        copies = {str(version): shards for version, shards in self._history.items()}
        if self._reference is not None:
            copies[REFERENCE] = self._reference
        training_state.save(
            folder,
            learned=self._learned(),
            copies=copies,
            steps=self._steps,
            kl_coef=self._kl.value,
            rank=self._rank,
        )

    def load(self, folder: Path) -> None:
        """Resumes from what `save` wrote, on any number of ranks. All ranks call this. Raises ValueError, before any change,
        for a checkpoint of another shape."""
        counters, copies = training_state.load(folder, learned=self._learned(), rank=self._rank)
        self._reference = copies.pop(REFERENCE, None)
        self._history = {int(version): shards for version, shards in copies.items()}
        self._steps, self._kl.value = counters.steps, counters.kl_coef

    def _learned(self) -> dict[str, training_state.Learned]:
        learned = {"policy": training_state.Learned(module=self._policy, optimizer=self._optimizer)}
        if self._critic is not None and self._critic_optimizer is not None:
            learned["critic"] = training_state.Learned(module=self._critic, optimizer=self._critic_optimizer)
        return learned

    def _weights(self) -> dict[str, Tensor]:
        """The policy's whole weights on rank 0, an adapter merged into them."""
        lora = self._config.lora
        scaling = lora.alpha / lora.rank if lora.rank else 1.0
        return hf_export.gather(self._policy.lm, dtype=self._dtype, keep=self._rank == 0, scaling=scaling)

    def close(self) -> None:
        """Leaves the process group."""
        fsdp.leave()

    def _load(self, folder: str, *, value_head: bool) -> Policy:
        policy = load_policy(folder, value_head=value_head, device=self._device)
        if (lora := self._config.lora).rank:
            self._adapter = add_adapter(policy.lm, rank=lora.rank, alpha=lora.alpha, seed=self._seed)
        if self._config.gradient_checkpointing:
            policy.checkpoint_layers()
        fsdp.shard(policy, layers=policy.layers, mesh=self._mesh, dtype=self._dtype)
        return policy

    def _adamw(self, policy: Policy, *, lr: float) -> torch.optim.AdamW:
        """`peak_lr` is reached after the warm-up. A value head learns faster: at the policy's rate it lags for 20 steps."""
        groups = [{"params": fsdp.trained(policy.lm), "peak_lr": lr}]
        if policy.value_head is not None:
            groups.append({"params": list(policy.value_head.parameters()), "peak_lr": VALUE_HEAD_LR_RATIO * lr})
        return torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)

    def _sweep(self, sequences: Sequences, *, critic: bool, rows: Sequence[int] | None = None) -> Tensor:
        """[3, M] log-probabilities, entropies and values of the trained tokens, no gradient; 0 outside of `rows`."""
        found = torch.zeros(3, sequences.num_trained, device=self._device)
        chosen = range(len(sequences.ids)) if rows is None else rows
        for piles in self._plan(sequences, rows=chosen):
            micro = sequences.micro_batch(piles[self._rank], device=self._device)
            with torch.no_grad():
                outputs = self._forward(micro, entropy=True)
                values = self._values(micro, shared=outputs.values) if critic else None
            found[0, micro.index] = outputs.logprobs
            found[1, micro.index] = outputs.entropy
            if values is not None:
                found[2, micro.index] = values
        return fsdp.all_sum(found).cpu()

    def _forward(self, micro: MicroBatch, *, entropy: bool) -> TokenOutputs:
        outputs: TokenOutputs = self._policy(
            micro.ids, micro.mask, micro.starts, longest=micro.longest, temperature=self._temperature, entropy=entropy
        )
        return outputs

    def _values(self, micro: MicroBatch, *, shared: Tensor | None) -> Tensor | None:
        """The separate critic's values, or else the policy's own (None: no critic)."""
        if self._critic is None:
            return shared
        values: Tensor = self._critic(
            micro.ids, micro.mask, micro.starts, longest=micro.longest, temperature=None
        ).values
        return values

    def _plan(self, sequences: Sequences, *, rows: Sequence[int]) -> list[list[list[int]]]:
        return plan(sequences.lengths, rows=rows, num_ranks=self._world_size, token_budget=self._config.token_budget)

    def _remember(self, version: int) -> None:
        """Keeps these weights for the steps in which they will be an older version."""
        self._history[version] = fsdp.clone_shards(self._policy)
        for old in [old for old in self._history if old <= version - self._keep_versions + 1]:
            del self._history[old]

    def _check_logprobs(self, table: BatchTensors, *, logprobs: Tensor, version: int) -> dict[str, float]:
        """Compares recorded log-probabilities with those of the version that sampled each token, where still kept."""
        if not self._config.check_logprobs:
            return {}
        answers = logprobs.clone()
        checked = table.versions == version
        owners = np.repeat(np.arange(len(table.sequences.ids)), table.sequences.counts)
        for old, shards in self._history.items():
            own = (table.versions == old) & ~checked
            if not bool(own.any()):
                continue
            with fsdp.swapped(self._policy, shards=shards):
                rows = np.unique(owners[own.numpy()]).tolist()
                answers[own] = self._sweep(table.sequences, critic=False, rows=rows)[0][own]
            checked |= own
        difference = (answers - table.behaviour)[checked].abs()
        return {
            "policy/max_logprob_diff": float(difference.max()) if len(difference) else 0.0,
            "policy/mean_logprob_diff": float(difference.mean()) if len(difference) else 0.0,
            "policy/checked_share": float(checked.float().mean()),
        }

    def _targets(
        self, table: BatchTensors, *, shares: Tensor, logprobs: Tensor, values: Tensor
    ) -> tuple[Targets, dict[str, float]]:
        """What the updates aim at, and the mean KL if it was taken off the rewards."""
        reference, rewards, metrics = torch.zeros_like(logprobs), table.rewards, {}
        if self._reference is not None:
            with fsdp.swapped(self._policy, shards=self._reference):
                reference = self._sweep(table.sequences, critic=False)[0]
            if self._config.kl.in_reward:
                kl = kl_estimate(logprobs, reference=reference, kind=self._config.kl.kind)
                rewards = rewards - self._kl.value * kl
                metrics["policy/kl_ref"] = float((shares * kl).sum())
        hinted = None
        if self._estimator.needs_hints and any(table.hints):
            sequences = hinted_sequences(table.sequences, hints=table.hints, tokenizer=self._tokenizer)
            hinted = table.padded(self._sweep(sequences, critic=False)[0] - logprobs)
        discounts = torch.where(table.ends, self._config.gamma, 1.0)
        evidence = AdvantageInputs(
            scores=table.scores,
            groups=table.groups,
            units=table.units,
            mask=table.slots,
            rewards=table.padded(rewards),
            discounts=table.padded(discounts),
            weights=table.padded(shares),
            values=table.padded(values),
            lam=self._config.lam,
            baselines=table.baselines,
            hinted=hinted,
        )
        if self._estimator.needs_critic:
            evidence = calibrated_evidence(evidence)
        estimate = self._estimator.compute(evidence)
        targets = Targets(
            behaviour=table.behaviour,
            proximal=logprobs,
            reference=reference,
            advantages=estimate.advantages[table.slots],
            returns=estimate.returns[table.slots],
            values=values,
            sequences=table.rows,
            weights=shares,
            shares=shares,
        )
        return targets.to(self._device), metrics

    def _update(self, table: BatchTensors, *, targets: Targets) -> dict[str, float]:
        """Epochs times mini-batches optimizer updates."""
        warmth = min(1.0, (self._steps + 1) / (self._config.lr_warmup_steps + 1))
        for optimizer in filter(None, (self._optimizer, self._critic_optimizer)):
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * warmth
        step_metrics = StepMetrics()
        rng = np.random.default_rng((self._seed, self._steps))
        for _ in range(self._config.epochs):
            for rows in split_minibatches(table.episodes, num=self._config.minibatches, rng=rng):
                if not bool(table.fresh[table.sequences.places(rows)].any()):
                    continue
                weights = table.weights(rows, mode=self._config.loss_agg).to(self._device)
                shares = table.weights(rows, mode="token-mean").to(self._device)
                goals = replace(targets, weights=weights, shares=shares)
                self._update_once(table.sequences, targets=goals, rows=rows, step_metrics=step_metrics)
        return step_metrics.metrics() | {"learner/lr": self._config.lr * warmth}

    def _update_once(
        self, sequences: Sequences, *, targets: Targets, rows: Sequence[int], step_metrics: StepMetrics
    ) -> None:
        steps = self._plan(sequences, rows=rows)
        for number, piles in enumerate(steps):
            micro = sequences.micro_batch(piles[self._rank], device=self._device)
            for model in filter(None, (self._policy, self._critic)):
                fsdp.sync_gradients(model, enabled=number == len(steps) - 1)
            loss = self._loss(micro, goals=targets.take(micro.index))
            (loss.total * self._world_size).backward()  # FSDP averages over ranks; the sum is wanted
            step_metrics.add(means=loss.means, maxima=loss.maxima)
        norm = fsdp.update(self._policy, optimizer=self._optimizer, clip=self._config.grad_clip)
        critic_norm = 0.0
        if self._critic is not None and self._critic_optimizer is not None:
            critic_norm = fsdp.update(self._critic, optimizer=self._critic_optimizer, clip=self._config.grad_clip)
        step_metrics.end_update(norm, critic=critic_norm)

    def _loss(self, micro: MicroBatch, *, goals: Targets) -> Loss:
        config = self._config
        outputs = self._forward(micro, entropy=config.entropy_coef > 0.0)
        loss = actor_loss(
            outputs.logprobs,
            entropy=outputs.entropy,
            values=outputs.values,
            targets=goals,
            config=config,
            kl_coef=0.0 if config.kl.in_reward else self._kl.value,
        )
        if self._critic is None:
            return loss
        critic = value_loss(self._values(micro, shared=None), targets=goals, clip=VALUE_CLIP)
        return replace(loss, total=loss.total + critic, means=loss.means | {"critic/vf_loss": critic.detach()})
