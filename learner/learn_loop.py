"""The learn loop: full batches of scored groups in, new weights out, checkpoints beside it.

Built and run by `learner.pipeline`; its row in the table of loops is `learn`. Invariants: a batch is committed to the ledger
once its update is made, and published before the next is claimed; a checkpoint is the state after a committed step. The
step number is the policy version. Saving happens while the next batch is awaited and never stops generation: only the
next update waits for it.

After a crash the batches that were trained beyond the checkpoint are trained again, as they were and in their order. Episodes are
played meanwhile only if they will still be fresh enough then. When only the learner's processes died, generation continues.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from buffers.disk import until_written
from buffers.errors import LeaseError
from buffers.records import Position, TrainBatch
from configs.schema import BufferConfig, RunConfig
from learner.agreement import Agreement
from learner.algorithms.overlong_penalty import with_overlong_penalty
from learner.checkpoints.saving import save_checkpoint
from learner.checkpoints.store import Checkpoint, CheckpointStore
from learner.checkpoints.weight_sync import Engine, WeightSync
from learner.lessons import Lessons
from learner.live_versions import Versions
from learner.recovery.restarts import RestartLimit
from learner.reporting.display import Display
from learner.reporting.run_metrics import GenerationTotals, History
from learner.reporting.token_figures import TokenFiles
from learner.reporting.tracker import Traces, Tracker
from learner.startup.run_buffers import RunBuffers, replay_at, stored_places
from learner.training.ranks import LearnerProcesses, RankDied
from learner.validation import Validation


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Which steps are made, from what."""

    run: RunConfig
    buffer: BufferConfig
    start: int = 0
    """The step after which this run resumes."""
    overlong_tokens: int | None = None
    """The most tokens of a generation, where long ones are penalised; None: they are not."""
    tries_save: bool = False
    """A first save is made and thrown away while the first batch is awaited: what cannot be saved ends the run before it learns."""
    sleep: bool = False
    """The engine's memory is freed while the learner updates."""
    patience_s: float | None = None
    """Seconds after which a batch is smaller than `buffer.groups_per_step`; None: never."""
    per_role: bool = False
    """Each role is a policy of its own, with versions of its own; then the step's number is no policy's version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Destinations of a step's figures."""

    history: History
    tracker: Tracker
    display: Display
    generated: GenerationTotals
    """Totals of the generate loop."""
    more_figures: Callable[[], dict[str, float]] = dict
    """Figures of other parts, for each step's line."""
    traces: Traces | None = None
    tokens: TokenFiles | None = None


