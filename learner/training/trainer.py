"""One rank of the learner: from a batch of scored rows to new weights.

Started by `learner.training.ranks`, one per process; a plain class. Each rank holds the whole batch; only forward and backward
passes are divided, and what they give is summed over ranks, so every rank computes the same advantages and any number
of ranks the same weights (up to rounding). Invariants: the weights stay finite (an update whose gradient is not is
skipped and counted); each log-probability in the loss was computed by the weights that its name says. Does not fetch
batches or know of the engine.
"""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from buffers.disk import why_refused
from buffers.errors import StorageFull
from buffers.records import Row, TrainBatch, UInt16
from configs.child_processes import give_memory_back
from configs.schema import LearnerConfig
from learner.algorithms.advantages import (
    ESTIMATORS,
    AdvantageInputs,
    calibrated_evidence,
    explained_variance,
    score_scale,
    teacher_advantages,
    unit_returns,
)
from learner.algorithms.kl import LOG_RATIO_LIMIT, KLCoefficient, kl_estimate
from learner.algorithms.losses import Loss, actor_loss, counting, cross_entropy, value_loss
from learner.algorithms.objectives import EntropyCoefficient, Guide, Targets, covariances, pick_clip_cov, pick_kl_cov
from learner.checkpoints import training_state, weight_shards
from learner.checkpoints.store import ADAPTER, REFERENCE
from learner.checkpoints.weight_shards import Published, WeightShards
from learner.model import fsdp
from learner.model.engine_rounding import round_as_engine
from learner.model.fsdp import EPS, make_adamw
from learner.model.layers import Work, layers_of, matmul_rate
from learner.model.load import load_policy
from learner.model.lora import LoraConfig, add_adapter, without_adapter
from learner.model.packed_attention import MicroBatch, check_kernel
from learner.model.policy import Policy, TokenOutputs
from learner.model.weight_files import check_same_vocabulary
from learner.reporting.token_figures import TokenFigures
from learner.training.batch_tensors import BatchTensors, Tokens, echo_of, token_table, trained_rows
from learner.training.hints import hinted_sequences, hints_of
from learner.training.layout import LONGEST, Layout, choose_layout, plain_tokens, reach_of
from learner.training.packing import PaddedSequences, Sequences, split_minibatches
from learner.training.said import Sayings
from learner.training.sft import SftRow, SftUpdates
from learner.training.tree_packing import kept_together

VALUE_HEAD_LR_RATIO = 10.0
CHOICES = 100
"""Likeliest tokens of a hinted place, over which the policy is drawn to it; all others count as one."""
PROBE_BEYOND = 8
"""Tokens of a probe's prompt behind the longest window."""


class Hinted(NamedTuple):
    """The reference where it has read hints: [M, k] tokens and their log-probabilities, [M] whether the row has one."""

    ids: Tensor
    logprobs: Tensor
    known: Tensor


class Before(NamedTuple):
    """[M] each, of the trained tokens under the weights before a step."""

    logprobs: Tensor
    entropy: Tensor
    values: Tensor
    energy: Tensor
    hinted: Hinted | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """What the updates of a step aim at."""

    targets: Targets
    scale: float
    """Size of the batch's scores, by `score_scale`."""
    entropy_coef: float
    """Weight of the entropy bonus; 0: there is none."""
    reference: Tensor | None
    """[M] log pi_ref where the KL to it is a term of the loss."""
    hinted: Hinted | None
    places: Tensor | None = None
    """`Echoed.places`; None: the tokens that are computed are those that are trained."""
    echo: Tensor | None = None
    """[2, L] weights of the cross-entropy stream, and of the mean that is reported."""


@dataclass(slots=True, kw_only=True)
class Progress:
    """What a policy has beside its weights."""

    optimizer: torch.optim.AdamW
    kl: KLCoefficient
    bonus: EntropyCoefficient
    shards: WeightShards
    """Writes its versions."""
    history: dict[int, fsdp.Shards] = field(default_factory=dict)
    """Its earlier weights, by version."""
    reference: fsdp.Shards | None = None
    steps: int = 0
    """Steps that it was trained in."""


