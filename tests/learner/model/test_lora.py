"""Rules of learner/model/lora.py, and of a trainer with an adapter: the frozen weights never change, the engine gets
the adapter."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from benchmarks.families import make_family
from learner.model import fsdp
from learner.model.lora import add_adapter
from learner.model.packed_attention import MicroBatch
from learner.training.packing import Sequences
from learner.training.trainer import Trainer
from tests.support.learner_parts import make_model, make_trainer, walks
from tests.support.weights.published_weights import published

KNOBS: dict[str, Any] = {
    "lora": {"rank": 4, "alpha": 8.0}, "lr": 1e-2, "lr_warmup_steps": 0, "kl": {"coef": 0.01}, "critic": "shared",
}  # fmt: skip
PROMPT = torch.arange(1, 30)[None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def trainer(model: Path) -> Iterator[Trainer]:
    made = make_trainer(model, **KNOBS)
    yield made
    made.close()


def _logits(lm: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = lm(PROMPT).logits
    return logits


def _parameters(trainer: Trainer) -> dict[str, Tensor]:
    return {name: fsdp.local(weight).clone() for name, weight in trainer._policy.named_parameters()}


def test_only_the_adapter_and_the_value_head_are_trained(trainer: Trainer) -> None:
    before = _parameters(trainer)
    metrics = trainer.train_step(walks(), version=0)
    assert metrics["policy/grad_norm"] > 0.0
    changed = {name for name, weight in _parameters(trainer).items() if not torch.equal(weight, before[name])}
    small = {name for name in before if "lora_" in name or name.startswith("value_head")}
    assert changed == small
    assert len(small) == 2 * 7 * 2 + 2  # A and B of seven matrices in two layers
    optimized = sum(len(group["params"]) for group in trainer._own.optimizer.param_groups)
    assert optimized == len(small)


def test_fresh_adapter_is_the_model_itself(trainer: Trainer, model: Path, tmp_path: Path) -> None:
    trainer.save_pretrained(tmp_path / "out")
    saved, original = load_file(tmp_path / "out" / "model.safetensors"), load_file(model / "model.safetensors")
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[name], original[name]) for name in original)
    assert all(not weight.any() for name, weight in published(trainer).items() if ".lora_B." in name)


def test_reference_is_the_model_with_its_adapter_off_and_costs_an_adapters_memory(
    trainer: Trainer, model: Path
) -> None:
    for version in range(2):
        metrics = trainer.train_step(walks(), version=version)
    assert metrics["policy/kl_ref"] > 1e-6
    assert trainer._own.reference is not None
    assert sum(shard.numel() for shard in trainer._own.reference) < 0.1 * sum(
        weight.numel() for weight in trainer._policy.parameters()
    )
    with fsdp.swapped(trainer._policy, shards=trainer._own.reference), torch.no_grad():
        ids = PROMPT[0]
        found = trainer._policy(_all_trained(ids), temperature=1.0).logprobs
    plain = _logits(AutoModelForCausalLM.from_pretrained(model))[0, :-1].log_softmax(-1)
    torch.testing.assert_close(found, plain.gather(-1, PROMPT[0, 1:, None])[:, 0], atol=2e-5, rtol=0)


def _all_trained(ids: torch.Tensor) -> MicroBatch:
    mask = (np.arange(len(ids)) > 0).astype(np.uint8)
    return Sequences([ids.numpy().astype(np.int32)], masks=[mask]).micro_batch([0], device=torch.device("cpu"))


def test_engine_gets_the_adapter_and_the_trained_weights_stay(trainer: Trainer, model: Path, tmp_path: Path) -> None:
    trainer.train_step(walks(), version=0)
    before = _parameters(trainer)
    trainer.save_pretrained(tmp_path / "out")
    sent = published(trainer)
    after = _parameters(trainer)
    assert all(torch.equal(before[name], after[name]) for name in before)
    # two ways to the same logits: the merged folder, and peft's own reading of the adapter, which is what was published
    adapter = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    assert sent.keys() == adapter.keys()
    assert all(torch.equal(sent[name], adapter[name]) for name in adapter)
    merged = _logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    base = AutoModelForCausalLM.from_pretrained(model)
    plain = _logits(base)
    by_peft = _logits(PeftModel.from_pretrained(base, tmp_path / "out" / "adapter"))
    torch.testing.assert_close(by_peft, merged, atol=2e-4, rtol=0)
    assert float((merged - plain).abs().max()) > 0.01
    assert (tmp_path / "out" / "critic" / "value_head.safetensors").exists()


def test_next_step_finds_the_logprobs_of_the_merged_weights(trainer: Trainer, tmp_path: Path) -> None:
    """What the engine samples with is what the learner computes with."""
    trainer.train_step(walks(), version=0)
    trainer.save_pretrained(tmp_path / "out")
    ids = torch.from_numpy(walks().rows[0].ids).long()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        expected = merged(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        found = trainer._policy(_all_trained(ids), temperature=1.0).logprobs
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def test_adapter_depends_on_the_seed_only(model: Path) -> None:
    """Each rank makes its own and keeps a part of it: they must agree."""
    states = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        lm = AutoModelForCausalLM.from_pretrained(model)
        add_adapter(lm, rank=4, alpha=8.0, seed=7)
        states.append(lm.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("place", ["tiny", "../model/tiny"])
def test_an_adapter_names_its_base_for_every_folder(model: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    folder = model.parent if place == "tiny" else model.parent.parent / "model"
    folder.mkdir(exist_ok=True)
    (folder / "tiny").exists() or (folder / "tiny").symlink_to(model)
    monkeypatch.chdir(folder)
    lm = AutoModelForCausalLM.from_pretrained(place)
    config = add_adapter(lm, rank=4, alpha=8.0, seed=7)
    named = Path(str(config.base_model_name_or_path))
    assert named.is_absolute() and named.samefile(model)


def test_model_without_plain_linear_layers_is_refused() -> None:
    lm = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=32, n_embd=16, n_layer=1, n_head=2))
    with (
        pytest.warns(UserWarning, match="fan_in_fan_out"),
        pytest.raises(
            ValueError, match=r"learner\.lora\.rank > 0 needs linear layers, got Conv1D for transformer\.h\.0"
        ),
    ):
        add_adapter(lm, rank=4, alpha=8.0, seed=0)


@pytest.mark.seconds
@pytest.mark.parametrize(("name", "left_out"), [("llama4", "router"), ("phimoe", "router"), ("mamba2", "out_proj")])
def test_routers_and_ends_of_mamba_mixers_have_no_adapter(name: str, left_out: str, tmp_path: Path) -> None:
    folder = make_family(name, tmp_path / name)
    trainer = make_trainer(folder, **KNOBS | {"critic": "none", "advantage": "grpo"})
    try:
        trainer.train_step(walks(), version=0)
        names = set(published(trainer))
        assert names and not any(left_out in each for each in names)
        trainer.save_pretrained(tmp_path / "out")
        found = trainer.logprobs_of(PROMPT[0].tolist(), last=28)
    finally:
        trainer.close()
    logits = _logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager"))
    expected = logits[0, :-1].log_softmax(-1).gather(-1, PROMPT[0, 1:, None])[:, 0]
    np.testing.assert_allclose(found, expected, atol=2e-5)
