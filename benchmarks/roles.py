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

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.harness import Report, RunFailed, end_on_sigterm, parser_of, run_to_end
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
PARTS = ("coop", "adapters", "distill")


class Runs:
    """Whole runs below a folder. `more`: settings of all of them."""

    def __init__(self, folder: Path, *, more: Sequence[str]) -> None:
        self._folder = folder
        self._more = list(more)

    def rewards(self, name: str, *, config: str, seed: int, settings: Sequence[str] = ()) -> list[float]:
        """The mean reward of each step of a run. Raises RunFailed."""
        found = [line["reward/mean"] for line in self.steps(name, config=config, seed=seed, settings=settings)]
        print(f"{name}: reward {mean(found[-WINDOW:]):.3f} at the end of {len(found)} steps", flush=True)
        return found

    def steps(self, name: str, *, config: str, seed: int, settings: Sequence[str] = ()) -> list[dict[str, float]]:
        """All figures of each step of a run. Raises RunFailed."""
        words = [f"run.dir={self._folder}", f"run.name={name}", f"run.seed={seed}", *settings, *self._more]
        command = [sys.executable, "-m", "learner.run", "--config", config, *words]
        run_to_end(command, log=self._folder / f"{name}.log")
        lines = (self._folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [line for line in map(json.loads, lines) if "reward/mean" in line]

    def checkpoint(self, name: str) -> Path:
        """The newest weights of a run, as a model's folder."""
        return (self._folder / name / "checkpoint").resolve()


def coop(runs: Runs, *, seed: int) -> dict[str, Any]:
    """The same game with roles and with mixed baselines."""
    apart = runs.rewards(f"roles-{seed}", config="relay", seed=seed)
    mixed = runs.rewards(f"mixed-{seed}", config="relay", seed=seed, settings=MIXED)
    return {"coop_reward_per_role": mean(apart[-WINDOW:]), "coop_reward_mixed": mean(mixed[-WINDOW:])}


def adapters(runs: Runs, *, seed: int) -> dict[str, Any]:
    """The game with an adapter for each role."""
    name = f"adapters-{seed}"
    steps = runs.steps(name, config="relay", seed=seed, settings=ADAPTERS)

    def values(figure: str) -> list[float]:
        return [step[key] for step in steps for role in ROLES if (key := f"adapter/{role}/{figure}") in step]

    swaps, versions = values("swap_s"), values("version")
    print(f"{name}: {len(swaps)} new versions of {len(ROLES)} adapters, up to version {max(versions):.0f}", flush=True)
    return {
        "adapter_swap_ms": 1e3 * median(swaps),
        "adapter_publish_ms": 1e3 * median(values("publish_s")),
        "adapter_max_logprob_diff": max(values("policy/max_logprob_diff")),
    }


def distill(runs: Runs, *, seed: int) -> dict[str, Any]:
    """The demo with its own last checkpoint for a teacher, and without."""
    alone = runs.rewards(f"alone-{seed}", config="demo", seed=seed)
    teacher = f"learner.teacher.path={runs.checkpoint(f'alone-{seed}')}"
    taught = runs.rewards(f"taught-{seed}", config="demo", seed=seed, settings=[teacher])
    steps = [solved_at(rewards, target=TARGET) for rewards in (taught, alone)]
    ratio = steps[0] / steps[1] if steps[0] and steps[1] else None
    return {"distill_steps": steps[0], "reward_steps": steps[1], "distill_steps_ratio": ratio}


def over_seeds(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean of each figure over the seeds; null where a seed has none."""
    names = dict.fromkeys(name for one in found for name in one if name != "seed")
    values = {name: [one[name] for one in found if name in one] for name in names}
    return {name: None if None in some else mean(some) for name, some in values.items()}


def main(argv: list[str] | None = None) -> int:
    """All runs in turn; the JSON file after each seed."""
    parser = parser_of("roles", doc=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--override", action="append", default=[], metavar="section.key=value", help="of all runs")
    arguments = parser.parse_args(argv)
    end_on_sigterm()
    report = Report("roles")
    settings = {name: value for name, value in vars(arguments).items() if name != "json"}
    folder = Path(tempfile.mkdtemp(prefix="understudy-bench-"))
    runs, found = Runs(folder, more=arguments.override), list[dict[str, Any]]()
    try:
        for seed in arguments.seeds:
            one: dict[str, Any] = {"seed": seed}
            for name, part in (("coop", coop), ("adapters", adapters), ("distill", distill)):
                one |= part(runs, seed=seed) if name in arguments.only else {}
            found.append(one)
            report.write(arguments.json, settings=settings, figures={**over_seeds(found), "seeds": found})
    except RunFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(over_seeds(found), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
