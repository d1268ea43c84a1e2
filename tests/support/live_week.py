"""A week of a run of `understudy serve` in a minute: sessions through `LiveSessions` and a ledger, without an engine.

`live_through` opens sessions, stores their rounds, says what is thought of some, trains these, and lets the ledger's clock go on
between two hours. Nothing waits.
"""

from __future__ import annotations

import asyncio
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from buffers.ledger.ledger import Ledger
from mocked_server.conversation.live_episodes import Episodes, LiveEpisode
from mocked_server.live_keys import LiveKeys
from mocked_server.live_sessions import LiveSessions, Newest
from tests.support.buffer_parts import make_round

HOUR_S, DAY_S = 3600.0, 86_400.0
PATH = "/v1/chat/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hour:
    """At the end of one."""

    sessions: int
    """Opened so far."""
    kept: int
    """Of them not forgotten."""
    file_bytes: int
    """The ledger's file, and its log."""
    heap_bytes: int
    """What Python holds and held not before."""


async def live_through(
    folder: Path, *, hours: int, sessions_per_hour: int, retention_days: float | None, prompt: int, answer: int
) -> list[Hour]:
    """`prompt`, `answer`: tokens of each round; a session has two. Of three sessions one has a name, one gets a score."""
    path, keys = folder / "ledger.sqlite", LiveKeys(folder / "run")
    keys.add("ann")
    episodes = Episodes()
    with Ledger(path) as ledger:
        sessions = LiveSessions(
            ledger, keys=keys, episodes=episodes, silence_s=1e-6, words_count=False, policy=Newest(SimpleNamespace(version=0)),
            retention_s=None if retention_days is None else retention_days * DAY_S, restore=_never,
            on_ended=lambda *_: None,
        )  # fmt: skip
        tracemalloc.start()
        found, step, number = [], 0, 0
        for _ in range(hours):
            for _ in range(sessions_per_hour):
                number += 1
                await _play(sessions, ledger, number, prompt=prompt, answer=answer)
            await sessions.look()
            while (batch := await asyncio.wrap_future(ledger.claim(1, min_version=0))) is not None:
                step += 1
                await asyncio.wrap_future(ledger.commit_step(batch.lease_id, step=step, version=0))
            await asyncio.wrap_future(
                ledger.run(lambda db: db.execute("UPDATE session SET heard_at = heard_at - 3600") and None)
            )
            kept = await asyncio.wrap_future(ledger.episodes_of(user="ann", session=""))
            size = sum(each.stat().st_size for each in folder.glob("ledger.sqlite*"))
            found.append(
                Hour(sessions=number, kept=len(kept), file_bytes=size, heap_bytes=tracemalloc.get_traced_memory()[0])
            )
        tracemalloc.stop()
    return found


async def _play(sessions: LiveSessions, ledger: Ledger, number: int, *, prompt: int, answer: int) -> None:
    headers = [(b"x-session-id", b"session %d" % number)] if number % 3 == 0 else []
    live = await sessions.chooser("ann", PATH, headers)({})
    assert isinstance(live, LiveEpisode)
    draw = np.random.default_rng(number)
    for index in range(2):
        ids = draw.integers(0, 30_000, prompt + answer)
        round_ = make_round(live.episode_id, index=index, tail=ids[:prompt], sampled=ids[prompt:])
        await asyncio.wrap_future(ledger.put_round(round_))
        request: Any = type("Asked", (), {"request_id": f"chatcmpl-{number}-{index}-0"})
        sessions.recorded(request, round_)
    if number % 3 == 1:
        await sessions.feedback(
            user="ann",
            session="",
            response_id=f"chatcmpl-{number}-1",
            round_index=None,
            score=0.5,
            text="well",
            source="",
        )


def _never(*_: Any) -> LiveEpisode:
    raise AssertionError("each session is new")
