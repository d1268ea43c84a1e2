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
| `engines`  | the engines' figures (waits: half a second)  | slots of the pool (`agents.concurrency: auto`) | time                |
| `grow`     | the nodes of the cluster (waits: two seconds) | engines on nodes that have joined       | time                 |
| `learn`    | a full batch of scored, fresh groups (waits: that many) | new weights in the engine, a step in the ledger | scores |

`learn` is the only finite loop; when it ends the others are cancelled. A loop that fails ends the run with its error; of
processes that die (agents, environment, engine, learner) new ones are started (`learner.recovery.restarts`). Invariant:
every leased episode ends once, with a reason: scored, failed, or stale; a group is trained as often as it may, never with a token
older than `buffer.max_policy_lag` versions.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from argparse import Namespace
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from agents.external import AgentPerEpisode, AgentPlace, LongLivedAgents, check_command
from agents.harbor.trials import HarborTrials
from agents.workers.manager import AgentLoopManager
from buffers.disk import until_taken
from buffers.errors import TaskError, UnderstudyError
from buffers.ledger.ledger import Ledger
from buffers.private_text import read_patterns
from buffers.records import Task
from buffers.tasks.task_order import endless_tasks, task_list
from configs.fork_server import interrupts_blocked
from configs.schema import Config
from env_adapters.child_process import Child, resolve_command, start_environment
from learner.agreement import Agreement
from learner.checkpoints.store import Checkpoint, CheckpointStore, saved_versions
from learner.checkpoints.weight_sync import WeightSync
from learner.engines import RemoteEngines, RoleModels, make_weight_sync, role_models, role_names, run_nodes
from learner.learn_loop import LearnLoop, Outputs, Schedule
from learner.lessons import Lessons, compared
from learner.live_versions import Versions
from learner.placement.plan import in_cluster
from learner.players import Players, make_players
from learner.recovery.failure_watch import watch, why_episodes_fail
from learner.recovery.restarts import Environment, RestartLimit, end_silent, ended
from learner.reporting.display import Display, write_summary
from learner.reporting.run_metrics import History
from learner.reporting.run_record import SFT_FOLDER, MachineLog
from learner.reporting.token_figures import TokenFiles
from learner.reporting.tracker import Traces, Tracker
from learner.sft_loop import Demonstrations, Play, SftLoop, read
from learner.startup.model_and_tasks import prepare_files
from learner.startup.run_buffers import RunBuffers, most_running, open_run_buffers
from learner.startup.run_folder import environment_files, write_config
from learner.training.ranks import LearnerProcesses, LearnerRanks
from learner.training.role_trainer import RoleTrainer
from learner.training.trainer import Trainer
from learner.validation import Evaluation, EvaluationPlan, Validation
from mocked_server.dispatch import Others
from mocked_server.fleet.admission import Admission
from mocked_server.fleet.engine_fleet import EngineFleet
from mocked_server.fleet.engine_watch import EngineWatch
from mocked_server.generation import Generation
from mocked_server.http.roles import Upstream
from mocked_server.http.uvicorn_server import bind
from mocked_server.keys import KeyRing, round_secret, secret_of_run, wire_secret
from mocked_server.live_keys import LiveKeys
from mocked_server.live_sessions import Newest
from mocked_server.next_turn import ChatModel
from mocked_server.processes.server_processes import ServerProcesses
from mocked_server.server import MockedServer
from mocked_server.servers.choose import make_engines
from mocked_server.vllm.demonstrations import make_renderer
from mocked_server.vllm.engine import free_sampling
from mocked_server.vllm.engine_arguments import (
    EngineSettings,
    has_gpu,
    make_args,
    make_vllm_config,
    set_process_environment,
)
from mocked_server.vllm.hosted.program import HostSettings
from mocked_server.watching import Watching, weighed

logger = logging.getLogger(__name__)

