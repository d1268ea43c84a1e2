"""A run's training once more, offline: the real batches of its ledger through a real Trainer, as the run was set or with one key
changed.

Called by the effects of `tests.matrix.effects`, in a process of its own. The ledger is copied and taken back to its start, which
gives out the batches as they were and in their order, as a resumed run gets them. With the run's own settings this gives the
run's own weights; with a neighbour of a value, other ones, or the value has no effect. It samples nothing.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from buffers.ledger.ledger import Ledger
from buffers.records import TrainBatch
from configs.schema import BufferConfig, ReplayConfig, RolloutConfig, ServerConfig, SftConfig
from learner.algorithms.overlong_penalty import with_overlong_penalty
from learner.sft_loop import num_updates, read, rows_of_update
from learner.startup.run_buffers import replay_at
from learner.training.trainer import Trainer
from mocked_server.vllm.demonstrations import make_renderer
from mocked_server.vllm.engine_arguments import EngineSettings, make_args, make_vllm_config
from tests.matrix.records import Ended, NoEffect
from tests.matrix.scenarios.learner_runs import learner_section, without_refused
from tests.support.learner_parts import make_trainer

Weights = dict[str, torch.Tensor]


class Replayed:
    """The weights after the run's steps, and how often each layer of the policy was computed."""

    def __init__(self, weights: Weights, *, passes: int, metrics: list[dict[str, float]]) -> None:
        self.weights = weights
        self.passes = passes
        self.metrics = metrics


def batches(ended: Ended) -> list[TrainBatch]:
    """The batches of the run's steps, as the learner got them."""
    return _batches(ended.folder, json.dumps(ended.config, sort_keys=True))


@cache
def _batches(folder: Path, settings: str) -> list[TrainBatch]:
    config = json.loads(settings)
    lag, num_groups = config["buffer.max_policy_lag"], config["buffer.groups_per_step"]
    own = {
        key.removeprefix("buffer.replay."): value for key, value in config.items() if key.startswith("buffer.replay.")
    }
    buffer = BufferConfig(groups_per_step=num_groups, replay=ReplayConfig(**own))
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        for path in folder.glob("ledger.sqlite*"):
            if not path.name.endswith("-owner"):
                shutil.copy(path, scratch)
        with Ledger(Path(scratch) / "ledger.sqlite") as ledger:
            steps = ledger.position().result().step
            ledger.restore(replace(ledger.position().result(), lineage=0, step=0)).result()
            for step in range(1, steps + 1):
                batch = ledger.claim(
                    num_groups, min_version=step - 1 - lag, replay=replay_at(buffer, version=step - 1)
                ).result()
                if batch is None:
                    raise NoEffect(f"the ledger of {folder.name} does not give the batch of step {step} again")
                ledger.commit_step(batch.lease_id, step=step, version=step).result()
                found.append(batch)
    return found


def replay(ended: Ended, changes: Mapping[str, Any] | None = None) -> Replayed:
    """Train the run's steps again, from its start, with `changes` (key -> value) to its settings."""
    settings = {**ended.config, **(changes or {})}
    return _replay(ended.folder, json.dumps(settings, sort_keys=True), json.dumps(ended.config, sort_keys=True))


@lru_cache(maxsize=4)  # half a gibibyte each, of a real model
def _replay(folder: Path, settings: str, own: str) -> Replayed:
    torch.set_num_threads(1)
    config = json.loads(settings)
    model = folder / "model" if config["model.path"] == "tiny" else Path(config["model.path"])
    trainer = make_trainer(
        model,
        dtype=config["model.dtype"],
        temperature=config["rollout.temperature"],
        keep_versions=config["buffer.max_policy_lag"] + 1,
        replay_lag=config["buffer.replay.oldest"],
        **{**learner_section(without_refused(config)), "ranks": 1},
    )
    passes: list[int] = []
    trainer._policy.layers[0].mlp.register_forward_pre_hook(lambda *_: passes.append(1))
    try:
        if config["sft.demonstrations"]:
            _teach(trainer, config, model=model)
            passes.clear()
        metrics = []
        for version, batch in enumerate(_batches(folder, own)):
            if config["data.reward_manager"] == "dapo":
                batch, _ = with_overlong_penalty(batch, max_tokens=config["rollout.max_tokens"])
            metrics.append(trainer.train_step(batch, version=version))
        with tempfile.TemporaryDirectory() as scratch:
            trainer.save_pretrained(Path(scratch) / "model")
            weights = load_file(Path(scratch) / "model" / "model.safetensors")
    finally:
        trainer.close()
    return Replayed(weights, passes=len(passes), metrics=metrics)


def _teach(trainer: Trainer, config: Mapping[str, Any], *, model: Path) -> None:
    """SFT as the run had it."""
    sft = SftConfig(**{name.removeprefix("sft."): value for name, value in config.items() if name.startswith("sft.")})
    settings = EngineSettings(
        model_path=model, served_name="policy", dtype="float32", server=ServerConfig(),
        rollout=RolloutConfig(max_tokens=config["rollout.max_tokens"], max_model_len=config["rollout.max_model_len"]),
    )  # fmt: skip
    renderer = make_renderer(make_vllm_config(make_args(settings)), strict=False, last_only=False)
    data = read(sft, seed=config["run.seed"], render=renderer.rows, say=print)
    trainer.begin_sft()
    warm_up = config["learner.lr_warmup_steps"] + 1
    for step in range(1, num_updates(sft, number=len(data.trained)) + 1):
        rows = rows_of_update(data.trained, step=step, batch_size=sft.batch_size, seed=config["run.seed"])
        trainer.sft_step(rows, lr=sft.lr * min(1.0, step / warm_up))
    trainer.end_sft()


def trained_weights(ended: Ended) -> Weights:
    """Those of the run's newest checkpoint."""
    return load_file(ended.folder / "last" / "model.safetensors")


def largest_difference(one: Weights, two: Weights) -> float:
    """Over all numbers of the tensors that both have."""
    names = one.keys() & two.keys()
    if len(names) < 10:
        raise NoEffect(f"weights must have at least 10 names in common, got {sorted(names)}")
    return max(float((one[name].float() - two[name].float()).abs().max()) for name in names)


def mean_difference(one: Weights, two: Weights) -> float:
    """The mean over the tensors' means."""
    names = sorted(one.keys() & two.keys())
    return sum(float((one[name].float() - two[name].float()).abs().mean()) for name in names) / len(names)
