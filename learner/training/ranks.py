"""All ranks of the learner as one object: actors, each a plain `Trainer` in its own process, which Ray places in a cluster.

Used by `learner.pipeline`, on its event loop. Invariant: a call reaches all ranks or none is left running: when one
fails or dies, the error names the rank and the others are ended (they would wait in a collective without end). No
training logic here.
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from buffers.errors import StorageFull, UnderstudyError
from buffers.remote.actor import HERE, Actor, ActorDied, ActorRefused, ChildActor
from buffers.weights.node_weights import same_on
from configs.child_processes import python_path
from configs.fork_server import own_context
from configs.schema import LearnerConfig
from learner.checkpoints.store import Checkpoint
from learner.checkpoints.weight_shards import Published
from learner.recovery.restarts import RestartLimit
from learner.training.role_trainer import RoleTrainer
from learner.training.trainer import Trainer

P = ParamSpec("P")
T = TypeVar("T")
RankT = TypeVar("RankT", bound=Trainer)

GRACE_S = 5.0
"""Seconds after a first failure in which others may still report theirs: a peer's complaint can precede a death."""
NODE_GRACE_S = 60.0
"""The same where ranks are on other nodes: Ray takes as long to know that a node is gone."""
PORTS = range(20_000, 30_000)
"""Ports where ranks meet. Ports for outgoing connections begin at 32768 on Linux."""
LOOK_S = 0.2
"""Seconds between looks at whether they live."""
TITLE = "understudy::learner_rank"
_START = "start"


class RankFailed(UnderstudyError):
    """A learner rank raised or its process died; the learner has ended."""


class RankDied(RankFailed):
    """The process of a learner rank died: nothing says that it would do so again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAt:
    """The place of one rank."""

    node_id: str = ""
    """Ray's name of its node, where that is not the run's own."""
    ray_node: str = ""
    """Ray's name of its node; empty: the run is in no cluster, and starts the rank itself."""
    address: str = "127.0.0.1"
    """The node's, for the ranks of other nodes."""
    device: str = ""
    """CUDA's name of its card; empty: it is on the CPU."""
    num_gpus: int = 0
    """GPUs that Ray counts for it."""


def _called(
    method: Callable[Concatenate[RankT, P], T],
) -> Callable[Concatenate[LearnerRanks, P], Coroutine[Any, Any, T]]:
    """The method of all ranks, with its words and arguments; rank 0's answer, as all reduce their figures to the same."""

    @wraps(method)
    async def call(self: LearnerRanks, /, *arguments: P.args, **options: P.kwargs) -> T:
        stored = [await self._stored(each) for each in arguments]
        answer: T = (await self._all(method.__name__, *stored, **options))[0]  # type: ignore[arg-type]
        return answer

    return call


