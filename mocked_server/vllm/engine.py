"""The inference engine: vLLM's AsyncLLM, and weight updates in flight.

Called by the pipeline (start, load_weights, close) and by `mocked_server.generation` (generate). All that this project asks of
vLLM's engine is here, and vLLM's HTTP layer is in `serving.py`; nothing else imports vllm. Supported: vllm >= 0.32, <
0.34 (0.32 is the first that labels tokens with weight versions).

Invariant: weights change only between `pause(keep)` and `resume`, with the KV cache cleared, so each token's recorded
log-probability is reproducible from the one version that it is labelled with.
"""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from copy import copy
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from buffers.errors import EngineDied, EngineError
from configs import fork_server
from configs.child_processes import socket_folder
from configs.fork_server import imports_kept, interrupts_blocked
from mocked_server.fleet.member import ADAPTER_OF, EngineFigures, EngineLost, FleetEngine, Sampled, probe
from mocked_server.vllm import engine_requests
from mocked_server.vllm.adapters import PolicyAdapters, is_adapter
from mocked_server.vllm.engine_arguments import RECORDS_EXPERTS, has_gpu, set_process_environment
from mocked_server.vllm.engine_requests import continued, given_up, interrupted, never_began, refusal_of
from mocked_server.vllm.process.engine_health import (
    DEAF,
    STOPPED,
    TAKEN_DOWN,
    EngineEnding,
    EngineSilence,
    SchedulerStats,
    are_stopped,
    ending_of,
    oom_kills,
    processor_time,
)
from mocked_server.vllm.process.fork_server import engines_of_ours

logger = logging.getLogger(__name__)

LOOK_S = 0.1
"""Seconds between looks at whether the engine lives."""
READY_S = 20
"""Seconds for the last message of a start, which an engine has sent before it says that it has started. vLLM would wait 10 minutes
for it, also when the process was killed at that moment."""
ENDING_S = 5.0
"""Seconds in which an engine ends that was told to, and gave its requests up."""
_BY_SIGNAL = re.compile(r"Failed core proc.*: -\d")
"""vLLM names exit codes: a negative one is the signal that ended the process."""


IMPORTED = ("vllm.entrypoints.openai.api_server", "vllm.v1.engine.async_llm", "vllm.v1.engine.core")
"""Imports of an engine and its server, which take seconds."""
ON_A_CPU = ("vllm.v1.worker.cpu_worker", "vllm.model_executor.layers.quantization.online.base")
"""What an engine on a CPU imports when it has started: those that are forked have it then. Another version of vLLM may have other
ones, which an engine then imports itself."""


def import_engine() -> None:
    """Import what an engine needs."""
    set_process_environment()
    with imports_kept():
        for name in IMPORTED:
            import_module(name)
        for name in () if has_gpu() else ON_A_CPU:
            with suppress(ModuleNotFoundError):
                import_module(name)


def start_fork_server() -> None:
    """Engines of this process start in a quarter of the time afterwards. Called by its main thread before it has others."""
    import_engine()
    if not has_gpu():  # CUDA may not be forked
        fork_server.start()


