"""The server that `tests.fuzz.real_engine` attacks, put together as a run does it: engine, its keeper, generate loop,
pool, ledger.

    python tests/fuzz/server_program.py MODEL CHANNEL     its nursery

A process that plays `serve` tells when it is ready, each death of its engine, and the end of its loops, after which it waits to be
killed: what it told is there. SIGTERM ends it as Ctrl-C ends a run; a failure on the way is its exit status.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys
import threading
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from buffers.ledger.ledger import Ledger
from buffers.multi_round import MultiRoundBufferDataset
from buffers.records import Task
from buffers.tasks.task_pool import TaskPool
from configs.schema import RolloutConfig, ServerConfig
from learner.recovery.restarts import RestartLimit
from mocked_server.fleet.engine_fleet import EngineFleet
from mocked_server.generation import Generation
from mocked_server.http import uvicorn_server
from mocked_server.keys import KeyRing, make_secret
from mocked_server.server import MockedServer
from mocked_server.vllm.engine import VLLMEngine, import_engine, start_fork_server
from mocked_server.vllm.engine_arguments import EngineSettings, make_args, make_vllm_config, set_process_environment
from tests.support.processes.forked_children import Channel, raise_children

ROLLOUT = RolloutConfig(max_tokens=8, max_model_len=512, kv_cache_gb=0.0625)
SERVER = ServerConfig(tool_parser="hermes", reasoning_parser="qwen3")
DEADLINE_S = 1e6
"""Of an episode: the attacker's lasts until its successor is leased."""
RECEIVE_S = 10.0
"""A test waits until slow clients are cut off."""
MAX_TOLD = 1500
"""Characters of an error: a line to the test has a limit."""


class ToldRestartLimit(RestartLimit):
    """Those of a run, each of which the test is told."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def record(self, part: str, error: Exception) -> None:
        """As ever; a mended engine is a death all the same."""
        self._channel.tell(died=part, why=str(error)[:MAX_TOLD])
        super().record(part, error)


def serve(channel: Channel, *, model: str, folder: str) -> None:
    """Serve until the test ends it."""
    uvicorn_server.RECEIVE_S = RECEIVE_S
    threading.excepthook = threading.__excepthook__  # a thread of the engine that dies leaves it deaf, as in a run
    start_fork_server()
    asyncio.run(_serve(channel, model=Path(model), folder=Path(folder)))


async def _serve(channel: Channel, *, model: Path, folder: Path) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    restart_limit = ToldRestartLimit(channel)
    async with _parts(model, folder=folder, restart_limit=restart_limit) as (engine, server, generation):
        channel.tell(ready=server.base_url)
        try:
            async with asyncio.TaskGroup() as loops:
                started = [
                    loops.create_task(server.wait(), name="serve"),
                    loops.create_task(generation.run(), name="generate"),
                    loops.create_task(engine.run(), name="keep the engine"),
                ]
                asked = asyncio.create_task(stop.wait())
                await asyncio.wait({asked, *started}, return_when=asyncio.FIRST_COMPLETED)
                if not stop.is_set():
                    channel.tell(ended_loop=next(task.get_name() for task in started if task.done()), why="")
                    await stop.wait()
                for task in started:
                    task.cancel()
        except Exception as error:
            traceback.print_exc()
            channel.tell(ended_loop="run", why=_first_cause(error)[:MAX_TOLD])
            await stop.wait()


def _first_cause(error: BaseException) -> str:
    """The error that ended the first loop, and where it came from."""
    while isinstance(error, BaseExceptionGroup) or error.__cause__ is not None:
        error = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__ or error
    frames = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" at {Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames)
    return f"{type(error).__name__}: {str(error)[:300]}{where}"


@asynccontextmanager
async def _parts(
    model: Path, *, folder: Path, restart_limit: RestartLimit
) -> AsyncIterator[tuple[EngineFleet, MockedServer, Generation]]:
    """As `learner.pipeline` puts them together."""
    settings = EngineSettings(model_path=model, served_name="policy", dtype="float32", rollout=ROLLOUT, server=SERVER)
    args = make_args(settings)
    vllm_config = make_vllm_config(args)
    engine = EngineFleet(
        [VLLMEngine(vllm_config)], record_death=lambda name, error: restart_limit.record("engine", error, name=name)
    )
    await engine.start()
    ledger = Ledger(folder / "ledger.sqlite", resume_episodes=True)
    pool = TaskPool(
        ledger, group_size=1, groups_per_step=1, max_policy_lag=None, max_running=1024, deadline_s=DEADLINE_S,
        max_attempts=1,
    )  # fmt: skip
    question = [{"role": "user", "content": "Where?"}]
    pool.add_source(Task(task_id=f"fuzz:{number}", prompt=question) for number in itertools.count())
    server = MockedServer(
        args=args, vllm_config=vllm_config, rollout=ROLLOUT, server=SERVER, pool=pool,
        notify_score_fn=MultiRoundBufferDataset(ledger).notify_score, keys=KeyRing(make_secret(folder / "server.key")),
    )  # fmt: skip
    server.attach_engine(engine)
    generation = Generation(engine, queue=server.prompt_queue, episodes=server.episodes, rounds=ledger)
    server.on_ended = generation.forget
    await server.start()
    try:
        yield engine, server, generation
    finally:
        await server.close()
        await engine.close()
        ledger.close()


def main() -> None:
    set_process_environment()
    model, channel = sys.argv[1:]
    import_engine()
    roles: dict[str, Any] = {"serve": partial(serve, model=model)}
    raise_children(roles, channel=int(channel))


if __name__ == "__main__":
    main()
