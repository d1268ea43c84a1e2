"""The page beside a run that trains: what changes is there as it happens, and it stays when the run is killed."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.learner.page.browser.conftest import PATIENCE_MS, looking
from tests.support.run_parts import Run, start

pytestmark = [pytest.mark.slow, pytest.mark.long]

SMALL = (
    "run.steps=1000", "sft.steps=20", "buffer.groups_per_step=2", "buffer.group_size=2", "run.checkpoints.every=0",
)  # fmt: skip


def printed_link(run: Run) -> str:
    """The one-time link that the run prints at its start."""
    assert run.process.stdout is not None
    printed = []
    for line in run.process.stdout:
        printed.append(line)
        if found := re.search(r"page: (http://127\.0\.0\.1:\d+/open/\S+)", line):
            return found[1]
    raise AssertionError(f"the run printed no link: {printed}")


def shown_step(page: Page) -> int:
    return int(re.sub(r"\D", "", page.locator(".run-state .figure").first.inner_text().split("/")[0]))


def test_a_run_is_followed_live_and_kept_when_it_is_killed(browser: Browser, tmp_path: Path) -> None:
    run = start(tmp_path, *SMALL, imports=True)
    link = printed_link(run)
    root = "{0.scheme}://{0.netloc}".format(urlsplit(link))
    context = browser.new_context()
    opened = context.new_page()
    opened.goto(link, wait_until="commit", timeout=4 * PATIENCE_MS)
    cookies = list(context.cookies())
    context.close()
    # 409: the page is there before the ledger is.
    with looking(browser, root, cookies, passing="409") as viewer:
        page = viewer.open("machine?run=run")
        page.evaluate("window.sameDocument = true")
        run.wait_for_step(1)
        expect(page.locator(".station-learner .station-figure")).to_contain_text(
            re.compile(r"^[1-9]"), timeout=2 * PATIENCE_MS
        )
        run.wait_for_step(shown_step(page) + 2)
        expect(page.locator(".run-state .state").first).to_have_text("live")
        page.get_by_role("link", name="Episodes").click()
        page.locator("select[name=group_state]").select_option("trained")
        expect(page.locator(".vrow .e-id").first).to_be_visible()
        ask = "fetch('/api/runs/run/episodes?group_state=trained&limit=1').then((answer) => answer.json())"
        trained = page.evaluate(ask)["episodes"][0]["episode_id"]
        page = viewer.open(f"episode/{trained}?run=run")
        page.get_by_role("button", name="Tokens").click()
        page.get_by_role("button", name="engine – learner").click()
        expect(page.locator(".tokens .t[class*=df-]").first).to_be_visible()
        expect(page.get_by_text("were not kept")).to_have_count(0)
        assert page.evaluate("window.sameDocument")
        run.process.kill()
        expect(page.locator(".run-state .state").first).to_have_text("killed", timeout=2 * PATIENCE_MS)
        page.get_by_role("link", name="Machine").click()
        expect(page.locator(".notice")).to_contain_text("The run was killed.")
        page.get_by_role("link", name="Episodes").click()
        expect(page.locator(".vrow .e-id").first).to_be_visible()
    run.kill()
