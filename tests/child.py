"""Child processes of tests: whatever happens to the test, none outlives it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def child_process(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """As `Popen`, in text, with its output to be read. Leaving the block kills it: `Popen` alone would wait for it for ever."""
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, **options) as process:
        try:
            yield process
        finally:
            process.kill()
