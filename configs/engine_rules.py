"""Which keys of `rollout` can have no effect, or cannot be had, with the engine that `rollout.engine` names.

`configs.schema` asks when a configuration is complete. Invariant: a refusal is one line with the keys, the rule and the
remedy; only what was set counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

OF_VLLM = ("engine_args",)
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
