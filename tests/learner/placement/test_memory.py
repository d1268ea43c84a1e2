"""The plan's figures against a real rank on a CPU, tensor by tensor, and against a real model's weights."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from configs.schema import BufferConfig, LearnerConfig, RolloutConfig
from configs.tiny_model import make_tiny_model
from learner.model.lora import add_adapter
from learner.model.policy import LOGITS_AT_ONCE
from learner.placement import memory
from learner.placement.memory import adapter_weights, of_engine, of_rank, on_host, read_shape, total
from learner.training.tree_packing import GATHERED
from tests.learner.placement.rank_memory import LENGTH
from tests.learner.placement.shapes import shape

ROOT = Path(__file__).parents[3]
MIB = 2**20
GRPO = {"advantage": "grpo", "critic": "none", "token_budget": 1024, "prefix_tree": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4,066,048 weights: 15.5 MiB in float32."""
    folder = tmp_path_factory.mktemp("model") / "small"
    return make_tiny_model(folder, hidden=256, layers=4, heads=4, kv_heads=2, ffn=1024)


def test_the_shape_is_that_of_the_loaded_model(model: Path) -> None:
    lm = AutoModelForCausalLM.from_pretrained(model)
    found = read_shape(model)
    assert found.parameters == sum(weight.numel() for weight in lm.parameters()) == 4_066_048
    assert found.layers * found.largest_layer + found.outside_layers == found.parameters
    add_adapter(lm, rank=8, alpha=16.0, seed=0)
    trained = sum(weight.numel() for weight in lm.parameters() if weight.requires_grad)
    assert adapter_weights(found, LearnerConfig(lora={"rank": 8})) == trained


def test_models_are_as_large_as_their_names_say() -> None:
    sizes = [round(shape(name).parameters / 1e9, 2) for name in ("Qwen3-1.7B", "Qwen3-8B", "Qwen3-32B")]
    assert sizes == [1.72, 8.19, 32.76]


CASES: dict[str, tuple[int, dict[str, object]]] = {
    "all weights": (1, GRPO),
    "versions and reference": (3, GRPO | {"gradient_checkpointing": True, "kl": {"coef": 0.01}}),
    "adapter": (1, GRPO | {"lora": {"rank": 8}}),
    "critic": (1, GRPO | {"advantage": "gae", "critic": "separate"}),
    "shared prefixes": (1, GRPO | {"prefix_tree": True}),
}
"""The most that a policy may lag behind, and the learner's configuration."""


@pytest.fixture(scope="module")
def measured(model: Path) -> dict[str, dict[str, int]]:
    """What a real rank takes in each case."""
    command = [sys.executable, "-m", "tests.learner.placement.rank_memory", str(model), json.dumps([*CASES.values()])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip(CASES, told, strict=True))


@pytest.mark.long(minutes=2)
@pytest.mark.parametrize("case", CASES)
def test_a_rank_takes_what_the_plan_says(model: Path, measured: dict[str, dict[str, int]], case: str) -> None:
    (lag, given), took = CASES[case], measured[case]
    items = of_rank(
        read_shape(model), LearnerConfig(**given), dtype="float32", buffer=BufferConfig(max_policy_lag=lag),
        longest_row=LENGTH, on_gpu=False,
    )  # fmt: skip
    between = total([item for item in items if item.stays])
    assert abs(took["between"] - between) < 0.5 * MIB, (took, between)
    # A tree gathers at most what the plan says: the rows here, which share the half of each other, gather a part of it.
    least = 0.4 if case == "shared prefixes" else 0.7
    assert least * total(items) < took["peak"] < 1.02 * total(items), (took, total(items))


def test_the_plans_constants_are_those_of_what_is_planned() -> None:
    assert (memory.LOGITS_AT_ONCE, memory.GATHERED) == (LOGITS_AT_ONCE, GATHERED)


def test_states_between_layers_are_float32_on_a_cpu() -> None:
    model = shape("Qwen3-8B")
    given = {"dtype": "bfloat16", "buffer": BufferConfig(), "longest_row": 1}
    learner = LearnerConfig(**GRPO | {"gradient_checkpointing": True, "token_budget": 8192})
    sizes = [total(of_rank(model, learner, on_gpu=on_gpu, **given)) for on_gpu in (True, False)]
    assert sizes[1] - (sizes[0] - memory.CUDA_BYTES) == 8192 * (36 + 1.5 * 2) * 4096 * 2


