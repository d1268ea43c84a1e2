"""One server for `benchmarks.gateway`, in a process of its own: `python -m benchmarks.gateway_server KIND SETTINGS_JSON`.

KIND: `understudy` (MockedServer, ledger on disk, generation) or `vllm` (vLLM's own server as it is). Both have the same arguments
of vLLM, and either the real engine or one that does nothing: it answers with the tokens that were asked for, at once, or one every
`token_ms`. Prints one JSON line when it answers requests: `{"base_url", "keys", "urls"}`. Ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engines import WORD_ID, PacedEngine, settings_of
from buffers.ledger.ledger import Ledger
from buffers.records import Task
from configs.schema import ServerConfig
from mocked_server.check.trial import server_of
from mocked_server.fleet.engine_fleet import EngineFleet
from mocked_server.generation import Generation
from mocked_server.keys import KeyRing
from mocked_server.processes.server_processes import ServerProcesses
from mocked_server.vllm.engine import VLLMEngine
from mocked_server.vllm.engine_arguments import EngineSettings, make_args, make_vllm_config, set_process_environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a server is started with."""

    model: str
    port: int = 0
    ledger: str = ""
    episodes: int = 0
    engine: bool = False
    """False: the engine does nothing."""
    engines: int = 1
    """Real ones, in a fleet."""
    paced: int = 0
    """Engines that give tokens by the clock, in a fleet, in place of others."""
    processes: int = 1
    """Server processes, of which the engine that does nothing is in the first."""
    in_fleet: bool = False
    """The engine that does nothing is the one engine of a fleet."""
    token_ms: float = 0.0
    """The do-nothing engine's time for each token; 0: the whole answer at once."""
    max_model_len: int = 8192
    max_tokens: int = 256
    max_num_seqs: int = 256
    kv_cache_gb: float = 1.0


class NoEngineClient:
    """What vLLM's own server takes for its engine, when that does nothing."""

    errored = False
    dead_error = RuntimeError("the engine died")

    def __init__(self, vllm_config: Any, *, token_ms: float) -> None:
        from vllm.renderers import renderer_from_config
        from vllm.v1.engine.input_processor import InputProcessor

        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.renderer = renderer_from_config(vllm_config)
        self.input_processor = InputProcessor(vllm_config, self.renderer)
        word = self.renderer.get_tokenizer().decode([WORD_ID])
        self._engine = PacedEngine(name="e0", token_s=token_ms / 1000, word=word)

    def check_admission(self, *_: Any, **__: Any) -> None: ...

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def do_log_stats(self) -> None: ...

    async def check_health(self) -> None: ...

    def shutdown(self, timeout: float | None = None) -> None: ...

    async def generate(self, prompt: Any, params: Any, request_id: str, **_: Any) -> AsyncIterator[Any]:
        async for output in self._engine.generate(prompt["prompt_token_ids"], params, request_id=request_id):
            output.prompt_token_ids = prompt["prompt_token_ids"]
            yield output


def vllm_arguments(settings: Settings) -> Namespace:
    """The arguments of both servers, parsed by vLLM."""
    args = make_args(_engine_settings(settings))
    args.host, args.port = "127.0.0.1", settings.port
    args.enable_prompt_tokens_details = True
    args.disable_uvicorn_access_log = True
    args.uvicorn_log_level = "warning"
    return args


def _engine_settings(settings: Settings, **server: Any) -> EngineSettings:
    return settings_of(
        Path(settings.model), max_num_seqs=settings.max_num_seqs, max_tokens=settings.max_tokens,
        max_model_len=settings.max_model_len, kv_cache_gb=settings.kv_cache_gb,
        server=ServerConfig(**{"port": settings.port, **server}),
    )  # fmt: skip


