"""Writes GSM8K for a tiny model: tasks, and conversations that teach it how the tools are called.

`python -m agents.make_gsm8k_data --out FOLDER [--from LOCAL_COPY]`, the `data.make` of `configs/gsm8k_tool_cpu.yaml`. A
model made on the spot knows no protocol: the conversations show it (call the tool, read its verdict, write the final
answer), with the right answer in a share of them, so that learning by reward has something to grow. What a tool says in
them is what it says in a run: it is asked. The tasks are those of `env_adapters.gsm8k`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from pathlib import Path
from typing import Any

from agents.tools.toolbox import EpisodeTools, Toolbox
from buffers.records import Task
from buffers.tasks.parquet import Message, write_tasks, write_traces
from env_adapters.gsm8k import DATA_SOURCE, SAMPLE, problems, tasks_of_problems

TOOLS = Path(__file__).resolve().parent.parent / "configs" / "tools" / "gsm8k.yaml"
TOOL = "calc_gsm8k_reward"


async def traces(
    tasks: list[Task], toolbox: Toolbox, *, number: int, right: float, seed: int
) -> tuple[list[list[Message]], list[dict[str, Any]]]:
    """(conversations, the tools that they offer)."""
    draw = random.Random(seed)
    answers = [str(task.ground_truth) for task in tasks]
    conversations = []
    for _ in range(number):
        task = draw.choice(tasks)
        answer = str(task.ground_truth) if draw.random() < right else draw.choice(answers)
        async with toolbox.open(tools_kwargs=task.extra_info["tools_kwargs"]) as tools:
            conversations.append(await _trace(task, answer, tools))
            schemas = tools.schemas
    return conversations, schemas


async def _trace(task: Task, answer: str, tools: EpisodeTools) -> list[Message]:
    arguments = {"answer": answer}
    call = json.dumps({"name": TOOL, "arguments": arguments})
    outcome = await tools.call(TOOL, arguments)
    return [
        *task.prompt,
        {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
        {"role": "tool", "content": outcome.text},
        {"role": "assistant", "content": f"#### {answer}"},
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write GSM8K tasks with tools, and conversations that teach their use."
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for train.parquet, test.parquet, traces.parquet"
    )
    parser.add_argument("--from", dest="source", type=Path, default=SAMPLE, help="folder with a local copy")
    parser.add_argument("--num-tasks", type=int, default=None, help="only the first ones")
    parser.add_argument("--num-traces", type=int, default=400)
    parser.add_argument("--right", type=float, default=0.5, help="share of traces with the right answer for certain")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        rows = problems(arguments.source, split=split)
        tasks = tasks_of_problems(rows, split=split, tools=True, source=str(arguments.source))[: arguments.num_tasks]
        write_tasks(arguments.out / f"{split}.parquet", tasks)
        if split == "train":
            wanted = {"number": arguments.num_traces, "right": arguments.right, "seed": arguments.seed}
            conversations, schemas = asyncio.run(traces(tasks, Toolbox.load(TOOLS), **wanted))
            write_traces(arguments.out / "traces.parquet", conversations, tools=schemas)
    print(f"wrote tasks and {arguments.num_traces} traces of {DATA_SOURCE} to {arguments.out}")


if __name__ == "__main__":
    main()
