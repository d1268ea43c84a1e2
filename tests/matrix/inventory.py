"""What must have a row: found in the schema and in the documents, not listed by hand."""

from __future__ import annotations

import ast
import re
import types
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from configs.keys import all_keys, section_of
from configs.schema import Config

ROOT = Path(__file__).parents[2]
NULL, SET = "null", "set"
"""The two kinds of value of a key that may be left open."""
NAMES = {str: "text", int: "integer", float: "number", dict: "mapping", list: "list"}
COLUMNS = ("task_id", "data_source", "prompt", "reward_model.ground_truth", "agent_name")
"""Those that docs/agents.md or the loader names; fields of `extra_info` are found."""
DOCS = ("README.md", "docs/*.md", "configs/*.yaml", "configs/tools/*.yaml", "configs/loops/*.yaml")
EXTRA_SOURCES = ("agents/**/*.py", "env_adapters/**/*.py", "buffers/**/*.py")


@cache
def annotations() -> dict[str, Any]:
    """Every key with dots -> its type."""
    return dict(_annotations(Config, prefix=""))


def _annotations(model: type[BaseModel], *, prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, field in model.model_fields.items():
        inner = section_of(field)
        if inner is not None:
            found += _annotations(inner, prefix=f"{prefix}{name}.")
        else:
            found.append((prefix + name, field.annotation))
    return found


def values_of(annotation: Any) -> list[Any]:
    """The values of an enumerated type; for one that is open, `null` and `set`; for one of several types, their names."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return values_of(inner[0])
    if origin is Literal:
        return list(inner)
    if annotation is bool:
        return [False, True]
    if origin is list:
        return values_of(inner[0])
    if origin in (Union, types.UnionType):
        kinds = [each for each in inner if each is not type(None)]
        if len(kinds) < len(inner):
            return [NULL, *dict.fromkeys(value for each in kinds for value in (values_of(each) or [SET]))]
        return [value for each in kinds for value in (values_of(each) or [_name_of(each)])]
    return []


def _name_of(annotation: Any) -> str:
    """A type's own name, without its rules."""
    plain = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    return "mapping" if isinstance(plain, type) and issubclass(plain, BaseModel) else NAMES[get_origin(plain) or plain]


def enumerated() -> list[tuple[str, Any]]:
    """(key, value) of every enumerated key."""
    return [(key, value) for key, annotation in annotations().items() for value in values_of(annotation)]


def other_keys() -> list[str]:
    """The keys that are not enumerated."""
    several = {key for key, _ in enumerated()}
    return [key for key in all_keys() if key not in several]


def columns() -> list[str]:
    """The columns of a task file that a document or a loader names."""
    texts = [path.read_text(encoding="utf-8") for pattern in (*DOCS, *EXTRA_SOURCES) for path in ROOT.glob(pattern)]
    named = {name for text in texts for name in re.findall(r"(?<!\w)extra_info\.(\w+)", text)}
    read = {name for text in texts for name in re.findall(r"""extra_info(?:\.get\(|\[)["'](\w+)["']""", text)}
    extra = (named | read | hidden_columns()) - {"get", "items", "reset", "index-free"}
    return [*COLUMNS, *sorted(f"extra_info.{name}" for name in extra)]


def hidden_columns() -> set[str]:
    """The fields of `extra_info` that agents do not see."""
    from buffers import records

    return set(getattr(records, "HIDDEN", ()))


def metrics() -> list[str]:
    """The metrics of docs/metrics.md."""
    from tests.project.test_docs import METRIC_GROUPS, text

    groups = f"{METRIC_GROUPS}|restarts"
    return list(
        dict.fromkeys(
            word
            for line in text("docs/metrics.md").splitlines()
            if line.startswith("| `")
            for word in re.findall(rf"`((?:{groups})/[\w/]+)`", line.split("|")[1])
        )
    )


def promises() -> list[str]:
    """The names of docs/promises.md's rows."""
    return re.findall(r"^\| (P\d+) \|", (ROOT / "docs/promises.md").read_text(encoding="utf-8"), flags=re.M)


def has_test(node: str) -> bool:
    """Whether `path::name` is a test; `path` alone, a file with tests."""
    path, _, name = node.partition("::")
    if not (file := ROOT / path).is_file():
        return False
    functions = {
        each.name
        for each in ast.walk(ast.parse(file.read_text()))
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    return name in functions and name.startswith("test_")
