"""What any `harbor` program is held to: `play` runs trials of it against a stand-in for the model, and `check_*` look at the
end.

Used by tests/agents/harbor/test_trials.py with a scripted program, and by tests/outside/test_harbor.py with the real one.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from agents.external import AgentPlace
from agents.harbor.make_tasks import failing_tasks, letter_task, write_task
from agents.harbor.tasks import read_folder
from agents.harbor.trials import HarborTrials
from configs.schema import HarborConfig
from tests.agents.test_external import ScriptedService

HARBOR: dict[str, Any] = {
    "agent": "terminus-2",
    "agent_options": {"max_turns": 2, "record_terminal_session": False, "enable_summarize": False},
    "environment": "child",
    "environment_options": {"auto_mounting": True},
}


@dataclass
class Model:
    """Answers every chat with `says`; remembers with which key and for which model it was asked."""

    says: str = "a a b a"
    asked: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""


@contextmanager
def model() -> Iterator[Model]:
    """An OpenAI-compatible server on loopback."""
    standing = Model()

    class Chat(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            standing.asked.append((self.headers["Authorization"].removeprefix("Bearer "), body["model"]))
            message = {"role": "assistant", "content": standing.says}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
            answer = {"id": "1", "object": "chat.completion", "created": 1, "model": body["model"]}
            data = json.dumps({**answer, "choices": choices, "usage": usage}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Chat)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    standing.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield standing
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def environment(url: str, key: str) -> dict[str, str]:
    """As the server's, for this key."""
    return {
        "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": key, "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key, "GOOGLE_GEMINI_BASE_URL": url, "GEMINI_API_KEY": key, "MODEL": "policy",
    }  # fmt: skip


def write_tasks_of(folder: Path) -> Path:
    """Two tasks that are scored and the three that fail, in a folder `tasks`."""
    tasks = {"letters-02": letter_task(2), "letters-12": letter_task(12), **failing_tasks()}
    for name, files in tasks.items():
        write_task(folder / "tasks" / name, files)
    return folder / "tasks"


def trials(service: Any, *, folder: Path, url: str, named: Sequence[str] = (), **harbor: Any) -> HarborTrials:
    """`HarborTrials` of two lanes, in `folder`."""
    place = AgentPlace(
        environment=lambda key: environment(url, key),
        worker_key=lambda _: "w",
        folder=folder / "agents",
        named=tuple(named),
    )
    return HarborTrials(HarborConfig(**{**HARBOR, **harbor}), place=place, service=service, concurrency=2)


async def play(folder: Path, *, url: str, named: Sequence[str] = (), only: str = "", **harbor: Any) -> ScriptedService:
    """Each task (or `only` those of this prefix) played once; the episodes are named like their tasks."""
    found = [replace(task, task_id=task.task_id.partition("/")[2]) for task in read_folder(write_tasks_of(folder))]
    service = ScriptedService(*[task for task in found if task.task_id.startswith(only)])
    await trials(service, folder=folder, url=url, named=named, **harbor).run()
    return service


async def check_scores_and_reasons(folder: Path, command: list[str], *, limit_s: float = 10.0) -> None:
    """The verifiers' scores; an agent that hangs, a verifier that fails, an environment that cannot start: each with its reason.
    `limit_s`: of the agent that hangs, which has 10."""
    with model() as standing:
        service = await play(
            folder, url=standing.url, command=command, trial={"agent_timeout_multiplier": limit_s / 10}
        )
    assert service.scores == {
        "letters-02": 0.75,
        "letters-12": 0.375,
    }  # 6 of 8 letters are right: of 2 wanted all, of 12 half
    assert {name: why.partition(":")[0] for name, why in service.failed.items()} == {
        "agent-hangs": "harbor AgentTimeoutError",
        "verifier-fails": "harbor RewardFileNotFoundError",
        "environment-fails": "harbor SandboxBuildFailedError",
    }
    assert f"timed out after {limit_s} seconds" in service.failed["agent-hangs"]
    assert "ended with code 3" in service.failed["environment-fails"]
    keys = {key for key, _ in standing.asked}
    assert keys >= {"key-letters-02", "key-letters-12"} and {name for _, name in standing.asked} == {"policy"}
    lanes = sorted(path.name for path in (folder / "agents").glob("lane-*/*") if path.is_dir())
    assert lanes == [], "a trial's files are left in its lane"
    kept = sorted(path.name for path in (folder / "agents" / "failed").iterdir())
    assert kept == sorted(service.failed)
    files = [path.read_bytes() for path in (folder / "agents").rglob("*") if path.is_file()]
    assert not any(b"key-letters" in text for text in files), "a key is in a file of a trial"
