"""Agents of `stream_faults`, in a process of their own: reads a plan as a line of JSON, prints figures as JSON.

Each agent streams over the openai client, one conversation after the other, each with a key of its own, until standard input ends.
Nothing is retried, so
that whatever breaks is counted.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from typing import Any

import openai

from benchmarks.gateway_load import Plan


async def play_all(plan: Plan, number: int, figures: dict[str, Any], over: asyncio.Event) -> None:
    """One agent."""
    for turn, key in enumerate(plan.keys[number :: plan.agents]):
        if over.is_set():
            return
        async with openai.AsyncOpenAI(
            base_url=f"{plan.base_url}/v1", api_key=key, max_retries=0, timeout=600
        ) as client:
            await play(plan, client, f"{number}.{turn}", figures)


async def play(plan: Plan, client: openai.AsyncOpenAI, name: str, figures: dict[str, Any]) -> None:
    """One conversation."""
    messages: list[Any] = [{"role": "user", "content": f"{name} {plan.first}"}]
    for _ in range(plan.rounds):
        try:
            stream = await client.chat.completions.create(
                model="policy",
                messages=messages,
                max_tokens=plan.max_tokens,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            text, last, finish = "", time.monotonic(), None
            async for chunk in stream:
                figures["longest_gap_s"] = max(figures["longest_gap_s"], time.monotonic() - last)
                last = time.monotonic()
                text += chunk.choices[0].delta.content or ""
                finish = chunk.choices[0].finish_reason or finish
        except openai.OpenAIError as error:
            figures["errors"].append(f"{type(error).__name__}: {error} ({error.__cause__!r})"[:300])
            return
        if finish != "length":
            figures["errors"].append(f"{name}: the stream ended with {finish!r}")
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": plan.later}]
    figures["ended"] += 1


async def main() -> None:
    plan, over = Plan(**json.loads(sys.stdin.readline())), asyncio.Event()
    loop = asyncio.get_running_loop()
    threading.Thread(target=lambda: (sys.stdin.read(), loop.call_soon_threadsafe(over.set)), daemon=True).start()
    figures: dict[str, Any] = {"errors": [], "ended": 0, "longest_gap_s": 0.0}
    began = time.monotonic()
    await asyncio.gather(*(play_all(plan, number, figures, over) for number in range(plan.agents)))
    print(json.dumps({**figures, "seconds": time.monotonic() - began}))


if __name__ == "__main__":
    asyncio.run(main())
