"""What becomes of a test that fails: unstable, or a failure; and what the stages say in the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ci import stages
from tests.ci.disturbance import Stopper
from tests.ci.stages import Result, Stage, keep, run_stages

pytestmark = pytest.mark.seconds

ROOT = Path(__file__).parents[2]
PLAIN = "def test_plain():\n    pass\n"
UNSTABLE = """
import pathlib

def test_by_chance():
    mark = pathlib.Path("played")
    first, _ = not mark.exists(), mark.touch()
    assert not first, "the first play"
"""
THIRD_FAILS = """
import pathlib

def test_now_and_then():
    with pathlib.Path("plays").open("a") as file:
        file.write(".")
    assert len(pathlib.Path("plays").read_text()) == 2
"""
BROKEN = "def test_broken():\n    print('said by the test')\n    assert 1 + 1 == 3\n"
DIES = "import os\n\ndef test_dies():\n    os._exit(9)\n"

FULL_DISK = """
import resource

def pytest_configure(config):
    resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, 9_000))
"""
LONG_FAILURE = "def test_long():\n    print('x' * 10_000)\n    assert False\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for tests, whose pytest finds the plugin."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take two seconds
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def stage(project: Path, **files: str) -> Stage:
    """A stage of these test files, in workers as the real ones."""
    for name, source in files.items():
        (project / f"test_{name}.py").write_text(source)
    names = [f"test_{name}.py" for name in files]
    pytest_here = (sys.executable, "-m", "pytest", "-q", "-p", "xdist", "-n", "1")
    return Stage(name="test", command=lambda log: [*pytest_here, *names, *log])


def test_all_passed(project: Path) -> None:
    (result,) = run_stages([stage(project, plain=PLAIN)], root=project)
    assert not result.failed and not result.unstable and result.line().startswith("test      passed ")


def test_a_test_that_passes_twice_alone_is_unstable_and_its_failure_is_kept(project: Path, capfd) -> None:
    (result,) = run_stages([stage(project, plain=PLAIN, chance=UNSTABLE)], root=project)
    assert not result.failed and list(result.unstable) == ["test_chance.py::test_by_chance"]
    assert "the first play" in result.unstable["test_chance.py::test_by_chance"]
    assert result.line().startswith("test      unstable ") and "test_by_chance" in result.line()
    said = capfd.readouterr().out
    assert "failed, and alone: passed, passed" in said and "the first play" in said and said.count("\n1 passed") == 2


@pytest.mark.parametrize(("source", "name"), [(BROKEN, "test_broken"), (THIRD_FAILS, "test_now_and_then")])
def test_one_that_fails_once_more_is_a_failure(project: Path, source: str, name: str, capfd) -> None:
    (result,) = run_stages([stage(project, plain=PLAIN, it=source)], root=project)
    assert result.failed == [f"test_it.py::{name}"] and not result.unstable
    assert result.line().startswith("test      failed ") and name in result.line()
    assert source is not BROKEN or "said by the test" in capfd.readouterr().out


def test_one_that_kills_its_worker_is_named_and_is_a_failure(project: Path) -> None:
    (result,) = run_stages([stage(project, plain=PLAIN, dies=DIES)], root=project)
    assert result.failed == ["test_dies.py::test_dies"]


def test_what_fails_in_a_fixture_or_while_it_is_imported_is_a_failure(project: Path) -> None:
    fixture = (
        "import pytest\n\n@pytest.fixture\ndef it():\n    yield 1\n    assert 0\n\ndef test_left(it):\n    assert it\n"
    )
    (result,) = run_stages([stage(project, left=fixture)], root=project)
    assert result.failed == ["test_left.py::test_left"]
    (result,) = run_stages([stage(project, unread="import nothing_of_this_name\n")], root=project)
    assert "test_unread.py" in result.failed and result.line().startswith("test      failed ")


def test_a_session_that_ends_without_a_word_is_a_failure(project: Path) -> None:
    dies = Stage(name="test", command=lambda log: [sys.executable, "-c", "raise SystemExit(0)"])
    (result,) = run_stages([dies], root=project)
    assert result.failed == ["pytest did not play all tests: exit code 0"]
    alone = Stage(name="test", command=lambda log: [sys.executable, "-m", "pytest", "-q", "test_dies.py", *log])
    (project / "test_dies.py").write_text(DIES)
    (result,) = run_stages([alone], root=project)
    assert result.failed == ["pytest did not play all tests: exit code 9"]


def test_a_disk_that_is_full_while_a_failure_is_kept_is_a_failure(project: Path, capfd) -> None:
    (project / "conftest.py").write_text(FULL_DISK)
    (result,) = run_stages([stage(project, plain=PLAIN, it=LONG_FAILURE)], root=project)
    assert result.failed and result.failed[0].startswith("pytest did not play all tests") and not result.unstable
    assert "File too large" in "".join(capfd.readouterr())


def test_a_red_first_stage_ends_the_run_and_a_red_later_one_does_not(project: Path) -> None:
    first = stage(project, plain=PLAIN)
    lint = (sys.executable, "-c", "raise SystemExit(1)")
    red = Stage(name="check", command=first.command, beside=lint, ends_run=True)
    (result,) = run_stages([red, first], root=project)
    assert len(result.failed) == 1 and result.failed[0].endswith("exit code 1")
    results = run_stages([stage(project, it=BROKEN), stage(project, plain=PLAIN)], root=project)
    assert [bool(result.failed) for result in results] == [True, False]


def test_a_process_that_a_test_left_behind_is_ended_and_told_of(project: Path, monkeypatch) -> None:
    monkeypatch.setattr(stages, "LEAVE_S", 0.5)
    leaves = """
