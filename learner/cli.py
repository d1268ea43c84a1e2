"""`understudy`: the command of an installed package, in any folder. Hands each subcommand to the module that does it.

Paths in configurations are relative to the folder in which the command is started, and so is `runs/`, which results go to. Heavy
imports come after argument parsing. What others also install under our import names is found out before anything of it runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from buffers.terminal import guard_output

ROOT = Path(__file__).resolve().parent.parent
"""The folder that our packages lie in: site-packages, or a checkout."""
PACKAGES = ("agents", "buffers", "configs", "env_adapters", "learner", "mocked_server")
AGENTS_SDK = "openai-agents"
"""A distribution whose package is named `agents` too."""
STOPPED = 130
"""The exit code after Ctrl-C."""
HELP = """\
usage: understudy COMMAND ...

Train the model behind an agent: engine, server, agents and learner in one command.

commands, each with a --help of its own:
  demo [--real] [section.key=value ...]     a small model learns a game in about three minutes, on two CPU cores;
                                            --real: SmolLM2-135M learns sums, in about ten (PyPI has the model)
  init [FOLDER]                             write a small project of your own: an agent, its tasks, a configuration
  run [--config FILE] [section.key=value]   train; FILE is yours, or a shipped one by its name, such as walk_env
  serve [--config FILE] [section.key=value] answer agents that are in use already, and learn from what people say of it;
                                            serve keys add NAME: a key for one of its users
  feedback RUN --session NAME --score X ... what you think of a session or an answer, in a score, in words, or both
  resume [RUN] [section.key=value ...]      resume a run from its newest checkpoint: runs/NAME, or a checkpoint in it
  check -- COMMAND ...                      run your agent once against a tiny model, or yours: can it be trained?
  import SOURCE ... --out FILE.parquet      sessions of Claude Code, Codex and others, chat sets: demonstrations, or tasks
  ledger COMMAND RUN ...                    every task, episode, round and score of a run: inspect, doctor, export, ...
  eval [--config FILE] [--checkpoint RUN]   play a task file without a learner: mean, pass@k, failures by reason
  compare RUN RUN                           what differs between runs, in configuration and figures, with a picture
  why RUN ...                               what holds learning back in a run, the worst first, and what to change
  page [RUN ...]                            runs in a browser: machine, curves, episodes, tokens; --export FILE for others
  keys [PREFIX]                             the default and the meaning of each configuration key

paths are relative to the folder that you are in; results go to its runs/
"""


def main(words: list[str] | None = None) -> int:
    """The exit code of the subcommand: 2 where it cannot begin."""
    guard_output()
    words = sys.argv[1:] if words is None else words
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0 if words else 2
    command = COMMANDS.get(words[0])
    if command is None:
        print(f"understudy: the command must be one of {', '.join(COMMANDS)}, got {words[0]!r}", file=sys.stderr)
        return 2
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # a scorer or a loop of the user's lies there; ours come first
    from buffers.terminal import printing

    try:
        return printing(lambda: command(words[1:]))
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return STOPPED


def run(words: list[str]) -> int:
    """`python -m learner.run`, where `--config` may also be the name of a configuration that is shipped."""
    return _run(words, program="understudy run")


def demo(words: list[str]) -> int:
    """A run with the default configuration, which is the demo; with `--real` of a real model, which is made first."""
    if "--real" not in words:
        return _run(words, program="understudy run")
    from env_adapters import smollm2

    rest = [word for word in words if word != "--real"]
    if not {"-h", "--help"} & set(rest) and (_conflicts() or smollm2.main([])):
        return 2
    return _run(["--config", "smollm2", *rest], program="understudy run")


def serve(words: list[str]) -> int:
    """A run without tasks, which is resumed where it was; `serve keys`: its users' keys."""
    if words[:1] == ["keys"]:
        from learner.live import keys
        from mocked_server.live_keys import LiveKeys

        return keys(words[1:], users=LiveKeys)
    if words and words[0] in ("promote", "rollback", "status"):
        from learner.live import versions

        return versions(words[0], words[1:])
    more = ["--resume", "auto"] if "--resume" not in words else []
    if sys.platform == "linux" and not {"--keep-running", "--debug", "--dry-run"} & set(words):
        more.append("--keep-running")
    named = [] if any(word == "--config" or word.startswith("--config=") for word in words) else ["--config", "live"]
    overrides = [word for word in words if "=" in word and not word.startswith("-")]
    others = [word for word in words if word not in overrides]
    return _run([*named, *others, *more, *overrides, "serve.enabled=true"], program="understudy serve")


