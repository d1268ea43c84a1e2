"""The trainability report: what an agent's run gives, and what stands in its way. The agents are programs of their own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from buffers.records import Task
from mocked_server.check.__main__ import TASK, main
from mocked_server.check.report import (
    ANSWER,
    LINE,
    NARROWS,
    TrialObservations,
    example,
    features_of,
    make_report,
    message_for,
)
from mocked_server.check.trial import AgentTrial
from mocked_server.conversation.chat_history import EXPECTED, REMEDY, BranchCause
from tests.support.patience import PATIENCE_S

CLIENTS = Path(__file__).parents[1] / "outside" / "clients"
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SUMS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TWO_TOOLS = [{"type": "function", "function": {"name": name, "parameters": SUMS}} for name in ("add", "sub")]


def calls(message):
    return [call["function"] for call in message.get("tool_calls", ())]


def test_the_model_calls_the_tools_in_turn_and_then_answers():
    messages, said = [{"role": "user", "content": "Hi"}], []
    for _ in range(4):
        said.append(message_for(CHAT, {"messages": messages, "tools": TWO_TOOLS}))
        messages.append({"role": "assistant"})
        messages += [{"role": "tool"}] * max(1, len(calls(said[-1])))
    assert [[call["name"] for call in calls(message)] for message in said] == [["add"], ["sub", "add"], ["add"], []]
    assert calls(said[0])[0]["arguments"] == {"a": 1}
    assert said[3]["content"] == ANSWER


@pytest.mark.parametrize(
    ("path", "fields", "names"),
    [
        (CHAT, {"tools": TWO_TOOLS, "tool_choice": "none"}, []),
        (CHAT, {"tools": TWO_TOOLS, "tool_choice": {"type": "function", "function": {"name": "sub"}}}, ["sub"]),
        (RESPONSES, {"tools": [{"type": "function", "name": "add", "parameters": SUMS}], "input": "Hi"}, ["add"]),
        (RESPONSES, {"tools": [{"type": "web_search"}], "input": "Hi"}, []),
        (MESSAGES, {"tools": [{"name": "add", "input_schema": SUMS}], "tool_choice": {"type": "any"}}, ["add"]),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}] * 3}, []),
    ],
)
def test_every_dialect_has_its_own_tools_and_choices(path, fields, names):
    assert [call["name"] for call in calls(message_for(path, fields))] == names


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (SUMS, {"a": 1}),
        ({"type": "array", "items": {"type": "string"}, "minItems": 2}, ["example", "example"]),
        ({"enum": ["b", "c"]}, "b"),
        ({"type": ["null", "string"]}, None),
        ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, True),
        ({"type": "number", "minimum": 3}, 3),
        ({"$defs": {"x": {"const": 5}}, "properties": {"y": {"$ref": "#/$defs/x"}}}, {"y": 5}),
        ({}, "example"),
    ],
)
def test_an_example_follows_its_schema(schema, value):
    assert example(schema) == value


def test_an_example_of_a_type_that_contains_itself_ends():
    made = example({"$defs": {"x": {"properties": {"x": {"$ref": "#/$defs/x"}}}}, "$ref": "#/$defs/x"})
    assert set(made) == {"x"} and json.dumps(made).count("x") < 10


def test_a_structured_answer_follows_its_schema():
    wanted = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SUMS}}
    assert message_for(CHAT, {"response_format": wanted})["content"] == '{"a": 1}'
    assert (
        message_for(RESPONSES, {"text": {"format": {"type": "json_schema", "schema": SUMS}}})["content"] == '{"a": 1}'
    )


def test_features_are_named():
    assert features_of(CHAT, {"messages": []}) == []
    assert features_of(CHAT, {"stream": True, "tools": TWO_TOOLS, "temperature": 0.0, "n": 2, "presence_penalty": 0.5}) == [
        "stream", "tools", "several choices", "penalties", "temperature",
    ]  # fmt: skip
    for asked in ({"max_tokens": 32_000}, {"max_completion_tokens": 4096}, {"max_output_tokens": 2049}):
        assert features_of(CHAT, asked) == ["long answers"]
    assert features_of(CHAT, {"max_tokens": 2048, "max_output_tokens": "many"}) == []
    assert set(NARROWS) <= set(
        features_of(
            CHAT,
            {
                "tool_choice": "required", "parallel_tool_calls": False, "logit_bias": {"1": 1}, "frequency_penalty": 1.5,
                "response_format": {"type": "json_object"},
            },
        )
    )  # fmt: skip


def test_every_cause_has_advice():
    assert set(REMEDY) == set(BranchCause)


def test_no_advice_is_in_force_already_or_cannot_be_followed():
    """`tolerant` is the default, and a text completion that appends has the end of the earlier one in it never."""
    for cause in (BranchCause.TEMPLATE_STRIPS_THINKING, BranchCause.TEMPLATE_REWRITES_HISTORY, BranchCause.RETOKENIZED):
        assert "if it is tolerant, the template" in REMEDY[cause]
    assert (
        "chat completions" in REMEDY[BranchCause.PROMPT_DIFFERS] and "append" not in REMEDY[BranchCause.PROMPT_DIFFERS]
    )
    assert set(BranchCause) > EXPECTED


def run(served, program, tmp_path, timeout_s=PATIENCE_S, number=[0]):  # noqa: B006
    """Try an agent out: the scripted engine says the line that the rehearsal chose."""
    if "\n" in program:
        path = tmp_path / "agent.py"
        path.write_text(program)
    else:
        path = CLIENTS / program
    engine = served.engine
    engine.answer = lambda _: served.ids("<think>\n</think>\n\n" + engine.params[-1].extra_args[LINE])
    number[0] += 1
    task = Task(**{"task_id": f"check-{number[0]}", **TASK})
    rehearsal = AgentTrial(served.server, served.ledger)
    work = rehearsal.try_out([sys.executable, str(path)], task=task, timeout_s=timeout_s)
    try:
        return served.call(work)
    finally:
        served.server.model_requests.observer = None


@pytest.mark.parametrize(
    ("program", "path", "features"),
    [
        ("chat_tools.py", CHAT, {"tools": 4, "system prompt": 4}),
        ("responses_tools.py", RESPONSES, {"stream": 4, "tools": 4, "system prompt": 4}),
        ("anthropic_tools.py", MESSAGES, {"stream": 4, "tools": 4, "system prompt": 4}),
    ],
)
def test_an_agent_with_tools_gives_one_row(tools_server, tmp_path, program, path, features):
    report = run(tools_server, program, tmp_path)
    assert (report.exit_code, report.errors, report.branch_causes, report.trainable) == (0, [], [], True)
    assert (report.rounds, report.branches, report.rows) == (4, 1, 1)
    assert (report.dialects, report.features) == ({path: 4}, features)
    assert report.tokens == report.tokens_trained + report.tokens_masked
    assert "can be trained" in report.as_text() and json.loads(report.as_json())["rows"] == 1


def test_an_agent_gets_the_environment_that_it_gets_in_a_run(tools_server, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "the operator's")
    monkeypatch.setenv("MY_TOOL_URL", "http://127.0.0.1:1")
    program = tmp_path / "agent.py"
    program.write_text("import os, sys; sys.exit(3 * ('HF_TOKEN' in os.environ) + 5 * ('MY_TOOL_URL' in os.environ))")
    task = Task(task_id=f"environment-{tmp_path.name}", prompt=[{"role": "user", "content": "hi"}])
    rehearsal = AgentTrial(tools_server.server, tools_server.ledger)
    work = rehearsal.try_out([sys.executable, str(program)], task=task, timeout_s=PATIENCE_S, named=["MY_TOOL_URL"])
    try:
        assert tools_server.submit(work).result(PATIENCE_S).exit_code == 5
    finally:
        tools_server.server.model_requests.observer = None


def test_sub_agents_are_branches_and_no_faults(tools_server, tmp_path):
    report = run(tools_server, "chat_async_stream.py", tmp_path)
    assert (report.rounds, report.branches, report.rows) == (6, 3, 3)
    assert [(b.cause, b.expected) for b in report.branch_causes] == [("new_conversation", True)] * 2
    assert report.advice == []


EDITS = """
import os, openai
client = openai.OpenAI(max_retries=0)
messages = [{"role": "user", "content": "Hi"}]
for _ in range(3):
    reply = client.chat.completions.create(model=os.environ["MODEL"], messages=messages, temperature=0.2)
    messages.append({"role": "assistant", "content": reply.choices[0].message.content.upper()})
    messages.append({"role": "user", "content": "Go on."})
