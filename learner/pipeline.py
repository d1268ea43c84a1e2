"""The whole machine on one page: builds the parts, runs the loops, shuts down.

    parquet -> TaskPool -> agent -> MockedServer -> BufferDataset -> generate -> MultiRoundBufferDataset -> learn
                                        ^                               |                 ^                   |
                                        +--------- completion ----------+            notify_score     publish weights -> engine

| loop       | takes (waits for)                           | gives                                     | unblocked by         |
|------------|---------------------------------------------|-------------------------------------------|----------------------|
| `pool`     | a row of the task file (waits: an agent that asks, and room) | a running episode        | `agents`, `learn`    |
| `agents`   | a lease (waits: the pool)                   | HTTP requests; their environment scores   | `pool`               |
| `serve`    | a request                                   | a prompt in the queue, then its answer    | `generate`           |
| `generate` | prompts (waits: one)                        | a reply and a `Round`                     | `serve`              |
| `learn`    | a full batch of scored, fresh groups (waits: that many) | new weights in the engine, a step in the ledger | scores |

`learn` is the only finite loop; when it ends the others are cancelled. A loop that fails ends the run with its error; of
processes that die (agents, environment, engine, learner) new ones are started (`learner.recovery.restarts`). Invariant:
every leased episode ends once, with a reason: scored, failed, or stale; a group is trained at most once, and never with a token
older than `buffer.max_policy_lag` versions.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from agents.external import AgentPerEpisode, AgentPlace, LongLivedAgents, check_command
from agents.workers.config import read_loops
from agents.workers.manager import AgentLoopManager
from buffers.errors import TaskError
from buffers.ledger.ledger import Ledger
from buffers.records import Task
from buffers.tasks.task_order import endless_tasks, task_list
from configs.schema import Config
from env_adapters.child_process import Child, resolve_command, start_environment
from env_adapters.scoring.rewards import Rewards
from learner.checkpoints.store import Checkpoint, CheckpointStore
from learner.evaluation import Evaluation, EvaluationPlan
from learner.learn_loop import LearnLoop
from learner.recovery.failure_report import why_episodes_fail
from learner.recovery.failure_watch import watch
from learner.recovery.restart_limit import RestartLimit
from learner.recovery.restarts import Environment, end_silent, ended, restart_engine_when_dead, start_engine
from learner.reporting.display import Display
from learner.reporting.episode_samples import Traces
from learner.reporting.run_metrics import History
from learner.reporting.tracker import Tracker
from learner.startup import ray_cluster
from learner.startup.key_files import environment_files
from learner.startup.model_and_tasks import prepare_files, saved_weights, weights_folder
from learner.startup.run_buffers import RunBuffers, open_run_buffers
from learner.training.ranks import LearnerRanks, RankDied
from learner.validation import Validation
from mocked_server.dispatch import PLAIN, Others
from mocked_server.generation import Generation
from mocked_server.http.uvicorn_server import bind
from mocked_server.keys import KeyRing, round_secret, secret_of_run
from mocked_server.server import MockedServer
from mocked_server.vllm.engine import (
    EngineSettings,
    VLLMEngine,
    has_gpu,
    interrupts_blocked,
    make_args,
    make_vllm_config,
    set_process_environment,
)

logger = logging.getLogger(__name__)

ENV_START_S = 60.0
MAX_NUM_SEQS = 256
"""Most generations in one engine step."""


@dataclass(slots=True, kw_only=True)
class Parts:
    """What a run is made of, once built."""

    books: RunBuffers
    engine: VLLMEngine
    server: MockedServer
    generation: Generation
    main: LearnLoop | Evaluation
    env: Environment | None = None
    background: list[asyncio.Task[None]] = field(default_factory=list)


class Pipeline:
    """One run. `await run()` returns when `run.steps` steps are trained, or after `stop()`.

    `resume`: the folder holds an earlier run's ledger, which goes on from `checkpoint`, or from its start without one.
    `evaluates`: there is no learner; the tasks are played by the model as it is, and `evaluation` has what they scored.
    """

    def __init__(
        self,
        config: Config,
        *,
        folder: Path,
        display: Display,
        tracker: Tracker,
        resume: bool = False,
        checkpoint: Checkpoint | None = None,
        evaluates: EvaluationPlan | None = None,
    ) -> None:
        self._config = config
        self._folder = folder
        self._display = display
        self._tracker = tracker
        self._resume = resume
        self._checkpoint = checkpoint
        self._start = checkpoint.position.step if checkpoint else 0
        self._ranks: LearnerRanks
        self._learn: LearnLoop | None = None
        self._evaluates = evaluates
        self.failures: dict[str, int] = {}
        """Attempts that failed, by reason, at the end."""
        self.evaluation: Evaluation | None = None
        """What was played; None in a run that learns, and before it starts."""
        self._restart_limit = RestartLimit()
        self.history = History(config, earlier=tracker.earlier)
        self.on_ray_started: Callable[[], None] = lambda: None

    def stop(self) -> bool:
        """Finish after the step in progress (Ctrl-C). False: nothing is learned yet, the caller cancels `run` instead."""
        return self._learn is not None and self._learn.stop()

    async def run(self) -> None:
        """Build everything, learn, tear everything down."""
        async with AsyncExitStack() as stack:
            parts = await self._build(stack)
            async with asyncio.TaskGroup() as loops:
                parts.background = self._start_loops(loops, parts)
                await loops.create_task(parts.main.run(), name="evaluate" if self._evaluates else "learn")
                for task in parts.background:
                    task.cancel()
            counts = parts.books.ledger.counts()
            self.failures = {
                name.removeprefix("failed/"): number for name, number in counts.items() if name.startswith("failed/")
            }
            self.history.finish(counts, parts.server.status(), self._restart_limit.figures())

    # Building

    async def _build(self, stack: AsyncExitStack) -> Parts:
        config = self._config
        if config.agents.command:
            check_command(config.agents.command)
        scorer, manager = config.data.scorer, config.data.reward_manager
        self._rewards = Rewards(scorer, batch=manager == "batch") if scorer else None
        self._loops = self._make_loops()
        self._keys = KeyRing(secret_of_run(self._folder, host=config.server.host))
        self._socket = bind(config.server.host, config.server.port)
        stack.callback(self._socket.close)
        with self._display.phase("preparing model and tasks"):
            model = await prepare_files(config, folder=self._folder, make=_make_data, players=self._players())
        set_process_environment()
        weights = weights_folder(self._folder)
        stack.callback(shutil.rmtree, weights, ignore_errors=True)
        with self._display.phase("starting engine and server"):
            learner, (engine, server, books) = await self._start_heavy(stack, model, weights)
        generation = Generation(
            engine, queue=server.prompt_queue, rounds=books.ledger, blame=partial(self._end_killer, server)
        )
        server.on_ended = generation.forget
        for episode, rounds in books.running:
            generation.resume(episode.episode_id, rounds)
        if self._evaluates:
            main: LearnLoop | Evaluation = self._make_evaluation(self._evaluates, books)
        else:
            main = self._learn = self._make_learn_loop(stack, learner, engine, server, books, generation, weights)
        parts = Parts(books=books, engine=engine, server=server, generation=generation, main=main)
        if config.env.command:
            env = {"SERVER_URL": server.base_url, "SCORER_KEY": server.keys.scorer}
            start = partial(
                start_environment,
                config.env.command, env=env, cwd=Path.cwd(), log=self._folder / "env.log", deadline_s=ENV_START_S,
            )  # fmt: skip
            parts.env = Environment(start, lost=partial(environment_lost, server))
            stack.push_async_callback(parts.env.stop)
            server.env_address = await parts.env.start(restart_limit=self._restart_limit)
        stack.enter_context(environment_files(self._folder, server))
        return parts

    def _make_learn_loop(
        self,
        stack: AsyncExitStack,
        learner: asyncio.Task[None],
        engine: VLLMEngine,
        server: MockedServer,
        books: RunBuffers,
        generation: Generation,
        weights: Path,
    ) -> LearnLoop:
        config = self._config
        return LearnLoop(
            run=config.run, buffer=config.buffer,
            ledger=books.ledger, rounds=books.rounds, pool=books.pool,
            ranks=self._ranks, engine=engine, generated=generation.stats,
            store=CheckpointStore(self._folder / "checkpoints", keep=config.run.checkpoints.keep),
            weights=weights, history=self.history, tracker=self._tracker, display=self._display,
            validation=self._validation(books.ledger),
            shaping=config.rollout.max_tokens if config.data.reward_manager == "dapo" else None,
            start=self._start, num_replays=books.num_replays,
            more_figures=self._loops.figures.take if self._loops else dict,
            traces=self._open_traces(stack, server),
            restart_limit=self._restart_limit, started=learner, prepare=self._prepare_learner, checkpoint=self._checkpoint,
        )  # fmt: skip

    def _make_evaluation(self, plan: EvaluationPlan, books: RunBuffers) -> Evaluation:
        config = self._config
        paths = [Path(path) for path in config.data.task_files]

        def read_tasks() -> list[Task]:
            return [task for path in paths for task in task_list(path, agent_name=self._default_agent())][: plan.limit]

        self.evaluation = Evaluation(
            books.ledger,
            pool=books.pool,
            read_tasks=read_tasks,
            samples=config.data.validation.samples,
            display=self._display,
        )
        return self.evaluation

    def _end_killer(self, server: MockedServer, episode_id: str) -> None:
        """The engine died of this episode's requests, again and again: it ends, the engine goes on."""
        self._restart_limit.excuse("engine")
        server.fail_soon(episode_id, "killed the engine")

    def _open_traces(self, stack: AsyncExitStack, server: MockedServer) -> Traces:
        traces = Traces(self._folder, decode=server.decode, start=self._start)
        stack.callback(traces.close)
        return traces

    def _make_loops(self) -> AgentLoopManager | None:
        config = self._config
        if not config.agents.loops:
            return None
        return AgentLoopManager(
            read_loops(Path(config.agents.loops)),
            num_workers=max(1, config.agents.processes),
            score_fn=self._rewards.score if self._rewards else None,
            temperature=config.rollout.temperature,
        )

    def _players(self) -> Set[str] | None:
        """Who may play a row, where nobody but our own loops does."""
        config = self._config
        if self._loops is None or config.agents.command or config.env.command:
            return None
        return self._loops.names | ({PLAIN} if config.data.scorer else set())

    async def _start_heavy(
        self, stack: AsyncExitStack, model: Path, weights: Path
    ) -> tuple[asyncio.Task[None], tuple[VLLMEngine, MockedServer, RunBuffers]]:
        """Engine and server are started, the learner is still starting: the learn loop waits for it, agents do not."""
        ray_start = asyncio.to_thread(interrupts_blocked()(ray_cluster.start), self._config.buffer.node)
        ray_started = asyncio.create_task(ray_start, name="start ray")
        stack.push_async_callback(ray_cluster.stop_after, ray_started)
        self._ranks = self._make_ranks(model)
        stack.push_async_callback(self._ranks.close)
        learner = asyncio.create_task(self._start_learner(ray_started), name="start learner")
        stack.push_async_callback(ended, learner)
        async with asyncio.TaskGroup() as tasks:
            engine = tasks.create_task(self._start_engine(stack, model, weights, ray_started), name="start engine")
            if self._loops is not None:
                await asyncio.shield(ray_started)
                await self._start_loop_workers(self._loops, stack, model)
        return learner, engine.result()

    async def _start_loop_workers(self, loops: AgentLoopManager, stack: AsyncExitStack, model: Path) -> None:
        rollout, host = self._config.rollout, self._config.server.host
        stack.push_async_callback(loops.close)
        await loops.start(
            model_path=str(model),
            server_urls=[f"http://{host}:{self._socket.getsockname()[1]}"],
            worker_key=self._keys.worker,
            prompt_length=rollout.max_model_len - rollout.max_tokens,
            response_length=rollout.max_tokens,
        )

    def _make_ranks(self, model: Path) -> LearnerRanks:
        config = self._config
        return LearnerRanks(
            config.learner,
            model_path=str(model),
            dtype=config.model.dtype,
            temperature=config.rollout.temperature,
            seed=config.run.seed,
            keep_versions=config.buffer.max_policy_lag + 1,
            gpus_per_rank=1.0 if has_gpu() else 0.0,
        )

    async def _start_learner(self, ray_started: asyncio.Task[None]) -> None:
        await asyncio.shield(ray_started)
        self.on_ray_started()
        while not self._evaluates:
            try:
                await self._ranks.start()
                return await self._prepare_learner(self._checkpoint)
            except RankDied as death:
                self._restart_limit.note("learner", death)
            except asyncio.CancelledError:
                self._ranks.kill()  # `close` would wait for the end of the warm start
                raise

    async def _prepare_learner(self, checkpoint: Checkpoint | None) -> None:
        """The state of a checkpoint; that of the start, without one."""
        warm = self._config.warm_start
        if checkpoint is not None:
            await self._ranks.load(checkpoint.learner)
        elif warm.demonstrations:
            seed = self._config.run.seed
            metrics = await self._ranks.warm_start(Path(warm.demonstrations), steps=warm.steps, lr=warm.lr, seed=seed)
            if not self.history.warm_start:
                self.history.warm_start = metrics
                self._tracker.log(0, {f"warm_start/{name}": value for name, value in metrics.items()})

    async def _start_engine(
        self, stack: AsyncExitStack, model: Path, weights: Path, ray_started: asyncio.Task[None]
    ) -> tuple[VLLMEngine, MockedServer, RunBuffers]:
        config = self._config
        warms_up = config.warm_start.demonstrations and self._checkpoint is None and not has_gpu()
        if config.buffer.node or warms_up:  # which takes longest: nothing gets in the way of its Ray
            await asyncio.shield(ray_started)
        books = await open_run_buffers(
            config, stack, folder=self._folder, secret=partial(round_secret, self._folder),
            resume=self._resume, checkpoint=self._checkpoint,
        )  # fmt: skip
        settings = EngineSettings(
            model_path=model, served_name="policy", dtype=config.model.dtype,
            rollout=config.rollout, server=config.server, seed=config.run.seed,
            max_num_seqs=min(MAX_NUM_SEQS, config.agents.concurrency),
        )  # fmt: skip
        args = await asyncio.to_thread(make_args, settings)
        vllm_config = await asyncio.to_thread(make_vllm_config, args)
        first = (saved_weights(self._checkpoint, weights), self._start) if self._checkpoint else None
        engine = VLLMEngine(
            vllm_config,
            count_preemptions=self._loops is not None,
            weights=first,
            timeout_s=config.rollout.engine_timeout_s,
        )
        stack.push_async_callback(engine.close)
        await start_engine(engine, restart_limit=self._restart_limit)
        server = MockedServer(
            args=args, vllm_config=vllm_config, rollout=config.rollout, server=config.server,
            pool=books.pool, notify_score_fn=books.rounds.notify_score,
            score_fn=self._rewards.score if self._rewards else None,
            loops=self._loops, sock=self._socket, keys=self._keys,
            others=Others(agents=self._players() is None, default=self._default_agent()),
        )  # fmt: skip
        server.attach_engine(engine)
        for episode, rounds in books.running:
            server.resume_episode(episode, rounds)
        await server.start()
        stack.push_async_callback(server.close)
        return engine, server, books

    def _validation(self, ledger: Ledger) -> Validation | None:
        validation = self._config.data.validation
        if not validation.tasks:
            return None
        read = partial(task_list, Path(validation.tasks), agent_name=self._default_agent())
        return Validation(ledger, tasks=read, every=validation.every, samples=validation.samples)

    def _default_agent(self) -> str | None:
        """Who plays rows that name no agent: the agent; without one the first loop; as in verl, nobody has to when there is a
        scorer."""
        config = self._config
        if config.agents.command:
            return None
        return self._loops.first if self._loops is not None else PLAIN if config.data.scorer else None

    # Loops

    def _start_loops(self, loops: asyncio.TaskGroup, parts: Parts) -> list[asyncio.Task[None]]:
        config = self._config
        started = [
            loops.create_task(parts.server.wait(), name="serve"),
            loops.create_task(parts.generation.run(), name="generate"),
            loops.create_task(self.watch(parts), name="watch"),
            loops.create_task(
                restart_engine_when_dead(parts.engine, restart_limit=self._restart_limit), name="keep the engine"
            ),
        ]
        if (silence_s := config.agents.silence_s) is not None:
            silent = end_silent(parts.server.episodes.silent, fail=parts.server.fail, seconds=silence_s)
            started.append(loops.create_task(silent, name="end the silent"))
        if parts.env is not None:
            started.append(
                loops.create_task(parts.env.keep(restart_limit=self._restart_limit), name="keep the environment")
            )
        if config.data.task_files and not self._evaluates:
            parts.books.pool.add_source(
                endless_tasks(
                    {Path(path): weight for path, weight in config.data.task_files.items()},
                    seed=config.run.seed,
                    opened=parts.books.opened,
                    agent_name=self._default_agent(),
                )
            )
        if config.agents.command:
            started.append(loops.create_task(self._agents(parts).run(), name="agents"))
        return started

    def _agents(self, parts: Parts) -> AgentPerEpisode | LongLivedAgents:
        config = self._config
        place = AgentPlace(
            environment=parts.server.environment,
            worker_key=parts.server.keys.worker_key,
            folder=self._folder / "agents",
            named=tuple(config.agents.environment),
        )
        many = config.agents.concurrency
        if config.agents.processes == 0:
            return AgentPerEpisode(
                config.agents.command, place=place, desk=parts.server, concurrency=many, judge=self._rewards
            )
        return LongLivedAgents(
            config.agents.command,
            place=place,
            desk=parts.server,
            processes=config.agents.processes,
            concurrency=many,
        )

    async def watch(self, parts: Parts) -> None:
        """Shows the queues once a second; ends the run when it cannot succeed any more
        (`learner.recovery.failure_watch`)."""

        def show() -> None:
            self._display.queues(
                prompts_waiting=parts.server.prompt_queue.qsize() + parts.generation.stats.running,
                episodes_running=int(parts.books.pool.metrics()["pool/running"]),
                groups_ready=parts.books.ledger.counts()["groups/ready"],
            )
            if news := self.history.news():
                self._display.note(news)

        def why(counts: Mapping[str, int]) -> str:
            return why_episodes_fail(
                counts,
                refused=parts.server.model_requests.refused,
                agents=self._folder / "agents",
                env_log=self._folder / "env.log" if self._config.env.command else None,
            )

        await watch(
            counts=parts.books.ledger.counts,
            groups_per_step=self._config.buffer.groups_per_step,
            show=show,
            say=self._display.note,
            pool=parts.books.pool.metrics,
            is_starting=lambda: self._display.is_starting,
            why=why,
        )


async def _make_data(command: Sequence[str], missing: str, log: Path) -> None:
    child = await Child.start(resolve_command(command), env=None, cwd=Path.cwd(), log=log)
    if (code := await child.wait()) != 0:
        raise TaskError(f"data.make must write {missing}, but it exited with code {code}: {child.log_tail()}")


async def environment_lost(server: MockedServer, address: str) -> None:
    """Another one listens at `address`: what the first one was playing is tried again."""
    server.env_address = address
    await server.fail_all("environment died")
