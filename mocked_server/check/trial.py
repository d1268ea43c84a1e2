"""Runs an agent once against a model on this machine, a tiny one or the user's, for the report whether it can be trained.

Called by `mocked_server.check.__main__`. The agent is started in an empty folder, with the environment that training gives it
and its task on standard input. The model calls tools that the agent offers, with made-up arguments, then answers; see
`message_for`. Its environment is a stand-in.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buffers.errors import RequestRefused
from buffers.ledger.ledger import Ledger
from buffers.multi_round import MultiRoundBufferDataset
from buffers.records import EpisodeScores, Row, Task
from buffers.tasks.task_pool import TaskPool
from buffers.training_rows import episode_rows
from configs.child_processes import clean_environment
from configs.model_folder import half_precision_kind, read_json
from configs.schema import RolloutConfig, ServerConfig
from mocked_server.check.report import (
    ENV_ANSWER,
    LINE,
    Report,
    TrialObservations,
    features_of,
    hermes,
    make_report,
    message_for,
)
from mocked_server.generation import Generation
from mocked_server.http.dialects import CHAT, GEMINI_ROUTES, GEMINI_STREAM
from mocked_server.http.gemini_requests import generation_of
from mocked_server.request_context import Call
from mocked_server.server import MockedServer
from mocked_server.vllm import exact_rendering

if TYPE_CHECKING:
    from mocked_server.vllm.engine_arguments import EngineSettings

MAX_LEN, MAX_TOKENS = 131072, 1024  # tokens of the tiny model: each is about two letters
MAX_LEN_OF_OTHERS = 32768
"""Tokens of a conversation with a model that was named, where it has room for more: its cache is made for one such."""
MAX_ERRORS = 20
CHUNK_BYTES = 65_536
OUTPUT_WAIT_S = 5.0
"""Seconds after the agent's end: a process that it left behind in another session may hold its output open."""
LAST_BYTES = 4000
"""Characters of what the agent printed last, which are shown if it fails."""


class RequestLog:
    """Watches the agent's requests (`model_requests.Observer`) and gives each its line: a message, as `say` writes it."""

    def __init__(self, say: Callable[[Mapping[str, Any]], str]) -> None:
        self._say = say
        self.dialects: Counter[str] = Counter()
        self.features: Counter[str] = Counter()
        self.errors: list[tuple[str, int, str]] = []

    def request(self, call: Call, path: str, body: bytes) -> None:
        """Count what the request uses; a malformed one is passed on as it is."""
        self.dialects[path] += 1
        try:
            fields = json.loads(body)
            if path in GEMINI_ROUTES:
                path, fields = CHAT, generation_of(fields, model="", streams=path == GEMINI_STREAM)
        except (ValueError, RecursionError, RequestRefused):
            return
        if isinstance(fields, dict):
            self.features.update(features_of(path, fields))
            call.extra_args[LINE] = self._say(message_for(path, fields))

    def failed(self, path: str, status: int, body: bytes) -> None:
        """Keep the message of an error."""
        if len(self.errors) < MAX_ERRORS:
            try:
                message = str(json.loads(body)["error"]["message"])
            except (ValueError, KeyError, TypeError):
                message = body.decode(errors="replace")
            self.errors.append((path, status, message[:500]))


