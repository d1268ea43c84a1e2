"""The command line: `python -m buffers.ledger --help`."""

from __future__ import annotations

import sys

from buffers.ledger.cli import main
from buffers.ledger.ledger import Ledger
from buffers.terminal import guard_output, printing

if __name__ == "__main__":
    guard_output()
    sys.exit(printing(lambda: main(sys.argv[1:], open_ledger=Ledger)))
