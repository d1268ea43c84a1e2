"""A pytest plugin, `-p tests.ci.failure_log --failure-log PATH`: one JSON line for each failure, and one for the end.

`tests.ci.stages` reads them. A session that died leaves no last line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--failure-log", type=Path, required=True, help="file to write failures to, as JSON lines")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # xdist's workers send their reports to this process
        config.pluginmanager.register(FailureLog(config.getoption("--failure-log")))


class FailureLog:
    def __init__(self, path: Path) -> None:
        self._path = path

    def _write(self, **fields: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(fields) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            sections = [f"--- {title} ---\n{text}" for title, text in report.sections]
            self._write(test=report.nodeid, output="\n".join([report.longreprtext, *sections]))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(test=report.nodeid, output=report.longreprtext)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._write(exit=int(exitstatus))
