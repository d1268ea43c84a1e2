"""MockedServer: the model API that agents call, the episode routes for agents and scorers, on one event loop.

The pipeline starts it on its own loop (`start`, `close`); `create_and_launch_task_pool` starts it in a thread, as in RFC #1172.
It needs no engine: prompts wait in `prompt_queue` until a generate loop takes them (`mocked_server.generation`, or the RFC's
`rollout.generate_sequences`), and the answer goes back on the same connection.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import socket
import threading
from argparse import Namespace
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from buffers.errors import (
    EngineError,
    EpisodeClosed,
    EpisodeError,
    ScoreError,
    StorageFull,
    TaskError,
    UnderstudyError,
    UnknownEpisode,
)
from buffers.ledger.ledger import Ledger
from buffers.multi_round import MultiRoundBufferDataset
from buffers.prompt_queue import PromptQueue
from buffers.records import Episode, LeasedEpisode, Round, ScoreDetail, Verdict
from buffers.tasks.parquet import tasks_of_rows
from buffers.tasks.task_pool import TaskPool
from configs.schema import NextTurnConfig, RolloutConfig, ServerConfig
from configs.tiny_model import make_tiny_model
from mocked_server.conversation.live_episodes import Episodes, LiveEpisode
from mocked_server.dispatch import AGENTS, PLAIN, Dispatch, LoopPlayer, Others, Play, ScoreFn, left_out, part_scores
from mocked_server.fleet.engine_fleet import EngineFleet
from mocked_server.fleet.engine_watch import EngineWatch
from mocked_server.fleet.member import EngineFigures
from mocked_server.http.attribution import Attribution
from mocked_server.http.gemini_routes import GeminiRoutes
from mocked_server.http.model_requests import ModelRequests
from mocked_server.http.request_limits import MAX_BODY_BYTES, MAX_EPISODE_ROUTE_BYTES, BodyLimit, PortRouter
from mocked_server.http.roles import Roles
from mocked_server.http.routes import build_admin_app, build_app
from mocked_server.http.uvicorn_server import HttpService, bind
from mocked_server.keys import KeyRing
from mocked_server.live_keys import LiveKeys
from mocked_server.live_sessions import LiveSessions, Policy
from mocked_server.next_turn import SOURCE, Ask, NextTurnJudge
from mocked_server.request_context import NO_ROLE
from mocked_server.vllm.engine_arguments import EngineSettings, make_args, make_vllm_config, set_process_environment
from mocked_server.vllm.serving import QueueClient, build_serving_app
from mocked_server.watching import Watching

if TYPE_CHECKING:
    from mocked_server.processes.server_processes import ServerProcesses

logger = logging.getLogger(__name__)

WHOLE = ScoreDetail()
FULL_S = 1.0
"""Seconds between two tries to store a score while the disk is full."""


class ScoreSink(Protocol):
    """A store of scores, called from any thread."""

    def __call__(self, episode_id: str, score: float, *, detail: ScoreDetail | None = None) -> bool | None:
        """Store a score; False: the same was stored before. `detail`: what it is of and whose, where a scorer says that; a sink
        that is called without may lack the parameter."""
        ...


class VersionService(Protocol):
    """`learner.live_versions.Versions`."""

    async def promote(self, version: int) -> None: ...
    async def rollback(self, version: int | None = None) -> int: ...
    async def status(self) -> dict[str, Any]: ...


class MockedServer:
    """See the module. `pool` hands out episodes, `notify_score_fn(episode_id, score)` takes their scores (any thread)."""

    def __init__(
        self,
        *,
        args: Namespace,
        vllm_config: Any,
        rollout: RolloutConfig,
        server: ServerConfig,
        pool: TaskPool,
        notify_score_fn: ScoreSink,
        score_fn: ScoreFn | None = None,
        loops: LoopPlayer | None = None,
        others: Others = AGENTS,
        sock: socket.socket | None = None,
        keys: KeyRing | None = None,
        processes: ServerProcesses | None = None,
        roles: Roles | None = None,
    ) -> None:
        """`score_fn`: judges plain prompts; `loops`: plays rows that name an agent loop; `others`: who plays the others.
        `sock`: None: bound here. `processes`: the other server processes of the run; None: this one serves alone.
        `roles`: of the run; None: it has none."""
        self._roles = roles
        self.keys = keys or KeyRing()
        self.episodes = Episodes()
        self.prompt_queue = PromptQueue()
        self.pool = pool
        self.env_address = ""
        """HOST:PORT of the environment, told to agents with each lease."""
        self.num_scored = 0
        self.on_ended: Callable[[str, str], object] = lambda *_: None
        """Called with the id of each episode that ended, and how it did: scored, failed or closed."""
        self.processes = processes
        self.versions: VersionService | None = None
        """Versions that users may be served; None: there is one, the newest."""
        self.sessions: LiveSessions | None = None
        """Sessions of users, whose agents nobody starts; None: there are none."""
        self.engines: EngineWatch | None = None
        """Figures of the engines for `GET /status` and `GET /metrics`; None: none."""
        self._endings: dict[str, asyncio.Event] = {}
        self._failing: set[asyncio.Task[None]] = set()
        self._args = args
        self._notify_score = notify_score_fn
        self._score_fn = score_fn
        self._loops = loops
        self._others = others
        self._dispatch = None if score_fn is None and loops is None else self._make_dispatch()
        pool.on_closed = self.close_episode
        strict = server.replay_match == "strict"
        self._client = QueueClient(
            vllm_config,
            queue=self.prompt_queue,
            rollout=rollout,
            strict=strict,
            default_role=NO_ROLE if roles is None else roles.default,
        )
        self._socket = sock or bind(server.host, server.port)
        self._admin_socket = bind("127.0.0.1", 0)
        self._host = server.host
        self._loop: asyncio.AbstractEventLoop | None = None
        self._http: HttpService | None = None
        self._pooling: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        """Its other loops, until it is closed."""

    @property
    def base_url(self) -> str:
        """Root of the server, without /v1."""
        return f"http://{self._host}:{self._socket.getsockname()[1]}"

    @property
    def admin_url(self) -> str:
        """Root of the administrator's routes; on this machine only, for any `server.host`."""
        return f"http://127.0.0.1:{self._admin_socket.getsockname()[1]}"

    @property
    def model(self) -> str:
        """The model's name in the API."""
        return str(self._args.served_model_name[0])

    @property
    def num_processes(self) -> int:
        """Server processes, this one included."""
        return 1 if self.processes is None else 1 + len(self.processes.urls)

    def environment(self, key: str, *, process: int | None = None) -> dict[str, str]:
        """The variables that an agent's OpenAI, Anthropic or Google client reads, and ours. `key`: its episode's, or the worker
        key. They name the server process that owns the episode, one for each worker, or this `process`."""
        if process is None:
            process = 0 if self.processes is None else self.processes.process_of(key)
        root = self.url_of(process)
        return {
            "OPENAI_BASE_URL": f"{root}/v1",
            "OPENAI_API_BASE": f"{root}/v1",
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": root,
            "ANTHROPIC_API_KEY": key,
            "GOOGLE_GEMINI_BASE_URL": root,
            "GEMINI_API_KEY": key,
            "MODEL": self.model,
            "TASKS_URL": f"{root}/tasks",
            "ENV_ADDRESS": self.env_address,
        }

    def url_of(self, process: int) -> str:
        """Root of the server process of this number, without /v1; 0 is the run's own."""
        return self.base_url if self.processes is None or process == 0 else self.processes.urls[process - 1]

    def decode(self, ids: Sequence[int]) -> str:
        """Token ids as text, control tokens included."""
        return str(self._client.renderer.get_tokenizer().decode(list(ids)))

    def attach_engine(self, engine: EngineFleet) -> None:
        """`POST /sleep` and `POST /wake_up` reach this engine."""
        self._client.sleeper = engine

    async def start(self) -> None:
        """Serve on the running event loop; returns when requests are answered."""
        self._loop = asyncio.get_running_loop()
        served = GeminiRoutes(await build_serving_app(self._args, self._client))
        self.model_requests = ModelRequests(served, roles=self._roles, sessions=self.sessions)
        self._http = HttpService(self._front(), sockets=[self._socket, self._admin_socket])
        if self.processes is not None:
            await self.processes.start(self)
        await self._http.start()
        self._pooling = asyncio.create_task(self.pool.run(), name="pool")
        if self._dispatch is not None:
            self._tasks.append(asyncio.create_task(self._dispatch.run(), name="dispatch"))
        if self.sessions is not None:
            self._tasks.append(asyncio.create_task(self.sessions.run(), name="end silent sessions"))
            if self.sessions.judge is not None:
                self._tasks.append(asyncio.create_task(self.sessions.judge.run(), name="judge next turns"))
        if self.processes is not None:
            self._tasks.append(asyncio.create_task(self.processes.run(), name="keep server processes"))

    def _front(self) -> PortRouter:
        """The listening application: the model API, the episode routes and, on a port of its own, the administrator's."""
        episode_routes = BodyLimit(build_app(self), max_bytes=MAX_EPISODE_ROUTE_BYTES)
        return PortRouter(
            Attribution(
                self.model_requests,
                others=episode_routes,
                keys=self.keys,
                episodes=self.episodes,
                is_full=lambda: self.pool.is_full,
                elsewhere=None if self.processes is None else self.processes.elsewhere,
                has_roles=self._roles is not None,
                sessions=self.sessions,
            ),
            admin=BodyLimit(build_admin_app(self), max_bytes=MAX_BODY_BYTES),
            admin_port=self._admin_socket.getsockname()[1],
        )

    async def wait(self) -> None:
        """Wait until the server is closed; raises when the pool's loop or the HTTP server failed."""
        assert self._http is not None and self._pooling is not None, "start() first"
        assert self._http.task is not None
        tasks = (self._http.task, self._pooling, *self._tasks)
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            if not task.cancelled():
                task.result()

    async def close(self) -> None:
        """Stop listening, end open connections, and wake everybody who waits for prompts."""
        for prompt in self.prompt_queue.close():
            prompt.reply.fail(EngineError("the server is shutting down"))
        self.pool.close()
        for task in self._tasks:
            task.cancel()
            await asyncio.wait({task})
        if self._pooling is not None:
            await self._pooling
        if self.processes is not None:
            await self.processes.close()
        if self._http is not None:
            await self._http.close()
        self._socket.close()
        self._admin_socket.close()

    def stop(self) -> None:
        """`close` from another thread; returns when the server has ended."""
        assert self._loop is not None, "start() first"
        asyncio.run_coroutine_threadsafe(self.close(), self._loop).result()

    # What agents and scorers ask for, in Python; `mocked_server.http.routes` has the same over HTTP.

    async def lease_episode(
        self, *, wait_s: float, worker: str = "", process: int | None = None
    ) -> LeasedEpisode | None:
        """Lease the next episode; None when there is none within `wait_s`. Raises PoolClosed when there are no more. `process`: the
        server process that was asked for it, and owns it; None: the one with the fewest."""
        lease = self.pool.lease if self._dispatch is None else self._dispatch.lease
        episode = await lease(wait_s=wait_s)
        if episode is None:
            return None
        owner = 0 if self.processes is None else self.processes.owner(episode.episode_id, asked=process)
        return self.open_episode(episode, worker=worker, process=owner)

    def _make_dispatch(self) -> Dispatch:
        players: dict[str, Play] = {}
        if self._score_fn is not None:
            players[PLAIN] = self._play_plain
        if self._loops is not None:  # a loop of that name is what the configuration asks for
            players |= dict.fromkeys(self._loops.names, self._play_loop)
        return Dispatch(
            self.pool,
            players=players,
            others=self._others,
            open_episode=self.open_episode,
            notify_score=partial(self.notify_score, wait_for_disk=True),
            fail=self.fail,
            wait_ended=self.wait_ended,
        )

    async def _play_plain(self, episode: Episode, _: LeasedEpisode) -> float:
        """One generation, judged by the score function."""
        assert self._score_fn is not None
        live = self.episodes.get(episode.episode_id)
        answer = await self._client.ask(live, episode.task.prompt, request_id=f"plain-{episode.episode_id}")
        outcome = self._score_fn(episode.task, answer)
        return await outcome if isinstance(outcome, Awaitable) else outcome

    async def _play_loop(self, episode: Episode, leased: LeasedEpisode) -> float:
        """An agent loop plays it, under its key; what it gives back must be what was sampled."""
        assert self._loops is not None
        live = self.episodes.get(episode.episode_id)
        played = await self._loops.play(episode.task, api_key=leased.api_key, seed=episode.seed)
        if some := left_out(live, played.outputs):
            await asyncio.wrap_future(self.pool.mask_tokens(episode.episode_id, some))
        tell = partial(self.notify_score, episode.episode_id, wait_for_disk=True)
        parts = part_scores(live, played.outputs)
        for role in {detail.role for _, detail in parts} - {""}:
            self.check_role(role)
        await asyncio.gather(*(tell(score, detail=detail) for score, detail in parts))
        return played.score

    def open_episode(self, episode: Episode, *, worker: str | None = None, process: int = 0) -> LeasedEpisode:
        """Let an episode's key open the model API. `process`: the server process that owns it."""
        self.episodes.open(episode, worker=worker)
        return LeasedEpisode(
            episode_id=episode.episode_id, api_key=self.keys.episode_key(episode.episode_id, process=process),
            task=episode.task.public(), env_address=self.env_address, seed=episode.seed, base_url=self.url_of(process),
        )  # fmt: skip

    def resume_episode(self, episode: Episode, rounds: Sequence[Round]) -> None:
        """Take over an episode of an earlier process: its key opens the model API again, which continues these rounds. Its key says
        which server process owns it; that one asks for it."""
        self.open_episode(episode)
        if self.processes is not None:
            self.processes.begun(episode.episode_id)
        self._restore(episode, rounds)

    def serve_users(
        self,
        ledger: Ledger,
        *,
        keys: LiveKeys,
        silence_s: float,
        retention_s: float | None = None,
        words_count: bool,
        policy: Policy,
        watching: Watching | None = None,
        patterns: Sequence[re.Pattern[str]] | None = None,
    ) -> LiveSessions:
        """Open the model API to the keys of users, whose agents nobody starts. Before `start`. See `LiveSessions`."""

        def restore(episode: Episode, rounds: Sequence[Round]) -> LiveEpisode:
            self.episodes.open(episode)
            self._restore(episode, rounds)
            return self.episodes.get(episode.episode_id)

        self.sessions = LiveSessions(
            ledger, keys=keys, episodes=self.episodes, silence_s=silence_s, retention_s=retention_s, words_count=words_count,
            policy=policy, decode=self.decode, roles=() if self._roles is None else self._roles.names,
            restore=restore, on_ended=lambda name, reason: self.on_ended(name, reason), watching=watching,
            patterns=patterns,
        )  # fmt: skip
        return self.sessions

    def judge_next_turns(self, settings: NextTurnConfig, *, ask: Ask | None) -> None:
        """Have the answers to users judged by what is said next. `ask`: the model; None: the policy. Before `start`."""
        assert self.sessions is not None, "serve_users() first"
        sessions = self.sessions

        async def tell(episode_id: str, round_index: int, score: float, hint: str) -> None:
            await sessions.feedback(
                user=None, session=episode_id, round_index=round_index, score=score, text=hint, source=SOURCE
            )

        async def ask_policy(question: str, max_tokens: int) -> str:
            messages, name = [{"role": "user", "content": question}], f"judge-{secrets.token_hex(8)}"
            return await self._client.ask(sessions.judges_episode(), messages, request_id=name, max_tokens=max_tokens)

        sessions.judge = NextTurnJudge(settings, ask=ask or ask_policy, tell=tell)

    def user_of(self, key: str) -> str | None:
        """Whose key this is; None: no user's."""
        return None if self.sessions is None else self.sessions.keys.user_of(key)

    async def change_version(self, action: str, version: int | None) -> dict[str, Any]:
        """Serve another version to users: `promote` one, or `rollback`; `status`: change nothing. What is known of all, afterwards.
        Raises UnderstudyError."""
        if self.versions is None:
            raise TaskError(
                "versions are kept in a run of `understudy serve` with learner.lora.rank > 0, and this is none; start one"
            )
        if action == "rollback":
            await self.versions.rollback(version)
        elif action == "promote" and version is not None:
            await self.versions.promote(version)
        return await self.versions.status()

    async def feedback(self, *, user: str | None, **said: Any) -> dict[str, Any]:
        """Store what is thought of a session, a round or an answer. `user`: None may speak of all. Raises UnknownEpisode."""
        if self.sessions is None:
            raise UnknownEpisode(
                "feedback is of users' sessions, and this run serves none; start it by `understudy serve`"
            )
        taken = await self.sessions.feedback(user=user, **said)
        return taken._asdict()

    async def forget(self, **what: str) -> dict[str, Any]:
        """Forget sessions: see `LiveSessions.forget`. Raises UnderstudyError."""
        if self.sessions is None:
            raise UnknownEpisode("this run serves no users, and forgets nothing while it lives; end it, and ask again")
        return (await self.sessions.forget(**what))._asdict()

    def _restore(self, episode: Episode, rounds: Sequence[Round]) -> None:
        tokenizer = self._client.renderer.get_tokenizer()
        decode = partial(tokenizer.decode, skip_special_tokens=True)
        self.episodes.get(episode.episode_id).restore(rounds, decode=decode)

    async def notify_score(
        self, episode_id: str, score: float, *, detail: ScoreDetail | None = None, wait_for_disk: bool = False
    ) -> bool:
        """Store a score; True when it is new, False when the same was stored before. Durable when this returns. `detail`:
        what it is of and whose, for a `notify_score_fn` that takes it. `wait_for_disk`: while the disk is full try again
        instead of raising StorageFull."""
        if isinstance(score, Verdict) and detail is None:
            *others, (score, detail) = score.reports()
            for other, judge in others:
                await self.notify_score(episode_id, other, detail=judge, wait_for_disk=wait_for_disk)
        detail = detail or WHOLE
        more = {} if detail == WHOLE else {"detail": detail}
        while True:
            try:
                stored = await asyncio.to_thread(self._notify_score, episode_id, score, **more)
                break
            except StorageFull:
                if not wait_for_disk:
                    raise
            await asyncio.sleep(FULL_S)
        is_of_part = detail.round_index is not None or detail.branch is not None or detail.role
        if stored is not False and detail.final and not is_of_part:
            self.num_scored += 1
        return stored is not False

    async def fail(self, episode_id: str, reason: str) -> None:
        """End an episode without a score; it is tried again while attempts are left. No effect on an ended one."""
        with suppress(EpisodeClosed):
            await self.pool.fail(episode_id, reason)

    def fail_soon(self, episode_id: str, reason: str) -> None:
        """`fail`, without waiting for it. Called on the server's loop."""
        task = asyncio.create_task(self.fail(episode_id, reason), name=f"fail {episode_id}")
        self._failing.add(task)
        task.add_done_callback(self._failing.discard)

    async def fail_all(self, reason: str, *, worker: str | None = None) -> None:
        """`fail` the running episodes: all, or those that this worker leased with its key."""
        for episode_id in self.episodes.ids(worker=worker):
            await self.fail(episode_id, reason)

    def close_episode(self, episode_id: str, reason: str) -> None:
        """The pool says that an episode ended (scored, failed): its key opens nothing any more."""
        self.episodes.close(episode_id, reason)
        if (ended := self._endings.pop(episode_id, None)) is not None:
            ended.set()
        if self.processes is not None:
            self.processes.closed(episode_id, reason)
        self.on_ended(episode_id, reason)

    @property
    def has_ended(self) -> bool:
        """No more tasks will be given out."""
        return self.pool.is_closed

    async def wait_ended(self, episode_id: str) -> None:
        """Wait until the episode has ended, in any way."""
        with suppress(EpisodeError):
            self.episodes.get(episode_id)
            await self._endings.setdefault(episode_id, asyncio.Event()).wait()

    async def add_tasks(self, rows: list[dict[str, Any]]) -> int:
        """Add tasks given as parquet rows, all or none; raises TaskError naming the row."""
        tasks = await asyncio.to_thread(tasks_of_rows, rows, source="POST /tasks")
        tasks = tasks if self._dispatch is None else self._dispatch.checked(tasks)
        await self.pool.put(tasks)
        return len(tasks)

    def enqueue_task(self, path: str | Path) -> int:
        """Add the tasks of a parquet file, from any thread (the RFC's enqueue_task); returns how many."""
        return self.pool.enqueue_task(Path(path))

    def episode_view(self, episode_key: str) -> dict[str, Any]:
        """View of the episode with this key for a scorer: its id and its task with the ground truth."""
        episode_id = self.keys.episode_of(episode_key)
        if episode_id is None:
            raise UnknownEpisode("the key opens no episode; send the episode's api_key in X-Episode-Key")
        live = self.episodes.get(episode_id)
        return {"episode_id": episode_id, "task": live.episode.task.private()}

    @property
    def is_full(self) -> bool:
        """The ledger's disk takes nothing more for now."""
        return self.pool.is_full

    def check_storage(self) -> None:
        """Raises StorageFull while the ledger's disk is full."""
        if self.pool.is_full:
            raise StorageFull(
                "the ledger stores nothing for now: its disk is full, or its file is locked; send this again later"
            )

    def check_role(self, role: str) -> None:
        """Raises ScoreError for a role that the run does not have."""
        if self._roles is None:
            raise ScoreError(f"a score may name a role in a run that has roles, got {role:.80}; leave it out")
        self._roles.check_scored(role)

    def encode(self, text: str) -> list[int]:
        """A text as the policy's tokenizer has it."""
        return list(self._client.renderer.get_tokenizer().encode(text, add_special_tokens=False))

    def status(self) -> dict[str, Any]:
        """Counts for `GET /status`, under `engines` the figures of each engine by its name, and with several server processes those
        of each under `processes`."""
        return {
            "prompts_waiting": self.prompt_queue.qsize(),
            **self.episodes.metrics(),
            **self.pool.metrics(),
            **({} if self.sessions is None else self.sessions.figures()),
            "engines": {} if self.engines is None else self.engines.status(),
            **({} if self.processes is None else {"processes": self.processes.status()}),
        }

    def engine_figures(self) -> Sequence[EngineFigures]:
        """Figures for `GET /metrics`."""
        return () if self.engines is None else self.engines.figures()


