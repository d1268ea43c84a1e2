"""Rules of an exported page: one file with all that it shows, no secrets, and nothing that an agent wrote can act in it."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from learner.page import serve
from learner.page.export import ExportError, Secrets, export, modules_of, page_of
from tests.learner.page.page_parts import HOSTILE, KEY, make_run

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<link rel="icon" href="static/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="static/styles/base.css">
</head>
<body>
<div id="app"></div>
<script type="module" src="static/app.js"></script>
</body>
</html>
"""


@pytest.fixture
def static(tmp_path: Path) -> Path:
    folder = tmp_path / "static"
    for path, text in {
        "index.html": PAGE,
        "styles/base.css": "body { color: red }",
        "app.js": 'import { a } from "./parts/a.js";\nimport"./lib.js";\nconsole.log(a)',
        "parts/a.js": 'import lib from "../lib.js";\nexport const a = lib;',
        "lib.js": "export default 1;",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


class Scripts(HTMLParser):
    """The scripts and policies of a page, as a browser finds them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.tags: list[str] = []
        self.policy = ""
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._inside = tag == "script"
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        if dict(attrs).get("http-equiv") == "Content-Security-Policy":
            self.policy = dict(attrs)["content"] or ""

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            attributes, text = self.scripts[-1]
            self.scripts[-1] = attributes, text + data


def exported(run: Path, to: Path, **more: Any) -> tuple[str, dict[str, Any]]:
    assert "1 run(s)" in export([run], to=to, episodes=more.get("episodes", 24), causes={})
    text = to.read_text()
    data = next(body for attributes, body in Scripts(text).scripts if attributes.get("id") == "snapshot")
    return text, json.loads(data)


def test_modules_are_inlined_by_name_and_each_is_there_once(static):
    modules = modules_of(static)
    assert list(modules) == ["page/app.js", "page/lib.js", "page/parts/a.js"]
    texts = {name: base64.b64decode(url.partition(",")[2]).decode() for name, url in modules.items()}
    assert texts["page/app.js"].startswith('import { a } from "page/parts/a.js";\nimport"page/lib.js";')
    assert texts["page/parts/a.js"].startswith('import lib from "page/lib.js"')
    (static / "app.js").write_text('import "./none.js"')
    with pytest.raises(ExportError, match=r"app\.js must import modules of the page, got \./none\.js"):
        modules_of(static)


def test_the_file_runs_its_own_scripts_and_no_others(static):
    text = page_of({"text": HOSTILE + "<!--<script>&"}, static=static)
    page = Scripts(text)
    assert [attributes.get("type") for attributes, _ in page.scripts] == ["importmap", "application/json", "module"]
    assert json.loads(page.scripts[1][1]) == {"text": HOSTILE + "<!--<script>&"}
    assert "img" not in page.tags and "link" not in page.tags and "src=" not in "".join(str(a) for a, _ in page.scripts)
    for _, script in (page.scripts[0], page.scripts[2]):
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in page.policy
    assert "default-src 'none'" in page.policy and "unsafe" not in page.policy and "http" not in page.policy
    assert text.index("Content-Security-Policy") < text.index("importmap") and "body { color: red }" in text


def test_an_export_holds_figures_and_sampled_episodes_without_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_TOKEN", "very-secret-value")
    run = make_run(tmp_path)
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config + "extra: ['says very-secret-value here']\n")
    text, data = exported(run, tmp_path / "page.html")
    found = data["runs"]["seen"]
    assert data["format"] == 1 and data["default"] == "seen" and "reward/mean" in data["names"]
    assert found["metrics"]["columns"]["reward/mean"] == [None, 0.25, 0.75] and found["scores"]["step"] == [1, 2]
    assert len(found["episodes"]) == 8 and found["episodes"][0]["step"] == 2, "those that ended; the newest step first"
    assert [one["breaks"] for one in found["episodes"] if one["episode_id"] == "1-0-0"] == [["history_edited"]]
    assert found["details"]["1-0-0"]["episode"]["score"] == 0.75
    assert found["conversations"]["1-1-0/0"]["turns"][2]["parts"][0]["text"] == HOSTILE
    assert base64.b64decode(found["tokens"]["1-0-0/0"]).startswith(b"USPT") and found["overviews"]["1-0-0/0"]
    assert found["group_details"]["3"]["group"]["reason"] == "failed: deadline: 3 s"
    assert {group["group_id"] for group in found["groups"]} == {1, 2, 3, 4, 5}
    assert KEY not in text and KEY[-32:] not in text and "very-secret-value" not in text and "sk-abc" not in text
    assert found["conversations"]["4-0-0/0"]["turns"][2]["parts"][0]["text"] == "the key (left out)"
    assert "4-0-0/0" not in found["tokens"] and str(tmp_path) not in text
    assert "<img" not in re.sub(r"data:[^\"]*", "", text) and HOSTILE not in html.unescape(text)


def test_fewer_episodes_and_no_ledger_are_exported_too(tmp_path):
    run = make_run(tmp_path)
    assert len(exported(run, tmp_path / "page.html", episodes=3)[1]["runs"]["seen"]["episodes"]) == 3
    (run / "ledger.sqlite").unlink()
    found = exported(run, tmp_path / "page.html")[1]["runs"]["seen"]
    assert found["episodes"] == [] and found["index"]["ledger"]["available"] is False
    assert found["metrics"]["step"] == [0, 1, 2]


def test_what_cannot_be_written_is_named(tmp_path):
    run = make_run(tmp_path)
    with pytest.raises(ExportError, match="--export must be a file that can be written"):
        export([run], to=tmp_path / "none" / "page.html", episodes=1, causes={})
    with pytest.raises(ExportError, match="--episodes must be >= 0, got -1"):
        export([run], to=tmp_path / "page.html", episodes=-1, causes={})


@pytest.mark.parametrize(
    "secret",
    [KEY, "us-admin-" + "a" * 32, "us-worker.a-" + "0" * 32, "sk-" + "x" * 20, "hf_" + "A" * 30, "ghp_" + "a" * 36,
     "AKIA" + "A" * 16, "Bearer abcdefghijklmnop", "-----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY-----"],
)  # fmt: skip
def test_what_looks_like_a_key_is_left_out(secret):
    hidden = Secrets({})
    assert (
        hidden.are_in(f"say {secret}!") and secret not in hidden.without({secret: [f"say {secret}!"]})["(left out)"][0]
    )
    assert not hidden.are_in("us-east-1 sk-learn a bearer of news")


def test_every_module_of_the_page_can_be_inlined():
    modules = modules_of(serve.STATIC)
    assert "page/app.js" in modules
    for name, url in modules.items():
        text = base64.b64decode(url.partition(",")[2]).decode()
        assert not re.search(r"\bimport\s*\(", text), f"{name} imports while it runs, which an exported file cannot"
        assert not re.search(r"""(?:from|import)\s*['"]\.""", text), f"{name} imports by a path"
