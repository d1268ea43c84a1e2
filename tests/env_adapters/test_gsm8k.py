"""Rules of env_adapters/gsm8k.py: the sample is right, a local copy becomes verl's columns, and bad copies are named."""

from __future__ import annotations

import ast
import json
import operator
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from buffers.errors import TaskError
from buffers.tasks.parquet import read_tasks
from env_adapters.adapter import Step, WithDeadlines, make_adapter
from env_adapters.gsm8k import SAMPLE, WRONG, problems, tasks_of_problems
from env_adapters.scoring.scorers import SCORERS
from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
ROWS = [
    {"question": "Two and two?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"},
    {"question": "A thousand and one?", "answer": "It is that.\n#### 1,001"},
    {"question": "Two less five?", "answer": "#### -3"},
]


def value(node: ast.expr) -> float:
    """Of an arithmetic expression."""
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    assert isinstance(node, ast.Constant)
    return node.value


def test_the_sample_is_24_and_8_different_problems_with_right_answers() -> None:
    assert [len(list(problems(SAMPLE, split=split))) for split in ("train", "test")] == [24, 8]
    rows = [json.loads(line) for line in SAMPLE.read_text(encoding="utf-8").splitlines()]
    assert len({row["question"] for row in rows}) == 32
    for row in rows:
        steps = re.findall(r"<<(.+?)=(.+?)>>(\S+)", row["answer"])
        final = re.search(r"#### (\d+)$", row["answer"])
        assert steps and final, row
        for expression, result, shown in steps:
            assert value(ast.parse(expression, mode="eval").body) == float(result), row
            assert shown.startswith(result), row
        assert steps[-1][1] == final[1], row


def test_the_answers_of_the_sample_are_judged_right_by_both_scorers() -> None:
    for split in ("train", "test"):
        rows = list(problems(SAMPLE, split=split))
        for task, row in zip(tasks_of_problems(rows, split=split, tools=False, source="sample"), rows, strict=True):
            for name in ("gsm8k_strict", "gsm8k_flexible"):
                assert SCORERS[name](task, row["answer"]) == 1.0
                assert SCORERS[name](task, f"#### {int(task.ground_truth) + 1}") == 0.0


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "env_adapters.gsm8k", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)


@pytest.mark.seconds
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_local_copy_becomes_verls_columns(tmp_path: Path, kind: str) -> None:
    copy = tmp_path / "copy" / "main"
    copy.mkdir(parents=True)
    for split in ("train", "test"):
        if kind == "jsonl":
            (copy / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        else:
            pq.write_table(pa.Table.from_pylist(ROWS), copy / f"{split}-00000-of-00001.parquet")
    done = run("--from", str(tmp_path / "copy"), "--out", str(tmp_path / "out"), "--tools")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].endswith("test.parquet: 3 problems")
    raw: list[dict[str, Any]] = pq.read_table(tmp_path / "out" / "test.parquet").to_pylist()
    assert raw[1]["reward_model"] == {"style": "rule", "ground_truth": "1001"}
    assert raw[1]["extra_info"] == {
        "index": 1,
        "split": "test",
        "question": "A thousand and one?",
        "answer": "It is that.\n#### 1,001",
        "need_tools_kwargs": True,
        "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "1001"}}},
    }
    assert (raw[1]["data_source"], raw[1]["agent_name"]) == ("openai/gsm8k", "tool_agent")
    tasks = list(read_tasks(tmp_path / "out" / "train.parquet"))
    assert [task.ground_truth for task in tasks] == ["4", "1001", "-3"]
    assert [message["role"] for message in tasks[0].prompt] == ["system", "user"]
    assert tasks[0].prompt[1]["content"].startswith("Two and two? ")


@pytest.mark.seconds
def test_without_a_copy_the_sample_is_written_and_without_tools_no_agent_is_named(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    tasks = {split: list(read_tasks(tmp_path / f"{split}.parquet")) for split in ("train", "test")}
    assert {split: len(found) for split, found in tasks.items()} == {"train": 24, "test": 8}
    assert {task.agent_name for task in tasks["train"]} == {None}
    assert [message["role"] for message in tasks["train"][0].prompt] == ["user"]
    assert len({task.task_id for found in tasks.values() for task in found}) == 32


@pytest.mark.seconds
def test_a_copy_that_cannot_be_used_is_named_in_one_line(tmp_path: Path) -> None:
    done = run("--from", str(tmp_path), "--out", str(tmp_path / "out"))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "must be a folder with one .jsonl or .parquet file whose name holds 'train'" in done.stderr
    (tmp_path / "train.jsonl").write_text(json.dumps(ROWS[0]) + "\n{broken\n")
    done = run("--from", str(tmp_path), "--out", str(tmp_path / "out"))
    assert "train.jsonl, row 1: must be JSON" in done.stderr and len(done.stderr.splitlines()) == 1
    with pytest.raises(TaskError, match=r"here, row 1: must have a question, and an answer that ends in `#### number`"):
        tasks_of_problems([ROWS[0], {"question": "?", "answer": "four"}], split="train", tools=False, source="here")


async def test_the_environment_gives_several_tries_and_takes_off_for_wrong_ones() -> None:
    (task, *_) = tasks_of_problems(ROWS, split="train", tools=False, source="here")
    env = WithDeadlines(make_adapter("gsm8k", {"tries": 3, "penalty": 0.25}), deadline_s=10.0)
    assert await env.reset(task.private(), seed=9) == task.prompt
    assert await env.step("#### 5") == Step(messages=[{"role": "user", "content": WRONG}], done=False, reward=0.0)
    assert await env.step("so #### 4") == Step(messages=[], done=True, reward=0.75)
    assert await env.score() == 0.75
    once = make_adapter("gsm8k", {})
    await once.reset(task.private(), seed=9)
    assert (await once.step("4")).done and await once.score() == 0.0
