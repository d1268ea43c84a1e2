"""Writes small tasks in Harbor's format: `python -m agents.harbor.make_tasks --out FOLDER`.

The `data.make` of `configs/harbor.yaml`. Each asks for the letter a, so many times and no other; its verifier counts letters in
all that the agent said, by the trajectory that Harbor keeps in `/logs/agent` (with `auto_mounting`, also while the trial runs),
or in `/app/answer.txt`, which the solution writes. A model of any size can learn that; `--traces` writes what a tiny one has to
know first: that an answer is some letters, and ends. `--failing` adds three tasks that never give a score: an agent that hangs,
a verifier that writes nothing, an environment that cannot be built. Invariant: the same arguments write the same files; a
task's folder that is there is left as it is.
"""

from __future__ import annotations

import argparse
import random
import string
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from buffers.tasks.parquet import write_traces

COUNTS = range(1, 13)
LETTERS = "abcdefgh"
CHARACTERS = string.ascii_lowercase * 8 + string.punctuation + string.digits + "\n"
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
INSTRUCTION = "Say the letter a {count} times, and no other letter.\n"
VERIFIER = """\
#!/bin/sh
# Of all letters that the agent said the share that is right, and how much of {count} there is, as one reward.
words='s/\\\\u....//g; s/\\\\.//g; s/.*"message": //p'
said=$({{ cat /app/answer.txt; sed -n '/"source": "agent"/,/"message"/ {{'"$words"'}}' /logs/agent/trajectory.json; }} 2>/dev/null |
    tr -cd 'A-Za-z')
right=$(printf %s "$said" | tr -cd a)
awk -v right="${{#right}}" -v all="${{#said}}" -v wanted={count} \
    'BEGIN {{ print all ? right / all * (right < wanted ? right / wanted : 1) : 0 }}' > /logs/verifier/reward.txt
"""
SOLUTION = """\
#!/bin/sh
printf 'a%.0s' $(seq {count}) > /app/answer.txt
"""
HANGS = """\
#!/bin/sh
# Looking at the terminal never ends.
[ "$1" = capture-pane ] && exec sleep 3600
exec /usr/bin/tmux "$@"
"""


def letter_task(count: int) -> dict[str, str]:
    """Path in the task's folder -> its text."""
    return {
        "task.toml": TASK.format(agent_s=300.0),
        "instruction.md": INSTRUCTION.format(count=count),
        "environment/Dockerfile": DOCKERFILE,
        "tests/test.sh": VERIFIER.format(count=count),
        "solution/solve.sh": SOLUTION.format(count=count),
    }


def letter_traces(number: int = 800, *, seed: int = 0) -> Iterator[list[dict[str, Any]]]:
    """Questions, a quarter of them as long as those of a real agent, and answers of a few random letters: one turn, or two."""
    draw = random.Random(seed)
    for _ in range(number):
        messages: list[dict[str, Any]] = []
        for _ in range(draw.choice((1, 2))):
            words = draw.choice((0, 0, 8, 32, 64, 128, 300, 600)) // (len(messages) + 1)
            around = " ".join("".join(draw.choices(CHARACTERS, k=draw.randint(1, 7))) for _ in range(words))
            said = " ".join(draw.choice(LETTERS) for _ in range(draw.randint(2, 8)))
            asked = f"{around}\n{INSTRUCTION.format(count=draw.choice(COUNTS))}"
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        yield messages


def failing_tasks() -> dict[str, dict[str, str]]:
    """Name -> a task that gives no score, for a reason that Harbor tells."""
    plain = letter_task(1)
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
    parser.add_argument("--traces", type=Path, help="parquet file of supervised conversations to write")
    arguments = parser.parse_args()
    tasks = {f"letters-{count:02}": letter_task(count) for count in COUNTS}
    tasks |= failing_tasks() if arguments.failing else {}
    for name, files in tasks.items():
        if not (arguments.out / name).exists():
            write_task(arguments.out / name, files)
    if arguments.traces is not None:
        arguments.traces.parent.mkdir(parents=True, exist_ok=True)
        write_traces(arguments.traces, letter_traces())
    print(f"wrote {len(tasks)} tasks to {arguments.out}")


if __name__ == "__main__":
    main()
