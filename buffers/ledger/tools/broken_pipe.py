"""What commands that print do when their reader leaves, as in `understudy keys | head`. Called by `learner.cli` and
`python -m buffers.ledger`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

READER_LEFT = 141
"""The exit code that a shell gives a program which SIGPIPE has ended."""


def printing(command: Callable[[], int]) -> int:
    """The command's exit code; `READER_LEFT`, without a word, where nobody reads what it prints any more."""
    try:
        code = command()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # else Python complains when it flushes at the end
        return READER_LEFT