async def serve_understudy(settings: Settings) -> None:
    """The dataset as the pipeline has it: the ledger on disk, one episode open for each key."""
    args, own = vllm_arguments(settings), _engine_settings(settings)
    with Ledger(Path(settings.ledger)) as ledger:
        keys = KeyRing()
        processes = _processes(settings, keys=keys, ledger=ledger) if settings.processes > 1 else None
        vllm_config = make_vllm_config(args)
        server, pool = server_of(
            own, ledger, args=args, vllm_config=vllm_config, max_running=settings.episodes, keys=keys, processes=processes,
        )  # fmt: skip
        engine = _engine(settings, vllm_config, decode=server._client.renderer.get_tokenizer().decode)
        keeping = None
        if isinstance(engine, EngineFleet):
            await engine.start()
            keeping = asyncio.create_task(engine.run())
        generation = Generation(engine, queue=server.prompt_queue, episodes=server.episodes, rounds=ledger)
        generating = asyncio.create_task(generation.run(), name="generate")
        await server.start()
        prompt = [{"role": "user", "content": "go"}]
        await pool.put([Task(task_id=f"task-{i}", prompt=prompt) for i in range(settings.episodes)])
        leased = [await server.lease_episode(wait_s=60.0) for _ in range(settings.episodes)]
        _announce(
            settings,
            [lease.api_key for lease in leased if lease is not None],
            urls={lease.api_key: lease.base_url for lease in leased if lease is not None and settings.processes > 1},
        )
        await asyncio.to_thread(sys.stdin.read)
        await server.close()
        await asyncio.wait({generating})
        if keeping is not None:
            keeping.cancel()
            await asyncio.wait({keeping})
            await engine.close()


def _processes(settings: Settings, *, keys: KeyRing, ledger: Ledger) -> ServerProcesses:
    own = _engine_settings(settings, port=0, processes=settings.processes)
    return ServerProcesses(own, keys=keys, rounds=ledger.rounds)


def _engine(settings: Settings, vllm_config: Any, *, decode: Any) -> Any:
    if settings.engine:
        members: list[Any] = [VLLMEngine(vllm_config, name=f"e{number}") for number in range(settings.engines)]
        return EngineFleet(members, record_death=lambda *_: None)
    word, token_s = decode([WORD_ID]), settings.token_ms / 1000
    members = [PacedEngine(name=f"e{number}", token_s=token_s, word=word) for number in range(settings.paced or 1)]
    return EngineFleet(members) if settings.paced or settings.in_fleet else members[0]


async def serve_vllm(settings: Settings) -> None:
    """vLLM's own server; its engine is replaced where it shall do nothing."""
    from vllm.entrypoints.launchers.api_server import entry

    args = vllm_arguments(settings)
    if not settings.engine:

        @asynccontextmanager
        async def no_engine(*_: Any, **__: Any) -> AsyncIterator[NoEngineClient]:
            yield NoEngineClient(make_vllm_config(args), token_ms=settings.token_ms)

        entry.build_async_engine_client = no_engine
    serving = asyncio.create_task(entry.run_server(args))
    await asyncio.to_thread(_wait_for_health, settings.port)
    _announce(settings, ["EMPTY"] * settings.episodes)
    threading.Thread(
        target=lambda: (sys.stdin.read(), os.kill(os.getpid(), signal.SIGTERM)), name="end", daemon=True
    ).start()
    await serving


def _wait_for_health(port: int) -> None:
    import time
    from urllib.error import URLError
    from urllib.request import urlopen

    while True:
        try:
            urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
            return
        except (URLError, OSError):
            time.sleep(0.1)


def _announce(settings: Settings, keys: list[str], *, urls: dict[str, str] | None = None) -> None:
    told = {"base_url": f"http://127.0.0.1:{settings.port}", "keys": keys, "urls": urls or {}}
    print(json.dumps(told), flush=True)


def main() -> None:
    kind, settings = sys.argv[1], Settings(**json.loads(sys.argv[2]))
    set_process_environment()
    import uvloop

    uvloop.run((serve_understudy if kind == "understudy" else serve_vllm)(settings))


if __name__ == "__main__":
    main()
