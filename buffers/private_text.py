"""Text that is not to be kept: keys, tokens and passwords of known forms, and what patterns of the user's own find.

Used by `buffers.tasks.logs`, which counts and replaces the known forms, and by `mocked_server.live_sessions`, which stores nothing
of a request that has any.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from buffers.errors import UnderstudyError

SECRETS = {
    "private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----",
    "Anthropic key": r"\bsk-ant-[\w-]{20,}",
    "OpenAI key": r"\bsk-(?!ant-)(?=[\w-]*\d)(?=[\w-]*[A-Z])[\w-]{20,}",
    "GitHub token": r"\b(?:gh[pousr]_\w{36,}|github_pat_\w{22,})",
    "AWS key": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "Google key": r"\bAIza[\w-]{35}",
    "Slack token": r"\bxox[abeoprs]-[\w-]{10,}",
    "Hugging Face token": r"\bhf_[A-Za-z]{30,}",
    "JSON web token": r"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}",
    "password in a URL": r"(?<=://)[^\s/:@\"']+:[^\s/@\"']+(?=@)",
}
_HINTS = (
    "sk-", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "AKIA", "ASIA", "AIza", "xox", "hf_", "eyJ", "PRIVATE KEY",
    "://",
)  # fmt: skip
"""Each secret has one of them; looking for them is a hundred times as fast."""
_SECRET = re.compile("|".join(f"(?P<s{n}>{pattern})" for n, pattern in enumerate(SECRETS.values())), re.DOTALL)


def without_secrets(text: str, replacement: Callable[[str, str], str]) -> str:
    """`replacement(name, secret)`: what stands in its place."""

    def replaced(match: re.Match[str]) -> str:
        return replacement(list(SECRETS)[int(str(match.lastgroup)[1:])], match[0])

    return _SECRET.sub(replaced, text) if any(hint in text for hint in _HINTS) else text


def read_patterns(path: str) -> list[re.Pattern[str]]:
    """Regular expressions, one in a line; empty lines and those that begin with # are none. Raises UnderstudyError."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
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
    """True if a text of a JSON value, or what ids in it say, has a secret or matches a pattern."""
    return any(_has_secret(text) or any(each.search(text) for each in patterns) for text in _texts(value, decode))


def _has_secret(text: str) -> bool:
    return any(hint in text for hint in _HINTS) and _SECRET.search(text) is not None


def _texts(value: Any, decode: Callable[[list[int]], str]) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list) and value and all(type(each) is int and 0 <= each < 1 << 31 for each in value):
        yield decode(value)
    elif isinstance(value, list | Mapping):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(each, decode)
