"""Which keys cannot be had, or can have no effect, beside others: with an engine, in the learner's section, in vLLM's arguments.

`configs.schema` asks when a section or the configuration is complete. Invariant: a refusal is one line with the keys, the rule and
the remedy; only what was set counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel

OF_VLLM = ("engine_args", "threads")
OF_OUR_PROCESSES = ("engines", "tensor_parallel", "kv_cache_gb", "gpu_memory_utilization")
"""Keys of engines that the run starts itself."""


def check_engine_name(engine: str) -> str:
    """`vllm`, `sglang`, or the root of a server as http://HOST:PORT. Raises ValueError."""
    if engine in ("vllm", "sglang"):
        return engine
    parts = urlsplit(engine)
    if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"\s", engine):
        raise ValueError("must be vllm, sglang or the URL of a running server (http://HOST:PORT)")
    if parts.query or parts.fragment or parts.path.strip("/"):
        raise ValueError("must be the root of a server (http://HOST:PORT), without what follows the port")
    return engine.rstrip("/")


def is_url(engine: str) -> bool:
    """Whether it is a server that runs already."""
    return engine.startswith(("http://", "https://"))


def check_engine_keys(engine: str, *, given: Mapping[str, Any], sleeps: bool, lora_rank: int, replays: bool) -> None:
    """`given`: the keys of `rollout` that differ from their defaults. Raises ValueError."""
    if engine == "vllm":
        return
    without = [*OF_VLLM, *(OF_OUR_PROCESSES if is_url(engine) else ())]
    for key in without:
        if key in given:
            raise ValueError(
                f"rollout.{key} is of the engines that a run starts of vLLM, got rollout.{key}={given[key]} with "
                f"rollout.engine={engine}; leave it out, and give the server what it needs where it is started"
            )
    if replays:
        raise ValueError(
            f"learner.router_replay needs vLLM's engines of this run, which record experts, got rollout.engine={engine}; set "
            f"learner.router_replay=false, or rollout.engine=vllm"
        )
    if sleeps:
        raise ValueError(
            f"rollout.sleep frees the memory of vLLM's engines of this run, got rollout.engine={engine}; set rollout.sleep=false"
        )
    if lora_rank:
        raise ValueError(
            f"learner.lora gives adapters to vLLM's engines of this run, got learner.lora.rank={lora_rank} with "
            f"rollout.engine={engine}; set learner.lora.rank=0, or rollout.engine=vllm"
        )


# Which keys of the learner can have no effect beside the others: a value that a user set there is a mistake, and refused.
# `configs.schema` asks when a learner's section is complete. Invariant: only what was set counts; a default, or what the recipe
# says, is nobody's mistake.


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """`keys` have an effect only where the key `beside` has one of `values` (empty: any but none, 0 and false)."""

    keys: tuple[str, ...]
    beside: str
    values: tuple[str, ...] = ()
    example: str = ""
    """A value of `beside` that gives them an effect, where `values` does not say."""


WHITENED = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo")
CLIPPED = ("ppo", "gspo", "cispo", "gmpo", "clip_cov", "dppo_tv", "dppo_kl")
RULES = (
    Needs(keys=("lam", "value_clip", "calibrate_values"), beside="advantage", values=("gae",)),
    Needs(keys=("critic_lr",), beside="critic", values=("separate",)),
    Needs(keys=("min_deviation",), beside="advantage", values=WHITENED),
    Needs(keys=("loss_norm",), beside="aggregation", values=("seq-mean-token-sum-norm",)),
    Needs(keys=("clip.low", "clip.high"), beside="loss", values=CLIPPED),
    Needs(keys=("clip.ratio_max",), beside="loss", values=("ppo", "dppo_tv", "dppo_kl")),
    Needs(keys=("sapo.tau_pos", "sapo.tau_neg"), beside="loss", values=("sapo",)),
    Needs(keys=("cov.share",), beside="loss", values=("clip_cov", "kl_cov")),
    Needs(keys=("cov.low", "cov.high"), beside="loss", values=("clip_cov",)),
    Needs(keys=("cov.kl_coef",), beside="loss", values=("kl_cov",)),
    Needs(keys=("correction_bounds.low",), beside="correction", values=("icepop", "mis", "seq_mis")),
    Needs(keys=("correction_bounds.high",), beside="correction", values=("tis", "seq_tis", "icepop", "mis", "seq_mis")),
    Needs(keys=("rejection.low",), beside="rejection.kind", values=("geo_mean",)),
    Needs(keys=("rejection.high",), beside="rejection.kind", values=("geo_mean", "k3_mean", "stale_negatives")),
    Needs(keys=("kl.target", "kl.kind", "kl.in_reward"), beside="kl.coef", example="0.001"),
    Needs(keys=("kl.horizon",), beside="kl.target", example="0.05"),
    Needs(keys=("adaptive_entropy.step", "adaptive_entropy.most"), beside="adaptive_entropy.target", example="0.2"),
    Needs(keys=("lora.alpha", "lora.per_role"), beside="lora.rank", example="32"),
    Needs(keys=("teacher.coef",), beside="teacher.path", example="models/teacher"),
    Needs(keys=("hints.sources",), beside="hints.coef", example="1"),
)
KEYS = {"aggregation": "loss_agg"}
"""What a rule looks at -> the key that sets it."""


