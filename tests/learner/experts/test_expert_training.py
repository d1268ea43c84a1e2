"""Rules of training with router replay and with the routers' loss: what a step's figures and weights make of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.families import make_family
from buffers.records import UNKNOWN_EXPERT, TrainBatch, UInt16
from learner.model import fsdp
from learner.model.layers import experts_per_token
from learner.training.batch_tensors import token_table
from learner.training.packing import PaddedSequences, Sequences
from tests.learner.experts.test_routing import CPU, chosen, forked_rows, others, outcome, policy_of, with_experts
from tests.support.learner_parts import branching_batch, make_model, make_trainer
from tests.support.weights.published_weights import published

KNOBS: dict[str, Any] = {"advantage": "grpo", "critic": "none", "lr": 1e-3, "lr_warmup_steps": 0, "minibatches": 1}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family("qwen3_moe", tmp_path_factory.mktemp("models") / "qwen3_moe")


def step(folder: Path, batch: TrainBatch, **knobs: Any) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    learner = make_trainer(folder, **KNOBS, **knobs)
    try:
        return learner.train_step(batch, version=0), published(learner)
    finally:
        learner.close()


def apart(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """The largest mean difference of a weight."""
    return max(float((weight - others[name]).abs().mean()) for name, weight in weights.items())


def recorded(batch: TrainBatch, tmp_path: Path, *, shift: int) -> TrainBatch:
    """The batch with experts that the model itself would choose, each `shift` further; of each row's last token none."""
    policy = policy_of("qwen3_moe", tmp_path)

    def experts(ids: Any) -> UInt16:
        found = (chosen(policy, ids) + shift) % 4
        found[-1] = UNKNOWN_EXPERT
        return found.astype(np.uint16)

    return TrainBatch(rows=[replace(row, experts=experts(row.ids)) for row in batch.rows])


@pytest.mark.seconds
def test_a_step_uses_the_recorded_experts_and_says_how_many_the_learner_would_have_chosen(
    mixture: Path, tmp_path: Path
) -> None:
    plain = branching_batch()
    own, other = (recorded(plain, tmp_path / str(shift), shift=shift) for shift in (0, 1))
    free, weights = step(mixture, other)
    assert "policy/router_agreement" not in free and "policy/router_aux_loss" not in free
    same, same_weights = step(mixture, own, router_replay=True)
    assert same["policy/router_agreement"] == 1.0
    assert apart(weights, same_weights) < 1e-6, "sums in another order"
    moved, moved_weights = step(mixture, other, router_replay=True, gradient_checkpointing=True)
    assert 0.0 <= moved["policy/router_agreement"] < 0.5
    assert apart(weights, moved_weights) > 1e-4
    assert abs(moved["policy/mean_logprob_diff"] - free["policy/mean_logprob_diff"]) > 1e-4
    nothing, _ = step(mixture, plain, router_replay=True)
    assert nothing["policy/router_agreement"] == 0.0, "nobody recorded any"


@pytest.mark.seconds
def test_a_row_that_an_engine_computed_is_computed_with_its_experts(mixture: Path, tmp_path: Path) -> None:
    own, other = (recorded(branching_batch(), tmp_path / str(shift), shift=shift).rows[0] for shift in (0, 1))
    found = {}
    for replays in (True, False):
        learner = make_trainer(mixture, **KNOBS, router_replay=replays)
        try:
            for name, row in (("own", own), ("other", other)):
                logprobs, share = learner.replayed(row.ids.tolist(), last=20, experts=row.experts)
                found[name, replays] = np.array(logprobs)
                assert share == float(replays) if name == "own" else share < 0.5
        finally:
            learner.close()
    np.testing.assert_allclose(found["own", True], found["own", False], atol=1e-5)
    np.testing.assert_array_equal(found["other", False], found["own", False])
    assert np.abs(found["other", True] - found["own", True]).mean() > 1e-3


