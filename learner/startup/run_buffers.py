"""A run's buffers: the ledger in its folder, back at the checkpoint that is resumed, and its views.

Called by `learner.pipeline`. Invariant: what the ledger says of an earlier process of this run holds: which tasks were
opened, which groups wait, and, where agents outlive the run's process, which episodes are under way.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from buffers.ledger.ledger import Ledger
from buffers.multi_round import MultiRoundBufferDataset
from buffers.records import Episode, Position, Replay, Round
from buffers.remote.remote_ledger import RemoteLedger
from buffers.tasks.curriculum import Curriculum
from buffers.tasks.task_pool import TaskPool
from configs.child_processes import python_path
from configs.schema import BufferConfig, Config
from learner.checkpoints.store import Checkpoint
from learner.startup.run_folder import LEDGER

EVALUATED = 256
"""Most episodes of an evaluation at once for each engine, where `agents.concurrency` is auto: a full step of it."""
PROGRAMS_PER_PROCESSOR = 8
"""Most agent programs for each processor of this machine, where `agents.concurrency` is auto: they mostly wait for the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBuffers:
    """The ledger and its views."""

    ledger: Ledger
    pool: TaskPool
    rounds: MultiRoundBufferDataset
    curriculum: Curriculum | None
    opened: dict[str, int]
    """Groups of each task that earlier processes of this run opened."""
    num_again: int
    """Batches given back by going back to a checkpoint."""
    running: list[tuple[Episode, list[Round]]]
    """Episodes under way whose agents outlived the process before, and what they sampled."""


def agents_outlive(config: Config) -> bool:
    """Whether agents live on when the run's process dies: the user started them, and the server keeps its address."""
    if config.serve.enabled:
        return True
    others = config.agents.command or config.agents.loops or config.env.harbor.agent
    return not others and config.server.port != 0


def most_running(config: Config, *, evaluates: bool = False) -> int:
    """Most episodes that can ever run at once: `agents.concurrency`, or with auto as many as `buffer.max_policy_lag` lets start.

    `evaluates`: no policy lag bounds them. Programs that are started for each episode are also bounded by the processors."""
    if config.agents.concurrency != "auto":
        return config.agents.concurrency
    buffer = config.buffer
    groups = (buffer.max_policy_lag + 1) * buffer.groups_per_step
    most = (
        EVALUATED * config.rollout.engine_range[1] if evaluates else groups * (buffer.group_size + num_greedy(config))
    )
    if config.env.harbor.agent or (config.agents.command and config.agents.processes == 0):
        return min(most, PROGRAMS_PER_PROCESSOR * len(os.sched_getaffinity(0)))
    return most


def num_greedy(config: Config) -> int:
    """Greedy episodes of each group, beside the others: ReMax's baseline, arXiv:2310.10505."""
    return int(config.learner.advantage == "remax")


def replay_at(buffer: BufferConfig, *, version: int) -> Replay | None:
    """Which stored groups join the batch that this version trains; None: there is no replay."""
    own = buffer.replay
    if not buffer.num_replayed:
        return None
    return Replay(num_groups=buffer.num_replayed, min_version=version - own.oldest, only=own.only, times=own.times)


async def stored_places(ledger: Ledger, buffer: BufferConfig, *, version: int) -> int | None:
    """Places of stored groups in the batches for which episodes may begin at this version: known of the next, and as many as there
    can be of later ones. Where they are fewer then, fresh groups get more room. None: there is no replay."""
    replay = replay_at(buffer, version=version)
    if replay is None:
        return None
    return await asyncio.wrap_future(ledger.count_stored(replay)) + buffer.max_policy_lag * replay.num_groups


