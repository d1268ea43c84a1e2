"""A ledger that is only said to be elsewhere: its host is in this process, without Ray, and dies when a test wants it to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from buffers.remote.host import LedgerAddress, LedgerHost
from buffers.remote.messages import EventPage
from buffers.remote.remote_ledger import RemoteLedger

SECRET = b"s" * 32


class Nearby:
    """Stands in for `ActorHandle`: the host is in this process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._present = threading.RLock()
        """Held while the host is replaced."""
        self.dies_after_next = False
        """The next operations are stored, and the process dies before it can say so."""
        self.on_events: Callable[[EventPage], None] = lambda page: None
        self.before_answer: Callable[[], object] | None = None
        self._helpers: list[threading.Thread] = []
        self._begin(LedgerHost(path, secret=SECRET, host="127.0.0.1"))

    def _begin(self, host: LedgerHost) -> None:
        asyncio.run(host.open())
        self.host = host
        self.server = host._server
        self._settle, self._page = self.server._settle, self.server._page
        self.server._settle, self.server._page = self._settling, self._paging

    def _settling(self, call: Any, answer: Any) -> None:
        """In the thread of the host's listener, which must not wait."""
        asks_operations = isinstance(answer, partial) and answer.func.__name__ == "_answered"
        if asks_operations and self.dies_after_next:
            self.dies_after_next = False
            self._aside(self.start_again)
        elif asks_operations and self.before_answer is not None:
            before, server, settle = self.before_answer, self.server, self._settle
            self._aside(lambda: (before(), server._listener.call(lambda: settle(call, answer))))
        else:
            self._settle(call, answer)

    def _paging(self, cursor: tuple[str, int]) -> EventPage:
        page = self._page(cursor)
        self.on_events(page)
        return page

    def _aside(self, work: Callable[[], object]) -> None:
        self._helpers.append(threading.Thread(target=work))
        self._helpers[-1].start()

    def start_again(self) -> None:
        with self._present:
            asyncio.run(self.host.close())
            self._begin(LedgerHost(self._path, secret=SECRET, host="127.0.0.1", again=True))

    def cut_all(self) -> None:
        """End all connections, as a network does."""
        listener = self.server._listener
        listener.call(lambda: [listener.end(peer, "cut") for peer in list(listener._peers.values())])

    def where(self) -> LedgerAddress:
        with self._present:
            return asyncio.run(self.host.where())

    def end(self) -> None:
        for helper in self._helpers:
            helper.join()
        asyncio.run(self.host.close())


def open_nearby(path: Path) -> RemoteLedger:
    return RemoteLedger(Nearby(path), path=path, secret=SECRET, owns=True)