client.close()
"""


def test_an_agent_that_edits_its_history_is_told_so(tools_server, tmp_path):
    report = run(tools_server, EDITS, tmp_path)
    assert (report.rounds, report.rows) == (3, 3)
    assert [(b.round, b.cause) for b in report.branch_causes] == [(2, "content_edited"), (3, "content_edited")]
    assert "branch     round 2: content_edited, unexpected" in report.as_text()
    assert any(REMEDY[BranchCause.CONTENT_EDITED] in advice for advice in report.advice)
    assert any("temperature 1" in advice for advice in report.advice)


WRONG = """
import os, sys, openai
client = openai.OpenAI(max_retries=0)
try:
    client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": "Hi"}])
except openai.NotFoundError:
    client.close()
    sys.exit(3)
"""


def test_an_agent_with_a_model_of_its_own_cannot_be_trained(tools_server, tmp_path):
    report = run(tools_server, WRONG, tmp_path)
    assert (report.exit_code, report.trainable, report.rounds, report.tokens_trained) == (3, False, 0, 0)
    assert len(report.errors) == 1 and "gpt-4o" in report.errors[0] and "404" in report.errors[0]
    assert any("exit code 3" in advice for advice in report.advice)


def test_an_agent_that_never_asks_is_told_what_to_read(tools_server, tmp_path):
    report = run(
        tools_server,
        "import os, sys\nassert os.environ['SEED'] and os.environ['TASK_JSON'] == sys.stdin.read()\n",
        tmp_path,
    )
    assert (report.exit_code, report.trainable, report.dialects) == (0, False, {})
    assert any("OPENAI_BASE_URL" in advice for advice in report.advice)


def test_an_agent_that_hangs_is_stopped(tools_server, tmp_path):
    report = run(tools_server, "import signal\nsignal.pause()\n", tmp_path, timeout_s=1.0)
    assert report.exit_code == 124


def test_a_command_that_is_not_there_is_an_error(capsys):
    assert main(["--", "no-such-program"]) == 2
    assert "no-such-program" in capsys.readouterr().err


def test_a_model_that_cannot_answer_is_an_error(tiny_model, tmp_path, capsys):
    bare = tmp_path / "bare"
    shutil.copytree(tiny_model, bare)
    (bare / "model.safetensors").unlink()
    for folder in (bare, tmp_path / "none", tiny_model / "model.safetensors"):
        assert main(["--model", str(folder), "--", sys.executable]) == 2
        assert f"must be the folder of a Hugging Face model with a chat template and plain weights, got {folder}" in (
            capsys.readouterr().err
        )


def test_narrowed_sampling_is_said():
    seen = TrialObservations(
        command=["x"],
        exit_code=0,
        seconds=1.0,
        dialects=Counter({CHAT: 1}),
        features=Counter({"penalties": 1, "long answers": 1}),
        errors=[],
    )
    report = make_report(seen, stored=[], rows=[], causes=[], temperature=1.0)
    assert any("penalties" in advice for advice in report.advice)
    assert any("at most rollout.max_tokens" in advice for advice in report.advice)


@pytest.mark.engine
def test_the_command_line_with_the_real_engine():
    words = [
        sys.executable,
        "-m",
        "mocked_server.check",
        "--json",
        "--",
        sys.executable,
        str(CLIENTS / "chat_tools.py"),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert (report["rounds"], report["rows"], report["branch_causes"], report["errors"]) == (4, 1, [], [])
    assert report["tokens_trained"] > 50
    assert 0 < report["max_logprob_diff"] < 1e-4
