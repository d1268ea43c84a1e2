"""The generate loop: prompts from the queue, through an engine, to the waiting connection and the buffer.

Loop row: takes a prompt from `BufferDataset` (waits: one prompt); gives a reply to its connection and a `Round` to the buffer;
unblocked by agents' requests. Every generation of every dialect is recorded here, and only here.

Invariants: a round is on disk before its last output leaves for the agent: what an agent received is known after a crash; no
request, whatever it holds, ends the loop or another request; nothing is generated for an episode that failed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, nullcontext, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import numpy as np

from buffers.errors import EngineError, EpisodeClosed, EpisodeError, RequestFailed, RequestRefused, UnderstudyError
from buffers.ledger.ledger import Ledger
from buffers.prompt_queue import Prompt, PromptQueue, QueueClosed, Response
from buffers.records import EpisodeState, Round
from buffers.training_rows import ABANDONED, ABORTED
from mocked_server.conversation.live_episodes import Episodes, LiveEpisode
from mocked_server.fleet.engine_fleet import Caller, EngineFleet
from mocked_server.fleet.member import ADAPTER_OF, EngineLost, Sampled
from mocked_server.request_context import AnswerRecorder
from mocked_server.vllm.sampling_rules import keeps_state

logger = logging.getLogger(__name__)

DEATHS_TOGETHER = 2
"""Engines that ended by themselves with requests of an episode under way, after which it is served by an engine that serves nothing
else. One that ends by itself then has died of it: a request that kills engines is found with the third death. What
something outside has ended (`EngineLost.by_itself`) says nothing of a request, however often."""


@dataclass(slots=True, eq=False)
class _Answer:
    """One prompt's answer while it is generated."""

    prompt: Prompt
    recorder: AnswerRecorder = field(init=False)
    is_sent: bool = False
    """Some of it has left for the agent."""
    is_stored: bool = False
    task: asyncio.Task[None] | None = None
    """Task that serves it."""
    sampled: Sequence[Sampled] = ()
    """Completions that an engine that died had sampled: the next one continues them."""

    def __post_init__(self) -> None:
        self.recorder = AnswerRecorder(self.prompt.request_id)

    def carry_on(self, lost: Sequence[Sampled]) -> bool:
        """Go on with another engine. `lost`: what the dead one had of an answer that comes as a whole. False: some of it was sent,
        and what samples it has a state that is lost."""
        params = self.prompt.sampling.params
        if keeps_state(params):  # `sampled` stays empty: it begins again
            return not self.is_sent
        self.sampled = self.recorder.so_far(params.n) if self.is_sent else list(lost)
        return True


@dataclass(slots=True)
class GenerationStats:
    """Totals since the start; the pipeline takes differences."""

    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    constrained: int = 0
    """Tokens that are not trained, as their request changed the distribution that they are sampled from."""
    aborted: int = 0
    continued: int = 0
    """Times that an answer was continued by another engine, or process of one."""
    running: int = 0
    busy_s: float = 0.0
    """Time with at least one generation under way."""
    _since: float = 0.0

    def started(self, now: float) -> None:
        """One more generation runs."""
        if self.running == 0:
            self._since = now
        self.running += 1

    def ended(self, now: float) -> None:
        """One less."""
        self.running -= 1
        if self.running == 0:
            self.busy_s += now - self._since

    def busy_until(self, now: float) -> float:
        """`busy_s`, with the stretch that is not over yet."""
        return self.busy_s + (now - self._since if self.running else 0.0)


