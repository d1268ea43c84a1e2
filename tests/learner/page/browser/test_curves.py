"""Curves: every metric is found, runs lie over one another, and a point opens its step."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import Page, expect

from tests.learner.page.browser.conftest import Viewer
from tests.learner.page.browser.prepared_run import STEPS, PreparedRun

pytestmark = pytest.mark.slow


def card(page: Page, name: str):
    return page.locator(".curve", has=page.locator("h3", has_text=name)).first


def test_every_metric_is_found_and_drawn(viewer: Viewer) -> None:
    page = viewer.open("curves?run=made")
    expect(page.locator(".metric-list input[type=checkbox]")).to_have_count(10)  # the nine of the run, and the spread
    page.get_by_label("search metrics").fill("KL")
    expect(page.locator(".curve h3")).to_have_text(["policy/approx_kl"])
    assert "find=KL" in page.url


def test_runs_lie_over_one_another(viewer: Viewer) -> None:
    page = viewer.open("curves?run=made&show=reward/mean")
    mean = card(page, "reward/mean")
    expect(mean.locator("strong")).to_have_text([f"{0.2 + STEPS / 60:.4g}"])
    page.get_by_label("other").check()
    expect(mean.locator("strong")).to_have_text([f"{0.2 + STEPS / 60:.4g}", f"{0.3 + STEPS / 60:.4g}"])
    assert "with=other" in page.url


def test_smoothing_and_a_logarithmic_axis_are_in_the_link(viewer: Viewer) -> None:
    page = viewer.open("curves?run=made&show=policy/approx_kl&smooth=0.9&logy=1")
    expect(page.get_by_role("button", name="log y")).to_have_attribute("aria-pressed", "true")
    smoothed = card(page, "policy/approx_kl").locator("strong").inner_text()
    page.get_by_label("Smoothing").fill("0")
    expect(card(page, "policy/approx_kl").locator("strong")).not_to_have_text(smoothed)
    page.get_by_role("button", name="log y").click()
    assert "logy" not in page.url
    assert "smooth" not in page.url


HURRIED = """async () => {
  const smoothing = [...document.querySelectorAll("input")].find((one) => one.labels?.[0]?.innerText.includes("Smoothing"));
  const write = Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value").set;
  for (let turn = 0; turn < 300; turn++) {
    write.call(smoothing, turn % 2 ? "0.9" : "0");
    smoothing.dispatchEvent(new Event("input", { bubbles: true }));
    document.querySelector(".chart").style.display = turn % 3 ? "" : "none";
    await new Promise((done) => (turn % 5 ? setTimeout(done, turn % 7) : requestAnimationFrame(done)));
  }
}"""


def test_a_chart_that_comes_into_sight_while_it_gets_other_lines_draws_none_of_them_into_the_old_one(
    viewer: Viewer,
) -> None:
    """The fixture fails for an error of the page."""
    page = viewer.open("curves?run=made&show=policy/approx_kl&smooth=0.9&logy=1")
    expect(card(page, "policy/approx_kl").locator(".uplot")).to_have_count(1)
    page.evaluate(HURRIED)
    expect(card(page, "policy/approx_kl").locator(".uplot")).to_have_count(1)


def test_the_rewards_spread_is_drawn_beside_its_mean(viewer: Viewer) -> None:
    page = viewer.open("curves?run=made&show=reward/spread")
    spread = card(page, "reward/spread")
    expect(spread.locator(".legend")).to_contain_text("median")
    expect(spread.locator(".uplot")).to_have_count(1)


def test_a_point_opens_its_step(viewer: Viewer) -> None:
    page = viewer.open("curves?run=made&show=reward/mean")
    chart = card(page, "reward/mean").locator(".chart")
    chart.focus()
    chart.press("ArrowLeft")
    chart.press("ArrowLeft")
    shown = card(page, "reward/mean").locator(".legend .soft").inner_text().removeprefix("step ")
    assert int(shown) < STEPS
    over = chart.locator(".u-over")
    box = over.bounding_box()
    assert box is not None
    over.click(position={"x": box["width"] * 0.3, "y": box["height"] / 2})
    expect(page.locator("h1")).to_contain_text("Step ")
    step = int(page.locator("h1").inner_text().removeprefix("Step "))
    assert abs(step - STEPS * 0.3) <= 3
    expect(page.locator("tbody").first.locator("tr")).to_have_count(1)  # the group that it trained
    page.keyboard.press("j")
    expect(page.locator("h1")).to_have_text(f"Step {step + 1}")


def test_a_new_step_is_drawn_without_asking_for_all_again(viewer: Viewer, prepared: PreparedRun) -> None:
    page = viewer.open("curves?run=made&show=time/step_s")
    expect(card(page, "time/step_s").locator(".uplot")).to_have_count(1)
    asked = sum("/api/metrics" in url for url in viewer.requests)
    with (prepared.folder / "metrics.jsonl").open("a") as sink:
        sink.write(json.dumps({"step": STEPS + 1, "time/step_s": 77.0}) + "\n")
    expect(card(page, "time/step_s").locator("strong")).to_have_text("77")
    assert sum("/api/metrics" in url for url in viewer.requests) == asked
