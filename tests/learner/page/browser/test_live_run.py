"""A run of `understudy serve` in a browser: its sessions and versions, and feedback that is given there and lies in its ledger."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from learner.page.export import export
from tests.learner.page.browser.conftest import NARROW, PATIENCE_MS, Viewer, looking, served
from tests.learner.page.browser.test_accessibility import AXE, SERIOUS
from tests.learner.page.live_run import make_live_folder, make_live_run
from tests.mocked_server.test_whose_data import Served, ask

pytestmark = pytest.mark.slow


def opened(browser: Browser, folder: Path, **how: object) -> Iterator[Viewer]:
    with served([folder]) as pages:
        context = browser.new_context()
        page = context.new_page()
        page.goto(pages.link(), wait_until="commit", timeout=PATIENCE_MS)
        cookies = list(context.cookies())
        context.close()
        with looking(browser, pages.root, cookies, **how) as viewer:
            yield viewer


@pytest.fixture
def stored(browser: Browser, tmp_path: Path) -> Iterator[Viewer]:
    yield from opened(browser, make_live_run(tmp_path / "live"))


@pytest.fixture
def phone(browser: Browser, tmp_path: Path) -> Iterator[Viewer]:
    yield from opened(browser, make_live_run(tmp_path / "live"), viewport=NARROW, bypass_csp=True)


@pytest.fixture
def run(tiny_model: Path, tmp_path: Path) -> Iterator[Served]:
    """A server with users, whose folder says that it lives."""
    run = Served(tiny_model, tmp_path)
    make_live_folder(run.path.parent)
    place = f"SERVER_URL={run.server.server.base_url}\nSCORER_KEY={run.server.server.keys.scorer}\n"
    (run.path.parent / "scorer.env").write_text(place)
    yield run
    run.server.stop()


@pytest.fixture
def viewer(browser: Browser, run: Served) -> Iterator[Viewer]:
    yield from opened(browser, run.path.parent)


def said_of(run: Served) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(f"{run.path.as_uri()}?mode=ro", uri=True)) as db:
        return db.execute(
            "SELECT part, round_index, judge, value, verdict, hint FROM score WHERE NOT (part = 'whole' AND judge = '')"
        ).fetchall()


def test_thumbs_and_a_note_lie_in_the_ledger_and_beside_the_answer(run: Served, viewer: Viewer) -> None:
    ask(run.client(run.keys.add("ann")), "apple")
    page = viewer.open("episodes")
    expect(page.locator(".vrow", has_text="ann")).to_contain_text("OpenAI/Python")
    page.locator(".vrow", has_text="ann").get_by_role("link").click()
    page.get_by_role("button", name="bad: round 0").click()
    expect(page.get_by_role("group", name="feedback on round 0").get_by_role("status")).to_have_text("Stored.")
    expect(page.get_by_role("group", name="feedback on round 0").locator(".said")).to_contain_text("page")
    expect(page.get_by_role("button", name="bad: round 0")).to_have_attribute("aria-pressed", "true")
    assert said_of(run) == [("round", 0, "page", 0.0, "stored", None)]
    page.get_by_role("group", name="feedback on round 0").get_by_role("button", name="Note").click()
    page.get_by_label("note on round 0").fill("Say which apple.")
    page.get_by_role("button", name="good: round 0").click()
    expect(page.locator(".said .agent-text")).to_have_text("Say which apple.")
    assert said_of(run)[1:] == [("round", 0, "page", 1.0, "revised", "Say which apple.")]


def test_what_was_learned_from_trains_nothing_more_and_the_page_says_so(run: Served, viewer: Viewer) -> None:
    ask(run.client(run.keys.add("ann")), "apple")
    with closing(sqlite3.connect(f"{run.path.as_uri()}?mode=ro", uri=True)) as db:
        (session,) = db.execute("SELECT episode_id FROM session").fetchone()
    ledger = run.server.ledger
    ledger.give_feedback(user=None, session=session, score=1.0).result()
    ledger.settle_session(episode_id=session, words_count=False).result()
    batch = ledger.claim(1, min_version=0).result()
    ledger.commit_step(batch.lease_id, step=1, version=1).result()
    page = viewer.open(f"episode/{session}")
    expect(page.locator(".side")).to_contain_text("trains nothing any more")
    page.get_by_role("button", name="good: the whole session").click()
    expect(page.locator(".side").get_by_role("status")).to_have_text("Stored; it trains nothing any more.")
    expect(page.locator(".side .said").last).to_contain_text("page, ")
    expect(page.locator(".side .said").last).to_contain_text("too late to train")


def test_a_run_that_has_ended_has_no_thumbs_and_says_why(run: Served, viewer: Viewer) -> None:
    ask(run.client(run.keys.add("ann")), "apple")
    (run.path.parent / "summary.json").write_text("{}")
    page = viewer.open("episodes")
    page.locator(".vrow", has_text="ann").get_by_role("link").click()
    expect(page.locator(".side")).to_contain_text("The run does not live, so it takes no feedback.")
    expect(page.locator(".thumb")).to_have_count(0)


def test_sessions_of_all_users_are_listed_and_chosen(stored: Viewer) -> None:
    page = stored.open("episodes")
    expect(page.get_by_role("grid", name="sessions").locator(".vrow")).to_have_count(5)
    expect(page.locator(".vrow", has_text="first")).to_contain_text("codex/1")
    page.get_by_label("User").select_option("bob")
    expect(page.locator(".vrow")).to_have_count(2)
    assert "user=bob" in page.url
    page.get_by_role("button", name="Clear").click()
    page.get_by_label("State").select_option("forgotten")
    expect(page.locator(".vrow")).to_have_count(1)


def test_versions_show_their_gate_and_the_machine_its_users(stored: Viewer) -> None:
    page = stored.open("versions")
    rows = page.get_by_role("region", name="versions that are kept").locator("tbody tr")
    expect(rows.locator(".state")).to_have_text(["refused", "taken back", "served"])
    expect(rows.nth(1)).to_contain_text("0.750 to 0.500")
    expect(rows.nth(0)).to_contain_text("its entropy fell")
    rows.nth(1).get_by_role("button", name="2 sessions").click()
    expect(rows.nth(1).get_by_role("link")).to_have_text(["done", "gone"])
    expect(page.get_by_role("region", name="what was served when")).to_contain_text("taken back from 2")
    expect(page.get_by_role("region", name="who is on which version").locator("tbody tr")).to_contain_text(["bob 1"])
    page = stored.open("machine")
    expect(page.locator(".station h3")).to_have_text(
        ["Users", "Sessions", "Prompts", "Engines", "Rounds", "Feedback", "Learner"]
    )
    expect(page.locator("main")).not_to_contain_text("agent")


@pytest.mark.parametrize("view", ["episodes", "versions", "machine", "episode/done", "why"])
def test_a_phone_shows_it_without_scrolling_sideways_and_to_those_who_do_not_see(phone: Viewer, view: str) -> None:
    page = phone.open(view)
    expect(page.locator("main h1")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    page.add_script_tag(content=AXE.read_text())
    found = page.evaluate("axe.run()")["violations"]
    assert [(one["id"], one["nodes"][0]["html"][:160]) for one in found if one["impact"] in SERIOUS] == []


def test_an_exported_page_has_the_same_views_and_no_thumbs(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "live.html"
    export([make_live_run(tmp_path / "live")], to=file, episodes=10, causes={})
    with looking(browser, "http://nowhere.invalid", []) as reader:
        page = reader.page
        page.goto(f"{file.as_uri()}#/versions", wait_until="commit")
        expect(page.locator(".versions .state")).to_have_text(["refused", "taken back", "served"])
        page.get_by_role("link", name="Sessions").click()
        page.get_by_role("link", name="first").click()
        expect(page.locator(".turn .said")).to_contain_text(["Fine.", "too late to train"])
        expect(page.locator(".side")).to_contain_text("This is an exported file")
        expect(page.locator(".thumb")).to_have_count(0)
