"""Whether roles learn together, how long a role's new adapter takes to be served, and how many steps a teacher saves: whole runs of
the product, one at a time.

`python -m benchmarks.roles [--seeds 0 1 2] [--only coop adapters distill] [--json PATH]`. Three parts for each seed:

- coop: `configs/relay.yaml`, where a scout and a runner are paid in coins of unlike worth, learned with roles, and without: then
  the environment reports the same numbers as scores of branches, and both are compared with all branches of their task.
  `coop_reward_per_role`, `coop_reward_mixed`: mean reward of the last 5 steps.
- adapters: the same game with an adapter for each role (`learner.lora.per_role`), while episodes go on as they do in any run.
  `adapter_swap_ms`: median time from the files of one role's new version until the engine serves it to new requests, while what it
  generates of the other role goes on; `adapter_publish_ms`: the same from the learner's update on, which has written nothing yet;
  `adapter_max_logprob_diff`: the largest difference of the exactness check, over both roles and all steps.
- distill: the demo, learned from the reward alone; then again, beside the first run's last checkpoint as its teacher.
  `distill_steps_ratio`: steps to a mean reward of 0.9 over 5 steps, with the teacher, divided by those without; null where a run
  never got there.

Invariant: the two runs of a pair differ in what is named here and in nothing else.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.harness import parser_of, play, whole_run
from benchmarks.learning import TARGET, WINDOW, solved_at
from env_adapters.relay.game import RUNNER, SCOUT

MIXED = [
    "roles={}",
    'agents.command=["{python}", "{understudy}/agents/examples/relay_agent.py", "scout=policy", "runner=policy"]',
    'env.command=["{python}", "-m", "env_adapters.relay.server", "--by", "branch"]',
]
"""What a run without roles changes of `configs/relay.yaml`."""
ADAPTERS = ["learner.lora.rank=8", "learner.lora.per_role=true", "learner.lr=1e-2", "run.steps=20"]
"""What a run with an adapter for each role changes of it."""
ROLES = (SCOUT, RUNNER)


Run = Callable[..., list[dict[str, Any]]]
"""(name, settings, config) -> all figures of each step of a run."""


def rewards(run: Run, name: str, *settings: str, config: str = "demo") -> list[float]:
    """The mean reward of each step of a run. Raises RunFailed."""
    found = [step["reward/mean"] for step in run(name, *settings, config=config)]
    print(f"{name}: reward {mean(found[-WINDOW:]):.3f} at the end of {len(found)} steps", flush=True)
    return found


def coop(run: Run, *, folder: Path, seed: int) -> dict[str, Any]:
    """The same game with roles and with mixed baselines."""
    apart = rewards(run, f"roles-{seed}", config="relay")
    mixed = rewards(run, f"mixed-{seed}", *MIXED, config="relay")
    return {"coop_reward_per_role": mean(apart[-WINDOW:]), "coop_reward_mixed": mean(mixed[-WINDOW:])}


def adapters(run: Run, *, folder: Path, seed: int) -> dict[str, Any]:
    """The game with an adapter for each role."""
    name = f"adapters-{seed}"
    steps = run(name, *ADAPTERS, config="relay")

    def values(figure: str) -> list[float]:
        return [step[key] for step in steps for role in ROLES if (key := f"adapter/{role}/{figure}") in step]

    swaps, versions = values("swap_s"), values("version")
    print(f"{name}: {len(swaps)} new versions of {len(ROLES)} adapters, up to version {max(versions):.0f}", flush=True)
    return {
        "adapter_swap_ms": 1e3 * median(swaps),
        "adapter_publish_ms": 1e3 * median(values("publish_s")),
        "adapter_max_logprob_diff": max(values("policy/max_logprob_diff")),
    }


def distill(run: Run, *, folder: Path, seed: int) -> dict[str, Any]:
    """The demo with its own last checkpoint for a teacher, and without."""
    alone = rewards(run, f"alone-{seed}")
    teacher = (folder / f"alone-{seed}" / "last").resolve()
    taught = rewards(run, f"taught-{seed}", f"learner.teacher.path={teacher}")
    steps = [solved_at(each, target=TARGET) for each in (taught, alone)]
    ratio = steps[0] / steps[1] if steps[0] and steps[1] else None
    return {"distill_steps": steps[0], "reward_steps": steps[1], "distill_steps_ratio": ratio}


PARTS: dict[str, Callable[..., dict[str, Any]]] = {"coop": coop, "adapters": adapters, "distill": distill}


def over_seeds(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean of each figure over the seeds; null where a seed has none."""
    names = dict.fromkeys(name for one in found for name in one if name != "seed")
    values = {name: [one[name] for one in found if name in one] for name in names}
    return {name: None if None in some else mean(some) for name, some in values.items()}


def measure(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """All runs in turn."""
    found = list[dict[str, Any]]()
    for seed in arguments.seeds:

        def run(name: str, *settings: str, config: str, seed: int = seed) -> list[dict[str, Any]]:
            words = [*settings, f"run.seed={seed}", *arguments.override]
            return whole_run(folder, name, *words, config=config)

        one: dict[str, Any] = {"seed": seed}
        for name in arguments.only:
            one |= PARTS[name](run, folder=folder, seed=seed)
        found.append(one)
        yield {**over_seeds(found), "seeds": found}


def main(argv: list[str] | None = None) -> int:
    parser = parser_of("roles", doc=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--override", action="append", default=[], metavar="section.key=value", help="of all runs")
    return play("roles", parser.parse_args(argv), measure)


if __name__ == "__main__":
    sys.exit(main())
