"""Names in a tools' YAML -> what they name, and the remedy for a name that is not there.

Used by `agents.tools.tool_file` and by tools whose config names something. Invariants: what is not named is not imported; a
file that is named by a relative path lies in the folder of the YAML. It does not judge what it found.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from buffers.did_you_mean import nearest
from buffers.errors import ToolError


def find(name: str, *, folder: Path, place: str) -> Any:
    """What `module.attribute`, or `file.py:attribute` beside the YAML, names."""
    file, colon, attribute = name.partition(":")
    if colon:
        module = _module_at(inside(file, folder=folder, place=place), place=place)
    else:
        dotted, _, attribute = name.rpartition(".")
        try:
            module = importlib.import_module(dotted)
        except (ImportError, ValueError) as error:
            raise ToolError(
                f"{place}: {name!r} must be module.name of what can be imported: {error}; check its spelling"
            ) from error
    if not hasattr(module, attribute):
        public = [known for known in vars(module) if not known.startswith("_")]
        raise ToolError(f"{place}: {name!r} is not there; {nearest(attribute, public)}")
    return getattr(module, attribute)


def inside(name: str, *, folder: Path, place: str) -> Path:
    """The file of that name in the YAML's folder, or below it; links are followed first."""
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ToolError(f"{place}: files must lie in {folder}, got {name!r}; move it there")
    if not path.is_file():
        raise ToolError(f"{place}: {path} is not a file; {nearest(path.name, [p.name for p in folder.iterdir()])}")
    return path


def _module_at(path: Path, *, place: str) -> Any:
    name = f"tools_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ToolError(f"{place}: {path} must be a Python file; give it the ending .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module
