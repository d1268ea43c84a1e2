"""docs/deploy/slurm.sh on hosts made of namespaces: SLURM's own commands are stand-ins, Ray and the run are real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project.test_resume import SMALL
from tests.support.patience import PATIENCE_S
from tests.support.remote.namespaces import Net, bridge, why_not
from tests.support.remote.run_hosts import RAY, ROOT

pytestmark = [pytest.mark.long(minutes=3), pytest.mark.engine]

SRUN = """#!/bin/bash
for word; do case $word in --nodelist=*) only=${{word#*=}} ;; --*) ;; *) break ;; esac; shift; done
{starts}
code=0
for pid in "${{pids[@]}}"; do wait "$pid" || code=$?; done
exit "$code"
"""
START = '[ "${{only:-{name}}}" = {name} ] && {{ {command} "$@" & pids+=($!); }}'


@pytest.fixture
def net() -> Iterator[Net]:
    if reason := why_not():
        pytest.skip(reason)
    with bridge() as made:
        yield made


def write_programs(net: Net) -> Path:
    """`srun` and `scontrol` for the hosts, and `ray`, `understudy` as an environment has them."""
    programs = net.shared / "bin"
    programs.mkdir()
    starts = "\n".join(START.format(name=host.name, command=" ".join(host.command())) for host in net.hosts)
    names = " ".join(host.name for host in net.hosts)
    scripts = {
        "srun": SRUN.format(starts=starts),
        "scontrol": f'#!/bin/sh\n[ "$*" = "show hostnames n[0-1]" ] && printf "%s\\n" {names}\n',
        "ray": f'#!/bin/sh\nexec {RAY} "$@"\n',
        "understudy": f'#!/bin/sh\nexec {sys.executable} -m learner.cli "$@"\n',
    }
    for name, script in scripts.items():
        (programs / name).write_text(script)
        (programs / name).chmod(0o755)
    return programs


def test_the_script_for_slurm_trains_on_every_node_of_its_job_and_resumes_when_it_is_sent_again(net: Net) -> None:
    for name in ("n0", "n1"):
        net.host(name)
    environment = {
        **os.environ,
        "PATH": f"{write_programs(net)}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "n[0-1]",
        "SLURM_JOB_NUM_NODES": "2",
    }
    folder = net.shared / "slurm"
    for steps in (2, 3):  # the second time as after a requeue
        words = [f"run.dir={net.shared}", "run.name=slurm", f"run.steps={steps}", "rollout.engines=2", *SMALL]
        done = subprocess.run(
            ["bash", "docs/deploy/slurm.sh", *words],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["steps"] == steps and summary["max_logprob_diff"] < 1e-4
        assert "asks for no token" not in done.stdout
    assert "resuming after step 2" in done.stdout
    sampled = {
        name.split("/")[1]
        for name in json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
        if name.startswith("engine/")
    }
    assert {"e0", "e1"} <= sampled, "one engine a node"
    left = [line for host in net.hosts for line in host.run("ps -eo stat=,args=").splitlines() if line[0] != "Z"]
    assert [line for line in left if "raylet" in line or "gcs_server" in line] == []