async def open_run_buffers(
    config: Config,
    stack: AsyncExitStack,
    *,
    folder: Path,
    secret: RowSecret,
    resume: bool,
    checkpoint: Checkpoint | None,
) -> RunBuffers:
    """Open the folder's ledger, until `stack` ends. `resume`: it is an earlier run's, which is resumed from `checkpoint`, or
    from its start. `secret`: for rows from other machines."""
    ledger = await open_ledger(
        folder,
        node=config.buffer.node,
        secret=secret,
        trusted=config.run.trusted_network,
        drop_zero_variance=config.data.reward_manager == "dapo",
        resume_episodes=resume and agents_outlive(config),
        is_new=not resume,
    )
    stack.callback(ledger.close)
    num_again = 0
    if resume:
        here = await asyncio.wrap_future(ledger.position())
        start = Position(run_id=here.run_id, lineage=here.lineage, step=0)
        num_again = await asyncio.wrap_future(ledger.restore(checkpoint.position if checkpoint else start))
    opened = await asyncio.wrap_future(ledger.times_opened())
    episodes = await asyncio.wrap_future(ledger.running_episodes())
    rounds = [await asyncio.wrap_future(ledger.rounds(episode.episode_id)) for episode in episodes]
    version = checkpoint.position.step if checkpoint else 0
    curriculum, rule = None, config.data.sampler
    if rule != "uniform":
        history = await asyncio.wrap_future(ledger.group_outcomes(0))
        curriculum = Curriculum(rule, seed=config.run.seed, history=history, version=version)
    pool = TaskPool(
        ledger,
        group_size=config.buffer.group_size,
        groups_per_step=config.buffer.groups_per_step,
        max_policy_lag=config.buffer.max_policy_lag,
        max_running=most_running(config),
        max_attempts=config.agents.max_attempts,
        min_group_size=config.agents.fewest_members,
        num_greedy=num_greedy(config),
        deadline_s=config.agents.deadline_s,
        version=version,
        num_stored=await stored_places(ledger, config.buffer, version=version),
        times_opened=opened,
        curriculum=curriculum,
        paused=True,
    )
    pool.adopt_running(episodes)
    return RunBuffers(
        ledger=ledger,
        pool=pool,
        rounds=MultiRoundBufferDataset(
            ledger, group_size=config.buffer.group_size, max_attempts=config.agents.max_attempts
        ),
        curriculum=curriculum,
        opened=opened,
        num_again=num_again,
        running=list(zip(episodes, rounds, strict=True)),
    )


# The place of a run's ledger: the run's own process, or an actor on the Ray node that `buffer.node` names. Invariant: the
# caller that opens a ledger here closes it: then nothing of it runs any more. A run that was killed leaves its actor behind,
# with all that was acknowledged; the next one takes its place.


RowSecret = Callable[..., bytes]
"""Gives the secret of the ledger's wire to `host=`; raises where others can reach it and there must be one of the operator's."""


async def open_ledger(
    folder: Path,
    *,
    node: str,
    secret: RowSecret,
    trusted: bool,
    drop_zero_variance: bool,
    resume_episodes: bool,
    is_new: bool,
) -> Ledger:
    """The ledger of the run in `folder`, which on another node is the folder of the same name. See `Ledger`. `trusted`: see
    `configs.schema.RunConfig.trusted_network`."""
    if not node:
        return Ledger(folder / LEDGER, drop_zero_variance=drop_zero_variance, resume_episodes=resume_episodes)
    remote = partial(
        _open_remote, folder.resolve(), node=node, secret=secret, trusted=trusted, drop_zero_variance=drop_zero_variance,
        resume_episodes=resume_episodes, is_new=is_new,
    )  # fmt: skip
    opening = asyncio.ensure_future(asyncio.to_thread(remote))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:  # the thread cannot be cancelled: what it starts is ended
        await asyncio.wait({opening})
        if opening.exception() is None:
            opening.result().close()
        raise


def _open_remote(folder: Path, *, node: str, secret: RowSecret, drop_zero_variance: bool, **settings: bool) -> Ledger:
    from buffers.remote.ledger_actor import start_actor
    from learner.startup.ray_cluster import find_node

    node_id, address = find_node(node)
    key = secret(host=address)
    actor = start_actor(
        folder / LEDGER,
        node_id=node_id,
        host=address,
        secret=key,
        environment={"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
        drop_zero_variance=drop_zero_variance,
        **settings,
    )
    return RemoteLedger(actor, path=folder / LEDGER, secret=key, drop_zero_variance=drop_zero_variance, owns=True)
