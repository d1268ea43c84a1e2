"""Can this agent be trained? Runs it once against a tiny model on this machine and says.

    python -m mocked_server.check [--json] [--task FILE] [--timeout SECONDS] -- COMMAND ...

The command is started once, in an empty folder, with the environment that training gives it (OPENAI_BASE_URL, OPENAI_API_KEY,
ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY, MODEL, TASK_JSON, SEED) and its task on standard input. The model calls tools that the
agent offers, with made-up arguments, then answers; see `scripted_replies`. Exit code 0: it can be trained; 1: it cannot; 2: the
check itself could not be made.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from buffers.errors import UnderstudyError
from buffers.ledger.ledger import Ledger
from buffers.multi_round import MultiRoundBufferDataset
from buffers.records import EpisodeScores, Row, Task
from buffers.tasks.task_pool import TaskPool
from buffers.training_rows import episode_rows
from configs.child_environment import clean_environment
from configs.schema import RolloutConfig, ServerConfig
from mocked_server.check.report import Report, TrialObservations, features_of, make_report
from mocked_server.check.scripted_replies import LINE, line_for
from mocked_server.generation import Generation
from mocked_server.request_context import Call
from mocked_server.server import MockedServer

TASK = {"prompt": [{"role": "user", "content": "What is 12 + 30? Use the tools that you have."}]}
MAX_LEN, MAX_TOKENS = 131072, 1024  # tokens of the tiny model: each is about two letters
MAX_ERRORS = 20
LOG_SHOWN = 8000
"""Bytes of the engine's output that are shown when the check could not be made."""


class RequestLog:
    """Watches the agent's requests (`model_requests.Observer`) and gives each its line."""

    def __init__(self) -> None:
        self.dialects: Counter[str] = Counter()
        self.features: Counter[str] = Counter()
        self.errors: list[tuple[str, int, str]] = []

    def request(self, call: Call, path: str, body: bytes) -> None:
        """Count what the request uses; a malformed one goes on as it is."""
        self.dialects[path] += 1
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError):
            return
        if isinstance(fields, dict):
            self.features.update(features_of(path, fields))
            call.extra_args[LINE] = line_for(path, fields)

    def failed(self, path: str, status: int, body: bytes) -> None:
        """Keep the message of an error."""
        if len(self.errors) < MAX_ERRORS:
            try:
                message = str(json.loads(body)["error"]["message"])
            except (ValueError, KeyError, TypeError):
                message = body.decode(errors="replace")
            self.errors.append((path, status, message[:500]))


class AgentTrial:
    """A server that is ready to try agents out, one after the other. `diff_of(rows)`: the proof of exactness; None:
    left out."""

    def __init__(
        self, server: MockedServer, ledger: Ledger, *, diff_of: Callable[[Sequence[Row]], float] | None = None
    ) -> None:
        self._server = server
        self._ledger = ledger
        self._diff_of = diff_of

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
        notes = RequestLog()
        self._server.model_requests.observer = notes
        await self._server.pool.put([task])
        leased = await self._server.lease_episode(wait_s=60.0)
        assert leased is not None, "a task that was just put is leased at once"
        ours = {**self._server.environment(leased.api_key), "EPISODE_ID": leased.episode_id}
        ours |= {"TASK_JSON": json.dumps(leased.task), "SEED": str(leased.seed)}
        env = clean_environment(ours, named=named)
        began = time.monotonic()
        exit_code = await run_agent(command, env=env, timeout_s=timeout_s, output=output)
        seconds = time.monotonic() - began
        live = self._server.episodes.get(leased.episode_id)
        causes = [round_.cause for round_ in live.rounds]
        stored = await asyncio.wrap_future(self._ledger.rounds(leased.episode_id))
        rows = episode_rows(stored, group_id=live.episode.group_id, scores=EpisodeScores(whole=0.0))
        await self._server.fail(leased.episode_id, "checked")
        seen = TrialObservations(
            command=command,
            exit_code=exit_code,
            seconds=seconds,
            dialects=notes.dialects,
            features=notes.features,
            errors=notes.errors,
        )
        diff = None if self._diff_of is None else await asyncio.to_thread(self._diff_of, rows)
        return make_report(
            seen,
            stored=stored,
            rows=rows,
            causes=causes,
            temperature=RolloutConfig().temperature,
            max_logprob_diff=diff,
        )


async def check(
    command: Sequence[str], *, task: Task, timeout_s: float, output: int | None = None, named: Sequence[str] = ()
) -> Report:
    """Run the agent once, see `AgentTrial.try_out`. Raises UnderstudyError when the server or the engine does not
    start."""
    async with rehearsal_server() as rehearsal:
        return await rehearsal.try_out(command, task=task, timeout_s=timeout_s, output=output, named=named)


