"""Which rank and engine go on which card, and what is refused."""

from __future__ import annotations

import pytest

from configs.load import load_config
from learner.placement.memory import total
from learner.placement.plan import DoesNotFit, EnginePlace, Node, make_plan, next_engine, place
from tests.learner.placement.shapes import node, shape

GRPO = ("learner.advantage=grpo", "learner.critic=none", "model.dtype=bfloat16")


def places(nodes, *, ranks, engines=1, tensor_parallel=1):
    found = place(nodes, ranks=ranks, engines=engines, tensor_parallel=tensor_parallel)
    return tuple(rank.card for rank in found.ranks), [
        (engine.node, engine.cards, engine.beside_rank) for engine in found.engines
    ]


def test_on_one_card_engine_and_rank_share_it():
    assert places([node(cards=1)], ranks=1) == ((0,), [(0, (0,), True)])


def test_engines_take_cards_without_a_rank_first():
    assert places([node(cards=4)], ranks=2, engines=2) == ((0, 1), [(0, (2,), False), (0, (3,), False)])


def test_engines_share_cards_of_ranks_when_there_are_no_others():
    assert places([node(cards=4)], ranks=3, engines=2) == ((0, 1, 2), [(0, (3,), False), (0, (0,), True)])


def test_an_engines_cards_are_neighbours_with_as_few_ranks_as_can_be():
    assert places([node(cards=8)], ranks=5, tensor_parallel=4)[1] == [(0, (4, 5, 6, 7), True)]
    assert places([node(cards=8)], ranks=4, engines=2, tensor_parallel=2)[1] == [(0, (4, 5), False), (0, (6, 7), False)]


def test_no_card_is_left_between_engines():
    assert len(places([node(cards=8)], ranks=1, engines=4, tensor_parallel=2)[1]) == 4
    assert places([node(cards=8)], ranks=1, tensor_parallel=7)[1] == [(0, (1, 2, 3, 4, 5, 6, 7), False)]


def test_engines_go_to_another_node_before_they_share():
    assert places([node(cards=8), node(cards=8)], ranks=8, tensor_parallel=8)[1] == [(1, tuple(range(8)), False)]


def test_without_a_gpu_all_is_on_the_cpu():
    assert places([Node()], ranks=2) == ((None, None), [(0, (), True)])


def test_without_a_gpu_engines_are_spread_over_the_nodes():
    assert places([Node()] * 3, ranks=1, engines=4)[1] == [(0, (), True), (1, (), False), (2, (), False), (0, (), True)]


def test_ranks_are_on_as_few_nodes_as_can_be():
    nodes = [node(cards=2), node(cards=8), node(cards=8)]
    assert [rank.node for rank in place(nodes, ranks=4, engines=1, tensor_parallel=1).ranks] == [1] * 4
    assert [rank.node for rank in place(nodes, ranks=2, engines=1, tensor_parallel=1).ranks] == [0] * 2
    spread = place(nodes, ranks=11, engines=1, tensor_parallel=1)
    assert [rank.node for rank in spread.ranks] == [0] * 2 + [1] * 8 + [2]
    assert spread.engines[0].node == 2 and not spread.engines[0].beside_rank


def test_a_range_of_engines_takes_what_there_is():
    assert len(places([node(cards=4)], ranks=1, engines=(1, 9))[1]) == 4
    assert [at for at, _, _ in places([Node()] * 3, ranks=1, engines=(2, 9))[1]] == [0, 1, 2]
    with pytest.raises(
        DoesNotFit, match=r"rollout.engines.fewest must be at most the 3 nodes .* set rollout.engines.fewest=3"
    ):
        place([Node()] * 3, ranks=1, engines=(4, 9), tensor_parallel=1)


def test_one_more_engine_goes_where_there_is_room():
    nodes = [node(cards=2), node(cards=2, alive=False), node(cards=2)]
    placed = place(nodes, ranks=1, engines=3, tensor_parallel=1)
    assert [engine.node for engine in placed.engines] == [0, 2, 2]
    more = {"ranks": placed.ranks, "engines": placed.engines, "tensor_parallel": 1, "one_per_cpu": True}
    beside = next_engine(nodes, **more)
    assert beside == EnginePlace(node=0, cards=(0,), beside_rank=True)
    assert next_engine(nodes, **{**more, "engines": [*placed.engines, beside]}) is None


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"ranks": 9}, "learner.ranks must be at most the 8 cards .* got 9; set learner.ranks=8"),
        (
            {"ranks": 1, "tensor_parallel": 16},
            "rollout.tensor_parallel must be at most the 8 cards of one node, got 16",
        ),
        (
            {"ranks": 1, "engines": 5, "tensor_parallel": 2},
            r"got 5 \* 2 with cards for 4 engines; set rollout.engines=4",
        ),
    ],
)
def test_too_few_cards_are_refused(asked, words):
    with pytest.raises(DoesNotFit, match=words):
        place([node(cards=8)], **{"engines": 1, "tensor_parallel": 1, **asked})


