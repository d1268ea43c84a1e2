"""Writes small tasks in Harbor's format: `python -m agents.harbor.make_tasks --out FOLDER`, the `data.make` of `configs/harbor.yaml`.

Each asks for one letter as often as possible; its verifier counts that letter in all that the agent said, by the trajectory that Harbor
keeps in `/logs/agent` (with `auto_mounting`, also while the trial runs), or in `/app/answer.txt`, which the solution writes. A model of any size can learn that. `--failing` adds three that never give a score: an
agent that hangs, a verifier that writes nothing, an environment that cannot be built. Invariant: the same arguments write the same
files; a folder that is there is left as it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

LETTERS = "abcdefghijkl"
TASK = """\
version = "1.0"

[metadata]
category = "letters"

[agent]
timeout_sec = {agent_s}

[verifier]
timeout_sec = 60.0

[environment]
build_timeout_sec = 60.0
"""
DOCKERFILE = """\
FROM debian:stable-slim
RUN which tmux || (apt-get update && apt-get install -y tmux)
WORKDIR /app
"""
INSTRUCTION = "Say the letter {letter} as often as you can, and no other letter.\n"
VERIFIER = """\
#!/bin/sh
# The share of one letter among all letters that the agent said, written as Harbor wants it.
words='s/\\\\u....//g; s/\\\\.//g; s/.*"message": //p'
said=$({{ cat /app/answer.txt; sed -n '/"source": "agent"/,/"message"/ {{'"$words"'}}' /logs/agent/trajectory.json; }} 2>/dev/null |
    tr -cd 'A-Za-z')
letter=$(printf %s "$said" | tr -cd '{letter}')
awk -v some="${{#letter}}" -v all="${{#said}}" 'BEGIN {{ print all ? some / all : 0 }}' > /logs/verifier/reward.txt
"""
SOLUTION = """\
#!/bin/sh
echo {letter}{letter}{letter} > /app/answer.txt
"""
HANGS = """\
#!/bin/sh
# Looking at the terminal never ends.
[ "$1" = capture-pane ] && exec sleep 3600
exec /usr/bin/tmux "$@"
"""


def letter_task(letter: str) -> dict[str, str]:
    """Path in the task's folder -> its text."""
    return {
        "task.toml": TASK.format(agent_s=300.0),
        "instruction.md": INSTRUCTION.format(letter=letter),
        "environment/Dockerfile": DOCKERFILE,
        "tests/test.sh": VERIFIER.format(letter=letter),
        "solution/solve.sh": SOLUTION.format(letter=letter),
    }


def failing_tasks() -> dict[str, dict[str, str]]:
    """Name -> a task that gives no score, for a reason that Harbor tells."""
    plain = letter_task("z")
    hangs = 'COPY tmux /opt/slow/tmux\nRUN chmod +x /opt/slow/tmux\nENV PATH="/opt/slow:$PATH"\n'
    return {
        "agent-hangs": {
            **plain,
            "task.toml": TASK.format(agent_s=10.0),
            "environment/Dockerfile": DOCKERFILE + hangs,
            "environment/tmux": HANGS,
        },
        "verifier-fails": {**plain, "tests/test.sh": "#!/bin/sh\necho the verifier gives up\nexit 1\n"},
        "environment-fails": {**plain, "environment/Dockerfile": DOCKERFILE + "RUN echo no such package && exit 3\n"},
    }


def write_task(folder: Path, files: Mapping[str, str]) -> None:
    """Write a task's folder; scripts may be run."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755 if text.startswith("#!") else 0o644)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write small tasks in Harbor's format.")
    parser.add_argument("--out", type=Path, required=True, help="folder that gets a folder for each task")
    parser.add_argument("--failing", action="store_true", help="also three that never give a score")
    arguments = parser.parse_args()
    tasks = {f"say-{letter}": letter_task(letter) for letter in LETTERS}
    tasks |= failing_tasks() if arguments.failing else {}
    for name, files in tasks.items():
        if not (arguments.out / name).exists():
            write_task(arguments.out / name, files)
    print(f"wrote {len(tasks)} tasks to {arguments.out}")


if __name__ == "__main__":
    main()