class Trainer:
    """`address` (host:port) is where the ranks meet. `keep_versions` = max_policy_lag + 1: tokens of older versions are not
    trained; so many versions can be checked, and no more than `most_checked`. `replay_lag`: the oldest of stored groups.
    `longest_row`: tokens of a row, at most."""

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
        longest_row: int = LONGEST,
        replay_lag: int | None = None,
        most_checked: int = sys.maxsize,
        trust_remote_code: bool = False,
    ) -> None:
        self._config = config
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._temperature = temperature
        self._seed = seed
        self._keep_versions = keep_versions
        self._replay_lag = keep_versions - 1 if replay_lag is None else replay_lag
        self._num_checked = min(keep_versions, most_checked)
        self._rank = rank
        self._world_size = world_size
        self._device = torch.device(device)
        self._estimator = ESTIMATORS[config.advantage]
        if self._device.type == "cpu" and config.threads is not None:
            torch.set_num_threads(config.threads)
        if self._device.type == "cpu" and (world_size > 1 or config.gradient_checkpointing or config.lora.rank):
            fsdp.return_large_blocks()
        self._mesh = fsdp.join(address, rank=rank, world_size=world_size, device=self._device)
        critic = config.critic if self._estimator.needs_critic else "none"
        self._adapter: LoraConfig | None = None
        self._trust = {"trust_remote_code": trust_remote_code}
        self._tokenizer = AutoTokenizer.from_pretrained(model_path, **self._trust)
        self._sayings = (
            Sayings(self._tokenizer, roles=config.echo.roles) if config.echo.roles or config.hints.coef else None
        )
        self._source = model_path
        self._longest_row = longest_row
        self._layouts: dict[str, Layout] = {}
        """Folder of a model -> how its rows are laid out."""
        self._policy = self._load(model_path, value_head=critic == "shared")
        self._policy.routing.use(replay=config.router_replay, balance=config.router_aux_coef > 0.0)
        self._own = self._progress()
        self._critic = self._load(model_path, value_head=True) if critic == "separate" else None
        self._critic_optimizer = (
            self._adamw(self._critic, lr=config.critic_lr, grows=True) if self._critic is not None else None
        )
        self._teacher = self._load_teacher(config.teacher.path) if config.teacher.path else None
        self._work = Work.of(self._policy.lm)
        self._rate = matmul_rate(device=device, dtype=dtype) * world_size
        self._token_figures: TokenFigures | None = None
        self._sft: SftUpdates | None = None
        """While an SFT stage is under way."""

    def begin_sft(self) -> None:
        """An SFT stage begins, before the first step: until `end_sft`, `save` and `load` are of its policy and optimizer."""
        self._sft = SftUpdates(
            self._policy, layout=self.layout, config=self._config, rank=self._rank, world_size=self._world_size,
            device=self._device,
        )  # fmt: skip

    def sft_step(self, rows: Sequence[SftRow], *, lr: float) -> dict[str, float]:
        """See `SftUpdates.step`."""
        assert self._sft is not None, "begin_sft() first"
        return self._sft.step(rows, lr=lr)

    def sft_loss(self, rows: Sequence[SftRow]) -> tuple[float, float]:
        """See `SftUpdates.loss`."""
        assert self._sft is not None, "begin_sft() first"
        return self._sft.loss(rows)

    def end_sft(self) -> None:
        """What was learned stays, the optimizer goes; a separate critic starts from the same weights."""
        self._sft = None
        if self._critic is not None:
            fsdp.load_shards(self._critic.lm, shards=fsdp.clone_shards(self._policy.lm))

    def train_step(
        self, batch: TrainBatch, *, version: int, pace: float = 1.0, has_gone_back: bool = False
    ) -> dict[str, float]:
        """One step on a batch. `version` is that of the weights before it (0 after SFT), `pace` the share of the learning rate.
        `has_gone_back`: those weights were taken back, so what they sampled cannot be computed again.

        Raises ValueError, before any change, for a batch with a score or log-probability that is not finite.
        """
        started = time.monotonic()
        config = self._config
        table = token_table(
            batch,
            min_version=version - self._keep_versions + 1,
            min_stored=version - self._replay_lag,
            mask_truncated=config.mask_truncated,
        )
        table = self._with_words(table, rows=trained_rows(batch))
        table = replace(table, sequences=self._laid_out(table.sequences, table=table))
        if (config.kl.coef > 0.0 or config.hints.coef > 0.0) and self._own.reference is None:
            self._own.reference = self._kept_weights()
        self._policy.routing.agreed.zero_()
        minibatches = Minibatches(table, config=config, rng=np.random.default_rng((self._seed, self._own.steps)))
        rows = range(len(table.loss_weights)) if self._looks_ahead else minibatches.later
        logprobs, entropy, values, energy = self._sweep(table.sequences, critic=True, rows=rows)
        agreed, told = fsdp.all_sum(self._policy.routing.agreed.to(self._device)).tolist()
        before = Before(logprobs, entropy, values, energy, self._hinted(table))
        recomputed, checked = self._recomputed(table, version=version)
        self._token_figures = TokenFigures(
            learner=recomputed.numpy(),
            start=before.logprobs.numpy(),
            advantage=np.full(len(recomputed), np.nan, np.float32),
            weighed=table.fresh.numpy().astype(np.uint8),
        )
        if config.check_logprobs and not has_gone_back:
            self._remember(version)
        prepared = time.monotonic()
        metrics: dict[str, float] = {}
        if bool(table.fresh.any()):  # else all answers were cut, and left out
            metrics |= self._learn(table, before=before, minibatches=minibatches, pace=pace)
        present = (table.versions == version) & table.verifiable & (not has_gone_back)
        recomputed[present] = before.logprobs[present]
        if config.check_logprobs:
            checked |= present
            difference = (recomputed - table.behaviour)[checked].abs()
            metrics |= {
                "policy/max_logprob_diff": float(difference.max()) if len(difference) else 0.0,
                "policy/mean_logprob_diff": float(difference.mean()) if len(difference) else 0.0,
                "policy/checked_share": float(checked[~table.stored].float().mean()),
            }
        self._own.steps += 1
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # of what the step has used, for an engine on this card that wakes up
        give_memory_back()
        lags = (version - table.versions)[~table.stored].float()
        return metrics | {
            "policy/lag_mean": float(lags[lags < self._keep_versions].mean()),
            "policy/lag_max": float(lags[lags < self._keep_versions].max()),
            "policy/too_old_share": float((lags >= self._keep_versions).float().mean()),
            **({"policy/hinted_share": _share(table.hints)} if config.hints.coef else {}),
            **({"policy/router_agreement": agreed / max(told, 1.0)} if config.router_replay else {}),
            "policy/truncated_share": float(table.truncated.float().mean()),
            "learner/tokens": float(table.sequences.lengths.sum()),
            "learner/raw_over_unique": table.sequences.raw_over_unique,
            "learner/trained_tokens": float(table.sequences.num_trained),
            **({} if table.echoed is None else {"learner/echo_tokens": float(table.echoed.tokens.counted.sum())}),
            "time/prepare_s": prepared - started,
            "time/train_s": time.monotonic() - started,
        }

    def token_figures(self) -> TokenFigures | None:
        """The figures of the last step's tokens, on rank 0: all ranks have the same. They are given once."""
        figures, self._token_figures = self._token_figures, None
        return figures if self._rank == 0 else None

    @property
    def _looks_ahead(self) -> bool:
        """Whether what is learned from the first mini-batch needs more of the policy before the step than that mini-batch's own
        pass computes."""
        config, estimator = self._config, self._estimator
        return (
            estimator.needs_critic
            or estimator.needs_energy
            or self._teacher is not None
            or (config.kl.coef > 0.0 and config.kl.in_reward)
            or self._own.bonus.is_adaptive
            or config.loss in ("clip_cov", "kl_cov")
            or config.router_replay
        )

    def _with_words(self, table: BatchTensors, *, rows: Sequence[Row]) -> BatchTensors:
        """The table with the rows' hints, and what ECHO learns of them."""
        config, sayings = self._config, self._sayings
        if sayings is not None and config.hints.coef:
            hints = hints_of(rows, sources=config.hints.sources, sayings=sayings, tokenizer=self._tokenizer)
            table = replace(table, hints=hints)
        if sayings is not None and config.echo.roles:
            echoed = echo_of(table.sequences, sayings=sayings, coefs=config.echo.model_dump())
            sequences = self._laid_out(echoed.sequences, table=table)
            table = replace(table, echoed=replace(echoed, sequences=sequences))
        return table

    def _hinted(self, table: BatchTensors) -> Hinted | None:
        """None: no row has a hint. It is the reference that reads: a policy that learns all the while forgets how to."""
        if not any(table.hints) or self._own.reference is None:
            return None
        sequences = hinted_sequences(table.sequences, hints=table.hints, tokenizer=self._tokenizer)
        num = min(CHOICES, int(self._policy.lm.config.get_text_config().vocab_size))

        def compute(micro: MicroBatch) -> Tensor:
            outputs = self._forward(micro, likeliest=num)
            assert outputs.ids is not None and outputs.choices is not None
            return torch.cat([outputs.ids.float(), outputs.choices], dim=1).T  # ids are exact: below 2^24

        rows = [row for row, hint in enumerate(table.hints) if hint]
        sequences = self._laid_out(sequences, table=table)
        with fsdp.swapped(self._policy, shards=self._own.reference):
            found = self._without_gradient(sequences, compute=compute, num=2 * num, rows=rows)
        known = torch.tensor([hint is not None for hint in table.hints])[table.rows]
        return Hinted(found[:num].T.long(), found[num:].T, known)

    def _learn(
        self, table: BatchTensors, *, before: Before, minibatches: Minibatches, pace: float = 1.0
    ) -> dict[str, float]:
        """The updates on a batch, and what moves with them: the coefficients of KL and entropy. What `before` does not have yet of
        the first mini-batch is written into it."""
        shares = table.weights(range(len(table.loss_weights)), mode="token-mean")
        entropy = float((shares * before.entropy).sum())
        plan, kl_taken = self._goals(table, shares=shares, before=before, entropy=entropy)
        began = time.monotonic()
        metrics = self._update(table, goals=plan, minibatches=minibatches, before=before, pace=pace) | kl_taken
        entropy = float((shares * before.entropy).sum())
        metrics["policy/entropy"] = entropy
        metrics |= self._of_stored(table, targets=plan.targets)
        flops = self._useful_flops(table.sequences) * (1.0 + 2.0 * metrics["learner/backward_share"]) / 3.0
        metrics["learner/mfu"] = flops / (time.monotonic() - began) / self._rate
        if self._config.kl.coef > 0.0:
            metrics["policy/kl_coef"] = self._own.kl.value
            self._own.kl.update(metrics["policy/kl_ref"], num_episodes=len(np.unique(table.episodes)))
        if self._own.bonus.is_adaptive:
            metrics["policy/entropy_coef"] = plan.entropy_coef
            self._own.bonus.update(entropy)
        if self._estimator.needs_critic:
            returns = plan.targets.returns.cpu()
            metrics["critic/explained_variance"] = explained_variance(before.values, returns=returns)
            metrics["critic/value_mean"] = float(before.values.mean())
        return metrics

    def _of_stored(self, table: BatchTensors, *, targets: Targets) -> dict[str, float]:
        """How far the policy is from what sampled the stored groups, and how much of them moves it."""
        if not bool(table.stored.any()):
            return {}
        ratios = (targets.proximal - targets.behaviour).cpu()[table.stored & table.fresh]
        return {
            "replay/ratio_mean": float(ratios.clamp(max=LOG_RATIO_LIMIT).exp().mean()) if len(ratios) else 0.0,
            "replay/counted_share": float(counting(targets, config=self._config).cpu()[table.stored].float().mean()),
        }

    def _useful_flops(self, sequences: Sequences) -> float:
        """What the updates of a step ask for: the policy's forward and backward passes, and a separate critic's. What rows share
        counts once."""
        tokens, squares = sequences.computed
        passes = self._config.epochs * (1 if self._critic is None else 2)
        return passes * self._work.update_flops(tokens=tokens, squares=squares, trained=sequences.num_trained)

    def probe_prompt(self) -> list[int]:
        """Tokens after which engines are asked to sample (`learner.agreement`): more than any window or chunk of the model has."""
        config, rng = self._policy.lm.config, np.random.default_rng(self._own.steps)
        length = min(reach_of(config) + PROBE_BEYOND, max(1, self._longest_row * 3 // 4))
        prompt: list[int] = rng.choice(plain_tokens(config), length).tolist()
        return prompt

    def logprobs_of(self, ids: Sequence[int], *, last: int) -> list[float]:
        """Log-probabilities of the last tokens of a row. All ranks call this."""
        return self.replayed(ids, last=last, experts=None)[0]

    def replayed(self, ids: Sequence[int], *, last: int, experts: UInt16 | None) -> tuple[list[float], float]:
        """The same with an engine's experts, and the share of places at which the routers would choose them."""
        mask = np.arange(len(ids)) >= len(ids) - last
        row = Sequences([np.array(ids, dtype=np.int32)], masks=[mask.astype(np.uint8)], experts=[experts])
        self._policy.routing.agreed.zero_()
        logprobs = self._sweep(row if self.layout.packs else PaddedSequences(row), critic=False)[0]
        agreed, told = fsdp.all_sum(self._policy.routing.agreed.to(self._device)).tolist()
        return logprobs.tolist(), agreed / max(told, 1.0)

    def drift(self, answers: Sequence[tuple[Sequence[int], Sequence[int]]]) -> float:
        """Mean log-probability of the tokens of some rows (ids, mask) over that in the model without its adapter, in nats: the KL
        from it where the policy has sampled them. All ranks call this."""
        rows = Sequences(
            [np.array(ids, dtype=np.int32) for ids, _ in answers],
            masks=[np.array(mask, dtype=np.uint8) for _, mask in answers],
        )
        given = rows if self.layout.packs else PaddedSequences(rows)
        logprobs = self._sweep(given, critic=False)[0]
        with without_adapter(self._policy.lm):
            base = self._sweep(given, critic=False)[0]
        return float((logprobs - base).mean())

    def layer_states(self, ids: Sequence[int]) -> list[bytes]:
        """[layers] of [hidden] float32: the state of the row's last token behind each layer. All ranks call this."""
        states: list[bytes] = []

        def keep(layer: object, given: object, answer: Any) -> None:
            state = answer[0] if isinstance(answer, tuple) else answer
            rows = state.reshape(-1, *state.shape[-2:])  # Gemma 3n has several predictions of a state; the first counts
            states.append(rows[0, len(ids) - 1].float().cpu().numpy().tobytes())

        hooks = [layer.register_forward_hook(keep) for layer in layers_of(self._policy.lm.get_decoder())]
        try:
            self.logprobs_of([*ids, ids[-1]], last=1)
        finally:
            for hook in hooks:
                hook.remove()
        return states

    def publish(self, folder: Path, *, base: str | None = None) -> Published:
        """Writes this rank's part of what engines need, in the model's dtype, into `folder`: a version's scratch folder
        (`buffers.weights.store`). All ranks call this. `base`: the version that patches may be against. With an adapter that
        is all that is written."""
        folder.mkdir(parents=True, exist_ok=True)  # on another node than the store's it is not there
        return self._own.shards.publish(folder, base=base)

    def written(self, method: str, folder: Path) -> str:
        """Calls `save` or `save_pretrained`; why the disk did not take what this rank wrote, empty where it did. All ranks call
        this."""
        try:
            getattr(self, method)(folder)
        except (OSError, StorageFull, SafetensorError) as error:
            if why := why_refused(error):
                return why
            raise
        return ""

    def save_pretrained(self, folder: Path) -> None:
        """Writes a Hugging Face folder (and `critic/value_head.safetensors`). All ranks call this; rank 0 writes."""
        writer = self._rank == 0
        critic = self._critic or self._policy
        weights = self._weights()
        # the head's own names, as seen from its root: a module inside an FSDP root is gathered the same way
        head = (
            weight_shards.gather(critic.value_head, dtype=torch.float32, keep=writer)
            if critic.value_head is not None
            else {}
        )
        adapter = (
            None
            if self._adapter is None
            else weight_shards.gather_adapter(self._policy.lm, config=self._adapter, keep=writer)
        )
        if writer:
            weight_shards.write_folder(
                folder,
                source=Path(self._source),
                weights=weights,
                value_head=head,
                adapters={} if adapter is None else {ADAPTER: adapter},
                dtype=self._dtype,
            )

    def save(self, folder: Path) -> None:
        """Writes all that `load` needs to resume bit for bit. All ranks call this."""
        copies = {str(version): shards for version, shards in self._own.history.items()}
        if self._own.reference is not None:
            copies[REFERENCE] = self._own.reference
        training_state.save(
            folder,
            learned=self._learned(),
            copies=copies,
            steps=self._own.steps,
            kl_coef=self._own.kl.value if self._own.kl.is_adaptive else None,
            entropy_coef=self._own.bonus.value if self._own.bonus.is_adaptive else None,
            rank=self._rank,
        )

    def load(self, folder: Path) -> None:
        """Resumes from what `save` wrote, on any number of ranks. All ranks call this. Raises ValueError, before any change,
        for a checkpoint of another shape."""
        counters, copies = training_state.load(
            folder, learned=self._learned(), like=self._kept_weights(), rank=self._rank
        )
        reference = copies.pop(REFERENCE, None)
        self._own.reference = reference if self._config.kl.coef > 0.0 or self._config.hints.coef > 0.0 else None
        self._own.history = {int(old): shards for old, shards in copies.items()} if self._config.check_logprobs else {}
        self._own.steps = counters.steps
        if counters.kl_coef is not None and self._own.kl.is_adaptive:
            self._own.kl.value = counters.kl_coef
        if counters.entropy_coef is not None and self._own.bonus.is_adaptive:
            self._own.bonus.value = counters.entropy_coef

    def _learned(self) -> dict[str, training_state.Learned]:
        if self._sft is not None:
            return {"policy": training_state.Learned(module=self._policy, optimizer=self._sft.optimizer)}
        learned = {"policy": training_state.Learned(module=self._policy, optimizer=self._own.optimizer)}
        if self._critic is not None and self._critic_optimizer is not None:
            learned["critic"] = training_state.Learned(module=self._critic, optimizer=self._critic_optimizer)
        return learned

    def _weights(self) -> dict[str, Tensor]:
        """The policy's whole weights on rank 0, an adapter merged into them."""
        lora = self._config.lora
        scaling = lora.alpha / lora.rank if lora.rank else 1.0
        return weight_shards.gather_policy(self._policy, dtype=self._dtype, keep=self._rank == 0, scaling=scaling)

    def close(self) -> None:
        """Leaves the process group."""
        fsdp.leave()

    @property
    def layout(self) -> Layout:
        """How the policy's rows are laid out."""
        return self._layouts[self._source]

    def layout_line(self) -> str:
        """How rows of this model are computed, and what speaks against another way, for people."""
        return self.layout.why

    def _load(self, folder: str, *, value_head: bool) -> Policy:
        return self._with_layout(folder, value_head=value_head, prepare=self._prepare)

    def _with_layout(self, folder: str, *, value_head: bool, prepare: Callable[[Policy], None]) -> Policy:
        """The folder's model, once it is known how its rows are laid out, which shows in float32 only."""
        if folder not in self._layouts:
            trial = load_policy(folder, device=self._device, prepare=self._shard_plainly, **self._trust)
            self._layouts[folder] = choose_layout(trial, shares=self._config.prefix_tree, longest_row=self._longest_row)
            del trial
            gc.collect()  # it is in cycles
            if self._layouts[folder].packs and self._dtype != torch.float32:
                check_kernel(AutoConfig.from_pretrained(folder, **self._trust), device=self._device, dtype=self._dtype)
        policy = load_policy(folder, value_head=value_head, device=self._device, prepare=prepare, **self._trust)
        policy.attention = self._layouts[folder].attention
        return policy

    def _shard_plainly(self, policy: Policy) -> None:
        policy.checkpoint_layers()  # rows beyond a window are long, and float32 is twice as large
        fsdp.shard(policy, layers=policy.layers, mesh=self._mesh, dtype=torch.float32)

    def _prepare(self, policy: Policy) -> None:
        """Makes of a plain model what is trained, on this rank: before it has weights."""
        if (lora := self._config.lora).rank:
            self._adapter = add_adapter(policy.lm, rank=lora.rank, alpha=lora.alpha, seed=self._seed)
        self._round_as_engine(policy)
        if self._config.gradient_checkpointing:
            policy.checkpoint_layers()
        fsdp.shard(policy, layers=policy.layers, mesh=self._mesh, dtype=self._dtype)

    def _round_as_engine(self, policy: Policy) -> None:
        """On a CPU, where it was measured against vLLM's kernels. It takes float32 states between layers."""
        if self._dtype != torch.float32 and self._device.type == "cpu":
            round_as_engine(policy.lm)

    def _load_teacher(self, folder: str) -> Policy:
        """A frozen model, sharded as the policy is."""
        teachers = AutoTokenizer.from_pretrained(folder, **self._trust)
        check_same_vocabulary(self._tokenizer, teachers, key="learner.teacher.path", folder=folder)

        def prepare(teacher: Policy) -> None:
            teacher.requires_grad_(False)
            self._round_as_engine(teacher)
            fsdp.shard(teacher, layers=teacher.layers, mesh=self._mesh, dtype=self._dtype)

        return self._with_layout(folder, value_head=False, prepare=prepare)

    def _taught(self, table: BatchTensors) -> Tensor:
        """[M] the teacher's log-probabilities of the trained tokens."""
        teacher = self._teacher
        assert teacher is not None

        def compute(micro: MicroBatch) -> tuple[Tensor]:
            return (teacher(micro, temperature=self._temperature).logprobs,)

        sequences = table.sequences
        if self._layouts[self._config.teacher.path] != self.layout:
            sequences = self._laid_out(sequences, table=table, layout=self._layouts[self._config.teacher.path])
        return self._without_gradient(sequences, compute=compute, num=1)[0]

    def _progress(self) -> Progress:
        """That of a policy before its first step."""
        config, entropy = self._config, self._config.adaptive_entropy
        return Progress(
            optimizer=self._adamw(self._policy, lr=config.lr, grows=self._estimator.in_scores),
            kl=KLCoefficient(config.kl.coef, target=config.kl.target, horizon=config.kl.horizon),
            bonus=EntropyCoefficient(config.entropy_coef, target=entropy.target, step=entropy.step, most=entropy.most),
            shards=WeightShards(
                self._policy, dtype=self._dtype, rank=self._rank, world_size=self._world_size, adapter=self._adapter
            ),
        )

    def _adamw(self, policy: Policy, *, lr: float, grows: bool) -> torch.optim.AdamW:
        """`peak_lr` is reached after the warm-up. A value head learns faster: at the policy's rate it lags for 20 steps; and in
        proportion to the scores' size: Adam's steps do not grow with them, and values of 100 would be far. `grows`: gradients
        grow with the scores, so what is too small to count does too."""
        groups = [{"params": fsdp.trained(policy.lm), "peak_lr": lr, "rate_grows": False, "eps_grows": grows}]
        if policy.value_head is not None:
            head = list(policy.value_head.parameters())
            groups.append({"params": head, "peak_lr": VALUE_HEAD_LR_RATIO * lr, "rate_grows": True, "eps_grows": False})
        return make_adamw(groups, lr=lr, moments_on_host=self._config.offload)

    def _sweep(self, sequences: Sequences, *, critic: bool, rows: Sequence[int] | None = None) -> Tensor:
        """[4, M] log-probabilities, entropies, values and energies of the trained tokens, no gradient; 0 outside of `rows`, and
        where the estimator needs none."""

        def compute(micro: MicroBatch) -> tuple[Tensor | None, ...]:
            outputs = self._forward(micro)
            values = self._values(micro, shared=outputs.values) if critic else None
            return outputs.logprobs, outputs.entropy, values, outputs.energy

        return self._without_gradient(sequences, compute=compute, num=4, rows=rows)

    def _without_gradient(
        self,
        sequences: Sequences,
        *,
        compute: Callable[[MicroBatch], Sequence[Tensor | None]],
        num: int,
        rows: Sequence[int] | None = None,
    ) -> Tensor:
        """[num, M] what `compute` finds of the trained tokens, of all ranks; 0 for None and outside of `rows`."""
        found = torch.zeros(num, sequences.num_trained, device=self._device)
        chosen = range(len(sequences.ids)) if rows is None else rows
        for piles in self._plan(sequences, rows=chosen) if len(chosen) else ():
            micro = sequences.micro_batch(piles[self._rank], device=self._device)
            with torch.no_grad():
                columns = compute(micro)
            for column, values in enumerate(columns):
                if values is not None:
                    found[column, micro.index] = values
        return fsdp.all_sum(found).cpu()

    def _forward(self, micro: MicroBatch, **options: Any) -> TokenOutputs:
        outputs: TokenOutputs = self._policy(micro, temperature=self._temperature, **options)
        return outputs

    def _values(self, micro: MicroBatch, *, shared: Tensor | None) -> Tensor | None:
        """The separate critic's values, or else the policy's own (None: no critic)."""
        if self._critic is None:
            return shared
        values: Tensor = self._critic(micro, temperature=None).values
        return values

    def _plan(self, sequences: Sequences, *, rows: Sequence[int]) -> list[list[list[int]]]:
        return sequences.plan(rows, num_ranks=self._world_size, token_budget=self._config.token_budget)

    def _laid_out(self, sequences: Sequences, *, table: BatchTensors, layout: Layout | None = None) -> Sequences:
        """The same rows as the policy takes them, what they share computed once where that pays."""
        return (layout or self.layout).lay_out(
            sequences,
            groups=_row_groups(table),
            num_ranks=self._world_size,
            token_budget=self._config.token_budget,
        )

    def _kept_weights(self) -> fsdp.Shards:
        """A copy of what is trained, for a later pass. Passes round weights to the model's dtype, in which they were published too:
        in that dtype such a copy gives the same numbers to the bit."""
        return fsdp.clone_shards(self._policy, dtype=self._dtype, device=self._place)

    @property
    def _place(self) -> torch.device | None:
        """The device where copies of weights are kept; None: their own."""
        return torch.device("cpu") if self._config.keep_on == "host" else None

    def _remember(self, version: int) -> None:
        """Keeps these weights for the steps in which they will be an older version; those that are too old go first."""
        for old in [old for old in self._own.history if old <= version - self._num_checked + 1]:
            del self._own.history[old]
        if self._keep_versions > 1:
            self._own.history[version] = self._kept_weights()

    def _recomputed(self, table: BatchTensors, *, version: int) -> tuple[Tensor, Tensor]:
        """[M] log-probabilities under the older version that sampled each token, of a share of the rows, where that version is
        still kept, nan elsewhere; and [M] whether."""
        answers = torch.full_like(table.behaviour, torch.nan)
        checked = torch.zeros_like(table.fresh)
        if not self._config.check_logprobs:
            return answers, checked
        picked = torch.from_numpy(self._rows_to_check(len(table.sequences.ids)))
        owners = np.repeat(np.arange(len(table.sequences.ids)), table.sequences.counts)
        for old, shards in self._own.history.items():
            own = (table.versions == old) & (old != version) & table.verifiable & picked[owners] & ~table.stored
            if not bool(own.any()):
                continue
            with fsdp.swapped(self._policy, shards=shards):
                rows = np.unique(owners[own.numpy()]).tolist()
                answers[own] = self._sweep(table.sequences, critic=False, rows=rows)[0][own]
            checked |= own
        return answers, checked

    def _rows_to_check(self, num_rows: int) -> np.ndarray:
        """[num_rows] true where a row is computed again under older versions; drawn anew in each step, alike on all ranks."""
        rng = np.random.default_rng((self._seed, self._own.steps, num_rows))
        picked = np.zeros(num_rows, dtype=bool)
        picked[rng.permutation(num_rows)[: math.ceil(self._config.check_logprobs * num_rows)]] = True
        return picked

    def _goals(
        self, table: BatchTensors, *, shares: Tensor, before: Before, entropy: float
    ) -> tuple[Goals, dict[str, float]]:
        """What the updates aim at, and the mean KL if it was taken off the rewards."""
        reference, rewards, metrics = None, table.rewards, {}
        if self._own.reference is not None and self._config.kl.coef > 0.0:
            with fsdp.swapped(self._policy, shards=self._own.reference):
                reference = self._sweep(table.sequences, critic=False)[0]
            if self._config.kl.in_reward:
                kl = kl_estimate(before.logprobs, reference=reference, kind=self._config.kl.kind)
                rewards = rewards - self._own.kl.value * kl
                metrics["policy/kl_ref"] = float((shares * kl).sum())
        evidence = self._evidence(table, shares=shares, before=before, rewards=rewards)
        estimate = self._estimator.compute(evidence)
        advantages = estimate.advantages[table.slots]
        if self._teacher is not None:
            taught = self._taught(table)
            told = teacher_advantages(before.logprobs, teacher=taught, coef=self._config.teacher.coef)
            advantages = advantages + torch.where(table.fresh, told, 0.0)
            metrics["policy/kl_teacher"] = float((shares * (before.logprobs - taught)).sum())
        if self._token_figures is not None:
            self._token_figures = replace(self._token_figures, advantage=advantages.float().numpy())
        targets = Targets(
            behaviour=table.behaviour,
            proximal=before.logprobs,
            advantages=advantages,
            returns=estimate.returns[table.slots],
            values=before.values,
            sequences=table.rows,
            weights=shares,
            shares=shares,
            picked=torch.zeros_like(table.fresh),
        )
        return Goals(
            targets=targets.to(self._device),
            scale=evidence.scale,
            entropy_coef=self._own.bonus.in_force(entropy),
            reference=None if reference is None or self._config.kl.in_reward else reference.to(self._device),
            hinted=before.hinted,
        ), metrics

    def _evidence(self, table: BatchTensors, *, shares: Tensor, before: Before, rewards: Tensor) -> AdvantageInputs:
        """What the estimator looks at. The scores' size is that of what was scored, without a KL penalty."""
        evidence = AdvantageInputs(
            scores=table.scores,
            groups=table.groups,
            units=table.units,
            mask=table.slots,
            rewards=table.padded(table.rewards),
            discounts=table.padded(torch.where(table.ends, self._config.gamma, 1.0)),
            weights=table.padded(shares),
            values=table.padded(before.values),
            lam=self._config.lam,
            scale=1.0,
            min_deviation=self._config.min_deviation,
            baselines=table.baselines,
            earlier=table.earlier,
            judges=table.judges,
            roles=table.roles,
            energy=table.padded(before.energy) if self._estimator.needs_energy else None,
        )
        scale = score_scale(unit_returns(evidence), values=before.values)
        evidence = replace(evidence, scale=scale, rewards=table.padded(rewards))
        fits = self._estimator.needs_critic and self._config.calibrate_values
        return calibrated_evidence(evidence) if fits else evidence

    def _update(
        self, table: BatchTensors, *, goals: Goals, minibatches: Minibatches, before: Before, pace: float
    ) -> dict[str, float]:
        """Epochs times mini-batches optimizer updates. The first tells what is not in `before` yet."""
        config = self._config
        rate = pace * min(1.0, (self._own.steps + 1) / (config.lr_warmup_steps + 1))
        for optimizer in filter(None, (self._own.optimizer, self._critic_optimizer)):
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * rate * (goals.scale if group["rate_grows"] else 1.0)
                group["eps"] = EPS * (goals.scale if group["eps_grows"] else 1.0)
        step_metrics = StepMetrics()
        sequences = table.sequences if table.echoed is None else table.echoed.sequences
        unknown = None if self._looks_ahead else torch.zeros(2, table.sequences.num_trained, device=self._device)
        for rows in minibatches:
            goals = self._weighed(goals, table=table, rows=rows)
            picked = self._pick(goals.targets, seed=int(minibatches.rng.integers(2**31)))
            goals = replace(goals, targets=replace(goals.targets, picked=picked))
            self._update_once(sequences, goals=goals, rows=rows, step_metrics=step_metrics, unknown=unknown)
            if unknown is not None:
                places = table.sequences.places(rows)
                own = fsdp.all_sum(unknown).cpu()[:, places]
                before.logprobs[places], before.entropy[places] = own
                goals.targets.proximal[places.to(self._device)] = own[0].to(self._device)
                unknown = None
        return step_metrics.metrics() | {"learner/lr": config.lr * rate}

    def _weighed(self, goals: Goals, *, table: BatchTensors, rows: Sequence[int]) -> Goals:
        """The goals with the weights of a mini-batch of these rows: the one place where each signal gets its weights."""
        config = self._config
        weights = table.weights(rows, mode=config.aggregation, norm=config.loss_norm).to(self._device)
        shares = table.weights(rows, mode="token-mean").to(self._device)
        guides = {}
        if goals.reference is not None:
            guides["policy/kl_ref"] = Guide(
                kind=config.kl.kind, logprobs=goals.reference, weights=self._own.kl.value * weights, shares=shares
            )
        if (hinted := goals.hinted) is not None:
            means = table.weights(rows, mode="token-mean", of=Tokens(table.rows, table.fresh & hinted.known))
            means = means.to(self._device)
            guides["policy/kl_hinted"] = Guide(
                ids=hinted.ids.to(self._device),
                logprobs=hinted.logprobs.to(self._device),
                weights=config.hints.coef * means,
                shares=means,
            )
        goals = replace(goals, targets=replace(goals.targets, weights=weights, shares=shares, guides=guides))
        if (echoed := table.echoed) is None:
            return goals
        means = table.weights(rows, mode="token-mean", of=echoed.tokens)
        echo = torch.stack([echoed.coef * means, means]).to(self._device)
        return replace(goals, places=echoed.places.to(self._device), echo=echo)

    def _pick(self, targets: Targets, *, seed: int) -> Tensor:
        """[M] the tokens that the loss treats apart by their covariance under the policy before the step; equal on all ranks."""
        cov = self._config.cov
        if self._config.loss not in ("clip_cov", "kl_cov"):
            return targets.picked
        covariance = covariances(targets.proximal, advantages=targets.advantages, shares=targets.shares).cpu()
        if self._config.loss == "kl_cov":
            return pick_kl_cov(covariance, share=cov.share).to(self._device)
        generator = torch.Generator().manual_seed(seed)
        picked = pick_clip_cov(covariance, share=cov.share, low=cov.low, high=cov.high, generator=generator)
        return picked.to(self._device)

    def _update_once(
        self,
        sequences: Sequences,
        *,
        goals: Goals,
        rows: Sequence[int],
        step_metrics: StepMetrics,
        unknown: Tensor | None,
    ) -> None:
        """`unknown` [2, M]: takes log-probabilities and entropies of the rows, which are those before the step; None: known."""
        moving = self._moving(rows, goals=goals)
        others = sorted(set(rows) - set(moving))
        plans = [(True, self._plan(sequences, rows=moving))]
        plans += [(False, self._plan(sequences, rows=others))] if others else []
        for learns, piles in ((learns, piles) for learns, plan in plans for piles in plan):
            micro = sequences.micro_batch(piles[self._rank], device=self._device)
            with torch.set_grad_enabled(learns):
                loss = self._loss(micro, goals=goals, unknown=unknown)
            if learns:
                (loss.total * self._world_size).backward()  # FSDP averages over ranks; the sum is wanted
            step_metrics.add(means=loss.means, maxima=loss.maxima)
        share = sequences.lengths[moving].sum() / sequences.lengths[rows].sum() / self._world_size
        step_metrics.add(means={"learner/backward_share": torch.tensor(float(share), device=self._device)}, maxima={})
        clip = self._config.grad_clip
        own_clip = clip * goals.scale if self._estimator.in_scores else clip
        norm = self._step(self._policy, optimizer=self._own.optimizer, clip=own_clip)
        critic_norm = 0.0
        if self._critic is not None and self._critic_optimizer is not None:
            # behind a head that grows with the scores, so does the gradient of what it sits on
            critic_norm = self._step(self._critic, optimizer=self._critic_optimizer, clip=clip * goals.scale)
        step_metrics.end_update(norm, critic=critic_norm)

    def _moving(self, rows: Sequence[int], *, goals: Goals) -> list[int]:
        """The rows that have a gradient, as those of a group with equal scores have none; all of them where something else than
        advantages may give one, and where none has: moments move weights too."""
        targets = goals.targets
        has_more = goals.entropy_coef > 0.0 or self._estimator.needs_critic or self._config.router_aux_coef > 0.0
        if has_more or targets.guides or goals.echo is not None:
            return list(rows)
        moves = (targets.weights != 0.0) & ((targets.advantages != 0.0) | targets.picked)
        moving = set(targets.sequences[moves].tolist())
        return [row for row in rows if row in moving] or list(rows)

    def _step(self, policy: Policy, *, optimizer: torch.optim.Optimizer, clip: float) -> float:
        head = () if policy.value_head is None else tuple(policy.value_head.parameters())
        return fsdp.update(policy, optimizer=optimizer, clip=clip, apart=head, apart_clip=self._config.grad_clip)

    def _loss(self, micro: MicroBatch, *, goals: Goals, unknown: Tensor | None) -> Loss:
        config = self._config
        has_bonus = goals.entropy_coef > 0.0
        places = micro.index if goals.places is None else goals.places[micro.index]
        sampled = places >= 0
        targets = goals.targets.take(index := places[sampled])
        everything = self._forward(
            micro,
            ids=next((guide.ids[places] for guide in goals.targets.guides.values() if guide.ids is not None), None),
        )
        outputs = everything.of(sampled)
        if unknown is not None:
            assert outputs.logprobs is not None and outputs.entropy is not None
            present = outputs.logprobs.detach()
            unknown[0, index], unknown[1, index] = present, outputs.entropy.detach()
            targets = replace(targets, proximal=present)
        loss = actor_loss(
            outputs.logprobs,
            entropy=outputs.entropy if has_bonus else None,
            values=outputs.values,
            targets=targets,
            config=config,
            entropy_coef=goals.entropy_coef,
            scale=goals.scale,
            choices=outputs.choices,
        )
        if goals.echo is not None:
            echo, mean = (cross_entropy(everything.logprobs, weights=each) for each in goals.echo[:, micro.index])
            loss = replace(loss, total=loss.total + echo, means=loss.means | {"policy/echo_loss": mean.detach()})
        if outputs.balance is not None:
            balance = outputs.balance * targets.shares.sum()  # as much as the micro-batch has of the trained tokens
            means = loss.means | {"policy/router_aux_loss": balance.detach()}
            loss = replace(loss, total=loss.total + config.router_aux_coef * balance, means=means)
        if self._critic is None:
            return loss
        values = self._values(micro, shared=None)
        assert values is not None
        critic = value_loss(values[sampled], targets=targets, clip=config.value_clip * goals.scale)
        total = loss.total + critic / goals.scale
        return replace(loss, total=total, means=loss.means | {"critic/vf_loss": critic.detach()})


class Minibatches:
    """The mini-batches of a step, in order; of each, the rows. Those in which nothing is trained are left out."""

    def __init__(self, table: BatchTensors, *, config: LearnerConfig, rng: np.random.Generator) -> None:
        self._table = table
        self._config = config
        self.rng = rng
        self._owners = kept_together(
            table.sequences, groups=_row_groups(table), episodes=table.episodes, num=config.minibatches
        )
        self._first = self._split()

    def __iter__(self) -> Iterator[list[int]]:
        yield from self._first
        for _ in range(self._config.epochs - 1):
            yield from self._split()

    @property
    def later(self) -> list[int]:
        """The rows that are not in the first one."""
        first = set(self._first[0]) if self._first else set()
        return [row for row in range(len(self._table.loss_weights)) if row not in first]

    def _split(self) -> list[list[int]]:
        sequences = self._table.sequences
        parts = split_minibatches(self._owners, num=self._config.minibatches, rng=self.rng)
        return [rows for rows in parts if bool(self._table.fresh[sequences.places(rows)].any())]


def _row_groups(table: BatchTensors) -> npt.NDArray[np.int64]:
    """[N] group of each row."""
    groups: npt.NDArray[np.int64] = table.groups[table.units].numpy()
    return groups


def _share(hints: Sequence[str | None]) -> float:
    """Share of the rows that have a hint."""
    return sum(hint is not None for hint in hints) / len(hints)


# Adds up what the losses report over the micro-batches, updates and ranks of one step. Invariant: every rank adds the same
# names the same number of times, so `metrics` (entered by all ranks) may reduce them in one go. Knows no name but those of the
# updates themselves.


class StepMetrics:
    """One per step."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._norms: list[float] = []
        self._num_skipped = 0

    def add(self, *, means: dict[str, Tensor], maxima: dict[str, Tensor]) -> None:
        """One micro-batch of this rank: its share of the mini-batch's means, and its maxima."""
        for name, value in means.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        for name, value in maxima.items():
            self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def end_update(self, norm: float, *, critic: float = 0.0) -> None:
        """One optimizer update: its gradient norm before clipping, and a separate critic's; equal on all ranks."""
        self._norms.append(norm)
        self._num_skipped += not (math.isfinite(norm) and math.isfinite(critic))

    def metrics(self) -> dict[str, float]:
        """Means over updates, maxima over everything; the gradient norm is the mean of the updates that were made."""
        sums = fsdp.all_sum(torch.stack(list(self._sums.values()))) / len(self._norms)
        maxima = fsdp.all_max(torch.stack(list(self._maxima.values())))
        finite = [norm for norm in self._norms if math.isfinite(norm)]
        return {
            **dict(zip(self._sums, sums.tolist())),
            **dict(zip(self._maxima, maxima.tolist())),
            "policy/grad_norm": sum(finite) / len(finite) if finite else 0.0,
            "learner/updates": float(len(finite)),
            "learner/skipped": float(self._num_skipped),
        }
