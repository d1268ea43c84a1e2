"""Writes docs/code-map.md: every module with the first sentence of its docstring.

`python scripts/code_map.py > docs/code-map.md`
"""

from __future__ import annotations

import ast
import re
import subprocess
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("learner", "mocked_server", "buffers", "agents", "env_adapters", "configs", "benchmarks", "scripts")
"""The folders in the order in which a reader meets them."""
HEAD = """\
# Code map

Every module, with the first sentence of its docstring; `make docs` writes this page. To read the code in the order in which it
runs: `learner/run.py`, `learner/session.py`, `learner/pipeline.py`, `learner/learn_loop.py`, `learner/training/trainer.py`; then
`mocked_server/server.py`, `mocked_server/generation.py`, `buffers/ledger/ledger.py`.
"""


def first_sentence(docstring: str) -> str:
    """Up to the first full stop that ends a sentence, on one line."""
    words = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=[^.][.!?])\s+(?=[A-Z`])", words)[0]


def code_map() -> str:
    """The page."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *FOLDERS],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    paths = sorted({Path(line) for line in listed.stdout.splitlines() if (ROOT / line).is_file()})
    modules = [path for path in paths if path.suffix == ".py"]
    lines = [HEAD]
    for folder in FOLDERS:
        lines += [f"## {folder}/", ""]
        own = [path for path in modules if path.parts[0] == folder]
        for room, members in groupby(
            sorted(own, key=lambda path: (path.parent.parts, path.name)), lambda path: path.parent
        ):
            files = list(members)
            said = {
                path: first_sentence(ast.get_docstring(ast.parse((ROOT / path).read_text())) or "") for path in files
            }
            package = room / "__init__.py"
            if said.get(package):
                lines += [f"**{room.as_posix()}/** {said[package]}", ""]
            elif len(room.parts) > 1:
                lines += [f"**{room.as_posix()}/**", ""]
            rows = [
                f"| `{path.name}` | {said[path].replace('|', chr(92) + '|')} |" for path in files if path != package
            ]
            if rows:
                lines += ["| module | |", "|---|---|", *rows, ""]
    return "\n".join(lines)


if __name__ == "__main__":
    print(code_map(), end="")
