"""Starts the matrix's runs: forks of one process that has imported torch and vLLM, some at a time.

Called by `tests.matrix.__main__` and `tests.matrix.test_matrix`. Each fork calls `learner.run.main` with the arguments of a command
line, so a run does all that a started one does but for the imports. Invariants: this process has no threads while it forks; what
a run leaves behind is ended with it; a run that does not end is killed after its time. It judges nothing.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from tests.matrix.records import Ended, Live, Run

POLL_S = 0.05
ENDING_S = 20.0
"""Seconds that a run which was asked to stop has, before it is killed."""
NO_MEMORY = "due to the node running low on memory"
"""A run says so where others use the memory up: it is played once more."""


def import_everything() -> float:
    """What each run would import, in the order of `learner.run`; seconds. Called once, before the first run."""
    began = time.monotonic()
    from configs.fork_server import imports_kept
    from mocked_server.vllm.engine import import_engine

    with imports_kept():
        import learner.session  # noqa: F401

        import_engine()
        for name in ("torch.utils.tensorboard", "matplotlib.figure", "matplotlib.backends.backend_agg"):
            importlib.import_module(name)  # what a run imports when it makes its tracker and its picture
    return time.monotonic() - began


@dataclass
class _Under:
    """A run that is under way."""

    run: Run
    base: Path
    folder: Path
    pid: int
    began: float
    attempt: int
    companion: int | None = None
    trouble: str = ""
    stopped: bool = False


class Starter:
    """`at_once` runs at a time, below `folder`, one folder each. `say`: a line of progress."""

    def __init__(self, folder: Path, *, at_once: int = 2, say: Callable[[str], None] = lambda _: None) -> None:
        self._folder = folder
        self._at_once = at_once
        self._say = say
        self._ended: dict[str, Ended] = {}

    def play(self, runs: Iterable[Run]) -> Mapping[str, Ended]:
        """All runs, to their ends; name -> what is left. A run waits for the one that it follows."""
        waiting, under = list(runs), list[_Under]()
        try:
            while waiting or under:
                ready = [run for run in waiting if not run.after or run.after in self._ended]
                if ready and len(under) < self._at_once:
                    waiting.remove(ready[0])
                    under.append(self._start(ready[0]))
                    continue
                time.sleep(POLL_S)
                under = [one for one in under if not self._has_ended(one)]
        finally:
            for one in under:
                _kill(one.pid)
        return MappingProxyType(self._ended)

    def _start(self, run: Run, *, attempt: int = 0) -> _Under:
        base = self._folder / (run.name + ".again" * attempt)
        (base / "files").mkdir(parents=True)
        run.files(base / "files")
        settings = self._settings(run, base)
        folder = Path(settings["run.dir"]) / settings["run.name"]
        (base / "empty.yaml").write_text("{}\n")
        flags = ["--config", str(base / "empty.yaml"), *run.flags]
        words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        variables = {name: text.replace("{files}", str(base / "files")) for name, text in run.environment.items()}
        pid = fork(lambda: _run([*flags, *words], variables), output=base / "output.txt")
        one = _Under(run, base, folder, pid, time.monotonic(), attempt)
        if run.meanwhile is not None:
            meanwhile, live = run.meanwhile, Live(pid, folder)
            one.companion = fork(lambda: meanwhile(live), output=base / "meanwhile.txt")
        return one

    def _settings(self, run: Run, base: Path) -> dict[str, Any]:
        """Key -> value, with the folders that they name."""
        after = str(self._ended[run.after].folder) if run.after else ""
        settings = {"run.name": run.name, "run.dir": str(base), **run.settings}
        text = json.dumps(settings).replace("{files}", str(base / "files")).replace("{after}", after)
        found: dict[str, Any] = json.loads(text)
        return found

    def _has_ended(self, one: _Under) -> bool:
        if one.companion is not None and (code := _exit_code(one.companion)) is not None:
            one.companion = None
            one.trouble = "" if code == 0 else (one.base / "meanwhile.txt").read_text()[-500:]
        if (code := _exit_code(one.pid)) is None:
            late = time.monotonic() - one.began - one.run.timeout_s
            if late > ENDING_S:
                _kill(one.pid)
            elif late > 0 and not one.stopped:
                one.stopped = True
                os.kill(one.pid, signal.SIGTERM)
            return False
        if one.companion is not None:
            _kill(one.companion)
            os.waitpid(one.companion, 0)
        seconds = time.monotonic() - one.began
        late = f"stopped after {one.run.timeout_s:g} s; " if one.stopped else ""
        output = (one.base / "output.txt").read_text(errors="replace")
        if not one.attempt and NO_MEMORY in output:
            self._say(f"{one.run.name}: {NO_MEMORY}; once more")
            one.__dict__.update(self._start(one.run, attempt=1).__dict__)
            return False
        record = {
            "code": code,
            "base": str(one.base),
            "folder": str(one.folder),
            "seconds": seconds,
            "trouble": late + one.trouble,
        }
        (self._folder / f"{one.run.name}.ended").write_text(json.dumps(record))
        self._ended[one.run.name] = read_ended(one.run, self._folder)
        self._say(f"{one.run.name}: exit code {code} after {seconds:.1f} s {late}{one.trouble}")
        return True


def fork(work: Callable[[], int | None], *, output: Path) -> int:
    """A child that does `work` and ends with its answer, or with 70 when it raises; its standard streams go to `output`."""
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    code = 70
    try:
        os.setpgid(0, 0)
        for number, name in ((0, os.devnull), (1, output), (2, output)):
            descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            os.dup2(descriptor, number)
            os.close(descriptor)
        code = work() or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # all that it may be: the child ends here
        traceback.print_exc()
    finally:
        from configs.child_processes import leave

        leave(code)


def _run(arguments: list[str], environment: Mapping[str, str]) -> int:
    from learner.run import main

    os.environ.update(environment)
    return main(arguments)


def _exit_code(pid: int) -> int | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def _kill(pid: int) -> None:
    """The process and all that it has started; it is not waited for."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in [*process.children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                each.kill()


