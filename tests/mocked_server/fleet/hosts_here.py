"""Hosts of engines for tests: one in this process around an engine that runs already, and settings for real ones."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from buffers.wire.address import Way
from configs.schema import RolloutConfig, ServerConfig
from mocked_server.vllm.engine_arguments import EngineSettings
from mocked_server.vllm.hosted.engine_host import EngineHost
from mocked_server.vllm.hosted.program import HostSettings
from tests.support.served_models import MAX_MODEL_LEN

SECRET = b"s" * 32


class Started:
    """An engine whose process belongs to others: it is neither started nor ended by a host."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def start(self) -> None: ...
    async def restart(self) -> None: ...
    async def close(self) -> None: ...


class HostHere:
    """A `HostProcess` in this process."""

    def __init__(self, engine: Any, codec: Any, *, way: Way = Way.LOCAL) -> None:
        self._parts = engine, codec, way
        self.host: EngineHost | None = None

    async def start(self) -> str:
        engine, codec, way = self._parts
        self.host = EngineHost(engine, codec, secret=SECRET, way=way)
        self.host.listen(asyncio.get_running_loop())
        return str(self.host.address)

    async def end(self) -> None:
        host, self.host = self.host, None
        if host is not None:
            await host.aclose()


def host_settings(model: Path, **more: Any) -> HostSettings:
    """A host of the tiny model."""
    engine = EngineSettings(
        model_path=model,
        served_name="policy",
        dtype="float32",
        rollout=RolloutConfig(max_tokens=256, max_model_len=MAX_MODEL_LEN, kv_cache_gb=0.0625),
        server=ServerConfig(),
    )
    return HostSettings(engine=engine, secret=SECRET, **more)
