"""A node's puller in a process of its own, which is started again when it dies.

Used by `learner.checkpoints.weight_sync`, on its event loop, one call at a time. Copying and comparing the weights takes no time
of the process that answers agents, and a puller that is killed loses nothing: the next one resumes with what is complete.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from buffers.errors import WeightsError

logger = logging.getLogger(__name__)

MOST_DEATHS = 3
"""Deaths of the process in one call after which it is no accident."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line for the process. See `PullerProcess`."""

    source: str
    folder: str
    file: str
    secret: bytes
    removes: str


class PullerProcess:
    """Pulls from the versions in `source` into `folder`. `python_path`: where the process finds this project. `secret`: of the
    wire to other nodes. `removes`: a folder that goes with the process."""

    def __init__(
        self,
        source: Path,
        folder: Path,
        *,
        file: str,
        python_path: str,
        secret: bytes = b"",
        removes: Path | None = None,
    ) -> None:
        self._words = [sys.executable, "-m", "buffers.weights"]
        self._settings = Settings(
            source=str(source), folder=str(folder), file=file, secret=secret, removes=str(removes or "")
        )
        self._environment = {**os.environ, "PYTHONPATH": python_path}
        self._process: Process | None = None

    @property
    def pid(self) -> int | None:
        """Id of the process; None: there is none."""
        return None if self._process is None else self._process.pid

    async def pull(self, name: str, *, home: str = "", shards: Mapping[str, str] | None = None) -> Path:
        """The dense folder of the version. `home`, `shards`: see `WireSource.turn_to`; none: all is in `source`. Raises
        WeightsError; see `Puller.pull`."""
        return Path((await self._call({"pull": name, "home": home, "shards": dict(shards or {})}))["folder"])

    async def copy(self, name: str, *, home: str) -> Path:
        """The dense folder of the version, from the server at `home` that has that. Raises WeightsError."""
        return Path((await self._call({"copy": name, "home": home}))["folder"])

    async def keep(self, names: Sequence[str]) -> None:
        """Removes all other versions from the folder."""
        await self._call({"keep": list(names)})

    async def _call(self, call: dict[str, object]) -> dict[str, str]:
        for _ in range(MOST_DEATHS):
            if self._process is None:
                self._process = await asyncio.create_subprocess_exec(
                    *self._words, stdin=PIPE, stdout=PIPE, env=self._environment
                )
                assert self._process.stdin is not None
                self._process.stdin.write(msgspec.json.encode(self._settings) + b"\n")
            line = await self._answer(self._process, call)
            if line:
                answer: dict[str, str] = json.loads(line)
                if "error" in answer:
                    raise WeightsError(answer["error"])
                return answer
            code = await self._process.wait()
            self._process = None
            logger.warning("the puller of the weights died (exit code %d): it is started again", code)
        raise WeightsError(
            f"the puller of the weights must answer {json.dumps(call)[:100]}, but died {MOST_DEATHS} times; see the log above"
        )

    async def _answer(self, process: Process, call: dict[str, object]) -> bytes:
        """Empty: it has died."""
        assert process.stdin is not None and process.stdout is not None
        with suppress(ConnectionError):
            process.stdin.write(json.dumps(call).encode() + b"\n")
            await process.stdin.drain()
        return await process.stdout.readline()

    async def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
