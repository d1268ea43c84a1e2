"""The folders of runs: which there are, what their files say of them, and whether one lives, ended, or was killed.

Used by `learner.page.run_view`. It reads files of a few kilobytes, and makes, locks or changes none.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from buffers.errors import UnderstudyError
from configs.bounded_yaml import YamlError, read_yaml
from learner.reporting.run_json import DamagedFile, read_object

CONFIG, SUMMARY, METRICS, MACHINE, LEDGER = (
    "config.yaml",
    "summary.json",
    "metrics.jsonl",
    "machine.jsonl",
    "ledger.sqlite",
)
FRESH_S = 10.0
"""A run that wrote so lately lives."""
LEFT_OUT = "(left out)"
_SECRET_NAME = re.compile(r"(?:^|_)(?:key|token|secret|password|passwd|credentials?)s?$", re.IGNORECASE)
_NOT_SECRET = frozenset({"max_tokens", "min_tokens", "overlong_tokens"})


class NoRun(UnderstudyError):
    """What was named holds no run."""


def find_runs(named: Sequence[Path]) -> dict[str, Path]:
    """Id -> folder, in the order of the names: each is a run's folder, or holds those of runs. Raises NoRun.

    The id is the folder's name; of several of one name those that come later have a number."""
    found: list[Path] = []
    for folder in named:
        some = [folder] if is_run(folder) else sorted(filter(is_run, _inside(folder)), key=_age)
        if not some:
            raise NoRun(f"RUN must be a run's folder, or a folder of runs, got {folder}; name one, such as runs/demo")
        found += [each for each in some if each.resolve() not in {one.resolve() for one in found}]
    runs: dict[str, Path] = {}
    for each in found:
        name, number = each.resolve().name, 2
        while name in runs:
            name, number = f"{each.resolve().name}~{number}", number + 1
        runs[name] = each
    return runs


def is_run(folder: Path) -> bool:
    """Whether this is a run's folder."""
    return (folder / CONFIG).is_file()


def _inside(folder: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir()]
    except OSError:
        return []


def _age(folder: Path) -> float:
    return -(folder / CONFIG).stat().st_mtime


def read_config(folder: Path) -> dict[str, Any]:
    """`config.yaml`; empty when it cannot be read."""
    try:
        found = read_yaml(folder / CONFIG)
    except (OSError, YamlError):
        return {}
    return found if isinstance(found, dict) else {}


def read_summary(folder: Path) -> dict[str, Any] | None:
    """`summary.json`; None: the run has not ended by itself."""
    try:
        return read_object(folder / SUMMARY)
    except (OSError, DamagedFile):
        return None


def state_of(
    summary: Mapping[str, Any] | None,
    machine: Mapping[str, Any] | None,
    *,
    seen_at: float | None,
    now: float | None = None,
) -> str:
    """live, finished, stopped (Ctrl-C), failed, killed, or unknown: it never wrote anything. `seen_at`: its last sign of life."""
    now = time.time() if now is None else now
    if summary is not None:
        return "failed" if summary.get("error") else "stopped" if summary.get("stopped") else "finished"
    if machine is not None and machine.get("host") == socket.gethostname():
        return "live" if _is_running(machine) else "killed"
    if seen_at is not None and abs(now - seen_at) < FRESH_S:  # of another machine, whose clock is not this one's
        return "live"
    return "unknown" if seen_at is None else "killed"


def _is_running(machine: Mapping[str, Any]) -> bool:
    """Whether the process of a run on this machine is there. Clocks are set, so none is asked."""
    import psutil

    from learner.reporting.machine_log import began_s

    try:
        pid, began = int(machine["pid"]), float(machine["began"])
        # A zombie is dead, and its parent did not look yet.
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE and abs(began_s(pid) - began) < 1.0
    except (psutil.Error, LookupError, TypeError, ValueError):
        return False


def without_secrets(value: Any) -> Any:
    """A configuration with the values of keys that are named like secrets left out."""
    if isinstance(value, dict):
        return {
            name: LEFT_OUT if has_secret_name(str(name)) and item else without_secrets(item)
            for name, item in value.items()
        }
    return [without_secrets(item) for item in value] if isinstance(value, list) else value


def has_secret_name(name: str) -> bool:
    """Whether a key of this name holds a secret."""
    return bool(_SECRET_NAME.search(name)) and name not in _NOT_SECRET
