"""Whole runs whose processes are killed: new ones are started, and the run goes on."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest

from buffers.ledger.schema import read_database
from tests.faults.killer import descendants, living
from tests.support.patience import PATIENCE_S
from tests.support.run_parts import Run, assert_nothing_left, start

pytestmark = [pytest.mark.slow, pytest.mark.engine]

SMALL = ("sft.steps=5", "buffer.groups_per_step=4", "buffer.group_size=2", "agents.concurrency=16")
STEPS = 20
SLOW_MOVES = "env.command=['{python}', -m, env_adapters.walk.server, --latency-ms, '200']"
"""A step takes a second, so that all kills come before the last one."""
PARTS = {
    "engine": "VLLM::",
    "learner": "understudy::learner_rank",
    "environment": "walk.server",
    "agent": "walk_agent",
    "server": "understudy::server_process",
}
"""What their command lines hold."""


def kill(run: Run, part: str) -> int:
    """SIGKILL to the part's process, once there is one; its pid."""
    until = time.monotonic() + PATIENCE_S
    while not (found := [line for line in run.processes() if PARTS[part] in line]):
        assert run.process.poll() is None and time.monotonic() < until, f"there is no {part}"
        time.sleep(0.1)
    pid = int(found[0].split()[0])
    os.kill(pid, signal.SIGKILL)
    return pid


def until_episodes_run(run: Run, at_least: int = 4) -> None:
    """Wait until some do: between two steps there may be none that could fail, and the last of them may just be ending."""
    until = time.monotonic() + PATIENCE_S
    with closing(read_database(run.folder / "ledger.sqlite")) as db:
        while db.execute("SELECT n FROM counter WHERE name = 'episodes/running'").fetchone()[0] < at_least:
            assert run.process.poll() is None and time.monotonic() < until, "no episode runs"
            time.sleep(0.01)


def failed(run: Run, reason: str) -> int:
    with closing(read_database(run.folder / "ledger.sqlite")) as db:
        row = db.execute("SELECT n FROM counter WHERE name = ?", (f"failed/{reason}",)).fetchone()
    return row[0] if row else 0


def kill_in_episodes(run: Run, part: str, *reasons: str) -> int:
    """SIGKILL to the part, again until an episode has failed for one of the reasons; how often. The process that was found may just
    have finished its own episode, or all may have waited for the model, and met the next environment."""

    def seen() -> int:
        return sum(failed(run, reason) for reason in reasons)

    before, kills = seen(), 0
    while seen() == before:
        until_episodes_run(run)
        kill(run, part)
        kills += 1
        until = time.monotonic() + 5  # then it is killed again
        while seen() == before and time.monotonic() < until:
            time.sleep(0.1)
    return kills


def test_each_part_may_die_and_the_run_makes_all_its_steps(tmp_path: Path) -> None:
    run = start(tmp_path, f"run.steps={STEPS}", "run.checkpoints.every=2", *SMALL, SLOW_MOVES)
    for step, part in ((1, "agent"), (2, "environment"), (3, "engine"), (5, "learner")):
        run.wait_for_step(step)
        if part == "agent":
            kill_in_episodes(run, part, "agent exited with code -9")
        elif part == "environment":  # an agent may see that it is gone before the run has another one
            environments = kill_in_episodes(run, part, "environment died", "agent exited with code 1")
        else:
            kill(run, part)
    code, output = run.wait()
    assert code == 0, output
    summary = run.summary()
    assert summary["steps"] == STEPS and summary["buffer"]["groups/trained"] == STEPS * 4
    expected = {"restarts/engine": 1.0, "restarts/environment": float(environments), "restarts/learner": 1.0}
    assert summary["restarts"] == expected
    assert summary["buffer"]["failed/agent exited with code -9"] > 0
    assert summary["max_logprob_diff"] < 1e-4, "what the new engine samples is what the learner computes"
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["step"]] == list(range(1, STEPS + 1)), "each step is reported once"
    kept = [path.name for path in (run.folder / "checkpoints").iterdir()]
    assert 2 <= len(kept) <= 3 and not [name for name in kept if name.startswith(".")], kept
    assert_nothing_left(run)


def parent_of_learner(run: Run) -> int:
    while True:  # a rank of a run that was just killed may still be there, as an orphan
        assert run.process.poll() is None, f"the run ended: {run.process.communicate()[0]}"
        below = descendants(run.process.pid)
        parents = {parent for parent, line in below.values() if PARTS["learner"] in line}
        if len(parents) == 1 and parents <= set(below):
            (parent,) = parents
            break
        time.sleep(0.05)
    assert " -m learner.run " in below[parent][1], "the learner was not forked of the run"
    return parent


@pytest.mark.long
def test_a_guarded_run_whose_own_process_is_killed_goes_on_by_itself(tmp_path: Path) -> None:
    run = start(tmp_path, "run.steps=8", "run.checkpoints.every=1", *SMALL, flags=("--keep-running",))
    run.wait_for_step(3)
    before = set(descendants(run.process.pid))
    os.kill(living(run.process.pid)["run"][0], signal.SIGKILL)
    run.wait_for_step(4)
    assert parent_of_learner(run) not in before, "it was forked of what was killed"
    code, output = run.wait()
    assert code == 0, output
    assert "the run's process died (SIGKILL); starting it again" in output and "resuming after step" in output
    summary = run.summary()
    assert summary["steps"] == 8 and summary["buffer"]["groups/trained"] == 8 * 4
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["step"]] == list(range(1, 9))
    assert_nothing_left(run)
    assert not [pid for pid in before if Path(f"/proc/{pid}").exists()], "what it left behind was ended"


@pytest.mark.long
def test_what_dies_again_and_again_ends_the_run_with_its_error(tmp_path: Path) -> None:
    run = start(
        tmp_path, "run.steps=40", *SMALL, 'env.command=["{python}",-c,"print(\\"ready 127.0.0.1:9\\",flush=True)"]'
    )
    code, output = run.wait()
    assert code == 1, output
    assert "error: the environment process ended (exit code 0)" in output and "Traceback" not in output
    assert_nothing_left(run)


def test_a_run_goes_on_exactly_when_one_of_its_server_processes_is_killed(tmp_path: Path) -> None:
    settings = ("server.processes=2", "sft.steps=2", "learner.critic=none", "learner.advantage=grpo")
    sizes = ("agents.concurrency=8", "buffer.groups_per_step=2", "buffer.group_size=4", "run.seed=1", "run.steps=6")
    run = start(tmp_path, *settings, *sizes)
    run.wait_for_step(1)
    kill(run, "server")
    code, output = run.wait()
    assert code == 0, output
    summary = run.summary()
    assert summary["steps"] == 6 and summary["episodes"] == 6 * 8
    assert summary["max_logprob_diff"] < 1e-4 and summary["restarts"] == {"restarts/server_process": 1.0}
    own, further = (summary["server"]["processes"][name] for name in ("p0", "p1"))
    assert (own["restarts"], further["restarts"]) == (0, 1) and own["requests"] > 0 and further["url"] != own["url"]
    assert_nothing_left(run)
