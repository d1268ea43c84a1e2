"""The command line: `python -m mocked_server.check --help`."""

from __future__ import annotations

import sys

from mocked_server.check.command_line import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
