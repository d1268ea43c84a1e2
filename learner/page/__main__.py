"""`understudy page RUN ...`: a browser page of runs on this machine, or one HTML file of them.

Parses arguments; imports what serves or exports after that.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from buffers.errors import UnderstudyError
from buffers.terminal import guard_output

EPISODES = 24
LARGEST_PORT = 65_535


def main(words: Sequence[str] | None = None, *, program: str = "understudy page") -> int:
    """Exit codes: 0 it was ended, or the file is written; 2 there is no run to show, or no port, or no such file."""
    parser = argparse.ArgumentParser(
        prog=program, description="Show runs in a browser on this machine: live, ended or killed, several side by side."
    )
    parser.add_argument(
        "runs", nargs="*", type=Path, metavar="RUN", help="runs/NAME, or a folder of runs (default: runs)"
    )
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (default: any free one)")
    parser.add_argument("--export", type=Path, metavar="FILE", help="write one HTML file that opens without a server")
    parser.add_argument(
        "--episodes",
        type=int,
        default=EPISODES,
        metavar="N",
        help=f"with --export: so many episodes of each run (default {EPISODES})",
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if not 0 <= arguments.port <= LARGEST_PORT:
        parser.error(f"--port must be in 0..{LARGEST_PORT}, got {arguments.port}; leave it out for any free one")
    named = arguments.runs or [Path("runs")]
    from learner.page import serve

    try:
        if arguments.child:
            return serve.serve_for_run()
        if arguments.export is not None:
            from learner.page.export import export

            causes = serve.break_meanings()
            print(export(named, to=arguments.export, episodes=arguments.episodes, causes=causes))
            return 0
        return serve.serve(named, port=arguments.port)
    except UnderstudyError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    guard_output()
    sys.exit(main(sys.argv[1:], program="python -m learner.page"))