def test_an_engine_of_several_cards_needs_gpus():
    with pytest.raises(DoesNotFit, match=r"rollout.tensor_parallel must be 1 without a GPU, got 2"):
        place([Node()], ranks=1, engines=1, tensor_parallel=2)


def test_ranks_without_room_are_refused_with_a_number_of_ranks_that_has():
    config = load_config(overrides=[*GRPO, "learner.ranks=1"])
    with pytest.raises(
        DoesNotFit,
        match=r"learner rank 0 must have room .* \(137\.3 GiB\) .* got 80\.0 GiB; set "
        r"learner\.gradient_checkpointing=true and learner\.ranks=3",
    ):
        make_plan(config, shape=shape("Qwen3-8B"), nodes=[node(cards=8)])
    fits = make_plan(
        load_config(overrides=[*GRPO, "learner.ranks=3", "learner.gradient_checkpointing=true"]),
        shape=shape("Qwen3-8B"),
        nodes=[node(cards=8)],
    )
    assert all(use.phases[1] <= use.limit for use in fits.uses)


def test_ranks_that_no_number_of_has_room_get_an_adapter():
    config = load_config(overrides=[*GRPO, "learner.ranks=8", "rollout.tensor_parallel=8"])
    with pytest.raises(DoesNotFit, match=r"learner.lora.rank=32"):
        make_plan(config, shape=shape("Qwen3-32B"), nodes=[node(cards=8, gib=40)] * 2)


def test_an_engine_whose_share_is_too_small_for_its_weights_is_refused():
    config = load_config(overrides=[*GRPO, "learner.lora.rank=8", "learner.ranks=8"])
    with pytest.raises(
        DoesNotFit,
        match=r"engine 0 must have room for its weights \(61\.0 GiB\).* got 32\.0 GiB of 80\.0 GiB; set rollout",
    ):
        make_plan(config, shape=shape("Qwen3-32B"), nodes=[node(cards=8)])


def test_heads_are_divided_evenly():
    config = load_config(overrides=[*GRPO, "rollout.tensor_parallel=3"])
    with pytest.raises(DoesNotFit, match=r"rollout.tensor_parallel must divide the model's 32 attention heads, got 3"):
        make_plan(config, shape=shape("Qwen3-8B"), nodes=[node(cards=8)])


def test_an_engine_takes_more_of_a_card_of_its_own():
    one = make_plan(load_config(overrides=[*GRPO]), shape=shape("Qwen3-1.7B"), nodes=[node(cards=1)])
    two = make_plan(load_config(overrides=[*GRPO]), shape=shape("Qwen3-1.7B"), nodes=[node(cards=2)])
    asked = make_plan(
        load_config(overrides=[*GRPO, "rollout.gpu_memory_utilization=0.5"]),
        shape=shape("Qwen3-1.7B"),
        nodes=[node(cards=1)],
    )
    shares = [
        round(use.engine_share / use.limit, 2)
        for plan in (one, two, asked)
        for use in plan.uses
        if use.engine is not None
    ]
    assert shares == [0.4, 0.9, 0.5]


def test_an_engine_that_sleeps_makes_room_for_the_update():
    keys = [
        *GRPO,
        "buffer.max_policy_lag=0",
        "learner.gradient_checkpointing=true",
        "rollout.gpu_memory_utilization=0.6",
    ]
    awake = make_plan(load_config(overrides=keys), shape=shape("Qwen3-1.7B"), nodes=[node(cards=1)]).uses[0]
    asleep = make_plan(
        load_config(overrides=[*keys, "rollout.sleep=true"]), shape=shape("Qwen3-1.7B"), nodes=[node(cards=1)]
    ).uses[0]
    resting = total([item for item in asleep.rank_items if item.stays], certain=True)
    assert awake.phases[0] == total(awake.rank_items, certain=True) + awake.engine_share
    assert asleep.phases[0] == resting + asleep.engine_share < awake.phases[0]


def test_an_evaluation_needs_room_for_its_engine_only():
    config = load_config(overrides=[*GRPO, "learner.ranks=1"])
    (use,) = make_plan(config, shape=shape("Qwen3-8B"), nodes=[node(cards=1, gib=24)], learns=False).uses
    assert (use.rank, use.engine) == (None, 0)
