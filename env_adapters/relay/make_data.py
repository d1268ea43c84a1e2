"""Writes the relay game's task file and its warm-start traces: `python -m env_adapters.relay.make_data --help`.

Called by a run when its task file is missing, or by hand. The invariant: the same arguments write the same rows. The rules are in
`env_adapters.relay.game`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from buffers.tasks.parquet import write_tasks, write_traces
from env_adapters.relay.game import relay_tasks, relay_traces


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the relay game's tasks and warm-start traces.")
    parser.add_argument("--tasks", type=Path, required=True, help="parquet file of tasks to write")
    parser.add_argument("--traces", type=Path, required=True, help="parquet file of supervised conversations to write")
    parser.add_argument("--num-tasks", type=int, default=4000)
    parser.add_argument("--num-traces", type=int, default=800)
    parser.add_argument(
        "--helpful", type=float, default=0.25, help="share of answers in the traces that help on purpose"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for path in (arguments.tasks, arguments.traces):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_tasks(arguments.tasks, relay_tasks(arguments.num_tasks, seed=arguments.seed))
    traces = list(relay_traces(arguments.num_traces, seed=arguments.seed, helpful=arguments.helpful))
    write_traces(arguments.traces, traces)
    print(f"wrote {arguments.num_tasks} tasks to {arguments.tasks} and {len(traces)} traces to {arguments.traces}")


if __name__ == "__main__":
    main()
