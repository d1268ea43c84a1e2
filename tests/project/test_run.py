"""Whole runs of `python -m learner.run` as a user starts them: in a process of their own, with the real engine."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient
from transformers import AutoModelForCausalLM, AutoTokenizer

from buffers.records import Task
from buffers.tasks.parquet import write_tasks
from env_adapters.walk.game import walk_tasks
from learner.diagnosis.diagnose import diagnose
from learner.diagnosis.evidence import Severity
from learner.page.run_set import RunSet
from learner.page.serve import build_app
from tests.learner.page.page_parts import unpacked
from tests.support.patience import PATIENCE_S
from tests.support.run_parts import MARK, ROOT, Run, assert_nothing_left, refusal, start


def assert_the_page_has_the_machine_and_a_trained_episode(run: Run) -> None:
    """As a browser asks for them: what each part did over time, and the tokens of an episode under engine and learner."""
    runs = RunSet([run.folder], meanings={})
    with TestClient(build_app(runs, default="run", about={})) as browser:
        machine = browser.get("/api/runs/run/machine").json()
        history = {
            name: [value for value in values if value is not None] for name, values in machine["history"].items()
        }
        # A line a second: the last step may have ended within the last of them, and an update may be shorter.
        assert machine["now"]["step"] == max(history["step"]) >= 2 and len(history["at"]) > 5
        assert max(history["tokens_per_s"]) > 0 and max(history["engines_running"]) > 0
        assert {0, 1} & set(history["learner"]), "it waited or it updated"
        (engine,) = machine["now"]["engines"]
        assert engine["version"] >= 2 and machine["now"]["groups"]["trained"] in (2 * 8, 3 * 8)
        found = browser.get("/api/runs/run/episodes", params={"group_state": "trained", "limit": 1}).json()
        path = f"/api/runs/run/episodes/{found['episodes'][0]['episode_id']}"
        head, arrays = unpacked(browser.get(f"{path}/tokens").content)
        assert head["figures"] == "all" and "".join(head["pieces"]).count("<|im_start|>") >= 2
        trained = arrays["trained"].astype(bool)
        difference = np.abs(arrays["learner"][trained] - arrays["logprob"][trained])
        assert trained.any() and difference.max() < 1e-4
        assert np.isfinite(arrays["advantage"][trained]).all() and not arrays["sampled"].astype(bool).all()
    runs.close()


@pytest.mark.slow
@pytest.mark.engine
def test_a_run_trains_exactly_validates_and_leaves_its_results(tmp_path):
    write_tasks(tmp_path / "val.parquet", walk_tasks(6, seed=99))
    validation = (f"data.validation.tasks={tmp_path / 'val.parquet'}", "data.validation.every=3")
    run = start(tmp_path, "run.steps=3", "sft.steps=40", "run.seed=1", *validation, imports=True)
    code, output = run.wait()
    assert code == 0, output
    summary = run.summary()
    assert summary["steps"] == 3 and summary["episodes"] == 3 * 64
    assert summary["max_logprob_diff"] < 1e-4
    assert summary["max_policy_lag"] == 1 and summary["max_policy_lag_seen"] <= 1
    assert 0.0 < summary["reward_first"] < 0.4 and summary["reward_optimum"] == 1.0
    assert summary["tokens_trained"] > 3 * 64
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "reward/mean" in line]
    assert [line["step"] for line in trained] == [1, 2, 3]
    assert all(line["policy/max_logprob_diff"] < 1e-4 for line in trained)
    validated = [line for line in lines if "val/step" in line]
    assert (validated[0]["val/step"], validated[-1]["val/step"]) == (0, 3)
    assert all(line["val/tasks"] + line["val/failed"] == 6 for line in validated)
    assert "validation of step 0  mean " in output and "validation of step 3  mean " in output
    assert summary["buffer"]["groups/trained"] == 3 * 8 and summary["buffer"]["groups/validated"] >= 12
    assert (run.folder / "reward.png").read_bytes()[:4] == b"\x89PNG"
    assert list((run.folder / "tensorboard").glob("events*"))
    assert "reward_last" in output and str(run.folder / "last") in output
    said = {finding.rule: finding.severity for finding in diagnose(run.folder)}
    assert "few_steps" in said and Severity.STOPS not in said.values(), said
    assert_the_page_has_the_machine_and_a_trained_episode(run)
    AutoModelForCausalLM.from_pretrained(run.folder / "last")
    assert AutoTokenizer.from_pretrained(run.folder / "last").chat_template
    assert_nothing_left(run)


@pytest.mark.slow
@pytest.mark.engine
def test_the_synchronous_flow_is_on_policy_on_two_ranks_with_grpo_and_a_reference_and_listens_on_loopback(
    tmp_path, monkeypatch
):
    for _, name in socket.if_nameindex():
        if name != "lo":
            monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)  # as the shell of a cluster has it
    run = start(
        tmp_path,
        "run.steps=3",
        "sft.steps=20",
        "buffer.max_policy_lag=0",
        "buffer.groups_per_step=4",
        "buffer.group_size=4",
        "learner.ranks=2",
        "learner.advantage=grpo",
        "learner.kl.coef=0.01",
    )
    run.wait_for_step(1)
    assert run.open_to_others() == []
    code, output = run.wait()
    assert code == 0, output
    summary = run.summary()
    assert summary["max_policy_lag_seen"] == 0 and summary["max_logprob_diff"] < 1e-4
    assert summary["buffer"]["groups/trained"] == 12
    assert summary["buffer"]["groups/evicted"] == 0
    assert_nothing_left(run)


@pytest.mark.slow
@pytest.mark.engine
def test_ctrl_c_stops_cleanly_and_says_how_to_go_on(tmp_path):
    run = start(tmp_path, "sft.steps=5", "buffer.groups_per_step=4", "buffer.group_size=4")
    run.wait_for_step(2)
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does: to every process of the foreground group
    code, output = run.wait()
    assert code == 130, output
    assert f"python -m learner.cli resume {run.folder}\n" in output
    assert run.summary()["stopped"] is True and run.summary()["steps"] >= 2
    assert (run.folder / "last" / "config.json").is_file()
    assert "Traceback" not in output
    assert_nothing_left(run)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("starting", [pytest.param("understudy::learner_rank", marks=pytest.mark.long), "VLLM"])
def test_ctrl_c_while_starting_leaves_nothing_behind(tmp_path, starting):
    run = start(tmp_path, imports=starting != "VLLM")
    until = time.monotonic() + PATIENCE_S
    while not any(starting in line for line in run.processes()):
        assert run.process.poll() is None and time.monotonic() < until
        time.sleep(0.2)
    os.killpg(run.process.pid, signal.SIGINT)
    code, output = run.wait()
    assert code == 130, output
    assert "run the same command again" in output and "Traceback" not in output
    assert_nothing_left(run)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once_leaves_nothing_and_prints_what_goes_on(tmp_path, monkeypatch, number):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    run = start(tmp_path, "run.steps=3", "sft.steps=5", "buffer.groups_per_step=4", "buffer.group_size=4", imports=True)
    run.wait_for_step(1)
    while run.process.poll() is None:  # two that come at once are one, for the kernel
        os.killpg(run.process.pid, number)
        time.sleep(0.1)
    code, output = run.wait()
    assert code == 130 and "Traceback" not in output, output
    assert_nothing_left(run)
    assert list(temporary.iterdir()) == []
    name = hashlib.sha256(os.fsencode(run.folder.resolve())).hexdigest()[:16]
    assert not Path(f"/dev/shm/understudy-{name}").exists()
    words = shlex.split(output.splitlines()[-1])
    assert words[:4] == ["python", "-m", "learner.cli", "resume"]
    resumed = subprocess.run(
        [sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        env={**os.environ, MARK: run.mark},
    )  # fmt: skip
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "resuming after step" in resumed.stdout and run.summary()["steps"] == 3
    assert list(temporary.iterdir()) == []


CRASHING_AGENT = """
import json, os, sys, time, openai, urllib.request
task = json.loads(os.environ["TASK_JSON"])
if task["extra_info"]["fate"] == "crash":
    sys.exit(7)
