"""Which engines a run has, by `rollout.engine`: vLLM's in processes of its own, SGLang's servers, or a server that runs already.

Called by `learner.pipeline` (`make_engines`) and, before anything starts, by `learner.run` (`check_engine`). Invariant: a server
that cannot be the run's engine is refused in one line by `check_engine`, with nothing written or started.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from buffers.errors import EngineError
from configs.rules import is_url
from configs.schema import Config
from mocked_server.fleet.member import FleetEngine
from mocked_server.servers.http_client import KEY, Needs, ServerClient, ServerLost, ServerRefused
from mocked_server.servers.server_engine import RunningServer, ServerEngine, examined, nobody_answers
from mocked_server.servers.sglang_server import SGLangProcess
from mocked_server.vllm.engine import VLLMEngine
from mocked_server.vllm.engine_arguments import set_process_environment
from mocked_server.vllm.engine_requests import ServedRequests

MAX_CHECK_S = 60.0


def check_engine(config: Config, *, vocabulary: int, learns: bool) -> None:
    """Raises EngineError for an engine that is not there or cannot be used. `vocabulary`: of the model; `learns`: the run has a
    learner."""
    engine = config.rollout.engine
    if engine == "sglang":
        if importlib.util.find_spec("sglang") is None:
            raise EngineError(
                f"{KEY}=sglang needs the package sglang, which {sys.executable} does not have; install it (`pip install sglang`), "
                f"or set {KEY}=vllm"
            )
    elif is_url(engine):
        set_process_environment()
        asyncio.run(_check_running(engine, _needs(config, vocabulary=vocabulary, learns=learns)))


async def _check_running(url: str, needs: Needs) -> None:
    client = ServerClient(url)
    try:
        async with asyncio.timeout(MAX_CHECK_S):
            await examined(client, needs=needs)
    except (ServerLost, TimeoutError) as error:
        raise EngineError(nobody_answers(url, error)) from error
    except ServerRefused as error:
        raise EngineError(f"{KEY}={url} cannot be used, it answered {error}") from error
    finally:
        await client.close()


def _needs(config: Config, *, vocabulary: int, learns: bool) -> Needs:
    rollout = config.rollout
    return Needs(
        max_model_len=rollout.max_model_len,
        vocabulary=vocabulary,
        temperature=rollout.temperature,
        dtype=config.model.dtype,
        learns=learns,
    )


def make_engines(
    config: Config,
    vllm_config: Any,
    *,
    devices: Mapping[str, Sequence[str]],
    learns: bool,
    folder: Path,
    count_preemptions: bool,
    weights: tuple[Path, int] | None,
) -> list[FleetEngine]:
    """The engines of a run. `vllm_config`: of the model; `devices`: the cards of each engine, by its name; `folder`: the run's, for
    the logs of servers that it starts; the rest: see `VLLMEngine`."""
    rollout = config.rollout
    if rollout.engine == "vllm":
        return [
            VLLMEngine(
                vllm_config,
                name=name,
                count_preemptions=count_preemptions,
                weights=weights,
                timeout_s=rollout.engine_timeout_s,
                devices=cards,
            )
            for name, cards in devices.items()
        ]
    model_config = vllm_config.model_config
    needs = _needs(config, vocabulary=model_config.get_vocab_size(), learns=learns)
    model = Path(model_config.model)
    if is_url(rollout.engine):
        places: list[RunningServer | SGLangProcess] = [
            RunningServer(rollout.engine, timeout_s=rollout.engine_timeout_s)
        ]
    else:
        places = [
            SGLangProcess(config, model=model, devices=cards, log=folder / f"sglang-{name}.log")
            for name, cards in devices.items()
        ]
    return [
        ServerEngine(
            place,
            ServedRequests(vllm_config),
            model=model,
            needs=needs,
            weights=weights,
            timeout_s=rollout.engine_timeout_s,
            name=name,
        )
        for name, place in zip(devices, places)
    ]
