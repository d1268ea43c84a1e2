"""What all tests of the learner share."""

from __future__ import annotations

import multiprocessing

import pytest

from learner.checkpoints import weight_sync


@pytest.fixture(autouse=True)
def pullers_are_new_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's fork server, as tests have it, imports vLLM first, for seconds; a puller needs nothing of that."""
    monkeypatch.setattr(weight_sync, "own_context", lambda: multiprocessing.get_context("spawn"))
