"""The live page of a run: a listening socket of the run's, and a process that answers there from the first visit on.

Used by `learner.session`. A run that nobody looks at has the socket and nothing else. Invariants: the page's process reads files
of the run and can neither hold up nor end it; one that dies is started again by the next visit; it ends with the run.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from configs.processes.child_environment import python_path

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
END_S = 5.0
"""Seconds that the process has to end."""
VISITS = 16
"""Connections that wait while it starts."""


class PageProcess:
    """`folder`: the run's. `on_link` takes a new address when the one before was used."""

    def __init__(self, folder: Path, *, on_link: Callable[[str], object] = lambda _: None) -> None:
        self._folder = folder
        self.on_link = on_link
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.bind((HOST, 0))
        self._socket.listen(VISITS)
        self._secret = secrets.token_urlsafe(32)
        self._process: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """A link that opens once, and was not used yet."""
        return f"http://{HOST}:{self._socket.getsockname()[1]}/open/{self._secret}"

    def start(self) -> None:
        """Wait for the first visit, on the running event loop."""
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._visited)

    def _visited(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._keeping = asyncio.create_task(self._keep(), name="page")

    async def _keep(self) -> None:
        """Run the process until it dies, then wait for the next visit."""
        environment = {
            **os.environ,
            "PYTHONPATH": python_path(),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "learner.page", "--child",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=environment,
            pass_fds=(self._socket.fileno(),), start_new_session=True,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        folders = [str(self._folder), str(self._folder.parent)]
        orders = {"descriptor": self._socket.fileno(), "folders": folders, "link": self._secret}
        with suppress(ConnectionError):
            process.stdin.write(json.dumps(orders).encode() + b"\n")
            await process.stdin.drain()
        while line := await process.stdout.readline():
            self._secret = line.decode().strip()
            self.on_link(self.url)
        logger.info("the page's process ended with code %s", await process.wait())
        self.start()

    async def close(self) -> None:
        """End the process, and stop listening."""
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        process, keeping = self._process, self._keeping
        if keeping is not None:
            keeping.cancel()
            await asyncio.wait({keeping})
        if process is not None and process.returncode is None:
            assert process.stdin is not None, "it is a pipe"
            with suppress(ConnectionError, asyncio.TimeoutError):
                process.stdin.write(b"end\n")
                await process.stdin.drain()
                await asyncio.wait_for(process.wait(), timeout=END_S)
            if process.returncode is None:
                process.kill()
                await process.wait()
        self._socket.close()