def resume(words: list[str]) -> int:
    """`run --resume` with the configuration that lies in the run's folder."""
    parser = argparse.ArgumentParser(
        prog="understudy resume", description="Resume a run with the configuration that it was started with."
    )
    parser.add_argument("run", nargs="?", default="", metavar="RUN", help="runs/NAME, or a checkpoint in its folder")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to its configuration")
    parser.add_argument("--keep-running", action="store_true", help="see `understudy run --help`")
    arguments = parser.parse_args(words)
    given, overrides = arguments.run, arguments.overrides
    if "=" in given and not Path(given).exists():
        given, overrides = "", [given, *overrides]
    folder = Path(given) if given else newest_run(Path("runs"))
    if folder is None:
        print("understudy resume: there must be a run in runs/, got none; name its folder", file=sys.stderr)
        return 2
    is_run = (folder / "config.yaml").is_file()
    config = folder / "config.yaml" if is_run else folder.parent.parent / "config.yaml"
    if not is_run and not (config.is_file() and folder.is_dir() and folder.parent.name == "checkpoints"):
        got = f"{folder} without config.yaml" if folder.is_dir() else f"{folder}, which is no folder"
        print(
            f"understudy resume: RUN must be a run's folder, or a checkpoint in it, got {got}; name runs/NAME",
            file=sys.stderr,
        )
        return 2
    more = ["--keep-running"] if arguments.keep_running else []
    which = "auto" if is_run else str(folder)
    return _run(["--config", str(config), "--resume", which, *more, *overrides], program="understudy run")


def newest_run(runs: Path) -> Path | None:
    """The run in this folder that was started last, evaluations aside; None: there is none."""
    from learner.startup.run_folder import EVALUATION

    found = [file for file in runs.glob("*/config.yaml") if file.is_file() and not (file.parent / EVALUATION).exists()]
    return max(found, key=lambda file: file.stat().st_mtime).parent if found else None


def _run(words: list[str], *, program: str) -> int:
    if not {"-h", "--help"} & set(words) and _conflicts():
        return 2
    from configs.child_processes import leave
    from learner import run

    leave(run.main(words, program=program))


def check(words: list[str]) -> int:
    """`python -m mocked_server.check`."""
    if not {"-h", "--help"} & set(words[: words.index("--")] if "--" in words else words) and _conflicts():
        return 2
    from mocked_server.check.__main__ import main

    return main(words, program="understudy check")


def import_logs(words: list[str]) -> int:
    """Sessions that other programs have logged as demonstrations, or tasks."""
    from learner.import_logs import main
    from mocked_server.conversation.chat_history import REMEDY

    def renderer_of(folder: Path) -> Any:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # else it tells of an engine that is not started
        from configs.schema import RolloutConfig, ServerConfig
        from mocked_server.vllm.demonstrations import make_renderer
        from mocked_server.vllm.engine_arguments import EngineSettings, make_args, make_vllm_config

        settings = EngineSettings(
            model_path=folder, served_name="policy", dtype="float32", rollout=RolloutConfig(),
            server=ServerConfig(tool_parser=None),
        )  # fmt: skip
        return make_renderer(make_vllm_config(make_args(settings)), strict=False, last_only=False, longest=sys.maxsize)

    return main(words, renderer_of=renderer_of, remedies={cause.value: remedy for cause, remedy in REMEDY.items()})


def ledger(words: list[str]) -> int:
    """`python -m buffers.ledger`."""
    from buffers.ledger.cli import main
    from buffers.ledger.ledger import Ledger

    if words[:1] != ["forget"]:
        return main(words, open_ledger=Ledger, program="understudy ledger")
    from learner.live import clean_up, forget

    return main(words, open_ledger=Ledger, program="understudy ledger", ask=forget, clean_up=clean_up)


def evaluate(words: list[str]) -> int:
    """Play a task file by the model as it is."""
    if not {"-h", "--help"} & set(words) and _conflicts():
        return 2
    from configs.child_processes import leave
    from learner import evaluate

    leave(evaluate.main(words))


# `understudy init`: writes a small project of the user's own that trains as it is. The project learns something that can be
# seen in two minutes on two processor cores: the tiny model, whose weights are random, is asked for a word with a certain
# letter. Invariant: a file that is there already is never overwritten.

