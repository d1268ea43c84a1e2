"""Inference servers for tests: vLLM's own, in a process of its own on this machine's CPU."""

from __future__ import annotations

import os
import signal
import socket
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

ROOT = Path(__file__).parents[2]
START_S = 300.0
"""Beside other work on two cores; alone it takes 15 s."""


@dataclass
class Served:
    """A started server."""

    url: str
    process: subprocess.Popen[bytes]
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


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def start_vllm(model: Path, *, log: Path, port: int = 0, words: Sequence[str] = (), dev: bool = True) -> Served:
    """vLLM's server with the model; it may not answer yet. `dev`: it takes weights."""
    port = port or free_port()
    command = [sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "policy", "--dtype", "float32", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-model-len", "1024", "--max-num-seqs", "64", "--kv-cache-memory-bytes", str(2**26)]
    command += ["--logprobs-mode", "processed_logprobs", "--enable-scale-out", "--enforce-eager"]
    command += ["--enable-prompt-tokens-details", "--distributed-executor-backend", "uni"]
    command += ["--worker-extension-cls", WORKER_EXTENSION] if dev else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_SERVER_DEV_MODE": str(int(dev))}
    with log.open("ab") as sink:
        process = subprocess.Popen(
            [*command, *words], cwd=ROOT, env=environment, stdout=sink, stderr=sink, start_new_session=True
        )
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
