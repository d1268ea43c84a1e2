"""A fake of the model server for the walk game: tasks, an oracle behind chat completions, and scores, over real HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from buffers.records import Task
from tests.support.patience import PATIENCE_S

SCORER_KEY = "scorer"
WORKER_KEY = "worker"
LETTERS = {"north": "w", "west": "a", "south": "s", "east": "d"}


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512


class FakeModelServer:
    """Episode `e<i>` has key `key-<i>` and plays `tasks[i]`. Everything that arrives is in `log`, in order."""

    def __init__(self, tasks: list[Task]) -> None:
        self.tasks = tasks
        self.env_address = ""
        self.outcomes: dict[str, dict[str, Any]] = {}
        self.chats: list[tuple[str, dict[str, Any]]] = []
        self.score_arrived = threading.Event()
        self.score_may_be_stored = threading.Event()
        self.score_may_be_stored.set()
        self.scores_to_drop = 0
        self.keys_without_model: set[str] = set()
        self.stored = threading.Condition()
        self._empty_leases = 1
        self._leased = 0
        self._lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # headers and body in one segment

            def do_GET(self) -> None:
                fake.answer(self, body={})

            def do_POST(self) -> None:
                fake.answer(self, body=json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._http = _Http(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def wait_for_outcome(self, episode_id: str) -> dict[str, Any]:
        with self.stored:
            assert self.stored.wait_for(lambda: episode_id in self.outcomes, timeout=PATIENCE_S)
            return self.outcomes[episode_id]

    def answer(self, request: BaseHTTPRequestHandler, *, body: dict[str, Any]) -> None:
        key = request.headers["Authorization"].removeprefix("Bearer ")
        path = request.path.partition("?")[0]
        routes: dict[str, Callable[..., tuple[int, Any]]] = {
            "/v1/tasks": self._lease,
            "/v1/chat/completions": self._chat,
            "/episode": self._episode,
            "/scores": self._score,
        }
        status, reply = routes[path](key, request=request, body=body)
        if status == 0:  # the connection dies without an answer
            request.close_connection = True
            return
        data = b"" if reply is None else json.dumps(reply).encode()
        request.send_response(status)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    def _lease(self, key: str, *, request: BaseHTTPRequestHandler, body: dict[str, Any]) -> tuple[int, Any]:
        assert key == WORKER_KEY and request.path == "/v1/tasks?wait=30"
        with self._lock:
            if self._empty_leases:
                self._empty_leases -= 1
                return 204, None
            if self._leased == len(self.tasks):
                return 410, {"error": {"message": "no more tasks"}}
            number, self._leased = self._leased, self._leased + 1
        task = self.tasks[number].public()
        episode = {"episode_id": f"e{number}", "api_key": f"key-{number}", "task": task}
        return 200, {**episode, "env_address": self.env_address}

    def _chat(self, key: str, *, request: BaseHTTPRequestHandler, body: dict[str, Any]) -> tuple[int, Any]:
        if key in self.keys_without_model:
            return 400, {"error": {"message": "this episode takes no calls"}}
        with self._lock:
            self.chats.append((key, body))
        hint = body["messages"][-1]["content"]
        message = {"role": "assistant", "content": LETTERS[hint.rstrip(".").split()[-1]]}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return 200, {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}

    def _episode(self, key: str, *, request: BaseHTTPRequestHandler, body: dict[str, Any]) -> tuple[int, Any]:
        assert key == SCORER_KEY
        number = request.headers["X-Episode-Key"].removeprefix("key-")
        if not number.isdigit():
            return 404, {"error": {"message": "no episode has this key"}}
        return 200, {"episode_id": f"e{number}", "task": self.tasks[int(number)].private()}

    def _score(self, key: str, *, request: BaseHTTPRequestHandler, body: dict[str, Any]) -> tuple[int, Any]:
        assert key == SCORER_KEY
        with self._lock:
            if self.scores_to_drop:
                self.scores_to_drop -= 1
                return 0, None
        self.score_arrived.set()
        assert self.score_may_be_stored.wait(timeout=PATIENCE_S)
        with self.stored:
            self.outcomes[body.pop("episode_id")] = body
            self.stored.notify_all()
        return 200, {"stored": True}
