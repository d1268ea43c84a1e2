"""Every block of README.md does what it says; beside the other pages, as its runs take minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.documents.play import play


@pytest.mark.engine
@pytest.mark.long(minutes=8)
@pytest.mark.timeout(3600)
def test_the_page_does_what_it_says(tmp_path: Path) -> None:
    for _ in play("README.md", folder=tmp_path):
        pass
