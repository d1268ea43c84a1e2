"""`MemoryBuffer`: the ledger's twin without durability, for tests, notebooks and the RFC's demo.

Used like `Ledger`, whose code it runs on a database in memory. Invariant: it keeps every rule of `buffers.conformance` but
those about restarts.
"""

from __future__ import annotations

from typing import Any

from buffers.ledger.ledger import Ledger


class MemoryBuffer(Ledger):
    """All is lost with the process."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(None, **settings)
