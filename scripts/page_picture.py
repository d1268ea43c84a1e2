"""Draws a picture of the page of a run: `python scripts/page_picture.py runs/demo docs/page.png [--view machine] [--dark]`.

Needs the development packages and a Chromium. The page is served by a process of its own, as `understudy page` does.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

PROGRAMS = ["chromium", "chromium-browser", "google-chrome"]
ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
DRAWN = {"machine": ".station", "curves": ".curve .uplot", "episodes": ".vrow .e-id", "why": ".finding"}
PATIENCE_MS = 120_000


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
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        print(f"needs one of {', '.join(PROGRAMS)}: apt-get install chromium", file=sys.stderr)
        return 3
    command = [sys.executable, "-u", "-m", "learner.page", str(asked.run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            draw(asked, link=printed_link(server), program=program)
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


def draw(asked: argparse.Namespace, *, link: str, program: str) -> None:
    """Open the view and write the picture."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=ARGUMENTS, timeout=PATIENCE_MS)
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
        browser.close()


if __name__ == "__main__":
    sys.exit(main())