def refuse_unused(learner: BaseModel, *, recipe: dict[str, Any]) -> None:
    """Raises ValueError for the first value that was set and can have no effect."""
    rules: tuple[Needs, ...] = RULES
    if getattr(learner, "critic", None) == "separate":
        rules = (Needs(keys=("critic",), beside="advantage", values=("gae",)), *RULES)
    for rule in rules:
        there = _value(learner, rule.beside)
        if there in rule.values if rule.values else there:
            continue
        for key in rule.keys:
            if _is_set(learner, key, recipe=recipe):
                raise ValueError(_refusal(rule, key=key, value=_value(learner, key), there=there))


def _refusal(rule: Needs, *, key: str, value: object, there: object) -> str:
    beside = f"learner.{KEYS.get(rule.beside, rule.beside)}"
    rules = f"{beside}={' or '.join(rule.values)}" if rule.values else f"a {beside}"
    remedy = rule.values[0] if rule.values else rule.example
    return (
        f"learner.{key} has an effect with {rules} only, got learner.{key}={_text(value)} with {beside}={_text(there)}; leave "
        f"learner.{key} out, or set {beside}={remedy}"
    )


def _text(value: object) -> str:
    """A value as YAML writes it."""
    words = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return words[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _value(learner: BaseModel, key: str) -> Any:
    found: Any = learner
    for part in key.split("."):
        found = getattr(found, part)
    return found


def _is_set(learner: BaseModel, key: str, *, recipe: dict[str, Any]) -> bool:
    """Whether a user set it: to something else than its default and the recipe's value."""
    *sections, leaf = key.split(".")
    model: BaseModel = learner
    for section in sections:
        if section not in model.model_fields_set:
            return False
        model, recipe = getattr(model, section), recipe.get(section, {})
    value, default = getattr(model, leaf), type(model).model_fields[leaf].get_default(call_default_factory=True)
    return leaf in model.model_fields_set and value not in (default, recipe.get(leaf, default))


# Arguments of vLLM's engine that a run sets itself: `rollout.engine_args` may not name them. `configs.schema` asks while a
# configuration is loaded, without vLLM: `mocked_server.vllm.engine_arguments` hands the rest to vLLM's own parser. Invariant:
# an argument that a key of ours sets is set by that key only.

LOGPROBS = "the learner needs the log-probabilities of the distribution that was sampled from"
WEIGHTS = "new weights reach the engine through it"
PLACE = "the run places engines on cards (learner/startup/placement.py)"
FLEET = "each engine is one replica of the model"
OWNED = {
    "model": "set model.path",
    "tokenizer": "prompts are rendered and continued by the tokenizer of model.path",
    "skip_tokenizer_init": "prompts are rendered and continued by the tokenizer of model.path",
    "served_model_name": "agents find the model's name in MODEL",
    "dtype": "set model.dtype",
    "trust_remote_code": "set model.trust_remote_code",
    "max_model_len": "set rollout.max_model_len",
    "max_num_seqs": "set agents.concurrency",
    "max_logprobs": LOGPROBS,
    "logprobs_mode": LOGPROBS,
    "seed": "set run.seed",
    "generation_config": "agents' requests and rollout.temperature say how tokens are drawn",
    "override_generation_config": "agents' requests and rollout.temperature say how tokens are drawn",
    "worker_extension_cls": WEIGHTS,
    "worker_cls": WEIGHTS,
    "weight_transfer_config": WEIGHTS,
    "tensor_parallel_size": "set rollout.tensor_parallel",
    "gpu_memory_utilization": "set rollout.gpu_memory_utilization",
    "device_memory_utilization": "set rollout.gpu_memory_utilization",
    "kv_cache_memory_bytes": "set rollout.kv_cache_gb",
    "enable_sleep_mode": "set rollout.sleep",
    "enable_return_routed_experts": "set learner.router_replay",
    "enable_lora": "set learner.lora.rank",
    "max_lora_rank": "set learner.lora.rank",
    "max_loras": "set buffer.max_policy_lag",
    "max_cpu_loras": "set buffer.max_policy_lag",
    "tool_call_parser": "set server.tool_parser",
    "enable_auto_tool_choice": "set server.tool_parser",
    "reasoning_parser": "set server.reasoning_parser",
    "reasoning_parser_plugin": "set server.reasoning_parser",
    "distributed_executor_backend": PLACE,
    "pipeline_parallel_size": PLACE,
    "nnodes": PLACE,
    "node_rank": PLACE,
    "master_addr": PLACE,
    "master_port": PLACE,
    "runner": "the engine generates",
    "convert": "the engine generates",
    "disable_log_stats": "the run's own metrics are in metrics.jsonl",
    "use_tqdm_on_load": "the run has a display of its own",
}
"""Name of vLLM's argument -> what is to be set instead, or why the run needs it."""


def why_owned(name: str) -> str:
    """Why a run sets vLLM's argument of this name itself (dashes or underscores, with or without `no_`); empty: it does not."""
    plain = name.replace("-", "_").removeprefix("no_")
    return FLEET if plain.startswith("data_parallel") else OWNED.get(plain, "")


def check_names(names: Iterable[str]) -> None:
    """Raises ValueError for the first name that a run sets itself."""
    for name in names:
        if why := why_owned(name):
            raise ValueError(
                f"rollout.engine_args must not name what the run sets itself, got {name!r}: {why}; leave it out"
            )
