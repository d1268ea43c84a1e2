"""The command line: `python -m buffers.ledger --help`."""

from __future__ import annotations

import sys

from buffers.ledger.ledger import Ledger
from buffers.ledger.tools.broken_pipe import printing
from buffers.ledger.tools.cli import main
from buffers.terminal import guard_output

if __name__ == "__main__":
    guard_output()
    sys.exit(printing(lambda: main(sys.argv[1:], open_ledger=Ledger)))
