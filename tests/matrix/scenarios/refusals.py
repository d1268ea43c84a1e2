"""Runs that are refused in one line, before anything starts: what cannot be, and what is not there."""

from __future__ import annotations

from typing import Any

from tests.matrix.records import Run
from tests.matrix.scenarios.settings import PROMPTS
from tests.matrix.scenarios.task_files import prompts

REFUSALS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "wandb": ({"run.trackers": ["wandb"]}, ("run.trackers", "wandb", "install")),
    "mlflow": ({"run.trackers": ["mlflow"]}, ("run.trackers", "mlflow", "install")),
    "swanlab": ({"run.trackers": ["swanlab"]}, ("run.trackers", "swanlab", "install")),
    "gae without a critic": ({"learner.advantage": "gae", "learner.critic": "none"}, ("learner.critic=none", "separate")),
    "router replay without experts": ({"learner.router_replay": True}, ("learner.router_replay needs", "model.path=tiny")),
    "a routers' loss without experts": ({"learner.router_aux_coef": 0.01}, ("learner.router_aux_coef needs", "leave")),
    "router replay with a server of one's own": (
        {"learner.router_replay": True, "rollout.engine": "http://127.0.0.1:1", "rollout.kv_cache_gb": None},
        ("learner.router_replay", "got rollout.engine=http://127.0.0.1:1", "rollout.engine=vllm"),
    ),
    "a teacher that is not named": ({"learner.advantage": "none"}, ("learner.advantage=none", "learner.teacher.path=''")),
    "roles that nobody learns": (
        {"roles": {"judge": {"url": "http://127.0.0.1:1/v1"}}},
        ("roles must name one that the policy plays", "got judge"),
    ),
    "an adapter for each of no roles": (
        {"learner.lora": {"rank": 4, "per_role": True}},
        ("learner.lora.per_role", "got no roles", "set roles"),
    ),
    "an adapter for each role without a rank": (
        {"learner.lora": {"per_role": True}, "roles": {"a": {}, "b": {}}},
        ("learner.lora.per_role", "learner.lora.rank=0", "set learner.lora.rank=32"),
    ),
    "an adapter for each role with a critic": (
        {
            "learner.lora": {"rank": 4, "per_role": True}, "roles": {"a": {}, "b": {}}, "learner.advantage": "gae",
            "learner.critic": "shared",
        },
        ("learner.lora.per_role", "got learner.advantage=gae", "set learner.advantage=grpo"),
    ),
    "an adapter for each role beside an earlier version": (
        {"learner.lora": {"rank": 4, "per_role": True}, "roles": {"a": {}, "b": {"frozen": -1}}},
        ("roles.b.frozen=-1", "learner.lora.per_role=true", "leave learner.lora.per_role out"),
    ),
    "an adapter for each role in a cluster": (
        {"learner.lora": {"rank": 4, "per_role": True}, "roles": {"a": {}}, "buffer.node": "127.0.0.1"},
        ("learner.lora.per_role", "one machine", "buffer.node=127.0.0.1"),
    ),
    "a key that agents get": (
        {"roles": {"a": {}, "b": {"url": "http://127.0.0.1:1/v1", "key_variable": "HOME"}}, "agents.environment": ["HOME"]},
        ("roles.b.key_variable", "HOME", "agents.environment"),
    ),
    "stored groups that nobody asked for": ({"buffer.replay.times": 3}, ("buffer.replay.times", "set buffer.replay.share=0.5")),
    "a part of a stored group": (
        {"buffer.replay.share": 0.3}, ("buffer.replay.share", "0.3 of buffer.groups_per_step=2", "0.5 or more"),
    ),
    "stored groups of one": (
        {"buffer.replay.share": 0.5, "buffer.group_size": 1, "learner.advantage": "gae", "learner.critic": "shared"},
        ("buffer.replay.share", "buffer.group_size=1", "set buffer.replay.only=all"),
    ),
    "stored groups without a correction": (
        {"buffer.replay.share": 0.5, "learner.correction": "none"}, ("buffer.replay.share", "set learner.correction=tis"),
    ),
    "stored groups of another policy": (
        {"buffer.replay.share": 0.5, "learner.advantage": "opo"}, ("buffer.replay.share", "got learner.advantage=opo"),
    ),
    "stored groups of demonstrations": (
        {"buffer.replay.share": 0.5, "learner.stage": "sft", "sft.demonstrations": "x.jsonl"},
        ("buffer.replay.share", "got learner.stage=sft"),
    ),
    "a group of one": ({"buffer.group_size": 1}, ("buffer.group_size", ">= 2", "got 1")),
    "dapo with a group of one": (
        {"data.reward_manager": "dapo", "learner.advantage": "gae", "learner.critic": "shared", "buffer.group_size": 1},
        ("data.reward_manager=dapo", "got 1"),
    ),
    "more members than a group": ({"agents.fewest_members": 9}, ("agents.fewest_members", "got 9")),
    "a target without a weight": ({"learner.kl.target": 0.1}, ("learner.kl.target", "learner.kl.coef=0")),
    "a rank without an episode": ({"learner.ranks": 9}, ("learner.ranks", "2 * 4 < 9")),
    "answers longer than the model": ({"rollout.max_tokens": 256}, ("rollout.max_tokens", "256 >= 256")),
    "an engine over two cards where there is none": (
        {"rollout.tensor_parallel": 2},
        ("rollout.tensor_parallel must be 1 without a GPU", "got 2"),
    ),
    "an engine that is not installed": (
        {"rollout.engine": "sglang"},
        ("rollout.engine=sglang needs the package sglang", "rollout.engine=vllm"),
    ),
    "an engine that is no server": (
        {"rollout.engine": "ftp://here"},
        ("rollout.engine must be vllm, sglang or the URL", "'ftp://here'"),
    ),
    "a server where nobody answers": (
        {"rollout.engine": "http://127.0.0.1:1", "rollout.kv_cache_gb": None},
        ("rollout.engine must be the URL of a running server", "nobody answers"),
    ),
    "two engines at one server": (
        {"rollout.engine": "http://127.0.0.1:1", "rollout.engines": 2},
        ("rollout.engines=2 with rollout.engine=http://127.0.0.1:1",),
    ),
    "an argument that the run owns": (
        {"rollout.engine_args": {"logprobs_mode": "raw_logprobs"}},
        ("rollout.engine_args", "'logprobs_mode'", "leave it out"),
    ),
    "an argument that vLLM does not know": (
        {"rollout.engine_args": {"quantisation": "fp8"}},
        ("rollout.engine_args", "unrecognized arguments: --quantisation=fp8"),
    ),
    "batch without a scorer": ({"data.reward_manager": "batch", "data.scorer": ""}, ("data.reward_manager=batch", "data.scorer")),
    "two files of one name": (
        {"data.tasks": {"{files}/tasks.parquet": 1, "{files}/../tasks.parquet": 1}},
        ("data.tasks", "'tasks' twice"),
    ),
    "validation of training tasks": ({"data.validation.tasks": "{files}/tasks.parquet"}, ("data.validation.tasks", "for both")),
    "a scorer that is not there": ({"data.scorer": "contain"}, ("data.scorer", "did you mean 'contains'?")),
    "a key that is not there": ({"learner.lrr": 1}, ("learner.lrr", "did you mean learner.lr?")),
    "a tool parser that is not there": ({"server.tool_parser": "hermess"}, ("server.tool_parser", "hermes")),
    "a reasoning parser that is not there": ({"server.reasoning_parser": "qwen33"}, ("server.reasoning_parser", "qwen3")),
    "a variable that is not set": (
        {"agents.command": ["{python}", "-c", ""], "agents.environment": ["NOT_SET_HERE"]},
        ("agents.environment", "NOT_SET_HERE"),
    ),
    "beyond loopback without a secret": ({"server.host": "0.0.0.0"}, ("server.host", "0.0.0.0")),
    "a critic that nothing asks": (
        {"learner.advantage": "grpo", "learner.critic": "separate"},
        ("learner.critic=separate", "learner.advantage=grpo"),
    ),
    "a harbor that is not there": (
        {"env.harbor.agent": "terminus-2", "env.harbor.environment": "singularity", "env.harbor.command": ["no-such-harbor"],
         "data.tasks": "harbor://some@1.0", "data.scorer": ""},
        ("env.harbor.command must start harbor", "no-such-harbor", "uv tool install harbor"),
    ),
    "a Harbor agent that is not there": (
        {"env.harbor.agent": "claude-cod", "data.scorer": ""},
        ("env.harbor.agent", "did you mean 'claude-code'?"),
    ),
    "a container that loopback is to reach": (
        {"env.harbor.agent": "claude-code", "data.scorer": ""},
        ("server.host=127.0.0.1 is not this machine", "env.harbor.server_url"),
    ),
    "a file that is no folder of Harbor tasks": (
        {"env.harbor.agent": "terminus-2", "data.scorer": ""},
        ("data.tasks must be a folder of Harbor tasks", "tasks.parquet"),
    ),
    "two that score": ({"env.harbor.agent": "terminus-2"}, ("env.harbor.agent=terminus-2", "got data.scorer=")),
    "a lambda without gae": ({"learner.lam": 0.5}, ("learner.lam=0.5", "learner.advantage=gae")),
    "an estimator without a weight": ({"learner.kl.kind": "k1"}, ("learner.kl.kind=k1", "learner.kl.coef")),
}  # fmt: skip
"""What is refused -> settings beside those of plain prompts, and words of the line."""


def refusal_runs() -> list[Run]:
    """One for each."""
    return [
        Run(name=name.replace(" ", "-"), settings={**PROMPTS, **settings}, files=prompts, code=2)
        for name, (settings, _) in REFUSALS.items()
    ]
