"""The inference engine: vLLM's AsyncLLM, its configuration, and weight updates in flight.

Called by the pipeline (start, load_weights, close) and by `mocked_server.generation` (generate). All that this project asks of
vLLM's engine is here, and vLLM's HTTP layer is in `serving.py`; nothing else imports vllm. Supported: vllm >= 0.32, <
0.34 (0.32 is the first that labels tokens with weight versions).

Invariant: weights change only between `pause(keep)` and `resume`, with the KV cache cleared, so each token's recorded
log-probability is reproducible from the one version that it is labelled with.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import signal
import tempfile
import time
from argparse import Namespace
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from buffers.errors import EngineDied, EngineError, RequestRefused
from configs.schema import RolloutConfig, ServerConfig
from mocked_server.vllm import fork_server
from mocked_server.vllm.adapters import PolicyAdapters, is_adapter, lora_words
from mocked_server.vllm.engine_silence import EngineSilence
from mocked_server.vllm.fork_server import engines_of_ours

logger = logging.getLogger(__name__)

NUMBERS_ONLY = "numbers_only"
"""Key in a request's `extra_args`: its log-probabilities need no texts."""
MAX_MESSAGE_CHARS = 600
"""Most characters of vLLM's errors: some repeat the value that they refuse."""
LOOK_S = 0.1
"""Seconds between looks at whether the engine lives."""
CPU_KV_CACHE_GB = 0.25
GPU_SHARE = 0.4
"""Share of a card's memory, which the engine shares with the learner."""
_BY_SIGNAL = re.compile(r"Failed core proc.*: -\d")
"""vLLM names exit codes: a negative one is the signal that ended the process."""
WORKER_EXTENSION = "mocked_server.vllm.worker_extension.WorkerExtension"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What the engine and vLLM's HTTP layer are built from."""

    model_path: Path
    served_name: str
    """The model's name in the API."""
    dtype: str
    rollout: RolloutConfig
    server: ServerConfig
    seed: int = 0
    max_num_seqs: int = 64
    """Generations that run in one engine step."""
    lora_rank: int = 0
    """Rank of the adapters that are loaded as versions of the policy; 0: whole weights are."""
    kept_versions: int = 1
    """Adapters that are kept for the generations that began under them."""


