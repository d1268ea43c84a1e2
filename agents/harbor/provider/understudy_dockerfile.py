"""Reads a Dockerfile as far as a room of this machine can obey it.

Used by the provider beside it, in the interpreter of `harbor`; imports the standard library only. Obeyed are WORKDIR, ENV, ARG,
COPY and ADD of the task's own files, and RUN. FROM is not: a room has this machine's programs. What only says how an image is
started or published is left out; everything else is refused by its line, never skipped.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

LEFT_OUT = frozenset(
    {"FROM", "LABEL", "MAINTAINER", "EXPOSE", "CMD", "ENTRYPOINT", "STOPSIGNAL", "HEALTHCHECK", "VOLUME"}
)
VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing to do, in order."""

    kind: str
    """`workdir`, `env`, `copy` or `run`."""
    words: list[str]
    """A folder; name and value; sources and target; the program and its arguments."""


def read_dockerfile(text: str, *, variables: Mapping[str, str]) -> list[Step]:
    """`variables`: those that are there before. Raises ValueError with the line that cannot be obeyed."""
    steps: list[Step] = []
    known = dict(variables)
    bases = 0
    for name, rest in _instructions(text):
        bases += name == "FROM"
        if bases > 1:
            raise ValueError("a Dockerfile of several stages (FROM) is not obeyed here; use a provider that has docker")
        if name not in LEFT_OUT:
            steps += _steps(name, rest, known=known)
    return steps


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\[ \t]*\n", " ", "\n".join(lines)).splitlines():
        if line.strip():
            name, _, rest = line.strip().partition(" ")
            yield name.upper(), rest.strip()


def _steps(name: str, rest: str, *, known: dict[str, str]) -> list[Step]:
    refused = ValueError(f"{name} {rest} is not obeyed here; use a provider that has docker")
    if name == "RUN":
        if rest.startswith("--") or "<<" in rest:
            raise refused
        words = json.loads(rest) if rest.startswith("[") else ["/bin/sh", "-c", rest]
        return [Step(kind="run", words=words)]
    rest = VARIABLE.sub(lambda found: known.get(found[1] or found[3], found[2] or ""), rest)
    if name == "WORKDIR":
        return [Step(kind="workdir", words=[rest])]
    if name in ("ENV", "ARG"):
        pairs = _pairs(rest)
        known.update(pairs)
        return [Step(kind="env", words=[key, value]) for key, value in pairs.items()]
    if name in ("COPY", "ADD"):
        words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
        words = [word for word in words if not word.startswith(("--chmod=", "--chown="))]
        if len(words) < 2 or any(word.startswith("--") or "://" in word for word in words):
            raise refused
        return [Step(kind="copy", words=words)]
    if name == "USER" and rest in ("root", "0"):
        return []
    raise refused


def _pairs(rest: str) -> dict[str, str]:
    """`A=1 B=2`, the old `A 1`, or `A`: empty."""
    first, _, others = rest.partition(" ")
    if "=" not in first:
        return {first: others.strip()}
    return dict(word.split("=", 1) for word in shlex.split(rest))
