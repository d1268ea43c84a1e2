"""A program that has imported the libraries already, and runs pytest in a fork of itself whenever it is asked to.

Started by `sampled_run` as a file, in a copy of the tree: it imports nothing of ours, so each fork reads the modules as they are
then. It reads lines of JSON and answers each with one:

    {"arguments": [...], "limit_s": 60}  ->  {"status": 1, "seconds": 2.5, "output": "...", "seen": {...}}
    {"preload": {...}}                   ->  {}

`status` is null after the limit. `seen`: what the run had imported of others, and its environment; all programs that `preload` it
run the same tests faster. Invariant: nothing that a run started outlives it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import resource
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

PLUGINS = ("pytest_asyncio.plugin", "pytest_timeout", "_hypothesis_pytestplugin")
NOT_PRELOADED = ("conftest", "__main__", "readline")
TAIL = 3000
MOST_BYTES = 6 * 1024**3
"""Of memory for a run: an endless loop may fill it sooner than its time is over."""


def run(request: dict[str, Any], *, folder: Path) -> dict[str, Any]:
    """One run of pytest in a fork; kills what is left of it."""
    output, seen = folder / "output", folder / "seen.json"
    seen.unlink(missing_ok=True)
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _be_pytest(request["arguments"], output=output, seen=seen)
    handle = os.pidfd_open(pid)
    # Nothing is asked meanwhile: an input that can be read has ended, with the program that asked.
    ended = select.select([handle, sys.stdin], [], [], request["limit_s"])[0] == [handle]
    os.close(handle)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    if not ended:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _, wait_status = os.waitpid(pid, 0)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)  # what it had started in that moment
    return {
        "status": os.waitstatus_to_exitcode(wait_status) if ended else None,
        "seconds": time.monotonic() - began,
        "output": output.read_text(errors="replace")[-TAIL:],
        "seen": json.loads(seen.read_text()) if seen.is_file() else {},
    }


def _be_pytest(arguments: list[str], *, output: Path, seen: Path) -> None:
    """Never returns."""
    status = 3
    try:
        os.setsid()
        sink = os.open(output, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, descriptor in enumerate((nothing, sink, sink)):
            os.dup2(descriptor, number)
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        sys.dont_write_bytecode = True
        sys.path.insert(0, os.getcwd())
        import pytest

        plugins = [
            each for name in PLUGINS for each in ("-p", name) if importlib.util.find_spec(name.partition(".")[0])
        ]
        status = int(pytest.main([*plugins, "-p", "no:cacheprovider", "--assert=plain", "-x", "-q", *arguments]))
        if status == 0:
            seen.write_text(json.dumps({"modules": _of_others(), "environment": dict(os.environ)}))
        sys.stdout.flush()
    finally:
        os._exit(status)


def _of_others() -> list[str]:
    """Imported modules of installed packages, in the order of their import."""
    found = []
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None) or ""
        if "site-packages" in path and not name.startswith((*NOT_PRELOADED, *PLUGINS)):
            found.append(name)
    return found


def preload(seen: dict[str, Any]) -> None:
    """Import these modules, those that can be, and set this environment."""
    for name, value in seen["environment"].items():
        if not name.startswith("PYTEST"):
            os.environ[name] = value
    for name in seen["modules"]:
        if name not in sys.modules:
            with suppress(Exception):
                importlib.import_module(name)


def main() -> None:
    """Until its input ends."""
    folder = Path(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library says while it is imported is no answer
    importlib.import_module("pytest")
    for line in sys.stdin:
        request, answer = json.loads(line), {}
        if "preload" in request:
            preload(request["preload"])
        else:
            answer = run(request, folder=folder)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    sys.path[0] = os.getcwd()
    main()
