"""Rules of learner/placement/run_nodes.py: the places of engines and ranks while nodes join and go."""

from __future__ import annotations

from dataclasses import replace

import pytest

from buffers.errors import EngineError, UnderstudyError
from configs.load import load_config
from learner.placement.plan import DoesNotFit, Node
from learner.placement.run_nodes import RunNodes
from learner.training.ranks import RankFailed


class Cluster:
    """Nodes a, b, ... with these numbers of cards, all counted only."""

    def __init__(self, *cards: int) -> None:
        self.living = [self.node(number, many) for number, many in enumerate(cards)]
        self.broken: set[str] = set()

    @staticmethod
    def node(number: int, cards: int) -> Node:
        return Node(cards=(0,) * cards, id="abcdefgh"[number], address=f"10.0.0.{number + 1}")

    def run(self, *overrides: str) -> RunNodes:
        return RunNodes(load_config(overrides=list(overrides)), nodes=self.living, look=self.look, check=self.check)

    def look(self) -> list[Node]:
        return list(self.living)

    def check(self, node: Node) -> Node:
        if node.id in self.broken:
            raise UnderstudyError(f"node {node.address} must see the model")
        return replace(node, devices=tuple(f"GPU-{node.id}{card}" for card in range(len(node.cards))))

    def lose(self, name: str) -> None:
        self.living = [node for node in self.living if node.id != name]


def where(nodes: RunNodes) -> dict[str, str]:
    return {name: nodes.node_of(place).id for name, place in nodes.engines.items()}


def test_an_engine_keeps_its_place_until_its_node_is_gone() -> None:
    cluster = Cluster(0, 0, 0)
    nodes = cluster.run("rollout.engines=3")
    assert where(nodes) == {"e0": "a", "e1": "b", "e2": "c"}
    assert nodes.node_of(nodes.take("e1")).id == "b"
    cluster.lose("b")
    assert nodes.node_of(nodes.take("e2")).id == "c"
    assert nodes.node_of(nodes.take("e1")).id in ("a", "c")


def test_without_room_an_engine_says_so_and_starts_once_a_node_joins() -> None:
    cluster = Cluster(1, 1)
    nodes = cluster.run("rollout.engines=2")
    cluster.lose("b")
    with pytest.raises(
        EngineError, match=r"engine e0 must have room on a node of the cluster, got none; .* rollout.engines=1"
    ):
        nodes.take("e0")  # the first engine has the card without a rank
    assert nodes.refresh() == [] and where(nodes) == {"e1": "a"}
    cluster.living.append(cluster.node(2, 1))
    assert nodes.node_of(nodes.take("e0")).id == "c"


def test_engines_are_added_up_to_the_most_as_nodes_join() -> None:
    cluster = Cluster(0, 0)
    nodes = cluster.run("rollout.engines={fewest: 1, most: 3}")
    assert where(nodes) == {"e0": "a", "e1": "b"} and nodes.one_more() is None
    cluster.living.append(cluster.node(2, 0))
    nodes.refresh()
    assert nodes.one_more() == "e2" and where(nodes)["e2"] == "c" and nodes.one_more() is None
    nodes.release("e1")
    assert nodes.one_more() == "e3" and where(nodes)["e3"] == "b"
    cluster.living.append(cluster.node(3, 0))
    nodes.refresh()
    assert nodes.one_more() is None, "the run has all that it wants"


def test_a_node_that_cannot_take_part_ends_the_start_and_is_left_out_later() -> None:
    cluster = Cluster(0, 0)
    cluster.broken.add("b")
    with pytest.raises(UnderstudyError, match=r"node 10.0.0.2 must see the model"):
        cluster.run("rollout.engines=2").check()
    cluster = Cluster(0, 0, 0)
    nodes = cluster.run("rollout.engines={fewest: 1, most: 3}")
    cluster.broken.add("c")
    assert nodes.node_of(nodes.take("e1")).devices == ()
    with pytest.raises(EngineError, match="must have room"):
        nodes.take("e2")
    assert nodes.refusals() == ["node 10.0.0.3 must see the model"] and nodes.refusals() == []
    assert nodes.one_more() is None


def test_ranks_move_to_the_nodes_that_are_left() -> None:
    cluster = Cluster(0, 2, 2)
    nodes = cluster.run("learner.ranks=3", "rollout.engines=1")
    assert nodes.rank_node_ids() == ["b", "b", "c"] and nodes.ranks_elsewhere
    first = nodes.rank_places()[0]
    assert (first.node_id, first.address, first.num_gpus, first.device) == ("b", "10.0.0.2", 1, "")
    cluster.living.append(cluster.node(3, 2))
    cluster.lose("c")
    assert [place.node_id for place in nodes.rank_places()] == ["b", "b", "d"]
    cluster.lose("d")
    with pytest.raises(RankFailed, match=r"lost a node: learner.ranks must be at most the 2 cards .* got 3"):
        nodes.rank_places()
    cluster.lose("b")
    with pytest.raises(RankFailed, match="no node with a GPU is left"):
        nodes.rank_places()


def test_a_card_that_an_engine_has_already_is_not_counted_twice() -> None:
    cluster = Cluster(0, 1, 1, 1)
    nodes = cluster.run("learner.ranks=2", "rollout.engines=1")
    assert where(nodes) == {"e0": "d"} and [place.num_gpus for place in nodes.rank_places()] == [1, 1]
    cluster.lose("c")
    assert [(place.node_id, place.num_gpus) for place in nodes.rank_places()] == [("b", 1), ("d", 0)]


def test_ranks_see_the_cards_that_their_node_told() -> None:
    nodes = Cluster(0, 2).run("learner.ranks=2", "rollout.engines=1", "run.trusted_network=true")
    nodes.check()
    assert [place.device for place in nodes.rank_places()] == ["GPU-b0", "GPU-b1"]


def test_ranks_of_the_runs_own_node_are_as_before() -> None:
    nodes = RunNodes(load_config(overrides=["learner.ranks=2"]), nodes=[Node()])
    assert [place.node_id for place in nodes.rank_places()] == ["", ""] and not nodes.ranks_elsewhere
    assert nodes.refresh() == []


def test_more_engines_than_nodes_can_hold_are_refused() -> None:
    with pytest.raises(DoesNotFit, match=r"rollout.engines.fewest must be at most the 2 nodes .* got 3"):
        Cluster(0, 0).run("rollout.engines={fewest: 3, most: 4}")
