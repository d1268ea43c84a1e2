"""Rules of a live run's page: nothing runs until somebody visits, a page that died is started again, and it ends with the run."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest

from learner.session import PageProcess
from tests.learner.page.page_parts import make_run
from tests.support.patience import PATIENCE_S
from tests.support.processes.child_process import gone


@pytest.mark.slow
async def test_a_page_is_started_by_its_first_visit_and_again_after_its_death(tmp_path: Path) -> None:
    links: list[str] = []
    page = PageProcess(make_run(tmp_path), on_link=links.append)
    page.start()
    assert page.url.startswith("http://127.0.0.1:") and page._process is None
    async with httpx.AsyncClient(base_url=page.url.partition("/open")[0], timeout=PATIENCE_S) as browser:
        first = page.url
        assert (await browser.get(first)).status_code == 200
        answer = await browser.get("/api/runs")
        assert [run["id"] for run in answer.json()["runs"]] == ["seen"]
        while not links:
            await asyncio.sleep(0.01)
        assert page.url == links[0] != first
        assert page._process is not None and os.getpriority(os.PRIO_PROCESS, page._process.pid) >= 10
        os.kill(page._process.pid, signal.SIGKILL)
        await page._process.wait()
    async with httpx.AsyncClient(timeout=PATIENCE_S) as browser:
        assert (await browser.get(page.url)).status_code == 200
    pid = page._process.pid
    await page.close()
    assert gone(pid)


async def test_a_run_without_visits_starts_no_page(tmp_path: Path) -> None:
    page = PageProcess(tmp_path)
    page.start()
    await page.close()
    assert page._process is None and page._keeping is None
