"""Agent loops at work: many episodes at once against one after the other, and a long tail.

`python -m benchmarks.agent_loop [--episodes 8 64] [--json PATH]`.

1. *Concurrency*: real tool agents (`ToolAgentLoop`, toolbox, parser) on an engine that takes `GENERATE_S` for an answer
   and works on `CAPACITY` of them at once, with a tool that takes `TOOL_S`: two answers and a call for each episode. `busy` is the
   mean share of the engine's capacity in use, from the first request to the last answer.
2. *Long tail*: a stream of episodes in a fixed number of slots; one in a hundred has a tool that takes
   `TAIL_FACTOR` times as long. Compared is how many ordinary episodes end in a second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoTokenizer

from agents.agent_loop import verl_config
from agents.loops.tool_agent import ToolAgentLoop
from agents.server_manager import TokenOutput
from benchmarks.harness import parser_of, play, table
from configs.tiny_model import make_tiny_model

GENERATE_S, TOOL_S = 0.1, 0.5
CAPACITY = 4
TAIL_SHARE, TAIL_FACTOR = 0.01, 50
SLOTS, STREAM_S = 64, 60.0
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

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: Any) -> TokenOutput:
        async with self._room:
            await asyncio.sleep(GENERATE_S)
            self.busy_s += GENERATE_S / CAPACITY
        ids = self._answer(request_id, prompt_ids)
        return TokenOutput(ids, log_probs=[0.0] * len(ids), versions=[0] * len(ids))


class Agents:
    """Tool agents on a timed engine."""

    def __init__(self, tokenizer: Any, tools: Path) -> None:
        self._tokenizer = tokenizer
        self.engine = TimedEngine(self._answer)
        config = verl_config(prompt_length=1024, response_length=1024)
        self._class = type("Agent", (ToolAgentLoop,), {"_class_initialized": False})
        self._make = lambda: self._class(
            trainer_config=SimpleNamespace(config=config),
            server_manager=self.engine,
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


async def measure_tail(agents: Agents, *, share: float, seconds: float) -> float:
    """Ordinary episodes ended in a second, with this share of slow ones, after the first fifth."""
    draw = random.Random(0)
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


def main() -> int:
    parser = parser_of("agent_loop", doc=__doc__)
    parser.add_argument("--episodes", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--stream-s", type=float, default=STREAM_S, help="length of each stream of the long-tail part")
    about = f"{GENERATE_S} s an answer, {CAPACITY} at once, {TOOL_S} s a tool call"
    return play("agent_loop", parser.parse_args(), measure, about=about)


if __name__ == "__main__":
    sys.exit(main())
