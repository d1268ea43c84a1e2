"""The keys of a run, for programs that are started by hand: `set -a; . runs/<name>/agent.env; python my_agent.py`.

Written by `learner.pipeline` once the server listens, removed when it ends: the keys open nothing afterwards. The files are
readable by their owner only (SECURITY.md: a reader of them is the agent, the scorer or the administrator).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol


class Keys(Protocol):
    """The keys of a run, by what they may call."""

    worker: str
    scorer: str
    admin: str


class Server(Protocol):
    """What the files say about the server."""

    @property
    def keys(self) -> Keys: ...
    @property
    def base_url(self) -> str: ...
    @property
    def admin_url(self) -> str: ...
    @property
    def num_processes(self) -> int: ...
    def environment(self, key: str, *, process: int | None = None) -> dict[str, str]: ...


@contextmanager
def environment_files(folder: Path, server: Server) -> Iterator[None]:
    """Writes a file each for agents, scorers and the administrator, with variables as shell assignments; removes them in the
    end."""
    paths = []
    try:
        for name, variables in _files_of(server).items():
            path = folder / name
            paths.append(path)
            lines = [f"{variable}={shlex.quote(value)}\n" for variable, value in variables.items()]
            with os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w", encoding="utf-8") as sink:
                sink.writelines(lines)
        yield
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def _files_of(server: Server) -> dict[str, dict[str, str]]:
    """Agents and scorers each have a key of their own; agents a file for each server process."""
    return {
        "agent.env": server.environment(server.keys.worker),
        "scorer.env": {"SERVER_URL": server.base_url, "SCORER_KEY": server.keys.scorer},
        "admin.env": {"SERVER_URL": server.admin_url, "ADMIN_KEY": server.keys.admin},
        **{
            f"agent-{process}.env": server.environment(server.keys.worker, process=process)
            for process in range(1, server.num_processes)
        },
    }