AGENT = '''\
"""The agent: any program that asks a model. It gets a task on standard input; what it prints is judged by data.scorer."""

import json, os, sys, openai

task = json.load(sys.stdin)
reply = openai.OpenAI().chat.completions.create(model=os.environ["MODEL"], messages=task["prompt"])
print(reply.choices[0].message.content)
'''
TASKS = '''\
"""Writes tasks.parquet, in verl's columns: what the agent gets, and the truth, which only the scorer sees."""

import pyarrow, pyarrow.parquet

asked = ["Say a word with an m.", "Name a word with an m.", "Write a word with an m.", "Find a word with an m."]
rows = [{"prompt": [{"role": "user", "content": text}], "reward_model": {"ground_truth": "m"}} for text in asked]
pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), "tasks.parquet")
'''
CONFIG = """\
# Trains the model behind agent.py. Every other key has a default: `understudy keys` prints them.
run: {name: first, steps: 12, reward_optimum: 1.0}
model: {path: tiny}                   # a random model of 361,216 numbers; or the folder of a Hugging Face model
data:
  tasks: tasks.parquet
  make: ["{python}", make_tasks.py]   # runs when tasks.parquet is missing
  scorer: contains                    # 1 when the truth stands in what the agent printed; or exact_match, json_line, exit_code, ...
agents:
  command: ["{python}", agent.py]     # any program, in any language
  processes: 0                        # a fresh process for each episode,
  preload: [openai]                   # forked of a Python that has imported this
  concurrency: 4
rollout: {max_tokens: 6}
buffer: {groups_per_step: 2, group_size: 8}
learner: {advantage: grpo, critic: none, lr: 4.0e-3}
"""
IGNORED = "runs/\nbuild/\n__pycache__/\n.venv/\n"
"""What git leaves alone in a project; a folder that has a .gitignore keeps its own."""
FILES = {"agent.py": AGENT, "make_tasks.py": TASKS, "config.yaml": CONFIG}


def init(words: list[str]) -> int:
    """The exit code: 2 when nothing was written."""
    parser = argparse.ArgumentParser(
        prog="understudy init", description="Write an agent, its tasks and a configuration that trains it."
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path("."), help="where to (default: this folder)")
    folder: Path = parser.parse_args(words).folder
    if there := [name for name in FILES if (folder / name).exists()]:
        print(f"understudy init: {folder} must not have {there[0]} yet; name another folder", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    ignored = {} if (folder / ".gitignore").exists() else {".gitignore": IGNORED}
    for name, text in {**FILES, **ignored}.items():
        (folder / name).write_text(text, encoding="utf-8")
        print(f"wrote {folder / name}")
    to = "" if folder.resolve() == Path.cwd() else f"cd {folder} && "
    print(f"train it:  {to}understudy run --config config.yaml")
    print(f"try it:    {to}understudy check -- python agent.py")
    return 0


def _conflicts() -> bool:
    found = conflict(Path.cwd())
    if found:
        print(f"error: {found}", file=sys.stderr)
    return bool(found)


def conflict(here: Path) -> str:
    """What else is imported under one of our names, in this environment or in the folder `here`, in a line; empty: nothing."""
    from importlib import metadata

    for name in PACKAGES:
        for other in (here / name / "__init__.py", here / f"{name}.py"):  # first on the path of Ray's workers
            if other.is_file() and other.resolve().parent != ROOT / name:
                return (
                    f"the package `{name}` must be understudy's, got {other} in the folder that you are in; rename it"
                )
        spec = find_spec(name)
        found = Path(spec.origin).resolve() if spec is not None and spec.origin else None
        if found is not None and found.parent != ROOT / name:
            return (
                f"the package `{name}` must be understudy's, got {found}; "
                f"{_remedy(name, elsewhere=found.parent.parent)}"
            )
    try:
        sdk = metadata.distribution(AGENTS_SDK)
    except metadata.PackageNotFoundError:
        return ""
    if Path(str(sdk.locate_file("agents"))).resolve() != ROOT / "agents":
        return ""  # beside a checkout, whose folder comes first: agents in processes of their own find theirs
    return f"{AGENTS_SDK} and understudy have overwritten each other's package `agents` here; {_remedy('agents')}"


def _remedy(name: str, *, elsewhere: Path | None = None) -> str:
    if name != "agents" or (elsewhere is not None and not (elsewhere / "agents" / "mcp").exists()):
        return f"take {elsewhere} off PYTHONPATH, or install understudy in a virtual environment of its own"
    return (
        "install understudy in a virtual environment of its own, and name your agent's python in agents.command "
        "(agents are programs: they need nothing of understudy's)"
    )


def _of(module: str, function: str = "main", **options: Any) -> Callable[[list[str]], int]:
    """The command that a module has, which is imported when it is called."""
    return lambda words: int(getattr(import_module(module), function)(words, **options))


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "demo": demo,
    "init": init,
    "run": run,
    "serve": serve,
    "feedback": _of("learner.live", "feedback"),
    "resume": resume,
    "check": check,
    "import": import_logs,
    "ledger": ledger,
    "eval": evaluate,
    "compare": _of("learner.reporting.compare"),
    "why": _of("learner.diagnosis.diagnose"),
    "page": _of("learner.page.__main__"),
    "keys": _of("configs.keys", program="understudy keys"),
}

if __name__ == "__main__":
    sys.exit(main())
