"""Writes the demo's task file and its traces for SFT: `python -m env_adapters.walk.make_data --help`.

Called by the run when the demo's task file is missing, or by hand; `make_data` is also the relay game's. The invariant: the same
arguments write the same rows. It holds no rule of the game; those are in `env_adapters.walk.game`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

from buffers.records import Task
from buffers.tasks.parquet import Message, write_tasks, write_traces
from env_adapters.walk.game import walk_tasks, walk_traces


def make_data(
    description: str,
    *,
    tasks: Callable[..., list[Task]],
    traces: Callable[..., Iterator[list[Message]]],
    helpful: float,
    help_of_helpful: str,
) -> None:
    """The program: `tasks` is called with a number and `seed`, `traces` also with `helpful`, whose default is given here."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--tasks", type=Path, required=True, help="parquet file of tasks to write")
    parser.add_argument("--traces", type=Path, required=True, help="parquet file of supervised conversations to write")
    parser.add_argument("--num-tasks", type=int, default=4000)
    parser.add_argument("--num-traces", type=int, default=800)
    parser.add_argument("--helpful", type=float, default=helpful, help=help_of_helpful)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for path in (arguments.tasks, arguments.traces):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_tasks(arguments.tasks, tasks(arguments.num_tasks, seed=arguments.seed))
    written = list(traces(arguments.num_traces, seed=arguments.seed, helpful=arguments.helpful))
    write_traces(arguments.traces, written)
    print(f"wrote {arguments.num_tasks} tasks to {arguments.tasks} and {len(written)} traces to {arguments.traces}")


if __name__ == "__main__":
    make_data(
        "Write the demo's tasks and traces for SFT.",
        tasks=walk_tasks,
        traces=walk_traces,
        helpful=0.1,
        help_of_helpful="share of moves in the traces that follow the hint",
    )