class _Noticed(logging.Handler):
    """What is logged of the model's chat template."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class AgentTrial:
    """A server that is ready to try agents out, one after the other. `diff_of(rows)`: the proof of exactness; None: left out.
    `say`: how the model writes a message; `reads_calls`: its calls are read as its chat template writes them."""

    def __init__(
        self,
        server: MockedServer,
        ledger: Ledger,
        *,
        diff_of: Callable[[Sequence[Row]], float] | None = None,
        say: Callable[[Mapping[str, Any]], str] = hermes,
        reads_calls: bool = False,
        environment: StandInEnvironment | None = None,
    ) -> None:
        self._server = server
        self._ledger = ledger
        self._diff_of, self._say, self._reads_calls = diff_of, say, reads_calls
        self._environment = environment or StandInEnvironment()

    async def try_out(
        self,
        command: Sequence[str],
        *,
        task: Task,
        timeout_s: float,
        output: int | None = None,
        named: Sequence[str] = (),
    ) -> Report:
        """Run the agent once; its episode is ended afterwards. `task.task_id` is one that was not used before.

        `output`: file descriptor for what the agent prints; None: our standard error. `named`: variables of this process's
        environment that it gets besides the usual ones, as by `agents.environment`.
        """
        notes, noticed = RequestLog(self._say), _Noticed()
        self._server.model_requests.observer = notes
        await self._server.pool.put([task])
        leased = await self._server.lease_episode(wait_s=60.0)
        assert leased is not None, "a task that was just put is leased at once"
        ours = {**self._server.environment(leased.api_key), "EPISODE_ID": leased.episode_id}
        ours |= {"TASK_JSON": json.dumps(leased.task), "SEED": str(leased.seed)}
        env = clean_environment(ours, named=named)
        began = time.monotonic()
        asked_before = self._environment.num_messages
        exact_rendering.logger.addHandler(noticed)
        try:
            exit_code, last_words = await run_agent(command, env=env, timeout_s=timeout_s, output=output)
        finally:
            exact_rendering.logger.removeHandler(noticed)
        seconds = time.monotonic() - began
        live = self._server.episodes.get(leased.episode_id)
        causes = [round_.cause for round_ in live.rounds]
        stored = await asyncio.wrap_future(self._ledger.rounds(leased.episode_id))
        rows = episode_rows(stored, group_id=live.episode.group_id, scores=EpisodeScores(whole=0.0))
        stops_kept = live.stops_kept
        await self._server.fail(leased.episode_id, "checked")
        seen = TrialObservations(
            command=command,
            exit_code=exit_code,
            seconds=seconds,
            dialects=notes.dialects,
            features=notes.features,
            errors=notes.errors,
            last_words=last_words,
            env_messages=self._environment.num_messages - asked_before,
            noticed=noticed.lines,
        )
        diff = None if self._diff_of is None else await asyncio.to_thread(self._diff_of, rows)
        return make_report(
            seen,
            stored=stored,
            rows=rows,
            causes=causes,
            temperature=RolloutConfig().temperature,
            max_logprob_diff=diff,
            stops_kept=stops_kept,
            reads_calls=self._reads_calls,
        )


async def check(
    command: Sequence[str],
    *,
    task: Task,
    timeout_s: float,
    output: int | None = None,
    named: Sequence[str] = (),
    model: Path | None = None,
) -> Report:
    """Run the agent once, see `AgentTrial.try_out`, and `trial_server` for `model`. Raises UnderstudyError when the server or the
    engine does not start."""
    async with trial_server(model) as trial:
        return await trial.try_out(command, task=task, timeout_s=timeout_s, output=output, named=named)


@asynccontextmanager
async def trial_server(model: Path | None = None) -> AsyncIterator[AgentTrial]:
    """A server with the model of this folder, or a tiny one, that says what `mocked_server.check.report` chose. Raises
    UnderstudyError when it does not start."""
    from configs.tiny_model import make_tiny_model
    from mocked_server.check.vllm_scripted_engine import REHEARSAL_ARGUMENTS, OwnForm, TrialEngine, max_logprob_diff
    from mocked_server.vllm.engine import VLLMEngine
    from mocked_server.vllm.engine_arguments import EngineSettings, has_gpu, make_args, make_vllm_config

    with tempfile.TemporaryDirectory(prefix="understudy-check-") as scratch:
        longest, is_tiny = MAX_LEN, model is None
        if model is None:
            model = await asyncio.to_thread(make_tiny_model, Path(scratch) / "model", positions=MAX_LEN)
        else:
            fields = read_json(model / "config.json")
            positions = (fields.get("text_config") or fields).get("max_position_embeddings")
            longest = min(MAX_LEN_OF_OTHERS, positions or MAX_LEN_OF_OTHERS)
        settings = EngineSettings(
            model_path=model, served_name="policy", dtype="bfloat16" if half_precision_kind(model) else "float32",
            server=ServerConfig(),
            rollout=RolloutConfig(max_tokens=min(MAX_TOKENS, longest // 2), max_model_len=longest),
        )  # fmt: skip
        args = await asyncio.to_thread(make_args, settings)
        if not (reads_calls := args.tool_call_parser is not None):
            settings = replace(settings, server=ServerConfig(tool_parser="hermes"))
            args = await asyncio.to_thread(make_args, settings)
        vars(args).update(REHEARSAL_ARGUMENTS)
        vllm_config = await asyncio.to_thread(make_vllm_config, args)
        if not has_gpu():
            shape, cache = vllm_config.model_config, vllm_config.cache_config
            heads = shape.get_num_layers(vllm_config.parallel_config) * shape.get_total_num_kv_heads()
            one = 9 * heads * shape.get_head_size() * longest  # keys and values in float32, and an eighth more
            cache.kv_cache_memory_bytes = max(cache.kv_cache_memory_bytes, one)
        engine = VLLMEngine(vllm_config)
        await engine.start()
        try:
            with Ledger(None) as ledger:
                server, _ = server_of(settings, ledger, args=args, vllm_config=vllm_config)
                form = OwnForm(model, reads_calls=reads_calls)
                rehearsed = TrialEngine(engine, tokenizer=form.tokenizer, stops=form.stops)
                generation = Generation(rehearsed, queue=server.prompt_queue, episodes=server.episodes, rounds=ledger)
                generating = asyncio.create_task(generation.run(), name="generate")
                try:
                    await server.start()
                    async with StandInEnvironment().listening() as environment:
                        server.env_address = environment.address
                        # Computed again is float32, from which an engine in bfloat16 differs, and its routers still more.
                        diff_of = partial(max_logprob_diff, model) if settings.dtype == "float32" else None
                        yield AgentTrial(
                            server, ledger, diff_of=diff_of, say=form, reads_calls=reads_calls and not is_tiny,
                            environment=environment,
                        )  # fmt: skip
                finally:
                    await server.close()
                    await asyncio.wait({generating})
        finally:
            await engine.close()


def server_of(
    settings: EngineSettings, ledger: Ledger, *, args: Any, vllm_config: Any, max_running: int = 1, **more: Any
) -> tuple[MockedServer, TaskPool]:
    """A server as the pipeline has it, not started yet, and the pool of its tasks, each in a group of one. `args` and
    `vllm_config`: of the settings; `more`: of `MockedServer`."""
    pool = TaskPool(
        ledger, group_size=1, groups_per_step=1, max_policy_lag=None, max_running=max_running, deadline_s=1e6,
        max_attempts=1,
    )  # fmt: skip
    server = MockedServer(
        args=args, vllm_config=vllm_config, rollout=settings.rollout, server=settings.server, pool=pool,
        notify_score_fn=MultiRoundBufferDataset(ledger).notify_score, **more,
    )  # fmt: skip
    return server, pool


async def run_agent(
    command: Sequence[str], *, env: dict[str, str], timeout_s: float, output: int | None = None
) -> tuple[int, str]:
    """Run the program in an empty folder, its task on standard input. Its exit code, 124 when it ran too long; and the end of what
    it printed, all of which goes to `output` meanwhile."""
    sink = 2 if output is None else output
    with tempfile.TemporaryDirectory(prefix="understudy-agent-") as folder, tempfile.TemporaryFile() as task:
        task.write(env["TASK_JSON"].encode())
        task.seek(0)
        reading, writing = os.pipe()
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=folder,
            env=env,
            stdin=task,
            stdout=writing,
            stderr=writing,
            start_new_session=True,
        )
        os.close(writing)
        copying = asyncio.create_task(asyncio.to_thread(_copy, reading, sink), name="the agent's output")
        try:
            async with asyncio.timeout(timeout_s):
                code = await process.wait()
        except TimeoutError:
            code = 124
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        await asyncio.wait({copying}, timeout=OUTPUT_WAIT_S)
        return code, copying.result() if copying.done() else ""


def _copy(reading: int, sink: int) -> str:
    """Copy until no process can write any more; returns the end of what was written."""
    last = b""
    with os.fdopen(reading, "rb", buffering=0) as source:
        while chunk := source.read(CHUNK_BYTES):
            os.write(sink, chunk)
            last = (last + chunk)[-LAST_BYTES:]
    return last.decode(errors="replace")


# An environment that says yes to everything, for an agent that is tried out: what `ENV_ADDRESS` names in `mocked_server.check`.
# The real one (`env.command`) is not started there: its scores mean nothing for a model that says made-up words. Each HTTP
# request is answered with 200 and `ENV_ANSWER`, each other line with `ENV_ANSWER` as a line.

METHODS = (b"GET ", b"POST ", b"PUT ", b"PATCH ", b"DELETE ", b"HEAD ", b"OPTIONS ")
MAX_BODY_BYTES = 1 << 24


class StandInEnvironment:
    """`num_messages`: how many it has answered."""

    def __init__(self) -> None:
        self.address = ""
        self.num_messages = 0

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[StandInEnvironment]:
        """Serve on a free port of loopback until the context ends."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=MAX_BODY_BYTES)
        host, port = server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        try:
            yield self
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ValueError, EOFError):  # the agent left, or speaks something else
            while line := await reader.readline():
                self.num_messages += 1
                body = json.dumps(ENV_ANSWER).encode()
                if line.startswith(METHODS):
                    await _read_request(reader)
                    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
                    writer.write(head.encode() + body)
                else:
                    writer.write(body + b"\n")
                await writer.drain()
        writer.close()


async def _read_request(reader: asyncio.StreamReader) -> None:
    """The rest of its head, and its body."""
    length = 0
    while (header := (await reader.readline()).strip()) != b"":
        name, _, value = header.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    if length:
        await reader.readexactly(min(length, MAX_BODY_BYTES))
