"""Rules of `python -m tests.mutants`: which changes are drawn, and what is said of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import sampled_run
from tests.mutants.operators import mutants_of
from tests.mutants.sampled_run import (
    ROOT,
    Refused,
    all_mutants,
    check_explained,
    drawn,
    read_explained,
    run_sample,
)
from tests.mutants.watched_modules import WATCHED

TOY = '''"""A module."""

LIMIT = 3


def is_large(number: int = 1) -> bool:
    """Larger than 3."""
    if number < 0:
        raise ValueError(f"{number - 1}")
    return number > LIMIT


def total(first: list[int], *, twice: bool) -> int:
    assert first
    return sum(first) * 2 if twice else sum(first)
'''
TEST = """from toy import is_large


def test_four_is_large_and_three_is_not():
    assert is_large(4) and not is_large(3)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A project of two functions, of which one is tested."""
    root = tmp_path / "project"
    root.mkdir()
    (root / "toy.py").write_text(TOY)
    (root / "test_toy.py").write_text(TEST)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    return root


def changes(source: str) -> set[tuple[str, str]]:
    return {(mutant.before, mutant.after) for mutant in mutants_of("m.py", source)}


def test_every_kind_of_change_is_drawn_and_words_for_people_are_not() -> None:
    found = {(mutant.function, mutant.kind, mutant.after) for mutant in mutants_of("toy.py", TOY)}
    assert found == {
        ("", "constant", "LIMIT = 4"),
        ("", "constant", "LIMIT = (2)"),
        ("is_large", "constant", "def is_large(number: int = 2) -> bool:"),
        ("is_large", "constant", "def is_large(number: int = (0)) -> bool:"),
        ("is_large", "condition", "if not (number < 0):"),
        ("is_large", "comparison", "if (number <= 0):"),
        ("is_large", "constant", "if number < 1:"),
        ("is_large", "constant", "if number < (-1):"),
        ("is_large", "left out", "pass"),
        ("is_large", "returned", "return None"),
        ("is_large", "comparison", "return (number >= LIMIT)"),
        ("total", "returned", "return None"),
        ("total", "condition", "return sum(first) * 2 if not (twice) else sum(first)"),
        ("total", "arithmetic", "return (sum(first) / 2) if twice else sum(first)"),
        ("total", "constant", "return sum(first) * 3 if twice else sum(first)"),
        ("total", "constant", "return sum(first) * (1) if twice else sum(first)"),
        ("total", "other function", "return max(first) * 2 if twice else sum(first)"),
        ("total", "other function", "return sum(first) * 2 if twice else max(first)"),
    }


@pytest.mark.parametrize(
    ("source", "changed"),
    [
        ("def f(a, b):\n    return g(a, b, c=1)", {"return g(b, a, c=1)", "return g(a, b)"}),
        ("def f(x):\n    x.y += 1", {"x.y -= 1", "pass", "x.y += 2"}),
        ("def f(x):\n    x.y = not x.z", {"pass", "x.y = (x.z)"}),
        ("def f(x):\n    return -x and True", {"return (-x or True)", "return (x) and True", "return -x and False"}),
        ("def f(x):\n    for y in x:\n        continue", {"pass"}),
        ("async def f(x):\n    await x.g()", {"pass"}),
        ("class A:\n    def f(self, x):\n        return [y for y in x if y]", {"return [y for y in x if not (y)]"}),
    ],
)
def test_statements_and_expressions_are_changed_where_they_stand(source: str, changed: set[str]) -> None:
    assert changed <= {after for _, after in changes(source)}


def test_a_query_is_changed_word_by_word() -> None:
    query = '"SELECT max(a) FROM t "\n        "WHERE b IS NULL AND c < ? ORDER BY a LIMIT 1"'
    source = f"def f(db):\n    db.execute(\n        {query}\n    )"
    found = {after for _, after in changes(source)} - {"pass"}
    assert found == {
        '"SELECT min(a) FROM t "',
        '"WHERE b IS NOT NULL AND c < ? ORDER BY a LIMIT 1"',
        '"WHERE b IS NULL OR c < ? ORDER BY a LIMIT 1"',
        '"WHERE b IS NULL AND c <= ? ORDER BY a LIMIT 1"',
        '"WHERE b IS NULL AND c < ? ORDER BY a DESC LIMIT 1"',
        '"WHERE b IS NULL AND c < ? ORDER BY a"',
    }


@pytest.mark.parametrize(
    "source",
    [
        "import a\nfrom b import c",
        'class A:\n    """Words."""\n    x: int\n    """More."""',
        "@dataclass(frozen=True, slots=True)\nclass A:\n    x: list[int]",
        "class P(Protocol):\n    def f(self, x: int = 3) -> bool: ...",
        "def f():\n    logger.warning('%d', 3)",
        "def f(x):\n    assert x > 3",
        "if __name__ == '__main__':\n    f(3)",
        "def f(x):\n    '3'",
    ],
)
def test_what_no_test_could_notice_is_not_drawn(source: str) -> None:
    assert changes(source) == set()


@pytest.mark.seconds
def test_a_mutant_that_no_test_notices_survives_with_its_diff(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    explained = {("toy.py", "is_large", "if number < 0:", "if (number <= 0):"): "no test asks for it in this toy"}
    report = run_sample(tree, {"toy.py": ("test_toy.py",)}, explained=explained, seed=0, sample=99, options=())
    verdicts = {(one.mutant.function, one.mutant.after): one.verdict for one in report.outcomes}
    assert len(verdicts) == report.count("noticed", "survived", "explained") == 18
    assert {after for (_, after), verdict in verdicts.items() if verdict == "noticed"} == {
        "LIMIT = 4", "LIMIT = (2)", "if not (number < 0):", "return None", "return (number >= LIMIT)",
    }  # fmt: skip
    assert verdicts["is_large", "if (number <= 0):"] == "explained"
    assert verdicts["total", "return None"] == "survived"
    assert (tree / "toy.py").read_text() == TOY
    told = capsys.readouterr().out
    assert "-    if number < 0:\n+    if number < 1:" in told and "LIMIT = 4" not in told
    figures = json.loads(report.as_json(tree))
    assert (figures["sampled"], figures["noticed"], figures["survived"], figures["explained"]) == (18, 5, 12, 1)
    assert report.line().startswith("seed 0: sampled 18, noticed 5 (0 by the limit, 0 broke")


@pytest.mark.seconds
def test_a_mutant_that_never_ends_is_noticed_by_the_limit(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "toy.py").write_text("def f(number):\n    while number > 2:\n        number -= 1\n")
    (tree / "test_toy.py").write_text("from toy import f\n\n\ndef test_it_ends():\n    f(4)\n")
    monkeypatch.setattr(sampled_run, "SLACK_S", 1.0)
    report = run_sample(tree, {"toy.py": ("test_toy.py",)}, explained={}, seed=0, sample=99, options=())
    limits = [one.mutant.after for one in report.outcomes if one.verdict == "limit"]
    assert limits == ["pass", "number += 1", "number -= (0)"]
    assert report.count("limit") == 3 and "(3 by the limit" in report.line()


@pytest.mark.seconds
def test_nothing_is_said_when_the_tests_fail_without_a_mutant(tree: Path) -> None:
    (tree / "test_toy.py").write_text("def test_fails():\n    raise AssertionError('red')\n")
    with pytest.raises(Refused, match=r"must pass without a mutant, got status 1 of test_toy\.py[\s\S]*red"):
        run_sample(tree, {"toy.py": ("test_toy.py",)}, explained={}, seed=0, sample=1, options=())


def test_a_seed_draws_the_same_mutants_each_time() -> None:
    mutants = mutants_of("toy.py", TOY)
    first, same, other = (drawn(mutants, seed=seed, sample=6) for seed in (1, 1, 2))
    assert first == same and first != other and len({mutant.key for mutant in first}) == 6
    assert drawn(mutants, seed=0, sample=99) == mutants


def test_an_explanation_names_a_mutant_that_is_there_and_has_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "explained.toml"
    entry = '[[mutant]]\nmodule = "toy.py"\nfunction = ""\nbefore = "LIMIT = 3"\nafter = "LIMIT = {}"\nreason = "{}"\n'
    path.write_text(entry.format(4, "three and four are alike"))
    mutants = mutants_of("toy.py", TOY)
    check_explained(read_explained(path), mutants)
    path.write_text(entry.format(5, "three and five are alike"))
    with pytest.raises(Refused, match=r"got 1 others; remove them:\n  toy\.py, : LIMIT = 3  ->  LIMIT = 5"):
        check_explained(read_explained(path), mutants)
    path.write_text(entry.format(4, ""))
    with pytest.raises(Refused, match="each mutant needs a reason"):
        read_explained(path)


@pytest.mark.seconds
def test_the_watched_modules_and_their_tests_are_there() -> None:
    for module, tests in WATCHED.items():
        assert (ROOT / module).is_file() and tests and all((ROOT / test).is_file() for test in tests), module
    mutants = all_mutants(ROOT, WATCHED)
    assert len(mutants) > 2000
    check_explained(read_explained(ROOT / "tests" / "mutants" / "explained.toml"), mutants)


@pytest.mark.seconds
def test_the_command_line_counts_the_mutants_of_a_module() -> None:
    command = [sys.executable, "-m", "tests.mutants", "--list", "--module", "training_rows"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout.split()[1:] == ["buffers/training_rows.py"]