def read_ended(run: Run, folder: Path) -> Ended:
    """What a run that was played in `folder` left behind."""
    record = json.loads((folder / f"{run.name}.ended").read_text())
    base = Path(record.pop("base"))
    output = (base / "output.txt").read_text(errors="replace")
    return Ended(run=run, base=base, folder=Path(record.pop("folder")), output=output, **record)


def kept(runs: Iterable[Run], folder: Path) -> dict[str, Ended]:
    """Those of the runs that were played in `folder` before."""
    return {run.name: read_ended(run, folder) for run in runs if (folder / f"{run.name}.ended").exists()}


def in_processes(works: Mapping[str, Callable[[], str]], *, folder: Path, at_once: int = 2) -> dict[str, str]:
    """The texts that these give, each in a fork of its own, as each may use torch's threads; name -> text. One that dies gives
    the end of what it printed."""
    waiting, under, texts = list(works), dict[int, str](), dict[str, str]()
    while waiting or under:
        if waiting and len(under) < at_once:
            name = waiting.pop(0)
            under[fork(_writer(works[name], folder / f"{name}.checked"), output=folder / f"{name}.check.txt")] = name
            continue
        time.sleep(POLL_S)
        for pid in list(under):
            if _exit_code(pid) is not None:
                name = under.pop(pid)
                answer = folder / f"{name}.checked"
                texts[name] = answer.read_text() if answer.exists() else ""
    return texts


def _writer(work: Callable[[], str], path: Path) -> Callable[[], None]:
    def write() -> None:
        scratch = path.with_suffix(".part")
        scratch.write_text(work())
        scratch.replace(path)

    return write


def with_others(ended: Ended, others: Mapping[str, Ended]) -> Ended:
    """The same, with all runs beside it."""
    return replace(ended, others=others)
