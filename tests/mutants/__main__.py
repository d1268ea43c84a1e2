"""The command line: `python -m tests.mutants --help`."""

from __future__ import annotations

import sys

from tests.mutants.sampled_run import main

if __name__ == "__main__":
    sys.exit(main())
