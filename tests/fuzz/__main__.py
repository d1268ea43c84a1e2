"""The command line: `python -m tests.fuzz --help`."""

from __future__ import annotations

import sys

from tests.fuzz.every_route import main

if __name__ == "__main__":
    sys.exit(main())
