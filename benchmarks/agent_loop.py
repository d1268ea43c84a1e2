"""Agent loops at work: many episodes at once against one after the other, a long tail, and sticky routes against random ones.

`python -m benchmarks.agent_loop [--episodes 8 64] [--skip-routing] [--json PATH]`.

1. *Concurrency*: real tool agents (`ToolAgentLoop`, toolbox, parser) on an engine that takes `GENERATE_S` for an answer
   and works on `CAPACITY` of them at once, with a tool that takes `TOOL_S`: two answers and a call for each episode. `busy` is the
   mean share of the engine's capacity in use, from the first request to the last answer.
2. *Long tail*: a stream of episodes in a fixed number of slots; one in a hundred has a tool that takes
   `TAIL_FACTOR` times as long. Compared is how many ordinary episodes end in a second.
3. *Routes*: two real vLLM engines, episodes of two rounds with a long prompt, by `AsyncLLMServerManager` and by chance:
   the share of the second round's prompt that comes from the prefix cache, and its time to the first token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoTokenizer

from agents.agent_loop import verl_config
from agents.loops.tool_agent import ToolAgentLoop
from agents.server_manager import AsyncLLMServerManager, TokenOutput
from benchmarks.engines import engine_of
from benchmarks.harness import medians, parser_of, play, table
from configs.tiny_model import make_tiny_model
from mocked_server.vllm.engine import VLLMEngine
from mocked_server.vllm.engine_arguments import set_process_environment

GENERATE_S, TOOL_S = 0.1, 0.5
CAPACITY = 4
TAIL_SHARE, TAIL_FACTOR = 0.01, 50
SLOTS, STREAM_S = 64, 60.0
ROUTED_EPISODES, PROMPT_TOKENS, AT_ONCE = 48, 1536, 4
PROMPT = [{"role": "user", "content": "Find the sum of 12 and 30."}]
TOOLS = "tools:\n  - function: benchmarks.agent_loop.look_up\n"


async def look_up(seconds: float) -> str:
    """Wait, as a search would.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "42"


class TimedEngine:
    """An engine of known speed: an answer takes GENERATE_S, CAPACITY of them are worked on at once, the others wait in line."""

    def __init__(self, answer: Callable[[str, list[int]], list[int]]) -> None:
        self._answer = answer
        self._room = asyncio.Semaphore(CAPACITY)
        self.busy_s = 0.0

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: Any, api_key: str
    ) -> TokenOutput:
        async with self._room:
            await asyncio.sleep(GENERATE_S)
            self.busy_s += GENERATE_S / CAPACITY
        ids = self._answer(request_id, prompt_ids)
        return TokenOutput(ids, log_probs=[0.0] * len(ids), versions=[0] * len(ids))

    async def healthy(self) -> bool:
        return True

    async def wake_up(self) -> None: ...

    async def sleep(self) -> None: ...


class Agents:
    """Tool agents on a timed engine."""

    def __init__(self, tokenizer: Any, tools: Path) -> None:
        self._tokenizer = tokenizer
        self.engine = TimedEngine(self._answer)
        config = verl_config(prompt_length=1024, response_length=1024)
        manager = AsyncLLMServerManager([self.engine])
        self._class = type("Agent", (ToolAgentLoop,), {"_class_initialized": False})
        self._make = lambda: self._class(
            trainer_config=SimpleNamespace(config=config),
            server_manager=manager,
            tokenizer=tokenizer,
            tool_config_path=str(tools),
            tool_deadline_s=3600.0,
        )

    async def episode(self, tool_s: float = TOOL_S) -> None:
        """One episode: an answer that calls the tool, the tool, another answer."""
        prompt = [{"role": "user", "content": f"{PROMPT[0]['content']} Take {tool_s:.3f}."}]
        output = await self._make().run({}, raw_prompt=prompt)
        assert output.num_turns == 4, output.num_turns

    def _answer(self, _: str, prompt_ids: list[int]) -> list[int]:
        text = self._tokenizer.decode(prompt_ids)
        if "<tool_response>" in text:
            return self._ids("The sum is 42.")
        seconds = float(text.rpartition("Take ")[2].split(".<")[0].split("<")[0].rstrip("."))
        return self._ids(
            "<tool_call>\n" + json.dumps({"name": "look_up", "arguments": {"seconds": seconds}}) + "\n</tool_call>"
        )

    def _ids(self, text: str) -> list[int]:
        return [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id]


async def measure_concurrency(agents: Agents, *, episodes: int) -> dict[str, float]:
    """Seconds for these episodes one after the other, and at once; how busy the engine was."""
    engine = agents.engine

    async def timed(work: Callable[[], Awaitable[object]]) -> tuple[float, float]:
        busy, began = engine.busy_s, time.monotonic()
        await work()
        seconds = time.monotonic() - began
        return seconds, (engine.busy_s - busy) / seconds

    async def one_by_one() -> None:
        for _ in range(episodes):
            await agents.episode()

    serial_s, serial_busy = await timed(one_by_one)
    at_once_s, busy = await timed(lambda: asyncio.gather(*(agents.episode() for _ in range(episodes))))
    return {
        "serial_s": serial_s,
        "concurrent_s": at_once_s,
        "speedup": serial_s / at_once_s,
        "serial_busy": serial_busy * CAPACITY,  # one after the other can use one place only: its share of time
        "concurrent_busy": busy,
        "least_s": 2 * episodes * GENERATE_S / CAPACITY,
    }


