"""`understudy init`: writes a small project of the user's own that trains as it is. Called by `learner.cli`.

The project learns something that can be seen in two minutes on two processor cores: the tiny model, whose weights are random, is
asked for a word with a certain letter. Invariant: a file that is there already is never overwritten.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

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
  processes: 0                        # a fresh process for each episode
  concurrency: 4
rollout: {max_tokens: 6}
buffer: {groups_per_step: 2, group_size: 8}
learner: {advantage: grpo, critic: none, lr: 4.0e-3}
"""
IGNORED = "runs/\nbuild/\n__pycache__/\n.venv/\n"
"""What git leaves alone in a project; a folder that has a .gitignore keeps its own."""
FILES = {"agent.py": AGENT, "make_tasks.py": TASKS, "config.yaml": CONFIG}


def main(words: list[str]) -> int:
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