import pathlib, subprocess, sys

def test_leaves():
    program = "import time; print(1, flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", program], start_new_session=True, stdout=subprocess.PIPE)
    child.stdout.readline()  # the kernel shows no environment of one that is about to run
    pathlib.Path("pid").write_text(str(child.pid))
"""
    (result,) = run_stages([stage(project, leaves=leaves)], root=project)
    assert list(result.unstable) == ["test_leaves.py::test_leaves (left a process behind)"] and not result.failed
    pid = (project / "pid").read_text()
    while Path(f"/proc/{pid}").exists() and state(int(pid)) != "Z":
        time.sleep(0.01)


def test_an_unstable_first_stage_does_not_end_the_run(project: Path) -> None:
    first = Stage(name="check", command=stage(project, chance=UNSTABLE).command, ends_run=True)
    results = run_stages([first, stage(project, plain=PLAIN)], root=project)
    assert len(results) == 2 and results[0].unstable and not results[1].unstable


def test_more_than_five_failures_are_not_played_again(project: Path) -> None:
    source = "\n".join(f"def test_{n}():\n    open('plays', 'a').write('.')\n    assert 0\n" for n in range(6))
    (result,) = run_stages([stage(project, many=source)], root=project)
    assert len(result.failed) == 6 and (project / "plays").read_text() == "." * 6


def kept(path: Path, *names: str) -> list[str]:
    result = Result(name="test", seconds=1.0, unstable={name: "assert 0\nof it" for name in names})
    return keep([result], path=path, commit="abc", machine={"processors": 2}, date="2026-11-27")


def test_each_run_has_a_line_with_its_commit_machine_and_failures(tmp_path: Path) -> None:
    assert kept(tmp_path / "unstable.jsonl") == [] and kept(tmp_path / "unstable.jsonl", "a") == []
    none, one = [json.loads(line) for line in (tmp_path / "unstable.jsonl").read_text().splitlines()]
    assert none["unstable"] == {} and one["unstable"] == {"a": ["assert 0", "of it"]}
    assert one["commit"] == "abc" and one["date"] == "2026-11-27" and one["machine"] == {"processors": 2}


def test_what_is_kept_is_what_failed_and_names_no_folder_of_the_machine(tmp_path: Path) -> None:
    output = "[gw1] /home/me/bin/python\n\n    def test():\n>       assert open('/tmp/a/b.txt')\nE       no /tmp/a/b.txt: 1/2\n"
    result = Result(name="test", seconds=1.0, unstable={"a": output})
    keep([result], path=tmp_path / "unstable.jsonl", commit="abc", machine={}, date="2026-11-27")
    (line,) = (tmp_path / "unstable.jsonl").read_text().splitlines()
    assert json.loads(line)["unstable"] == {"a": [">       assert open('.../b.txt')", "E       no .../b.txt: 1/2"]}


def test_the_same_one_in_three_of_ten_runs_refuses_the_third(tmp_path: Path) -> None:
    path = tmp_path / "unstable.jsonl"
    assert kept(path, "a") == kept(path, "a") == []
    for _ in range(7):
        assert kept(path, "b") == [] or len(path.read_text().splitlines()) > 4
    assert kept(path, "a") == ["a was unstable in 3 of the last 10 runs"]
    for _ in range(7):
        kept(path)
    assert kept(path, "a") == [], "of the three before, one is within the last ten runs"


def test_more_than_five_unstable_ones_refuse_the_run(tmp_path: Path) -> None:
    assert kept(tmp_path / "five", *"abcde") == []
    assert kept(tmp_path / "six", *"abcdef") == ["6 unstable tests: at most 5 are borne with"]


def test_processes_stand_still_for_a_moment_and_all_go_on_in_the_end(tmp_path: Path) -> None:
    program = "import time\nwhile True: time.sleep(0.01)"
    children = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(3)]
    left_alone, held = children[0].pid, children[1].pid
    os.kill(held, signal.SIGSTOP)
    while state(held) != "T":
        time.sleep(0.01)
    stopper = Stopper(but={left_alone}, mean_s=0.05)
    stopper.start()
    while state(children[2].pid) != "T":
        assert state(left_alone) != "T"
        time.sleep(0.005)
    assert stopper.end() >= 1 and state(children[2].pid) != "T" and state(held) == "T"
    for child in children:
        child.kill()
        child.wait()


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
