"""What the engine is built from: vLLM's own arguments, its configuration, and the environment that its processes need.

Called before an engine starts, by the pipeline, `mocked_server.check` and tests; the engine itself is
`mocked_server.vllm.engine`. Supported: vllm >= 0.32, < 0.34. Nothing here starts a process or CUDA.
"""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.schema import RolloutConfig, ServerConfig

CPU_KV_CACHE_GB = 0.25
GPU_SHARE = 0.4
"""Share of a card's memory, which the engine shares with the learner."""
WORKER_EXTENSION = "mocked_server.vllm.worker_extension.WorkerExtension"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What the engine and vLLM's HTTP layer are built from."""

    model_path: Path
    served_name: str
    """The model's name in the API."""
    dtype: str
    rollout: RolloutConfig
    server: ServerConfig
    seed: int = 0
    max_num_seqs: int = 64
    """Generations that run in one engine step."""


def set_process_environment() -> None:
    """Set the process environment that vLLM needs, on CPU above all; called before vllm is imported.

    Its processes, all on this machine, meet on loopback: without a name gloo takes the address of the machine's. One OpenMP
    thread is several times faster than two for small models; compiling the sampler would need a C++ compiler on the user's
    machine; the in-process executor saves a second spawned worker (7 s of start-up) and half of the per-step cost.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("VLLM_XGRAMMAR_CACHE_MB", "64")  # compiled grammars, of which agents may send ever new ones
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "0"  # nothing that arrives at the engine is unpickled
    if has_gpu():
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def make_args(settings: EngineSettings) -> Namespace:
    """vLLM's own server arguments, parsed by vLLM's own parser."""
    from vllm.entrypoints.cli.serve import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    rollout = settings.rollout
    words = [
        "--model",
        str(settings.model_path),
        "--served-model-name",
        settings.served_name,
        "--dtype",
        settings.dtype,
    ]
    words += ["--max-model-len", str(rollout.max_model_len), "--max-num-seqs", str(settings.max_num_seqs)]
    words += ["--seed", str(settings.seed), "--worker-extension-cls", WORKER_EXTENSION]
    # Behaviour log-probabilities are those of the distribution that was sampled from (after the temperature).
    words += ["--logprobs-mode", "processed_logprobs"]
    # Without this the model folder's generation_config.json silently changes temperature and top-p.
    words += ["--generation-config", "vllm", "--disable-log-stats", "--no-use-tqdm-on-load"]
    words += ["--gpu-memory-utilization", str(GPU_SHARE)]
    if settings.server.tool_parser:
        words += ["--enable-auto-tool-choice", "--tool-call-parser", settings.server.tool_parser]
    if settings.server.reasoning_parser:
        words += ["--reasoning-parser", settings.server.reasoning_parser]
    kv_cache_gb = rollout.kv_cache_gb
    if not has_gpu():
        words += ["--enforce-eager", "--distributed-executor-backend", "uni"]
        kv_cache_gb = kv_cache_gb or CPU_KV_CACHE_GB
    elif rollout.sleep:
        words += ["--enable-sleep-mode"]
    if kv_cache_gb is not None:
        words += ["--kv-cache-memory-bytes", str(int(kv_cache_gb * 2**30))]
    args: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    validate_parsed_serve_args(args)
    return args


def make_vllm_config(args: Namespace) -> Any:
    """The engine's configuration, for the engine and for the HTTP layer in front of it."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    return AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)


def has_gpu() -> bool:
    """Whether there is a GPU. This does not start CUDA, so that the caller may fork later."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    return bool(torch.cuda.is_available())
