"""Engines' figures as tests write them."""

from __future__ import annotations

from typing import Any

from mocked_server.fleet.member import EngineFigures

CAPACITY = 1000
"""Tokens of a cache."""


def figures(name: str = "e0", **given: Any) -> EngineFigures:
    """An engine that is up and does nothing, but for what is given. `kv`: tokens_held as a share of the capacity."""
    fields: dict[str, Any] = {
        "is_up": True, "version": 0, "running": 0, "waiting": 0, "tokens_held": 0, "kv_capacity": CAPACITY,
        "sampled_tokens": 0, "prompt_tokens": 0, "cached_tokens": 0, "preemptions": 0, "restarts": 0, "moved_in": 0,
    }  # fmt: skip
    if "kv" in given:
        given["tokens_held"] = round(given.pop("kv") * given.get("kv_capacity", CAPACITY))
    return EngineFigures(name=name, **(fields | given))
