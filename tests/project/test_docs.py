"""The documents describe what is there: files, commands, keys, routes, metrics and programs that they name exist and work."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from agents.agent_loop import AgentLoopOutput
from agents.workers.manager import figures_of
from agents.workers.worker import LoopResult
from configs.keys import all_keys, all_sections, markdown, nearest_key
from configs.load import load_config
from configs.schema import Config
from learner.cli import COMMANDS
from learner.pipeline import SFT_FIGURES
from learner.reporting.run_metrics import History
from mocked_server.fleet.engine_watch import EngineRates, metrics_of
from scripts.made_pages import MADE, written
from tests.mocked_server.fleet.scripted_figures import figures

ROOT = Path(__file__).parents[2]
ROOT_DOCS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]
DOCS = ROOT_DOCS + sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
README_LINES = 180
FOLDERS = ["agents", "benchmarks", "buffers", "configs", "env_adapters", "learner", "mocked_server", "scripts"]
OTHER_DOTTED = {"data.log", "env.log", "server.key", "rollout.n"}
"""Not configuration keys, whatever they look like; nor are our modules, such as `learner.run`. `rollout.n` is verl's."""
METRIC_GROUPS = (
    "agent_loop|batch|critic|engine|generation|learner|ledger|policy|pool|publish|replay|reward|staleness|throughput|time|tracker|"
    "val|sft|judge|sampler|live|upstream"
)
METRIC_SOURCES = [
    "learner/**/*.py", "buffers/tasks/task_pool.py", "agents/workers/manager.py", "mocked_server/fleet/engine_watch.py",
    "buffers/tasks/curriculum.py", "mocked_server/live_sessions.py", "mocked_server/watching.py", "env_adapters/scoring/judge.py",
]  # fmt: skip
COMPOSED = {f"sft/{name}" for name in SFT_FIGURES} | {f"pool/{reason}" for reason in ("scored", "failed", "closed")}
"""Metrics whose names the code puts together from parts."""
BOOKS = ("scored", "open", "ready", "leased", "trained", "evicted", "dead", "validation", "difference")
COMPOSED |= {f"ledger/{name}" for name in BOOKS}
COMPOSED |= {f"live/judge_{name}" for name in ("judged", "silent", "failed", "left_out")}
REFUSED_FOR = ("score", "entropy", "drift", "likeness", "sessions", "unplayed")
COMPOSED |= {f"live/gate_{name}" for name in ("difference", "drift", "likeness")}
COMPOSED |= {f"live/gate_refused_for_{kind}" for kind in REFUSED_FOR}
UPSTREAM_COUNTS = ("requests", "down", "slow", "refused", "taken_over", "unreadable", "left_out")
COMPOSED |= {f"upstream/{name}" for name in UPSTREAM_COUNTS}


@cache
def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@cache
def words(name: str) -> list[str]:
    """What stands between backticks, in a line."""
    return re.findall(r"`([^`\n]+)`", text(name))


def generated(*command: str) -> str:
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_code_map_is_what_the_docstrings_say():
    assert text("docs/code-map.md") == generated("scripts/code_map.py"), "write it: make docs"


@pytest.mark.parametrize("name", MADE)
def test_what_is_made_is_what_code_and_reports_say(name: str) -> None:
    assert text(MADE[name][1]) == written(name), "write it: make docs"


def test_the_readme_is_one_page():
    assert len(text("README.md").splitlines()) <= README_LINES


def test_every_page_is_in_the_index():
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", text("docs/README.md")))
    assert linked == {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}


@pytest.mark.parametrize("name", DOCS)
def test_files_that_a_document_names_exist(name):
    links = [target for target in re.findall(r"\]\(([^)#]+)\)", text(name)) if "://" not in target]
    assert [link for link in links if not (ROOT / name).parent.joinpath(link).exists()] == []
    pattern = rf"({'|'.join([*FOLDERS, 'docs', 'tests'])})/([\w./*-]*(\.\w+|/))?"  # not `learner/lr`, a metric
    paths = [word for word in words(name) if re.fullmatch(pattern, word)]
    assert [path for path in paths if not any(ROOT.glob(path.rstrip("/")))] == []


@pytest.mark.parametrize("name", DOCS)
def test_make_targets_that_a_document_names_exist(name):
    named = set(re.findall(r"(?:`|^ {4})make ([a-z]+)", text(name), flags=re.M))
    there = set(re.findall(r"^([a-z]+):", text("Makefile"), flags=re.M))
    assert sorted(named - there) == []


def test_make_would_run_what_the_readme_promises():
    """`make -n` prints the commands; .venv need not be there. Not as a part of a `make` with settings of its own."""
    promised = {
        "demo": "-m learner.run",
        "test": "-m pytest -q -n 4 --dist loadfile --no-loadscope-reorder  tests",
        "check": "-m mypy",
    }
    settings = ("MAKEFLAGS", "MAKEOVERRIDES", "WORKERS", "PYTEST_ARGS")
    own = {name: value for name, value in os.environ.items() if name not in settings}
    for target, command in promised.items():
        done = subprocess.run(["make", "-n", target], cwd=ROOT, env=own, capture_output=True, text=True, check=True)
        assert any(line.endswith(command) for line in done.stdout.splitlines()), done.stdout


