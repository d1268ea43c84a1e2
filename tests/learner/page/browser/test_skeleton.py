"""What the page loads: its own files only, not too much, all of them named beforehand; without scripts that the policy forbids."""

from __future__ import annotations

import re
from pathlib import Path

import learner.page

STATIC = Path(learner.page.__file__).with_name("static")
MOST_BYTES = 256_000
IMPORT = re.compile(r'(?:from|import)\s*"([^"]+)"')


def modules() -> dict[str, str]:
    return {str(file.relative_to(STATIC)): file.read_text() for file in sorted(STATIC.rglob("*.js"))}


def test_every_module_is_named_beforehand() -> None:
    named = set(re.findall(r'(?:href|src)="static/([^"]+\.js)"', (STATIC / "index.html").read_text()))
    assert named == set(modules())


def test_every_module_is_reached_from_the_first_by_a_relative_import() -> None:
    reached, open_ = set(), ["app.js"]
    texts = modules()
    while open_:
        name = open_.pop()
        reached.add(name)
        for found in IMPORT.findall(texts[name]):
            assert found.startswith(("./", "../")), f"{name} imports {found}"
            target = str((STATIC / name).parent.joinpath(found).resolve().relative_to(STATIC.resolve()))
            assert target in texts, f"{name} imports {found}, which is not there"
            if target not in reached:
                open_.append(target)
    assert reached == set(texts)


def test_all_files_together_are_small() -> None:
    loaded = [file for file in STATIC.rglob("*") if file.suffix in (".js", ".css", ".html", ".svg")]
    assert sum(file.stat().st_size for file in loaded) <= MOST_BYTES


def test_nothing_sets_markup_from_text() -> None:
    own = {name: text for name, text in modules().items() if not name.startswith("vendor/")}
    forbidden = re.compile(
        r"innerHTML\s*=|outerHTML|insertAdjacentHTML|document\.write|dangerouslySetInnerHTML|\beval\(|new Function|\bimport\("
    )
    assert [name for name, text in own.items() if forbidden.search(text)] == []


def test_files_are_small_enough_to_read() -> None:
    own = {name: text for name, text in modules().items() if not name.startswith("vendor/")}
    assert [name for name, text in own.items() if len(text.splitlines()) > 300] == []
    assert [name for name, text in own.items() if not text.startswith("//")] == []


def test_every_vendored_file_has_its_licence() -> None:
    table = (STATIC / "vendor" / "VENDORED.md").read_text()
    for file in (STATIC / "vendor").iterdir():
        if file.suffix in (".js", ".css"):
            (row,) = [line for line in table.splitlines() if line.startswith(f"| `{file.name}`")]
            licence = re.findall(r"`(LICENSE\.\w+)`", row)
            assert len(licence) == 1
            assert (STATIC / "vendor" / licence[0]).is_file()
