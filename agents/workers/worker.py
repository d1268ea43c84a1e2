"""`AgentLoopWorker`: runs agent loops, many at once, on the event loop of one process.

`agents.workers.manager` starts some of them as Ray actors; the class itself is plain. It has the model's tokenizer and
a client of the run's server, not the model. Invariant: every outcome of a loop is an answer of `run_agent_loop`,
with the trajectories or the reason why there are none; other episodes continue.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from agents.agent_loop import AgentLoopBase, AgentLoopOutput, verl_config
from agents.server_manager import AsyncLLMServerManager
from agents.workers.config import LoopSpec, loop_class
from buffers.did_you_mean import one_of
from buffers.errors import UnderstudyError
from env_adapters.guarded_calls import CaughtException

logger = logging.getLogger(__name__)
DEFAULT_AGENT = "single_turn_agent"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Settings of a worker."""

    loops: tuple[LoopSpec, ...]
    model_path: str
    server_url: str
    worker_key: str
    """Opens /generate for rows that belong to no episode of the run."""
    prompt_length: int
    response_length: int
    """Tokens; what loops find in verl's configuration tree."""
    trust_remote_code: bool = False
    """Code of the model's folder is run, of its tokenizer."""
    tool_parser: str = "hermes"
    """A tool parser of vLLM by name, for loops that name none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopResult:
    """End of an episode's loop: with `outputs`, or with an `error`."""

    outputs: tuple[AgentLoopOutput, ...] = ()
    error: str = ""
    answer: str = ""
    """Text of the model, all turns in order: for a scorer."""
    seconds: float = 0.0


class AgentLoopWorker:
    """See the module."""

    def __init__(self, settings: WorkerSettings) -> None:
        from transformers import AutoTokenizer

        self._settings = settings
        self.tokenizer = AutoTokenizer.from_pretrained(
            settings.model_path, trust_remote_code=settings.trust_remote_code
        )
        # Token ids as a list, as verl's loops expect it, not as this transformers gives them by default.
        self.tokenizer.apply_chat_template = partial(self.tokenizer.apply_chat_template, return_dict=False)
        # A class of its own for each entry: two entries of one class share nothing.
        self._classes: dict[str, type[AgentLoopBase]] = {
            spec.name: type(spec.target.rpartition(".")[2], (loop_class(spec),), {"_class_initialized": False})
            for spec in settings.loops
        }
        self._arguments = {spec.name: dict(spec.arguments) for spec in settings.loops}
        self._manager: AsyncLLMServerManager | None = None

    async def ready(self) -> list[str]:
        """Set every loop's class up (tools, parsers); the names. Raises what they raise, so that a bad entry is known
        at the start."""
        for name, loop in self._classes.items():
            self._make(name, api_key="")
            await loop.open_class()
        return list(self._classes)

    async def run_agent_loop(
        self, agent_name: str, row: Mapping[str, Any], *, sampling_params: Mapping[str, Any], api_key: str
    ) -> LoopResult:
        """Play one episode. `row`: the task's columns, with `raw_prompt`; `api_key`: the episode's, under which it is
        recorded."""
        began = time.monotonic()
        with CaughtException() as caught:  # a loop is a user's program: what it raises ends its episode, with a reason
            outputs, answer = await self._run(agent_name, row, sampling_params=sampling_params, api_key=api_key)
            return LoopResult(outputs=outputs, answer=answer, seconds=time.monotonic() - began)
        logger.warning("agent loop %s failed: %r", agent_name, caught.error)
        return LoopResult(error=_reason(caught.error), seconds=time.monotonic() - began)

    async def generate_sequences(
        self, rows: Sequence[Mapping[str, Any]], *, sampling_params: Mapping[str, Any]
    ) -> list[LoopResult]:
        """Play all rows at once; `agent_name` in each, or `single_turn_agent`. In the order of the rows."""
        names = [str(row.get("agent_name") or DEFAULT_AGENT) for row in rows]
        runs = [
            self.run_agent_loop(name, row, sampling_params=sampling_params, api_key="")
            for name, row in zip(names, rows, strict=True)
        ]
        return list(await asyncio.gather(*runs))

    async def wake_up(self) -> None:
        """See `AsyncLLMServerManager`."""
        await self._server_manager().wake_up()

    async def sleep(self) -> None:
        """See `AsyncLLMServerManager`."""
        await self._server_manager().sleep()

    async def close(self) -> None:
        """End what the loops' classes hold, and the connections."""
        await asyncio.gather(*(loop.close_class() for loop in self._classes.values()))
        if self._manager is not None:
            await self._manager.close()

    async def _run(
        self, agent_name: str, row: Mapping[str, Any], *, sampling_params: Mapping[str, Any], api_key: str
    ) -> tuple[tuple[AgentLoopOutput, ...], str]:
        """(trajectories, what the model said)."""
        if agent_name not in self._classes:
            raise UnderstudyError(f"agent_name must be {one_of(agent_name, self._classes)}")
        loop = self._make(agent_name, api_key=api_key)
        hidden = set() if loop.sees_ground_truth else {"ground_truth"}
        seen = {name: value for name, value in row.items() if name not in hidden}
        output = await loop.run(dict(sampling_params), **seen)
        outputs = tuple(output) if isinstance(output, list) else (output,)
        return outputs, await asyncio.to_thread(self._answer, outputs)

    def _make(self, name: str, *, api_key: str) -> AgentLoopBase:
        settings, arguments = self._settings, self._arguments[name]
        config = verl_config(
            prompt_length=settings.prompt_length,
            response_length=settings.response_length,
            multi_turn={"format": settings.tool_parser, **arguments},
        )
        return self._classes[name](
            trainer_config=SimpleNamespace(config=config),
            server_manager=self._server_manager().keyed(api_key),
            tokenizer=self.tokenizer,
            processor=None,
            **arguments,
        )

    def _server_manager(self) -> AsyncLLMServerManager:
        """Made at first use: its connections belong to the event loop."""
        if self._manager is None:
            self._manager = AsyncLLMServerManager(self._settings.server_url, worker_key=self._settings.worker_key)
        return self._manager

    def _answer(self, outputs: Sequence[AgentLoopOutput]) -> str:
        """Text of the model in the last trajectory; tools' and environments' words are left out."""
        if not outputs:
            raise UnderstudyError("an agent loop must return at least one AgentLoopOutput, got none")
        last = outputs[-1]
        said = [token for token, mask in zip(last.response_ids, last.response_mask, strict=True) if mask]
        return str(self.tokenizer.decode(said, skip_special_tokens=True))


def _reason(error: BaseException | None) -> str:
    """The reason of a failed episode: ours as they are, others with their kind."""
    return str(error) if isinstance(error, UnderstudyError) else f"{type(error).__name__}: {error}"
