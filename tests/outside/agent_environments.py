"""Environments of agents that others wrote, beside ours: installed as their users do, once, and kept in `.venv/agents`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

KEPT = Path(__file__).resolve().parents[2] / ".venv" / "agents"
INSTALL_LIMIT_S = 600


def python_with(name: str, *requirements: str, base: str = sys.executable) -> Path:
    """A Python with these packages, in an environment called `name`. `base`: the interpreter that it is of."""
    folder = KEPT / name
    python = folder / "bin" / "python"
    done = folder / "installed.txt"
    if not done.is_file() or done.read_text().split() != list(requirements):
        shutil.rmtree(folder, ignore_errors=True)
        _run([base, "-m", "venv", "--without-pip", str(folder)])
        pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
        _run([*pip, "install", "--quiet", *requirements])
        done.write_text("\n".join(requirements))
    return python


def npm_program(package: str, program: str) -> Path:
    """A program of an npm package (`name@version`)."""
    folder = KEPT / package.replace("/", "-").replace("@", "-")
    path = folder / "node_modules" / ".bin" / program
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _run(["npm", "install", "--no-fund", "--no-audit", "--silent", "--prefix", str(folder), package])
    return path


def npm_packages(name: str, *packages: str) -> Path:
    """A folder called `name` from which these npm packages (`name@version`) are found."""
    folder = KEPT / name
    done = folder / "installed.txt"
    if not done.is_file() or done.read_text().split() != list(packages):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _run(["npm", "install", "--no-fund", "--no-audit", "--silent", "--prefix", str(folder), *packages])
        done.write_text("\n".join(packages))
    return folder


def _run(command: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, env=environment)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}{done.stderr}"
