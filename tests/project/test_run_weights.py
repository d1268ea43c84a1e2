"""Whole runs whose weights travel as patches, or as adapters."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

from buffers.ledger.ledger import Ledger
from tests.faults.killer import descendants
from tests.project.test_recovery import kill
from tests.support.patience import PATIENCE_S
from tests.support.run_parts import Run, assert_nothing_left, start

pytestmark = [pytest.mark.slow, pytest.mark.engine]

SMALL = ("sft.steps=5", "buffer.groups_per_step=4", "buffer.group_size=4", "agents.concurrency=32")
WEIGHTS_BYTES = 361_216 * 2
"""Of the demo's model in bfloat16."""


def figures(run: Run, name: str) -> list[float]:
    """A metric's values, by step."""
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def puller_of(run: Run) -> int:
    """The process id of the run's puller."""
    until = time.monotonic() + PATIENCE_S
    while True:
        found = [pid for pid, (_, line) in descendants(run.process.pid).items() if "understudy::weights_puller" in line]
        if found:
            return found[0]
        assert run.process.poll() is None and time.monotonic() < until, "there is no puller"
        time.sleep(0.1)


def test_two_ranks_in_bfloat16_publish_patches_and_a_killed_puller_and_engine_cost_none(tmp_path: Path) -> None:
    settings = ("model.dtype=bfloat16", "learner.lr=1e-6", "learner.ranks=2", "run.steps=6")
    run = start(tmp_path, *settings, *SMALL)
    run.wait_for_step(2)
    os.kill(puller_of(run), 9)
    run.wait_for_step(3)
    kill(run, "engine")
    code, output = run.wait()
    assert code == 0, output
    assert (
        "the puller of the weights died and is started again: understudy::weights_puller ended by SIGKILL"
        in (run.folder / "log.txt").read_text()
    )
    sent, shares = figures(run, "publish/bytes"), figures(run, "publish/changed_share")
    assert len(sent) == len(shares) == 6 and max(sent) < 0.15 * WEIGHTS_BYTES, sent
    norms = figures(run, "policy/grad_norm")
    taught = [any(norms[: step + 1]) for step in range(6)]  # first batches may have no score but 0, and teach nothing
    assert any(taught) and max(shares) < 0.1, (shares, norms)
    assert [share > 0.0 for share in shares] == taught, (shares, norms)
    paused = figures(run, "publish/paused_s")
    assert sum(seconds > 0.0 for seconds in paused) >= 5, "none only where there was no engine to pause"
    assert run.summary()["max_logprob_diff"] < 0.05, "as bfloat16 rounds"
    apart = figures(run, "policy/mean_logprob_diff")  # 0.0035 where the learner does not round as the engine does
    limit = 0.0032 if torch.cpu._is_amx_tile_supported() else 0.002  # 0.0028 was seen on a CPU with AMX
    assert sum(apart) / len(apart) < limit, apart
    assert_nothing_left(run)


def test_adapters_are_exact_through_an_engines_death_and_a_resume(tmp_path: Path) -> None:
    run = start(tmp_path, "run.steps=4", *SMALL, config="configs/grpo_lora.yaml")
    run.wait_for_step(2)
    kill(run, "engine")
    code, output = run.wait()
    assert code == 0, output
    assert run.summary()["restarts"] == {"restarts/engine": 1.0}
    again = start(tmp_path, "run.steps=5", *SMALL, config="configs/grpo_lora.yaml", resume="auto")
    code, output = again.wait()
    assert code == 0, output
    assert len(figures(again, "publish/bytes")) == 5
    assert max(figures(again, "policy/max_logprob_diff")) < 1e-5, "each token is of the adapter that it names"
    assert max(figures(again, "publish/bytes")) < 0.6 * 2 * WEIGHTS_BYTES, "the adapter alone travels"
    assert max(figures(again, "policy/lag_max")) == 1.0
    assert_nothing_left(again)


APART = (
    "learner.lora.rank=4", "learner.lora.per_role=true", "learner.lr=1e-2", "learner.entropy_coef=0.05",
    "roles={scout: {}, runner: {}, silent: {}}",
)  # fmt: skip