if task["extra_info"]["fate"] == "hang":
    time.sleep(1000)
client = openai.OpenAI()
reply = client.chat.completions.create(model=os.environ["MODEL"], messages=task["prompt"], max_tokens=4)
host, port = os.environ["ENV_ADDRESS"].rsplit(":", 1)
import socket
with socket.create_connection((host, int(port))) as s:
    f = s.makefile("rw")
    f.write(json.dumps({"episode_key": os.environ["OPENAI_API_KEY"]}) + "\\n"); f.flush(); f.readline()
    done = False
    while not done:
        f.write(json.dumps({"move": reply.choices[0].message.content}) + "\\n"); f.flush()
        done = json.loads(f.readline())["done"]
"""


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.long
def test_agents_that_crash_or_hang_are_counted_and_the_run_goes_on(tmp_path):
    (tmp_path / "agent.py").write_text(textwrap.dedent(CRASHING_AGENT))
    fates = ["well", "crash", "well", "hang", "well"]
    tasks = [
        replace(task, extra_info={**task.extra_info, "fate": fate})
        for task, fate in zip(walk_tasks(len(fates), seed=0), fates, strict=True)
    ]
    write_tasks(tmp_path / "tasks.parquet", tasks)
    run = start(
        tmp_path,
        "run.steps=3",
        "sft.steps=5",
        f"agents.command=['{{python}}', '{tmp_path / 'agent.py'}']",
        "agents.processes=0",
        "agents.concurrency=4",
        "agents.max_attempts=1",
        "agents.deadline_s=10",
        f"data.tasks={tmp_path / 'tasks.parquet'}",
        "buffer.groups_per_step=2",
        "buffer.group_size=2",
    )
    code, output = run.wait()
    assert code == 0, output
    summary = run.summary()
    assert summary["steps"] == 3 and summary["episodes"] == 12
    failed = {name: count for name, count in summary["buffer"].items() if name.startswith("failed/")}
    assert failed.get("failed/deadline", 0) >= 1, failed
    assert failed.get("failed/agent exited with code 7 before a score was reported", 0) >= 1, failed
    assert_nothing_left(run)


@pytest.mark.slow
@pytest.mark.engine
def test_agents_that_never_succeed_end_the_run_with_the_reason(tmp_path):
    run = start(
        tmp_path,
        "sft.steps=5",
        # Those of every second group crash, the others end well and get no score.
        "agents.command=[bash, -c, 'exit $((3 * (${EPISODE_ID%%-*} % 2)))']",
        "data.scorer=tests.support.scoring.none",
        "env.command=[]",
        "agents.processes=0",
        "agents.concurrency=4",
        "agents.max_attempts=1",
        "buffer.groups_per_step=2",
        "buffer.group_size=2",
    )
    code, output = run.wait()
    assert code == 1, output
    assert "given up without one scored episode" in output and "code 3" in output
    assert "most often: data.scorer tests.support.scoring.none failed on task" in output
    assert "ValueError: this judge has no opinion" in output
    assert f"python -m learner.cli why {run.folder}" in output
    found = {finding.rule: finding for finding in diagnose(run.folder)}
    assert {"ended_with_error", "nothing_scored", "failing_episodes"} <= found.keys()
    assert all(finding.severity == Severity.STOPS for finding in found.values()), found
    assert "this judge has no opinion" in found["nothing_scored"].sentence
    assert_nothing_left(run)


def test_an_agent_command_that_does_not_exist_is_named(tmp_path):
    told = refusal(tmp_path, "agents.command=[no-such-agent]")
    assert "agents.command" in told and "no-such-agent" in told


def test_a_task_file_with_a_bad_row_is_named(tmp_path):
    path = tmp_path / "tasks.parquet"
    pq.write_table(pa.table({"prompt": [["not", "messages"]]}), path)
    told = refusal(tmp_path, f"data.tasks={path}")
    assert "row 0" in told and "'prompt'" in told


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("learner.lrr=1", ["learner.lrr", "did you mean learner.lr?"]),
        ("learner.lr=fast", ["learner.lr", "number", "'fast'"]),
        ("buffer.max_policy_lag=-1", ["buffer.max_policy_lag", "greater than or equal to 0", "-1"]),
        ("learner.critic=none", ["learner.advantage=gae needs a critic", "set it to shared or separate"]),
        ("nonsense", ["section.key=value", "'nonsense'"]),
    ],
)
def test_a_bad_configuration_is_one_line_with_key_rule_and_value(tmp_path, override, words):
    code, output = start(tmp_path, override, imports=True).wait()
    assert code == 2
    assert len(output.strip().splitlines()) == 1
    for word in words:
        assert word in output


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.long
def test_an_agent_that_is_started_by_hand_is_trained(tmp_path):
    small = ("sft.steps=5", "buffer.groups_per_step=4", "buffer.group_size=4")
    run = start(tmp_path, "run.steps=2", "agents.command=[]", *small)
    keys = run.folder / "agent.env"
    until = time.monotonic() + PATIENCE_S
    while not keys.exists():
        assert run.process.poll() is None and time.monotonic() < until
        time.sleep(0.2)
    assert keys.stat().st_mode & 0o077 == 0
    assert "scorer" not in keys.read_text() and "admin" not in keys.read_text()
    script = f"set -a; . {keys}; exec {sys.executable} agents/examples/walk_agent.py"
    agent = subprocess.Popen(["sh", "-c", script], cwd=ROOT, env={"PATH": os.environ["PATH"]})
    code, output = run.wait()
    agent.kill()
    agent.wait()
    assert code == 0, output
    assert run.summary()["episodes"] == 2 * 16
    assert not keys.exists()


@pytest.mark.slow
@pytest.mark.engine
def test_plain_prompts_train_without_an_agent_by_a_function_of_the_users_with_dapo(tmp_path):
    tasks = [
        Task(task_id=f"q{n}", prompt=[{"role": "user", "content": f"{n}?"}], data_source="openai/gsm8k")
        for n in range(20)
    ]
    write_tasks(tmp_path / "train.parquet", tasks)
    write_tasks(tmp_path / "test.parquet", tasks[:4])
    run = start(
        tmp_path,
        "model.path=tiny",
        "model.dtype=float32",
        "run.steps=3",
        f"data.tasks={tmp_path / 'train.parquet'}",
        f"data.validation.tasks={tmp_path / 'test.parquet'}",
        "data.validation.every=2",
        "data.validation.samples=3",
        "data.scorer={openai/gsm8k: tests.support.scoring.early_letters}",
        "data.reward_manager=dapo",
        "agents.concurrency=32",
        "rollout.max_tokens=8",
        "rollout.max_model_len=128",
        "buffer.groups_per_step=3",
        "buffer.group_size=4",
        "learner.lr=1e-3",
        config="configs/gsm8k.yaml",
    )
    code, output = run.wait()
    assert code == 0, output
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward/mean" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert all(line["reward/std"] > 0.0 and line["reward/overlong"] < 0.0 for line in steps)
    validated = [line for line in lines if "val/step" in line]
    assert validated and all(line["val/tasks"] == 4 and line["val/best"] >= line["val/mean"] for line in validated)
    summary = run.summary()
    assert summary["buffer"]["groups/trained"] == 9 and summary["max_logprob_diff"] < 1e-4
    assert_nothing_left(run)


@pytest.mark.parametrize(("made", "words"), [(False, "is not a folder"), (True, "has no config.json")])
def test_a_model_folder_that_holds_no_model_is_named(tmp_path, made, words):
    if made:
        (tmp_path / "model").mkdir()
    tasks = tmp_path / "tasks.parquet"
    write_tasks(tasks, walk_tasks(2, seed=0))
    told = refusal(tmp_path, f"model.path={tmp_path / 'model'}", f"data.tasks={tasks}")
    assert "model.path" in told and words in told


@pytest.mark.seconds
def test_a_checkpoint_that_is_not_there_is_named_and_nothing_is_moved_aside(tmp_path):
    (tmp_path / "run").mkdir()
    code, output = start(tmp_path, resume=str(tmp_path / "run" / "checkpoints" / "step-000005"), imports=True).wait()
    assert code == 2
    assert len(output.strip().splitlines()) == 1 and "--resume must be `auto` or name a complete checkpoint" in output
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
