"""Evaluation harnesses of others as agents: each sample is an episode of its own, and its score is the harness's.

The model answers `ok` to everything; the programs are those of agents/examples, in environments of their own.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.schema import RolloutConfig
from tests.outside.agent_environments import python_with
from tests.support.server_parts import ServerThread

pytestmark = [pytest.mark.slow, pytest.mark.outside]

EXAMPLES = Path(__file__).parents[2] / "agents" / "examples"
INSPECT = ("inspect-ai==0.3.285", "openai==3.57.0")
LM_EVAL = ("lm-eval[api]==0.4.13", "openai==3.57.0")
TRUTHS = ["ok", "no", "ok", "perhaps", "ok"]


@pytest.fixture
def waiting(tiny_model: Path) -> Iterator[ServerThread]:
    """A run's server with five tasks of two episodes each, and no agent."""
    thread = ServerThread(tiny_model, rollout=RolloutConfig(max_tokens=64, max_model_len=512), group_size=2)
    thread.start()
    rows = [
        {"task_id": f"t{n}", "prompt": f"Say it, {n}.", "reward_model": {"ground_truth": truth}}
        for n, truth in enumerate(TRUTHS)
    ]
    with thread.http(thread.server.keys.admin) as http:
        assert http.post("/tasks", json={"tasks": rows}).json() == {"added": len(TRUTHS)}
    thread.call(_sealed(thread))
    yield thread
    thread.stop()


async def _sealed(thread: ServerThread) -> None:
    thread.pool.seal()


@pytest.mark.parametrize("at_once", ["3", "16"])  # several evaluations of some samples, or one of all
@pytest.mark.parametrize(
    ("program", "requirements"), [("inspect_harness.py", INSPECT), ("lm_eval_harness.py", LM_EVAL)]
)
def test_each_sample_of_a_harness_is_an_episode_with_its_own_score(
    waiting, tmp_path, program, requirements, at_once
) -> None:
    server = waiting.server
    environment = {
        **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
        **server.environment(server.keys.worker),
        "SERVER_URL": server.base_url, "SCORER_KEY": server.keys.scorer, "CONCURRENCY": at_once,
    }  # fmt: skip
    python = python_with(program.removesuffix("_harness.py"), *requirements)
    done = subprocess.run(
        [str(python), str(EXAMPLES / program)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    batch = waiting.ledger.claim(len(TRUTHS), min_version=0).result()
    assert batch is not None, waiting.ledger.counts()
    scores = [row.score for row in sorted(batch.rows, key=lambda row: row.group_id)]  # opened in the tasks' order
    assert scores == [float(truth == "ok") for truth in TRUTHS for _ in range(2)]
    assert waiting.ledger.counts()["rounds"] == 2 * len(TRUTHS)