class EngineBase(FleetEngine):
    """Lives and counts of an engine, and the continuation of what another one has sampled."""

    _generate: Callable[[list[int], Any, str, dict[str, Any]], AsyncGenerator[Any, None]]

    def __init__(self, name: str, *, timeout_s: float) -> None:
        """`name`: among the engines of a run. `timeout_s`: see `configs.schema.RolloutConfig.engine_timeout_s`."""
        self.name = name
        self.version = 0
        self._life = 0
        """Processes that it had."""
        self._totals: Counter[str] = Counter()
        self._silence = EngineSilence(timeout_s)
        self._watching: asyncio.Task[None] | None = None

    async def restart(self) -> None:
        """Start again in place of a process or server that is gone, with the weights that were loaded last; their folder must still
        be there. Raises as `start`."""
        await self.close()
        await self.start()

    async def _end_watching(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})

    def generate(
        self,
        prompt_token_ids: list[int],
        params: Any,
        *,
        request_id: str,
        sampled: Sequence[Sampled] = (),
        **extra: Any,
    ) -> AsyncGenerator[Any, None]:
        """Yield vLLM's RequestOutputs for exactly these prompt ids, after what another engine has `sampled`; closing the iterator
        aborts the request. Raises EngineLost when the engine is down, or dies meanwhile; RequestRefused for what it cannot do."""
        if sampled:
            return continued(
                self._generate, prompt_token_ids, params, request_id=request_id, sampled=sampled, extra=extra
            )
        return self._generate(prompt_token_ids, params, request_id, extra)

    def _count(self, output: Any) -> None:
        self._totals["sampled_tokens"] += sum(len(completion.token_ids) for completion in output.outputs)
        if output.finished:
            self._totals["prompt_tokens"] += len(output.prompt_token_ids or ())
            self._totals["cached_tokens"] += output.num_cached_tokens or 0

    def _figures(
        self, states: Sequence[Any], *, kv_capacity: int, held: int, waiting: int | None = None, preemptions: int = 0
    ) -> EngineFigures:
        """`states`: vLLM's of the requests under way. `held`: tokens that they hold. `waiting`: None: by the states."""
        if waiting is None:
            waiting = sum(state.is_prefilling for state in states)
        return EngineFigures(
            name=self.name,
            is_up=self.is_up,
            version=self.version,
            running=len(states),
            waiting=min(waiting, len(states)),
            tokens_held=held,
            kv_capacity=kv_capacity,
            sampled_tokens=self._totals["sampled_tokens"],
            prompt_tokens=self._totals["prompt_tokens"],
            cached_tokens=self._totals["cached_tokens"],
            preemptions=preemptions,
            restarts=max(0, self._life - 1),
        )


def tokens_of(states: Sequence[Any]) -> int:
    """Tokens of the requests under way: prompts and what was sampled."""
    return sum(state.prompt_len + state.detokenizer.num_output_tokens() for state in states)


