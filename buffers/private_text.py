"""Text that is not to be kept: keys, tokens and passwords of known forms, and what patterns of the user's own find.

Used by `buffers.tasks.logs`, which counts and replaces the known forms, and by `mocked_server.live_sessions`, which stores nothing
of a request that has any.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from buffers.errors import UnderstudyError

_BEGINS = r"(?:\b|(?<=\\[nrtbf]))"
"""A text within JSON within a text has escapes before it."""
_BEGINS_RUN = r"(?:(?<![\w-])|(?<=(?<![\w-])-)|(?<=\\[nrtbf]))"
"""The same of a run of characters, which is looked through once: many beginnings in one would take its length each. A line that is
removed begins with a minus."""
_LINE = r"(?:\\+[nr]|\s)+(?:[A-Z][\w-]+: [^\s\\]*|[A-Za-z0-9+/=]{40,})"
_SECRETS = {
    "private key": (
        "PRIVATE KEY",
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----"
        rf"(?:(?:(?!-----BEGIN).)*?-----END [A-Z ]*PRIVATE KEY-----|(?:(?:{_LINE})+(?:(?:\\+[nr]|\s)[A-Za-z0-9+/=]+)?)?)",  # or cut
    ),
    "Anthropic key": ("sk-ant-", _BEGINS + r"sk-ant-[\w-]{20,}"),
    "OpenAI key": ("sk-", _BEGINS_RUN + r"sk-(?!ant-)(?=[\w-]*\d)(?=[\w-]*[A-Z])[\w-]{20,}"),
    "GitHub token": ("gh", _BEGINS + r"(?:gh[pousr]_\w{36,}|github_pat_\w{22,})"),
    "AWS key": ("IA", _BEGINS + r"(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    "Google key": ("AIza", _BEGINS + r"AIza[\w-]{35}"),
    "Slack token": ("xox", _BEGINS + r"xox[abeoprs]-[\w-]{10,}"),
    "Hugging Face token": ("hf_", _BEGINS + r"hf_[A-Za-z]{30,}"),
    "JSON web token": (".eyJ", _BEGINS_RUN + r"eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}"),
    "password in a URL": ("://", r"(?<=://)[^\s/:@\"']+:[^\s/@\"']+(?=@)"),
}
"""Name -> a part that each has, looking for which is a hundred times as fast, and the form."""
SAID = frozenset({"messages", "input", "contents", "prompt", "tools", "system", "instructions"})
"""Fields of a request in which something is said; in the others numbers and names are settings."""
_FORMS = [(name, hint, re.compile(pattern, re.DOTALL)) for name, (hint, pattern) in _SECRETS.items()]
_ESCAPED = re.compile(r"(?<!\\)\\+(?:u([0-9a-fA-F]{4})|([nrtbf\"/]))")


def without_secrets(text: str, replacement: Callable[[str, str], str]) -> str:
    """`replacement(name, secret)`: what stands in its place."""
    for name, hint, form in _FORMS:
        if hint in text:
            text = form.sub(lambda match, name=name: replacement(name, match[0]), text)  # type: ignore[misc]
    return text


def read_patterns(path: str) -> list[re.Pattern[str]]:
    """Regular expressions, one in a line; empty lines and those that begin with # are none. Raises UnderstudyError."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UnderstudyError(
            f"serve.private_patterns must be a text file of regular expressions, got {path}: {error}"
        ) from error
    patterns = list[re.Pattern[str]]()
    for number, line in enumerate(lines, start=1):
        if line.strip() and not line.startswith("#"):
            try:
                patterns.append(re.compile(line))
                why = "it matches an empty text" if patterns[-1].search("") else ""
            except (re.error, OverflowError, RecursionError) as error:
                why = str(error)
            if why:
                raise UnderstudyError(
                    f"serve.private_patterns must have regular expressions of what is not to be stored, got {line!r:.80} in line "
                    f"{number} of {path}: {why}"
                )
    return patterns


def is_private(value: Any, patterns: Sequence[re.Pattern[str]], *, decode: Callable[[list[int]], str]) -> bool:
    """True if a text of a JSON value, one that is written within it with escapes, or what ids in it say, has a secret or matches a
    pattern. Numbers and names of fields are texts where something is said in them (`SAID`)."""
    for text in _texts(value, decode):
        plain = _ESCAPED.sub(_unescaped, text) if "\\" in text else text
        for each in dict.fromkeys((text, plain)):
            if any(hint in each and form.search(each) for _, hint, form in _FORMS):
                return True
            if any(pattern.search(each) for pattern in patterns):
                return True
    return False


def _unescaped(match: re.Match[str]) -> str:
    return chr(int(match[1], 16)) if match[1] else "\n" if match[2] in "nrtbf" else match[2]


def _texts(value: Any, decode: Callable[[list[int]], str], *, is_said: bool = False) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, each in value.items():
            if is_said:
                yield str(name)
            yield from _texts(each, decode, is_said=is_said or name in SAID)
    elif isinstance(value, list):
        numbers = [_number(each) for each in value]
        if numbers and None not in numbers:
            with suppress(
                IndexError, KeyError, OverflowError, TypeError, ValueError
            ):  # ids that no token has say nothing
                yield decode(numbers)  # type: ignore[arg-type]
        for each in value:
            yield from _texts(each, decode, is_said=is_said)
    elif isinstance(value, str) or (is_said and value is not None):
        yield str(value)


def _number(value: Any) -> int | None:
    """The id that a list of ids has in this place, as it is read: whole floats and digits are ids."""
    digits = str(value).removesuffix(".0") if type(value) in (int, float, str) else ""
    return int(digits) if len(digits) < 10 and digits.isdecimal() else None
