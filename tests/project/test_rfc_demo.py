"""RFC #1172's demo snippet, completed only where it has to be, against the real engine and an agent in its own process.

The agents are the shipped example's kind: they lease tasks over HTTP and talk to the model with the `openai` package.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from buffers.buffer_dataset import BufferDataset
from buffers.multi_round import MultiRoundBufferDataset
from buffers.records import Task
from buffers.tasks.parquet import write_tasks
from mocked_server.server import create_and_launch_task_pool
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.engine

AGENT = """
import os, openai
client = openai.OpenAI(max_retries=0)
while True:
    try:
        lease = client.get(os.environ["TASKS_URL"] + "?wait=2", cast_to=str)
    except openai.APIStatusError:
        break
    if not lease:
        break
    import json
    lease = json.loads(lease)
    me = client.with_options(api_key=lease["api_key"])
    messages = list(lease["task"]["prompt"])
    for _ in range(2):
        reply = me.chat.completions.create(model=os.environ["MODEL"], messages=messages, max_tokens=8)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
        messages.append({"role": "user", "content": "And then?"})
    print(lease["episode_id"], flush=True)
"""


def start_agent(mocked_server, folder: Path) -> subprocess.Popen:
    (folder / "agent.py").write_text(AGENT)
    env = {
        **{k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        "OPENAI_BASE_URL": mocked_server.base_url + "/v1",
        "OPENAI_API_KEY": mocked_server.keys.worker,
        "TASKS_URL": mocked_server.base_url + "/tasks",
        "MODEL": mocked_server.model,
    }
    return subprocess.Popen([sys.executable, "agent.py"], cwd=folder, env=env, stdout=subprocess.PIPE, text=True)


def test_the_rfc_snippet_runs_as_written(rollout, tiny_model, tmp_path):
    tasks = [Task(task_id=f"t{i}", prompt=[{"role": "user", "content": f"Task {i}"}]) for i in range(4)]
    write_tasks(tmp_path / "xxx.parquet", tasks)
    batch_size = 4

    train_dataset = MultiRoundBufferDataset()
    train_dataloader_iter = iter(DataLoader(train_dataset))

    mocked_server, _server_thread = create_and_launch_task_pool(
        notify_score_fn=train_dataset.notify_score, model=tiny_model
    )

    prompt_dataset = BufferDataset(buffer=mocked_server.prompt_queue)
    prompt_dataloader_iter = iter(DataLoader(prompt_dataset))

    # enqueue task into task server
    enqueue_task = mocked_server.enqueue_task
    threading.Thread(target=enqueue_task, args=(str(tmp_path / "xxx.parquet"),)).start()
    agents = [start_agent(mocked_server, tmp_path) for _ in range(1)]

    answered = 0
    while train_dataset.buffer.qsize() < batch_size:
        # sample prompt batch and generate sequences
        batch = next(prompt_dataloader_iter)
        responses = rollout.generate_sequences(batch)
        batch.union(responses)
        train_dataset.put_batch(batch)
        answered += len(batch)
        for agent in agents:
            if answered % 2 == 0:  # the agent prints the id of an episode that it has finished: the environment's part
                train_dataset.notify_score(agent.stdout.readline().strip(), 1.0)

    # sample
    if train_dataset.buffer.qsize() >= batch_size:
        train_batch = next(train_dataloader_iter)

    assert answered == 8
    assert len(train_batch) == batch_size
    assert {row.episode_id for row in train_batch.rows} == {f"{i}-0-0" for i in range(1, 5)}
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    for row in train_batch.rows:
        assert row.num_trained > 2 and row.score == 1.0 and len(np.unique(row.rounds[row.mask == 1])) == 2
        with torch.no_grad():
            logprobs = model(torch.tensor(row.ids[None]).long()).logits.log_softmax(-1)[0, :-1]
        mine = logprobs.gather(1, torch.tensor(row.ids[1:, None]).long())[:, 0].numpy()
        sampled = row.mask[1:] == 1
        assert np.abs(mine[sampled] - row.logprobs[1:][sampled]).max() < 1e-4
    mocked_server.stop()
    for agent in agents:
        assert agent.wait(PATIENCE_S) == 0
        agent.stdout.close()


def test_a_batch_mixes_agents_prompts_with_plain_prompts_of_the_file(rollout, tiny_model, tmp_path):
    kinds = [None, "single_turn_agent", None, "single_turn_agent"]
    tasks = [
        Task(task_id=f"t{i}", prompt=[{"role": "user", "content": f"Task {i}"}], agent_name=kind, ground_truth="7")
        for i, kind in enumerate(kinds)
    ]
    write_tasks(tmp_path / "mixed.parquet", tasks)
    train_dataset = MultiRoundBufferDataset(batch_size=4)
    mocked_server, _server_thread = create_and_launch_task_pool(
        notify_score_fn=train_dataset.notify_score, score_fn=lambda task, text: 0.5, model=tiny_model
    )
    prompts = iter(DataLoader(BufferDataset(buffer=mocked_server.prompt_queue)))
    mocked_server.enqueue_task(tmp_path / "mixed.parquet")
    agent = start_agent(mocked_server, tmp_path)
    while mocked_server.prompt_queue.qsize() < 3:  # the first prompt of the agent, and both plain ones
        threading.Event().wait(0.01)

    batch = next(prompts)
    assert len(batch) >= 2
    first = {episode_id for episode_id in batch["episode_id"]}
    finished: set[str] = set()
    while train_dataset.buffer.qsize() < 4:
        train_dataset.put_batch(batch.union(rollout.generate_sequences(batch)))
        counts = {e: len(train_dataset.ledger.rounds(e).result()) for e in ("1-0-0", "3-0-0")}
        for episode_id, rounds in counts.items():
            if rounds == 2 and episode_id not in finished:
                train_dataset.notify_score(episode_id, 1.0)
                finished.add(episode_id)
        if train_dataset.buffer.qsize() < 4:
            batch = next(prompts)

    train_batch = next(iter(DataLoader(train_dataset)))
    scores = {row.episode_id: row.score for row in train_batch.rows}
    assert scores == {"1-0-0": 1.0, "2-0-0": 0.5, "3-0-0": 1.0, "4-0-0": 0.5}
    assert first & {"1-0-0"} and first & {"2-0-0", "4-0-0"}, "one batch held prompts of both kinds"
    assert {agent.stdout.readline().strip() for _ in range(2)} == {"1-0-0", "3-0-0"}  # it has its last answers
    mocked_server.stop()
    assert agent.wait(PATIENCE_S) == 0
    agent.stdout.close()
