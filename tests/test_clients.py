"""Real clients, each an ordinary program in its own process, against the real engine: every trained token is what the engine saw.

The tiny model is first taught what to say: the programs run once against the scripted engine, and the model is fitted to the rows
that this gives. Then they run again and the model talks to them freely, with tools and reasoning.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from buffers.rows import episode_rows
from mocked_server.recompute import token_logprobs
from tests.server_parts import BorrowedEngine

pytestmark = pytest.mark.engine

CLIENTS = Path(__file__).parent / "clients"
PROGRAMS = ["chat_tools.py", "chat_async_stream.py", "responses_tools.py", "anthropic_tools.py"]
QUESTION = "What is 12 + 30?"
THOUGHT = "<think>\nA sum.\n</think>\n\n"
CALL = '<tool_call>\n{"name":"add","arguments":{"a":12,"b":30}}\n</tool_call>'
TEACHING_STEPS = 150
MAX_DRIFT = 1e-4


def play(served, program, tmp_path):
    """Run a program as the agent of a new episode -> (its rounds, its live episode, what it printed)."""
    episode, client = served.lease(prompt=QUESTION)
    env = {
        **served.server.environment(client.api_key),
        "TASK_JSON": json.dumps({"prompt": [{"role": "user", "content": QUESTION}]}),
        "PATH": str(Path(sys.executable).parent),
    }
    done = subprocess.run(
        [sys.executable, str(CLIENTS / program)], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return served.stored(episode), served.server.episodes.get(episode), done.stdout.strip()


def scripted(served):
    """What the model shall learn to say: think, call the tool, then answer."""

    def answer(prompt):
        text = served.tokenizer.decode(prompt)
        call = "<tools>" in text and "<tool_response>\n42" not in text
        return served.ids(THOUGHT + (CALL if call else "It is 42."))

    return answer


@pytest.fixture(scope="module")
def taught(tools_server, tiny_model, tmp_path_factory):
    """The tiny model, fitted to the scripted conversations of all programs."""
    folder = tmp_path_factory.mktemp("taught")
    tools_server.engine.answer = scripted(tools_server)
    rows = []
    for program in PROGRAMS:
        rounds, _, _ = play(tools_server, program, folder)
        rows += episode_rows(rounds, group_id=0, score=1.0)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for step in range(TEACHING_STEPS):
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step / TEACHING_STEPS)
        optimizer.zero_grad()
        for row in rows:
            logprobs = token_logprobs(model, row)
            (-logprobs[torch.tensor(row.mask[1:]) == 1].mean() / len(rows)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, model.eval()


@pytest.fixture(scope="module")
def served(tools_server, rollout, taught, tiny_model):
    """The server with the session's engine behind it, which has learnt to talk."""
    rollout.update_weights(taught[0], version=1)
    with tools_server.using(BorrowedEngine(rollout)):
        yield tools_server
    rollout.update_weights(tiny_model, version=0)


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_trained_token_has_the_log_probability_that_the_learner_computes(served, taught, tmp_path, program):
    rounds, live, printed = play(served, program, tmp_path)
    assert len(rounds) >= 2 and any(round_.parent is not None for round_ in rounds)
    if program != "chat_async_stream.py":
        assert ([r.parent for r in rounds], live.breaks) == ([None, 0], {})
        assert printed == "It is 42."
    rows = episode_rows(rounds, group_id=0, score=1.0)
    assert sum(row.num_trained for row in rows) == sum(len(round_.sampled_ids) for round_ in rounds)
    for row in rows:
        with torch.no_grad():
            mine = token_logprobs(taught[1], row).numpy()
        sampled = row.mask[1:] == 1
        assert np.abs(mine[sampled] - row.logprobs[1:][sampled]).max() < MAX_DRIFT
        assert set(row.versions[row.mask == 1].tolist()) == {1}
