"""The keys of a run, for programs that somebody starts by hand: `set -a; . runs/<name>/agent.env; python my_agent.py`.

Written by `learner.pipeline` once the server listens, removed when it ends: the keys open nothing afterwards. The files are
readable by their owner only (SECURITY.md: whoever reads them is the agent, the scorer or the administrator).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def environment_files(folder: Path, files: Mapping[str, Mapping[str, str]]) -> Iterator[None]:
    """File name -> its variables, as shell assignments; there while the context lasts."""
    paths = []
    try:
        for name, variables in files.items():
            path = folder / name
            paths.append(path)
            lines = [f"{variable}={shlex.quote(value)}\n" for variable, value in variables.items()]
            with os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w", encoding="utf-8") as sink:
                sink.writelines(lines)
        yield
    finally:
        for path in paths:
            path.unlink(missing_ok=True)
