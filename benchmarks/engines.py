"""Real engines and servers of the benchmarks, and what made-up engines answer. Keys of `rollout` are named as in its schema."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from buffers.ledger.ledger import Ledger
from buffers.multi_round import MultiRoundBufferDataset
from buffers.tasks.task_pool import TaskPool
from configs.schema import RolloutConfig, ServerConfig
from mocked_server.server import MockedServer
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


def server_of(
    settings: EngineSettings, ledger: Ledger, *, args: Namespace, max_running: int = 1, **more: Any
) -> tuple[MockedServer, TaskPool]:
    """The server as the pipeline has it, not started yet, and the pool of its tasks."""
    pool = TaskPool(
        ledger, group_size=1, groups_per_step=1, max_policy_lag=None, max_running=max_running, deadline_s=1e6,
        max_attempts=1,
    )  # fmt: skip
    server = MockedServer(
        args=args, vllm_config=make_vllm_config(args), rollout=settings.rollout, server=settings.server, pool=pool,
        notify_score_fn=MultiRoundBufferDataset(ledger).notify_score, **more,
    )  # fmt: skip
    return server, pool


def output_of(
    request_id: str,
    ids: Sequence[int],
    *,
    text: str,
    logprobs: Any,
    finish: str | None,
    version: int = 0,
    done: int = 0,
) -> Any:
    """What an engine gives for sampled ids; `done`: tokens of the answer so far."""
    from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan

    completion = CompletionOutput(
        index=0, text=text, token_ids=ids, cumulative_logprob=None, logprobs=logprobs, finish_reason=finish,
        weight_versions=[WeightVersionSpan(str(version), 0, done or len(ids))],
    )  # fmt: skip
    return RequestOutput(request_id, None, [], None, [completion], finish is not None)
