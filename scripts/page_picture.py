"""Draws a picture of the page of a run: `python scripts/page_picture.py runs/demo docs/page.png [--view machine] [--dark]`.

Needs the development packages and a Chromium. The page is served by a process of its own, as `understudy page` does.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Browser

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.page import PATIENCE_MS, chromium

DRAWN = {"machine": ".station", "curves": ".curve .uplot", "episodes": ".vrow .e-id", "why": ".finding"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("file", type=Path, help="the PNG that is written")
    parser.add_argument(
        "--view", default="curves", help="as in the page's address: curves, machine, episode/7-0-0, ..."
    )
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--height", type=int, default=800)
    asked = parser.parse_args()
    command = [sys.executable, "-u", "-m", "learner.page", str(asked.run)]
    with chromium() as browser, subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            if browser is None:
                return 3
            draw(asked, browser, link=printed_link(server))
        finally:
            server.terminate()
    return 0


def printed_link(server: subprocess.Popen[str]) -> str:
    """The one-time link that the server prints at its start."""
    assert server.stdout is not None, "it is a pipe"
    for line in server.stdout:
        if found := re.search(r"http://\S+/open/\S+", line):
            return found[0]
    raise SystemExit("the page did not start; see above")


def draw(asked: argparse.Namespace, browser: Browser, *, link: str) -> None:
    """Open the view and write the picture."""
    page = browser.new_page(
        viewport={"width": 1280, "height": asked.height}, color_scheme="dark" if asked.dark else "light"
    )
    page.set_default_timeout(PATIENCE_MS)
    page.goto(link, wait_until="commit")
    page.wait_for_selector("main")
    page.evaluate("address => { location.hash = address; }", f"#/{asked.view}")
    page.wait_for_selector(DRAWN.get(asked.view.split("?")[0], "main h1"))
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    page.screenshot(path=str(asked.file))


if __name__ == "__main__":
    sys.exit(main())
