"""An SGLang server as a child process: its command line, its start and its end.

Made by `mocked_server.servers.choose` for each engine of `rollout.engine=sglang`. The server listens on loopback, on a port that
was free; its output goes to a file in the run's folder. Invariant: the process ends with the run, however that ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from buffers.errors import EngineDied, EngineError
from configs.schema import Config
from mocked_server.servers.http_client import ServerClient, ServerLost, ServerRefused

START_S = 1200.0
"""Most seconds of a start: a large model is read, and graphs are captured."""
LOOK_S = 0.5
END_S = 10.0
LOG_TAIL_CHARS = 600
MODULE = ("-m", "sglang.launch_server")
WITH_PARENT = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Becomes another program that the kernel ends with its parent (PR_SET_PDEATHSIG): no killed run leaves its cards taken."""


class SGLangProcess:
    """One server. `program`: what is started, with SGLang's arguments after it."""

    begins_with_model = True

    def __init__(
        self,
        config: Config,
        *,
        model: Path,
        devices: Sequence[str],
        log: Path,
        program: Sequence[str] = (sys.executable, *MODULE),
    ) -> None:
        self._config = config
        self._model = model
        self._devices = devices
        self._log = log
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> str:
        """Its URL, once it answers. Raises EngineDied when a signal ended it meanwhile, EngineError with the end of its log when it
        ended by itself."""
        with (
            socket.socket() as held
        ):  # nobody else is given the port; SGLang says SO_REUSEADDR as well, and may have it
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", 0))
            port = int(held.getsockname()[1])
            self._process = self._start_process(port)
            return await self._answering(f"http://127.0.0.1:{port}")

    async def _answering(self, url: str) -> str:
        """The URL, once the process answers there."""
        client = ServerClient(url)
        try:
            async with asyncio.timeout(START_S):
                while not await _answers(client):
                    self._check_alive()
                    await asyncio.sleep(LOOK_S)
        except TimeoutError as error:
            raise EngineError(f"SGLang must answer within {START_S:.0f} s, got nothing; see {self._log}") from error
        finally:
            await client.close()
        return url

    def _start_process(self, port: int) -> subprocess.Popen[bytes]:
        """Runs in the main thread, which the process is bound to."""
        command = [*self._program, *arguments(self._config, model=self._model, port=port)]
        if sys.platform == "linux":
            command = [sys.executable, "-c", WITH_PARENT, *command]
        environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ",".join(self._devices)} if self._devices else {})}
        with self._log.open("ab") as log:
            return subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _check_alive(self) -> None:
        assert self._process is not None
        if (code := self._process.poll()) is not None:
            kind = EngineDied if code < 0 else EngineError
            tail = " ".join(self._log.read_text(errors="replace").split())[-LOG_TAIL_CHARS:]
            raise kind(f"SGLang ended with code {code} while it started; the end of {self._log}: {tail}")

    @property
    def has_ended(self) -> bool:
        """Its process is gone."""
        return self._process is not None and self._process.poll() is not None

    async def end(self) -> None:
        """End it and its processes."""
        process, self._process = self._process, None
        if process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, END_S)


def arguments(config: Config, *, model: Path, port: int) -> list[str]:
    """SGLang's arguments for an engine of this run."""
    rollout = config.rollout
    words = ["--model-path", str(model), "--host", "127.0.0.1", "--port", str(port), "--dtype", config.model.dtype]
    words += ["--context-length", str(rollout.max_model_len), "--tp-size", str(rollout.tensor_parallel)]
    words += ["--random-seed", str(config.run.seed), "--weight-version", "0", "--log-level", "warning"]
    words += ["--trust-remote-code"] if config.model.trust_remote_code else []
    if rollout.gpu_memory_utilization is not None:
        words += ["--mem-fraction-static", str(rollout.gpu_memory_utilization)]
    if config.model.dtype != "float32":
        words += ["--enable-fp32-lm-head"]  # logits as the learner's, see docs/numerics.md
    return words


async def _answers(client: ServerClient) -> bool:
    """Whether it takes requests."""
    try:
        await client.get("/health", timeout_s=60.0)
    except (ServerLost, ServerRefused):
        return False
    return True
