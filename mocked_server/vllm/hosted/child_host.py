"""The process of an engine's host as a child of this one: started with its settings on a pipe, ended by a kill.

A `HostProcess` of `mocked_server.fleet.remote_engine`. Invariant: the child does not outlive this process: its pipe ends then.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress

from buffers.errors import EngineDied, EngineError
from configs.checkout import python_path
from mocked_server.vllm.hosted.program import HostSettings

START_S = 600.0
"""Seconds for the program to import vLLM and to listen: on processors with much else to do it takes minutes, and one that ends is
seen at once."""


class ChildHost:
    """See the module. Its log is this process's stderr."""

    def __init__(self, settings: HostSettings) -> None:
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Raises EngineError before `start`."""
        if self._process is None:
            raise EngineError(f"the host of engine {self._settings.name} must have a process, got none; start it")
        return self._process.pid

    async def start(self) -> str:
        """Returns its address once it listens. Raises EngineDied when a signal ended it, EngineError for other causes."""
        await self.end()
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "mocked_server.vllm.hosted.program",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": python_path()}, start_new_session=True,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(self._settings.to_json().encode() + b"\n")
        name = self._settings.name
        try:
            line = await asyncio.wait_for(process.stdout.readline(), START_S)
        except TimeoutError as error:
            await self.end()
            raise EngineError(f"the host of engine {name} must listen within {START_S:.0f} s, but did not") from error
        if not line:
            code = await process.wait()
            raise (EngineDied if code < 0 else EngineError)(
                f"the host of engine {name} ended with {code} before it listened; its log is above"
            )
        return line.decode().strip()

    async def end(self) -> None:
        """End it, whatever it does, and what it has started."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        if process.stdin is not None:
            process.stdin.close()
