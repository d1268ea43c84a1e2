"""Plays a page: its files are written and its commands run where they stand, in one folder that is empty at first.

Nothing is rewritten: a file is the block's bytes, and commands are the file that bash gets. `understudy` and `python` are this
checkout's, as after `make setup`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.documents.blocks import ROOT, Block, blocks_of

OF_ENGINES = ("VLLM_", "TORCHDYNAMO_", "GLOO_")
"""How variables begin that tests set for engines in their own process, and a reader has not."""
LIMIT_S = 1800.0
"""Bound for a block that hangs."""
STOP_S = 60.0
"""Bound for a program to end after Ctrl-C."""
_UNDERSTUDY = """\
import sys
from learner.cli import main
if __name__ == "__main__":
    sys.exit(main())
"""
"""As pip writes the commands of a package."""


class WrongPage(AssertionError):
    """A block does not do what the page says."""


@dataclass(frozen=True, slots=True)
class Played:
    """What became of a block."""

    block: Block
    outcome: str
    """`ran`, `file`, `output`, or `not run`."""
    seconds: float = 0.0


def play(page: str, *, folder: Path, text: str | None = None) -> Iterator[Played]:
    """Plays the blocks of a page in an empty folder; yields each as it is done. Raises WrongPage. `text`: its source, where it is
    no page of the project's."""
    programs, here = folder / "bin", folder / "here"
    for place in (programs, here):
        place.mkdir()
    _install(programs)
    printed: subprocess.CompletedProcess[str] | None = None
    with ExitStack() as beside:
        for block in blocks_of(page, text=text):
            began = time.monotonic()
            outcome = "not run" if "not run" in block.said else ""
            if outcome:
                printed = None
                if brought := block.said.get("brings"):
                    source, _, target = brought.partition(" as ")
                    shutil.copytree(ROOT / source, here / target)
            elif block.name:
                _write(block, here)
                outcome = "file"
            elif block.commands:
                printed = _Commands(block, here=here, programs=programs).play(beside)
                outcome = "ran"
            if block.output and not outcome.startswith("not"):
                _compare(block, printed)
                outcome = outcome or "output"
            if not outcome:
                raise WrongPage(
                    f"{block.place}: it is neither a file nor a command nor an output; say `not run: REASON`"
                )
            yield Played(block, outcome, time.monotonic() - began)


def _install(programs: Path) -> None:
    for name, words in (("python", ""), ("understudy", f" {programs}/understudy.py")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable}{words} "$@"\n')
        (programs / name).chmod(0o755)
    (programs / "understudy.py").write_text(_UNDERSTUDY)


def _write(block: Block, here: Path) -> None:
    """A file that a command before it wrote must be what the page shows, with or without the line that names it."""
    path = here / block.name
    if not path.exists():
        path.write_text(block.text, encoding="utf-8")
    elif path.read_text(encoding="utf-8") not in (block.text, block.text.partition("\n")[2]):
        raise WrongPage(f"{block.place}: {block.name} was written by a command before, and differs")


def _compare(block: Block, printed: subprocess.CompletedProcess[str] | None) -> None:
    if printed is None:
        raise WrongPage(f"{block.place}: no command before it printed this; say `not run: REASON`")
    if not block.is_printed(printed.stderr if printed.returncode else printed.stdout):
        raise WrongPage(f"{block.place}: it says\n{block.output}\nprinted was\n{printed.stdout}\n{printed.stderr}")


class _Commands:
    """The commands of a block, in a process group of their own."""

    def __init__(self, block: Block, *, here: Path, programs: Path) -> None:
        self._block = block
        script = programs / f"line_{block.line}.sh"
        script.write_text(block.commands, encoding="utf-8")
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(OF_ENGINES)},
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "300",
        }
        self._process = subprocess.Popen(
            ["bash", "-e", str(script)],
            cwd=here,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._printed = {"stdout": "", "stderr": ""}
        self._news = threading.Condition()
        self._readers = [threading.Thread(target=self._read, args=(name,), daemon=True) for name in self._printed]
        for reader in self._readers:
            reader.start()

    def play(self, beside: ExitStack) -> subprocess.CompletedProcess[str]:
        """What was printed; so far, where it goes on beside the page's next blocks, until `beside` ends."""
        said = self._block.said
        try:
            if "meanwhile" in said:
                beside.callback(self._stop)
                self._wait_for(said["meanwhile"])
                return subprocess.CompletedProcess([], 0, **self._printed)
            if "until" in said:
                self._wait_for(said["until"])
                self._stop()
                return subprocess.CompletedProcess([], 0, **self._printed)
            try:
                code = self._process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                raise self._wrong(f"it did not end within {LIMIT_S:.0f} s") from None
            if code != int(said.get("exit", 0)):
                raise self._wrong(f"its exit code is {code}")
            self._end()
            return subprocess.CompletedProcess([], code, **self._printed)
        except WrongPage:
            self._end()
            raise

    def _read(self, name: str) -> None:
        stream = getattr(self._process, name)
        for line in stream:
            with self._news:
                self._printed[name] += line
                self._news.notify_all()
        stream.close()
        with self._news:
            self._news.notify_all()

    def _wait_for(self, text: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        with self._news:
            while not any(text in printed for printed in self._printed.values()):
                if self._process.poll() is not None and not any(reader.is_alive() for reader in self._readers):
                    raise self._wrong(f"it ended without {text!r}")
                if time.monotonic() > deadline:
                    raise self._wrong(f"it did not print {text!r} within {LIMIT_S:.0f} s")
                self._news.wait(1.0)

    def _stop(self) -> None:
        """Ctrl-C, as on a terminal: to all of its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        self._end()

    def _end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for reader in self._readers:
            reader.join()

    def _wrong(self, what: str) -> WrongPage:
        return WrongPage(f"{self._block.place}: {what}\n{self._printed['stdout']}\n{self._printed['stderr']}")
