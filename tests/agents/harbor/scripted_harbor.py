"""A `harbor` program as far as trials need one, of the standard library: `scripted_harbor.py trial start --config FILE`.

Started by its path. It keeps the contract that the real one is held to by the same tests (tests/outside/test_harbor.py): it
reads a trial configuration, asks the model at the address and with the key of its environment, runs the task's own verifier,
and writes `result.json`. The task's files are on this machine: paths such as /logs are rewritten to the trial's folder. A file
`environment/tmux` is a terminal that hangs. With HARBOR_NOTES it writes down what it was given.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any


class Failure(Exception):
    """An error by the name that Harbor gives it."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def build(task: Path) -> None:
    for line in (task / "environment" / "Dockerfile").read_text().splitlines():
        if line.startswith("RUN echo"):
            done = subprocess.run(["sh", "-c", line.removeprefix("RUN ")], check=False)
            if done.returncode != 0:
                raise Failure("SandboxBuildFailedError", f"{line} ended with code {done.returncode}")


def ask(model: str, messages: list[dict[str, str]]) -> str:
    body = json.dumps({"model": model.partition("/")[2], "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return str(json.load(answer)["choices"][0]["message"]["content"] or "")
    except urllib.error.HTTPError as error:
        raise Failure("BadRequestError", error.read().decode()[:200]) from None


def play(task: Path, trial: Path, config: dict[str, Any]) -> None:
    limit = tomllib.loads((task / "task.toml").read_text())["agent"]["timeout_sec"]
    if (task / "environment" / "tmux").is_file():
        limit *= config.get("agent_timeout_multiplier") or 1.0
        time.sleep(limit)
        raise Failure("AgentTimeoutError", f"Agent execution timed out after {limit} seconds")
    messages = [{"role": "user", "content": (task / "instruction.md").read_text()}]
    steps = []
    for _ in range(config["agent"]["kwargs"].get("max_turns", 1)):
        said = ask(config["agent"]["model_name"], messages)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]
        steps.append({"source": "agent", "message": said})
    (trial / "agent" / "trajectory.json").write_text(json.dumps({"steps": steps}, indent=2))


def verify(task: Path, trial: Path) -> dict[str, float]:
    text = (task / "tests" / "test.sh").read_text().replace("/logs/", f"{trial}/").replace("/app/", f"{trial}/app/")
    subprocess.run(["sh", "-c", text], check=False)
    for name in ("reward.json", "reward.txt"):
        if (path := trial / "verifier" / name).is_file():
            found = json.loads(path.read_text())
            return dict(found) if isinstance(found, dict) else {"reward": found}
    raise Failure("RewardFileNotFoundError", f"No reward file found at {trial}/verifier/reward.txt")


def run(config: dict[str, Any]) -> None:
    task, trial = Path(config["task"]["path"]), Path(config["trials_dir"]) / config["trial_name"]
    if notes := os.environ.get("HARBOR_NOTES"):
        given = {"config": config, "variables": dict(os.environ)}
        (Path(notes) / f"{config['trial_name']}.json").write_text(json.dumps(given))
    rewards, error = None, None
    try:  # from its first file on it ends as Harbor does when it is interrupted
        for name in ("agent", "verifier", "app"):
            (trial / name).mkdir(parents=True)
        build(task)
        try:
            play(task, trial, config)
        except Failure as failure:
            error = failure
        rewards = verify(task, trial)
    except Failure as failure:
        error = error or failure
    except KeyboardInterrupt:
        error = Failure("CancelledError", "")
    (trial / "result.json").write_text(
        json.dumps({
            "verifier_result": None if rewards is None else {"rewards": rewards},
            "exception_info": None if error is None else {"exception_type": error.kind, "exception_message": str(error)},
            "reward_valid": rewards is not None and (error is None or error.kind == "AgentTimeoutError"),
        })
    )  # fmt: skip


def main(words: list[str]) -> None:
    if words == ["--version"]:
        print("0.26.0")
    elif words[:3] == ["trial", "start", "--config"]:
        run(json.loads(Path(words[3]).read_text()))
    elif words[0] == "download":
        folder = Path(words[words.index("--output-dir") + 1]) / re.sub(r"\W", "-", words[1])
        (folder / "one").mkdir(parents=True)
        (folder / "one" / "task.toml").write_text('version = "1.0"\n')
        (folder / "one" / "instruction.md").write_text("Do it.\n")
    else:
        sys.exit(f"Error: no such command: {words}")


if __name__ == "__main__":
    main(sys.argv[1:])
