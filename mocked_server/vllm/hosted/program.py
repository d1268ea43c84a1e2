"""The program of an engine's host: makes a vLLM engine and serves it over the wire, until its parent closes the pipe.

    python -m mocked_server.vllm.hosted.program < settings    prints its address as soon as it can be reached

`HostSettings` comes as JSON on one line of stdin: the secret is in no command line and no environment. The engine starts when the
client says so. When stdin ends, which is when its parent does, so do the engine and the process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from pydantic import ConfigDict, TypeAdapter

from buffers.errors import EngineDied, EngineError
from configs.child_processes import python_path
from mocked_server.vllm.engine_arguments import EngineSettings, make_args, make_vllm_config
from mocked_server.vllm.hosted.engine_host import EngineHost


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings:
    """Settings of a host. `host`, `trusted`: see `buffers.wire.address.way_to`."""

    __pydantic_config__ = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
    engine: EngineSettings
    secret: bytes
    name: str = "e0"
    host: str = "127.0.0.1"
    trusted: bool = False
    count_preemptions: bool = False
    timeout_s: float = 120.0

    def to_json(self) -> str:
        return _settings().dump_json(self).decode()

    @classmethod
    def of_json(cls, text: str) -> HostSettings:
        return _settings().validate_json(text)


def _settings() -> TypeAdapter[HostSettings]:
    return TypeAdapter(HostSettings)


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


async def make_host(settings: HostSettings) -> EngineHost:
    """A host that listens, with an engine that has not started. Raises EngineError for arguments that vLLM refuses."""
    from buffers.wire.address import way_to
    from mocked_server.vllm.engine import VLLMEngine
    from mocked_server.vllm.hosted.outputs import VLLMCodec

    vllm_config = await asyncio.to_thread(lambda: make_vllm_config(make_args(settings.engine)))
    engine = VLLMEngine(
        vllm_config, count_preemptions=settings.count_preemptions, timeout_s=settings.timeout_s, name=settings.name
    )
    way = way_to(settings.host, trusted=settings.trusted)
    host = EngineHost(engine, VLLMCodec(), secret=settings.secret, way=way, host=settings.host)
    host.listen(asyncio.get_running_loop())
    return host


async def serve(settings: HostSettings, *, tell: Callable[[str], object], until: asyncio.Event) -> None:
    """Serve until `until` is set. `tell` gets the address."""
    host = await make_host(settings)
    try:
        tell(str(host.address))
        await until.wait()
    finally:
        await host.aclose()


async def _main(settings: HostSettings) -> None:
    until = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), lambda: None if os.read(sys.stdin.fileno(), 4096) else until.set())
    loop.add_signal_handler(signal.SIGTERM, until.set)
    await serve(settings, tell=lambda address: print(address, flush=True), until=until)


def main() -> None:
    from mocked_server.vllm.engine import start_fork_server

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C of the terminal is its parent's
    settings = HostSettings.of_json(_line_of(sys.stdin.fileno()))
    start_fork_server()  # so that its engine is back sooner after a death
    asyncio.run(_main(settings))


def _line_of(descriptor: int) -> str:
    """The first line, read without a buffer: what comes after it is the event loop's."""
    line = b""
    while not line.endswith(b"\n"):
        if not (more := os.read(descriptor, 1)):
            raise SystemExit("the settings of a host must come on stdin, got none; it is started by the run")
        line += more
    return line.decode()


if __name__ == "__main__":
    main()