def create_and_launch_task_pool(
    *,
    notify_score_fn: ScoreSink,
    score_fn: ScoreFn | None = None,
    model: str | Path | None = None,
    group_size: int = 1,
    max_running: int = 256,
    deadline_s: float = 600.0,
    rollout: RolloutConfig | None = None,
    server: ServerConfig | None = None,
) -> tuple[MockedServer, threading.Thread]:
    """Start a MockedServer with its task pool in a thread of its own (RFC #1172's demo). Returns when it answers requests.

    `model`: a Hugging Face folder, only its tokenizer, chat template and configuration are used here; None: the tiny
    local model. Stop it with `mocked_server.stop()`.
    """
    set_process_environment()
    rollout, server = rollout or RolloutConfig(), server or ServerConfig()
    folder = Path(model) if model is not None else make_tiny_model(Path("runs/models/tiny"))
    settings = EngineSettings(model_path=folder, served_name="policy", dtype="float32", rollout=rollout, server=server)
    args = make_args(settings)
    config = make_vllm_config(args)
    # Tasks and scores share the ledger of the dataset, where there is one.
    owner = getattr(notify_score_fn, "__self__", None)
    ledger = owner.ledger if isinstance(owner, MultiRoundBufferDataset) else Ledger(None)
    started: Future[MockedServer] = Future()

    async def main() -> None:
        pool = TaskPool(
            ledger,
            group_size=group_size,
            groups_per_step=1,
            max_policy_lag=None,
            max_running=max_running,
            deadline_s=deadline_s,
            max_attempts=1,
        )
        mocked = MockedServer(
            args=args, vllm_config=config, rollout=rollout, server=server, pool=pool,
            notify_score_fn=notify_score_fn, score_fn=score_fn,
        )  # fmt: skip
        await mocked.start()
        started.set_result(mocked)
        await mocked.wait()

    def serve() -> None:
        try:
            asyncio.run(main())
        except (UnderstudyError, OSError) as error:
            if not started.done():
                started.set_exception(error)
        finally:
            started.cancel()  # no effect on one that has its outcome

    thread = threading.Thread(target=serve, name="mocked-server", daemon=True)
    thread.start()
    return started.result(), thread
