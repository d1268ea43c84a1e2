"""The folder of our packages, for processes that Ray starts: they import them from any working directory."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def python_path() -> str:
    """PYTHONPATH with the checkout first; as it is where we are installed: what lies in site-packages is found without it, and
    before the standard library it does not belong."""
    inherited = os.environ.get("PYTHONPATH", "")
    if ROOT in {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}:
        return inherited
    return os.pathsep.join(filter(None, [str(ROOT), inherited]))
