"""Where the checkout lies, for processes that Ray starts: they import our folders whatever directory they begin in."""

from __future__ import annotations

import os
from pathlib import Path


def python_path() -> str:
    """PYTHONPATH with the checkout first."""
    checkout = str(Path(__file__).resolve().parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    return checkout if not inherited else os.pathsep.join([checkout, inherited])
