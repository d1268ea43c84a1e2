"""The list of episodes: filters in the address, windows of rows, keys."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.learner.page.browser.conftest import Viewer
from tests.learner.page.browser.prepared_run import SIZE, TRAINED, PreparedRun

pytestmark = pytest.mark.slow

NUM_EPISODES = TRAINED * SIZE + SIZE + 1 + 1 + 2


def test_only_the_rows_in_sight_are_in_the_document(viewer: Viewer) -> None:
    page = viewer.open("episodes?run=made")
    expect(page.locator("[data-total]")).to_have_attribute("data-total", str(NUM_EPISODES))
    shown = page.locator(".vrow").count()
    assert 0 < shown < 50
    page.locator(".vlist").evaluate("list => { list.scrollTop = list.scrollHeight; }")
    expect(page.locator(".vrow", has_text="1-0-0").last).to_be_visible()
    assert page.locator(".vrow").count() < 50


def test_a_filter_is_in_the_address_and_a_link_shows_it(viewer: Viewer) -> None:
    page = viewer.open("episodes?run=made")
    page.locator("select[name=state]").select_option("failed")
    expect(page.locator("[data-total]")).to_have_text("2 episodes")
    assert "state=failed" in page.url
    expect(page.locator(".vrow").first).to_contain_text("deadline: 30 s")
    page.get_by_role("button", name="Clear").click()
    page.locator("input[name=step]").fill("7")
    expect(page.locator("[data-total]")).to_have_text(f"{SIZE} episodes")
    page.reload(wait_until="commit")
    expect(page.locator("[data-total]")).to_have_text(f"{SIZE} episodes")
    expect(page.locator("input[name=step]")).to_have_value("7")


def test_scores_and_lengths_filter(viewer: Viewer) -> None:
    page = viewer.open("episodes?run=made&min_score=0.7&sort=oldest")
    best = sum(step % 5 != 0 for step in range(1, TRAINED + 1))
    expect(page.locator("[data-total]")).to_have_text(f"{best} episodes")
    page = viewer.open("episodes?run=made&min_tokens=50000")
    expect(page.locator("[data-total]")).to_have_text("1 episode")


def test_a_broken_history_is_found_by_its_cause(viewer: Viewer, prepared: PreparedRun) -> None:
    page = viewer.open("episodes?run=made&cause=history_edited")
    expect(page.locator(".vrow")).to_have_count(1)
    expect(page.locator(".vrow")).to_contain_text(prepared.branched)


def test_j_and_k_walk_the_list_and_enter_opens(viewer: Viewer) -> None:
    page = viewer.open("episodes?run=made&step=7&sort=oldest")
    expect(page.locator(".vrow")).to_have_count(SIZE)
    for key in ("j", "j", "j", "k"):
        page.keyboard.press(key)
    expect(page.locator(".vrow[aria-selected=true]")).to_contain_text("7-1-0")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("7-1-0")
    expect(page.get_by_role("group", name="in the list")).to_contain_text(f"2 of {SIZE}")  # it is known what j leads to
    page.keyboard.press("j")
    expect(page.locator("h1")).to_have_text("7-2-0")
    page.keyboard.press("k")
    expect(page.locator("h1")).to_have_text("7-1-0")
    page.keyboard.press("]")
    expect(page.locator("h1")).to_have_text("7-2-0")
    page.keyboard.press("[")
    expect(page.locator("h1")).to_have_text("7-1-0")
    assert "step=7" in page.url  # the list that it came from


def test_keys_that_are_typed_are_the_fields(viewer: Viewer) -> None:
    page = viewer.open("episodes?run=made")
    page.get_by_label("Task or episode").press_sequentially("jk")
    expect(page.locator("[data-total]")).to_have_text("0 episodes")
    expect(page.locator(".list-empty")).to_be_visible()
    assert page.locator(".vrow[aria-selected=true]").count() == 0


def test_what_was_not_trained_is_listed_with_its_reason(viewer: Viewer) -> None:
    page = viewer.open("untrained?run=made")
    reason = page.locator(".reason", has_text="deadline")
    expect(reason).to_contain_text("2 episodes")
    reason.get_by_role("link", name="Show them").click()
    expect(page.locator("[data-total]")).to_have_text("2 episodes")