class LearnerRanks:
    """`places`: the place of each rank, asked for at each start. `trainer`: what a rank is, with `more` arguments of its own.
    `here`: the only rank is a task of this process."""

    def __init__(
        self,
        config: LearnerConfig,
        *,
        model_path: str,
        dtype: str,
        temperature: float,
        seed: int,
        keep_versions: int,
        places: Callable[[], Sequence[RankAt]] | None = None,
        trainer: Callable[..., Trainer] = Trainer,
        more: Mapping[str, Any] | None = None,
        here: bool = False,
    ) -> None:
        self._config = config
        self._here = here
        self._settings = {
            "model_path": model_path,
            "dtype": dtype,
            "temperature": temperature,
            "seed": seed,
            "keep_versions": keep_versions,
            **(more or {}),
        }
        self._trainer = trainer
        self._place: Callable[[], Sequence[RankAt]] = places or (lambda: [RankAt()] * config.ranks)
        self._places: Sequence[RankAt] = ()
        self._actors: list[Actor] = []
        self._death: RankDied | None = None
        """Why there are none; the next call raises it as well."""

    async def start(self) -> None:
        """Starts the processes, again after a failure; returns when every rank has its model. Raises RankFailed, and what `places`
        raises."""
        self._death = None
        self._places = await asyncio.to_thread(self._place)
        first = self._places[0]
        spread = any(place.node_id != first.node_id for place in self._places)
        port = await self._free_port(first, host=first.address if spread else "127.0.0.1")
        address = f"{first.address if spread else '127.0.0.1'}:{port}"
        for rank, place in enumerate(self._places):
            group = {"address": address, "world_size": len(self._places)}
            device = "cuda:0" if place.device else "cpu"  # a rank sees its own card only
            self._actors.append(
                _actor(place, self._here, self._trainer, rank, self._config, **self._settings, device=device, **group)
            )
        await self._until_all(_START, [actor.ready() for actor in self._actors])

    async def _free_port(self, first: RankAt, *, host: str) -> int:
        """A port on the first rank's node."""
        if not first.node_id:
            return free_port(host)
        from buffers.remote.ray_actor import answer_of, called_on, on_node

        place = on_node(first.node_id, environment={"PYTHONPATH": python_path()})
        try:
            return int(await asyncio.to_thread(answer_of, called_on(place, free_port, host), timeout_s=NODE_GRACE_S))
        except UnderstudyError as error:
            raise RankDied(f"node {first.node_id} must have rank 0 of the learner, and cannot: {error}") from error

    async def until_dead(self) -> None:
        """Watches ranks that have nothing to do: raises RankDied as soon as one has died."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self._until_all(_START, [actor.ready() for actor in self._actors])

    begin_sft = _called(Trainer.begin_sft)
    sft_step = _called(Trainer.sft_step)
    sft_loss = _called(Trainer.sft_loss)
    end_sft = _called(Trainer.end_sft)
    train_step = _called(Trainer.train_step)
    token_figures = _called(Trainer.token_figures)
    layout_line = _called(Trainer.layout_line)
    probe_prompt = _called(Trainer.probe_prompt)
    layer_states = _called(Trainer.layer_states)
    drift = _called(Trainer.drift)
    load = _called(Trainer.load)
    replayed = _called(Trainer.replayed)
    versions = _called(RoleTrainer.versions)

    async def logprobs_of(self, ids: Sequence[int], *, last: int, role: str = "") -> list[float]:
        """See `Trainer.logprobs_of`, or with a `role` `RoleTrainer.logprobs_of`."""
        found: list[float] = (await self._all("logprobs_of", ids, last=last, **({"role": role} if role else {})))[0]
        return found

    async def _stored(self, argument: Any) -> Any:
        """An argument, such as a batch, as ranks of a cluster are given it: it crosses to each node once."""
        if not any(place.ray_node for place in self._places):
            return argument
        from buffers.remote.ray_actor import stored_once

        return await asyncio.to_thread(stored_once, argument)

    async def publish(self, folder: Path, *, base: str | None = None, role: str = "") -> list[Published]:
        """See `Trainer.publish`, or with a `role` `RoleTrainer.publish`. What each rank wrote, by rank; on another node that is in
        the folder that `same_on` names."""
        folders = [same_on(folder, place.node_id) if place.node_id else folder for place in self._places]
        return await self._all("publish", base=base, each=folders, **({"role": role} if role else {}))

    async def save_pretrained(self, folder: Path) -> None:
        """See `Trainer.save_pretrained`. Raises StorageFull where the disk does not take it for now: the ranks live on."""
        await self._written("save_pretrained", folder)

    async def save(self, folder: Path) -> None:
        """See `Trainer.save`. Raises StorageFull, as `save_pretrained`."""
        await self._written("save", folder)

    async def _written(self, method: str, folder: Path) -> None:
        if why := next(filter(None, await self._all("written", method, folder, of=method)), ""):
            raise StorageFull(why)

    async def close(self) -> None:
        """Leaves the process group on every rank, then ends the processes. Nothing to do after a failure."""
        if self._actors:
            await self._all("close")
        self.kill()

    async def _all(
        self, method: str, *args: Any, each: Sequence[Any] | None = None, of: str = "", **options: Any
    ) -> list[Any]:
        """Every rank's answer. `each`: one more argument, another for each rank. `of`: the call's name in errors."""
        if not self._actors:
            raise self._death or RankFailed(
                f"learner.{method} needs running ranks, got none; call start() first, or see the failure before"
            )
        own: Sequence[tuple[Any, ...]] = [()] * len(self._actors) if each is None else [(one,) for one in each]
        return await self._until_all(
            of or method,
            [actor.call(method, *more, *args, **options) for actor, more in zip(self._actors, own, strict=True)],
        )

    async def _until_all(self, what: str, calls: list[asyncio.Future[Any]]) -> list[Any]:
        """The answers. `what`: the name of the calls in errors."""
        done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        if any(call.exception() for call in done):
            await self._fail(what, calls)
        return [call.result() for call in calls]

    async def _fail(self, what: str, calls: list[asyncio.Future[Any]]) -> None:
        """Names the rank to blame, ends all ranks and raises."""
        await self._until_a_death(calls, timeout_s=NODE_GRACE_S if any(at.node_id for at in self._places) else GRACE_S)
        failures = {rank: error for rank, call in enumerate(calls) if call.done() and (error := call.exception())}
        self.kill()  # afterwards all have ended
        for call in calls:
            call.cancel()
        for error in failures.values():  # first: the others may complain that they lost this one
            if isinstance(error, ActorRefused):
                raise RankFailed(str(error)) from error
        deaths = [rank for rank, error in failures.items() if isinstance(error, ActorDied)]
        rank = min(deaths or failures)
        error = failures[rank]
        kind, how = (RankDied, "died") if deaths else (RankFailed, "failed")
        failure = kind(f"learner rank {rank} of {len(calls)} {how} in {what}: {error}; the learner has ended")
        self._death = failure if isinstance(failure, RankDied) else None
        raise failure from error

    async def _until_a_death(self, calls: Sequence[asyncio.Future[Any]], *, timeout_s: float) -> None:
        """Returns when a rank is known to have died, or all have answered."""
        until = time.monotonic() + timeout_s
        waiting = set(calls)
        while waiting and (left := until - time.monotonic()) > 0:
            done, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if any(isinstance(call.exception(), ActorDied) for call in done):
                return

    def kill(self) -> None:
        """Ends the processes at once."""
        for actor in self._actors:
            actor.kill()
        self._actors = []


def _actor(
    place: RankAt, here: bool, trainer: Callable[..., Trainer], rank: int, *arguments: Any, **options: Any
) -> Actor:
    environment = {"CUDA_VISIBLE_DEVICES": place.device} if place.device else {"OMP_NUM_THREADS": "1"}
    if not place.ray_node:
        context = HERE if here else own_context(environment)
        return ChildActor(context, f"{TITLE}_{rank}", trainer, *arguments, rank=rank, **options)
    from buffers.remote.ray_actor import RayActor, on_node

    # Ray counts the cards that ranks take; which card is whose, the plan of the run says (`learner.placement.plan`).
    environment |= {"PYTHONPATH": python_path(), "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    on = on_node(place.ray_node, environment=environment, num_gpus=place.num_gpus)
    return RayActor(on, trainer, *arguments, rank=rank, **options)


def free_port(host: str) -> int:
    """A port of this machine that is free, for rank 0 to bind. Of those that no system gives to connections, or to programs that
    ask for any port: another process would have it before rank 0 is there. Raises RankFailed."""
    for port in random.SystemRandom().sample(PORTS, k=len(PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((host, port))
            return port
    raise RankFailed(f"learner needs a free port in {PORTS.start}..{PORTS.stop - 1}, got none; end other programs")


# Starts the learner's ranks with their state, and restarts them when a process died. Invariant: when `start` or `restart`
# returns, all ranks hold the state of the given checkpoint, or that of the run's start.


@dataclass(eq=False)
class LearnerProcesses:
    """`first`: brings fresh ranks to the weights that the run starts from, by SFT; None: they have them."""

    ranks: LearnerRanks
    _: KW_ONLY
    restart_limit: RestartLimit
    first: Callable[[], Awaitable[None]] | None = None

    async def start(self, checkpoint: Checkpoint | None) -> None:
        """Needs Ray. Raises RankDied when they die too often, RankFailed."""
        while True:
            try:
                await self.ranks.start()
                return await self._prepare(checkpoint)
            except RankDied as death:
                self.restart_limit.record("learner", death)
            except asyncio.CancelledError:
                self.ranks.kill()  # `close` would wait for the end of an update
                raise

    async def restart(self, death: RankDied, checkpoint: Checkpoint | None) -> None:
        """Start them again after `death`. Raises as `start`."""
        self.restart_limit.record("learner", death)
        await self.start(checkpoint)

    async def _prepare(self, checkpoint: Checkpoint | None) -> None:
        if checkpoint is not None:
            await self.ranks.load(checkpoint.learner)
        elif self.first is not None:
            await self.first()