class LearnLoop:
    """`starting`: the start of the learner's processes, which `run` waits for. `checkpoint`: the one that this run resumes from,
    whose weights the engine has. `on_begun`: called once engines and learner have the first weights, and agree."""

    def __init__(
        self,
        schedule: Schedule,
        *,
        buffers: RunBuffers,
        learner: LearnerProcesses,
        starting: Awaitable[None],
        engine: Engine,
        weights: WeightSync,
        store: CheckpointStore,
        outputs: Outputs,
        restart_limit: RestartLimit,
        validation: Validation | None = None,
        checkpoint: Checkpoint | None = None,
        agreement: Agreement | None = None,
        versions: Versions | None = None,
        lessons: Lessons | None = None,
        on_begun: Callable[[], None] = lambda: None,
    ) -> None:
        self._schedule = schedule
        self._ledger = buffers.ledger
        self._rounds = buffers.rounds
        self._pool = buffers.pool
        self._num_again = buffers.num_again
        self._learner = learner
        self._starting = starting
        self._engine = engine
        self._weights = weights
        self._store = store
        self._out = outputs
        self._restart_limit = restart_limit
        self._validation = validation
        self._checkpoint = checkpoint
        self._agreement = agreement
        self._users = versions
        """What users are served: a candidate every so many steps, and the learner goes back where one is refused."""
        self._lessons = lessons
        """Steps of SFT, between the others."""
        self._new_sessions: list[str] = []
        """Trained since the candidate before."""
        self._on_begun = on_begun
        self._probed = -1
        """The step after which engines were compared with the learner last; -1: they were not yet."""
        self.step = schedule.start
        """Steps trained; the policy version in the engine, unless steps are being made again."""
        self._done = schedule.start
        """Steps that were trained, reported and published at least once."""
        self._versions: Mapping[str, int] = {}
        """Role -> its version, where roles have their own."""
        self._batch: TrainBatch | None = None
        self._sampling: asyncio.Task[TrainBatch] | None = None
        self._saving: asyncio.Task[None] | None = None
        self._saved_at: dict[int, Checkpoint] = {}
        """Step -> the checkpoint that was saved there."""
        self._is_lesson_due = False
        self._comes_batch_first = False
        """There was a lesson: a batch that is ready comes before the next one, which may be due already."""
        self._stopped = False
        self.activity = "starting"
        """What the learner does now: starting, waiting (for groups), updating, or saving."""

    def stop(self) -> bool:
        """Finish after the step in progress. False: no step was begun yet, the caller ends the run itself."""
        self._stopped = True
        if self._validation is not None:
            self._validation.cancel()
        if self._sampling is not None:
            self._sampling.cancel()
        if self._users is not None:
            self._users.stop()
        return self._sampling is not None or self.step > self._schedule.start

    async def run(self) -> None:
        """Takes a full batch (waits: enough scored, fresh groups), gives new weights; unblocked by scores. Finite."""
        await self._begin()
        self._on_begun()
        self._validate()
        keeps = self._users is not None and self._checkpoint is None  # what a refused candidate goes back to
        if self.step == 0 and (self._schedule.tries_save or keeps):
            self._saving = asyncio.create_task(self._save(keeps=keeps), name="try a save")
        try:
            while True:
                try:
                    await self._learn()
                    await self._saved()
                    await self._finish_validation()
                    with self._out.display.phase("saving the checkpoint"):
                        await self._save()
                    return
                except RankDied as death:
                    await self._recover(death)
        finally:
            if self._saving is not None:
                self._saving.cancel()
            if self._validation is not None:
                self._validation.cancel()

    async def _begin(self) -> None:
        """Wait until the learner has started. Episodes may be played meanwhile, unless more steps are to be made again first than
        those may be old."""
        if self._checkpoint is not None and self._num_again <= self._schedule.buffer.max_policy_lag:
            self._pool.unpause()
        with self._out.display.phase("starting the learner"):
            await self._starting
        while True:
            try:
                if self._checkpoint is None:
                    await self._publish()
                return await self._probe()
            except RankDied as death:
                await self._recover(death)

    async def _probe(self, *, has_moved: bool = True) -> None:
        """Compare engines and learner, with the first weights and with the first that an update moved: the same ones published
        again would hide what an engine keeps."""
        is_due = self._probed <= self._schedule.start and self._probed != self.step
        if self._agreement is not None and is_due and has_moved:
            await self._agreement.probe(self._learner.ranks)
            self._probed = self.step

    async def _learn(self) -> None:
        """Make steps until all are made or the run is to stop."""
        every = self._schedule.run.checkpoints.every
        await self._ask_versions()
        while (step := self.step + 1) <= self._schedule.run.steps:
            waited = time.monotonic()
            self.activity = "waiting"
            if not self._stopped and self._lessons is not None and self._lessons.was_taken(step):  # and is made again
                await self._take_lesson(self._lessons, step=step)
                continue
            batch = await self._sample()
            if self._lessons is not None and self._is_lesson_due:
                self._is_lesson_due = False
                await self._take_lesson(self._lessons, step=step)
                continue
            if batch is None:
                return
            self._batch = batch
            began = time.monotonic()
            self.activity = "saving"
            await self._saved()
            await self._go_back()
            saved = time.monotonic()
            self.activity = "updating"
            metrics = await self._train(batch, step=step)
            ended, before = time.monotonic(), self._versions
            await self._ask_versions()
            times = {
                "time/wait_s": began - waited,
                "time/save_s": saved - began,
                "time/update_s": ended - saved,
                "time/step_s": ended - waited,
            }
            if step > self._done:
                self._done = step
                self._restart_limit.reset()
                await self._report(batch, {**metrics, **times}, of_roles=before)
                self._validate()
            if self._users is not None:
                self._new_sessions += [row.episode_id for row in batch.rows]
                if step % self._users.gate.every == 0:
                    await self._offer(self._users, entropy=metrics.get("policy/entropy"))
            elif every and step % every == 0 and step < self._schedule.run.steps:
                self._saving = asyncio.create_task(self._save(), name="save")

    async def _take_lesson(self, lessons: Lessons, *, step: int) -> None:
        """A step that learns demonstrations by SFT, and is a candidate."""
        began = time.monotonic()
        self._comes_batch_first = True
        await self._saved()
        self.activity = "updating"
        if (figures := await lessons.take(step)) is None:
            return
        await asyncio.wrap_future(self._ledger.commit_lesson(step=step, version=step))
        is_new, self.step = step > self._done, step
        if step >= self._done:
            figures |= await self._publish()
            await self._probe()
            await self._pool.set_version(step, oldest=self._oldest)
        if is_new:
            self._done = step
            figures |= self._out.more_figures() | {"time/step_s": time.monotonic() - began}
            await asyncio.to_thread(self._out.tracker.log, step, figures)
        if self._users is not None:
            await self._offer(self._users, entropy=None)
        else:
            self._saving = asyncio.create_task(self._save(), name="save")
        await self._saved()
        await lessons.end()

    async def _offer(self, users: Versions, *, entropy: float | None) -> None:
        """The newest version is a candidate. Where it is refused the learner goes back to what it was when the last was promoted;
        what is saved is the state that it continues from."""
        sessions, self._new_sessions = sorted(set(self._new_sessions)), []  # steps may have been made again
        self.activity = "gate"
        self._pool.unpause()
        drift = (
            self._learner.ranks.drift if self._lessons is None else None
        )  # what was watched is meant to lead far away
        is_promoted = await users.admit(self.step, episodes=sessions, entropy=entropy, drift=drift)
        await self._saved()
        if is_promoted is False and self._checkpoint is not None:
            await self._learner.ranks.load(self._checkpoint.learner)
        self._saving = asyncio.create_task(self._save(), name="save")

    async def _go_back(self) -> None:
        """Follow users who were given an earlier version again by hand, as far as its checkpoint is kept."""
        version = None if self._users is None else self._users.taken_back
        if self._users is None or version is None:
            return
        self._users.taken_back = None
        saved = [each for each in await asyncio.to_thread(self._store.all) if each.position.step == version]
        if saved:
            await self._learner.ranks.load(saved[-1].learner)
            await self._save()
        said = "and the learner continues from it" if saved else "the learner does not go back: that checkpoint is gone"
        self._out.display.note(f"users are served version {version} again; {said}")

    async def _recover(self, death: RankDied) -> None:
        """The learner's processes died: new ones, with the state of the newest checkpoint. What was trained since is trained
        again; until then the engine keeps its weights, which are those that this leads to."""
        if self._saving is not None:
            self._saving.cancel()
            await asyncio.gather(self._saving, return_exceptions=True)
            self._saving = None
        with suppress(LeaseError):  # its step was committed, or there is none
            if self._batch is not None:
                await asyncio.wrap_future(self._ledger.release(self._batch.lease_id))
        await self._learner.restart(death, self._checkpoint)
        self._weights.renew()
        here = await asyncio.wrap_future(self._ledger.position())
        start = Position(run_id=here.run_id, lineage=here.lineage, step=0)
        target = self._checkpoint.position if self._checkpoint else start
        self._num_again = await asyncio.wrap_future(self._ledger.restore(target))
        self.step = target.step

    async def _ask_versions(self) -> None:
        if self._schedule.per_role:
            self._versions = await self._learner.ranks.versions()

    @property
    def _oldest(self) -> int:
        """The version of the policy; of the role whose version is the lowest, where roles have their own; the one that users are
        served, where that is older."""
        served = self._users.served if self._users is not None else None
        return min([*self._versions.values(), *([] if served is None else [served])], default=self.step)

    async def _publish(self) -> dict[str, float]:
        return await self._weights.publish(self._learner.ranks, self._engine, version=self.step)

    async def _sample(self) -> TrainBatch | None:
        """The next full batch; None when the run is to stop, or `_is_lesson_due`."""
        buffer = self._schedule.buffer
        least = min(self._versions.values(), default=self.step)
        min_version, replay = self._oldest - buffer.max_policy_lag, replay_at(buffer, version=least)
        num_groups = buffer.groups_per_step
        if self._stopped:
            return None
        if self._num_again or self._comes_batch_first:
            self._num_again, self._comes_batch_first = max(0, self._num_again - 1), False
            batch = await asyncio.wrap_future(self._ledger.claim(num_groups, min_version=min_version, replay=replay))
            if batch is not None:
                return batch
        self._num_again = 0
        self._pool.unpause()
        self._sampling = asyncio.create_task(
            self._rounds.sample(
                num_groups, min_version=min_version, replay=replay, patience_s=self._schedule.patience_s
            )
        )
        dying = asyncio.create_task(self._learner.ranks.until_dead())  # a learner that dies now is started again now
        due = asyncio.create_task(asyncio.Event().wait() if self._lessons is None else self._lessons.due())
        try:
            await asyncio.wait({self._sampling, dying, due}, return_when=asyncio.FIRST_COMPLETED)
            if self._sampling.done():
                return self._sampling.result()
            if dying.done():
                dying.result()
            due.result()
            self._is_lesson_due = not self._stopped
        except asyncio.CancelledError:
            if not self._stopped:
                raise
        finally:
            for task in (self._sampling, dying, due):
                task.cancel()
            await asyncio.gather(self._sampling, dying, due, return_exceptions=True)
        return None

    async def _train(self, batch: TrainBatch, *, step: int) -> dict[str, float]:
        """Train, record the step, publish what the engine does not have yet."""
        penalty = {}
        if self._schedule.overlong_tokens is not None:
            batch, mean = with_overlong_penalty(batch, max_tokens=self._schedule.overlong_tokens)
            penalty = {"reward/overlong": mean}
        users = self._users
        live: dict[str, Any] = (
            {} if users is None else {"pace": users.pace(step), "has_gone_back": users.has_other_weights(self.step)}
        )
        async with self._asleep() as times:
            metrics = penalty | await self._learner.ranks.train_step(batch, version=self.step, **live)
        metrics |= times
        if self._agreement is not None:
            self._agreement.check_batch(metrics, num_tokens=batch.fresh.num_trained_tokens)
        if step > self._done:
            await self._keep_token_figures(batch, step=step)
        await asyncio.wrap_future(self._ledger.commit_step(batch.lease_id, step=step, version=step))
        began = time.monotonic()
        self.step = step
        if step >= self._done:  # the last one that is made again too: rounding may differ
            metrics |= await self._publish()
            await self._probe(has_moved=metrics.get("policy/grad_norm", 1.0) > 0.0)
            stored = await stored_places(self._ledger, self._schedule.buffer, version=step)
            await self._pool.set_version(step, oldest=self._oldest, num_stored=stored)
        metrics["time/publish_s"] = time.monotonic() - began
        if step > self._done and self._out.traces is not None:
            add = partial(self._out.traces.add, batch.fresh, step=step)
            await asyncio.to_thread(self._out.tracker.attempt, "traces.jsonl", add)
        return metrics

    async def _keep_token_figures(self, batch: TrainBatch, *, step: int) -> None:
        """What the learner made of single tokens. Before the step is recorded: the page shows what is trained with its figures."""
        if self._out.tokens is not None and (figures := await self._learner.ranks.token_figures()) is not None:
            add = partial(self._out.tokens.add, batch, figures, step=step)
            await asyncio.to_thread(self._out.tracker.attempt, "tokens", add)

    @asynccontextmanager
    async def _asleep(self) -> AsyncIterator[dict[str, float]]:
        """Frees the engine's memory in the block, with `rollout.sleep`; gives the time that falling asleep and waking took."""
        times: dict[str, float] = {}
        if not self._schedule.sleep:
            yield times
            return
        began = time.monotonic()
        await self._engine.sleep()
        asleep = time.monotonic()
        try:
            yield times
        finally:
            waking = time.monotonic()
            await self._engine.wake_up()
            times["time/sleep_s"] = asleep - began + time.monotonic() - waking

    def _validate(self) -> None:
        if self._validation is not None and self.step < self._schedule.run.steps:
            self._validation.begin(self.step)

    async def _finish_validation(self) -> None:
        """Validate the last weights, after a validation that is under way; after Ctrl-C neither is waited for."""
        self._pool.unpause()
        if self._validation is None or self._stopped:
            return
        with self._out.display.phase("waiting for the last validation"):
            await self._log_validation(await self._validation.finish())
            if not self._stopped:
                self._validation.begin(self.step, last=True)
                await self._log_validation(await self._validation.finish())

    async def _log_validation(self, figures: dict[str, float]) -> None:
        """No step's line is left for them."""
        if figures:
            await asyncio.to_thread(self._out.tracker.log, self.step, figures)
            await self._take_validation(figures)

    async def _saved(self) -> None:
        """Wait until the checkpoint that is being written, if any, is on disk."""
        if self._saving is not None:
            await self._saving
            self._saving = None

    async def _save(self, *, keeps: bool = True) -> None:
        """Write a checkpoint; with `keeps` false it is removed again. A disk that does not take it is waited for, until the run is
        to stop."""
        position = await asyncio.wrap_future(self._ledger.position())
        saved = await save_checkpoint(
            self._learner.ranks, store=self._store, position=position, score=partial(self._score, position.step),
            say=self._out.display.note, gives_up=lambda: self._stopped, keeps=keeps,
        )  # fmt: skip
        if saved is not None:
            self._checkpoint = self._saved_at[position.step] = saved
        await self._rescore(position.step)

    async def _take_validation(self, figures: dict[str, float]) -> None:
        if "val/mean" in figures:
            self._out.display.validated(int(figures["val/step"]), mean=figures["val/mean"], best=figures["val/best"])
            await self._rescore(int(figures["val/step"]))

    def _score(self, step: int) -> float | None:
        """What says how good the weights of `step` are; None: their validation has not ended."""
        return self._out.history.recent_reward() if self._validation is None else self._validation.means.get(step)

    async def _rescore(self, step: int) -> None:
        """The checkpoint of `step` gets its validation's score, which may have ended before it was saved or after."""
        saved, score = self._saved_at.get(step), self._score(step)
        if self._validation is not None and saved is not None and score is not None and saved.score != score:

            async def write() -> None:
                self._saved_at[step] = await asyncio.to_thread(self._store.rescore, saved, score)

            await until_written(
                write,
                what=f"the checkpoint of step {step}",
                folder=self._store.folder.parent,
                say=self._out.display.note,
                gives_up=lambda: self._stopped,
            )

    async def _report(self, batch: TrainBatch, metrics: dict[str, float], *, of_roles: Mapping[str, int]) -> None:
        figures = self._out.history.add(
            batch, metrics, version=self.step - 1, of_roles=of_roles, stats=self._out.generated
        )
        figures |= self._pool.metrics() | self._restart_limit.figures() | self._out.more_figures()
        if self._validation is not None:
            figures |= self._validation.take()
            await self._take_validation(figures)
        await asyncio.to_thread(self._out.tracker.log, self.step, figures)
        if drift := self._out.history.drift():
            self._out.display.note(drift)
        self._out.display.update(
            self.step,
            reward=figures["reward/mean"],
            mean_lag=figures["staleness/mean"],
            max_lag=figures["staleness/max"],
            tokens_per_s=figures["throughput/tokens_per_s"],
            step_s=figures["time/step_s"],
        )
