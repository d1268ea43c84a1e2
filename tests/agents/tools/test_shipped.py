"""The shipped tools that need no process: GSM8K's reward, the calculator, the file search."""

from __future__ import annotations

import os

import pytest

from agents.tools.shipped.calculator import calculator
from agents.tools.shipped.file_search import FileSearchTool
from agents.tools.shipped.gsm8k import Gsm8kTool
from agents.tools.toolbox import Toolbox
from buffers.errors import ToolError


async def test_gsm8k_rewards_an_answer_that_is_better_than_the_one_before():
    tool = Gsm8kTool({})
    kwargs = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "1,800"}}}
    async with Toolbox([tool]).open(tools_kwargs=kwargs) as tools:
        assert await tools.rewards() == {"calc_gsm8k_reward": 0.0}, "no answer yet"
        steps = []
        for answer, score in [("17", 0.0), ("1800", 1.0), ("$1,800.", 1.0), ("none", 0.0), ("1800", 1.0)]:
            outcome = await tools.call("calc_gsm8k_reward", {"answer": answer})
            assert outcome.text == f"Current parsed answer={answer!r} reward={score}"
            assert await tools.rewards() == {"calc_gsm8k_reward": score}
            steps.append(outcome.reward)
        assert steps == [-0.05, 0.0, -0.05, -0.05, 0.0]
        assert "1800" not in str(tools.schemas)


async def test_gsm8k_without_a_truth_gives_a_reason():
    with pytest.raises(ToolError, match="tool calc_gsm8k_reward must know the truth, got none"):
        async with Toolbox([Gsm8kTool({})]).open(tools_kwargs={"calc_gsm8k_reward": {}}):
            pass


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("(16 - 3 - 4) * 2", "18"),
        ("0.1 + 0.2", "0.3"),
        ("2^10", "1024"),
        ("10 / 4", "2.5"),
        ("9 / 3", "3"),
        ("-7 // 2", "-4"),
        ("sqrt(2) * sqrt(2)", "2"),
        ("round(2.567, 2)", "2.57"),
        ("1 ** 10 ** 9", "1"),
        ("(-1) ** 99999999999", "-1"),
        ("max(1, 2, 3) + gcd(12, 18)", "9"),
        ("2 ** 4000 - 2 ** 4000 + 1", "1"),
        ("factorial(20)", "2432902008176640000"),
    ],
)
def test_the_calculator_computes(expression, result):
    assert calculator(expression) == result


@pytest.mark.parametrize(
    ("expression", "rule"),
    [
        ("9 ** 9 ** 9", "at most 4096 bits"),
        ("2 ** 4000 * 2 ** 4000", "at most 4096 bits"),
        ("factorial(10 ** 9)", "factorial takes 0 to 400"),
        ("comb(10 ** 9, 10 ** 8)", "comb takes numbers up to 4096"),
        ("1e999", "too large"),
        ("1 / 0", "division by zero"),
        ("(-8) ** 0.5", "not a real number"),
        ("1" * 501, "at most 500 characters"),
        ("__import__('os').system('true')", "is not known here"),
        ("(1).__class__", "is not known here"),
        ("'a' * 9", "is not known here"),
        ("[1][0]", "is not known here"),
        ("True", "is not known here"),
        ("x + 1", "'x' is not known here"),
        ("max()", "max: "),
        ("(((", "is not an arithmetic expression"),
    ],
)
def test_the_calculator_refuses_what_is_no_arithmetic_or_too_much(expression, rule):
    with pytest.raises((ValueError, ArithmeticError), match=rule):
        calculator(expression)


@pytest.fixture
def library(tmp_path):
    root = tmp_path / "library"
    (root / "deep").mkdir(parents=True)
    (root / "a.md").write_text("first\nThe Needle is here\n")
    (root / "deep" / "b.txt").write_text("needle " + "x" * 500)
    (root / "binary.md").write_bytes(b"needle\0needle")
    (tmp_path / "secret.md").write_text("needle of somebody else")
    (root / "link.md").symlink_to("../secret.md")
    (root / "up").symlink_to("..")
    os.mkfifo(root / "pipe.md")
    return root


async def test_file_search_finds_lines_and_never_leaves_its_folder(library):
    async with Toolbox([FileSearchTool({"root": str(library)})]).open() as tools:
        found = (await tools.call("file_search", {"query": "needle"})).text
        assert found.splitlines() == ["a.md:2: The Needle is here", "deep/b.txt:1: needle " + "x" * 193]
        assert (await tools.call("file_search", {"query": "NEEDLE", "pattern": "*.md"})).text == found.splitlines()[0]
        assert (await tools.call("file_search", {"query": "somebody else"})).text == "(nothing found)"
        assert (await tools.call("file_search", {"query": "needle", "pattern": "../*"})).text == "(nothing found)"


async def test_file_search_shows_so_many_lines_and_ends_at_its_deadline(library):
    (library / "many.txt").write_text("needle\n" * 1000)
    async with Toolbox([FileSearchTool({"root": str(library), "max_hits": 3})]).open() as tools:
        lines = (await tools.call("file_search", {"query": "needle", "pattern": "many.txt"})).text.splitlines()
        assert len(lines) == 4 and lines[3].startswith("(more than 3 lines")
    async with Toolbox([FileSearchTool({"root": str(library), "deadline_s": 0})]).open() as tools:
        assert (await tools.call("file_search", {"query": "nowhere"})).text == "(ended after 0 s)"


def test_file_search_needs_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ToolError, match=r"config.root of file_search must be a folder, got None"):
        FileSearchTool({})
    with pytest.raises(ToolError, match=r"must not leave .*, got \.\.; give an absolute path"):
        FileSearchTool({"root": ".."})
