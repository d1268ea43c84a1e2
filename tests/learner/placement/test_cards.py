"""Cards as they are described and as nvidia-smi lists them."""

from __future__ import annotations

import pytest

from buffers.errors import UnderstudyError
from learner.placement import plan
from learner.placement.plan import GIB, Node, described, own_node, visible

LISTED = "0, GPU-aaaa, 81559\n1, GPU-bbbb, 81559\n2, GPU-cccc, 40960\n"
MIB = 2**20


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("80", [Node(cards=(80 * GIB,))]),
        ("8x80", [Node(cards=(80 * GIB,) * 8)]),
        ("2x8x79.6", [Node(cards=(int(79.6 * GIB),) * 8)] * 2),
    ],
)
def test_cards_are_described_by_nodes_cards_and_gib(text, nodes):
    assert described(text) == nodes


@pytest.mark.parametrize("text", ["", "8*80", "0x80", "2x8x80x1", "8x0", "-1"])
def test_what_describes_no_card_is_refused(text):
    with pytest.raises(UnderstudyError, match="--gpus must be"):
        described(text)


@pytest.mark.parametrize(
    ("names", "devices"),
    [
        (None, ("0", "1", "2")),
        ("2,0", ("2", "0")),
        ("GPU-bb", ("1",)),
        ("", ()),
        ("-1", ()),
        ("1,7,0", ("1",)),
    ],
)
def test_cards_are_those_that_cuda_may_see_in_its_order(names, devices):
    node = visible(LISTED, names)
    assert node.devices == devices
    assert node.cards == tuple({"0": 81559, "1": 81559, "2": 40960}[device] * MIB for device in devices)


def test_a_machine_without_nvidias_tools_has_no_cards(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert plan.of_this_machine() == Node()
    with pytest.raises(UnderstudyError, match="nvidia-smi"):
        own_node(has_gpu=True)


def test_cards_of_a_torch_without_cuda_are_not_used(monkeypatch):
    monkeypatch.setattr(plan, "of_this_machine", lambda: visible(LISTED, None))
    assert own_node(has_gpu=False) == Node()
    assert len(own_node(has_gpu=True).cards) == 3
