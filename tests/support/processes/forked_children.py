"""Processes that are there at once: a nursery imports everything, then forks a fresh process for each life that a test wants.

The nursery's program ends with `raise_children({role: what it does}, channel=int(sys.argv[-1]))`; the test runs it with
`nursery(command)`. What the children tell comes through one pipe, each line whole or not at all: a line that was read was
written before its writer died, and the end of a child is told after all that it said. Invariant: no child outlives its
nursery, and no nursery its test, however they end.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import selectors
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support.patience import PATIENCE_S
from tests.support.processes.child_process import Lines, end_with_thread

START_S = 300.0
"""Imports, on a busy machine."""
PR_SET_PDEATHSIG = 1

Event = dict[str, Any]
"""What a process told, with its id under `by`."""


class Nursery:
    """The test's side."""

    def __init__(self, process: subprocess.Popen[str], *, lines: Lines, log: Path) -> None:
        self._process = process
        self._lines = lines
        self._log = log
        self._told: deque[Event] = deque()
        self._may_end: dict[int, int] = {}
        """Process id -> the status with which it has to end."""

    def fork(self, role: str, **arguments: Any) -> int:
        """A new process that plays this role; its id. It may have told something already."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([role, arguments]) + "\n")
        self._process.stdin.flush()
        return int(self._wait_for(lambda event: "forked" in event)["forked"])

    def told(self, *, until: float) -> Event | None:
        """What a child told next; None when none does before `until` (of `time.monotonic`)."""
        return self._told.popleft() if self._told else self._read(until=until)

    def kill(self, *pids: int) -> None:
        """Kill living processes; returns when they are dead and what they told is there to be read."""
        self._end(pids, sign=signal.SIGKILL, status=-signal.SIGKILL)

    def terminate(self, *pids: int) -> None:
        """Ask processes to end, and wait until they have, without a failure."""
        self._end(pids, sign=signal.SIGTERM, status=0)

    def last_words(self) -> str:
        """Of the nursery and all its children."""
        return self._log.read_text(errors="replace")[-3000:]

    def _end(self, pids: tuple[int, ...], *, sign: int, status: int) -> None:
        for pid in pids:
            self._may_end[pid] = status
            with suppress(ProcessLookupError):  # it has ended by itself: what comes then is not its expected status
                os.kill(pid, sign)
        for pid in pids:
            if pid in self._may_end:
                self._wait_for(lambda event, pid=pid: event.get("ended") == pid)

    def _wait_for(self, is_it: Callable[[Event], bool]) -> Event:
        """The event that the nursery has to tell; what children told before it is kept."""
        until = time.monotonic() + PATIENCE_S
        while (event := self._read(until=until)) is not None:
            if is_it(event):
                return event
            if "ended" not in event:
                self._told.append(event)
        raise AssertionError(f"the nursery must answer within {PATIENCE_S} s: {self.last_words()}")

    def _read(self, *, until: float) -> Event | None:
        line = self._lines.next(until=until)
        assert not self._lines.ended, f"the nursery ended: {self.last_words()}"
        if line is None:
            return None
        event: Event = json.loads(line)
        if "ended" in event:
            expected = self._may_end.pop(event["ended"], None)
            assert expected == event["status"], f"{event}, must be {expected}: {self.last_words()}"
        return event


@contextmanager
def nursery(command: list[str], *, log: Path, **options: Any) -> Iterator[Nursery]:
    """The nursery of this program, with the channel as its last argument; what it and its children print goes to `log`."""
    reading, writing = os.pipe()
    with log.open("ab") as printed:
        process = subprocess.Popen(
            [*command, str(writing)], text=True, stdin=subprocess.PIPE, stdout=printed, stderr=printed,
            pass_fds=[writing], **options,
        )  # fmt: skip
    with process:
        os.close(writing)
        try:
            started = Nursery(process, lines=Lines(reading), log=log)
            assert started.told(until=time.monotonic() + START_S), f"no start in {START_S} s: {started.last_words()}"
            yield started
        finally:
            process.kill()
            os.close(reading)


# The nursery's side.


class Channel:
    """Where a process of the nursery tells the test what happened."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def tell(self, **what: Any) -> None:
        """From any thread: a short line is written at once, or not at all."""
        line = json.dumps({**what, "by": os.getpid()}).encode() + b"\n"
        assert len(line) <= select.PIPE_BUF, f"at most {select.PIPE_BUF} bytes can be told at once, got {len(line)}"
        os.write(self._pipe, line)


def raise_children(roles: Mapping[str, Callable[..., None]], *, channel: int) -> None:
    """Fork a process for each line of stdin (`[role, arguments]`) and tell when it ends, until stdin ends. A role is called with
    its channel and its arguments."""
    told = Channel(channel)
    told.tell(ready=True)
    with selectors.DefaultSelector() as awaited:
        awaited.register(sys.stdin.fileno(), selectors.EVENT_READ)
        while True:
            for key, _ in awaited.select():
                if key.data is not None:
                    awaited.unregister(key.fd)
                    os.close(key.fd)
                    told.tell(ended=key.data, status=os.waitstatus_to_exitcode(os.waitpid(key.data, 0)[1]))
                elif line := sys.stdin.readline():  # the test waits for the answer before it writes the next one
                    role, arguments = json.loads(line)
                    pid = _fork(roles[role], told, arguments)
                    awaited.register(os.pidfd_open(pid), selectors.EVENT_READ, data=pid)
                    told.tell(forked=pid)
                else:
                    return


def _fork(role: Callable[..., None], told: Channel, arguments: dict[str, Any]) -> int:
    """In the child this does not return."""
    parent = os.getpid()
    if (pid := os.fork()) != 0:
        return pid
    status = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        assert os.getppid() == parent, "the nursery is dead"
        threading.excepthook = end_with_thread
        role(told, **arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
