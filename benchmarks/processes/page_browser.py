"""The browser's half of `benchmarks.page`: what a reader waits for, in Chromium.

`python -m benchmarks.processes.page_browser measure --root URL --link URL --run NAME --episode ID` prints the figures as JSON;
`... hold --root URL --link URL --run NAME --pages 3` opens and closes pages as each line of its standard input says (`open`,
`close`), with a line of answer, until it ends. A process of its own,
so that the browser is no child of what is measured. Times are of the page's own clock, up to the frame that shows the result.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BrowserFigures:
    """What `benchmarks.page` reports; the middle of several tries. `page_kb`: all files and answers until the list is there."""

    first_paint_ms: float
    filter_ms: float
    open_episode_ms: float
    heap_mb: float
    page_kb: float


def measure(browser: Browser, *, root: str, link: str, run: str, episode: str) -> BrowserFigures:
    """The figures of a run's page."""
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
    middle = statistics.median
    return BrowserFigures(
        first_paint_ms=round(middle(first), 1), filter_ms=round(middle(filtered), 1), open_episode_ms=round(middle(shown), 1),
        heap_mb=round(heap, 1), page_kb=round(loaded / 1000, 1),
    )  # fmt: skip


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


def hold(browser: Browser, *, root: str, link: str, run: str, pages: int) -> None:
    """Open that many pages of a run, one a view, or close them, as it is told."""
    context = admitted(browser, link=link)
    print("ready", flush=True)
    held: list[Page] = []
    for order in sys.stdin:
        for page in held:
            page.close()
        held = []
        if order.strip() == "open":
            held = [opened(context, f"{root}/#/{VIEWS[number % len(VIEWS)]}?run={run}") for number in range(pages)]
            for page in held:
                page.wait_for_selector("main h1")
        print(order.strip(), flush=True)
    context.close()


def main(words: Sequence[str] | None = None) -> int:
    """Exit code 3: there is no Chromium."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.processes.page_browser")
    parser.add_argument("task", choices=["measure", "hold"])
    parser.add_argument("--root", required=True)
    parser.add_argument("--link", required=True, help="a one-time link that is still good")
    parser.add_argument("--run", required=True)
    parser.add_argument("--episode", default="", help="with measure: the long episode")
    parser.add_argument("--pages", type=int, default=3, help="with hold")
    asked = parser.parse_args(words)
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        print(f"needs one of {', '.join(PROGRAMS)}: apt-get install chromium", file=sys.stderr)
        return 3
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=ARGUMENTS, timeout=PATIENCE_MS)
        if asked.task == "hold":
            hold(browser, root=asked.root, link=asked.link, run=asked.run, pages=asked.pages)
        else:
            found = measure(browser, root=asked.root, link=asked.link, run=asked.run, episode=asked.episode)
            print(json.dumps(asdict(found)))
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
