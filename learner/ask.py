"""Asks a running run over HTTP, by the address and the key that it left in its folder.

Used by the commands of a live run and by its page. Invariant: the key goes to that address, and nowhere else.
"""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path
from typing import Any

import httpx2

from buffers.errors import UnderstudyError
from buffers.outgoing import RUN, Outgoing

ANSWER_S = 600.0
"""Longest time for an answer: a large ledger takes its time to forget."""


class RunAway(UnderstudyError):
    """No run answers there."""


class RunRefused(UnderstudyError):
    """It answers that it does not do it."""


async def ask_run(run: Path, who: str, route: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer of the run in a folder. `who`: whose key is sent, scorer or admin. Raises RunAway, RunRefused."""
    try:
        place = dict(word.split("=", 1) for word in shlex.split((run / f"{who}.env").read_text(encoding="utf-8")))
        headers = {"Authorization": f"Bearer {place[f'{who.upper()}_KEY']}"}
        async with Outgoing(RUN, headers=headers) as client, asyncio.timeout(ANSWER_S):
            answer = await client.post(f"{place['SERVER_URL']}/{route}", json=body)
        told: dict[str, Any] = answer.json()
    except (OSError, KeyError, ValueError, TimeoutError, httpx2.HTTPError) as error:
        raise RunAway(f"RUN must be a live run that is running, got {run} ({error!r:.200})") from error
    if answer.status_code != 200:
        raise RunRefused(str(told.get("error", {}).get("message", told)))
    return told
