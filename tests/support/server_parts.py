"""A MockedServer in a thread with a scripted engine behind it, for tests of everything in front of the engine."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
from openai import OpenAI

from buffers.ledger.ledger import Ledger
from buffers.multi_round import MultiRoundBufferDataset
from buffers.records import Round, Task
from buffers.tasks.task_pool import TaskPool
from configs.schema import NextTurnConfig, RolloutConfig, ServerConfig
from mocked_server.fleet.engine_fleet import EngineFleet
from mocked_server.fleet.member import EngineLost, Sampled
from mocked_server.generation import Generation
from mocked_server.http.roles import Roles
from mocked_server.keys import KeyRing
from mocked_server.live_keys import LiveKeys
from mocked_server.live_sessions import Newest, Policy
from mocked_server.processes.server_processes import ServerProcesses
from mocked_server.server import MockedServer
from mocked_server.vllm.engine_arguments import EngineSettings, make_args, make_vllm_config
from tests.support.patience import PATIENCE_S

T = TypeVar("T")
LOGPROB = -0.25
START_S = 240.0
"""Further server processes import vLLM first."""


class ScriptedEngine:
    """Answers with `answer(prompt_token_ids)` as token ids; each token has log-probability LOGPROB and version `version`.

    `gate`: generations wait until it is set, after their first token. `stop`: the stop string that ends answers given whole.
    """

    def __init__(self, answer: Callable[[list[int]], list[int]], *, decode: Callable[[list[int]], str]) -> None:
        self.answer = answer
        self._decode = decode
        self.version = 0
        self.num_deaths = 0
        self.gate = threading.Event()
        self.gate.set()
        self.dies = False
        self.revives = False
        self.stop = ""
        self.prompts: list[list[int]] = []
        self.params: list[Any] = []

    async def generate(
        self, prompt_token_ids: list[int], params: Any, *, request_id: str, sampled: Sequence[Sampled] = (), **_: Any
    ) -> AsyncGenerator[Any, None]:
        from vllm.sampling_params import RequestOutputKind

        self.prompts.append(prompt_token_ids)
        self.params.append(params)
        if self.dies:
            raise self._lost()
        answer = self.answer(prompt_token_ids)
        ids = answer[: params.max_tokens]
        ends = "stop" if len(ids) == len(answer) else "length"
        done = len(sampled[0].token_ids) if sampled else 0
        if params.output_kind == RequestOutputKind.FINAL_ONLY:
            await self._gate()
            yield self._output(request_id, ids, 0, ends=ends, n=params.n)
            return
        for i in range(done, len(ids)):
            if i == 1:
                await self._gate()
                if self.dies:
                    raise self._lost()
            is_last = i == len(ids) - 1
            yield self._output(request_id, ids[i : i + 1], i, ends=ends if is_last else None, n=params.n)

    def _lost(self) -> EngineLost:
        self.num_deaths += 1
        return EngineLost("the engine died while it answered", life=("e0", self.num_deaths))

    def forget(self, episode_id: str) -> None:
        """It keeps nothing of an episode."""

    async def wait_restarted(self) -> bool:
        """It may die and come back (`dies` is False again); without `revives`, it does not."""
        while self.revives and self.dies:
            await asyncio.sleep(0.01)
        return self.revives

    async def _gate(self) -> None:
        if not self.gate.is_set():
            await asyncio.to_thread(self.gate.wait)

    def _output(self, request_id: str, ids: list[int], start: int, *, ends: str | None, n: int) -> Any:
        from vllm.logprobs import Logprob
        from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan

        completions = [
            CompletionOutput(
                index=index,
                text=self._decode(ids).removesuffix(self.stop),
                token_ids=ids,
                cumulative_logprob=None,
                logprobs=[{i: Logprob(LOGPROB)} for i in ids],
                finish_reason=ends,
                stop_reason=self.stop if ends == "stop" and self.stop else None,
                weight_versions=[WeightVersionSpan(str(self.version), 0, start + len(ids))],
            )
            for index in range(n)
        ]
        return RequestOutput(request_id, None, [], None, completions, ends is not None)


class ServerThread:
    """The server and its generation loop on an event loop in a thread. `lease()` gives an OpenAI client for a new episode."""

    def __init__(
        self,
        model: Path,
        *,
        rollout: RolloutConfig,
        group_size: int = 1,
        ledger: Ledger | None = None,
        keys: KeyRing | None = None,
        pool: Mapping[str, Any] | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        roles: Roles | None = None,
        users: Path | None = None,
        silence_s: float = 60.0,
        judge: NextTurnConfig | None = None,
        **server: Any,
    ) -> None:
        """`users`: the folder of a run whose users' keys open the server. `pool`: arguments of `TaskPool` that differ from
        those of most tests. `loop`: one that runs already, of a real engine."""
        settings = EngineSettings(
            model_path=model,
            served_name="policy",
            dtype="float32",
            rollout=rollout,
            server=ServerConfig(**server),
            role_names=roles.names if roles else (),
        )
        self._roles = roles
        self.users = None if users is None else LiveKeys(users)
        self._silence_s = silence_s
        self.policy: Policy | None = None
        """Which version answers users; None: the newest."""
        self._judge = judge
        self._args = make_args(settings)
        self._vllm_config = make_vllm_config(self._args)
        self._settings = settings
        self._pool_settings = {
            "group_size": group_size, "groups_per_step": 1, "max_policy_lag": None, "max_running": 1024,
            "deadline_s": 60.0, "max_attempts": 1, **(pool or {}),
        }  # fmt: skip
        self.ledger = ledger or Ledger(None)
        self._keys = keys or KeyRing()
        self.rounds = MultiRoundBufferDataset(self.ledger)
        self.score_fn: Callable[[Task, str], float] | None = None
        self.loops: Any = None
        self._clients: list[OpenAI] = []
        self._owns_loop = loop is None
        self._loop = loop or asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-server", daemon=True)

    def start(self, engine: Any = None) -> None:
        if self._owns_loop:
            self._thread.start()
        self.submit(self._start(engine)).result(START_S)

    async def _start(self, engine: Any) -> None:
        self.pool = TaskPool(self.ledger, **self._pool_settings)
        self.server = MockedServer(
            args=self._args,
            vllm_config=self._vllm_config,
            rollout=self._settings.rollout,
            server=self._settings.server,
            pool=self.pool,
            notify_score_fn=self.rounds.notify_score,
            keys=self._keys,
            score_fn=lambda task, text: self.score_fn(task, text) if self.score_fn else 0.0,
            loops=self.loops,
            processes=self._make_processes(),
            roles=self._roles,
        )
        tokenizer = self.server._client.renderer.get_tokenizer()
        self.tokenizer = tokenizer
        decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=True)  # noqa: E731
        self.engine = EngineFleet([engine]) if engine else ScriptedEngine(lambda _: self.ids("ok"), decode=decode)
        frozen = [role.name for role in self._roles._roles.values() if not role.is_trained] if self._roles else []
        self.frozen = {name: ScriptedEngine(lambda _: self.ids("frozen"), decode=decode) for name in frozen}
        self.generation = Generation(
            self.engine,
            queue=self.server.prompt_queue,
            episodes=self.server.episodes,
            rounds=self.ledger,
            frozen=self.frozen,
        )
        self.server.on_ended = self.generation.forget
        if self.users is not None:
            sessions = self.server.serve_users(
                self.ledger, keys=self.users, silence_s=self._silence_s, words_count=False,
                policy=self.policy or Newest(self.engine),
            )  # fmt: skip
            self.generation.on_round = sessions.recorded
            if self._judge is not None:
                self.server.judge_next_turns(self._judge, ask=None)
        self._resume()
        await self.server.start()
        self._generating = asyncio.create_task(self.generation.run())

    def _make_processes(self) -> ServerProcesses | None:
        if self._settings.server.processes == 1:
            return None
        return ServerProcesses(self._settings, keys=self._keys, rounds=self.ledger.rounds, record_death=lambda *_: None)

    def _resume(self) -> None:
        """As `learner.pipeline` does it: before the first request can come."""
        episodes = self.ledger.running_episodes().result()
        self.pool.adopt_running(episodes)
        for episode in episodes:
            rounds = self.ledger.rounds(episode.episode_id).result()
            self.server.resume_episode(episode, rounds)

    async def wait(self) -> None:
        """Until one of its loops ends; raises when that failed."""
        loops = {asyncio.ensure_future(self.server.wait()), self._generating}
        for ended in (await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED))[0]:
            ended.result()

    def serving_app(self) -> Any:
        """vLLM's application."""
        return self.server.model_requests._app.app

    def serving_state(self) -> Any:
        """What vLLM's application is made of."""
        return self.serving_app().state

    def ids(self, text: str, *, end: bool = True) -> list[int]:
        """Token ids of an answer, with the end-of-turn token."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return [*ids, self.tokenizer.eos_token_id] if end else ids

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the server's loop, and wait for it."""
        return self.submit(work).result(PATIENCE_S)

    def stop(self) -> None:
        async def stop() -> None:
            await self.server.close()
            await asyncio.wait({self._generating})

        for client in self._clients:  # else a collected socket warns in some later test
            client.close()
        self.call(stop())
        if self._owns_loop:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        self.ledger.close()

    def lease(self, *, prompt: str = "Hello.", ground_truth: str = "secret") -> tuple[str, OpenAI]:
        """A new episode: (its id, an OpenAI client with its key, which `stop` closes)."""
        number = self.ledger.counts()["groups/open"] + sum(
            v for k, v in self.ledger.counts().items() if k.startswith("groups/") and k != "groups/open"
        )
        task = Task(task_id=f"task-{number}", prompt=[{"role": "user", "content": prompt}], ground_truth=ground_truth)
        self.call(self.pool.put([task]))
        leased = self.call(self.server.lease_episode(wait_s=5.0))
        assert leased is not None
        client = OpenAI(base_url=f"{self.server.base_url}/v1", api_key=leased.api_key, max_retries=0)
        self._clients.append(client)
        return leased.episode_id, client

    def user(self, name: str) -> OpenAI:
        """An OpenAI client with a new key of this user, which `stop` closes."""
        assert self.users is not None
        client = OpenAI(base_url=f"{self.server.base_url}/v1", api_key=self.users.add(name), max_retries=0)
        self._clients.append(client)
        return client

    def http(self, key: str = "") -> httpx.Client:
        """The administrator has a port of its own."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = self.server.admin_url if key == self.server.keys.admin else self.server.base_url
        return httpx.Client(base_url=url, headers=headers, timeout=PATIENCE_S)

    def hang_up(self, client: OpenAI, *, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> None:
        """Asks for a chat completion, and closes the connection as soon as the engine has the prompt."""
        words = {"authorization": f"Bearer {client.api_key}", "content-type": "application/json", **(headers or {})}
        before, until = len(self.engine.prompts), time.monotonic() + PATIENCE_S
        asking = http.client.HTTPConnection(self.server.base_url.removeprefix("http://"), timeout=PATIENCE_S)
        asking.request("POST", "/v1/chat/completions", json.dumps(body), words)
        while len(self.engine.prompts) == before:
            assert time.monotonic() < until, "the engine was not asked"
            time.sleep(0.005)
        asking.close()

    def stored(self, episode_id: str) -> list[Round]:
        """The episode's rounds in the ledger."""
        return self.ledger.rounds(episode_id).result(PATIENCE_S)


def whole_prompt(rounds: list[Round], round_: Round) -> np.ndarray:
    """All prompt ids of a round, put together from its chain of parents."""
    if round_.parent is None:
        return round_.tail_ids
    parent = rounds[round_.parent]
    return np.concatenate([whole_prompt(rounds, parent), parent.sampled_ids, round_.tail_ids])
