"""Every key of the configuration with its default, kind and meaning: `python -m configs.keys [PREFIX]`.

`--markdown` prints docs/configuration.md. `configs.load` asks here which keys exist, and which one was meant. Invariant: all of it
is read from `configs.schema`; nothing is written a second time. It imports pydantic and the schema only, so it answers at once.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import textwrap
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from configs.schema import Config

WIDTH = 100
NAMES: dict[Any, str] = {
    Any: "any value",
    str: "text",
    int: "integer",
    float: "number",
    bool: "true or false",
    type(None): "null",
}
BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "pattern": "like", "min_length": "of length >="}
"""Attribute of a rule in pydantic's metadata -> how it is written."""
PAGE = """\
# Configuration

Every key of a run, as `understudy keys` prints it (`understudy keys learner.kl`: a part of it).
`python -m configs.keys --markdown` wrote this page. A YAML file holds sections, and may start with `extends: other.yaml`, a file in
its folder or a shipped one (`extends: smollm2`): then it holds only what differs.
On the command line a key is given with dots, its value in YAML: `learner.kl.coef=0.01`.
Nothing after the equals sign makes a value null (none), or empty: `agents.loops=`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key that can be set."""

    name: str
    """The key with dots: `learner.kl.coef`."""
    default: Any
    kind: str
    """What values it takes, in words."""
    meaning: str
    empty: Any
    """The value of `key=`; `...` when it cannot be empty."""

    @property
    def section(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def default_text(self) -> str:
        """The default as YAML, on one line."""
        return json.dumps(self.default, ensure_ascii=False)


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The section that this field holds, if it holds one."""
    inner = field.annotation
    return inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None


@cache
def all_keys() -> dict[str, Key]:
    """Every key by its dotted name, in the schema's order."""
    return {key.name: key for key in _keys_of(Config, prefix="")}


def _keys_of(model: type[BaseModel], *, prefix: str) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        if (inner := section_of(field)) is not None:
            yield from _keys_of(inner, prefix=f"{prefix}{name}.")
            continue
        annotation: Any = field.annotation
        yield Key(
            name=prefix + name,
            default=field.get_default(call_default_factory=True, validated_data={}),
            kind=kind_of(annotation, rules=field.metadata),
            meaning=" ".join((field.description or "").split()),
            empty=_empty(annotation),
        )


@cache
def all_sections() -> tuple[str, ...]:
    """Every section by its dotted name, outer ones first."""
    found = {".".join(name.split(".")[:depth]) for name in all_keys() for depth in range(1, name.count(".") + 1)}
    return tuple(sorted(found, key=lambda name: (name.count("."), name)))


def keys_below(prefix: str) -> list[Key]:
    """The keys of a section, or the one key of this name; all for an empty prefix."""
    return [
        key
        for name, key in all_keys().items()
        if not prefix or name == prefix or name.startswith(prefix.rstrip(".") + ".")
    ]


def nearest_key(name: str) -> str:
    """`did you mean learner.lr?`, or what there is when no key or section is near.

    Its last part decides what is near, its whole among those: two keys of one section are alike in their first letters only.
    """
    known = [*all_keys(), *all_sections()]
    lasts = {each.rpartition(".")[2] for each in known}
    last = name.rpartition(".")[2][:200]
    near = [last] if last in lasts else difflib.get_close_matches(last, lasts, n=3, cutoff=0.6)
    if near:
        meant = [each for each in known if each.rpartition(".")[2] in near]
        return f"did you mean {difflib.get_close_matches(name[:200], meant, n=1, cutoff=0.0)[0]}?"
    section = next((each for each in reversed(all_sections()) if name.startswith(each + ".")), "")
    inside = [each for each in known if each.rpartition(".")[0] == section]
    return f"there are: {', '.join(inside)}"


def kind_of(annotation: Any, *, rules: Iterable[Any] = ()) -> str:
    """A type with its rules in words: `integer >= 1`, `number > 0 or null`."""
    origin, inner = get_origin(annotation), get_args(annotation)
    bounds = "".join(f" {rule}" for rule in _bounds(rules))
    if origin is Annotated:
        return kind_of(inner[0], rules=inner[1:])
    if origin is Literal:
        *others, last = map(str, inner)
        return f"{', '.join(others)} or {last}" if others else last
    if origin in (Union, types.UnionType):
        return " or ".join(kind_of(each) for each in inner)
    if origin is list:
        return f"list of {kind_of(inner[0])}"
    if origin is dict:
        return f"mapping of {kind_of(inner[0])} to {kind_of(inner[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        fields = annotation.model_fields.items()
        return f"{{{', '.join(f'{name}: {kind_of(field.annotation, rules=[field])}' for name, field in fields)}}}"
    return NAMES[annotation] + bounds


def _bounds(rules: Iterable[Any]) -> Iterator[str]:
    for rule in rules:
        if isinstance(rule, FieldInfo):
            yield from _bounds(rule.metadata)
        for attribute, sign in BOUNDS.items():
            if not isinstance(rule, FieldInfo) and (value := getattr(rule, attribute, None)) is not None:
                yield f"{sign} {value:g}" if isinstance(value, float) else f"{sign} {value}"


def _empty(annotation: Any) -> Any:
    """None where that is a value, else an empty text, list or mapping; `...` where there is none of these."""
    choices = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    kinds = [get_origin(each) or each for each in choices]
    for kind, empty in ((type(None), None), (str, ""), (list, []), (dict, {})):
        if kind in kinds:
            return empty
    return ...


def describe(prefix: str = "") -> str:
    """The keys below a prefix for a terminal. Raises ValueError for a prefix that names none."""
    if not (keys := keys_below(prefix)):
        raise ValueError(f"{prefix} is not a configuration key or section; {nearest_key(prefix)}")
    wrap = textwrap.TextWrapper(width=WIDTH, initial_indent="    ", subsequent_indent="    ", break_long_words=False)
    return "\n".join(f"{key.name} = {key.default_text}    ({key.kind})\n{wrap.fill(key.meaning)}" for key in keys)


def markdown() -> str:
    """docs/configuration.md: a table for each top-level section."""
    lines = [PAGE]
    for section in Config.model_fields:
        lines += [f"## {section}", "", "| key | default | kind | meaning |", "|---|---|---|---|"]
        for key in keys_below(section):
            cells = (f"`{key.name}`", f"`{key.default_text}`", key.kind, key.meaning)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None, *, program: str = "python -m configs.keys") -> int:
    """Exit codes: 0 printed, 2 no such key."""
    parser = argparse.ArgumentParser(prog=program, description="Print the keys of the configuration.")
    parser.add_argument(
        "prefix", nargs="?", default="", metavar="PREFIX", help="a section or a key, such as learner.kl"
    )
    parser.add_argument("--markdown", action="store_true", help="print docs/configuration.md")
    arguments = parser.parse_args(argv)
    try:
        print(markdown() if arguments.markdown else describe(arguments.prefix) + "\n", end="")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
