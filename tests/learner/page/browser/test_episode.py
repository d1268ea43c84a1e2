"""One episode: what was said, its tree, its scores; and its tokens in windows, with exact figures."""

from __future__ import annotations

import math
import re
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import expect

from tests.learner.page.browser.conftest import Viewer
from tests.learner.page.browser.prepared_run import HOSTILE, LONG_LINE, LONG_TOKENS, TRAINED, PreparedRun

pytestmark = pytest.mark.slow


def logprob_at(place: int) -> str:
    """That of a sampled token of the prepared run's first rounds, as far as a float32 has it exactly."""
    return f"{-(abs(math.sin(place)) ** 4) * 9:.6f}"[:-3]


def test_the_conversation_has_roles_tools_and_thoughts_that_fold(viewer: Viewer, prepared: PreparedRun) -> None:
    page = viewer.open(f"episode/{prepared.branched}?run=made")
    expect(page.locator(".turn-head strong")).to_have_text(["system", "user", "assistant", "tool", "assistant"])
    thought = page.locator("details.thought")
    expect(thought.locator("summary")).to_contain_text("thought")
    expect(thought.get_by_text("Four to the right.")).to_be_hidden()
    thought.locator("summary").click()
    expect(thought.get_by_text("Four to the right.")).to_be_visible()
    expect(page.locator("details.tool_call")).to_contain_text('look({"far": true})')
    expect(page.locator(".role-tool")).to_contain_text("nothing but numbers")


def test_the_tree_names_the_cause_of_a_break(viewer: Viewer, prepared: PreparedRun) -> None:
    page = viewer.open(f"episode/{prepared.branched}?run=made")
    expect(page.locator(".round")).to_have_count(3)
    expect(page.locator(".round .cause")).to_contain_text("history_edited")
    page.locator(".round-button").nth(2).click()
    expect(page.locator(".turn")).to_have_count(2)
    assert "branch=1" in page.url


def test_scores_have_their_judge_and_their_time(viewer: Viewer, prepared: PreparedRun) -> None:
    page = viewer.open(f"episode/{prepared.branched}?run=made")
    row = page.get_by_role("region", name="scores").locator("tbody tr")
    expect(row).to_contain_text(["0.250"])
    expect(row).to_contain_text(["environment"])


def test_tokens_come_in_windows_and_never_as_a_whole(viewer: Viewer, prepared: PreparedRun) -> None:
    page = viewer.open(f"episode/{prepared.long}?run=made&part=tokens")
    expect(page.locator(".tokens .t")).to_have_count(1024)
    expect(page.locator(".window-place")).to_contain_text(f"of {LONG_TOKENS:,}")
    page.get_by_label("later tokens").click()
    expect(page.locator(".window-place")).to_contain_text("1,024–2,047")
    page.get_by_label("Go to").fill("99999")
    page.get_by_label("Go to").press("Enter")
    expect(page.locator(".tokens .t")).to_have_count(LONG_TOKENS % 1024)
    page.get_by_label("Window").select_option("4096")
    expect(page.locator(".tokens .t")).to_have_count(LONG_TOKENS % 4096)
    asked = [parse_qs(urlsplit(url).query) for url in viewer.requests if urlsplit(url).path.endswith("/tokens")]
    assert len(asked) >= 4
    assert all(int(one["count"][0]) <= 4096 for one in asked)


def test_a_short_branch_is_shown_as_a_whole(viewer: Viewer) -> None:
    page = viewer.open("episode/7-1-0?run=made&part=tokens")
    expect(page.locator(".tokens .t:not(.given)")).to_have_text(["l", "e", "f", "t", "<|im_end|>"])
    page.get_by_role("button", name="advantage").click()
    expect(page.locator(".tokens .t").first).to_be_visible()


def test_a_token_shows_its_exact_figures_by_key_and_under_the_pointer(viewer: Viewer, prepared: PreparedRun) -> None:
    page = viewer.open(f"episode/{prepared.long}?run=made&part=tokens")
    figures = page.locator(".inspector")
    expect(page.locator(".tokens .t")).to_have_count(1024)
    given = page.locator(".tokens .t.given").count()
    tokens = page.locator(".tokens")
    tokens.focus()
    for _ in range(given + 2):
        tokens.press("ArrowRight")
    expect(figures).to_contain_text(f"v{TRAINED}")
    expect(figures).to_contain_text(logprob_at(2))
    page.locator(".tokens .t").nth(given + 3).hover()
    expect(figures).to_contain_text(logprob_at(3))


def test_tokens_are_coloured_by_what_is_chosen(viewer: Viewer, prepared: PreparedRun) -> None:
    page = viewer.open(f"episode/{prepared.branched}?run=made&part=tokens")
    sampled = page.locator(".tokens .t:not(.given)").first
    expect(sampled).to_have_class(re.compile("lp-"))
    for name, prefix in (("policy version", "vn-"), ("mask", "mk-")):
        page.get_by_role("button", name=name).click()
        expect(sampled).to_have_class(re.compile(prefix))
    assert "colour=mask" in page.url
    page.get_by_role("button", name="policy version").click()
    expect(page.locator(".tokens .t.turned")).to_have_count(1)  # where the version changed


def test_what_an_agent_wrote_does_nothing(viewer: Viewer, prepared: PreparedRun) -> None:
    page = viewer.open(f"episode/{prepared.hostile}?run=made")
    expect(page.locator(".turn").first).to_contain_text(HOSTILE[:40])
    expect(page.locator(".turn").last).to_contain_text("<script>")
    assert page.locator("#app img, #app script").count() == 0
    tool = page.locator(".turn", has_text="xxx")
    assert len(tool.inner_text()) < LONG_LINE / 10  # a window of it
    page.get_by_role("button", name="Tokens").click()
    expect(page.locator(".tokens .t").first).to_be_visible()
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide == 0
    assert "owned" not in page.title()
