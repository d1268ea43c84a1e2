"""The countable rules of the project, held by reading the source: one-way imports, owners of heavy packages, sizes.

Everything is read with `ast`, so an import counts wherever it stands: at the top, in a function, or under TYPE_CHECKING.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

from scripts import size
from scripts.imports import MAY_IMPORT, OWNERS, PARTS_MEET, STANDS_ALONE

ROOT = Path(__file__).parents[2]

OURS = [*MAY_IMPORT, "benchmarks", "scripts", "tests"]
TYPES_ONLY = {("mocked_server/vllm/serving.py", "fastapi")}
"""May be imported under TYPE_CHECKING, and only there."""

NO_PACKAGES = (STANDS_ALONE, "agents/harbor/provider/", "tests/outside/clients/", "tests/outside/environments/")
"""Programs that are started by their path, with the interpreters of others."""
MOST_IMPORTS_OF_HELP = 150
"""Modules of the standard library and ours; 110 today, in 0.1 s."""
BORDERS = {
    ("mocked_server/generation.py", "serve"),
    ("buffers/wire/service.py", "_settle"),
    ("buffers/remote/actor.py", "_answer"),
    ("mocked_server/vllm/process/worker_extension.py", "_tried_way"),
    ("mocked_server/vllm/engine.py", "_load_published"),
    ("learner/reporting/tracker.py", "attempt"),
    ("learner/session.py", "supervise"),
    ("learner/checkpoints/training_state.py", "read_metadata"),
    ("learner/model/weight_files.py", "_bin"),
}
"""Functions that catch all that one request causes, and log it with its id; that Ray or an engine's core raises, which have no
class for it; that the code of a model raises, of which there are hundreds, or a tracker's, or a pickle that may hold anything; or
that ends a run, which leaves its figures first and then shows the traceback."""
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "misc", "common"}
CATCH_ALL = {"Exception", "BaseException"}
UNSAFE_CALLS = {"eval", "exec", "__import__", "pickle.load", "pickle.loads"}
UNPICKLER = "learner/checkpoints/training_state.py"
"""Its `Unpickler` makes objects of named classes only."""
UNSAFE_MODULES = ("pickle", "marshal", "shelve", "dill", "cloudpickle")


@dataclass(frozen=True)
class Import:
    """One imported module, as a dotted name, and whether only a type checker sees it."""

    module: str
    line: int
    types_only: bool

    def is_of(self, package: str) -> bool:
        return self.module == package or self.module.startswith(package + ".")


def modules(*folders: str) -> dict[str, Path]:
    """Path from the root, as text -> file."""
    files = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path for path in files}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def imports(path: Path) -> list[Import]:
    return list(imports_in(tree(path)))


def imports_in(node: ast.AST, *, types_only: bool = False) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, node.lineno, types_only)
    elif isinstance(node, ast.ImportFrom):
        yield Import(node.module or "", node.lineno, types_only)
        for alias in node.names:  # `from torch import distributed` imports torch.distributed
            yield Import(f"{node.module}.{alias.name}", node.lineno, types_only)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        if node.args and isinstance(node.args[0], ast.Constant):
            yield Import(str(node.args[0].value), node.lineno, types_only)
    elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.distributed"):
        yield Import("torch.distributed", node.lineno, types_only)  # `import torch` makes it reachable
    guarded = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
    for child in ast.iter_child_nodes(node):
        inside = guarded and isinstance(node, ast.If) and child in node.body
        yield from imports_in(child, types_only=types_only or inside)


PRODUCT = modules(*MAY_IMPORT)
EVERYTHING = modules(*OURS)


def test_an_import_counts_wherever_it_stands():
    source = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from fastapi import FastAPI
else:
    import here
def later():
    import ray
    from torch import distributed
    importlib.import_module("vllm.envs")
    torch.distributed.barrier()
"""
    found = {(i.module, i.types_only) for i in imports_in(ast.parse(source))}
    assert {("fastapi", True), ("here", False), ("ray", False), ("vllm.envs", False)} <= found
    assert {i.line for i in imports_in(ast.parse(source)) if i.is_of("torch.distributed")} == {9, 11}


def test_what_is_named_here_exists():
    for folder in MAY_IMPORT:
        assert modules(folder), f"{folder}/ must hold modules"
    for pattern in {pattern for owners in OWNERS.values() for pattern in owners} | PARTS_MEET:
        assert any(fnmatch(name, pattern) for name in PRODUCT), f"{pattern} is named here and names no file"


def test_imports_go_one_way():
    wrong = []
    for name, path in PRODUCT.items():
        own = name.split("/")[0]
        allowed = MAY_IMPORT[own] | {own}
        if name in PARTS_MEET:
            allowed = set(MAY_IMPORT)
        elif name.startswith(STANDS_ALONE):
            allowed = set()
        for found in imports(path):
            if any(found.is_of(ours) and ours not in allowed for ours in OURS):
                wrong.append(f"{name}:{found.line} imports {found.module}; it may import {sorted(allowed)} of ours")
    assert not wrong, "\n".join(wrong)


