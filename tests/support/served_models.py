"""Inference servers for tests: vLLM's own, in a process of its own on this machine's CPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from configs.schema import RolloutConfig, ServerConfig
from mocked_server.vllm.engine_arguments import WORKER_EXTENSION, EngineSettings, make_args, make_vllm_config
from tests.support.ports import held_port
from tests.support.processes import warm_runs

ROOT = Path(__file__).parents[2]
START_S = 300.0
"""Beside other work on two cores; alone it takes 15 s."""
MAX_MODEL_LEN = 16_384
"""Tokens that an engine of the tests takes."""
ENDLESS = MAX_MODEL_LEN - 100
"""Tokens of an answer that is to be interrupted: it is under way for many seconds, on a quick machine too."""
LONG = 4000
"""Tokens of an answer in whose midst something happens, and which is then read to its end: it is under way for seconds."""


@dataclass
class Served:
    """A started server."""

    url: str
    process: subprocess.Popen[bytes] | warm_runs.ForkedProgram
    log: Path

    def kill(self) -> None:
        """End it and all of its processes at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def wait(self) -> None:
        """Until it takes requests."""
        until = time.monotonic() + START_S
        while True:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", trust_env=False).status_code == 200:
                    return
            assert self.process.poll() is None, self.log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < until, f"{self.url} must answer within {START_S:.0f} s"
            time.sleep(0.2)


def start_vllm(
    model: Path, *, log: Path, port: int = 0, words: Sequence[str] = (), dev: bool = True, imports: bool = False
) -> Served:
    """vLLM's server with the model; it may not answer yet. `dev`: it takes weights. `imports`: it is started by its command line
    and imports vLLM, twice, which takes 40 s of a core; else it is forked of a process that has."""
    port = port or held_port()
    arguments = ["--model", str(model), "--served-model-name", "policy", "--dtype", "float32", "--host", "127.0.0.1"]
    arguments += ["--port", str(port), "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "64"]
    arguments += ["--kv-cache-memory-bytes", str(2**26), "--logprobs-mode", "processed_logprobs", "--enable-scale-out"]
    arguments += ["--enforce-eager", "--enable-prompt-tokens-details", "--distributed-executor-backend", "uni"]
    arguments += ["--worker-extension-cls", WORKER_EXTENSION, *words] if dev else words
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_SERVER_DEV_MODE": str(int(dev))}
    process: subprocess.Popen[bytes] | warm_runs.ForkedProgram
    with log.open("ab") as sink:
        if imports:
            command = [sys.executable, "-W", "ignore", "-m", warm_runs.VLLM_SERVER, *arguments]
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=sink, stderr=sink, start_new_session=True
            )
        else:
            process = warm_runs.start_vllm(arguments, folder=ROOT, environment=environment, sink=sink)
    return Served(f"http://127.0.0.1:{port}", process, log)


@contextmanager
def vllm_server(model: Path, *, log: Path, **more: Any) -> Iterator[Served]:
    """As `start_vllm`, from its first answer to its end."""
    served = start_vllm(model, log=log, **more)
    try:
        served.wait()
        yield served
    finally:
        served.kill()


def config_of(model: Path, **rollout: Any) -> Any:
    """vLLM's configuration of a model of these tests."""
    settings = EngineSettings(
        model_path=model,
        served_name="policy",
        dtype="float32",
        rollout=RolloutConfig(**{"max_tokens": 256, "max_model_len": 1024, **rollout}),
        server=ServerConfig(),
    )
    return make_vllm_config(make_args(settings))
