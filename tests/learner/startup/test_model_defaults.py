"""Rules of learner/startup/model_defaults.py: what a model bears is chosen by its size, and what the user sets stays."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Config
from learner.placement.memory import ModelShape
from learner.run import prepare_engine
from learner.startup.model_defaults import RATES, with_model_defaults
from tests.support.run_parts import ROOT

SMOLLM2 = ModelShape(
    parameters=134_515_008, outside_layers=28_312_128, largest_layer=3_540_096, layers=30, hidden=576, intermediate=1536,
    heads=9, queries=576, kv_heads=3, keys=192, vocabulary=49152, linear_features=7000,
)  # fmt: skip
GIB = 2**30


def chosen(
    sections: dict[str, Any], *, parameters: int = SMOLLM2.parameters, has_gpu: bool = False, memory_gib: float = 24.0
) -> tuple[Config, list[str]]:
    told: list[str] = []
    given = Config(**{"model": {"path": "models/real"}, "learner": {"advantage": "grpo", "critic": "none"}} | sections)
    config = with_model_defaults(
        given,
        shape=replace(SMOLLM2, parameters=parameters),
        has_gpu=has_gpu,
        memory_bytes=int(memory_gib * GIB),
        cores=8,
        say=told.append,
    )
    return config, told


def test_a_pretrained_model_gets_a_rate_that_it_bears_and_a_line_says_so() -> None:
    config, (line,) = chosen({})
    assert (config.learner.lr, config.learner.minibatches, config.learner.token_budget) == (1e-5, 1, 1024)
    assert chosen({"rollout": {"max_model_len": 256, "max_tokens": 64}})[0].learner.token_budget == 512
    assert "learner.lr=1e-05 (all weights of a pretrained model of 135 million weights)" in line


@pytest.mark.parametrize(
    ("parameters", "rate"),
    [(20_000_000, 2e-5), (494_000_000, 5e-6), (1_540_000_000, 3e-6), (7_600_000_000, 1e-6), (70_600_000_000, 5e-7)],
)
def test_the_rate_falls_with_the_square_root_of_the_size(parameters: int, rate: float) -> None:
    assert chosen({}, parameters=parameters)[0].learner.lr == pytest.approx(rate)
    assert RATES[0] <= rate <= RATES[1]


def test_an_adapter_gets_ten_times_the_rate() -> None:
    config, _ = chosen({"learner": {"advantage": "grpo", "critic": "none", "lora": {"rank": 8}}})
    assert config.learner.lr == pytest.approx(1e-4)


@pytest.mark.parametrize("sections", [{"model": {"path": "tiny"}}, {"model": {"path": "models/small"}}])
def test_a_model_from_scratch_keeps_the_demos_defaults(sections: dict[str, Any]) -> None:
    config, told = chosen(sections, parameters=SMOLLM2.parameters if sections["model"]["path"] == "tiny" else 361_216)
    assert config.learner.lr == 5e-4 and config.learner.minibatches == 2 and told == []


def test_what_is_set_stays_and_a_rate_far_beyond_is_warned_of() -> None:
    learner = {"advantage": "grpo", "critic": "none", "lr": 5e-4, "minibatches": 4, "token_budget": 8192}
    config, told = chosen({"learner": learner, "rollout": {"kv_cache_gb": 2.0}})
    assert config.learner.model_dump(include=set(learner)) == learner and config.rollout.kv_cache_gb == 2.0
    (warning,) = told
    assert "learner.lr=0.0005 is far beyond 1e-05" in warning
    assert chosen({"learner": learner | {"lr": 1e-4}, "rollout": {"kv_cache_gb": 2.0}})[1] == []


def test_a_critic_needs_a_pass_before_the_updates_and_gets_as_many_of_them_as_before() -> None:
    config, _ = chosen({"learner": {"advantage": "gae", "critic": "separate"}})
    assert config.learner.minibatches == 2 and config.learner.critic_lr == pytest.approx(1e-4)


def test_in_turns_learner_and_engines_have_all_cores_and_beside_one_another_one_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    given = {"buffer": {"max_policy_lag": 0}, "rollout": {"engines": 2}}
    config, _ = chosen(given)
    assert (config.learner.threads, config.rollout.threads) == (8, 4)
    for beside, on_gpu in (({"buffer": {"max_policy_lag": 1}}, False), (given, True)):
        config, _ = chosen(beside, has_gpu=on_gpu)
        assert (config.learner.threads, config.rollout.threads) == (None, None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the user's word
    assert chosen(given)[0].rollout.threads is None


def test_a_gpu_keeps_its_micro_batches_and_its_cache() -> None:
    config, _ = chosen({}, has_gpu=True)
    assert config.learner.token_budget == 8192 and config.rollout.kv_cache_gb is None


@pytest.mark.parametrize(("memory_gib", "most_gib"), [(8.0, 0.4), (24.0, 1.2), (256.0, 6.0)])
def test_the_cache_holds_the_conversations_or_a_share_of_the_memory(memory_gib: float, most_gib: float) -> None:
    config, _ = chosen({"rollout": {"max_model_len": 2048}}, memory_gib=memory_gib)
    assert config.rollout.kv_cache_gb == pytest.approx(most_gib, rel=0.1)
    short, _ = chosen({"rollout": {"max_tokens": 16, "max_model_len": 64}}, memory_gib=memory_gib)
    assert short.rollout.kv_cache_gb is None or short.rollout.kv_cache_gb == 0.25


def test_engines_compute_with_as_many_threads_as_the_run_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    started: list[str] = []  # the environment that the processes of engines are started with
    monkeypatch.setattr(
        "mocked_server.vllm.engine.start_fork_server", lambda: started.append(os.environ["OMP_NUM_THREADS"])
    )
    prepare_engine(Config())
    prepare_engine(Config(rollout={"threads": 3}))
    assert started == ["1", "3"]


READS = """
import os, pathlib, sys
from configs.load import load_config
from learner.run import checked_config
checked_config(load_config(pathlib.Path(sys.argv[1]), sys.argv[2:]), resume="")
print(os.environ.get("GOMP_SPINCOUNT"), "torch" in sys.modules)
"""


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("said", "counts"), [({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")]
)
def test_threads_that_wait_for_each_other_soon_sleep(tmp_path: Path, said: dict[str, str], counts: str) -> None:
    """The variable counts if it is there when torch is imported."""
    kept = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    environment = {**kept, **said}
    words = [sys.executable, "-c", READS, str(ROOT / "configs" / "demo.yaml"), f"run.dir={tmp_path}"]
    told = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    assert told.split()[-2:] == [counts, "False"]


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"rollout": {"engine": "http://127.0.0.1:8000"}},
        {"rollout": {"engine": "sglang"}},
        {"learner": {"recipe": "ppo"}, "buffer": {"max_policy_lag": 0}},
        {"learner": {"recipe": "dapo", "lora": {"rank": 4}}, "buffer": {"max_policy_lag": 0}},
        {"learner": {"advantage": "gae", "critic": "separate"}, "sft": {"demonstrations": "traces.parquet"}},
        {"rollout": {"sleep": True}, "buffer": {"max_policy_lag": 0}},
    ],
    ids=str,
)
@pytest.mark.parametrize("has_gpu", [False, True])
def test_what_was_chosen_can_be_read_again_from_the_runs_own_configuration(
    monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], has_gpu: bool
) -> None:
    """A resume reads config.yaml, where each key is set: none may be refused beside the others."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = Config(**{"model": {"path": "models/real"}} | sections)
    Config(**before.model_dump())  # else it is not the choice that is refused
    config, _ = chosen({"learner": {}} | sections, has_gpu=has_gpu)
    assert Config(**config.model_dump()) == config
