"""Rules of router replay and of the routers' loss: in every family with experts, and however rows are laid out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.families import FAMILIES, make_family
from buffers.records import UNKNOWN_EXPERT, UInt16
from learner.model.load import load_policy
from learner.model.policy import Policy
from learner.training.packing import PaddedSequences, Sequences
from learner.training.stems import StemSequences
from learner.training.tree_packing import PrefixTree, TreeSequences

CPU = torch.device("cpu")
WITH_EXPERTS = (
    "deepseek_v3", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite", "gpt_oss", "granitemoe", "granitemoehybrid", "hunyuan_moe",
    "kimi_linear", "lfm2_moe", "llama4", "minimax_m2", "mixtral", "nemotron_h", "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe",
    "qwen3_5_moe_vl", "qwen3_moe", "qwen3_next",
)  # fmt: skip
ALWAYS = ("deepseek_v3", "gpt_oss", "llama4", "phimoe", "qwen3_moe")
"""One of each kind of router; the others are played with the long tests."""
families = pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in ALWAYS else pytest.mark.long) for each in WITH_EXPERTS]
)


def policy_of(name: str, folder: Path) -> Policy:
    policy = load_policy(make_family(name, folder / name), device=CPU)
    policy.routing.use(replay=True, balance=True)
    return policy


def forked_rows(*, stem: int = 40, tails: Sequence[int] = (24, 13, 17)) -> Sequences:
    """Rows that begin alike, all of whose tokens but the first are trained."""
    rng = np.random.default_rng(0)
    start = rng.integers(3, 500, stem)
    ids = [np.concatenate([start, rng.integers(3, 500, tail)]).astype(np.int32) for tail in tails]
    return Sequences(ids, masks=[np.array([0, *[1] * (len(row) - 1)], dtype=np.uint8) for row in ids])


def chosen(policy: Policy, ids: Any, *, experts: UInt16 | None = None) -> UInt16:
    """[L, layers, K] what routers choose for one row alone, read off their own answers."""
    found: dict[int, Tensor] = {}

    def keep(number: int, answer: Any) -> None:
        whole = [part for part in answer if not part.is_floating_point()]
        found[number] = (
            whole[0] if whole else answer[0].topk(1).indices
        )  # llama4 gives a score for each expert, of which one is > 0

    hooks = [
        router.register_forward_hook(lambda _, given, answer, number=number: keep(number, answer))
        for number, router in policy.routing.routed.items()
    ]
    row = Sequences([ids], masks=[np.zeros(len(ids), dtype=np.uint8)], experts=[experts])
    with torch.no_grad():
        policy._states(PaddedSequences(row).micro_batch([0], device=CPU))
    for hook in hooks:
        hook.remove()
    shape = (len(ids), policy.routing.num_layers, next(iter(found.values())).shape[1])
    experts = np.zeros(shape, dtype=np.uint16)
    for number, one in found.items():
        experts[:, number] = one.numpy()
    return experts


def others(policy: Policy, rows: Sequences) -> list[UInt16]:
    """Experts that the routers would not choose, and for some tokens nothing; of what rows share the same."""
    num = policy.lm.config.get_text_config().to_dict()
    count = next(
        num[key] for key in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts") if key in num
    )
    count = count[0] if isinstance(count, list) else count
    found = []
    for ids in rows.ids:
        own = chosen(policy, ids)
        moved = ((own + 1) % count).astype(np.uint16)
        moved[5] = UNKNOWN_EXPERT
        moved[-1] = UNKNOWN_EXPERT
        found.append(moved)
    return found


def test_every_family_with_experts_is_here() -> None:
    named = {
        name
        for name, (_, told) in FAMILIES.items()
        if {"num_experts_per_tok", "moe_topk", "moe_k"} & {*told, *told.get("text_config", {})}
    }
    assert named == {*WITH_EXPERTS, "deepseek_v3_dense"}


def outcome(policy: Policy, rows: Sequences) -> tuple[Tensor, list[Tensor]]:
    """Log-probabilities of all trained tokens, and the gradients of what has one."""
    policy.zero_grad()
    logprobs = torch.zeros(rows.num_trained)
    for piles in rows.plan(range(len(rows.ids)), num_ranks=1, token_budget=2**20):
        micro = rows.micro_batch(piles[0], device=CPU)
        found = policy(micro, temperature=1.0).logprobs
        (found * torch.linspace(0.0, 5.0, rows.num_trained).cos()[micro.index]).sum().backward()
        logprobs[micro.index] = found.detach()
    gradients = [torch.zeros_like(one) if one.grad is None else one.grad.clone() for one in policy.lm.parameters()]
    return logprobs, gradients


def with_experts(rows: Sequences, experts: Sequence[UInt16 | None]) -> Sequences:
    return Sequences(rows.ids, masks=rows.masks, experts=experts)


@families
def test_replaying_a_models_own_choice_changes_nothing(name: str, tmp_path: Path) -> None:
    policy, rows = policy_of(name, tmp_path), forked_rows(tails=(13,))
    assert policy.routing.routed
    own = chosen(policy, rows.ids[0])
    free, free_gradients = outcome(policy, PaddedSequences(rows))
    policy.routing.agreed.zero_()
    told, gradients = outcome(policy, PaddedSequences(with_experts(rows, [own])))
    assert torch.equal(told, free)
    assert all(torch.equal(one, other) for one, other in zip(gradients, free_gradients, strict=True))
    assert policy.routing.agreed.tolist() == [53 * len(policy.routing.routed)] * 2
    moved = others(policy, rows)
    away, _ = outcome(policy, PaddedSequences(with_experts(rows, moved)))
    assert float((away - free).abs().mean()) > 1e-3
    used = chosen(policy, rows.ids[0], experts=moved[0])
    known = moved[0] != UNKNOWN_EXPERT
    routed = list(policy.routing.routed)
    assert (used[:, routed][known[:, routed]] == moved[0][:, routed][known[:, routed]]).all()


def written_out(name: str, router: Any, states: Tensor, experts: Tensor) -> tuple[Tensor, ...]:
    """What a router answers that has chosen these experts, by the formulas of its family."""
    states = states.reshape(-1, states.shape[-1])
    if name == "gpt_oss":
        logits = functional.linear(states, router.weight, router.bias)
        return logits, logits.gather(1, experts).softmax(-1), experts
    logits = functional.linear(states, router.weight)
    if name == "llama4":
        scores = torch.full_like(logits, -torch.inf).scatter(1, experts, logits.gather(1, experts)).sigmoid()
        return scores, logits
    weights = (logits.sigmoid() if name == "deepseek_v3" else logits.softmax(-1)).gather(1, experts)
    weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights * getattr(router, "routed_scaling_factor", 1.0), experts


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "llama4"])
def test_forced_experts_give_what_routers_give_that_choose_them(name: str, tmp_path: Path) -> None:
    policy, rows = policy_of(name, tmp_path), forked_rows(tails=(13,))
    (moved,) = others(policy, rows)
    own = chosen(policy, rows.ids[0])
    moved[[5, -1]] = own[[5, -1]]
    found, gradients = outcome(policy, PaddedSequences(with_experts(rows, [moved])))
    for number, router in policy.routing.routed.items():
        told = torch.from_numpy(moved[:, number].astype(np.int64))
        router.forward = lambda states, router=router, told=told: written_out(name, router, states, told)
    expected, expected_gradients = outcome(policy, PaddedSequences(rows))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    for (parameter, _), one, other in zip(policy.lm.named_parameters(), gradients, expected_gradients, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4 * max(1.0, float(other.abs().max())), rtol=0, msg=parameter)


@families
def test_every_layout_replays_what_each_row_alone_does(name: str, tmp_path: Path) -> None:
    policy, rows = policy_of(name, tmp_path), forked_rows()
    moved = others(policy, rows)
    for row in moved[1:]:  # what is shared was computed once, or cached: by one engine
        row[:40] = moved[0][:40]
    rows = with_experts(rows, moved)
    expected, expected_gradients = outcome(policy, Alone(rows))
    tree, groups = PrefixTree(rows.ids), np.zeros(3, dtype=np.int64)
    packs = name not in (
        "gpt_oss",
        "granitemoehybrid",
        "kimi_linear",
        "lfm2_moe",
        "llama4",
        "nemotron_h",
        "qwen3_5_moe",
        "qwen3_5_moe_vl",
        "qwen3_next",
    )
    layouts = [PaddedSequences(rows), StemSequences(rows, tree=tree, groups=groups)]
    layouts += [rows, TreeSequences(rows, tree=tree, groups=groups)] if packs else []
    for layout in layouts:
        found, gradients = outcome(policy, layout)
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
        scale = max(float(one.abs().max()) for one in expected_gradients)
        for (parameter, _), one, other in zip(policy.lm.named_parameters(), gradients, expected_gradients, strict=True):
            assert float((one - other).abs().max()) <= 1e-3 * scale, (type(layout).__name__, parameter)


@pytest.mark.parametrize("kind", [TreeSequences, StemSequences])
def test_a_shared_place_has_the_experts_of_the_row_that_knows_them(kind: type[TreeSequences]) -> None:
    rows = forked_rows(tails=(9, 9))
    for known in (0, 1):
        experts = [np.full((49, 1, 2), 1 + row if row == known else UNKNOWN_EXPERT, dtype=np.uint16) for row in (0, 1)]
        told = with_experts(rows, experts)
        micro = kind(told, tree=PrefixTree(rows.ids), groups=np.zeros(2, dtype=np.int64)).micro_batch(
            [0, 1], device=CPU
        )
        assert micro.experts is not None
        assert (micro.experts == 1 + known).all(-1).sum() == 49 and (micro.experts == UNKNOWN_EXPERT).any()


class Alone(PaddedSequences):
    """Each row in a micro-batch of its own."""

    def plan(self, rows: Sequence[int], *, num_ranks: int, token_budget: int) -> list[list[list[int]]]:
        return [[[row]] for row in rows]