def test_the_readme_names_the_two_commands():
    assert re.findall(r"^ {4}make (\w+)", text("README.md"), flags=re.M)[:2] == ["demo", "test"]


@pytest.mark.parametrize("name", DOCS)
def test_modules_that_a_document_runs_exist(name):
    modules = {
        module for module in re.findall(r"python -m ([a-z_][\w.]*\w)", text(name)) if module.split(".")[0] in FOLDERS
    } - {"benchmarks.NAME"}
    files = {module: ROOT / module.replace(".", "/") for module in modules}
    runs = {
        module
        for module, file in files.items()
        if file.with_suffix(".py").is_file() or (file / "__main__.py").is_file()
    }
    assert sorted(modules - runs) == []


def is_of_a_module(name: str) -> bool:
    """A dotted name of our code: a module, a folder, or something in one."""
    parts = name.split(".")
    paths = [ROOT.joinpath(*parts[:depth]) for depth in range(2, len(parts) + 1)]
    return any(path.is_dir() or path.with_suffix(".py").is_file() for path in paths)


@pytest.mark.parametrize("name", DOCS)
def test_configuration_keys_that_a_document_names_exist(name):
    known = {*all_keys(), *all_sections()}
    for word in words(name):
        found = re.fullmatch(rf"((?:{'|'.join(Config.model_fields)})(?:\.\w+)+)(=\S*|: \S+| > \d+)?", word)
        if found is None or word in OTHER_DOTTED or word.endswith(".py") or is_of_a_module(found[1]):
            continue
        assert found[1] in known, f"{name} names `{word}`, which is no key; {nearest_key(found[1])}"


def test_the_page_of_keys_is_what_the_schema_says():
    assert text("docs/configuration.md") == markdown(), "write it: python -m configs.keys --markdown"


@pytest.mark.parametrize("name", DOCS)
def test_understudys_commands_that_a_document_names_exist(name):
    named = set(re.findall(r"(?:`|^ {4})understudy ([a-z]+)", text(name), flags=re.M))
    assert sorted(named - set(COMMANDS)) == []


def test_routes_that_the_documents_name_are_served():
    served = text("mocked_server/http/routes.py") + "".join(
        path.read_text() for path in (ROOT / "mocked_server").rglob("*.py")
    )
    for name in DOCS:
        for method, path in re.findall(r"`(GET|POST) (/[a-z/]+)`", text(name)):
            assert f'app.{method.lower()}("{path}"' in served or f' = "{path}"\n' in served, f"{name}: {method} {path}"
        for path in re.findall(r"`(/v1/[a-z/]+)`", text(name)):
            assert f'"{path}"' in served, f"{name} names {path}"


def metrics_in_the_code() -> set[str]:
    literal = re.compile(rf"({METRIC_GROUPS})/[a-z][a-z0-9_]*[a-z0-9]")
    names = {
        node.value
        for pattern in METRIC_SOURCES
        for path in ROOT.glob(pattern)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and literal.fullmatch(node.value)
    }
    return names | COMPOSED


def test_every_metric_is_explained_and_every_explained_metric_exists():
    explained = {
        word
        for line in text("docs/metrics.md").splitlines()
        if line.startswith("| `")
        for word in re.findall(rf"`((?:{METRIC_GROUPS})/\w+)`", line.split("|")[1])
    }
    assert len(explained) > 40
    assert sorted(metrics_in_the_code() - explained) == [], "written, and not explained"
    assert sorted(explained - metrics_in_the_code()) == [], "explained, and not written"


def test_every_figure_of_agent_loops_is_explained():
    explained = re.findall(r"`agent_loop/(\w+)/(?:mean|total)`", text("docs/metrics.md"))
    output = AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1])
    written = set(figures_of(LoopResult(outputs=(output,)), score_s=0.0))
    assert written == set(explained) - {"slowest"}


def test_every_figure_of_an_engine_is_explained():
    explained = re.findall(r"`engine/e0/(\w+)`", text("docs/metrics.md"))
    engine = EngineRates(now=figures("e0"), tokens_per_s=0.0, cached_share=0.0)
    written = {name.removeprefix("engine/e0/") for name in metrics_of([engine])} - {"engine/up"}
    assert written == set(explained)


def test_every_figure_of_the_summary_is_explained():
    (section,) = re.findall(r"^## summary.json\n(.*)", text("docs/metrics.md"), flags=re.M | re.S)
    explained = {
        word
        for line in section.splitlines()
        if line.startswith("| `")
        for word in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    history = History(load_config())
    history.finish({}, {})
    written = {*history.summary(), "stopped", "error"}
    assert sorted(written - explained) == [], "written, and not explained"
    assert sorted(explained - written) == [], "explained, and not written"


def test_the_help_text_names_files_that_exist():
    done = subprocess.run([sys.executable, "-m", "learner.run", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    paths = re.findall(rf"\b(?:{'|'.join(FOLDERS)})/[\w./-]+", done.stdout)
    assert "configs/schema.py" in paths
    assert [path for path in paths if not (ROOT / path).is_file()] == []