class VLLMEngine(EngineBase):
    """One engine. Lifecycle: `start` (3 s forked, else 8 to 15) -> generate / load_weights -> `close`; `restart` after
    it died."""

    def __init__(
        self,
        vllm_config: Any,
        *,
        count_preemptions: bool = False,
        weights: tuple[Path, int] | None = None,
        timeout_s: float = 120.0,
        name: str = "e0",
        devices: Sequence[str] = (),
    ) -> None:
        """`count_preemptions`: outputs say how often their request was set aside, and figures what the scheduler says of itself;
        costs a few percent of the engine's time. `weights`: (folder, version) to begin with, instead of the model's own as version
        0. `devices`: its cards, as CUDA calls them; none: all of this machine's."""
        super().__init__(name, timeout_s=timeout_s)
        self._vllm_config = vllm_config
        self._devices = devices
        self._count_preemptions = count_preemptions
        self._stats = SchedulerStats()
        self._kv_capacity = 0
        self._llm: Any = None
        self._folder = ""
        """Folder where the processes of the last boot meet; no other user can enter it."""
        self._processes: list[BaseProcess] = []
        """Processes that the last boot has started, or is starting."""
        self._up = False
        self._weights = {} if weights is None else {"": weights}
        """(folder, version) that it has, or is to have once it is back; of adapters of roles, by role."""
        lora = vllm_config.lora_config
        self._adapters = PolicyAdapters(kept=1 if lora is None else lora.max_loras - 1)
        self._paused_s = 0.0
        """Seconds of the last load."""
        self._num_generating = 0
        self._has_loaded = self._is_bare = False
        """It has weights of a folder; it has given them back, and loads them before the next request."""
        self._changing = asyncio.Lock()
        self._filling: asyncio.Task[None] | None = None
        self._ending: EngineEnding | None = None
        """End of the present process, as it was seen."""
        self._oom_kills = 0
        """Processes that Linux had ended for want of memory before it started."""

    async def start(self) -> None:
        """Boot the engine process; raises EngineError when it does not come up."""
        self._life += 1
        self._has_loaded = self._is_bare = False
        self._ending, self._oom_kills = None, oom_kills()
        engine_requests.install()
        booting = asyncio.create_task(asyncio.to_thread(self._boot), name="boot the engine")
        try:
            await asyncio.shield(booting)
        except asyncio.CancelledError:
            await self._give_up(booting)
            raise
        if not await self._while_alive(self._prepare()):
            raise EngineDied("the engine process died while it started; see its own log")
        self._up = True
        self._watching = asyncio.create_task(self._kill_when_deaf(self._llm), name="watch the engine's silence")

    async def _kill_when_deaf(self, llm: Any) -> None:
        """An engine that makes no progress is killed: then it is a dead one as others. Its processes get no further, or it answers
        nothing, not even the question whether it sleeps, which is also asked when nothing else is."""
        from vllm.v1.engine.exceptions import EngineDeadError

        processes = llm.engine_core.resources.engine_manager.processes
        try:
            await self._silence.lasting(
                llm.is_sleeping, processor_time=lambda: processor_time(processes), asks_idle=True
            )
        except EngineDeadError:
            return  # what waits for it has the error already
        if not self.dead:
            self._see_ending(STOPPED if are_stopped(processes) else DEAF)
            for process in processes:
                process.kill()

    def _see_ending(self, seen: EngineEnding | None = None) -> EngineEnding:
        """The first end that was seen: later its processes may have been ended by this one."""
        if self._ending is None:
            if seen is None and not self._llm.engine_core.resources.engine_dead:
                seen = TAKEN_DOWN
            if seen is None:
                codes = [process.exitcode for process in self._llm.engine_core.resources.engine_manager.processes]
                seen = ending_of(codes, oom_kills=oom_kills() - self._oom_kills)
            self._ending = seen
            if seen is not TAKEN_DOWN:
                logger.error("the process of engine %s %s", self.name, seen.words)
        return self._ending

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
        # vLLM keeps the answer: else the first request would ask, and wait without end if the engine died then.
        await self._llm.get_supported_tasks()
        await self._llm.update_weight_version(str(self.version))
        await self._llm.collective_rpc("keep_seeds")
        if RECORDS_EXPERTS in self._vllm_config.additional_config:
            await self._llm.collective_rpc("record_experts")
        loaded: dict[str, tuple[Path, int]] = {}
        while due := [role for role, weights in self._weights.items() if loaded.get(role) != weights]:
            role, weights = due[0], self._weights[due[0]]
            loading = asyncio.ensure_future(self._load(*weights, role))
            try:
                await asyncio.wait({loading})
            finally:
                loading.cancel()
            if (error := loading.exception()) is not None and self._weights[role] == weights:
                raise error  # else newer ones came meanwhile, and the files of these are gone
            loaded[role] = weights

    @property
    def is_up(self) -> bool:
        """It takes requests."""
        return self._up and not self.dead

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
        """True if it was done before the engine died: vLLM never answers a call whose engine dies meanwhile."""
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
        from vllm.v1.engine import core_client
        from vllm.v1.engine.async_llm import AsyncLLM

        core_client.VLLM_ENGINE_READY_TIMEOUT_S = READY_S  # no setting of ours: what takes long is waited for before
        self._leave_folder()
        self._folder = tempfile.mkdtemp(prefix="understudy-engine-", dir=socket_folder(40))
        config = copy(self._vllm_config)  # engines share it, and vLLM writes into it how many blocks an engine has
        config.cache_config = copy(config.cache_config)
        config.cache_config.num_gpu_blocks = None
        try:
            with interrupts_blocked(), engines_of_ours(self._folder, devices=self._devices) as self._processes:
                self._llm = AsyncLLM.from_vllm_config(
                    config,
                    disable_log_stats=True,
                    stat_loggers=[self._stats.logger()] if self._count_preemptions else None,
                )
            give_way(self._llm.engine_core.resources.output_socket)
            self._kv_capacity = config.cache_config.num_gpu_blocks * config.cache_config.block_size
        except (RuntimeError, OSError, ValueError) as error:
            killed = isinstance(error, TimeoutError) and any(not process.is_alive() for process in self._processes)
            kind = EngineDied if killed or _BY_SIGNAL.search(str(error)) else EngineError
            raise kind(
                f"the engine did not start: {error}; its log (a run's log.txt) says why, with VLLM_LOGGING_LEVEL=INFO more"
            ) from error

    async def _generate(
        self, ids: list[int], params: Any, request_id: str, extra: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        while self._is_bare and self.is_up:
            if self._filling is None or self._filling.done():
                self._filling = asyncio.create_task(self._fill(self._llm), name="load weights again")
            await asyncio.shield(self._filling)
        life, llm = (self.name, self._life), self._llm
        if not self.is_up:
            raise EngineLost(f"engine {self.name} is down", life=life, sampled=never_began(request_id))
        role, extra = extra.get(ADAPTER_OF, ""), {name: value for name, value in extra.items() if name != ADAPTER_OF}
        self._num_generating += 1
        try:
            with self._silence.expecting(), self._adapters.newest(role) as adapter:
                outputs = llm.generate(tokens_input(ids), params, request_id, **extra, **adapter)
                async with aclosing(outputs) as outputs:
                    async for output in outputs:
                        if sampled := given_up(output):
                            with suppress(TimeoutError):
                                await asyncio.wait_for(self._until_gone(llm), ENDING_S)
                            raise self._lost(request_id, llm, life=life, sampled=sampled)
                        self._count(output)
                        with self._silence.given():
                            yield output
        except EngineDeadError as error:
            sampled = never_began(request_id) or interrupted(llm, request_id)
            raise self._lost(request_id, llm, life=life, sampled=sampled) from error
        except VLLMClientError as error:
            raise refusal_of(error) from error
        except EngineGenerateError as error:
            if isinstance(error.__cause__, ValueError | TypeError | OverflowError):
                raise refusal_of(error.__cause__) from error
            raise
        finally:
            self._num_generating -= 1
            never_began(request_id)

    def _lost(self, request_id: str, llm: Any, *, life: tuple[str, int], sampled: Sequence[Sampled]) -> EngineLost:
        ending = self._see_ending() if self._llm is llm else TAKEN_DOWN
        message = f"engine {self.name} died while it answered {request_id}: it {ending.words}"
        return EngineLost(message, life=life, sampled=sampled, by_itself=ending.by_itself)

    async def load_weights(self, folder: Path, *, version: int) -> float:
        """Swap in the weights of `folder` as `version`. Running requests freeze and continue; none is dropped. Returns the
        seconds for which they froze. Of an adapter nothing freezes: requests that come afterwards begin with it.

        The KV cache is cleared: what stays in flight is recomputed under the new weights, as its next tokens are. An engine
        that is down gets them when it is back.
        """
        return await self._take(folder, version, "")

    async def load_adapter(self, folder: Path, *, role: str, version: int) -> float:
        """The same for the adapter of one role, whose requests begin with it afterwards. `self.version` is that of the role that
        has the highest."""
        return await self._take(folder, version, role)

    async def _take(self, folder: Path, version: int, role: str) -> float:
        self._weights[role] = folder, version
        loaded = self.is_up and await self._while_alive(self._load(folder, version, role))
        return self._paused_s if loaded else 0.0

    async def _load(self, folder: Path, version: int, role: str = "", *, is_back: bool = False) -> None:
        """`is_back`: they are those that it gave back, unless it has weights again."""
        llm, began = self._llm, time.monotonic()
        if is_adapter(folder):
            with self._silence.expecting():
                self._paused_s = await self._adapters.load(llm, folder, version=version, role=role)
            self.version = max(newest for _, newest in self._weights.values()) if role else version
            return
        async with self._changing:
            if is_back and not self._is_bare:
                return
            with self._silence.expecting():
                await _freeze(llm)
                self._stats.cleared(under_way=len(llm.output_processor.request_states))
                # A load that fails leaves it frozen: nothing is sampled from weights that are half loaded.
                with self._silence.long_work():
                    await _load_published(llm, folder)
                await llm.update_weight_version(str(version))
                self.version, self._has_loaded, self._is_bare = version, True, False
                await llm.resume_generation()
        self._paused_s = time.monotonic() - began

    async def layer_states(self, prompt_token_ids: Sequence[int], *, role: str = "") -> list[bytes]:
        """See `LayerEngine`: of one worker. Other requests are answered meanwhile."""
        llm = self._llm
        await llm.collective_rpc("watch_layers", args=(list(prompt_token_ids),))
        await probe(self, prompt_token_ids, params=free_sampling(tokens=1, temperature=1.0), role=role)
        states: list[bytes] = (await llm.collective_rpc("watched_layers"))[0]
        return states

    async def sleep(self) -> None:
        """Give memory back: vLLM's sleep level 1 with `rollout.sleep` on a GPU, where running requests freeze until `wake_up`;
        elsewhere the KV cache, and running requests compute theirs anew; where none runs, the weights that lie in a folder as well.
        An engine that dies meanwhile has none left."""
        if (llm := self._llm) is not None and self.is_up:
            with self._silence.long_work():
                await self._while_alive(llm.sleep(level=1, mode="keep") if self._may_sleep else self._free_memory(llm))
            self._stats.cleared(under_way=len(llm.output_processor.request_states))

    async def _free_memory(self, llm: Any) -> None:
        async with self._changing:
            await _freeze(llm)
            model, settings = self._vllm_config.model_config, self._vllm_config
            is_whole = settings.lora_config is None and not model.is_multimodal_model and not has_gpu()
            self._is_bare = self._has_loaded and is_whole and not self._num_generating
            await llm.collective_rpc("free_memory", args=(self._is_bare,))
            await llm.resume_generation()

    async def _fill(self, llm: Any) -> None:
        """Load what was given back. An engine that cannot is killed: its next process loads them."""
        try:
            await self._while_alive(self._load(*self._weights[""], is_back=True))
        except EngineError as error:
            logger.error("engine %s is killed: it cannot load its weights again: %s", self.name, error)
            for process in llm.engine_core.resources.engine_manager.processes:
                process.kill()
            await self._until_gone(llm)

    async def wake_up(self) -> None:
        """Undo `sleep`. No effect on an engine that is awake."""
        if self._may_sleep and self.is_up:
            with self._silence.long_work():
                await self._while_alive(self._llm.wake_up())

    def figures(self) -> EngineFigures:
        """See `EngineFigures`."""
        states = [] if self._llm is None else list(self._llm.output_processor.request_states.values())
        held = tokens_of(states)
        if self._count_preemptions and states:  # in whole blocks, a prompt that generations share once
            blocks = round(self._stats.kv_share * self._kv_capacity)
            held = blocks if self._stats.is_settled else max(held, blocks)
        return self._figures(
            states,
            kv_capacity=self._kv_capacity,
            held=held,
            waiting=self._stats.waiting if self._count_preemptions else None,
            preemptions=self._stats.preemptions,
        )

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

        self._up = False
        await self._end_watching()
        if self._llm is not None:
            self._see_ending()
            if (
                listening := self._llm.output_handler
            ) is not None:  # else it reports the end of the process as an error
                listening.cancel()
                await asyncio.wait({listening})
                self._llm.output_processor.propagate_error(EngineDeadError())  # it may not have come to that
            # On a CPU it has nothing to give back: no need to wait a second for its own end.
            try:
                await asyncio.to_thread(self._llm.shutdown, None if has_gpu() else 0.0)
            except psutil.NoSuchProcess:  # it ended just when vLLM looked for what is below it
                await asyncio.to_thread(self._llm.engine_core.resources)
            self._llm = None
        self._leave_folder()

    def _leave_folder(self) -> None:
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""


def give_way(socket: Any) -> None:
    """Has the loop turn before each message of this asynchronous socket is received. pyzmq gives one that is there at once, and an
    engine that says more than a busy process reads would keep its loop until the answer is over: vLLM reads nothing else between
    two of them."""
    receive = socket.recv_multipart

    async def receive_in_turn(*args: Any, **more: Any) -> Any:
        await asyncio.sleep(0)
        return await receive(*args, **more)

    socket.recv_multipart = receive_in_turn


async def _load_published(llm: Any, folder: Path) -> None:
    """Raises EngineError with the words of a worker that cannot take weights."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        await llm.collective_rpc("load_published", args=(str(folder),))
    except EngineDeadError:
        raise
    except Exception as error:
        raise EngineError(str(error).rpartition("method failed: ")[2]) from error


async def _freeze(llm: Any) -> None:
    """vLLM's `pause_generation(mode="keep", clear_cache=True)` but for its last line, which sleeps 20 ms so that outputs on their
    way arrive first: they are labelled in the engine, so their order does not matter."""
    await llm.renderer.clear_mm_cache_async()
    await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)


def free_sampling(*, tokens: int, temperature: float) -> Any:
    """vLLM's SamplingParams for so many tokens of the policy's own distribution, with their log-probabilities."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    kind = RequestOutputKind.FINAL_ONLY
    return SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True, logprobs=0, output_kind=kind)
