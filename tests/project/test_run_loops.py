"""Whole runs with agent loops: GSM8K with tools, and what is refused before anything starts."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from contextlib import closing

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from transformers import AutoTokenizer

from buffers.ledger.encode import decode
from configs.load import FOLDER, load_config
from tests.support.run_parts import Run, assert_nothing_left, refusal, start

pytestmark = [pytest.mark.slow]


@pytest.mark.long
def test_a_tool_agent_trains_from_the_shipped_problems_on_the_real_engine(tmp_path):
    run = start(
        tmp_path,
        "run.steps=2",
        "sft.steps=24",
        "buffer.groups_per_step=3",
        "buffer.group_size=4",
        "learner.echo.tool=0.1",
        f"data.tasks={tmp_path}/data/train.parquet",
        f"data.validation.tasks={tmp_path}/data/test.parquet",
        "data.validation.every=2",
        f'data.make=["{{python}}",-m,agents.make_gsm8k_data,--out,{tmp_path}/data]',
        f"sft.demonstrations={tmp_path}/data/traces.parquet",
        config="configs/gsm8k_tool_cpu.yaml",
    )
    code, output = run.wait()
    assert code == 0, output
    summary = run.summary()
    assert summary["max_logprob_diff"] < 1e-4, "what is trained is what was sampled, through the tool's results"
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "agent_loop/episodes" in line]
    assert sum(line["agent_loop/episodes"] for line in steps) >= 2 * 3 * 4, "each episode that was trained is counted"
    assert any(line["agent_loop/tool_calls/max"] > 0 for line in steps), "tools were called"
    assert all(line["agent_loop/slowest/total"] == line["agent_loop/total/max"] for line in steps)
    assert any("val/mean" in line for line in lines)
    echoed = [(line["learner/echo_tokens"], line["policy/echo_loss"]) for line in steps]
    assert [number for number, _ in echoed] == tool_tokens(run) and all(number > 0 < loss for number, loss in echoed)
    traces = [json.loads(line) for line in (run.folder / "traces.jsonl").read_text().splitlines()]
    assert {trace["step"] for trace in traces} == {1, 2}
    turns = [turn for trace in traces for row in trace["rows"] for turn in row["turns"]]
    told = [turn for turn in turns if "<tool_response>" in turn["text"]]
    assert told
    assert not any(turn["trained"] for turn in told)
    assert_nothing_left(run)


def tool_tokens(run: Run) -> list[int]:
    """Tokens of tools' results in the episodes of each step, without the template's line breaks, by the ledger's rounds."""
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "model")
    opens, closes = (tokenizer.convert_tokens_to_ids(f"<{mark}tool_response>") for mark in ("", "/"))
    found: Counter[int] = Counter()
    with closing(sqlite3.connect(run.folder / "ledger.sqlite")) as db:
        rounds = db.execute(
            "SELECT step.step, body FROM round JOIN episode USING (episode_id) JOIN trained USING (group_id) "
            "JOIN step USING (step_id) WHERE parent IS NOT NULL AND episode.state = 'scored'"
        ).fetchall()
    for step, body in rounds:
        ids = decode(body).tail_ids
        found[step] += sum(np.flatnonzero(ids == closes) - np.flatnonzero(ids == opens) - 3)
    return [found[step] for step in sorted(found)]


def test_the_cpu_configuration_differs_in_model_and_sizes_only():
    gpu = load_config(FOLDER / "gsm8k_tool.yaml", []).model_dump()
    cpu = load_config(FOLDER / "gsm8k_tool_cpu.yaml", []).model_dump()
    for part in (gpu, cpu):
        for name in ("name", "steps", "reward_optimum"):
            part["run"].pop(name)
    differ = {f"{section}.{key}" for section in gpu for key in gpu[section] if gpu[section][key] != cpu[section][key]}
    sizes = {"agents.concurrency", "rollout.max_tokens", "rollout.max_model_len", "buffer.groups_per_step"}
    sizes |= {"learner.lr", "learner.token_budget"}  # the rate goes with the width
    files = {"data.tasks", "data.make", "data.validation", "sft.demonstrations", "sft.steps"}
    assert differ <= {"model.path", "model.dtype"} | sizes | files


@pytest.mark.parametrize(
    ("entries", "agent_name", "words"),
    [
        ([{"name": "tool_agnt"}], None, ["entry 0", "did you mean 'tool_agent'?"]),
        ([{"name": "mine"}], None, ["entry 0", "_target_"]),
        ([{"name": "single_turn_agent"}], "tool_agent", ["row 2", "agent_name", "'tool_agent'"]),
        ([{"name": "single_turn_agent"}, {"name": "tool_agent"}], "tool_agnt", ["row 2", "did you mean 'tool_agent'?"]),
        ({}, None, ["must be a list of loops"]),
    ],
)
def test_a_name_that_is_not_there_is_refused_before_anything_starts(tmp_path, entries, agent_name, words):
    loops, tasks = tmp_path / "loops.yaml", tmp_path / "tasks.parquet"
    loops.write_text(yaml.safe_dump(entries))
    rows = [{"prompt": "a", "agent_name": name} for name in (None, None, agent_name)]
    pq.write_table(
        pa.Table.from_pylist(rows, schema=pa.schema([("prompt", pa.string()), ("agent_name", pa.string())])), tasks
    )
    config = tmp_path / "c.yaml"
    config.write_text(
        yaml.safe_dump({"agents": {"loops": str(loops)}, "data": {"tasks": str(tasks), "scorer": "json_line"}})
    )
    told = refusal(tmp_path, config=str(config))
    assert all(word in told for word in words), told


@pytest.mark.parametrize("truth", ['{"ground_truth": null}', '{"style": "rule"}', None, '{"ground_truth": ["4", "5"]}'])
@pytest.mark.parametrize("scorer", ["contains", "{mine: gsm8k_flexible, default: json_line}"])
def test_a_row_without_a_truth_to_compare_with_is_refused_with_its_scorer(tmp_path, truth, scorer):
    rows = [{"prompt": "a", "data_source": "mine", "reward_model": cell} for cell in ('{"ground_truth": 4}', truth)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "tasks.parquet")
    words = [f"data.tasks={tmp_path / 'tasks.parquet'}", "agents.command=[]", "env.command=[]", "data.make=[]"]
    told = refusal(tmp_path, *words, "sft.demonstrations=", f"data.scorer={scorer}")
    name = "contains" if scorer == "contains" else "gsm8k_flexible"
    assert "row 1" in told and f"data.scorer={name} compares answers" in told, told


def test_a_scorer_that_is_not_there_is_refused_with_the_nearest_name(tmp_path):
    told = refusal(tmp_path, "data.scorer=gsm8k_strickt")
    assert "data.scorer" in told and "gsm8k_strict" in told