def set_process_environment() -> None:
    """Set the process environment that vLLM needs, on CPU above all; called before vllm is imported.

    Its processes, all on this machine, meet on loopback: without a name gloo takes the address of the machine's. One OpenMP
    thread is several times faster than two for small models; compiling the sampler would need a C++ compiler on the user's
    machine; the in-process executor saves a second spawned worker (7 s of start-up) and half of the per-step cost.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("VLLM_XGRAMMAR_CACHE_MB", "64")  # compiled grammars, of which agents may send ever new ones
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "0"  # nothing that arrives at the engine is unpickled
    if has_gpu():
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def import_engine() -> None:
    """All that an engine and its server import, which takes seconds."""
    set_process_environment()
    import vllm.entrypoints.openai.api_server
    import vllm.v1.engine.async_llm
    import vllm.v1.engine.core  # noqa: F401


def start_fork_server() -> None:
    """Engines of this process start in a quarter of the time afterwards. Called by its main thread before it has others."""
    import_engine()
    if not has_gpu():  # CUDA may not be forked
        with interrupts_blocked():
            fork_server.start()


def make_args(settings: EngineSettings) -> Namespace:
    """vLLM's own server arguments, parsed by vLLM's own parser."""
    from vllm.entrypoints.cli.serve import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    rollout = settings.rollout
    words = [
        "--model",
        str(settings.model_path),
        "--served-model-name",
        settings.served_name,
        "--dtype",
        settings.dtype,
    ]
    words += ["--max-model-len", str(rollout.max_model_len), "--max-num-seqs", str(settings.max_num_seqs)]
    words += ["--seed", str(settings.seed), "--worker-extension-cls", WORKER_EXTENSION]
    # Behaviour log-probabilities are those of the distribution that was sampled from (after the temperature).
    words += ["--logprobs-mode", "processed_logprobs"]
    # Without this the model folder's generation_config.json silently changes temperature and top-p.
    words += ["--generation-config", "vllm", "--disable-log-stats", "--no-use-tqdm-on-load"]
    words += ["--gpu-memory-utilization", str(GPU_SHARE)]
    if settings.server.tool_parser:
        words += ["--enable-auto-tool-choice", "--tool-call-parser", settings.server.tool_parser]
    if settings.server.reasoning_parser:
        words += ["--reasoning-parser", settings.server.reasoning_parser]
    kv_cache_gb = rollout.kv_cache_gb
    if not has_gpu():
        words += ["--enforce-eager", "--distributed-executor-backend", "uni"]
        kv_cache_gb = kv_cache_gb or CPU_KV_CACHE_GB
    elif rollout.sleep:
        words += ["--enable-sleep-mode"]
    if settings.lora_rank:
        words += lora_words(rank=settings.lora_rank, kept=settings.kept_versions)
    if kv_cache_gb is not None:
        words += ["--kv-cache-memory-bytes", str(int(kv_cache_gb * 2**30))]
    args: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    validate_parsed_serve_args(args)
    return args


def make_vllm_config(args: Namespace) -> Any:
    """The engine's configuration, for the engine and for the HTTP layer in front of it."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    return AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Processes started inside (by this thread) never receive Ctrl-C of the terminal: it is this process that stops them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class VLLMEngine:
    """One engine. Lifecycle: `start` (3 s forked, else 8 to 15) -> generate / load_weights -> `close`; `restart` after
    it died."""

    def __init__(
        self,
        vllm_config: Any,
        *,
        count_preemptions: bool = False,
        weights: tuple[Path, int] | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        """`count_preemptions`: outputs say how often their request was set aside; costs a few percent of the engine's time.
        `weights`: (folder, version) to begin with, instead of the model's own as version 0. `timeout_s`: see
        `configs.schema.RolloutConfig.engine_timeout_s`."""
        self._vllm_config = vllm_config
        self._count_preemptions = count_preemptions
        self._llm: Any = None
        self._sockets: Path | None = None
        self._processes: list[BaseProcess] = []
        """What the last boot has started, or is starting."""
        self._up = asyncio.Event()
        self._weights = weights
        """(folder, version) that it has, or is to have once it is back."""
        self.is_supervised = False
        """It is restarted when it dies."""
        self.version = 0
        lora = vllm_config.lora_config
        self._adapters = PolicyAdapters(kept=1 if lora is None else lora.max_loras - 1)
        self._paused_s = 0.0
        """What the last load took."""
        self.life = 0
        self._silence = EngineSilence(timeout_s)
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Boot the engine process; raises EngineError when it does not come up."""
        self.life += 1
        booting = asyncio.create_task(asyncio.to_thread(self._boot), name="boot the engine")
        try:
            await asyncio.shield(booting)
        except asyncio.CancelledError:
            await self._give_up(booting)
            raise
        if not await self._while_alive(self._prepare()):
            raise EngineDied("the engine process died while it started; see its own log")
        self._up.set()
        self._watching = asyncio.create_task(self._kill_when_deaf(self._llm), name="watch the engine's silence")

    async def _kill_when_deaf(self, llm: Any) -> None:
        """An engine that answers nothing, not even the question whether it sleeps, is killed: then it is a dead one as others."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            await self._silence.lasting(llm.is_sleeping)
        except EngineDeadError:
            return  # what waits for it has the error already
        logger.error(
            "the engine gave no sign of life for %.0f s with requests waiting: it is killed", self._silence.timeout_s
        )
        for process in llm.engine_core.resources.engine_manager.processes:
            process.kill()

    async def _give_up(self, booting: asyncio.Task[None]) -> None:
        """A thread cannot be cancelled; but vLLM waits no longer for an engine whose process has ended."""
        while not booting.done():
            for process in self._processes:
                if process.pid is not None:
                    process.kill()
            await asyncio.wait({booting}, timeout=LOOK_S)
        if (error := booting.exception()) is not None:
            logger.info("the engine's start was given up: %s", error)

    async def _prepare(self) -> None:
        if self._weights is not None:
            await self._load(*self._weights)
        await self._llm.update_weight_version(str(self.version))
        # vLLM keeps the answer: else the first request would ask, and wait without end if the engine died then.
        await self._llm.get_supported_tasks()

    async def restart(self) -> None:
        """Start a new process in place of the dead one, with the weights that were loaded last; their folder must still be
        there. What waits in `load_weights` and `wait_restarted` continues. Raises as `start`."""
        self._up.clear()
        await self.close()
        await self.start()

    async def wait_restarted(self) -> bool:
        """Wait until an engine that died runs again; False when it is not restarted."""
        if self.is_supervised:
            if self.dead:
                self._up.clear()
            await self._up.wait()
        return self.is_supervised

    async def until_dead(self) -> None:
        """Wait until the engine's present process is gone, or replaced."""
        await self._until_gone(self._llm)

    async def _until_gone(self, llm: Any) -> None:
        while True:
            if self._gone(llm):
                return
            await asyncio.sleep(LOOK_S)

    def _gone(self, llm: Any) -> bool:
        return self._llm is not llm or self.dead

    async def _while_alive(self, work: Coroutine[Any, Any, object]) -> bool:
        """Whether it was done before the engine died: vLLM never answers a call whose engine dies meanwhile."""
        llm = self._llm
        working, death = asyncio.ensure_future(work), asyncio.ensure_future(self._until_gone(llm))
        try:
            await asyncio.wait({working, death}, return_when=asyncio.FIRST_COMPLETED)
            if self._gone(llm):
                return False
            working.result()
            return True
        finally:
            for task in (working, death):
                task.cancel()
            await asyncio.gather(working, death, return_exceptions=True)

    def _boot(self) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM

        _numbers_only_where_asked()
        self._sockets = Path(tempfile.mkdtemp(prefix="understudy-engine-", dir=_folder_for_sockets()))
        try:
            with interrupts_blocked(), engines_of_ours() as self._processes, _sockets_in(self._sockets):
                self._llm = AsyncLLM.from_vllm_config(
                    self._vllm_config,
                    disable_log_stats=True,
                    stat_loggers=[_silent_logger()] if self._count_preemptions else None,
                )
        except (RuntimeError, OSError, ValueError) as error:
            kind = EngineDied if _BY_SIGNAL.search(str(error)) else EngineError
            raise kind(
                f"the engine did not start: {error}; its own log is above (VLLM_LOGGING_LEVEL=INFO shows more)"
            ) from error

    async def generate(
        self, prompt_token_ids: list[int], params: Any, *, request_id: str, **extra: Any
    ) -> AsyncGenerator[Any, None]:
        """Yield vLLM's RequestOutputs for exactly these prompt ids; closing the iterator aborts the request."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        await self._up.wait()
        try:
            with self._silence.expecting(), self._adapters.newest(params) as (adapter, labels):
                outputs = self._llm.generate(tokens_input(prompt_token_ids), params, request_id, **extra, **adapter)
                async with aclosing(outputs) as outputs:
                    async for output in outputs:
                        self._silence.heard()
                        labels.put_on(output)
                        yield output
        except EngineDeadError as error:
            raise EngineError(f"the engine died while it answered request {request_id}") from error
        except VLLMClientError as error:
            raise refusal_of(error) from error
        except EngineGenerateError as error:
            if isinstance(error.__cause__, ValueError | TypeError | OverflowError):
                raise refusal_of(error.__cause__) from error
            raise

    async def load_weights(self, folder: Path, *, version: int) -> float:
        """Swap in the weights of `folder` as `version`. Running requests freeze and continue; none is dropped. Returns the
        seconds for which they froze. Of an adapter nothing freezes: requests that come afterwards begin with it.

        The KV cache is cleared: what stays in flight is recomputed under the new weights, as its next tokens are. An engine
        that is down gets them when it is back.
        """
        self._weights = folder, version
        while not (self._up.is_set() and await self._while_alive(self._load(folder, version))):
            if not await self.wait_restarted():
                raise EngineError(f"the engine died while it loaded the weights of version {version}")
        return self._paused_s

    async def _load(self, folder: Path, version: int) -> None:
        llm, began = self._llm, time.monotonic()
        if is_adapter(folder):
            with self._silence.expecting():
                self._paused_s = await self._adapters.load(llm, folder, version=version)
            self.version = version
            return
        with self._silence.expecting():
            await _freeze(llm)
            # A load that fails leaves it frozen: nothing is sampled from weights that are half loaded.
            with self._silence.long_work():
                await llm.collective_rpc("load_published", args=(str(folder),))
            await llm.update_weight_version(str(version))
            self.version = version
            await llm.resume_generation()
        self._paused_s = time.monotonic() - began

    async def sleep(self) -> None:
        """Give memory back: vLLM's sleep level 1 with `rollout.sleep` on a GPU, where running requests freeze until `wake_up`;
        elsewhere the prefix cache. An engine that dies meanwhile has none left."""
        await self._up.wait()
        llm = self._llm
        await self._while_alive(llm.sleep(level=1, mode="keep") if self._may_sleep else llm.reset_prefix_cache())

    async def wake_up(self) -> None:
        """Undo `sleep`. No effect on an engine that is awake."""
        await self._up.wait()
        if self._may_sleep:
            await self._while_alive(self._llm.wake_up())

    @property
    def _may_sleep(self) -> bool:
        return bool(self._vllm_config.model_config.enable_sleep_mode)

    @property
    def dead(self) -> bool:
        """True once the engine process is gone."""
        return self._llm is not None and bool(self._llm.errored)

    async def close(self) -> None:
        """Stop the engine process and wait for it; what it was still answering ends with EngineError."""
        from vllm.v1.engine.exceptions import EngineDeadError

        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
        if self._llm is not None:
            if (
                listening := self._llm.output_handler
            ) is not None:  # else it reports the end of the process as an error
                listening.cancel()
                await asyncio.wait({listening})
                self._llm.output_processor.propagate_error(EngineDeadError())  # it may not have come to that
            # On a CPU it has nothing to give back: no need to wait a second for its own end.
            await asyncio.to_thread(self._llm.shutdown, None if has_gpu() else 0.0)
            self._llm = None
        if self._sockets is not None:
            shutil.rmtree(self._sockets, ignore_errors=True)


async def _freeze(llm: Any) -> None:
    """vLLM's `pause_generation(mode="keep", clear_cache=True)` but for its last line, which sleeps 20 ms so that outputs on their
    way arrive first: they are labelled in the engine, so their order does not matter."""
    await llm.renderer.clear_mm_cache_async()
    await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)


def _folder_for_sockets() -> str:
    """The folder for temporary files, or /tmp where its name is too long for the path of a Unix socket (107 bytes)."""
    folder = tempfile.gettempdir()
    return folder if len(folder) <= 40 else "/tmp"


@contextmanager
def _sockets_in(folder: Path) -> Iterator[None]:
    """vLLM's processes meet in this folder, which no other user can enter. By itself vLLM leaves two sockets at each start in the
    folder for temporary files."""
    from vllm import envs

    envs.VLLM_RPC_BASE_PATH = str(folder)
    try:
        yield
    finally:
        del envs.VLLM_RPC_BASE_PATH  # vLLM's own value is there again


def refusal_of(error: Exception) -> RequestRefused:
    """An error of vLLM's about one request, as ours: at most a few hundred characters of it, and its field."""
    text = str(error) or type(error).__name__
    return RequestRefused(text[:MAX_MESSAGE_CHARS], field=getattr(error, "parameter", None))


def _silent_logger() -> Any:
    """A logger that logs nothing: with a logger of any kind vLLM keeps statistics of each request."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class SilentLogger(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...
        def record(self, *_: Any, **__: Any) -> None: ...
        def log_engine_initialized(self) -> None: ...

    return SilentLogger


def _numbers_only_where_asked() -> None:
    """vLLM decodes every sampled token once more for its entry in the log-probabilities. Requests with NUMBERS_ONLY in their
    `extra_args` do without: those texts are not read, and they are a tenth of this process's time."""
    from vllm.v1.engine.logprobs import LogprobsProcessor

    original = LogprobsProcessor.from_new_request
    if getattr(original, "__name__", "") == "from_new_request_numbers_only":
        return

    def from_new_request_numbers_only(cls: Any, tokenizer: Any, request: Any) -> Any:
        quiet = NUMBERS_ONLY in (request.sampling_params.extra_args or {})
        return original(None if quiet else tokenizer, request)

    LogprobsProcessor.from_new_request = classmethod(from_new_request_numbers_only)


def has_gpu() -> bool:
    """Whether there is a GPU. This does not start CUDA, so that the caller may fork later."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    return bool(torch.cuda.is_available())
