"""A real agent of several turns on a real model: the OpenAI Agents SDK with a tool, and SmolLM2-135M, which learns to use it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.peers import NUM_PRODUCTS, NUM_SHOWN, PAIRS, product_task, shown_product
from buffers.tasks.parquet import write_tasks
from env_adapters import smollm2
from learner.startup.model_and_tasks import plain_folder
from tests.outside.agent_environments import python_with
from tests.outside.test_clients import CLIENTS, FRAMEWORKS, MAX_DRIFT

pytestmark = [pytest.mark.slow, pytest.mark.outside, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}{% if message.role == 'system' %}
{% for tool in tools or [] %}Tool: {{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }})
{% endfor %}Call it so: <tool_call>
{"name": "multiply", "arguments": {"a": 2, "b": 3}}
</tool_call>{% endif %}{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""SmolLM2's own has no tools. Most that have some show how to call one."""
STEPS = 8


def test_a_real_agent_learns_to_use_its_tool(tmp_path: Path) -> None:
    """A few updates of SFT show it the form, without which there is nothing to score; the rest is what its answers score."""
    made = smollm2.make(tmp_path / "data" / "smollm2")
    model = plain_folder(made / smollm2.MODEL, to=tmp_path / "model", dtype="float32", say=print)
    (model / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    write_tasks(tmp_path / "train.parquet", [product_task(*pair) for pair in PAIRS[:NUM_PRODUCTS]])
    shown = [json.dumps(shown_product(*pair)) for pair in PAIRS[NUM_PRODUCTS : NUM_PRODUCTS + NUM_SHOWN]]
    (tmp_path / "shown.jsonl").write_text("\n".join(shown), encoding="utf-8")
    python = python_with("frameworks", *FRAMEWORKS)
    command = [str(python), str(CLIENTS / "frameworks" / "calculator_agent.py")]
    words = [
        "run.name=calculator", f"run.steps={STEPS}", f"model.path={model}", "data.tasks=train.parquet", "data.validation.tasks=",
        "data.scorer=exact_match", f"agents.command={json.dumps(command)}", "agents.processes=0", "agents.preload=[agents]",
        "agents.concurrency=32", "rollout.max_tokens=48", "rollout.max_model_len=384", "server.tool_parser=hermes",
        "buffer.groups_per_step=8", "buffer.group_size=8", "sft.demonstrations=shown.jsonl", "sft.steps=6",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "learner.cli", "run", "--config", "smollm2", *words], cwd=tmp_path, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, timeout=3000,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "runs" / "calculator" / "metrics.jsonl").read_text().splitlines()
    steps = [step for step in map(json.loads, lines) if "reward/mean" in step]
    rewards = [step["reward/mean"] for step in steps]
    print(rewards)
    assert len(steps) == STEPS and fmean(rewards[-2:]) > fmean(rewards[:2]) + 0.2, rewards
    assert max(step["policy/max_logprob_diff"] for step in steps) <= MAX_DRIFT
    assert all(step["agent_loop/rounds_mean"] > 1.5 for step in steps[-2:])