@asynccontextmanager
async def rehearsal_server() -> AsyncIterator[AgentTrial]:
    """A server with a tiny model that says what `scripted_replies` chose. Raises UnderstudyError when it does not start."""
    from transformers import AutoTokenizer

    from configs.tiny_model import make_tiny_model
    from mocked_server.check.logprob_proof import max_logprob_diff
    from mocked_server.check.vllm_scripted_engine import REHEARSAL_ARGUMENTS, TrialEngine
    from mocked_server.vllm.engine import EngineSettings, VLLMEngine, make_args, make_vllm_config

    rollout, server_config = (
        RolloutConfig(max_tokens=MAX_TOKENS, max_model_len=MAX_LEN),
        ServerConfig(tool_parser="hermes"),
    )
    with tempfile.TemporaryDirectory(prefix="understudy-check-") as scratch:
        model = await asyncio.to_thread(make_tiny_model, Path(scratch) / "model", positions=MAX_LEN)
        settings = EngineSettings(
            model_path=model, served_name="policy", dtype="float32", rollout=rollout, server=server_config
        )
        args = await asyncio.to_thread(make_args, settings)
        vars(args).update(REHEARSAL_ARGUMENTS)
        vllm_config = await asyncio.to_thread(make_vllm_config, args)
        engine = VLLMEngine(vllm_config)
        await engine.start()
        try:
            with Ledger(None) as ledger:
                server = _server(ledger, args=args, vllm_config=vllm_config, rollout=rollout, config=server_config)
                rehearsed = TrialEngine(engine, tokenizer=AutoTokenizer.from_pretrained(model))
                generation = Generation(rehearsed, queue=server.prompt_queue, rounds=ledger)
                generating = asyncio.create_task(generation.run(), name="generate")
                try:
                    await server.start()
                    yield AgentTrial(server, ledger, diff_of=partial(max_logprob_diff, model))
                finally:
                    await server.close()
                    await asyncio.wait({generating})
        finally:
            await engine.close()


def _server(
    ledger: Ledger, *, args: Any, vllm_config: Any, rollout: RolloutConfig, config: ServerConfig
) -> MockedServer:
    pool = TaskPool(
        ledger,
        group_size=1,
        groups_per_step=1,
        max_policy_lag=None,
        max_running=1,
        deadline_s=1e6,
        max_attempts=1,
    )
    rounds = MultiRoundBufferDataset(ledger)
    return MockedServer(
        args=args,
        vllm_config=vllm_config,
        rollout=rollout,
        server=config,
        pool=pool,
        notify_score_fn=rounds.notify_score,
    )


async def run_agent(command: Sequence[str], *, env: dict[str, str], timeout_s: float, output: int | None = None) -> int:
    """Run the program in an empty folder, its task on standard input; its exit code, 124 when it ran too long."""
    sink = sys.stderr.fileno() if output is None else output
    with tempfile.TemporaryDirectory(prefix="understudy-agent-") as folder, tempfile.TemporaryFile() as task:
        task.write(env["TASK_JSON"].encode())
        task.seek(0)
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=folder,
            env=env,
            stdin=task,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
        try:
            return await asyncio.wait_for(process.wait(), timeout_s)
        except TimeoutError:
            return 124
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def _arguments(words: Sequence[str], *, program: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=program, description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--task", type=Path, help="a JSON file with the task (prompt, extra_info, ...); default: a sum")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that the agent may run (default: 300)")
    parser.add_argument(
        "--environment", action="append", default=[], metavar="NAME",
        help="a variable of this shell that the agent gets besides the usual ones (as agents.environment; repeatable)",
    )  # fmt: skip
    parser.add_argument("command", nargs="+", help="the agent's command, after --")
    return parser.parse_args(words)


def _resolved(command: Sequence[str]) -> list[str]:
    """The program's path; files among its arguments become absolute, because the agent runs in a folder of its own."""
    program = shutil.which(command[0])
    if program is None:
        raise UnderstudyError(f"the agent's program must be on PATH or a file, got {command[0]!r}; check the command")
    return [os.path.abspath(program), *(os.path.realpath(w) if os.path.isfile(w) else w for w in command[1:])]


def _task(path: Path | None) -> Task:
    try:
        fields = TASK if path is None else json.loads(path.read_text())
        return Task(**{"task_id": "check", **fields})
    except (OSError, ValueError, TypeError) as error:
        raise UnderstudyError(f"--task must be a JSON file with the fields of a task, got {path}: {error}") from None


@contextmanager
def _quiet() -> Iterator[int]:
    """Engine and libraries print at will, in several processes: kept aside, and shown only when the check fails. Yields a
    descriptor of the real standard error."""
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as log:
        output, terminal = os.dup(1), os.dup(2)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            yield terminal
        except UnderstudyError:
            log.seek(0)
            os.write(terminal, log.read()[-LOG_SHOWN:])
            raise
        finally:
            sys.stdout.flush()
            for saved, number in ((output, 1), (terminal, 2)):
                os.dup2(saved, number)
                os.close(saved)


def main(words: Sequence[str], *, program: str = "python -m mocked_server.check") -> int:
    """The command line; returns the exit code. `program`: what the user calls it by."""
    arguments = _arguments(words, program=program)
    try:
        command, task = _resolved(arguments.command), _task(arguments.task)
        from mocked_server.vllm.engine import set_process_environment

        print("starting a tiny model, about 15 s ...", file=sys.stderr)
        with _quiet() as terminal:
            set_process_environment()
            named = tuple(arguments.environment)
            work = check(command, task=task, timeout_s=arguments.timeout, output=terminal, named=named)
            report = asyncio.run(work)
    except UnderstudyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report.as_json() if arguments.json else report.as_text())
    return 0 if report.trainable else 1