@pytest.mark.seconds
def test_what_several_versions_computed_is_no_evidence_about_the_engine_and_they_share_nothing(
    mixture: Path, tmp_path: Path
) -> None:
    """An engine computes a prompt again under new weights, and routers then choose others than were recorded with its rounds."""
    batch, found = recorded(branching_batch(), tmp_path, shift=0), {}
    for change in (1000, 50, 0):  # beyond the end, between the two answers, at the start
        rows = [
            replace(row, expert_versions=-(np.arange(len(row.ids)) >= change).astype(np.int32)) for row in batch.rows
        ]
        table = token_table(replace(batch, rows=rows), min_version=0)
        assert int(table.verifiable.sum()) == (186 if change != 50 else 96)
        found[change] = step(mixture, replace(batch, rows=rows), router_replay=True)[0]
    shares = {change: metrics["policy/checked_share"] for change, metrics in found.items()}
    assert shares == {1000: 1.0, 50: pytest.approx(96 / 186), 0: 1.0}
    half = [
        replace(row, expert_versions=np.full(len(row.ids), number % 2, dtype=np.int32))
        for number, row in enumerate(batch.rows)
    ]
    apart, _ = step(mixture, replace(batch, rows=half), router_replay=True)
    assert 1.0 < apart["learner/raw_over_unique"] < found[0]["learner/raw_over_unique"]


def test_layers_that_are_computed_again_choose_what_they_were_told(tmp_path: Path) -> None:
    """The gradients of a checkpointed model are those of one that keeps everything, bit for bit."""
    found = []
    for checkpoints in (False, True):
        policy, rows = policy_of("qwen3_moe", tmp_path / str(checkpoints)), forked_rows()
        if checkpoints:
            policy.checkpoint_layers()
        told = with_experts(rows, others(policy, rows))
        policy.routing.agreed.zero_()
        found.append((*outcome(policy, told), policy.routing.agreed.tolist()))
    (logprobs, gradients, agreed), (again, again_gradients, again_agreed) = found
    assert torch.equal(logprobs, again) and agreed == again_agreed
    assert all(torch.equal(one, other) for one, other in zip(gradients, again_gradients, strict=True))


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss", "granitemoe"])
def test_the_routers_loss_is_transformers_own_and_knows_no_filled_up_place(name: str, tmp_path: Path) -> None:
    policy, rows = policy_of(name, tmp_path), forked_rows(tails=(24, 3))
    config = policy.lm.config
    assert experts_per_token(config) == 2
    balances = []
    for ids in rows.ids:
        row = Sequences([ids], masks=[np.array([0, *[1] * (len(ids) - 1)], dtype=np.uint8)])
        expected = policy.lm(
            input_ids=torch.from_numpy(ids).long()[None], output_router_logits=True, use_cache=False
        ).aux_loss
        found = policy(PaddedSequences(row).micro_batch([0], device=CPU), temperature=1.0).balance
        torch.testing.assert_close(found, expected)
        balances.append(found)
    beside = policy(PaddedSequences(rows).micro_batch([0, 1], device=CPU), temperature=1.0).balance
    policy.lm.set_attn_implementation("eager")
    ids = torch.from_numpy(np.stack([np.pad(row, (0, 64 - len(row)), mode="edge") for row in rows.ids])).long()
    real = torch.arange(64) < torch.tensor([[64], [43]])
    whole = policy.lm(input_ids=ids, attention_mask=real.long(), output_router_logits=True, use_cache=False).aux_loss
    torch.testing.assert_close(beside, whole)
    beside.backward()
    router = next(iter(policy.routing.routed.values()))
    assert all(float(weight.grad.abs().max()) > 0.0 for weight in router.parameters() if weight.grad is not None)
    with torch.no_grad():
        assert policy(PaddedSequences(rows).micro_batch([0, 1], device=CPU), temperature=1.0).balance is None


@pytest.mark.seconds
def test_the_routers_loss_counts_by_its_coefficient(mixture: Path) -> None:
    batch = branching_batch()
    _, weights = step(mixture, batch)
    figures, moved = step(mixture, batch, router_aux_coef=1.0, gradient_checkpointing=True)
    assert 1.9 < figures["policy/router_aux_loss"] < 4.0, "2 of 4 experts, evenly used: 2"
    assert not torch.equal(weights["model.layers.0.mlp.gate.weight"], moved["model.layers.0.mlp.gate.weight"])


@pytest.mark.parametrize("knob", [{"router_replay": True}, {"router_aux_coef": 0.01}])
def test_a_model_without_experts_is_refused(tmp_path: Path, knob: dict[str, Any]) -> None:
    (key,) = knob
    with pytest.raises(
        ValueError, match=f"learner.{key} needs a mixture of experts .* got Qwen3ForCausalLM; set learner.{key}="
    ):
        make_trainer(make_model(tmp_path / "tiny"), **KNOBS, **knob)
    fsdp.leave()
