"""A real browser, the page of a prepared run, and what each test may not do: write errors, ask another host."""

from __future__ import annotations

import asyncio
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from learner.page.serve import serving
from tests.learner.page.browser.prepared_run import PreparedRun, prepare, prepare_curves
from tests.support.patience import PATIENCE_S

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = ["chromium", "chromium-browser", "google-chrome"]
ARGUMENTS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 400, "height": 850}
PATIENCE_MS = 60_000


# Of this folder, not of the session: while it is there its event loop runs in this thread, and no asyncio test can.
@pytest.fixture(scope="package")
def browser() -> Iterator[sync_api.Browser]:
    program = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if program is None:
        pytest.skip(f"needs one of {', '.join(CHROMIUM)}: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=program, args=ARGUMENTS, timeout=4 * PATIENCE_MS)
        yield launched
        launched.close()


@dataclass(kw_only=True)
class Pages:
    """The page's server; each of its links opens once."""

    port: int
    links: list[str]
    root: str = field(init=False)

    def __post_init__(self) -> None:
        self.root = f"http://127.0.0.1:{self.port}"

    def link(self) -> str:
        return f"{self.root}/open/{self.links[-1]}"


@contextmanager
def served(folders: list[Path]) -> Iterator[Pages]:
    """The page of these runs, on a thread of its own."""
    listening = socket.create_server(("127.0.0.1", 0))
    pages = Pages(port=listening.getsockname()[1], links=["first"])
    loop = asyncio.new_event_loop()
    started, stop = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with serving(listening, folders, link="first", new_link=pages.links.append):
            started.set()
            await stop.wait()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        finally:
            loop.close()

    thread = threading.Thread(target=run, name="page")
    thread.start()
    try:
        assert started.wait(PATIENCE_S), "the page's server did not start"
        yield pages
    finally:
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)
        thread.join()
        listening.close()


@pytest.fixture(scope="package")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedRun:
    folder = tmp_path_factory.mktemp("runs")
    prepare_curves(folder / "other")
    return prepare(folder / "made")


@pytest.fixture(scope="package")
def pages(prepared: PreparedRun) -> Iterator[Pages]:
    with served([prepared.folder, prepared.folder.parent / "other"]) as found:
        yield found


@pytest.fixture(scope="package")
def cookies(browser: sync_api.Browser, pages: Pages) -> list[dict[str, object]]:
    """What the one-time link gives."""
    context = browser.new_context()
    opened = context.new_page()
    opened.goto(pages.link(), wait_until="commit", timeout=PATIENCE_MS)
    found = list(context.cookies())
    context.close()
    return found


class Viewer:
    """A reader's window on the page, who notes what went wrong in it."""

    def __init__(self, context: sync_api.BrowserContext, root: str) -> None:
        context.set_default_timeout(PATIENCE_MS)
        self.page = context.new_page()
        self.root = root
        self.requests: list[str] = []
        self.problems: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on(
            "console",
            lambda message: message.type in ("error", "warning") and self.problems.append(message.text),
        )

    def open(self, view: str) -> sync_api.Page:
        """Go to a view: `episodes?state=failed`."""
        self.page.goto(f"{self.root}/#/{view}", wait_until="commit")
        self.page.wait_for_selector("main")
        return self.page

    def wait_for_requests(self, part: str, count: int) -> None:
        """Until `part` was asked for so often: the page has figures before it opens its stream."""
        until = time.monotonic() + PATIENCE_MS / 1000
        while (asked := sum(part in url for url in self.requests)) < count and time.monotonic() < until:
            self.page.wait_for_timeout(50)
        assert asked == count, f"{part} was asked for {asked} times: {self.requests}"

    def foreign(self) -> list[str]:
        """Requests to another host."""
        home = urlsplit(self.root).netloc
        return [
            url
            for url in self.requests
            if urlsplit(url).scheme in ("http", "https", "ws") and urlsplit(url).netloc != home
        ]


@contextmanager
def looking(
    browser: sync_api.Browser, root: str, cookies: list[dict[str, object]], *, passing: str = "", **how: object
) -> Iterator[Viewer]:
    """A window, which must have no errors and ask no other host when it is closed. `passing`: an error that is expected."""
    context = browser.new_context(viewport=how.pop("viewport", WIDE), **how)
    context.add_cookies(cookies)
    viewer = Viewer(context, root)
    try:
        yield viewer
    except BaseException as error:
        error.add_note(
            f"at {viewer.page.url}; in the console: {viewer.problems}; shown: {viewer.page.inner_text('body')[:2000]}"
        )
        raise
    finally:
        context.close()
    assert viewer.foreign() == []
    assert [problem for problem in viewer.problems if not passing or passing not in problem] == []


@pytest.fixture
def viewer(browser: sync_api.Browser, pages: Pages, cookies: list[dict[str, object]]) -> Iterator[Viewer]:
    with looking(browser, pages.root, cookies) as found:
        yield found
