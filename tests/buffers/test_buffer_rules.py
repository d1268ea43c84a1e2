"""Our buffers keep the rules that any buffer must keep, and a buffer that breaks one is found out."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest

from buffers.ledger.ledger import Ledger
from tests.support import buffer_rules as rules
from tests.support.buffer_rules import RULES, Rule, Site

NAMES = [rule.__name__ for rule in RULES]


def on_disk(path: Path) -> Site:
    return Site(Ledger, path=path / "ledger.sqlite", durable=True)


def in_memory(path: Path) -> Site:
    return Site(lambda _: Ledger(None), path=path, durable=False)


@pytest.mark.seconds
@pytest.mark.parametrize("make", [on_disk, in_memory])
@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_our_buffers_keep_the_rule(rule: Rule, make, tmp_path: Path) -> None:
    rule(make(tmp_path))


def test_every_rule_is_in_the_table() -> None:
    written = [
        name for name, value in vars(rules).items() if getattr(value, "__annotations__", {}).get("site") == "Site"
    ]
    assert sorted(written) == sorted(NAMES) and len(NAMES) >= 14


class Forgetful(Ledger):
    """Takes any score again."""

    def notify_score(self, episode_id: str, score: float, **settings: object) -> Future[bool]:
        super().notify_score(episode_id, score, **settings).exception()
        done: Future[bool] = Future()
        done.set_result(True)
        return done


def test_a_buffer_that_breaks_rules_is_found_out(tmp_path: Path) -> None:
    broken = []
    for rule in RULES:
        try:
            rule(Site(lambda _: Forgetful(None), path=tmp_path, durable=False))
        except AssertionError:
            broken.append(rule.__name__)
    assert "a_score_is_stored_once_and_another_value_is_refused" in broken