ENV_START_S = 300.0
USERS_VERSIONS = 16
"""Versions that ranks keep to check what users were told, however old what they learn from may be."""
SFT_FIGURES = ("loss_first", "loss_last", "val_loss_last", "conversations", "refused", "seconds")
"""What the line of such a run's step 0, or of a lesson's, has of it."""
MAX_NUM_SEQS = 256
"""Most generations in one engine step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The server's socket, and the keys that open it."""

    keys: KeyRing
    socket: socket.socket

    @property
    def url(self) -> str:
        host, port = self.socket.getsockname()[:2]
        return f"http://{host}:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What answers agents: engine and server, and the ledger that records them."""

    engine: EngineFleet
    engines: EngineWatch
    server: MockedServer
    buffers: RunBuffers
    others: RoleModels


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a run is made of, once built."""

    players: Players
    engine: EngineFleet
    engines: EngineWatch
    server: MockedServer
    buffers: RunBuffers
    generation: Generation
    others: RoleModels
    environment: Environment | None
    main: Callable[[], Coroutine[Any, Any, None]]
    """The one loop that is finite."""


class Pipeline:
    """One run. `await run()` returns when `run.steps` steps are trained, or after `stop()`.

    `resume`: the folder holds an earlier run's ledger, which is resumed from `checkpoint`, or from its start without one.
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
        self._evaluates = evaluates
        self._learn: LearnLoop | SftLoop | None = None
        self._vllm: asyncio.Future[tuple[EngineSettings, Namespace, Any]] | None = None
        """What vLLM makes of the configuration, once it is asked for."""
        self._has_ended = False
        self._machine = MachineLog(folder)
        self.failures: dict[str, int] = {}
        """Attempts that failed, by reason, at the end."""
        self.agreement: Agreement | None = None
        """What compares engines and learner; None in an evaluation, and before it is needed."""
        self.evaluation: Evaluation | None = None
        """What was played; None in a run that learns, and before it starts."""
        self._restart_limit = RestartLimit()
        self.history = History(config, earlier=tracker.earlier, earlier_s=self._machine.earlier_s())
        self.on_joined: Callable[[], None] = lambda: None
        self._only_serves = False
        """Learning has failed; users are served on."""
        self._versions: Versions | None = None
        """Those that users may be served."""
        self._watching: Watching | None = None
        """Has another model answer users."""
        self._played: asyncio.Future[Play] | None = None
        """Plays validation tasks, once there are agents; None: SFT does not begin."""

    def stop(self) -> bool:
        """Finish after the step in progress (Ctrl-C). False: nothing is learned yet, or any more: the caller cancels `run`."""
        if self._only_serves:
            return False
        return self._has_ended or (self._learn is not None and self._learn.stop())

    async def run(self) -> None:
        """Build everything, learn, tear everything down."""
        self._machine.write({"phase": "starting", "learner": "starting"})
        async with AsyncExitStack() as stack:
            if self._only_sft and not self._config.data.validation.tasks:
                await self._learn_alone(stack)
                return
            parts = await self._build(stack)
            async with asyncio.TaskGroup() as loops:
                background = self._start_loops(loops, parts)
                await loops.create_task(parts.main(), name="evaluate" if self._evaluates else "learn")
                for task in background:
                    task.cancel()
            self._has_ended = True
            counts = parts.buffers.ledger.counts()
            self.failures = {
                name.removeprefix("failed/"): number for name, number in counts.items() if name.startswith("failed/")
            }
            self.history.finish(counts, parts.server.status(), self._restart_limit.figures())

    # Building: each step returns what it has built, and leaves on `stack` how that ends.

    async def _build(self, stack: AsyncExitStack) -> Parts:
        config = self._config
        if config.agents.command:
            check_command(config.agents.command, preload=config.agents.preload)
        players = make_players(config)
        address = self._bind(stack)
        model = await self._prepare(players)
        with self._display.phase("starting engine and server"):
            await self._find_nodes(stack, model=model)
            weights = make_weight_sync(config, nodes=self._nodes, folder=self._folder, saved=self._saved_model)
            stack.push_async_callback(weights.close)
            learner, starting = self._start_learner(stack, model=model)
            serving = await self._start_serving(stack, model=model, players=players, address=address, weights=weights)
        engine, server, buffers = serving.engine, serving.server, serving.buffers
        as_it_is = dict.fromkeys((name for name, role in config.roles.items() if role.frozen == 0), engine)
        generation = Generation(
            engine, queue=server.prompt_queue, episodes=server.episodes, rounds=buffers.ledger,
            blame=partial(self._end_killer, server), frozen=serving.others.engines | as_it_is, adapters=config.adapter_roles,
            records_experts=config.learner.router_replay,
        )  # fmt: skip
        server.on_ended = generation.forget
        if server.sessions is not None:
            generation.on_round, generation.keeps = server.sessions.recorded, server.sessions.keeps
        watched = [] if self._watching is None else [self._watching.upstream]
        for upstream in (*serving.others.upstreams.values(), *watched):
            upstream.record, upstream.encode = generation.record, server.encode
        main: Callable[[], Coroutine[Any, Any, None]]
        if self._evaluates:
            main = self._make_evaluation(self._evaluates, players=players, buffers=buffers).run
        elif self._only_sft:
            main = partial(
                self._learn_and_play, starting, learner=learner, serving=serving, players=players, weights=weights
            )
        else:
            self._learn = self._make_learn_loop(
                serving,
                players=players,
                learner=learner,
                starting=starting,
                weights=weights,
                generation=generation,
                model=model,
            )
            main = partial(self._learn_for_users, self._learn) if config.serve.enabled else self._learn.run
        environment = await self._start_environment(stack, server)
        stack.enter_context(environment_files(self._folder, server))
        return Parts(
            players=players, engine=engine, engines=serving.engines, server=server, buffers=buffers, generation=generation,
            others=serving.others, environment=environment, main=main,
        )  # fmt: skip

    async def _prepare(self, players: Players) -> Path:
        """The model's folder, and the files that are read."""
        with self._display.phase("preparing model and tasks"):
            model = await prepare_files(
                self._config,
                folder=self._folder,
                make=_make_data,
                players=players,
                begins_with_sft=self._begins_with_sft,
                warn=self._display.note,
            )
        set_process_environment()
        return model

    async def _find_nodes(self, stack: AsyncExitStack, *, model: Path) -> None:
        if in_cluster(self._config.buffer.node):
            await self._join_cluster(stack)
        self._nodes = await asyncio.to_thread(
            run_nodes, self._config, model=model, folder=self._folder, learns=self._evaluates is None
        )

    @property
    def _start(self) -> int:
        return self._checkpoint.position.step if self._checkpoint else 0

    @property
    def _saved_model(self) -> Path | None:
        """The folder of the model that may have adapters of roles beside it: a checkpoint's, or the one that is evaluated."""
        if self._evaluates:
            return Path(self._config.model.path)
        return None if self._checkpoint is None else self._checkpoint.model

    @property
    def _only_sft(self) -> bool:
        return self._config.learner.stage == "sft"

    @property
    def _begins_with_sft(self) -> bool:
        """Whether demonstrations are learned, first or alone."""
        again = self._checkpoint is not None and not self._only_sft
        return bool(self._config.sft.demonstrations) and not again and self._evaluates is None

    def _bind(self, stack: AsyncExitStack) -> Address:
        server = self._config.server
        address = Address(
            keys=KeyRing(secret_of_run(self._folder, host=server.host)), socket=bind(server.host, server.port)
        )
        stack.callback(address.socket.close)
        return address

    async def _join_cluster(self, stack: AsyncExitStack) -> None:
        from learner.startup import ray_cluster

        joining = asyncio.ensure_future(
            asyncio.to_thread(interrupts_blocked()(ray_cluster.join), self._config.buffer.node)
        )
        stack.push_async_callback(ray_cluster.leave_after, joining)
        open_to_all = await asyncio.shield(joining)
        if open_to_all and not self._config.run.trusted_network:
            self._display.note(open_to_all)
        self.on_joined()

    def _start_learner(self, stack: AsyncExitStack, *, model: Path) -> tuple[LearnerProcesses, asyncio.Task[None]]:
        """The learner and its start, which is not awaited here: the learn loop waits for it, agents do not."""
        config = self._config
        roles = config.adapter_roles
        ranks = LearnerRanks(
            config.used_learner,
            model_path=str(model),
            dtype=config.model.dtype,
            temperature=config.rollout.temperature,
            seed=config.run.seed,
            keep_versions=config.buffer.max_policy_lag + 1,
            places=self._nodes.rank_places,
            trainer=RoleTrainer if roles else Trainer,
            here=config.run.debug,
            more={"longest_row": config.rollout.max_model_len, "replay_lag": config.buffer.replay.oldest}
            | ({"most_checked": USERS_VERSIONS} if config.serve.enabled else {})
            | {"trust_remote_code": config.model.trust_remote_code}
            | ({"roles": roles, "groups_per_step": config.buffer.groups_per_step} if roles else {}),
        )
        first = self._make_sft(stack, ranks=ranks, model=model) if self._begins_with_sft else None
        learner = LearnerProcesses(ranks, restart_limit=self._restart_limit, first=first)
        stack.push_async_callback(ranks.close)

        async def start() -> None:
            if not self._evaluates:
                await learner.start(None if self._only_sft else self._checkpoint)
                self._display.note(await ranks.layout_line())

        starting = asyncio.create_task(start(), name="start learner")
        stack.push_async_callback(ended, starting)
        return learner, starting

    # SFT: a run of its own in this folder, or in a folder below it, before the first step of RL

    def _make_sft(
        self, stack: AsyncExitStack, *, ranks: LearnerRanks, model: Path
    ) -> Callable[[], Coroutine[Any, Any, None]]:
        """What brings fresh ranks to what demonstrations teach."""
        config, folder, tracker = self._config, self._folder, self._tracker
        self._played = asyncio.get_running_loop().create_future()
        if not self._only_sft:
            folder = self._folder / SFT_FOLDER
            config, tracker = self._sft_stage(folder, trackers=config.run.trackers, stack=stack)
        loop = self._sft_loop(config, folder=folder, tracker=tracker, ranks=ranks, model=model)
        if self._only_sft:
            self._learn = loop

        async def stage() -> None:
            await loop.run()
            is_told = bool(self.history.steps)  # of a learner that was started again
            self._note_sft(loop)
            if not self._only_sft and not is_told:
                self._tracker.log(0, _sft_figures(loop))
                write_summary(folder / "summary.json", {"name": config.run.name, **loop.summary(), "error": None})

        return stage

    def _sft_stage(
        self, folder: Path, *, trackers: Sequence[str], stack: AsyncExitStack | ExitStack, **sft: Any
    ) -> tuple[Config, Tracker]:
        """Configuration and figures of SFT in a folder below the run's. `sft`: keys of the section that are others there."""
        run = self._config.run.model_copy(update={"name": f"{self._config.run.name}-{folder.name}"})
        learner = self._config.learner.model_copy(update={"stage": "sft"})
        config = self._config.model_copy(
            update={"run": run, "learner": learner, "sft": self._config.sft.model_copy(update=sft)}
        )
        newest = CheckpointStore(folder / "checkpoints", keep=1).newest()
        tracker = Tracker(
            folder, trackers=trackers, name=run.name, config=config.model_dump(),
            start=newest.position.step if newest else 0, warn=self._display.note,
        )  # fmt: skip
        stack.callback(tracker.close)
        return config, tracker

    async def _lesson(self, file: Path, folder: Path, *, ranks: LearnerRanks, model: Path) -> dict[str, float]:
        """SFT of a live run's own demonstrations, between two of its steps."""
        with ExitStack() as stack:
            config, tracker = self._sft_stage(
                folder, trackers=(), stack=stack, demonstrations=str(file), validation="", min_score=None, patience=None
            )
            loop = self._sft_loop(config, folder=folder, tracker=tracker, ranks=ranks, model=model)
            await loop.run()
            return _sft_figures(loop)

    def _sft_loop(self, config: Config, *, folder: Path, tracker: Tracker, ranks: LearnerRanks, model: Path) -> SftLoop:
        def begun(num_steps: int) -> None:
            write_config(folder, config.model_copy(update={"run": config.run.model_copy(update={"steps": num_steps})}))

        loop = SftLoop(
            config,
            ranks=ranks,
            read_rows=partial(self._read_demonstrations, config, model=model),
            store=CheckpointStore(folder / "checkpoints", keep=config.run.checkpoints.keep),
            tracker=tracker,
            display=self._display,
            restart_limit=self._restart_limit,
            play=self._play if self._only_sft and config.data.validation.tasks else None,
            on_begun=begun,
            on_step=lambda: self._note_sft(loop),
        )
        return loop

    def _note_sft(self, loop: SftLoop) -> None:
        self.history.sft = loop.summary()
        if self._only_sft and not self._config.data.validation.tasks:  # else `watch` tells
            state = {"phase": "", "learner": loop.activity, "step": loop.step, "steps_planned": loop.num_steps}
            self._machine.write(state)

    async def _read_demonstrations(self, config: Config, *, model: Path) -> Demonstrations:
        """The conversations of the configured files as play shows them."""
        _, _, vllm_config = await self._vllm_of(model)
        strict = config.server.replay_match == "strict"
        only_loops = bool(config.agents.loops) and not config.agents.command
        last_only = config.sft.train_on == "last"
        renderer = make_renderer(vllm_config, strict=strict, last_only=last_only, only_loops=only_loops)
        return await asyncio.to_thread(
            read, config.sft, seed=config.run.seed, render=renderer.rows, say=self._display.note
        )

    async def _learn_alone(self, stack: AsyncExitStack) -> None:
        """SFT without validation tasks: nobody plays, so there is no engine, server or ledger."""
        model = await self._prepare(make_players(self._config))
        await self._find_nodes(stack, model=model)
        _, starting = self._start_learner(stack, model=model)
        await starting
        self._has_ended = True
        self.history.finish({}, {}, self._restart_limit.figures())

    async def _learn_and_play(
        self,
        starting: asyncio.Task[None],
        *,
        learner: LearnerProcesses,
        serving: Serving,
        players: Players,
        weights: WeightSync,
    ) -> None:
        """SFT, and what its weights score in validation tasks."""
        validation = self._make_validation(players, serving.buffers.ledger)
        assert validation is not None, "SFT without validation tasks is alone"

        async def play(step: int) -> dict[str, float]:
            await weights.publish(learner.ranks, serving.engine, version=step)
            serving.buffers.pool.unpause()
            validation.begin(step, last=True)
            return await validation.finish()

        assert self._played is not None, "SFT has begun"
        self._played.set_result(play)
        await starting

    async def _play(self, step: int) -> dict[str, float]:
        """Waits until the agents can play."""
        assert self._played is not None, "SFT has begun"
        return await (await asyncio.shield(self._played))(step)

    async def _vllm_of(self, model: Path) -> tuple[EngineSettings, Namespace, Any]:
        """Settings, arguments and configuration of the engines, made once."""

        def make() -> tuple[EngineSettings, Namespace, Any]:
            settings = engine_settings(
                self._config, model=model, beside_rank=self._nodes.placement.shares, most_running=self._most_running,
                evaluates=self._evaluates is not None,
            )  # fmt: skip
            args = make_args(settings)
            server = settings.server.model_copy(update={"tool_parser": args.tool_call_parser})
            return replace(settings, server=server), args, make_vllm_config(args)

        if self._vllm is None:
            self._vllm = asyncio.ensure_future(asyncio.to_thread(make))
        return await asyncio.shield(self._vllm)

    async def _start_serving(
        self,
        stack: AsyncExitStack,
        *,
        model: Path,
        players: Players,
        address: Address,
        weights: WeightSync,
    ) -> Serving:
        """Ledger, engine and server, and the workers of agent loops beside them."""
        config = self._config
        async with asyncio.TaskGroup() as tasks:
            if players.loops is not None:
                tasks.create_task(
                    self._start_loop_workers(stack, players.loops, model=model, address=address),
                    name="start loops",
                )
            buffers = await open_run_buffers(
                config, stack, folder=self._folder, secret=partial(round_secret, self._folder),
                resume=self._resume, checkpoint=self._checkpoint,
            )  # fmt: skip
            settings, args, vllm_config = await self._vllm_of(model)
            if config.server.tool_parser == "auto" and args.tool_call_parser and config.model.path != "tiny":
                self._display.note(
                    f"server.tool_parser={args.tool_call_parser}, which reads calls as the model's chat template writes them"
                )
            engine = self._make_fleet(
                vllm_config, settings, weights=weights,
                count_preemptions=players.loops is not None or config.agents.concurrency == "auto",
            )  # fmt: skip
            stack.push_async_callback(engine.close)
            others = role_models(
                config, settings=settings, vllm_config=vllm_config, record_death=self._engine_died, stack=stack
            )
            if config.serve.enabled and config.learner.lora.rank and not config.adapter_roles:
                weights.earlier = self._versions = self._make_versions(players, engine, ledger=buffers.ledger)
                await self._versions.begin()
            await others.start_beside(
                engine, folder=self._folder, weights=weights, first=self._remote.first, say=self._display.note
            )
            server = MockedServer(
                args=args, vllm_config=vllm_config, rollout=config.rollout, server=config.server,
                pool=buffers.pool, notify_score_fn=buffers.rounds.notify_score,
                score_fn=players.rewards.score if players.rewards else None,
                loops=players.loops, sock=address.socket, keys=address.keys,
                others=Others(agents=players.names is None, default=players.default),
                processes=self._make_server_processes(settings, keys=address.keys, ledger=buffers.ledger),
                roles=others.roles,
            )  # fmt: skip
            stack.push_async_callback(server.close)
            server.attach_engine(engine)
            if config.serve.enabled:
                self._watching = self._watch(stack, buffers.ledger)
                server.serve_users(
                    buffers.ledger, keys=LiveKeys(self._folder), silence_s=config.serve.silence_s,
                    retention_s=None if config.serve.retention_days is None else 86_400 * config.serve.retention_days,
                    words_count=config.learner.advantage == "none", policy=self._versions or Newest(engine),
                    watching=self._watching,
                    patterns=read_patterns(config.serve.private_patterns) if config.serve.private_patterns else None,
                )  # fmt: skip
                server.versions = self._versions
                if (judge := config.serve.judge).model:
                    key = os.environ.get(judge.key_variable, "")
                    asked = None if judge.model == "policy" else ChatModel(judge.model, model=judge.name, key=key).ask
                    server.judge_next_turns(judge, ask=asked)
                else:
                    self._display.note(
                        "feedback alone is learned from: a complaint in the next turn needs serve.judge.model"
                    )
            server.engines = engines = self._watch_engines(engine, buffers=buffers)
            for episode, rounds in buffers.running:
                server.resume_episode(episode, rounds)
            await server.start()
        return Serving(engine=engine, engines=engines, server=server, buffers=buffers, others=others)

    def _watch(self, stack: AsyncExitStack, ledger: Ledger) -> Watching | None:
        """What has another model answer a share of the sessions; None: the policy answers all."""
        settings = self._config.serve.upstream
        if not settings.url:
            return None
        key = os.environ.get(settings.key_variable, "") if settings.key_variable else ""
        upstream = Upstream(
            settings.url, model=settings.model, key=key, who="serve.upstream", silence_s=settings.timeout_s
        )
        watching = Watching(
            upstream, folder=self._folder, ledger=ledger, settings=settings,
            num_promoted=lambda: 0 if self._versions is None else self._versions.num_promoted,
        )  # fmt: skip
        stack.push_async_callback(watching.close)
        return watching

    def _lessons(self, ledger: Ledger, *, ranks: LearnerRanks, model: Path) -> Lessons | None:
        if self._watching is None:
            return None
        settings = self._config.serve.upstream
        return Lessons(
            self._watching.folder, watched=self._watching, ledger=ledger, every=settings.lesson_sessions,
            weigh=partial(weighed, min_score=settings.min_score), teach=partial(self._lesson, ranks=ranks, model=model),
            say=self._display.note,
        )  # fmt: skip

    def _make_versions(self, players: Players, engine: EngineFleet, *, ledger: Ledger) -> Versions:
        gate = self._config.serve.gate
        read = partial(task_list, Path(gate.tasks), agent_name=players.default) if gate.tasks else None
        compare = (lambda version: compared(ledger, served=version)) if self._config.serve.upstream.url else None
        return Versions(
            self._folder, engines=engine, ledger=ledger, gate=gate, tasks=read, say=self._display.note, compare=compare,
            keeps_sessions=self._config.serve.sessions_keep_version,
        )  # fmt: skip

    def _make_server_processes(
        self, settings: EngineSettings, *, keys: KeyRing, ledger: Ledger
    ) -> ServerProcesses | None:
        """The server's processes beside this one, which has the ledger and the engines."""
        if self._config.server.processes == 1:
            return None
        return ServerProcesses(
            settings,
            keys=keys,
            rounds=ledger.rounds,
            record_death=lambda name, error: self._restart_limit.record("server_process", error, name=name),
        )

    def _engine_died(self, name: str, error: Exception) -> None:
        if self._config.serve.enabled:  # users are served as long as there is a way
            self._restart_limit.excuse("engine")
        self._restart_limit.record("engine", error, name=name)

    @property
    def _most_running(self) -> int:
        return most_running(self._config, evaluates=self._evaluates is not None)

    def _watch_engines(self, engine: EngineFleet, *, buffers: RunBuffers) -> EngineWatch:
        admission = None
        if self._config.agents.concurrency == "auto":
            admission = Admission(episode_tokens=self._config.rollout.max_model_len, most=self._most_running)
        return EngineWatch(engine.figures, pool=buffers.pool, admission=admission)

    def _make_fleet(
        self, vllm_config: Any, settings: EngineSettings, *, count_preemptions: bool, weights: WeightSync
    ) -> EngineFleet:
        """The engines of the plan: on this node forked by this process, on others in hosts of their own."""
        config = self._config
        self._remote = RemoteEngines(
            HostSettings(
                engine=settings,
                secret=wire_secret(self._folder, host=config.server.host, label=b"engine"),
                trusted=config.run.trusted_network,
                count_preemptions=count_preemptions,
                timeout_s=config.rollout.engine_timeout_s,
            ),
            nodes=self._nodes,
            weights=weights,
            first=weights.saved(self._checkpoint) if self._checkpoint and not config.adapter_roles else None,
        )
        here = self._nodes.nodes[0].devices
        places = self._nodes.engines
        engines = make_engines(
            config,
            vllm_config,
            devices={
                name: [here[card] for card in place.cards if here] for name, place in places.items() if place.node == 0
            },
            learns=self._evaluates is None,
            folder=self._folder,
            count_preemptions=count_preemptions,
            weights=self._remote.first,
        )
        engines += [self._remote.make(name) for name, place in places.items() if place.node != 0]
        return EngineFleet(
            engines,
            record_death=self._engine_died,
            max_policy_lag=config.buffer.max_policy_lag,
        )

    async def _start_loop_workers(
        self, stack: AsyncExitStack, loops: AgentLoopManager, *, model: Path, address: Address
    ) -> None:
        rollout = self._config.rollout
        _, args, _ = await self._vllm_of(model)
        stack.push_async_callback(loops.close)
        await loops.start(
            model_path=str(model),
            tool_parser=args.tool_call_parser or "hermes",
            server_url=address.url,
            worker_key=address.keys.worker,
            prompt_length=rollout.max_model_len - rollout.max_tokens,
            response_length=rollout.max_tokens,
            trust_remote_code=self._config.model.trust_remote_code,
        )

    def _make_learn_loop(
        self,
        serving: Serving,
        *,
        players: Players,
        learner: LearnerProcesses,
        starting: asyncio.Task[None],
        weights: WeightSync,
        generation: Generation,
        model: Path,
    ) -> LearnLoop:
        config = self._config
        self.agreement = Agreement(
            config=config,
            engines=serving.engine,
            sampling=free_sampling,
            roles=config.adapter_roles,
            has_gpu=has_gpu(),
            has_other=not self._resume
            and config.rollout.engine == "vllm"
            and "model_impl" not in config.rollout.engine_args,
        )
        return LearnLoop(
            Schedule(
                run=config.run,
                buffer=config.buffer,
                start=self._start,
                tries_save=not self._resume,
                sleep=config.rollout.sleep,
                patience_s=config.serve.batch_age_s if config.serve.enabled else None,
                per_role=bool(config.adapter_roles),
                overlong_tokens=config.rollout.max_tokens if config.data.reward_manager == "dapo" else None,
            ),
            buffers=serving.buffers,
            learner=learner,
            starting=starting,
            engine=serving.engine,
            weights=weights,
            store=CheckpointStore(self._folder / "checkpoints", keep=config.run.checkpoints.keep),
            outputs=Outputs(
                history=self.history,
                tracker=self._tracker,
                display=self._display,
                generated=generation.stats,
                more_figures=lambda: (
                    players.figures()
                    | serving.engines.metrics()
                    | serving.others.figures()
                    | (serving.server.sessions.figures() if serving.server.sessions else {})
                    | (self._versions.figures() if self._versions else {})
                ),
                # What users said lies in the ledger alone, where it can be forgotten.
                traces=None
                if config.serve.enabled
                else Traces(self._folder, decode=serving.server.decode, start=self._start),
                tokens=TokenFiles(self._folder, start=self._start),
            ),
            restart_limit=self._restart_limit,
            validation=self._make_validation(players, serving.buffers.ledger),
            checkpoint=self._checkpoint,
            agreement=self.agreement,
            versions=self._versions,
            lessons=self._lessons(serving.buffers.ledger, ranks=learner.ranks, model=model),
            on_begun=partial(write_config, self._folder, config),
        )

    async def _learn_for_users(self, learn: LearnLoop) -> None:
        """Learn; where that fails users are served on, until the run is stopped."""
        try:
            return await learn.run()
        except UnderstudyError as error:
            self._only_serves = True
            learn.activity = "failed"
            self._display.note(f"learning has ended, users are served on: {error}; start it again to learn again")
        await asyncio.Event().wait()

    def _make_evaluation(self, plan: EvaluationPlan, *, players: Players, buffers: RunBuffers) -> Evaluation:
        data = self._config.data
        paths = [Path(path) for path in data.task_files]

        def read_tasks() -> list[Task]:
            return [task for path in paths for task in task_list(path, agent_name=players.default)][: plan.limit]

        self.evaluation = Evaluation(
            buffers.ledger,
            pool=buffers.pool,
            read_tasks=read_tasks,
            samples=data.validation.samples,
            display=self._display,
        )
        return self.evaluation

    def _make_validation(self, players: Players, ledger: Ledger) -> Validation | None:
        validation = self._config.data.validation
        if not validation.tasks:
            return None
        read = partial(task_list, Path(validation.tasks), agent_name=players.default)
        return Validation(ledger, tasks=read, every=validation.every, samples=validation.samples)

    async def _start_environment(self, stack: AsyncExitStack, server: MockedServer) -> Environment | None:
        command = self._config.env.command
        if not command:
            return None
        env = {"SERVER_URL": server.base_url, "SCORER_KEY": server.keys.scorer}
        start = partial(
            start_environment, command, env=env, cwd=Path.cwd(), log=self._folder / "env.log", deadline_s=ENV_START_S
        )
        taken = partial(until_taken, self._folder, what="env.log", say=self._display.note)
        environment = Environment(start, lost=partial(environment_lost, server), taken=taken)
        stack.push_async_callback(environment.stop)
        server.env_address = await environment.start(restart_limit=self._restart_limit)
        return environment

    def _end_killer(self, server: MockedServer, episode_id: str) -> None:
        """The engine died of this episode's requests, again and again: the episode ends, the engine is restarted."""
        self._restart_limit.excuse("engine")
        server.fail_soon(episode_id, "killed the engine")

    # Loops

    def _start_loops(self, loops: asyncio.TaskGroup, parts: Parts) -> list[asyncio.Task[None]]:
        config = self._config
        started = [
            loops.create_task(parts.server.wait(), name="serve"),
            loops.create_task(parts.generation.run(), name="generate"),
            loops.create_task(self.watch(parts), name="watch"),
            loops.create_task(parts.engine.run(), name="keep engines"),
            *(
                loops.create_task(fleet.run(), name=f"keep the engine of {role}")
                for role, fleet in parts.others.engines.items()
            ),
            loops.create_task(parts.engines.run(), name="watch engines"),
        ]
        if in_cluster(config.buffer.node):
            growing = self._remote.grow(parts.engine, say=self._display.note)
            started.append(loops.create_task(growing, name="add engines"))
        if (silence_s := config.agents.silence_s) is not None:
            silent = end_silent(parts.server.episodes.silent, fail=parts.server.fail, seconds=silence_s)
            started.append(loops.create_task(silent, name="end the silent"))
        if parts.environment is not None:
            started.append(
                loops.create_task(
                    parts.environment.keep(restart_limit=self._restart_limit), name="keep the environment"
                )
            )
        if config.data.task_files and not self._evaluates and not self._only_sft:
            parts.buffers.pool.add_source(
                endless_tasks(
                    {Path(path): weight for path, weight in config.data.task_files.items()},
                    seed=config.run.seed,
                    opened=parts.buffers.opened,
                    agent_name=parts.players.default,
                    known=self._folder / "task_files.json",
                    curriculum=parts.buffers.curriculum,
                    warn=self._display.note,
                )
            )
        if config.agents.command or config.env.harbor.agent:
            started.append(loops.create_task(self._agents(parts).run(), name="agents"))
        return started

    def _agents(self, parts: Parts) -> AgentPerEpisode | LongLivedAgents | HarborTrials:
        config = self._config
        place = AgentPlace(
            environment=parts.server.environment,
            worker_key=parts.server.keys.worker_key,
            folder=self._folder / "agents",
            named=tuple(config.agents.environment),
        )
        many = self._most_running
        if config.env.harbor.agent:
            return HarborTrials(config.env.harbor, place=place, service=parts.server, concurrency=many)
        if config.agents.processes == 0:
            return AgentPerEpisode(
                config.agents.command, place=place, service=parts.server, concurrency=many, judge=parts.players.rewards,
                preload=config.agents.preload,
            )  # fmt: skip
        return LongLivedAgents(
            config.agents.command,
            place=place,
            service=parts.server,
            processes=config.agents.processes,
            concurrency=many,
        )

    async def watch(self, parts: Parts) -> None:
        """Shows the queues once a second; ends the run when it cannot succeed any more
        (`learner.recovery.failure_watch`)."""

        def show() -> None:
            self._display.queues(
                prompts_waiting=parts.server.prompt_queue.qsize() + parts.generation.stats.running,
                episodes_running=int(parts.buffers.pool.metrics()["pool/running"]),
                groups_ready=parts.buffers.ledger.counts()["groups/ready"],
            )
            self._display.engines(parts.engines.lines())
            if news := self.history.news():
                self._display.note(news)

        async def why(counts: Mapping[str, int]) -> str:
            details = await asyncio.wrap_future(parts.buffers.ledger.failure_details())
            return why_episodes_fail(
                counts,
                details=details,
                refused=parts.server.model_requests.refused,
                agents=self._folder / "agents",
                env_log=self._folder / "env.log" if self._config.env.command else None,
            )

        async def look() -> None:
            await asyncio.to_thread(self._machine.write, self._machine_state(parts))
            show()

        def disk() -> str:
            ledger = parts.buffers.ledger
            if ledger.waits_for or ledger.has_room():
                return ledger.waits_for
            return "its disk is nearly full, no new episode starts; free space on it"

        await watch(
            counts=parts.buffers.ledger.counts,
            groups_per_step=self._config.buffer.groups_per_step,
            show=look,
            say=self._display.note,
            disk=disk,
            pool=parts.buffers.pool.metrics,
            is_starting=lambda: bool(self._display.phase_name),
            why=why,
        )

    def _machine_state(self, parts: Parts) -> dict[str, Any]:
        """What the loops hold now, for `MachineLog`."""
        pool, counts, status = parts.buffers.pool.metrics(), parts.buffers.ledger.counts(), parts.engines.status()
        shown = (
            "is_up",
            "version",
            "running",
            "waiting",
            "kv_share",
            "tokens_per_s",
            "cached_share",
            "restarts",
            "preemptions",
        )
        return {
            "phase": self._display.phase_name,
            "step": self._learn.step if self._learn is not None else 0,
            "steps_planned": self._learn.num_steps if isinstance(self._learn, SftLoop) else self._config.run.steps,
            "learner": self._learn.activity if self._learn is not None else "none",
            "tasks": {"admissible_groups": pool.get("pool/admissible_groups")},
            "pool": {
                name: pool[f"pool/{name}"]
                for name in ("slots", "running", "agents_waiting", "started", "scored", "failed")
            },
            "prompts_waiting": parts.server.prompt_queue.qsize(),
            "generating": parts.generation.stats.running,
            "cards": sum(len(node.cards) for node in self._nodes.nodes if node.is_alive),
            "engines": [{"name": name, **{each: figures[each] for each in shown}} for name, figures in status.items()],
            "groups": {name.removeprefix("groups/"): n for name, n in counts.items() if name.startswith("groups/")},
            "rounds": counts["rounds"],
            "tokens": counts["tokens"],
            **({"live": self._live_state(sessions.figures())} if (sessions := parts.server.sessions) else {}),
        }

    def _live_state(self, figures: dict[str, float]) -> dict[str, Any]:
        """Users and sessions, and the version that they are served."""
        found: dict[str, Any] = {"served": None if self._versions is None else self._versions.served}
        return found | {name.removeprefix("live/"): n for name, n in figures.items() if "live/" in name}


