"""The command line: `python -m tests.faults --help`."""

from __future__ import annotations

from tests.faults.ledger_faults import main

if __name__ == "__main__":
    main()
