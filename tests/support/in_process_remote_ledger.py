"""A ledger that is only said to be elsewhere: its host is in this process, without Ray, and dies when a test wants it to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from buffers.remote.host import AnswerLost, EventPage, Job, LedgerAddress, LedgerHost
from buffers.remote.remote_ledger import RemoteLedger

SECRET = b"s" * 32


class Nearby:
    """Stands in for `ActorHandle`: the host is in this process, on an event loop of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.host = LedgerHost(path, secret=SECRET, host="127.0.0.1")
        self.run(self.host.open())
        self.dies_after_next = False
        """The next operations are stored, and the process dies before it can say so."""
        self.on_events: Callable[[EventPage], None] = lambda page: None
        self.before_answer: Callable[[], None] = lambda: None

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def start_again(self) -> None:
        self.run(self.host.close())
        self.host = LedgerHost(self._path, secret=SECRET, host="127.0.0.1", again=True)

    def where(self) -> LedgerAddress:
        return self.run(self.host.where())

    def apply(
        self, jobs: list[Job], *, caller: str, number: int, while_waiting: Callable[[], None]
    ) -> tuple[list[Any], dict[str, Any]]:
        answer = asyncio.run_coroutine_threadsafe(self.host.apply(jobs, caller=caller, number=number), self._loop)
        while True:
            try:
                outcomes = answer.result(0.1)
                break
            except TimeoutError:
                while_waiting()
        self.before_answer()
        if self.dies_after_next:
            self.dies_after_next = False
            self.start_again()
            raise AnswerLost("died")
        return outcomes

    def events(self, cursor: tuple[str, int], *, wait_s: float) -> EventPage:
        page = self.run(self.host.events(cursor, wait_s=wait_s))
        self.on_events(page)
        return page

    def forget(self, caller: str) -> None:
        self.run(self.host.forget(caller))

    def end(self) -> None:
        self.run(self.host.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def open_nearby(path: Path) -> RemoteLedger:
    return RemoteLedger(Nearby(path), path=path, secret=SECRET, owns=True)
