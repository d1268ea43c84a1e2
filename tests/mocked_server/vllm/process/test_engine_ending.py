"""Rules of mocked_server/vllm/process/engine_health.py: what could have come from outside is no evidence."""

from __future__ import annotations

import signal
import subprocess

import pytest

from mocked_server.vllm.process.engine_health import ending_of, oom_kills


@pytest.mark.parametrize(
    ("code", "by_itself", "words"),
    [
        (None, True, "error of its own"),
        (1, True, "exit code 1"),
        (-signal.SIGSEGV, True, "crashed (SIGSEGV)"),
        (-signal.SIGABRT, True, "crashed (SIGABRT)"),
        (0, False, "told to end"),
        (-signal.SIGKILL, False, "killed from outside (SIGKILL)"),
        (-signal.SIGTERM, False, "killed from outside (SIGTERM)"),
        (-signal.SIGRTMAX - 9, False, "signal 73"),
        (255, False, "nobody saw how"),
    ],
)
def test_an_end_is_the_engines_own_where_nothing_outside_could_have_made_it(code, by_itself, words):
    ending = ending_of([code])
    assert ending.by_itself is by_itself and words in ending.words


def test_a_kill_while_memory_ran_out_is_named_and_no_evidence_either():
    ending = ending_of([-signal.SIGKILL], oom_kills=2)
    assert not ending.by_itself and "Linux, which ended 2 processes" in ending.words
    assert oom_kills() >= 0


@pytest.mark.parametrize(("by", "by_itself"), [(signal.SIGKILL, False), (signal.SIGSEGV, True)])
def test_it_reads_the_exit_codes_that_real_processes_have(by, by_itself):
    with subprocess.Popen(["sleep", "1000"]) as process:
        process.send_signal(by)
    assert ending_of([process.returncode]).by_itself is by_itself
