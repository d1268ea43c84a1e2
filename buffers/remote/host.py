"""The process that owns a ledger for others: its file, and the server that stores what comes over the wire.

Plain, on one event loop; `ray_actor` makes a Ray actor of it. What is asked of the ledger itself comes by the wire
(`ledger_server`); here is how its process is found, opened and closed.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from buffers.errors import UnderstudyError
from buffers.ledger.idempotency import forget
from buffers.ledger.ledger import Ledger
from buffers.remote.ledger_server import LedgerServer
from buffers.remote.messages import LedgerState
from buffers.wire.address import way_to

OPEN_S = 30.0
"""Seconds for a process that has the file open to end."""


class LedgerGone(UnderstudyError):
    """The ledger's actor has ended and is not started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerAddress:
    """The ledger's present process and addresses."""

    node_id: str
    address: str
    """The address of its server: see `buffers.wire.address`."""
    pid: int
    cursor: tuple[str, int]
    """See `messages.EventPage`."""
    state: LedgerState


class LedgerHost:
    """See the module. `host`: where its server listens; `trusted`: nobody else is on that network. `is_new`: there must be no file
    yet. `again`: the process before died, those who use the ledger live."""

    def __init__(
        self,
        path: Path,
        *,
        secret: bytes,
        host: str,
        trusted: bool = False,
        drop_zero_variance: bool = False,
        resume_episodes: bool = False,
        is_new: bool = False,
        node_id: str = "",
        again: bool = False,
    ) -> None:
        self._path = path
        self._node_id = node_id
        self._secret = secret
        self._host, self._trusted = host, trusted
        self._drop_equal = drop_zero_variance
        self._ledger: Ledger | None = None
        self._is_new, self._resume_episodes = is_new, resume_episodes
        if again:
            self._open(resume_episodes=True, keep_leases=True)

    async def open(self) -> None:
        """Open the file, once this is made: what is wrong with it is raised here. Idempotent."""
        if self._ledger is not None:
            return
        if self._is_new and self._path.exists():
            raise UnderstudyError(
                f"ledger {self._path} must be a new file, got one of an earlier run; resume with --resume auto, or set another "
                f"run.name"
            )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._open(resume_episodes=self._resume_episodes, keep_leases=False)

    def _open(self, *, resume_episodes: bool, keep_leases: bool) -> None:
        until = time.monotonic() + OPEN_S
        while self._ledger is None:
            try:
                self._ledger = Ledger(
                    self._path,
                    drop_zero_variance=self._drop_equal,
                    resume_episodes=resume_episodes,
                    keep_leases=keep_leases,
                )
            except UnderstudyError:
                # Opening waits a second for a process that has it open, which usually is one that is dying.
                if time.monotonic() > until or not keep_leases:
                    raise
        if not keep_leases:
            self._ledger.run(partial(forget, caller="*"))  # those callers have ended
        way = way_to(self._host, trusted=self._trusted)
        self._server = LedgerServer(self._ledger, secret=self._secret, way=way, host=self._host)

    async def where(self) -> LedgerAddress:
        """Its addresses now."""
        return LedgerAddress(
            node_id=self._node_id,
            address=str(self._server.address),
            pid=os.getpid(),
            cursor=self._server.cursor,
            state=self._server.state(),
        )

    async def idle_s(self) -> float:
        """Seconds since the last request for events."""
        return self._server.idle_s

    async def close(self) -> None:
        """Store what was submitted and close the file."""
        if self._ledger is not None:
            await asyncio.to_thread(self._server.close)
            await asyncio.to_thread(self._ledger.close)
