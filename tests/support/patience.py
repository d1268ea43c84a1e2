"""How long tests wait for a state: reached only where it never comes. No test judges by it how fast something is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
PATIENCE_S = 600.0


async def begun(generate: Callable[..., Coroutine[Any, Any, T]]) -> asyncio.Task[T]:
    """`generate(on_token=)` as a task that has had its first tokens: how many come at once is by chance. Raises what it raises."""
    first = asyncio.Event()
    running = asyncio.create_task(generate(on_token=first.set))
    waiting = asyncio.create_task(first.wait())
    await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not first.is_set():
        await running
    return running
