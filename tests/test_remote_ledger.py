"""A ledger in a Ray actor on another node keeps the rules of any buffer, and survives the death of its process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from remote_parts import Nodes, open_remote, two_nodes

from buffers.conformance.rules import RULES, Rule, Site

pytestmark = pytest.mark.slow

NAMES = [rule.__name__ for rule in RULES]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with two_nodes() as nodes:
        yield nodes


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_a_ledger_on_another_node_keeps_the_rule(rule: Rule, nodes: Nodes, tmp_path: Path) -> None:
    rule(Site(partial(open_remote, node_id=nodes.disk), path=tmp_path / "ledger.sqlite", durable=True))
