"""The way to a terminal: what agents, models and the files of others say is shown there, and not obeyed.

Our commands call `guard_output` first, so that everything which is printed passes `shown`: results, errors, warnings, tracebacks.
What draws a terminal itself (`learner.reporting.display`) passes the texts in it through `shown`. Line ends and tabs are the only
control characters that get through.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, TextIO
from unicodedata import category


def shown(text: str) -> str:
    """The text with its control characters (escapes, changes of direction, what has no width) written out, as in `\\x1b`."""
    return text if text.isprintable() else "".join(map(_visible, text))


def _visible(character: str) -> str:
    is_shown = character.isprintable() or character in "\n\t" or category(character) == "Zs"  # such as U+3000
    return character if is_shown else character.encode("unicode_escape").decode()


class GuardedStream:
    """A text stream of which all that is written is `shown`. It is no terminal to those who ask, so that nobody colours it."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """The number of characters of `text`."""
        self.stream.write(shown(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write them all."""
        self.write("".join(lines))

    def isatty(self) -> bool:
        """Never."""
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def guard_output() -> None:
    """From here on this process prints through `shown`."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, GuardedStream):
            setattr(sys, name, GuardedStream(stream))


# What commands that print do when their reader leaves, as in `understudy keys | head`.

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
