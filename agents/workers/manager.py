"""`AgentLoopManager`: agent loops in worker processes, for the run (`play`) and as verl has it (`generate_sequences`).

Built by `learner.pipeline`; the server's dispatcher calls `play` for each episode whose row names a loop. The workers are
children of the run, each with an event loop of its own, so that tools never hold up the server. A worker that dies is started
again; its episodes fail with that reason and are tried again. Invariant: an episode is played by one worker, and cancelling
`play` ends it there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from agents.agent_loop import AgentLoopOutput
from agents.workers.config import LoopSpec
from agents.workers.worker import AgentLoopWorker, LoopResult, WorkerSettings
from buffers.errors import AgentError, UnderstudyError
from buffers.records import Task
from buffers.remote.actor import HERE, ActorDied, ChildActor
from configs.fork_server import own_context

TITLE = "understudy::loop_worker"
ScoreFn = Callable[[Task, str], float | Awaitable[float]]
"""(task, what the model said) -> score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOutcome:
    """An episode that a loop has played. `score`: the mean of its trajectories', where they have scores of their own: of those
    in which something is trained."""

    score: float
    outputs: tuple[AgentLoopOutput, ...]


@dataclass(slots=True, eq=False)
class _Worker:
    actor: ChildActor
    running: int = 0
    starting: asyncio.Future[Any] | None = None
    """Done once a worker that died is there again."""


