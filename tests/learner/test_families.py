"""The learner with small random models of the world's families: what it computes, publishes and saves is transformers' own.

Layers that only attend, and those that carry a state, convolve, attend in chunks, have sinks, soft caps, scales, experts, towers;
see `benchmarks.families`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from benchmarks.families import FAMILIES, make_family
from buffers.records import Row
from learner.model import fsdp
from learner.model.layers import layers_of
from learner.model.load import load_policy
from learner.model.policy import Policy
from learner.training import layout as layout_module
from learner.training.layout import choose_layout
from learner.training.stems import StemSequences
from learner.training.tree_packing import TreeSequences
from tests.support.learner_parts import branching_batch, make_trainer
from tests.support.weights.published_weights import published

BESIDE = {
    "bloom": "eager", "falcon_h1": "sdpa", "gemma2": "eager", "gpt_oss": "eager", "granitemoehybrid": "sdpa", "kimi_linear": "sdpa",
    "lfm2": "sdpa", "lfm2_moe": "sdpa", "llama4": "sdpa", "mamba2": "eager", "nemotron": "sdpa", "nemotron_h": "sdpa",
    "nemotron_h_dense": "sdpa", "olmo_hybrid": "sdpa", "qwen3_5": "sdpa", "qwen3_5_moe": "sdpa", "qwen3_5_moe_vl": "sdpa",
    "qwen3_5_vl": "sdpa", "qwen3_next": "sdpa", "stablelm": "sdpa",
}  # fmt: skip
"""Families whose rows are not packed, but continue stems -> the attention that they have. All others are packed."""
ALWAYS = (
    "apertus", "cohere2", "deepseek_v3", "gemma2", "gemma3_vl", "gemma4", "gpt_neox", "gpt_oss", "granite", "granitemoehybrid",
    "lfm2_moe", "llama4", "mamba2", "nemotron_h", "qwen3_5_vl", "qwen3_moe", "qwen3_next",
)  # fmt: skip
"""One of each kind; the others are played with the long tests."""


def reference(folder: Path) -> Any:
    """transformers' own model, with the attention that leaves nothing out."""
    config = transformers.AutoConfig.from_pretrained(folder)
    own: Any = getattr(transformers, config.architectures[0])
    return own.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def logprobs(lm: Any, rows: list[Row]) -> np.ndarray:
    """Of the trained tokens, each row alone."""
    found = []
    for row in rows:
        ids = torch.from_numpy(row.ids).long()
        with torch.no_grad():
            own = lm(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        found.append(own[torch.from_numpy(row.mask[1:]).bool()].numpy())
    return np.concatenate(found)


@pytest.mark.seconds
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in ALWAYS else pytest.mark.long) for each in FAMILIES]
)
def test_steps_weights_and_folders_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = make_family(name, tmp_path / name)
    batch = branching_batch()
    learner = make_trainer(folder, advantage="grpo", critic="none", lr=1e-3, lr_warmup_steps=0)
    try:
        assert (learner.layout.packs, learner.layout.attention) == (name not in BESIDE, BESIDE.get(name, "sdpa"))
        assert learner.layout.shares
        apart = 2e-5 if learner.layout.packs else 1e-4  # transformers' own rows differ so much between sizes of chunks
        expected = logprobs(reference(folder), batch.rows)
        learner.train_step(batch, version=0)
        figures = learner.token_figures()
        assert figures is not None
        np.testing.assert_allclose(figures.start, expected, atol=apart)
        weights, source = published(learner), load_file(folder / "model.safetensors")
        assert {key: value.shape for key, value in weights.items()}.items() <= {
            k: v.shape for k, v in source.items()
        }.items()
        towers = source.keys() - weights.keys()
        assert bool(towers) == ("vl" in name) and not any("language_model" in key for key in towers)
        learner.save_pretrained(tmp_path / "saved")
        saved = load_file(tmp_path / "saved" / "model.safetensors")
        assert saved.keys() == source.keys()
        assert all(torch.equal(saved[key], weights.get(key, source[key])) for key in saved)
        learner.train_step(batch, version=1)
        figures = learner.token_figures()
        assert figures is not None
        np.testing.assert_allclose(figures.start, logprobs(reference(tmp_path / "saved"), batch.rows), atol=apart)
        assert float(np.abs(figures.start - expected).mean()) > 0.01, "it learns"
    finally:
        learner.close()