def test_a_heavy_package_stays_with_its_owners():
    wrong = []
    for package, owners in OWNERS.items():
        for name, path in PRODUCT.items():
            for found in imports(path):
                allowed = any(fnmatch(name, pattern) for pattern in owners)
                allowed = allowed or (found.types_only and (name, package) in TYPES_ONLY)
                if found.is_of(package) and not allowed:
                    wrong.append(f"{name}:{found.line} imports {package}, owned by {', '.join(sorted(owners))}")
    assert not wrong, "\n".join(wrong)


def test_modules_do_not_import_each_other_in_a_circle():
    names = {name.removesuffix(".py").replace("/", "."): path for name, path in PRODUCT.items()}
    edges = {name: {i.module for i in imports(path) if i.module in names} for name, path in names.items()}
    done: set[str] = set()
    while len(done) < len(edges):
        free = {name for name in edges.keys() - done if edges[name] <= done}
        assert free, f"a circle, or above one: {sorted(edges.keys() - done)}"
        done |= free


def circles(edges: Iterable[tuple[str, str]]) -> list[str]:
    """Of (importing module, imported module): the folders in which modules and subfolders, each taken as one, import each other
    in a circle, and which these are."""
    inside: dict[str, dict[str, set[str]]] = {}
    for importer, imported in edges:
        one, other = importer.split("."), imported.split(".")
        depth = next(number for number, names in enumerate(zip(one, other)) if names[0] != names[1])
        neighbours = inside.setdefault("/".join(one[:depth]), {})
        neighbours.setdefault(one[depth], set()).add(other[depth])
        neighbours.setdefault(other[depth], set())
    found = []
    for folder, neighbours in sorted(inside.items()):
        done: set[str] = set()
        while free := {name for name in neighbours.keys() - done if neighbours[name] <= done}:
            done |= free
        if left := sorted(neighbours.keys() - done):
            found.append(f"{folder or 'the root'}: a circle, or above one: {', '.join(left)}")
    return found


def test_a_circle_of_folders_is_found():
    there = [("a.x.one", "a.y.two"), ("a.y.three", "a.top"), ("a.x.one", "b.z")]
    assert circles(there) == []
    assert circles([*there, ("a.y.two", "a.x.four")]) == ["a: a circle, or above one: x, y"]
    assert circles([("a.x.one", "a.x.two"), ("a.x.two", "a.x.one")]) == ["a/x: a circle, or above one: one, two"]


def test_folders_do_not_import_each_other_in_a_circle():
    """A `__main__.py` is how its folder is started, not a part of it."""
    names = {name.removesuffix(".py").replace("/", ".") for name in PRODUCT}
    edges = {
        (importer, found.module)
        for name, path in PRODUCT.items()
        if (importer := name.removesuffix(".py").replace("/", ".")) and path.name != "__main__.py"
        for found in imports(path)
        if found.module in names and found.module != importer
    }
    assert len(edges) > 100
    assert circles(edges) == []


def test_every_folder_of_modules_is_a_package_that_says_what_it_holds():
    """That it is a docstring and nothing else: `test_a_module_opens_with_what_it_is`."""
    missing = sorted(
        {
            path.parent.relative_to(ROOT).as_posix()
            for name, path in (PRODUCT | modules("tests")).items()
            if not name.startswith(NO_PACKAGES) and not (path.parent / "__init__.py").is_file()
        }
    )
    assert not missing, f"no __init__.py with a docstring in {missing}"


def test_no_import_is_relative():
    wrong = [
        f"{name}:{node.lineno}"
        for name, path in EVERYTHING.items()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ImportFrom) and node.level > 0
    ]
    assert not wrong, wrong


def test_a_module_opens_with_what_it_is():
    assert not [name for name, path in EVERYTHING.items() if len(ast.get_docstring(tree(path)) or "") < 20]
    inits = {name: path for name, path in EVERYTHING.items() if path.name == "__init__.py"}
    assert len(inits) >= len(MAY_IMPORT)
    assert not [name for name, path in inits.items() if len(tree(path).body) != 1], "a docstring and nothing else"


def test_names_say_something():
    assert not [name for name in EVERYTHING if VAGUE_NAMES & set(name.removesuffix(".py").split("/"))]


def test_the_sum_of_lines_has_a_ceiling():
    """Below it by little, so that what a change deletes is not filled up again unseen."""
    for folders, most in ((size.PRODUCT, size.MOST), (size.PRODUCT + size.BESIDE, size.MOST_WITH_BENCHMARKS)):
        lines = sum(size.lines_of(*folders).values())
        assert most - 1000 <= lines <= most, f"{lines} lines in {', '.join(folders)}; see MOST in scripts/size.py"


