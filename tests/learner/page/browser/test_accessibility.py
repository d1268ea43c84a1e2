"""No view has a serious finding of axe-core, at both widths and in both themes; none is wider than its window."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.learner.page.browser.conftest import NARROW, WIDE, Pages, looking
from tests.learner.page.browser.prepared_run import PreparedRun

pytestmark = pytest.mark.slow

AXE = Path(__file__).with_name("axe") / "axe.min.js"
SERIOUS = ("serious", "critical")
READY = {
    "machine": ".panel .uplot", "curves": ".curve .uplot", "episodes": ".vrow .e-id", "untrained": ".reason", "why": ".view h1",
    "step/7": ".step-parts table", "group/7": "table", "episode": ".turn", "episode&part=tokens": ".tokens .t",
}  # fmt: skip


def address(view: str, prepared: PreparedRun) -> str:
    name, _, more = view.partition("&")
    place = f"episode/{prepared.branched}" if name == "episode" else name
    return f"{place}?run=made&{more}"


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["wide", "narrow"])
def test_no_view_has_a_serious_finding(
    browser: Browser,
    pages: Pages,
    cookies: list[dict[str, object]],
    prepared: PreparedRun,
    theme: str,
    viewport: dict[str, int],
) -> None:
    found, wider = [], []
    with looking(browser, pages.root, cookies, viewport=viewport, color_scheme=theme, bypass_csp=True) as viewer:
        for view, ready in READY.items():
            page = viewer.open(address(view, prepared))
            page.wait_for_selector(ready)
            if not page.evaluate("'axe' in window"):
                page.add_script_tag(content=AXE.read_text())
            for one in page.evaluate("axe.run()")["violations"]:
                if one["impact"] in SERIOUS:
                    found.append(f"{view}: {one['id']}: {one['nodes'][0]['html'][:160]} ({len(one['nodes'])})")
            if page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"):
                wider.append(view)
    assert found == []
    assert wider == []
