"""Engine settings of the benchmarks, and real engines made from them. The keys of a run's `rollout` are named as in its schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from configs.schema import RolloutConfig, ServerConfig
from mocked_server.vllm.engine import VLLMEngine
from mocked_server.vllm.engine_arguments import EngineSettings, make_args, make_vllm_config


def settings_of(
    model: Path, *, dtype: str = "float32", max_num_seqs: int = 64, server: ServerConfig | None = None, **rollout: Any
) -> EngineSettings:
    """What a run would start its engine with."""
    return EngineSettings(
        model_path=model, served_name="policy", dtype=dtype, rollout=RolloutConfig(**rollout),
        server=server or ServerConfig(), max_num_seqs=max_num_seqs,
    )  # fmt: skip


def engine_of(model: Path, *, name: str = "e0", weights: tuple[Path, int] | None = None, **settings: Any) -> VLLMEngine:
    """A real engine in this process, not started yet."""
    return VLLMEngine(make_vllm_config(make_args(settings_of(model, **settings))), name=name, weights=weights)