def relay_files(folder: Path) -> tuple[str, ...]:
    """The relay game's tasks and demonstrations, written into `folder`."""
    tasks, traces = folder / "tasks.parquet", folder / "traces.parquet"
    words = ["{python}", "-m", "env_adapters.relay.make_data", "--tasks", str(tasks), "--traces", str(traces)]
    return f"data.tasks={tasks}", f"sft.demonstrations={traces}", f"data.make={json.dumps(words)}"


@pytest.mark.long
def test_adapters_of_roles_are_exact_through_deaths_and_a_resume_and_one_that_starves_stops_no_other(
    tmp_path: Path,
) -> None:
    settings = (*SMALL, *APART, *relay_files(tmp_path), "run.checkpoints.every=2")
    run = start(tmp_path, "run.steps=4", *settings, config="configs/relay.yaml")
    run.wait_for_step(2)
    kill(run, "engine")
    code, output = run.wait()
    assert code == 0, output
    saved = run.folder / "checkpoints" / "step-000002"
    again = start(tmp_path, "run.steps=6", *settings, config="configs/relay.yaml", resume=str(saved))
    code, output = again.wait()
    assert code == 0, output
    for role in ("scout", "runner"):
        assert figures(again, f"adapter/{role}/version") == [1, 2, 3, 4, 5, 6]
        checked, too_old = (figures(again, f"adapter/{role}/policy/{name}_share") for name in ("checked", "too_old"))
        assert [round(one + other, 5) for one, other in zip(checked, too_old, strict=True)] == [1.0] * 6
        assert max(figures(again, f"adapter/{role}/policy/max_logprob_diff")) < 1e-5, (
            "each token is of its role's adapter"
        )
        assert max(figures(again, f"adapter/{role}/policy/lag_max")) == 1.0
    assert figures(again, "adapter/silent/version") == [0] * 6
    newest = again.folder / "last" / "adapters"
    stored = [newest / role / "adapter_model.safetensors" for role in ("scout", "runner", "silent")]
    assert len({file.read_bytes() for file in stored}) == 3, "each learned by itself, or not at all"
    assert json.loads((newest / "versions.json").read_text()) == {"scout": 6, "runner": 6, "silent": 0}
    assert_nothing_left(again)


def test_a_role_that_plays_an_earlier_adapter_is_sampled_by_exactly_that_one(tmp_path: Path) -> None:
    """`frozen: -1` with LoRA: the earlier version is an adapter too. Answers lag by one version at most: those of the first, the
    fourth and the sixth step are of three versions of the role."""
    roles = ("learner.lora.rank=4", "learner.lr=1e-2", "roles={scout: {}, runner: {frozen: -1}}")
    run = start(tmp_path, "run.steps=6", *SMALL, *roles, *relay_files(tmp_path), config="configs/relay.yaml")
    code, output = run.wait()
    assert code == 0, output
    assert figures(run, "policy/role_version/runner") == [0, 1, 2, 3, 4, 5]
    assert max(figures(run, "policy/max_logprob_diff")) < 1e-5
    ledger = Ledger(run.folder / "ledger.sqlite")
    with closing(sqlite3.connect(run.folder / "ledger.sqlite")) as db:
        names = [name for (name,) in db.execute("SELECT DISTINCT episode_id FROM round WHERE role = 'runner'")]
    rounds = [one for name in names for one in ledger.rounds(name).result() if one.role == "runner"]
    ledger.close()
    assert len({int(version) for one in rounds for version in one.versions}) >= 3, "later versions played, too"
    assert all(one.trained is not None and not one.trained.any() for one in rounds)


def test_the_puller_ends_with_a_run_that_is_killed(tmp_path: Path) -> None:
    run = start(tmp_path, "run.steps=40", *SMALL)
    run.wait_for_step(1)
    puller = puller_of(run)
    run.process.kill()
    run.process.wait()
    until = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{puller}").exists():
        assert time.monotonic() < until, "the puller outlives its run"
        time.sleep(0.05)
    run.kill()
