"""Agent loops at work: many episodes at once against one after the other, and a long tail.

`python -m benchmarks.agent_loop [--episodes 8 64] [--json PATH]`.

1. *Concurrency*: real tool agents (`ToolAgentLoop`, toolbox, parser) on an engine that takes `GENERATE_S` for an answer
and works on
   `CAPACITY` of them at once, with a tool that takes `TOOL_S`: two answers and a call for each episode. `busy` is the
   mean share of the engine's capacity in use, from the first request to the last answer.
2. *Long tail*: a stream of episodes in a fixed number of slots; one in a hundred has a tool that takes `TAIL_FACTOR`
times as long. Compared
   is how many ordinary episodes end in a second.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoTokenizer

from agents.agent_loop import verl_config
from agents.loops.tool_agent import ToolAgentLoop
from agents.server_manager import TokenOutput
from benchmarks.report import Report, end_on_sigterm, parser_of
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


async def measure(model: Path, tools: Path, *, episodes: list[int], stream_s: float) -> dict[str, Any]:
    """All figures."""
    agents = Agents(AutoTokenizer.from_pretrained(model), tools)
    await agents.episode()  # imports and first uses
    figures: dict[str, Any] = {"concurrency": {}}
    for number in episodes:
        figures["concurrency"][str(number)] = found = await measure_concurrency(agents, episodes=number)
        print(
            f"{number:4} episodes: {found['serial_s']:6.2f} s one by one, {found['concurrent_s']:5.2f} s at once: "
            f"{found['speedup']:4.1f}x; engine busy {found['serial_busy']:.1%} -> {found['concurrent_busy']:.1%} "
            f"(least time {found['least_s']:.2f} s)",
            flush=True,
        )
    without = await measure_tail(agents, share=0.0, seconds=stream_s)
    with_tail = await measure_tail(agents, share=TAIL_SHARE, seconds=stream_s)
    figures["tail"] = {"without_per_s": without, "with_per_s": with_tail, "kept": with_tail / without}
    print(f"long tail: {without:.1f} ordinary episodes/s without, {with_tail:.1f} with: {with_tail / without:.1%} kept")
    return figures


def main() -> None:
    parser = parser_of("agent_loop", doc=__doc__)
    parser.add_argument("--episodes", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--stream-s", type=float, default=STREAM_S, help="length of each stream of the long-tail part")
    arguments = parser.parse_args()
    end_on_sigterm()
    report = Report("agent_loop", about=f"{GENERATE_S} s an answer, {CAPACITY} at once, {TOOL_S} s a tool call")
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "tiny")
        tools = Path(folder) / "tools.yaml"
        tools.write_text(TOOLS)
        figures = asyncio.run(measure(model, tools, episodes=arguments.episodes, stream_s=arguments.stream_s))
    report.write(
        arguments.json,
        settings={"episodes": arguments.episodes, "capacity": CAPACITY, "generate_s": GENERATE_S, "tool_s": TOOL_S},
        figures=figures,
    )


if __name__ == "__main__":
    sys.exit(main())
