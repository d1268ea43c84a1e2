"""The nursery of the fault tests: what its children told is there, one that ends by itself is an error, none outlives it."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.faults.ledger_faults import child_environment
from tests.support.patience import PATIENCE_S
from tests.support.processes.child_process import Lines
from tests.support.processes.forked_children import Nursery, nursery

PROGRAM = """
import sys, threading, time
from tests.support.processes.forked_children import raise_children

def sleep(channel, words):
    for word in words:
        channel.tell(word=word)
    time.sleep(600)

def fail(channel):
    raise RuntimeError("nobody expected this")

def lose_thread(channel):
    threading.Thread(target=fail, args=(channel,)).start()
    time.sleep(600)

roles = {"sleep": sleep, "fail": fail, "lose_thread": lose_thread, "return": lambda channel: None}
raise_children(roles, channel=int(sys.argv[-1]))
"""


def raise_some(folder: Path) -> AbstractContextManager[Nursery]:
    return nursery([sys.executable, "-c", PROGRAM], log=folder / "log", env=child_environment())


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_a_child_told_before_it_was_killed_is_there(tmp_path: Path) -> None:
    with raise_some(tmp_path) as raised:
        first = raised.fork("sleep", words=["one", "two"])
        second = raised.fork("sleep", words=["three"])
        told = [raised.told(until=time.monotonic() + PATIENCE_S) for _ in range(3)]
        assert [event["word"] for event in told if event and event["by"] == first] == ["one", "two"]
        assert {"word": "three", "by": second} in told
        raised.kill(first, second)
        assert raised.told(until=0.0) is None and not is_alive(first) and not is_alive(second)


@pytest.mark.parametrize("role", ["fail", "lose_thread"])
def test_a_child_or_a_thread_that_dies_by_itself_is_an_error(tmp_path: Path, role: str) -> None:
    with raise_some(tmp_path) as raised:
        raised.fork(role)
        with pytest.raises(AssertionError, match="nobody expected this"):
            raised.told(until=time.monotonic() + PATIENCE_S)


def test_a_child_that_had_ended_before_it_was_killed_is_an_error(tmp_path: Path) -> None:
    with raise_some(tmp_path) as raised:
        pid = raised.fork("return")
        until = time.monotonic() + PATIENCE_S
        while is_alive(pid):
            assert time.monotonic() < until
        with pytest.raises(AssertionError, match="must be -9"):
            raised.kill(pid)


def test_no_child_outlives_its_nursery(tmp_path: Path) -> None:
    with raise_some(tmp_path) as raised:
        pid = raised.fork("sleep", words=[])
        assert is_alive(pid)
    until = time.monotonic() + PATIENCE_S
    while is_alive(pid):
        assert time.monotonic() < until


def test_half_a_line_of_a_dead_process_is_no_line(tmp_path: Path) -> None:
    written = tmp_path / "written"
    written.write_bytes(b"whole\nha")
    with written.open("rb") as pipe:
        lines = Lines(pipe.fileno())
        assert [lines.next(until=0.0), lines.next(until=0.0)] == ["whole\n", None] and lines.ended
