"""Rules of `understudy import`: what it writes is what its readers take, what it says is so, and no answer of another model becomes
a row of the policy gradient."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from buffers.errors import TaskError
from buffers.ledger.ledger import Ledger
from buffers.tasks.parquet import read_demonstrations, read_tasks
from configs.tiny_model import make_tiny_model
from learner import cli
from learner.import_logs import main
from tests.buffers.ledger.test_export import Player

CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
SESSION: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "", "reasoning_content": "I add.", "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "c"},
        {"role": "assistant", "content": "2", "reasoning_content": "So it is."},
        {"role": "user", "content": "Thanks."},
        {"role": "assistant", "content": "Bye."},
    ],
    "tools": TOOLS,
    "score": 0.5,
}


def none(folder: Path) -> Any:
    raise AssertionError(f"nobody asked what {folder} shows")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "logs.jsonl"
    path.write_text(
        "".join(json.dumps(each) + "\n" for each in (SESSION, {**SESSION, "score": 0.75}, {"messages": []}))
    )
    return path


def test_demonstrations_are_what_the_learner_reads(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "demonstrations.parquet"
    assert cli.main(["import", str(source), "--out", str(out)]) == 0
    first, second = read_demonstrations(out)
    assert first.messages == SESSION["messages"] == second.messages and first.tools == TOOLS
    assert pq.read_table(out).column("score").to_pylist() == [0.5, 0.75]
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "files      chat messages (1)"
    assert said[1] == "sessions   2 with 6 answers, of a model that is not named (2)"
    assert said[2] == f"noticed    1: no answer; the first in {source}, line 3"
    assert said[-1] == f"wrote      2 demonstrations to {out}"


def test_tasks_are_what_was_asked_before_the_first_answer_each_once(source: Path, tmp_path: Path) -> None:
    assert (
        main([str(source), "--out", str(tmp_path / "tasks.parquet"), "--as", "tasks"], renderer_of=none, remedies={})
        == 0
    )
    (task,) = read_tasks(tmp_path / "tasks.parquet")
    assert task.prompt == SESSION["messages"][:2] and task.extra_info["tools"] == TOOLS and task.ground_truth is None


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--out", "runs/a/ledger.sqlite"], "--out must be a file .parquet, got runs/a/ledger.sqlite"),
        (["--out", "a.parquet", "--as", "episodes"], "--as must be demonstrations or tasks, got 'episodes'"),
    ],
)
def test_an_answer_of_another_model_never_enters_a_policy_gradient(
    source: Path, tmp_path: Path, words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(source), *words], renderer_of=none, remedies={}) == 2
    told = capsys.readouterr().err
    assert named in told and "never enter a policy gradient" in told and told.count("\n") == 1
    out = tmp_path / "demonstrations.parquet"
    assert main([str(source), "--out", str(out)], renderer_of=none, remedies={}) == 0
    with pytest.raises(TaskError, match="never enter a policy gradient"):
        next(read_tasks(out))


@pytest.mark.parametrize("kind", ["nothing", "empty"])
def test_nothing_is_written_where_nothing_was_found(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "logs"
    if kind == "empty":
        source.mkdir()
    out = tmp_path / "out.parquet"
    assert main([str(source), "--out", str(out)], renderer_of=none, remedies={}) == 2
    assert re.search(r"at least one row|not there", capsys.readouterr().err) and [*tmp_path.glob("*out*")] == []


@pytest.mark.seconds
def test_it_says_what_a_template_shows_and_where_play_could_not_go_on(
    source: Path, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strips = make_tiny_model(tmp_path / "strips", strip_thinking=True)
    given = [str(source), "--out", str(tmp_path / "out.parquet"), "--model"]
    assert cli.main(["import", *given, str(tiny_model)]) == 0
    said = capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    whole = tokenizer.apply_chat_template(SESSION["messages"], tokenize=False)
    answers = re.findall(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", whole, flags=re.DOTALL)
    number = sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in answers)
    assert f"trainable  2 of 2 sessions, 2 rows, {2 * number:,} tokens" in said and "template " not in said
    assert cli.main(["import", *given, str(strips)]) == 0
    assert "trainable  2 of 2 sessions" in capsys.readouterr().out, "play continues what was sampled, thoughts and all"
    broken = make_tiny_model(tmp_path / "broken")
    (broken / "chat_template.jinja").write_text(
        "{%- for m in messages -%}{{- m.role ~ ': ' ~ m.content -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- 'assistant: ' -}}{%- endif -%}"
    )
    assert cli.main(["import", *given, str(broken)]) == 0
    said = capsys.readouterr().out
    assert "trainable  0 of 2 sessions" in said and "refused    2: the chat template does not show its tools" in said
    assert cli.main(["import", *given, str(tmp_path)]) == 2
    assert "--model must be the folder of a model with a chat template" in capsys.readouterr().err


@pytest.mark.seconds
def test_a_run_s_folder_is_a_source(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(f"model: {{path: {tiny_model}}}\n")
    (run / "metrics.jsonl").write_text("{}\n")
    with Ledger(run / "ledger.sqlite") as ledger:
        Player(ledger, AutoTokenizer.from_pretrained(tiny_model)).play(0, scores=[1.0, 0.5])
    assert cli.main(["import", str(run), "--out", str(tmp_path / "out.parquet"), "--model", str(tiny_model)]) == 0
    said = capsys.readouterr().out
    assert "files      ledger (1)" in said and "sessions   2 with 4 answers" in said and "trainable  2 of 2" in said
    assert len(list(read_demonstrations(tmp_path / "out.parquet"))) == 2
