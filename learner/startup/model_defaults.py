"""Defaults that follow from the model: what the demo's random model of 361,216 weights bears destroys a pretrained one.

Called by `learner.run` and `learner.evaluate`, once the model is a folder of this machine. Invariants: what the user has set stays
as it is; a line says what was chosen, and why; the same model on the same machine gets the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from math import floor, log10, sqrt
from typing import Any

from configs.schema import CPU_KV_CACHE_GB, Config
from learner.placement.memory import ModelShape

SMALLEST_PRETRAINED = 10_000_000
"""Models of fewer weights are made to be trained from scratch, for which the schema's own defaults are."""
RATE, OF_WEIGHTS = 1e-5, 135e6
"""A rate that was seen to train a model of so many weights (SmolLM2-135M by GRPO). It falls with the square root of the weights:
1e-6 at 7 billion, as verl's and TRL's examples have it."""
RATES = 5e-7, 2e-5
LORA_RATIO = 10.0
"""Adapters bear ten times the rate of all weights, whatever their rank ("LoRA Without Regret", Thinking Machines, 2025)."""
SFT_RATE = 2e-5
TOO_LARGE = 20.0
"""A rate so many times the default's is warned of."""
CPU_TOKEN_BUDGET = 1024
"""A CPU is as fast with micro-batches of this size as with larger ones, whose activations take gibibytes; where rows are
short, with twice the longest. At once the longest one takes a quarter more time than that."""
CACHE_SHARE = 0.05
"""Share of the machine's memory that the KV cache of a CPU takes at most, as a default."""
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Choice:
    """A key's value, and why."""

    key: str
    value: Any
    why: str


def choices(config: Config, *, shape: ModelShape, has_gpu: bool, memory_bytes: int, cores: int) -> list[Choice]:
    """The defaults of a pretrained model that are not the schema's; none for one to be trained from scratch."""
    if config.model.path == "tiny" or shape.parameters < SMALLEST_PRETRAINED:
        return []
    learner = config.learner
    size = f"{shape.parameters / 1e6:,.0f} million weights"
    rate = min(max(RATE * sqrt(OF_WEIGHTS / shape.parameters), RATES[0]), RATES[1])
    kind = "an adapter" if learner.lora.rank else "all weights"
    ratio = LORA_RATIO if learner.lora.rank else 1.0
    found = [
        Choice("learner.lr", _rounded(ratio * rate), f"{kind} of a pretrained model of {size}"),
        Choice("learner.critic_lr", _rounded(10.0 * rate), "ten times the policy's"),
        Choice("sft.lr", _rounded(ratio * SFT_RATE), "a pretrained model"),
    ]
    if learner.advantage != "gae":
        found.append(Choice("learner.minibatches", 1, "an update on fresh data needs no pass before it"))
    starts_engines = config.rollout.engine == "vllm"
    if not has_gpu:
        most = min(CPU_TOKEN_BUDGET, 2 * config.rollout.max_model_len)
        found.append(Choice("learner.token_budget", most, "a CPU gains nothing by more"))
        if config.buffer.max_policy_lag == 0:
            engines = config.rollout.engine_range[1]
            found.append(Choice("learner.threads", max(1, cores // learner.ranks), "engines rest during an update"))
            if starts_engines and "OMP_NUM_THREADS" not in os.environ:
                found.append(Choice("rollout.threads", max(1, cores // engines), "the learner waits for them"))
            if starts_engines:
                found.append(Choice("rollout.sleep", True, "the KV cache is empty during an update"))
    if not has_gpu and starts_engines:
        episodes = config.agents.concurrency if isinstance(config.agents.concurrency, int) else 64
        each = shape.cache_bytes(tensor_parallel=1, bytes_each=4 if config.model.dtype == "float32" else 2)
        whole = episodes * config.rollout.max_model_len * each / GIB
        cache = max(CPU_KV_CACHE_GB, min(whole, CACHE_SHARE * memory_bytes / GIB))
        found.append(Choice("rollout.kv_cache_gb", float(f"{cache:.2g}"), f"{episodes} conversations at once"))
    return [choice for choice in found if choice.value != _value(config, choice.key) and _counts(config, choice.key)]


def with_model_defaults(
    config: Config, *, shape: ModelShape, has_gpu: bool, memory_bytes: int, cores: int, say: Callable[[str], object]
) -> Config:
    """The configuration with these where the user has set nothing else, which a line tells; another line warns of a learning rate
    that no pretrained model bears."""
    chosen = []
    for choice in choices(config, shape=shape, has_gpu=has_gpu, memory_bytes=memory_bytes, cores=cores):
        section, name = choice.key.split(".")
        own = getattr(config, section)
        if name in own.model_fields_set:
            if name == "lr" and _value(config, choice.key) > TOO_LARGE * choice.value:
                say(
                    f"{choice.key}={_value(config, choice.key):g} is far beyond {choice.value:g}, the default for {choice.why}: "
                    f"such a rate makes it forget what it knows"
                )
            continue
        config = config.model_copy(update={section: own.model_copy(update={name: choice.value})})
        chosen.append(f"{choice.key}={json.dumps(choice.value)} ({choice.why})")
    if chosen:
        say("chosen by the model, as nothing is set: " + ", ".join(chosen))
    return config


def _counts(config: Config, key: str) -> bool:
    """Whether the key has an effect in this run."""
    if key == "learner.critic_lr":
        return config.learner.advantage == "gae" and config.learner.critic == "separate"
    if key == "sft.lr":
        return bool(config.sft.demonstrations)
    return not (config.learner.stage == "sft" and key in ("learner.lr", "learner.minibatches"))


def _value(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _rounded(value: float) -> float:
    """To one digit that counts."""
    return round(value, -floor(log10(value)))
