"""Arguments of vLLM's engine that a run sets itself: `rollout.engine_args` may not name them.

`configs.schema` asks while a configuration is loaded, without vLLM: `mocked_server.vllm.engine_arguments` hands the rest to vLLM's
own parser. Invariant: an argument that a key of ours sets is set by that key only.
"""

from __future__ import annotations

from collections.abc import Iterable

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
