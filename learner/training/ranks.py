"""All ranks of the learner as one object: Ray actors, each a plain `Trainer` in its own process.

Used by `learner.pipeline`, on its event loop. Invariant: a call reaches all ranks or none is left running: when one
fails or dies, the error names the rank and the others are ended (they would wait in a collective without end). No
training logic here.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from buffers.errors import UnderstudyError
from buffers.records import TrainBatch
from configs.checkout import python_path
from configs.schema import LearnerConfig
from learner.checkpoints.weight_shards import Published
from learner.training.forked_ranks import launcher
from learner.training.trainer import Trainer

GRACE_S = 5.0
"""Seconds after a first failure in which others may still report theirs: a peer's complaint can precede a death."""


PORTS = range(20_000, 30_000)
"""Ports where ranks meet. Ports for outgoing connections begin at 32768 on Linux."""
WARM_START_BATCH = 32
"""Traces in one update of the warm start."""
LOOK_S = 0.2
"""Seconds between looks at whether they live."""
_READY = "__ray_ready__"
"""Ray's own method, which answers once the actor is built."""


class RankFailed(UnderstudyError):
    """A learner rank raised or its process died; the learner has ended."""


class RankDied(RankFailed):
    """The process of a learner rank died: nothing says that it would do so again."""


class LearnerRanks:
    """Needs `ray.init` before `start`. `devices`: what CUDA calls the card of each rank; none: on CPU, one thread per rank."""

    def __init__(
        self,
        config: LearnerConfig,
        *,
        model_path: str,
        dtype: str,
        temperature: float,
        seed: int,
        keep_versions: int,
        devices: Sequence[str] = (),
    ) -> None:
        self._config = config
        self._settings = {
            "model_path": model_path,
            "dtype": dtype,
            "temperature": temperature,
            "seed": seed,
            "keep_versions": keep_versions,
            "device": "cuda:0" if devices else "cpu",  # a rank sees its own card only
        }
        self._devices = devices
        self._actors: list[Any] = []
        self._death: RankDied | None = None
        """Why there are none; the next call raises it as well."""

    async def start(self) -> None:
        """Starts the processes, again after a failure, on this node: they share files with the run; returns when every rank has its
        model."""
        self._death = None
        address = _free_address()
        for rank in range(self._config.ranks):
            place = {"address": address, "rank": rank, "world_size": self._config.ranks}
            self._actors.append(self._actor_class(rank).remote(self._config, **self._settings, **place))
        await self._all(_READY)

    def _actor_class(self, rank: int) -> Any:
        """Ray counts the cards that ranks take; which card is whose, the plan of the run says (`learner.placement.plan`)."""
        # They meet on loopback: without a name gloo takes the address of the machine's.
        environment = {"PYTHONPATH": python_path(), "GLOO_SOCKET_IFNAME": "lo"}
        if self._devices:
            environment |= {
                "CUDA_VISIBLE_DEVICES": self._devices[rank],
                "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
            }
        else:
            environment["OMP_NUM_THREADS"] = "1"
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        return ray.remote(
            num_cpus=0, num_gpus=1 if self._devices else 0, scheduling_strategy=here,
            runtime_env={"env_vars": environment, **launcher()},
        )(Trainer)  # fmt: skip

    async def until_dead(self) -> None:
        """Watches ranks that have nothing to do: raises RankDied as soon as one has died."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self._all(_READY)

    async def warm_start(
        self, traces_path: Path, *, steps: int, lr: float, seed: int, batch_size: int = WARM_START_BATCH
    ) -> dict[str, float]:
        """See `Trainer.warm_start`."""
        return await self._first("warm_start", traces_path, steps=steps, batch_size=batch_size, lr=lr, seed=seed)

    async def train_step(self, batch: TrainBatch, *, version: int) -> dict[str, float]:
        """See `Trainer.train_step`. The batch is stored once for all ranks."""
        stored = await asyncio.to_thread(ray.put, batch)
        return await self._first("train_step", stored, version=version)

    async def publish(self, folder: Path, *, base: str | None = None) -> list[Published]:
        """See `Trainer.publish`. What each rank wrote, by rank."""
        return await self._all("publish", folder, base=base)

    async def save_pretrained(self, folder: Path) -> None:
        """See `Trainer.save_pretrained`."""
        await self._all("save_pretrained", folder)

    async def save(self, folder: Path) -> None:
        """See `Trainer.save`."""
        await self._all("save", folder)

    async def load(self, folder: Path) -> None:
        """See `Trainer.load`."""
        await self._all("load", folder)

    async def close(self) -> None:
        """Leaves the process group on every rank, then ends the processes. Nothing to do after a failure."""
        if self._actors:
            await self._all("close")
        self.kill()

    async def _first(self, method: str, *args: Any, **options: Any) -> dict[str, float]:
        """Rank 0's answer: all ranks reduce their metrics to the same."""
        answer: dict[str, float] = (await self._all(method, *args, **options))[0]
        return answer

    async def _all(self, method: str, *args: Any, **options: Any) -> list[Any]:
        if not self._actors:
            raise self._death or RankFailed(
                f"learner.{method} needs running ranks, got none; call start() first, or see the failure before"
            )
        calls = [asyncio.ensure_future(getattr(actor, method).remote(*args, **options)) for actor in self._actors]
        done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        if any(call.exception() for call in done):
            await self._fail(method, calls)
        return [call.result() for call in calls]

    async def _fail(self, method: str, calls: list[asyncio.Future[Any]]) -> None:
        """Names the rank to blame, ends all ranks and raises."""
        await asyncio.wait(calls, timeout=GRACE_S)
        self.kill()
        failures = {rank: call.exception() for rank, call in enumerate(calls) if call.done() and call.exception()}
        deaths = [rank for rank, error in failures.items() if isinstance(error, RayActorError)]
        rank = min(deaths or failures)
        cause = getattr(failures[rank], "cause", None) or failures[rank]  # what the rank raised, out of Ray's wrapping
        for call in calls:
            call.cancel()
        what = f"{'died' if deaths else 'failed'} in {'start' if method == _READY else method}"
        kind = RankDied if deaths else RankFailed
        failure = kind(f"learner rank {rank} of {len(calls)} {what}: {cause}; the learner has ended, start it again")
        self._death = failure if isinstance(failure, RankDied) else None
        raise failure from cause

    def kill(self) -> None:
        """Ends the processes at once."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []


def _free_address() -> str:
    """A loopback port that is free, for rank 0 to bind. Of those that no system gives to connections, or to programs that ask
    for any port: another process would have it before rank 0 is there."""
    for port in random.SystemRandom().sample(PORTS, k=len(PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return f"127.0.0.1:{port}"
    raise RankFailed(f"learner needs a free port in {PORTS.start}..{PORTS.stop - 1}, got none; end other programs")