@pytest.mark.parametrize(
    ("tokens", "most"),
    [
        (
            1024,
            "gradients of what is outside of the layers",
        ),  # all 1.2 billion weights of them, in bfloat16 twice and in float32
        (16384, "logits, or later one layer's backward pass"),
    ],
)
def test_what_an_update_takes_is_that_of_the_moment_which_takes_most(tokens: int, most: str) -> None:
    model = shape("Qwen3-8B")
    learner = LearnerConfig(**GRPO | {"gradient_checkpointing": True, "token_budget": tokens})
    items = of_rank(model, learner, dtype="bfloat16", buffer=BufferConfig(), longest_row=1, on_gpu=True)
    sizes = {item.name: item.size for item in items}
    assert most in sizes, sizes
    if tokens == 1024:
        assert sizes[most] == 8 * model.outside_layers and not [name for name in sizes if "activations" in name]
    else:
        kept, one = memory.activations(model, learner, tokens=tokens, each=2, states=2)
        assert sizes["activations of 16384 tokens"] == kept == 16384 * 36 * 4096 * 2
        assert sizes[most] == max(one, memory.LOGIT_COPIES * 4 * 2**26)


def test_a_rank_of_many_holds_its_part() -> None:
    one, four = (
        of_rank(
            shape("Qwen3-8B"), LearnerConfig(**GRPO, ranks=ranks), dtype="bfloat16", buffer=BufferConfig(), longest_row=1,
            on_gpu=True,
        )
        for ranks in (1, 4)
    )  # fmt: skip
    assert total(one, certain=True) == pytest.approx(4 * total(four, certain=True))
    assert total(one, certain=True) == pytest.approx(shape("Qwen3-8B").parameters * 18)  # a version kept in bfloat16: 2


def test_what_is_kept_on_the_host_is_not_on_the_card() -> None:
    given = GRPO | {"kl": {"coef": 0.01}, "ranks": 2}
    model, rest = shape("Qwen3-8B"), {"dtype": "bfloat16", "buffer": BufferConfig()}
    moved = LearnerConfig(**given, keep_on="host", offload=True)
    sizes = [
        total(of_rank(model, learner, longest_row=1, on_gpu=True, **rest), certain=True)
        for learner in (LearnerConfig(**given), moved)
    ]
    on_the_host = total(on_host(model, moved, **rest))
    assert on_the_host == sizes[0] - sizes[1] == pytest.approx(model.parameters * (8 + 2 + 2) / 2)
    assert on_host(model, LearnerConfig(**given), **rest) == []
    two = total(of_rank(model, moved, longest_row=1, on_gpu=True, policies=2, **rest), certain=True)
    assert two == total(of_rank(model, moved, longest_row=1, on_gpu=True, **rest), certain=True), (
        "all of it is on the host"
    )
    more = total(on_host(model, moved, policies=2, **rest))
    assert more == pytest.approx(2 * on_the_host + model.parameters * 4 / 2), (
        "and the weights of the one that is not trained now"
    )
    same = of_rank(model, moved, longest_row=1, on_gpu=False, **rest)  # on a CPU it is all one memory
    assert total(same, certain=True) == sizes[0]


@pytest.mark.parametrize(("tensor_parallel", "tokens"), [(1, 1000), (8, 8000), (16, 8000)])
def test_heads_of_the_cache_are_divided_as_far_as_there_are_such(tensor_parallel: int, tokens: int) -> None:
    """Qwen3-8B: 36 layers of 8 heads of 128 numbers, keys and values, 2 bytes each."""
    gib = 1000 * 36 * 8 * 128 * 2 * 2 / 2**30
    rollout = RolloutConfig(kv_cache_gb=gib, tensor_parallel=tensor_parallel)
    engine = of_engine(shape("Qwen3-8B"), rollout, dtype="bfloat16", card=80 * 2**30, share=0.9)
    assert engine.cache_tokens == pytest.approx(tokens, abs=1)


def test_a_model_without_attention_has_no_tokens_in_a_cache() -> None:
    mamba = replace(shape("Qwen3-8B"), kv_heads=0)
    for card in (None, 80 * 2**30):
        assert of_engine(mamba, RolloutConfig(), dtype="bfloat16", card=card, share=0.5).cache_tokens is None


def test_an_engine_takes_its_share_and_no_more() -> None:
    engine = of_engine(shape("Qwen3-8B"), RolloutConfig(), dtype="bfloat16", card=80 * 2**30, share=0.5)
    assert total(engine.items) == 40 * 2**30
    assert torch.tensor([item.size for item in engine.items]).min() > 0
