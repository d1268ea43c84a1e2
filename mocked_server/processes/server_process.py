"""One further process of the server: vLLM's HTTP layer, and the episodes that this process owns.

Made by `server_processes`, in a process of its own (`buffers.remote.actor`). It has its own tokenizer, parsers, live episodes and
answers kept for retries; what is generated, recorded, leased and scored is the run's (`run_link`,
`mocked_server.http.attribution`). Invariants: an episode is served here only if its key names this process, and from its first
request on until the run says that it ended; what is not this process's is passed on.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.types import ASGIApp

from buffers.errors import UnknownEpisode
from buffers.wire.connection import Connection
from mocked_server.conversation.live_episodes import Episodes, LiveEpisode
from mocked_server.http.attribution import OPEN_TO_WORKERS, Attribution, Forward
from mocked_server.http.gemini_routes import GeminiRoutes
from mocked_server.http.model_requests import ModelRequests
from mocked_server.http.uvicorn_server import HttpService
from mocked_server.keys import KeyRing, process_secret
from mocked_server.processes.prompt_host import Figures
from mocked_server.processes.run_link import RunLink
from mocked_server.vllm.engine_arguments import EngineSettings, make_args, make_vllm_config, set_process_environment
from mocked_server.vllm.hosted.outputs import VLLMCodec
from mocked_server.vllm.serving import QueueClient, build_serving_app

ASKED_HEADER = b"x-server-process"
"""Says to the run which server process was asked for a task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """Settings of a server process. `urls`: the root of each, the run's own first; `process`: which of them this is."""

    engine: EngineSettings
    secret: bytes
    """The run's: keys are made of it."""
    run: str
    """The run's address on the wire."""
    process: int
    urls: list[str]


class ServerProcess:
    """See the module. `sock`: it listens already."""

    def __init__(self, settings: ProcessSettings, *, sock: socket.socket) -> None:
        self._settings = settings
        self._sock = sock
        self._keys = KeyRing(settings.secret)
        self.episodes = Episodes()
        self._asked: dict[str, asyncio.Future[LiveEpisode]] = {}
        """Episodes that the run is asked for."""
        own = (ASKED_HEADER, str(settings.process).encode())
        self._forwards = [Forward(url, headers=[own]) for url in settings.urls]
        self._http: HttpService | None = None
        self._link: RunLink | None = None
        self._told: Counter[str] = Counter()
        """Refusals that the run knows of."""

    async def start(self) -> None:
        """Serve; returns when requests are answered. Raises WireError, ServerError."""
        set_process_environment()
        settings = self._settings
        connection = await asyncio.to_thread(Connection, settings.run, secret=process_secret(settings.secret))
        args = await asyncio.to_thread(make_args, settings.engine)
        vllm_config = await asyncio.to_thread(make_vllm_config, args)
        self._link = link = RunLink(
            connection, VLLMCodec(), process=settings.process, on_closed=self.episodes.close, figures=self._figures
        )
        strict = settings.engine.server.replay_match == "strict"
        self._client = QueueClient(vllm_config, queue=link, rollout=settings.engine.rollout, strict=strict)
        self._models = ModelRequests(GeminiRoutes(await build_serving_app(args, self._client)))
        app = Attribution(
            self._models,
            others=self._forwards[0],
            keys=self._keys,
            episodes=self.episodes,
            is_full=lambda: link.is_full,
            elsewhere=self._elsewhere,
            find=self._find,
        )
        http = HttpService(app, sockets=[self._sock])
        await http.start()
        self._http = http

    async def until_lost(self) -> str:
        """Why it cannot serve any more, once that is so."""
        assert self._link is not None, "start() first"
        return await self._link.until_lost()

    async def close(self) -> None:
        """End open connections."""
        if self._http is not None:
            await self._http.close()
        for forward in self._forwards:
            await forward.close()
        if self._link is not None:
            await self._link.close()

    def _elsewhere(self, key: str, path: str) -> ASGIApp | None:
        owned = self._keys.owned_by(key)
        if owned is None:
            return self._forwards[0] if path in OPEN_TO_WORKERS else None
        process = owned.process % len(self._forwards)
        return None if process == self._settings.process else self._forwards[process]

    async def _find(self, episode_id: str) -> LiveEpisode:
        """The episode, which the run gives at its first request here. Raises EpisodeClosed, UnknownEpisode, EngineError."""
        try:
            return self.episodes.get(episode_id)
        except UnknownEpisode:
            asked = self._asked.get(episode_id)
        if asked is None:
            asked = self._asked[episode_id] = asyncio.ensure_future(self._adopt(episode_id))
            asked.add_done_callback(lambda _: self._asked.pop(episode_id, None))
        return await asyncio.shield(asked)

    async def _adopt(self, episode_id: str) -> LiveEpisode:
        assert self._link is not None, "start() first"
        episode, rounds = await self._link.adopt(episode_id)
        with suppress(UnknownEpisode):
            return self.episodes.get(episode_id)  # raises EpisodeClosed where the news of its end came at once
        live = self.episodes.open(episode, worker="")
        decode: Any = partial(self._client.renderer.get_tokenizer().decode, skip_special_tokens=True)
        live.restore(rounds, decode=decode)
        return live

    def _figures(self) -> Figures | None:
        """None: it does not serve yet, and what it imports may keep it from saying anything."""
        if self._http is None:
            return None
        new = self._models.refused - self._told
        self._told += new
        return Figures(
            episodes_open=len(self.episodes),
            requests=self._models.count,
            forwarded=sum(forward.count for forward in self._forwards),
            refused=dict(new),
            cpu_s=time.process_time(),
        )
