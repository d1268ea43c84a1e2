"""Runs every rule against the buffer that `--buffer` names."""

from __future__ import annotations

import pytest

from buffers.conformance.rules import RULES, Rule, Site


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_buffer_keeps_the_rule(rule: Rule, site: Site) -> None:
    rule(site)
