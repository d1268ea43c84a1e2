"""Gives the rules the buffer that is named on the command line.

    python -m pytest buffers/conformance --buffer my_module:open_buffer [--not-durable]

`open_buffer(path)` opens the buffer that is stored at `path`, or a new one. Without the option: our ledger.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from buffers.conformance.rules import Site


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--buffer", default="buffers.ledger.ledger:Ledger", metavar="MODULE:FACTORY")
    parser.addoption("--not-durable", action="store_true", help="leave out the rules about restarts")


@pytest.fixture
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Site:
    """A place for one buffer."""
    module, _, factory = str(request.config.getoption("--buffer")).partition(":")
    open_buffer = getattr(importlib.import_module(module), factory)
    durable = not request.config.getoption("--not-durable")
    return Site(open_buffer, path=tmp_path / "buffer", durable=durable)
