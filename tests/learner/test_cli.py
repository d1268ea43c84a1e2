"""Rules of the `understudy` command: it answers at once, works in any folder when installed, and names what is in its way."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from buffers.ledger.ledger import Ledger
from configs.load import ConfigError, load_config
from env_adapters import smollm2
from learner import cli
from learner.checkpoints.store import CheckpointError
from learner.cli import CONFIG, FILES
from learner.startup.run_folder import find_resume
from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
PACKAGED = ("pyproject.toml", "README.md", "LICENSE", *cli.PACKAGES)


def understudy(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "learner.cli", *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_help_names_every_command(tmp_path):
    done = understudy("--help", cwd=tmp_path)
    assert done.returncode == 0 and re.findall(r"^  (\w+) ", done.stdout, flags=re.M) == list(cli.COMMANDS)


@pytest.mark.seconds
@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_each_command_has_a_help_of_its_own(tmp_path, command):
    done = understudy(command, "--help", cwd=tmp_path)
    name = "run" if command == "demo" else command
    assert done.returncode == 0 and done.stdout.startswith(f"usage: understudy {name} "), done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("made", "code", "began"), [(0, 0, [["--config", "smollm2", "run.steps=2"]]), (2, 2, [])])
def test_the_demo_of_a_real_model_makes_it_first(monkeypatch, made, code, began):
    seen = []
    monkeypatch.setattr(smollm2, "main", lambda words: made)
    monkeypatch.setattr(cli, "_conflicts", lambda: False)
    monkeypatch.setattr(cli, "_run", lambda words, program: seen.append(words) or 0)
    assert cli.demo(["--real", "run.steps=2"]) == code and seen == began


@pytest.mark.seconds
@pytest.mark.parametrize("program", ["learner.cli keys", "learner.cli ledger inspect", "buffers.ledger doctor"])
def test_a_reader_that_leaves_ends_a_command_without_a_word(tmp_path, program):
    """As in `understudy keys | true`: the pipe has no reader when the command prints."""
    Ledger(tmp_path / "ledger.sqlite").close()
    words = [*program.split(), *([str(tmp_path)] if "ledger" in program else [])]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=writer,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(writer)
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr
    assert done.returncode == 141


def test_an_unknown_command_is_told_the_known_ones(tmp_path):
    done = understudy("trian", cwd=tmp_path)
    assert (
        done.returncode == 2
        and "demo, init, run, serve, feedback, resume, check, import, ledger, eval, compare, why, page, keys, got 'trian'"
        in done.stderr
    )


def test_init_writes_a_project_and_overwrites_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*FILES, ".gitignore"])
    assert {"build/", "runs/"} <= set((tmp_path / ".gitignore").read_text().splitlines())
    assert "train it:  understudy run --config config.yaml" in capsys.readouterr().out
    config = load_config(tmp_path / "config.yaml")
    assert (config.agents.processes, config.data.scorer) == (0, "contains")
    (tmp_path / "agent.py").write_text("mine")
    assert cli.main(["init"]) == 2
    assert "must not have agent.py yet; name another folder" in capsys.readouterr().err
    assert (tmp_path / "agent.py").read_text() == "mine" and (tmp_path / "config.yaml").read_text() == CONFIG


def test_init_leaves_a_gitignore_that_is_there_as_it_is(tmp_path):
    (tmp_path / ".gitignore").write_text("*.log\n")
    assert cli.main(["init", str(tmp_path)]) == 0
    assert (tmp_path / ".gitignore").read_text() == "*.log\n" and (tmp_path / "config.yaml").is_file()


def test_a_shipped_configuration_is_found_by_name_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("walk_env", "walk_env.yaml", "configs/walk_env.yaml"):
        assert Path(load_config(Path(name)).agents.loops).is_file()
    assert Path(load_config().agents.command[1]).is_file()
    (tmp_path / "walk_env.yaml").write_text("run: {name: own}")
    assert load_config(Path("walk_env.yaml")).run.name == "own"
    with pytest.raises(ConfigError, match=r"--config must name .*not a file"):
        load_config(Path("elsewhere/walk_env.yaml"))


def test_a_shipped_configuration_is_extended_by_name_from_any_folder(tmp_path):
    for base in ("smollm2", "smollm2.yaml"):
        (tmp_path / "smollm2.yml").write_text(f"extends: {base}\nrun: {{steps: 3}}")
        config = load_config(tmp_path / "smollm2.yml")
        assert (config.run.name, config.run.steps, config.buffer.max_policy_lag) == ("smollm2", 3, 0)
    (tmp_path / "smollm2.yaml").write_text("run: {name: own}")  # a file beside it comes first
    assert load_config(tmp_path / "smollm2.yml").run.name == "own"
    (tmp_path / "smollm2.yml").write_text("extends: smollm")
    with pytest.raises(
        ConfigError, match=r"extends in .*smollm2.yml must name .*not a file.*shipped in configs/: .*smollm2"
    ):
        load_config(tmp_path / "smollm2.yml")


def test_resume_takes_the_newest_run_and_says_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["resume"]) == 2
    assert "there must be a run in runs/, got none" in capsys.readouterr().err
    for age, name in enumerate(["old", "new"]):
        (tmp_path / "runs" / name / "checkpoints" / "step-1").mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").write_text("")
        os.utime(tmp_path / "runs" / name / "config.yaml", (age, age))
    asked: list[list[str]] = []
    monkeypatch.setattr(cli, "_run", lambda words, *, program: asked.append(words) or 0)
    cli.main(["resume", "run.steps=9"])
    cli.main(["resume", "runs/old/checkpoints/step-1", "--keep-running"])
    assert asked == [
        ["--config", "runs/new/config.yaml", "--resume", "auto", "run.steps=9"],
        ["--config", "runs/old/config.yaml", "--resume", "runs/old/checkpoints/step-1", "--keep-running"],
    ]
    (tmp_path / "config.yaml").write_text("a project's, two folders above runs/NAME")
    for folder, told in (
        ("runs", "got runs without"),
        ("runs/nope", "got runs/nope, which is no folder; name runs/NAME"),
    ):
        assert cli.main(["resume", folder]) == 2
        assert told in capsys.readouterr().err
    assert len(asked) == 2


@pytest.mark.parametrize("ended", [True, False])
def test_an_evaluation_is_never_resumed(tmp_path, monkeypatch, capsys, ended):
    """As `understudy eval` leaves its folder, which is the newest then: finished, or killed as it began."""
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(["first", "first-eval"]):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(f"run: {{name: {name}}}")
        os.utime(folder / "config.yaml", (age, age))
    if ended:
        Ledger(folder / "ledger.sqlite").close()
    (folder / "evaluation.json").write_text("{}")
    asked: list[list[str]] = []
    monkeypatch.setattr(cli, "_run", lambda words, *, program: asked.append(words) or 0)
    cli.main(["resume"])
    assert asked == [["--config", "runs/first/config.yaml", "--resume", "auto"]]
    for resume in ("auto", str(folder / "checkpoints" / "step-1")):  # named, and by `run --resume`
        with pytest.raises(CheckpointError, match="first-eval, which is an evaluation; name the run"):
            find_resume(folder, resume=resume)
    assert find_resume(folder, resume="") == (False, None), "evaluated again"


def test_another_package_of_our_name_is_named_with_a_remedy(tmp_path):
    assert cli.conflict(ROOT) == cli.conflict(tmp_path) == ""
    (tmp_path / "agents").mkdir()
    assert cli.conflict(tmp_path) == "", "a folder without __init__.py is in nobody's way"
    (tmp_path / "agents" / "__init__.py").touch()
    done = understudy("run", "run.steps=1", cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "the package `agents` must be understudy's" in done.stderr and "rename it" in done.stderr


@pytest.fixture(scope="session")
def installed(tmp_path_factory) -> Path:
    """An environment with the wheel, which sees this environment's packages; nothing is downloaded."""
    place = tmp_path_factory.mktemp("installed")
    source, venv = place / "source", place / "venv"
    source.mkdir()
    for name in PACKAGED:
        path = ROOT / name
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(path, source / name, ignore=ignored) if path.is_dir() else shutil.copy(path, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", ".", "--no-deps", "--no-index", "--no-build-isolation", "-w", place], cwd=source, check=True
    )
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (wheel,) = place.glob("understudy-*.whl")
    python = venv / "bin" / "python"
    subprocess.run([*pip, "--python", python, "install", "--no-deps", "--no-index", wheel], check=True)
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    folder = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout.strip()
    (Path(folder) / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return venv


@pytest.mark.seconds
def test_the_wheel_has_all_that_is_shipped_and_nothing_else(installed):
    (folder,) = installed.glob("lib/python*/site-packages")
    there = {path.relative_to(folder) for name in cli.PACKAGES for path in (folder / name).rglob("*")}
    ours = subprocess.run(["git", "ls-files", *cli.PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {Path(line) for line in ours.stdout.splitlines()} <= there
    assert not (folder / "tests").exists() and not (folder / "benchmarks").exists()


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.long
def test_an_installed_wheel_trains_the_project_that_it_writes(installed, tmp_path):
    """From an empty folder, by the line that `init` prints; nothing of the checkout is on any path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PATH"] = f"{installed / 'bin'}{os.pathsep}{environment['PATH']}"

    def run(*words: str) -> str:
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=2 * PATIENCE_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    (line,) = re.findall(r"^train it: +(.+)$", run("understudy", "init"), flags=re.M)
    small = ["run.steps=2", "buffer.groups_per_step=1", "buffer.group_size=4"]
    small += ["learner.advantage=gae", "learner.critic=shared"]  # a checkpoint with a value head is played below
    output = run(*shlex.split(line), *small)
    assert "step 2/2" in output
    summary = json.loads((tmp_path / "runs" / "first" / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["episodes"] == 2 * 4 and summary["max_logprob_diff"] < 1e-4
    assert "trained" in run("understudy", "ledger", "inspect", "runs/first")

    agent = (tmp_path / "agent.py").read_text()
    refuses = 'if "Name" in task["prompt"][0]["content"]:\n    sys.exit(3)\n'
    (tmp_path / "agent.py").write_text(agent.replace("reply = ", refuses + "reply = "))
    played = run("understudy", "eval", "--config", "config.yaml", "--checkpoint", "runs/first", "--samples", "2")
    assert "pass@2" in played and "episodes without a score: 2 of 8" in played and "agent exited with code 3" in played
    figures = json.loads((tmp_path / "runs" / "first-eval" / "evaluation.json").read_text())
    assert (figures["tasks"], figures["tasks_without_score"], figures["episodes_scored"]) == (4, 1, 6)
    assert figures["model"] == "runs/first/last" and figures["mean"]["tasks"] == 3
    assert "seed" not in run("understudy", "compare", "runs/first", "runs/first")