async def measure_tail(agents: Agents, *, share: float, seconds: float, seed: int = 0) -> float:
    """Ordinary episodes ended in a second, with this share of slow ones, after the first fifth."""
    draw = random.Random(seed)
    until = time.monotonic() + seconds
    counted_from = until - 0.8 * seconds
    ended = 0

    async def slot() -> None:
        nonlocal ended
        while time.monotonic() < until:
            slow = draw.random() < share
            await agents.episode(TOOL_S * TAIL_FACTOR if slow else TOOL_S)
            ended += not slow and counted_from <= time.monotonic() < until

    slots = [asyncio.create_task(slot()) for _ in range(SLOTS)]
    await asyncio.wait(slots, timeout=seconds + 1.0)
    for task in slots:
        task.cancel()
    await asyncio.wait(slots)
    return ended / (0.8 * seconds)


class RealEngine:
    """A vLLM engine, asked for one token."""

    def __init__(self, engine: VLLMEngine) -> None:
        self.engine = engine
        self.cached: dict[str, int] = {}

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: Any, api_key: str
    ) -> TokenOutput:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        params = SamplingParams(max_tokens=1, output_kind=RequestOutputKind.FINAL_ONLY)
        name = f"{request_id}-{len(prompt_ids)}-{time.monotonic_ns()}"
        async for output in self.engine.generate(prompt_ids, params, request_id=name):
            self.cached[request_id] = output.num_cached_tokens or 0
        return TokenOutput(output.outputs[0].token_ids)

    async def healthy(self) -> bool:
        return True

    async def wake_up(self) -> None: ...

    async def sleep(self) -> None:
        await self.engine.sleep()


async def measure_routes(engines: list[RealEngine], *, sticky: bool, seed: int = 0) -> dict[str, float]:
    """Share of the second round's prompt that was cached, and its median seconds."""
    draw = random.Random(seed)
    manager = AsyncLLMServerManager(engines)
    for engine in engines:
        await engine.sleep()  # forgets its prefixes
    cached, seconds = [], []
    gate = asyncio.Semaphore(AT_ONCE)

    async def ask(name: str, ids: list[int]) -> RealEngine:
        if sticky:
            await manager.generate(name, prompt_ids=ids, sampling_params={})
            return manager._routes.sticky[name].server  # type: ignore[return-value]
        engine = draw.choice(engines)
        await engine.generate(name, prompt_ids=ids, sampling_params={}, api_key="")
        return engine

    async def episode(number: int) -> None:
        words = random.Random(number)
        ids = [words.randrange(16, 400) for _ in range(PROMPT_TOKENS)]
        async with gate:
            await ask(f"episode-{number}", ids)
            longer = ids + [words.randrange(16, 400) for _ in range(64)]
            began = time.monotonic()
            engine = await ask(f"episode-{number}", longer)
            seconds.append(time.monotonic() - began)
            cached.append(engine.cached[f"episode-{number}"] / len(longer))

    await asyncio.gather(*(episode(number) for number in range(ROUTED_EPISODES)))
    return {
        "cached_share": statistics.mean(cached),
        "second_round_s": statistics.median(seconds),
        "second_round_mean_s": statistics.mean(seconds),
    }


async def routes(model: Path) -> dict[str, Any]:
    """Sticky and random, twice each in turn, on two engines."""
    engines = [RealEngine(engine_of(model, max_tokens=16, max_model_len=2048, kv_cache_gb=0.5)) for _ in range(2)]
    try:
        for each in engines:
            await each.engine.start()
        await measure_routes(engines, sticky=True)  # the first requests of an engine are slower
        runs = {kind: [] for kind in ("sticky", "random")}
        for seed in range(2):
            for kind, found in runs.items():
                found.append(await measure_routes(engines, sticky=kind == "sticky", seed=seed))
    finally:
        for each in engines:
            await each.engine.close()
    middle = {kind: medians(found, *found[0]) for kind, found in runs.items()}
    ratio = middle["random"]["second_round_mean_s"] / middle["sticky"]["second_round_mean_s"]
    return {**middle, "random_vs_sticky_s": ratio}


async def loops(agents: Agents, *, episodes: list[int], stream_s: float) -> dict[str, Any]:
    """The parts on the timed engine."""
    await agents.episode()  # imports and first uses
    at_once = {str(number): await measure_concurrency(agents, episodes=number) for number in episodes}
    print(table([{"episodes": number, **found} for number, found in at_once.items()]), flush=True)
    without, beside = [await measure_tail(agents, share=share, seconds=stream_s) for share in (0.0, TAIL_SHARE)]
    tail = {"without_per_s": without, "with_per_s": beside, "kept": beside / without}
    print("long tail:", table([tail]), sep="\n", flush=True)
    return {"concurrency": at_once, "tail": tail}


def measure(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """All figures."""
    model, tools = make_tiny_model(folder / "tiny"), folder / "tools.yaml"
    tools.write_text(TOOLS)
    agents = Agents(AutoTokenizer.from_pretrained(model), tools)
    yield asyncio.run(loops(agents, episodes=arguments.episodes, stream_s=arguments.stream_s))
    if not arguments.skip_routing:
        found = asyncio.run(routes(model))
        print("routes over 2 engines:")
        print(table([{"routes": kind, **found[kind]} for kind in ("sticky", "random")]))
        yield {"routes": found, "random_vs_sticky_s": found["random_vs_sticky_s"]}


def main() -> int:
    parser = parser_of("agent_loop", doc=__doc__)
    parser.add_argument("--episodes", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--stream-s", type=float, default=STREAM_S, help="length of each stream of the long-tail part")
    parser.add_argument("--skip-routing", action="store_true", help="without the part on two vLLM engines")
    set_process_environment()
    about = f"{GENERATE_S} s an answer, {CAPACITY} at once, {TOOL_S} s a tool call"
    return play("agent_loop", parser.parse_args(), measure, about=about)


if __name__ == "__main__":
    sys.exit(main())
