"""The hub's routes that `huggingface_hub` asks for a download, over real HTTP, from folders: models, and data sets on branches."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

MAIN = "main"
INFO = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/revision/(.+))?")
TREE = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)/tree/([^/]+)(?:/.*)?")
FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([0-9a-f]{40})/(.+)")


@dataclass
class FakeHub:
    """`repos`: (kind, OWNER/NAME, branch) -> its folder; kind `models` or `datasets`."""

    repos: dict[tuple[str, str, str], Path] = field(default_factory=dict)
    url: str = ""
    asked: list[str] = field(default_factory=list)
    """The method and path of each request."""

    def add(self, kind: str, name: str, folder: Path, *, branch: str = MAIN) -> None:
        self.repos[kind, name, branch] = folder

    def commit(self, kind: str, name: str, branch: str) -> str:
        return hashlib.sha1(f"{kind} {name} {branch}".encode()).hexdigest()

    def folder(self, kind: str, name: str, commit: str) -> Path:
        branches = (branch for one, other, branch in self.repos if (one, other) == (kind, name))
        return next(self.repos[kind, name, one] for one in branches if self.commit(kind, name, one) == commit)


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A hub on a free port of loopback: its `url` is for HF_ENDPOINT."""
    hub = FakeHub()

    class Handler(_Handler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    served: FakeHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.served.asked.append(f"{self.command} {path}")
        if found := TREE.fullmatch(path):
            self._tree(*found.groups())
        elif found := FILE.fullmatch(path):
            self._file("datasets" if found[1] else "models", found[2], found[3], found[4])
        elif found := INFO.fullmatch(path):
            self._info(found[1], found[2], found[3] or MAIN)
        else:
            self._missing("EntryNotFound")

    def _info(self, kind: str, name: str, branch: str) -> None:
        if (kind, name, branch) in self.served.repos:
            self._json({"id": name, "sha": self.served.commit(kind, name, branch), "siblings": []})
        elif any((one, other) == (kind, name) for one, other, _ in self.served.repos):
            self._missing("RevisionNotFound")
        else:
            self._missing("RepoNotFound")

    def _tree(self, kind: str, name: str, commit: str) -> None:
        folder = self.served.folder(kind, name, commit)
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        told = [
            {"type": "file", "path": str(path.relative_to(folder)), "size": path.stat().st_size, "oid": _mark(path)}
            for path in files
        ]
        self._json(told)

    def _file(self, kind: str, name: str, commit: str, path: str) -> None:
        file = self.served.folder(kind, name, commit) / path
        if not file.is_file():
            self._missing("EntryNotFound")
            return
        self._send(file.read_bytes(), headers={"ETag": f'"{_mark(file)}"', "X-Repo-Commit": commit})

    def _json(self, told: object) -> None:
        self._send(json.dumps(told).encode(), headers={"Content-Type": "application/json"})

    def _missing(self, code: str) -> None:
        self._send(b"", headers={"X-Error-Code": code, "X-Error-Message": "not here"}, status=404)

    def _send(self, body: bytes, *, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""


def _mark(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