@dataclass(eq=False, repr=False)
class Generation:
    """Runs `generate` for one engine. `run()` is the loop; `serve(prompt)` answers one prompt."""

    engine: EngineFleet
    _: KW_ONLY
    queue: PromptQueue
    episodes: Episodes
    """Running episodes."""
    rounds: Ledger
    blame: Callable[[str], object] = lambda _: None
    """Called with the id of an episode one of whose requests killed the engine that served nothing else."""
    frozen: Mapping[str, EngineFleet] = field(default_factory=dict)
    """Engines of the roles that the policy does not play."""
    adapters: Collection[str] = ()
    """The roles that are adapters of their own."""
    records_experts: bool = False
    """Outputs have the experts of tokens."""
    on_round: Callable[[Prompt, Round], object] = lambda *_: None
    """Called with each round of an answer, once it is on its way to the ledger."""
    keeps: Callable[[Response], bool] = lambda _: True
    """False for a completion that is not to be recorded."""
    stats: GenerationStats = field(default_factory=GenerationStats)
    _answers: defaultdict[str, list[_Answer]] = field(default_factory=lambda: defaultdict(list))
    """Episode -> its answers that are generated now."""
    _deaths: dict[str, dict[tuple[str, int], str]] = field(default_factory=dict)
    """Episode -> the lives of engines that ended by themselves while it had a request under way -> what was seen; until it is
    served alone."""
    _alone: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the one suspect that is generated for."""

    def _engine_of(self, prompt: Prompt) -> EngineFleet:
        return self.frozen.get(prompt.role, self.engine)

    async def run(self) -> None:
        """Runs until the queue is closed. What an engine was doing when it died is continued by another one, or by its next
        process. Where none comes the loop ends with EngineError; the waiting agents get errors first."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                try:
                    prompts = await self.queue.take()
                except QueueClosed:
                    return
                for prompt in prompts:
                    task = tasks.create_task(self.serve(prompt), name=f"generate {prompt.request_id}")
                    prompt.reply.on_abandon(task.cancel)

    async def serve(self, prompt: Prompt) -> None:
        """Generate for one prompt, stream the outputs to its connection, record its rounds.

        The border around one request: every error that it causes is answered and logged here, its round is recorded as aborted,
        and nothing leaves this call but the end of the engine itself (EngineError) and its own cancelling.
        """
        reply = prompt.reply
        answer = _Answer(prompt)
        answer.task = asyncio.current_task()
        self._answers[prompt.episode_id or ""].append(answer)
        self.stats.started(time.monotonic())
        try:
            await self._answer(answer)
        except asyncio.CancelledError:
            # What an agent has read is not undone by hanging up: else it could choose by that what is trained.
            self._abort(answer, as_=ABANDONED if reply.abandoned and answer.is_sent else ABORTED)
            if not reply.abandoned:
                raise
        except EngineError:
            self._abort(answer)
            raise
        except (RequestRefused, EpisodeError) as error:
            logger.info("request %s of episode %s is refused: %s", prompt.request_id, prompt.episode_id, error)
            self._abort(answer)
            reply.fail(error)
        except Exception as error:  # a defect, of ours or of vLLM's: it ends this request and no other
            logger.exception("request %s of episode %s failed", prompt.request_id, prompt.episode_id)
            self._abort(answer)
            reply.fail(RequestFailed(f"the server failed on this request ({type(error).__name__}); see its log"))
        finally:
            # The connection is answered in any case; an answer that ended before is not changed by this.
            reply.fail(
                EngineError(f"generation for request {prompt.request_id} ended; the engine or the server is going down")
            )
            self._deaths.pop(prompt.request_id, None)
            if prompt.episode_id is None:
                self._engine_of(prompt).forget(prompt.request_id)
            self._answers[prompt.episode_id or ""].remove(answer)
            if not self._answers[prompt.episode_id or ""]:
                del self._answers[prompt.episode_id or ""]
            self.stats.ended(time.monotonic())

    async def _answer(self, answer: _Answer) -> None:
        """Generate until the answer is complete, or lost with an engine that died, where that cannot be continued."""
        suspect = answer.prompt.episode_id or answer.prompt.request_id
        while True:
            earlier = self._deaths.get(suspect, {})
            caller = Caller(episode_id=suspect, group_id=answer.prompt.group_id)
            if is_alone := len(earlier) >= DEATHS_TOGETHER:
                caller = replace(caller, alone=True, apart_from=frozenset(name for name, _ in earlier))
            try:
                async with self._alone if is_alone else nullcontext():
                    await self._generate(answer, caller)
                if is_alone:
                    self._deaths.pop(suspect, None)
                return
            except EngineLost as lost:
                if not await self._engine_of(answer.prompt).wait_restarted():
                    raise
                if lost.by_itself and is_alone:
                    self._convict(answer.prompt, str(lost), earlier)
                if lost.by_itself:
                    self._deaths.setdefault(suspect, {})[lost.life] = str(lost)
                if not answer.carry_on(lost.sampled):
                    self._abort(answer)
                    return
                self.stats.continued += 1

    def _convict(self, prompt: Prompt, seen: str, earlier: Mapping[tuple[str, int], str]) -> None:
        before = "; ".join(earlier.values())
        logger.error(
            "request %s of episode %s kills engines: served alone, %s; before, with others under way: %s",
            prompt.request_id, prompt.episode_id, seen, before,
        )  # fmt: skip
        if prompt.episode_id is not None:
            self.blame(prompt.episode_id)
        raise RequestRefused(
            f"the engine died while it answered this request alone ({seen}), as {len(earlier)} others did that served it among "
            "others; send another one"
        )

    async def _generate(self, answer: _Answer, caller: Caller) -> None:
        prompt, reply = answer.prompt, answer.prompt.reply
        if self.records_experts and (live := self._episode_of(prompt)) is not None:  # the parent's own are stored
            prompt.sampling.params.routed_experts_prompt_start = max(1, live.tree.num_ids(prompt.parent)) - 1
        ids = prompt.prompt_token_ids.tolist()
        outputs = self._engine_of(prompt).generate(
            ids,
            prompt.sampling.params,
            request_id=prompt.request_id,
            caller=caller,
            sampled=answer.sampled,
            **prompt.sampling.extra,
            **({ADAPTER_OF: prompt.role} if prompt.role in self.adapters else {}),
        )
        async with aclosing(outputs) as stream:
            async for output in stream:
                if any(completion.finish_reason == "error" for completion in output.outputs):
                    raise _engine_refusal(prompt)
                answer.recorder.add(output)
                if output.finished:
                    self._count(prompt, output)
                    responses, stored = self._store(answer)
                    await _on_disk(stored)
                    reply.finish(*responses, last=output)
                else:
                    reply.push(output)
                answer.is_sent = True

    def _abort(self, answer: _Answer, *, as_: str = ABORTED) -> None:
        """Store what was sampled before the end came as a round."""
        if answer.is_stored:
            return
        self.stats.aborted += 1
        answer.recorder.end(as_)
        try:
            self._store(answer)
        except UnderstudyError as error:  # the request has an answer already, or gets one from the caller
            logger.info("request %s leaves no round: %s", answer.prompt.request_id, error)

    def _count(self, prompt: Prompt, output: Any) -> None:
        self.stats.prompt_tokens += len(prompt.prompt_token_ids)
        self.stats.cached_tokens += output.num_cached_tokens or 0

    def _store(self, answer: _Answer) -> tuple[list[Response], Future[None] | None]:
        """Record what was sampled: a response with its round's index for each completion, and the last one's future, which ends
        after the others'."""
        answer.is_stored = True
        prompt = answer.prompt
        responses, stored = answer.recorder.responses(version=self._engine_of(prompt).version), None
        for number, response in enumerate(responses):
            self.stats.tokens += len(response.sampled_ids)
            if prompt.role not in self.frozen:
                self.stats.constrained += _num_constrained(prompt, response)
            if (live := self._episode_of(prompt)) is not None and self.keeps(response):
                if prompt.role in self.frozen:  # of another model
                    response = replace(response, experts=None)
                round_ = live.tree.add(
                    response,
                    prompt_ids=prompt.prompt_token_ids,
                    parent=prompt.parent,
                    memo=prompt.memo,
                    trained=prompt.trained(len(response.sampled_ids)),
                    role=prompt.role,
                )
                responses[number], stored = replace(response, round_index=round_.round_index), self._put(round_)
                self.on_round(prompt, round_)
        return responses, stored

    def _episode_of(self, prompt: Prompt) -> LiveEpisode | None:
        """None: nothing of this prompt is recorded: it has no episode, or that ended while its last generation ran."""
        return None if prompt.episode_id is None else self.episodes.find(prompt.episode_id)

    def record(
        self, episode_id: str, *, role: str, asked: Sequence[int], said: Sequence[int]
    ) -> tuple[Round, Future[None]]:
        """Store what a model of others was asked and said, as a round that is not trained. Both as the policy's ids. The future
        ends when it is durable, or refused. Raises EpisodeError: the episode ended, or this is not to be stored."""
        response = Response(
            request_id="",
            sampled_ids=np.array(said, np.int32),
            logprobs=np.zeros(len(said), np.float32),
            versions=np.full(len(said), self.engine.version, np.int32),
        )
        trained = np.zeros(len(said), np.uint8)
        if not self.keeps(response):
            raise EpisodeError("it has text that is not to be stored")
        tree = self.episodes.get(episode_id).tree
        round_ = tree.add(response, prompt_ids=np.array(asked, np.int32), trained=trained, role=role)
        return round_, self._put(round_)

    def forget(self, episode_id: str, reason: str) -> None:
        """The episode ended. Unless it was scored, what is generated for it now is given up."""
        self._deaths.pop(episode_id, None)
        for engine in (self.engine, *self.frozen.values()):
            engine.forget(episode_id)
        if reason == EpisodeState.SCORED:  # its agent may still read the end of its last answer
            return
        for answer in self._answers.get(episode_id, ()):
            if not answer.is_stored and answer.task is not None:
                answer.is_stored = True  # there is no episode to store it for
                self.stats.aborted += 1
                answer.prompt.reply.fail(EpisodeClosed(f"episode {episode_id} ended ({reason}); lease a new one"))
                answer.task.cancel()

    def _put(self, round_: Round) -> Future[None]:
        stored = self.rounds.put_round(round_)
        stored.add_done_callback(_log_unstored)
        return stored


def _log_unstored(future: Future[None]) -> None:
    error = future.exception()
    if error is not None and not isinstance(error, EpisodeError):  # the episode ended while its last generation ran
        logger.error("a round could not be stored: %s", error)


def _engine_refusal(prompt: Prompt) -> RequestRefused | RequestFailed:
    """The engine gave this one request up: it does so when it cannot compile what its tokens are constrained to."""
    if prompt.first_trained == 0:
        return RequestFailed("the engine failed on this request; see its log")
    return RequestRefused(
        "structured_outputs or response_format must be a constraint that the engine can compile and follow, but it gave up; "
        "send a simpler one",
        field="structured_outputs",
    )


async def _on_disk(stored: Future[None] | None) -> None:
    """Wait until it is stored, or refused. Cancelling this does not take it back."""
    if stored is None:
        return
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def tell(_: Future[None]) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(done.set)

    stored.add_done_callback(tell)
    await done.wait()


def _num_constrained(prompt: Prompt, response: Response) -> int:
    trained = prompt.trained(len(response.sampled_ids))
    return 0 if trained is None else len(trained) - int(trained.sum())
