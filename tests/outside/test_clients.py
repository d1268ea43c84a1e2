"""Real clients, each an ordinary program in its own process, against the real engine: each gives exact training data.

Some are programs with the OpenAI and Anthropic clients, some are agents that others wrote, in environments of their own.
The model says what `mocked_server.check.trial` makes it say (tool calls, then an answer), so every agent plays several
rounds; the log-probabilities are the model's own and are computed again for every trained row.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from buffers.records import Task
from buffers.tasks.logs import UNSHOWN_TOOLS
from buffers.tasks.parquet import Trace, read_demonstrations
from configs.schema import RolloutConfig, ServerConfig
from learner import cli
from mocked_server.check import vllm_scripted_engine
from mocked_server.check.__main__ import TASK
from mocked_server.check.trial import trial_server
from mocked_server.vllm import exact_rendering
from mocked_server.vllm.demonstrations import make_renderer
from mocked_server.vllm.engine_arguments import EngineSettings, make_args, make_vllm_config
from tests.outside.agent_environments import npm_packages, npm_program, python_with

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
CLIENTS = Path(__file__).parent / "clients"
MAX_DRIFT = 1e-4
FRAMEWORKS = ("openai-agents==0.24.0", "langgraph==1.2.22", "langchain-openai==1.7.3", "smolagents[openai]==1.26.0")
"""They agree on what they need, and one environment is made sooner than three."""
AI_SDK = ("ai@6.0.326", "@ai-sdk/openai@3.0.141", "@ai-sdk/google@3.0.141")


@pytest.fixture(scope="module", params=["tiny", pytest.param("smollm2", marks=pytest.mark.long)])
def rehearsal(request: pytest.FixtureRequest) -> Iterator[Any]:
    """(`wait(work)`, the trial): a server that is ready to try agents out, in a loop of its own; its model is a tiny one of
    ours, or a real one, whose template shows no tools."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="rehearsal", daemon=True)
    thread.start()

    def wait(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    context = trial_server(request.getfixturevalue("smollm2") if request.param == "smollm2" else None)
    yield wait, wait(context.__aenter__())
    wait(context.__aexit__(None, None, None))
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(scope="module")
def try_out(rehearsal: Any) -> Any:
    """`try_out(command, **environment)` -> the report of an agent's one episode."""
    wait, trial = rehearsal
    number = iter(range(1000))

    def try_out(command: list[str], **environment: str) -> Any:
        words = ["env", *(f"{name}={value}" for name, value in environment.items()), *command]
        return wait(trial.try_out(words, task=Task(**{"task_id": f"t{next(number)}", **TASK}), timeout_s=400.0))

    return try_out


def assert_exact(report: Any, *, rounds: int) -> None:
    """Several rounds, every answer continued, every sampled token trained with the learner's own log-probability. Calls that the
    agent forces are not trained: Qwen Code asks for such judgements of what it is about to do, each a branch of its own."""
    assert (report.exit_code, report.errors) == (0, []), report.as_text()
    assert report.rounds >= rounds, report.as_text()
    assert [b for b in report.branch_causes if not b.expected] == [], report.as_text()
    forced = report.features.get("forced tools", 0)
    assert report.branches - forced <= report.rows <= report.branches, report.as_text()
    assert report.rows < report.rounds, report.as_text()
    assert report.tokens_trained > 0 and 0 < report.max_logprob_diff < MAX_DRIFT, report.as_text()


@pytest.mark.parametrize(
    "program", ["chat_tools.py", "chat_async_stream.py", "responses_tools.py", "anthropic_tools.py"]
)
def test_a_program_is_trained_exactly(try_out, program):
    report = try_out([sys.executable, str(CLIENTS / program)])
    assert_exact(report, rounds=4)
    assert report.branches == (3 if program == "chat_async_stream.py" else 1)


@pytest.mark.long
def test_an_agent_is_tried_out_on_a_model_whose_template_knows_no_tools_by_the_command_line(smollm2):
    words = ["check", "--model", str(smollm2), "--json", "--", sys.executable, str(CLIENTS / "chat_tools.py")]
    done = subprocess.run([sys.executable, "-m", "learner.cli", *words], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["rounds"], report["rows"], report["branch_causes"], report["errors"]) == (4, 1, [], [])
    assert 0 < report["max_logprob_diff"] < MAX_DRIFT
    assert exact_rendering.NO_TOOLS in report["advice"]


@pytest.mark.parametrize(
    ("program", "environment"),
    [
        ("frameworks/agents_sdk.py", {"API": "responses"}),
        ("frameworks/agents_sdk.py", {"API": "chat_completions"}),
        ("frameworks/langgraph_agent.py", {}),
        ("frameworks/langgraph_agent.py", {"STREAM": "1"}),
    ],
    ids=["agents-sdk-responses", "agents-sdk-chat", "langgraph", "langgraph-stream"],
)
def test_a_framework_s_agent_is_trained_exactly(try_out, program, environment):
    python = python_with("frameworks", *FRAMEWORKS)
    assert_exact(try_out([str(python), str(CLIENTS / program)], **environment), rounds=4)


def test_an_agent_that_rewrites_its_answers_and_forces_calls_is_trained_exactly_where_it_leaves_the_choice(try_out):
    """smolagents sends tool calls back as text of its own: what the model said is not in its next prompt. It forces most of them
    (`tool_choice: required`), and what is forced is not trained."""
    python = python_with("frameworks", *FRAMEWORKS)
    report = try_out([str(python), str(CLIENTS / "frameworks/smolagents_agent.py")])
    assert (report.exit_code, report.errors) == (0, [])
    assert {b.cause for b in report.branch_causes if not b.expected} == {"content_edited"}
    assert report.features["forced tools"] > 0 and 1 <= report.rows < report.rounds
    assert report.tokens_trained > 0 and 0 < report.max_logprob_diff < MAX_DRIFT


@pytest.mark.outside
@pytest.mark.parametrize(
    ("script", "package", "program"),
    [
        ("codex.sh", "@openai/codex@0.169.0", "codex"),
        ("claude.sh", "@anthropic-ai/claude-code@2.1.197", "claude"),
        ("opencode.sh", "opencode-ai@1.18.33", "opencode"),
        ("gemini.sh", "@google/gemini-cli@0.61.0", "gemini"),
        ("qwen.sh", "@qwen-code/qwen-code@0.24.4", "qwen"),
    ],
)
def test_a_coding_agent_is_trained_exactly(try_out, script, package, program):
    path = npm_program(package, program)
    assert_exact(try_out(["sh", str(CLIENTS / script), str(path)]), rounds=3)


@pytest.mark.outside
@pytest.mark.parametrize(
    ("program", "requirements", "environment"),
    [
        ("google_genai.py", ["google-genai==3.4.0"], {}),
        ("google_genai.py", ["google-genai==3.4.0"], {"STREAM": "1"}),
        ("frameworks/pydantic_agent.py", ["pydantic-ai-slim[openai,google]==2.68.0"], {}),
        ("frameworks/pydantic_agent.py", ["pydantic-ai-slim[openai,google]==2.68.0"], {"API": "google"}),
        ("frameworks/strands_agent.py", ["strands-agents[openai]==1.62.0"], {}),
        ("frameworks/agno_agent.py", ["agno==3.1.10", "openai==3.54.0"], {}),
        ("frameworks/autogen_agent.py", ["autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5"], {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value.values()) if isinstance(value, dict) else "",
)
def test_an_agent_of_another_framework_is_trained_exactly(try_out, program, requirements, environment):
    python = python_with(Path(program).stem.removesuffix("_agent"), *requirements)
    assert_exact(try_out([str(python), str(CLIENTS / program)], **environment), rounds=4)


@pytest.mark.outside
@pytest.mark.parametrize("api", ["chat", "google"])
def test_an_agent_of_the_ai_sdk_is_trained_exactly(try_out, api):
    modules = npm_packages("ai-sdk", *AI_SDK)
    report = try_out(["node", str(CLIENTS / "ai_sdk.mjs")], API=api, MODULES=str(modules))
    assert_exact(report, rounds=4)


SESSIONS = {
    "claude.sh": (
        "@anthropic-ai/claude-code@2.1.197",
        "claude",
        ".claude/projects",
        "claude-code-transcript (atif-make)",
    ),
    "codex.sh": ("@openai/codex@0.169.0", "codex", ".codex/sessions", "codex-rollout (atif-make)"),
    "opencode.sh": ("opencode-ai@1.18.33", "opencode", ".local/share/opencode", "opencode"),
}


@pytest.mark.outside
@pytest.mark.parametrize("script", SESSIONS)
@pytest.mark.parametrize("rehearsal", ["tiny"], indirect=True)
def test_what_is_trained_of_an_imported_session_are_the_ids_that_the_ledger_recorded(
    rehearsal, try_out, tmp_path, monkeypatch, capsys, script
):
    """What the agent wrote into its own folder, imported and shown by the served model's template. The model spells as its
    tokenizer does: no log has a spelling. No log has the system prompt and the tools either, which import says."""
    package, program, folder, kind = SESSIONS[script]
    if (newer := next(filter(None, map(shutil.which, ("python3.14", "python3.13", "python3.12"))), None)) is None:
        pytest.skip("atif-make needs Python 3.12")
    python = python_with("atif-make", "atif-make==0.10.0", base=newer)
    monkeypatch.setenv("PATH", f"{python.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(
        vllm_scripted_engine,
        "spelled",
        lambda line, *, tokenizer, seed: tokenizer.encode(line, add_special_tokens=False),
    )
    _, trial = rehearsal
    monkeypatch.setattr(trial, "_diff_of", None)
    rounds = []
    stored = trial._ledger.rounds
    monkeypatch.setattr(
        trial, "_ledger", SimpleNamespace(rounds=lambda episode: rounds.append(stored(episode)) or rounds[-1])
    )
    keeps = f'sh "$0" "$1"; code=$?; cp -r {folder.split("/")[0]} {tmp_path}; exit $code'
    report = try_out(["sh", "-c", keeps, str(CLIENTS / script), str(npm_program(package, program))])
    assert (report.exit_code, report.errors) == (0, [])
    capsys.readouterr()
    out, model = tmp_path / "out.parquet", trial._server._client.renderer.get_tokenizer().name_or_path
    assert cli.main(["import", str(tmp_path / folder), "--out", str(out), "--model", model]) == 0
    told = capsys.readouterr().out.splitlines()
    traces = list(read_demonstrations(out))
    assert told[0] == f"files      {kind} (1)"
    assert told[2].startswith(f"noticed    {len(traces)}: {UNSHOWN_TOOLS}; the first in {tmp_path}")
    assert told[3].startswith(f"trainable  {len(traces)} of {len(traces)} sessions, {len(traces)} rows"), "nothing else"
    sampled = Counter(tuple(round_.sampled_ids.tolist()) for round_ in rounds[0].result())
    trained = Counter(answer for trace in traces for answer in answers_trained(trace, model=model))
    assert trained.total() >= 4 and trained <= sampled
    assert (sampled - trained).total() == (script == "opencode.sh"), "the title of a session is no answer in it"


def answers_trained(trace: Trace, *, model: str) -> list[tuple[int, ...]]:
    """The ids that SFT trains of each answer."""
    settings = EngineSettings(
        model_path=Path(model), served_name="policy", dtype="float32", server=ServerConfig(), rollout=RolloutConfig()
    )
    vllm_config = make_vllm_config(make_args(settings))
    (rows,) = make_renderer(vllm_config, strict=False, last_only=False, longest=sys.maxsize).rows([trace])
    return [tuple(row.ids[row.rounds == at].tolist()) for row in rows for at in np.unique(row.rounds[row.rounds >= 0])]
