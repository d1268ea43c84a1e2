"""The exported file opens without a server, shows its episodes and curves, and runs nothing that an agent wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from learner.page.export import export
from learner.page.serve import break_meanings
from tests.learner.page.browser.conftest import Viewer, looking
from tests.learner.page.browser.prepared_run import PreparedRun

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def exported(prepared: PreparedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("exported") / "made.html"
    folders = [prepared.folder, prepared.folder.parent / "other"]
    export(folders, to=file, episodes=200, causes=break_meanings())
    return file


@pytest.fixture
def reader(browser: Browser, exported: Path) -> Iterator[Viewer]:
    with looking(browser, "http://nowhere.invalid", []) as found:
        found.root = exported.as_uri()
        yield found
        found.root = "http://nowhere.invalid"


def open_at(reader: Viewer, view: str):
    reader.page.goto(f"{reader.root}#/{view}", wait_until="commit")
    reader.page.wait_for_selector("main h1")
    return reader.page


def test_it_opens_without_a_server(reader: Viewer) -> None:
    page = open_at(reader, "machine")
    expect(page.locator(".run-state")).to_contain_text("exported file")
    expect(page.locator(".station h3")).to_have_count(7)
    page.get_by_role("link", name="Curves").click()
    expect(page.locator(".curve .uplot").first).to_be_visible()
    assert [url for url in reader.requests if not url.startswith(("file:", "data:"))] == []


def test_its_episodes_are_filtered_and_opened(reader: Viewer, prepared: PreparedRun) -> None:
    page = open_at(reader, "episodes?state=failed")
    expect(page.locator(".vrow").first).to_contain_text("deadline")
    expect(page.locator("[data-total]")).to_contain_text("sampled")
    page = open_at(reader, f"episode/{prepared.branched}?part=tokens")
    expect(page.locator(".tokens .t").first).to_be_visible()
    page.get_by_role("button", name="Conversation").click()
    expect(page.locator(".turn")).to_have_count(5)


def test_what_an_agent_wrote_does_nothing_in_it(reader: Viewer, prepared: PreparedRun) -> None:
    page = open_at(reader, f"episode/{prepared.hostile}")
    expect(page.locator(".turn").last).to_contain_text("<script>")
    assert page.locator("#app img, #app script").count() == 0
    assert "owned" not in page.title()