def _sft_figures(loop: SftLoop) -> dict[str, float]:
    told = loop.summary()
    return {f"sft/{name}": told[name] for name in SFT_FIGURES if isinstance(told[name], int | float)}


def engine_settings(
    config: Config, *, model: Path, beside_rank: bool, most_running: int = MAX_NUM_SEQS, evaluates: bool = False
) -> EngineSettings:
    """What an engine of the run is built from. `model`: the folder of its first weights; `beside_rank`: an engine shares a card
    with a rank; `most_running`: episodes; `evaluates`: nothing is published to it."""
    has_adapters = not evaluates or (config.adapter_roles and saved_versions(Path(config.model.path)))
    return EngineSettings(
        model_path=model,
        served_name="policy",
        dtype=config.model.dtype,
        rollout=config.rollout,
        server=config.server,
        seed=config.run.seed,
        max_num_seqs=min(MAX_NUM_SEQS, most_running),
        lora_rank=config.learner.lora.rank if has_adapters else 0,
        kept_versions=2 * len(config.adapter_roles) + (8 if config.serve.sessions_keep_version else 4)
        if config.serve.enabled
        else max(1, len(config.adapter_roles)) * (config.buffer.max_policy_lag + 1),
        beside_rank=beside_rank,
        router_replay=config.learner.router_replay and not evaluates,
        trust_remote_code=config.model.trust_remote_code,
        role_names=role_names(config),
    )


async def _make_data(command: Sequence[str], missing: str, log: Path) -> None:
    child = await Child.start(resolve_command(command), env=None, cwd=Path.cwd(), log=log)
    if (code := await child.wait()) != 0:
        raise TaskError(f"data.make must write {missing}, but it exited with code {code}: {child.log_tail()}")


async def environment_lost(server: MockedServer, address: str) -> None:
    """Another one listens at `address`: what the first one was playing is tried again."""
    server.env_address = address
    await server.fail_all("environment died")
