"""Whole runs on hosts made of namespaces: Ray on each, and a run whose own process is on one of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.remote.namespaces import Host
from tests.support.run_parts import ROOT, Run

RAY = Path(sys.executable).with_name("ray")
# A head that is started with it asks for it; without it Ray asks for none.
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "ab" * 32, "RAY_worker_niceness": "0", "OMP_NUM_THREADS": "1"}


def join(host: Host, head: Host, *, gpus: int) -> None:
    """Ray on this host, which counts GPUs that are not there."""
    place = "--head --port=6379 --include-dashboard=false" if host is head else f"--address={head.address}:6379"
    host.run(
        f"{RAY} start {place} --node-ip-address={host.address} --num-cpus=1 --num-gpus={gpus} --disable-usage-stats",
        environment=TOKEN,
    )


def run_on(host: Host, folder: Path, *overrides: str, config: str = "demo", log: Path | None = None) -> Run:
    """A run whose own process is on this host. `log`: a file for what it prints, instead of a pipe."""
    words = ["-m", "learner.run", "--config", config, f"run.dir={folder}", "run.name=run", *overrides]
    process = subprocess.Popen(
        host.command(sys.executable, *words), cwd=ROOT, text=True,
        stdout=subprocess.PIPE if log is None else log.open("w"), stderr=subprocess.STDOUT,
        env={**os.environ, **TOKEN, "RAY_ADDRESS": f"{host.address}:6379"},
    )  # fmt: skip
    return Run(process, folder / "run", "")


def engines_up(run: Run) -> set[str]:
    """The engines of the last step that had sampled something."""
    return {
        name.split("/")[1]
        for name, value in _last(run).items()
        if name.startswith("engine/") and name.endswith("/tokens_per_s") and value > 0
    }


def last_step(run: Run) -> int:
    return int(_last(run)["step"])


def _last(run: Run) -> dict[str, float]:
    """The figures of the last step."""
    found: dict[str, float] = json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[-1])
    return found
