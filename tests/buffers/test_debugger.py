"""Rules of buffers/debugger.py: where a run with `run.debug` stops."""

from __future__ import annotations

import io
import sys

import pytest

from buffers.debugger import debugger_on, stop_at
from env_adapters.guarded_calls import CaughtException


def faulty(number: int) -> float:
    return 1 / number


def test_what_code_of_the_users_raises_stops_where_it_was_raised_and_stays_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("p number + 40\nup\nc\n"))
    terminal = io.StringIO()
    with debugger_on(terminal):
        with CaughtException() as caught:
            faulty(0)
        assert caught.error is not None
        stop_at(caught.error)  # a second border that it passes
    assert isinstance(caught.error, ZeroDivisionError), "the episode has its reason as in any run"
    assert "ZeroDivisionError: division by zero" in terminal.getvalue()
    assert "(Pdb) 40\n" in terminal.getvalue() and "return 1 / number" in terminal.getvalue()


def test_breakpoint_stops_on_the_terminal_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("p terminal is not None and 6 * 7\nc\n"))
    terminal = io.StringIO()
    with debugger_on(terminal):
        breakpoint()
    assert "(Pdb) 42\n" in terminal.getvalue()


def test_another_run_does_not_stop(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with debugger_on(io.StringIO()):
        pass
    stop_at(ValueError("no"))
    assert capsys.readouterr().out == ""
