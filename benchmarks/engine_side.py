"""A real engine alone: samples, takes other weights in place, and samples again; one side of `benchmarks.gpu`.

`python -m benchmarks.engine_side --models ONE OTHER --out FILE`. Two folders of one architecture. Prompts are made up.
Invariant: what the engine recorded is compared with what the learner's own policy computes on the same device in the same dtype,
and with float32, from the folder whose weights the engine was told to have. It judges nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engines import engine_of
from benchmarks.learner_sides import policy_logprobs
from configs.tiny_model import VOCAB_SIZE
from learner.training.packing import PaddedSequences, Sequences
from mocked_server.vllm.engine import VLLMEngine, import_engine

PROMPT = 64
CARD_SHARE = 0.3
Sampled = tuple[list[int], list[int], list[float]]
"""Ids of the prompt, ids that were sampled, their log-probabilities."""


async def measure(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[list[Sampled]]]:
    """Seconds and rates, and what was sampled from each model."""
    began = time.monotonic()
    engine = engine_of(
        arguments.models[0], dtype=arguments.dtype, max_num_seqs=arguments.requests, max_model_len=PROMPT + arguments.tokens,
        gpu_memory_utilization=CARD_SHARE, engine_args=arguments.engine_args,
    )  # fmt: skip
    try:
        await engine.start()
        figures: dict[str, Any] = {"start_s": time.monotonic() - began}
        print(f"the engine is up after {figures['start_s']:.1f} s", flush=True)
        await sample(engine, arguments)  # kernels are compiled at their first use
        samples = []
        for version, folder in enumerate(arguments.models):
            if version:
                figures["load_s"] = await engine.load_weights(folder, version=version)
                print(f"other weights loaded in {figures['load_s']:.2f} s", flush=True)
            began = time.monotonic()
            samples.append(await sample(engine, arguments))
            seconds = time.monotonic() - began
            figures[f"tokens_per_s_{version}"] = arguments.requests * arguments.tokens / seconds
        return figures, samples
    finally:
        await engine.close()


async def sample(engine: VLLMEngine, arguments: argparse.Namespace) -> list[Sampled]:
    """All requests at once."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB_SIZE, PROMPT).tolist() for _ in range(arguments.requests)]

    async def one(number: int, prompt: list[int]) -> Sampled:
        params = SamplingParams(
            temperature=1.0,
            max_tokens=arguments.tokens,
            ignore_eos=True,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        async for output in engine.generate(prompt, params, request_id=f"r{number}-{time.monotonic_ns()}"):
            ids = list(output.outputs[0].token_ids)
            logprobs = output.outputs[0].logprobs
        return prompt, ids, [each[token].logprob for each, token in zip(logprobs, ids, strict=True)]

    return list(await asyncio.gather(*(one(*each) for each in enumerate(prompts))))


def differences(samples: list[Sampled], *, model: Path, dtype: str) -> dict[str, float]:
    """Of the recorded log-probabilities from those that the learner's policy computes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = [np.array([*prompt, *ids], dtype=np.int32) for prompt, ids, _ in samples]
    masks = [np.array([0] * len(prompt) + [1] * len(ids), dtype=np.uint8) for prompt, ids, _ in samples]
    recorded = torch.tensor([value for _, _, logprobs in samples for value in logprobs])
    sequences = PaddedSequences(Sequences(rows, masks=masks))
    found = policy_logprobs(model, sequences, device=device, dtype=dtype)
    apart = (recorded - found).abs()
    return {"mean": float(apart.mean()), "max": float(apart.max()), "mean_logprob": float(recorded.mean())}


def main() -> None:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine_side", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--models", type=Path, nargs=2, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="that are sampled of each")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="more arguments of vLLM's engine, as JSON")
    arguments = parser.parse_args()
    import_engine()
    figures, samples = asyncio.run(measure(arguments))
    for version, (sampled, model) in enumerate(zip(samples, arguments.models, strict=True)):
        for dtype in dict.fromkeys([arguments.dtype, "float32"]):
            figures[f"version_{version}_against_{dtype}"] = differences(sampled, model=model, dtype=dtype)
    print(json.dumps(figures), flush=True)
    arguments.out.write_text(json.dumps(figures), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # threads of torch.distributed that still run sometimes abort an orderly exit


if __name__ == "__main__":
    main()
