"""Becomes the program of an MCP server, which ends with the process that started it.

Run by `agents.tools.mcp.stdio` as a program of its own: `child.py PID PROGRAM ARGUMENT...`, PID of that process. It imports
nothing of ours.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(parent: int, words: list[str]) -> None:
    """Take the program's place. Linux only; elsewhere the program ends when its standard input does, if it heeds that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before that call
            sys.exit(1)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them, and what it becomes would too
    try:
        os.execvp(words[0], words)
    except OSError as error:
        sys.exit(f"{words[0]}: {error.strerror}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
