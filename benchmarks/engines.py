"""Real engines of the benchmarks, and what made-up engines answer. Keys of `rollout` are named as in its schema."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from configs.schema import RolloutConfig, ServerConfig
from mocked_server.fleet.member import EngineFigures, Sampled
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


# An engine that gives tokens by the clock, or at once, and costs nothing, for measuring what is in front of engines; it is a
# member of a fleet as a real one. With `room` it slows down as real ones do whose memory is the bound: by the tokens that its
# generations hold, and by prompts that its cache lacks.

WORD_ID = 100
"""What it says, over and over."""
TICK_S = 0.01


@dataclass(kw_only=True)
class PacedEngine:
    """An engine of known speed."""

    name: str
    token_s: float
    """Seconds of one token; 0: the whole answer at once."""
    word: str = "x"
    room: int | None = None
    """Tokens that it holds at full speed; None: any number."""
    prefill_s: float = 0.0
    """Seconds of one prompt token that is not in its cache, which has every prompt that it saw."""
    version: int = 0
    is_up: bool = True
    sampled_tokens: int = 0
    cached: set[int] = field(default_factory=set)
    """Hashes of prompts, and of prompts with their answers."""
    held: int = 0
    running: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    async def generate(
        self,
        prompt_token_ids: list[int],
        params: Any,
        *,
        request_id: str,
        sampled: Sequence[Sampled] = (),
        **_: Any,
    ) -> AsyncGenerator[Any, None]:
        """`max_tokens` equal tokens: one output, or one for each token when it streams."""
        from vllm.sampling_params import RequestOutputKind

        total, prompt = params.max_tokens, len(prompt_token_ids)
        at_once = params.output_kind == RequestOutputKind.FINAL_ONLY or not self.token_s
        self.held += prompt + total
        self.running += 1
        try:
            if self.room is not None:
                await self._take(total, prompt_token_ids)
                yield self._output(request_id, total, total, finished=True, params=params)
            else:
                for done in range(total if at_once else 1, total + 1):
                    if self.token_s:
                        await asyncio.sleep(self.token_s * (total if at_once else 1))
                    yield self._output(request_id, total if at_once else 1, done, finished=done == total, params=params)
        finally:
            self.held -= prompt + total
            self.running -= 1

    async def _take(self, tokens: int, prompt: list[int]) -> None:
        """Wait as long as this takes under the load of each moment."""
        assert self.room is not None
        ids = tuple(prompt)
        known = max((end for end in range(len(ids), 0, -64) if hash(ids[:end]) in self.cached), default=0)
        self.prompt_tokens += len(ids)
        self.cached_tokens += known
        left = tokens * self.token_s + (len(ids) - known) * self.prefill_s
        while left > 0:
            await asyncio.sleep(TICK_S)
            left -= TICK_S * min(1.0, self.room / self.held)
        self.cached |= {hash(ids[:end]) for end in range(len(ids), 0, -64)}

    def _output(self, request_id: str, count: int, done: int, *, finished: bool, params: Any) -> Any:
        self.sampled_tokens += count
        return output_of(
            request_id, [WORD_ID] * count, text=self.word * count, version=self.version, done=done,
            logprobs=equal_logprobs(count) if params.logprobs is not None else None, finish="length" if finished else None,
        )  # fmt: skip

    def forget(self, episode_id: str) -> None:
        """It keeps nothing of an episode."""

    async def start(self) -> None: ...
    async def restart(self) -> None: ...
    async def until_dead(self) -> None:
        """It never dies."""
        await asyncio.Event().wait()

    async def close(self) -> None: ...
    async def load_weights(self, folder: Path, *, version: int) -> float:
        """It has none."""
        self.version = version
        return 0.0

    async def sleep(self) -> None: ...
    async def wake_up(self) -> None: ...

    def figures(self) -> EngineFigures:
        return EngineFigures(
            name=self.name, is_up=True, version=self.version, running=self.running, waiting=0, tokens_held=self.held,
            kv_capacity=self.room or 0, sampled_tokens=self.sampled_tokens, prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens, preemptions=0, restarts=0,
        )  # fmt: skip


@cache
def equal_logprobs(count: int) -> Any:
    """Log-probabilities of `count` tokens, as the real engine gives them when only the sampled ones are asked for."""
    from vllm.logprobs import FlatLogprobs

    table = FlatLogprobs()
    for _ in range(count):
        table.append_fast([WORD_ID], [-0.5], [1], [None])
    return table