def test_what_is_caught_has_a_name():
    wrong = []
    for name, path in PRODUCT.items():
        borders = [node for node in ast.walk(tree(path)) if (name, getattr(node, "name", "")) in BORDERS]
        inside = {id(each) for border in borders for each in ast.walk(border)}
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ExceptHandler) and id(node) not in inside:
                caught = {"Exception"} if node.type is None else {ast.unparse(part) for part in ast.walk(node.type)}
                if caught & CATCH_ALL:
                    wrong.append(f"{name}:{node.lineno}")
    assert not wrong, wrong


WALL_CLOCKS = ("time.time", "time.localtime", "time.gmtime", "datetime.now", "datetime.utcnow", "datetime.datetime.now")
FOR_PEOPLE = {
    "buffers/ledger/cli.py": "ages that are printed",
    "learner/live.py": "when a key was made",
    "learner/live_versions.py": "when a version was made and served",
    "mocked_server/live_keys.py": "when a key was made",
    "learner/page/run_view.py": "ages that are shown, and whether a run of another machine writes now",
    "learner/page/export.py": "when a page was exported",
    "learner/reporting/run_record.py": "when a line was written",
    "learner/startup/run_folder.py": "the name of a folder that is moved aside",
}


def test_no_clock_that_is_set_decides_anything():
    """Leases, time-outs and durations are of `time.monotonic`: a wall clock jumps by a day, or back by an hour."""
    reading = {
        name
        for name, path in PRODUCT.items()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in WALL_CLOCKS
    }
    assert reading == set(FOR_PEOPLE), reading ^ set(FOR_PEOPLE)


def test_nothing_is_unpickled_or_evaluated():
    """What arrives over the network or lies in a file is data; it never becomes code."""
    wrong = []
    for name, path in PRODUCT.items():
        unsafe = [i for i in imports(path) if any(map(i.is_of, UNSAFE_MODULES))]
        wrong += [f"{name}:{i.line} imports {i.module}" for i in unsafe if (name, i.module) != (UNPICKLER, "pickle")]
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                safe = "weights_only=True" in [ast.unparse(k) for k in node.keywords]
                if called in UNSAFE_CALLS or (called == "torch.load" and not safe):
                    wrong.append(f"{name}:{node.lineno} calls {called}")
    assert not wrong, "\n".join(wrong)


def test_code_of_a_model_is_never_asked_about():
    """Where nothing is said, transformers asks whoever sits at the terminal whether to run the folder's code."""
    silent = [
        f"{name}:{node.lineno}"
        for name, path in PRODUCT.items()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("from_pretrained", "from_config")
        and ast.unparse(node.func.value).rpartition(".")[2].startswith("Auto")
        and not {None, "trust_remote_code"} & {keyword.arg for keyword in node.keywords}
    ]
    assert silent == []


@pytest.mark.parametrize("module", ["learner.run", "learner.cli"])
def test_help_answers_at_once(module):
    """By what it imports, not by time, which is the machine's."""
    command = [sys.executable, "-X", "importtime", "-m", module, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    imported = re.findall(r"^import time: +\d+ \| +\d+ \| +([\w.]+)$", done.stderr, flags=re.M)
    assert "usage:" in done.stdout and "learner" in imported
    pythons = {"sitecustomize", "_distutils_hack", "org"}  # `copy` looks for Jython's
    ours_and_pythons = {"learner", "configs", "buffers", *pythons, *sys.stdlib_module_names}
    assert {name for name in imported if name.split(".")[0] not in ours_and_pythons} == set()
    assert len(imported) <= MOST_IMPORTS_OF_HELP, imported


PREPOSITIONS = {
    "Of",
    "In",
    "As",
    "For",
    "By",
    "With",
    "Without",
    "Where",
    "When",
    "After",
    "Until",
    "Before",
    "Between",
    "Who",
}
"""Docstrings that begin so are neither sentences nor noun phrases."""
RIDDLES = re.compile(r"\b(?:whoever|somebody|that there (?:is|are)|is told|are told|goes on|nor does)\b", re.IGNORECASE)
"""Name who it is (the caller, the agent, another process) and what happens (continues, resumes, receives)."""


def docstrings(path: Path) -> Iterator[ast.Constant]:
    for node in ast.walk(tree(path)):
        body = getattr(node, "body", [])
        for said in body if isinstance(body, list) else []:
            if (
                isinstance(said, ast.Expr)
                and isinstance(said.value, ast.Constant)
                and isinstance(said.value.value, str)
            ):
                yield said.value


def test_docstrings_begin_with_a_sentence_or_a_noun_phrase_in_the_words_of_the_field():
    wrong = []
    for name, path in PRODUCT.items():
        for said in docstrings(path):
            first = str(said.value).split()[:1]
            if first and first[0].strip(",:") in PREPOSITIONS:
                wrong.append(f"{name}:{said.lineno} begins with {first[0]!r}")
        for number, line in enumerate(path.read_text().split("\n"), 1):
            wrong += [f"{name}:{number} {found!r}" for found in RIDDLES.findall(line)]
    assert not wrong, "\n".join(wrong)
