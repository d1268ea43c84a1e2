"""The machine: who waits for whom is seen at a glance, and what changes is there without a reload."""

from __future__ import annotations

import json
import time

import pytest
from playwright.sync_api import expect

from tests.learner.page.browser.conftest import Viewer
from tests.learner.page.browser.prepared_run import PreparedRun, machine_line

pytestmark = pytest.mark.slow


def test_the_loops_are_drawn_with_who_waits_for_whom(viewer: Viewer) -> None:
    page = viewer.open("machine?run=made")
    names = page.locator(".station h3")
    expect(names).to_have_text(["Tasks", "Agents", "Prompts", "Engines", "Rounds", "Groups", "Learner"])
    expect(page.locator(".station-agents")).to_contain_text("12 / 16")
    engines = page.locator(".engine")
    expect(engines.nth(0)).to_contain_text("v24")
    expect(engines.nth(0)).to_contain_text("9 + 2 waiting")
    expect(engines.nth(0)).to_contain_text("KV 40 %")
    expect(engines.nth(1)).to_contain_text("down")
    expect(page.locator(".waits")).to_contain_text("1 of the 8 groups of a step are ready")
    expect(page.locator(".stations")).not_to_contain_text("wait for")  # the list of waits says it, once


def test_a_group_shows_its_age_and_how_many_updates_it_has_left(viewer: Viewer) -> None:
    page = viewer.open("machine?run=made")
    row = page.locator("tbody tr", has_text="4 / 4")
    expect(row).to_contain_text("ready")
    head = page.locator("thead th").all_inner_texts()
    cells = row.locator("td").all_inner_texts()
    shown = dict(zip(head, cells, strict=True))
    assert shown["Updates until stale"] == "2"
    assert shown["Age"].endswith(("s", "min"))


def test_a_new_state_of_the_machine_is_shown_without_a_reload(viewer: Viewer, prepared: PreparedRun) -> None:
    page = viewer.open("machine?run=made")
    expect(page.locator(".station-prompts .station-figure")).not_to_have_text("41")
    page.evaluate("window.sameDocument = true")
    with (prepared.folder / "machine.jsonl").open("a") as sink:
        sink.write(json.dumps(machine_line(at=time.time(), prompts=41, learner="updating")) + "\n")
    expect(page.locator(".station-prompts .station-figure")).to_have_text("41")
    expect(page.locator(".station-learner")).to_contain_text("updating")
    assert page.evaluate("window.sameDocument")
    assert (
        sum("/api/runs/made/machine" in url for url in viewer.requests) == 1
    )  # what changed was sent, nothing else again


SEEN = """(seen) => {
  Object.defineProperty(document, "hidden", { configurable: true, get: () => !seen });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


def test_a_page_that_nobody_sees_asks_for_nothing_and_has_what_it_missed_when_it_is_seen(
    viewer: Viewer, prepared: PreparedRun
) -> None:
    page = viewer.open("machine?run=made")
    expect(page.locator(".station-prompts .station-figure")).to_be_visible()
    viewer.wait_for_requests("/api/events", 1)
    page.evaluate(SEEN, False)
    with (prepared.folder / "machine.jsonl").open("a") as sink:
        sink.write(json.dumps(machine_line(at=time.time(), prompts=47)) + "\n")
    page.wait_for_timeout(2500)  # more than two looks of the server
    expect(page.locator(".station-prompts .station-figure")).not_to_have_text("47")
    page.evaluate(SEEN, True)
    expect(page.locator(".station-prompts .station-figure")).to_have_text("47")
    viewer.wait_for_requests("/api/events", 2)


def test_a_run_that_starts_has_no_figures_yet(viewer: Viewer, prepared: PreparedRun) -> None:
    """The page is open before the engine is: what a run says first is its phase."""
    with (prepared.folder / "machine.jsonl").open("a") as sink:
        first = {
            "at": time.time(),
            "pid": 1,
            "host": "elsewhere",
            "began": 0.0,
            "phase": "starting",
            "learner": "starting",
        }
        sink.write(json.dumps(first) + "\n")
    page = viewer.open("machine?run=made")
    expect(page.locator(".view-head")).to_contain_text("starting")
    expect(page.locator(".station-agents .station-figure")).to_have_text("–")
    with (prepared.folder / "machine.jsonl").open("a") as sink:
        sink.write(json.dumps(machine_line(at=time.time(), prompts=5)) + "\n")
    expect(page.locator(".station-prompts .station-figure")).to_have_text("5")
    expect(page.locator(".station-agents")).to_contain_text("12 / 16")


def test_what_the_machine_did_is_drawn_over_time(viewer: Viewer) -> None:
    page = viewer.open("machine?run=made")
    expect(page.locator(".panel .uplot")).to_have_count(6)


DRAWN = """() => {
  window.drawn = [0, 0];
  document.querySelectorAll(".panel canvas").forEach((canvas, place, all) => {
    if (place !== 0 && place !== all.length - 1) return;
    const brush = canvas.getContext("2d");
    const clear = brush.clearRect.bind(brush);
    brush.clearRect = (...box) => { window.drawn[place ? 1 : 0] += 1; clear(...box); };
  });
}"""


UNTIL_DRAWN = """(place) => new Promise((resolve) => {
  const look = () => (window.drawn[place] > 0 ? resolve() : setTimeout(look, 50));
  look();
})"""


def test_a_chart_out_of_sight_is_not_drawn_until_it_is_scrolled_into_sight(
    viewer: Viewer, prepared: PreparedRun
) -> None:
    page = viewer.open("machine?run=made")
    expect(page.locator(".panel .uplot")).to_have_count(6)
    page.set_viewport_size({"width": 500, "height": 700})
    page.locator(".panel").first.scroll_into_view_if_needed()
    viewer.wait_for_requests("/api/events", 1)
    page.wait_for_timeout(300)  # both have drawn what they were made with
    page.evaluate(DRAWN)
    with (prepared.folder / "machine.jsonl").open("a") as sink:
        sink.write(json.dumps(machine_line(at=time.time(), prompts=53)) + "\n")
    page.evaluate(UNTIL_DRAWN, 0)
    assert page.evaluate("window.drawn[1]") == 0
    page.locator(".panel").last.scroll_into_view_if_needed()
    page.evaluate(UNTIL_DRAWN, 1)
