"""The browser's half of `benchmarks.page`: what a reader waits for, in Chromium, and pages that are held open.

Times are of the page's own clock, up to the frame that shows the result. The browser is no child of what is measured.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, BrowserContext, CDPSession, Page, sync_playwright

PROGRAMS = ["chromium", "chromium-browser", "google-chrome"]
ARGUMENTS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
PATIENCE_MS = 120_000
TRIES = 5
VIEWS = ["machine", "curves", "episodes"]

# `shown(test)`: the page's time at the frame after `test` first holds; looked at whenever the document changes.
SHOWN = """
window.shown = (test) => new Promise((resolve) => {
  const look = () => {
    if (!test()) return false;
    observer.disconnect();
    requestAnimationFrame(() => setTimeout(() => resolve(performance.now()), 0));
    return true;
  };
  const observer = new MutationObserver(look);
  observer.observe(document, { childList: true, subtree: true, attributes: true, characterData: true });
  look();
});
window.firstRow = window.shown(() => document.querySelector(".vrow .e-id"));
"""
FILTER = """async (state) => {
  const total = () => document.querySelector("[data-total]")?.dataset.total;
  const before = total();
  const choice = document.querySelector("select[name=state]");
  const begun = performance.now();
  choice.value = state;
  choice.dispatchEvent(new Event("change", { bubbles: true }));
  return (await window.shown(() => total() !== before)) - begun;
}"""
OPEN = """async (address) => {
  const begun = performance.now();
  location.hash = address;
  return (await window.shown(() => document.querySelector(".tokens .t"))) - begun;
}"""
LOADED = """() => performance.getEntriesByType("resource").concat(performance.getEntriesByType("navigation"))
  .reduce((sum, one) => sum + one.encodedBodySize, 0)"""


@contextmanager
def chromium() -> Iterator[Browser | None]:
    """A browser; None where there is none."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        print(f"left out: what needs one of {', '.join(PROGRAMS)}: apt-get install chromium", flush=True)
        yield None
        return
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=ARGUMENTS, timeout=PATIENCE_MS)
        yield browser
        browser.close()


def measure(browser: Browser, *, root: str, link: str, run: str, episode: str) -> dict[str, float]:
    """The figures of a run's page; the middle of several tries. `page_kb`: all files and answers until the list is there."""
    context = admitted(browser, link=link)
    first, loaded = [], 0.0
    for _ in range(TRIES):
        page = opened(context, f"{root}/#/episodes?run={run}")
        first.append(float(page.evaluate("window.firstRow")))
        loaded = float(page.evaluate(LOADED))
        page.close()
    page = opened(context, f"{root}/#/episodes?run={run}")
    page.evaluate("window.firstRow")
    filtered = [float(page.evaluate(FILTER, state)) for state in ["failed", "scored"] * TRIES]
    shown = [_opened_ms(page, run=run, episode=episode) for _ in range(TRIES)]
    heap = _heap_mb(context.new_cdp_session(page))
    context.close()
    figures = {
        "first_paint_ms": statistics.median(first), "filter_ms": statistics.median(filtered),
        "open_episode_ms": statistics.median(shown), "heap_mb": heap, "page_kb": loaded / 1000,
    }  # fmt: skip
    return {name: round(value, 1) for name, value in figures.items()}


def admitted(browser: Browser, *, link: str) -> BrowserContext:
    """A window that the one-time link let in."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE_MS)
    context.add_init_script(SHOWN)
    page = context.new_page()
    page.goto(link, wait_until="commit")
    page.close()
    return context


def opened(context: BrowserContext, address: str) -> Page:
    """A new page at an address."""
    page = context.new_page()
    page.goto(address, wait_until="commit")
    return page


def _opened_ms(page: Page, *, run: str, episode: str) -> float:
    """From a click on an episode to its tokens."""
    page.evaluate("address => { location.hash = address; }", f"#/episodes?run={run}")
    page.wait_for_selector(".vrow .e-id")
    return float(page.evaluate(OPEN, f"#/episode/{episode}?run={run}&part=tokens"))


def _heap_mb(session: CDPSession) -> float:
    session.send("HeapProfiler.enable")
    session.send("HeapProfiler.collectGarbage")
    session.send("Performance.enable")
    found: dict[str, Any] = session.send("Performance.getMetrics")
    return next(float(one["value"]) for one in found["metrics"] if one["name"] == "JSHeapUsedSize") / 1e6


def views(context: BrowserContext, *, root: str, run: str, number: int) -> list[Page]:
    """That many pages of a run, one a view."""
    pages = [opened(context, f"{root}/#/{VIEWS[n % len(VIEWS)]}?run={run}") for n in range(number)]
    for page in pages:
        page.wait_for_selector("main h1")
    return pages
