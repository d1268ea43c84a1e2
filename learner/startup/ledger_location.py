"""The place of a run's ledger: the run's own process, or an actor on the Ray node that `buffer.node` names.

Called by `learner.startup.run_buffers`. Invariant: the caller that opens a ledger here closes it: then nothing of it runs any
more. A run that was killed leaves its actor behind, with all that was acknowledged; the next one takes its place.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Protocol

from buffers.ledger.ledger import Ledger
from buffers.remote.ray_actor import start_actor
from buffers.remote.remote_ledger import RemoteLedger
from configs.checkout import python_path
from learner.startup.ray_cluster import find_node
from learner.startup.run_folder import LEDGER


class RowSecret(Protocol):
    """The secret of the ledger's wire; raises where others can reach that host and there must be one of the operator's."""

    def __call__(self, *, host: str) -> bytes: ...


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
    settings = {
        "trusted": trusted,
        "drop_zero_variance": drop_zero_variance,
        "resume_episodes": resume_episodes,
        "is_new": is_new,
    }
    opening = asyncio.ensure_future(
        asyncio.to_thread(_open_remote, folder.resolve(), node=node, secret=secret, **settings)
    )
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:  # the thread cannot be cancelled: what it starts is ended
        await asyncio.wait({opening})
        if opening.exception() is None:
            opening.result().close()
        raise


def _open_remote(
    folder: Path,
    *,
    node: str,
    secret: RowSecret,
    trusted: bool,
    is_new: bool,
    drop_zero_variance: bool,
    resume_episodes: bool,
) -> Ledger:
    node_id, address = find_node(node)
    key = secret(host=address)
    actor = start_actor(
        folder / LEDGER,
        node_id=node_id,
        host=address,
        secret=key,
        trusted=trusted,
        environment={"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
        drop_zero_variance=drop_zero_variance,
        resume_episodes=resume_episodes,
        is_new=is_new,
    )
    return RemoteLedger(actor, path=folder / LEDGER, secret=key, drop_zero_variance=drop_zero_variance, owns=True)
