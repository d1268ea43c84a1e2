"""YAML of anybody, read in the time that its length allows: configurations, tool and loop files, the folders of others' runs.

What stands behind an alias counts each time that it is named, so that walking a value takes no longer than reading it. Refused are
also what holds itself, deep nesting, long whole numbers and tags (`!!set`): an error is one line, and nothing else is raised.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

MAX_CHARACTERS = 1 << 17
"""The most of a file, and of what it stands for."""
MAX_DEPTH = 50
MAX_DIGITS = 40


class YamlError(ValueError):
    """A text that is no YAML, or more than a configuration needs; the message is one line."""


def read_yaml(path: Path) -> Any:
    """The value in a file. Raises YamlError, and OSError."""
    with path.open("rb") as source:
        data = source.read(MAX_CHARACTERS + 1)
    try:
        return parse_yaml(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise YamlError(f"it must be UTF-8: {error}") from None


def parse_yaml(text: str) -> Any:
    """The value that a text is. Raises YamlError."""
    if len(text) > MAX_CHARACTERS:
        raise YamlError(f"it must have at most {MAX_CHARACTERS} characters, got more")
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # the latter two: days and numbers that are none
        raise YamlError(" ".join(str(error).split())) from None


class _Loader(yaml.SafeLoader):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._characters = 0
        """The sum over all values so far; each has one more than its text."""
        self._sizes: dict[str, int] = {}
        """Name -> characters of the value with it."""
        self._outer: list[tuple[str | None, int]] = []
        """Name of each list and mapping that is being read, and what was counted before it."""

    def get_event(self) -> Any:
        """The next event, which the composer builds a value of."""
        event: Any = super().get_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in [name for name, _ in self._outer]:
                raise _refused(event, f"it must not hold itself, got *{event.anchor} within &{event.anchor}")
            self._characters += self._sizes.get(str(event.anchor), 0)
            if self._characters > MAX_CHARACTERS:
                raise _refused(
                    event, f"it must stand for at most {MAX_CHARACTERS} characters, got more, by its aliases"
                )
        elif isinstance(event, yaml.CollectionEndEvent):
            self._named(*self._outer.pop())
        elif isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent):
            before = self._characters
            self._characters += 1
            if event.tag not in (None, "!"):
                raise _refused(event, f"it must have no tags, got {event.tag}; put text into quotes")
            if isinstance(event, yaml.ScalarEvent):
                self._characters += len(event.value)
                self._named(event.anchor, before)
            else:
                self._outer.append((event.anchor, before))
        if len(self._outer) > MAX_DEPTH:
            raise _refused(event, f"it must be nested at most {MAX_DEPTH} deep")
        return event

    def _named(self, name: str | None, before: int) -> None:
        if name is not None:
            self._sizes[name] = self._characters - before

    def construct_yaml_int(self, node: Any) -> int:
        if len(node.value) > MAX_DIGITS:
            raise _refused(node, f"a whole number must have at most {MAX_DIGITS} digits, got {len(node.value)}")
        return int(super().construct_yaml_int(node))


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def _refused(place: Any, why: str) -> YamlError:
    return YamlError(f"{why} (line {place.start_mark.line + 1})")
