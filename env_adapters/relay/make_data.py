"""Writes the relay game's task file and its traces for SFT: `python -m env_adapters.relay.make_data --help`.

Called by a run when its task file is missing, or by hand. The invariant: the same arguments write the same rows. The rules are in
`env_adapters.relay.game`.
"""

from __future__ import annotations

from env_adapters.relay.game import relay_tasks, relay_traces
from env_adapters.walk.make_data import make_data

if __name__ == "__main__":
    make_data(
        "Write the relay game's tasks and traces for SFT.",
        tasks=relay_tasks,
        traces=relay_traces,
        helpful=0.25,
        help_of_helpful="share of answers in the traces that help on purpose",
    )