def plain_policy(name: str, folder: Path) -> Policy:
    return load_policy(make_family(name, folder / name), device=torch.device("cpu"))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, which has no others."""
    monkeypatch.setattr(fsdp, "all_sum", lambda values: values)


@pytest.mark.usefixtures("alone")
def test_gradients_of_both_layouts_are_those_of_rows_alone_or_no_layout_is_right(
    tmp_path: Path,
) -> None:
    """A model in which a token sees what comes after it has no layout."""
    policy = plain_policy("qwen3", tmp_path)
    assert choose_layout(policy, shares=True).packs
    assert all(parameter.grad is None for parameter in policy.parameters())

    def look_ahead(module: Any, given: Any, found: Any) -> None:
        found.last_hidden_state = found.last_hidden_state + found.last_hidden_state[:, -1:].mean()

    policy._body.register_forward_hook(look_ahead)
    with pytest.raises(ValueError, match=r"must name a causal language model.*Qwen3ForCausalLM is off by"):
        choose_layout(policy, shares=True)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("wrong", [(TreeSequences,), (TreeSequences, StemSequences)])
def test_a_layout_whose_gradients_alone_are_wrong_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: tuple[type[TreeSequences], ...]
) -> None:
    policy = plain_policy("qwen3", tmp_path)
    computed = layout_module._laid_out

    def halved(*given: Any, **options: Any) -> Any:
        found = computed(*given, **options)
        if type(options["sequences"]) in wrong:
            found.gradients[3] = found.gradients[3] * 0.5
        return found

    monkeypatch.setattr(layout_module, "_laid_out", halved)
    found = choose_layout(policy, shares=True)
    assert (found.packs, found.shares) == (False, len(wrong) == 1)
    assert found.why.count("in gradients by") == len(wrong)


@pytest.mark.usefixtures("alone")
def test_a_layout_in_which_one_experts_gradient_is_wrong_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = plain_policy("qwen3_moe", tmp_path)
    computed = layout_module._laid_out
    (number,) = [
        number for number, (name, _) in enumerate(policy.named_parameters()) if name.endswith("1.mlp.experts.down_proj")
    ]

    def without_one(*given: Any, **options: Any) -> Any:
        found = computed(*given, **options)
        if isinstance(options["sequences"], TreeSequences):
            found.gradients[number][2] = 0.0
        return found

    monkeypatch.setattr(layout_module, "_laid_out", without_one)
    found = choose_layout(policy, shares=True)
    assert not found.shares and found.why.count("in gradients by") == 2


@pytest.mark.usefixtures("alone")
def test_rows_of_the_test_reach_beyond_a_window_and_are_no_longer_than_rows_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load_policy(make_family("mistral", tmp_path / "wide", sliding_window=200), device=torch.device("cpu"))
    seen: list[int] = []
    own_logits = policy.own_logits
    monkeypatch.setattr(policy, "own_logits", lambda ids: seen.append(len(ids)) or own_logits(ids))
    for longest, expected in ((1000, 224), (100, 100)):
        seen.clear()
        choose_layout(policy, shares=True, longest_row=longest)
        assert max(seen) == expected


@pytest.mark.usefixtures("alone")
def test_lack_of_memory_chooses_no_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(layout_module, "_laid_out", fail)
    with pytest.raises(torch.OutOfMemoryError):
        choose_layout(plain_policy("qwen3", tmp_path), shares=True)


@pytest.mark.usefixtures("alone")
def test_a_logit_scale_that_is_forgotten_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head that the project had: the output matrix alone."""
    policy = plain_policy("granite", tmp_path)
    head = policy.lm.get_output_embeddings()
    monkeypatch.setattr(Policy, "_logits_of", lambda self, states, kind: head(states))
    with pytest.raises(ValueError, match="GraniteForCausalLM is off by"):
        choose_layout(policy, shares=True)


def test_layers_of_a_tower_are_sharded_and_checkpointed_like_all_others(tmp_path: Path) -> None:
    lm = plain_policy("qwen3_5_vl", tmp_path).lm
    assert len(layers_of(lm)) == 6 and len(layers_of(lm.get_decoder())) == 4


def test_a_saved_folder_is_the_sources_with_other_weights(tmp_path: Path) -> None:
    folder = make_family("llama", tmp_path / "llama")
    for name in ("processor_config.json", "chat_template.json", "vocab.txt", "modeling_own.py"):
        (folder / name).write_text(f"{name}, as it is\n")
    for name in ("training_args.bin", "model.safetensors.index.json.bak", "adapter_config.json"):
        (folder / name).write_text("no")
    learner = make_trainer(folder, dtype="bfloat16", advantage="grpo", critic="none")
    try:
        learner.save_pretrained(tmp_path / "saved")
    finally:
        learner.close()
    left_out = {"training_args.bin", "model.safetensors.index.json.bak", "adapter_config.json"}
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {path.name for path in folder.iterdir()} - left_out
    for path in (tmp_path / "saved").iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            assert path.read_bytes() == (folder / path.name).read_bytes()
    config = transformers.AutoConfig.from_pretrained(tmp_path / "saved")
    assert config.dtype == torch.bfloat16
    assert config.to_diff_dict() | {"dtype": 0} == transformers.AutoConfig.from_pretrained(folder).to_diff_dict() | {
        "dtype": 0
    }