def loop_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a task file as verl hands it to loops: `raw_prompt`, and what `extra_info` holds beside the columns too."""
    return {**(row.get("extra_info") or {}), "raw_prompt": row.get("prompt"), **row}


class AgentLoopManager:
    """`score_fn`: judges episodes whose loop gives no reward of its own; `here`: workers are tasks of this process."""

    def __init__(
        self,
        loops: Sequence[LoopSpec],
        *,
        num_workers: int,
        score_fn: ScoreFn | None = None,
        temperature: float = 1.0,
        here: bool = False,
    ) -> None:
        self._here = here
        self._loops = tuple(loops)
        self._num_workers = num_workers
        self._score_fn = score_fn
        self._sampling_params = {"temperature": temperature, "top_p": 1.0, "repetition_penalty": 1.0}
        self._workers: list[_Worker] = []
        self.figures = LoopFigures()

    @property
    def names(self) -> frozenset[str]:
        """`agent_name`s that are played here."""
        return frozenset(spec.name for spec in self._loops)

    @property
    def first(self) -> str:
        """The loop that plays rows without an `agent_name`."""
        return self._loops[0].name

    async def start(
        self, *, model_path: str, server_url: str, worker_key: str, prompt_length: int, response_length: int,
        trust_remote_code: bool = False, tool_parser: str = "hermes",
    ) -> None:  # fmt: skip
        """Start the workers; returns when tools and parsers of every loop are ready. Raises AgentError naming the loop's error.

        The server need not listen yet. Lengths are what loops find in verl's configuration tree, in tokens.
        """
        settings = WorkerSettings(
            loops=self._loops, model_path=model_path, server_url=server_url, worker_key=worker_key,
            prompt_length=prompt_length, response_length=response_length, trust_remote_code=trust_remote_code,
            tool_parser=tool_parser,
        )  # fmt: skip
        context = HERE if self._here else own_context({"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"})
        self._make_actor = partial(ChildActor, context, TITLE, AgentLoopWorker, settings)
        self._workers = [_Worker(self._make_actor()) for _ in range(self._num_workers)]
        settled = await asyncio.gather(
            *(worker.actor.call("ready") for worker in self._workers), return_exceptions=True
        )
        if error := next((each for each in settled if isinstance(each, BaseException)), None):
            await self.close()
            raise AgentError(f"agents.loops cannot be started: {error}") from error

    async def close(self) -> None:
        """End the workers."""
        workers, self._workers = self._workers, []
        closing = [worker.actor.call("close") for worker in workers]
        if closing:
            await asyncio.wait(closing, timeout=5.0)
        for call in closing:
            call.cancel()
        for worker in workers:
            worker.actor.kill()

    async def play(self, task: Task, *, api_key: str, seed: int) -> LoopOutcome:
        """Play and judge one episode under its key. Raises AgentError with the reason when there is nothing to judge."""
        row = {**task.private(), "seed": seed}  # the worker hands the ground truth to environments only
        result = await self._run(str(task.agent_name), loop_row(row), api_key=api_key)
        if result.error:
            raise AgentError(result.error)
        began = time.monotonic()
        score = await self._judge(task, result)
        self.figures.add(figures_of(result, score_s=time.monotonic() - began))
        return LoopOutcome(score=score, outputs=result.outputs)

    async def generate_sequences(self, rows: Sequence[Mapping[str, Any]]) -> list[LoopResult]:
        """verl's batch interface: wake the engines up, play all rows over the workers, put the engines to sleep.

        Rows are those of a task file (`prompt` or `raw_prompt`, `agent_name`, `extra_info`, ...); results come in their
        order, a failed one with its `error`. Nothing is recorded in a ledger: the outputs are the data.
        """
        first = self._workers[0].actor
        await first.call("wake_up")
        try:
            share = max(1, -(-len(rows) // len(self._workers)))
            chunks = [rows[start : start + share] for start in range(0, len(rows), share)]
            calls = [
                worker.actor.call(
                    "generate_sequences", [loop_row(row) for row in chunk], sampling_params=self._sampling_params
                )
                for worker, chunk in zip(self._workers, chunks, strict=False)
            ]
            return [result for chunk in await asyncio.gather(*calls) for result in chunk]
        finally:
            await first.call("sleep")

    async def _run(self, agent_name: str, row: Mapping[str, Any], *, api_key: str) -> LoopResult:
        worker = await self._least_loaded()
        worker.running += 1
        try:
            result: LoopResult = await worker.actor.call(
                "run_agent_loop", agent_name, row, sampling_params=self._sampling_params, api_key=api_key
            )
            return result
        except ActorDied as error:
            self._start_again(worker)
            raise AgentError(f"the agent loop's worker process died and is started again: {error}") from error
        except UnderstudyError as error:
            raise AgentError(f"the agent loop's worker process refused the episode: {error}") from error
        finally:
            worker.running -= 1

    def _start_again(self, worker: _Worker) -> None:
        if worker.starting is None or worker.starting.done():
            worker.actor = self._make_actor()
            worker.starting = worker.actor.call("ready")

    async def _least_loaded(self) -> _Worker:
        """One of the living workers; waits while all of them are being restarted."""
        while not (there := [each for each in self._workers if each.starting is None or each.starting.done()]):
            await asyncio.wait(
                {each.starting for each in self._workers if each.starting is not None},
                return_when=asyncio.FIRST_COMPLETED,
            )
        return min(there, key=lambda each: each.running)

    async def _judge(self, task: Task, result: LoopResult) -> float:
        """The loop's own reward, or the scorer's, or what the tools say."""
        last = result.outputs[-1]
        scored = [each for each in result.outputs if each.reward_score is not None]
        spoke = [each for each in scored if any(each.response_mask)] or scored
        if own := [each.reward_score for each in spoke if each.reward_score is not None]:
            return sum(own) / len(own)
        if self._score_fn is not None:
            outcome = self._score_fn(task, result.answer)
            return await outcome if isinstance(outcome, Awaitable) else outcome
        rewards = last.extra_fields.get("tool_rewards")
        if isinstance(rewards, Mapping) and rewards and all(isinstance(each, int | float) for each in rewards.values()):
            return float(sum(rewards.values()))
        raise AgentError(
            f"episode of task {task.task_id} must get a score from its loop (reward_score), its tools, or data.scorer, "
            f"got none; set data.scorer"
        )


# Figures of agent loops: where the time of episodes went, and the anatomy of the slowest one (verl's `agent_loop/*`).


def figures_of(result: LoopResult, *, score_s: float) -> dict[str, float]:
    """Figures of one episode: times in seconds, lengths in tokens. Sums over its trajectories; lengths and turns are those of the
    longest; `total`: from its start to its score."""
    longest = max(result.outputs, key=lambda output: len(output.response_ids))
    metrics = [output.metrics for output in result.outputs]
    names = ("generate_sequences", "tool_calls", "compute_score", "num_preempted")
    sums = {name: float(sum(getattr(each, name) for each in metrics)) for name in names}
    return sums | {
        "compute_score": score_s + sums["compute_score"],
        "num_turns": float(longest.num_turns),
        "prompt_length": float(len(longest.prompt_ids)),
        "response_length": float(len(longest.response_ids)),
        "total": result.seconds + score_s,
    }


class LoopFigures:
    """Collects episodes until their figures are taken."""

    def __init__(self) -> None:
        self._episodes: list[dict[str, float]] = []

    def add(self, figures: dict[str, float]) -> None:
        """One more episode has ended."""
        self._episodes.append(figures)

    def take(self) -> dict[str, float]:
        """`agent_loop/<what>/<min|max|mean>` and `agent_loop/slowest/<what>` of the episodes since the last call; none
        if there were none."""
        episodes, self._episodes = self._episodes, []
        if not episodes:
            return {}
        figures = {"agent_loop/episodes": float(len(episodes))}
        for name in episodes[0]:
            values = [episode[name] for episode in episodes]
            figures[f"agent_loop/{name}/min"] = min(values)
            figures[f"agent_loop/{name}/max"] = max(values)
            figures[f"agent_loop/{name}/mean"] = sum(values) / len(values)
        slowest = max(episodes, key=lambda episode: episode["total"])
        return figures | {f"agent_loop/slowest/{name}": value for name, value in slowest.items()}
