"""The agents of `benchmarks.gateway`, in a process of their own: reads a plan as JSON from standard input, prints figures as JSON.

Each agent plays rounds of one conversation over a connection of its own: it sends the whole history each time, as agents do, and
takes the answer into it. It reads as little of an answer as it can, because it shares the machine with the server.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass, field
from itertools import count
from statistics import fmean, quantiles
from typing import Any

import aiohttp

PATH = "/v1/chat/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`agents` conversations at once of `rounds` rounds each; each conversation has a key of its own."""

    base_url: str
    keys: list[str]
    agents: int
    rounds: int
    first: str
    """The first message."""
    later: str
    """Every later message of the user."""
    max_tokens: int
    stream: bool = False
    urls: dict[str, str] = field(default_factory=dict)
    """Key -> root of the server process that owns its episode; those that are not named have `base_url`."""
    spread_s: float = 0.0
    """The agents begin one after another over this time."""


@dataclass(slots=True)
class Figures:
    """Figures of one plan."""

    latencies_s: list[float] = field(default_factory=list)
    cycles_s: list[float] = field(default_factory=list)
    """From an answer to the same agent's next one."""
    prompt_tokens: list[list[int]] = field(default_factory=list)
    """Tokens of each agent's prompt, by round number."""
    cached_tokens: list[list[int]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    conversations: count[int] = field(default_factory=count)

    def add(self, number: int, latency_s: float, usage: dict[str, Any]) -> None:
        """One answered round."""
        self.latencies_s.append(latency_s)
        while len(self.prompt_tokens) <= number:
            self.prompt_tokens.append([])
            self.cached_tokens.append([])
        self.prompt_tokens[number].append(usage["prompt_tokens"])
        self.cached_tokens[number].append((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


async def play_all(plan: Plan, number: int, session: aiohttp.ClientSession, figures: Figures) -> None:
    """One agent: a conversation for each of its keys, one after the other."""
    keys = plan.keys[number :: plan.agents]
    await asyncio.sleep(plan.spread_s * number / plan.agents)
    for key in keys:
        await play(plan, key, session, figures)


async def play(plan: Plan, key: str, session: aiohttp.ClientSession, figures: Figures) -> None:
    """One conversation; its first words are its own."""
    messages = [{"role": "user", "content": f"{next(figures.conversations)}. {plan.first}"}]
    headers = {"Authorization": f"Bearer {key}", "x-stainless-retry-count": "0"}
    ended = 0.0
    for number in range(plan.rounds):
        body = {"model": "policy", "messages": messages, "max_tokens": plan.max_tokens, "ignore_eos": True}
        began = time.perf_counter()
        async with session.post(plan.urls.get(key, plan.base_url) + PATH, json=body, headers=headers) as answer:
            reply = await answer.json()
        if answer.status != 200:
            figures.errors.append(json.dumps(reply)[:300])
            return
        now = time.perf_counter()
        figures.add(number, now - began, reply["usage"])
        if number:
            figures.cycles_s.append(now - ended)
        ended = now
        messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"] or ""})
        messages.append({"role": "user", "content": plan.later})


async def open_stream(
    plan: Plan, key: str, session: aiohttp.ClientSession, opened: list[float], gaps: list[float], errors: list[str]
) -> None:
    """One streamed answer; the time of its first part, the longest gap between two parts."""
    body = {"model": "policy", "messages": [{"role": "user", "content": plan.first}], "max_tokens": plan.max_tokens}
    body |= {"stream": True, "ignore_eos": True}
    began = time.perf_counter()
    last, longest = 0.0, 0.0
    async with session.post(plan.base_url + PATH, json=body, headers={"Authorization": f"Bearer {key}"}) as answer:
        if answer.status != 200:
            errors.append((await answer.text())[:300])
            return
        async for line in answer.content:
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                if last:
                    longest = max(longest, now - last)
                else:
                    opened.append(now - began)
                last = now
    gaps.append(longest)


async def stream_all(plan: Plan) -> dict[str, Any]:
    """All agents' streams at once."""
    opened: list[float] = []
    gaps: list[float] = []
    errors: list[str] = []
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        began = time.perf_counter()
        await asyncio.gather(
            *(open_stream(plan, plan.keys[i], session, opened, gaps, errors) for i in range(plan.agents))
        )
        seconds = time.perf_counter() - began
    all_open = max(opened) if len(opened) == plan.agents else None
    return {
        "streams": len(gaps),
        "first_part_max_s": all_open,
        "longest_gap_s": max(gaps, default=None),
        "seconds": seconds,
        "errors": errors[:3],
    }


async def converse_all(plan: Plan) -> dict[str, Any]:
    """All agents' conversations at once."""
    figures = Figures()
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        began = time.perf_counter()
        await asyncio.gather(*(play_all(plan, number, session, figures) for number in range(plan.agents)))
        seconds = time.perf_counter() - began
    cuts = quantiles(figures.latencies_s, n=100, method="inclusive") if len(figures.latencies_s) > 1 else [0.0] * 99
    cached = [sum(c) / max(1, sum(p)) for c, p in zip(figures.cached_tokens, figures.prompt_tokens, strict=True)]
    return {
        "rounds": len(figures.latencies_s),
        "seconds": seconds,
        "rounds_per_s": len(figures.latencies_s) / seconds,
        "p50_ms": 1000 * cuts[49],
        "p99_ms": 1000 * cuts[98],
        "cycle_s": fmean(figures.cycles_s) if figures.cycles_s else None,
        "prompt_tokens": [max(tokens) for tokens in figures.prompt_tokens],
        "cached_share": cached,
        "errors": figures.errors[:3],
    }


def main() -> None:
    plan = Plan(**json.loads(sys.stdin.read()))
    import uvloop

    print(json.dumps(uvloop.run((stream_all if plan.stream else converse_all)(plan))))


if __name__ == "__main__":
    main()
