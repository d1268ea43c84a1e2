"""What tools and environments said between a row's answers, by role, found in its token ids.

Called by `learner.training.trainer` (ECHO, hints). A template writes a message of a role between an opening and an end, which are
found by rendering one; so no record of messages is needed. Invariant: what is found stands between two tokens that the row trains,
and is content: neither sampled nor written by the template. What another token border hides (a token that spans content and
frame) is left out.
"""

from __future__ import annotations

import re
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError

from buffers.records import Int32, UInt8

ROLES = ("tool", "user")
"""Tools come first: many templates write a tool's result into a user's turn."""
ANSWER, CONTENT = "answer-6f1d0c2a", "content-6f1d0c2a"


class Saying(NamedTuple):
    """Tokens start..stop-1 of a row."""

    role: str
    start: int
    stop: int


class Frame(NamedTuple):
    """The texts that a template writes around a message, and between two that it joins; without the spaces at their ends."""

    opening: str
    joint: str
    end: str


class Sayings:
    """Raises ValueError where `roles` has one that the template cannot show, or does not tell apart."""

    def __init__(self, tokenizer: Any, *, roles: tuple[str, ...] = ()) -> None:
        self._tokenizer = tokenizer
        self._pieces: dict[int, str] = {}
        self._frames = {role: frame for role in ROLES if (frame := _frame(tokenizer, role)) is not None}
        for role in roles:
            same = role == "tool" and self._frames.get("tool") == self._frames.get("user")
            if role not in self._frames or same:
                remedy = "set learner.echo.user, which then means both" if same else f"leave learner.echo.{role} out"
                raise ValueError(
                    f"learner.echo.{role} needs a chat template that shows messages of that role as such, which the model's does "
                    f"not; {remedy}"
                )
        self._pattern = re.compile(
            "|".join(
                rf"{re.escape(frame.opening)}\s*(?P<{role}>.*?)\s*{re.escape(frame.end)}"
                for role, frame in self._frames.items()
                if role == "user" or frame != self._frames.get("user")
            )
            or "(?!)",  # a template without roles: nothing is found
            re.DOTALL,
        )

    def of(self, ids: Int32, *, mask: UInt8) -> list[Saying]:
        """Those of a row, in order."""
        trained = np.flatnonzero(mask)
        gaps = [(left + 1, right) for left, right in pairwise(trained) if right > left + 1]
        return [saying for left, right in gaps for saying in self._between(ids[left:right], first=int(left))]

    def text(self, ids: Int32, *, mask: UInt8) -> str:
        """What was said, a line for each message."""
        return "\n".join(self._tokenizer.decode(ids[start:stop].tolist()) for _, start, stop in self.of(ids, mask=mask))

    def _between(self, ids: Int32, *, first: int) -> list[Saying]:
        pieces = [self._piece(token) for token in ids.tolist()]
        borders = np.cumsum([0, *map(len, pieces)])
        found = []
        for match in self._pattern.finditer("".join(pieces)):
            role = str(match.lastgroup)
            start, frame = match.start(role), self._frames[role]
            for content in (
                re.split(rf"(\s*{re.escape(frame.joint)}\s*)", match[role]) if frame.joint else [match[role]]
            ):
                left = int(np.searchsorted(borders, start))
                right = int(np.searchsorted(borders, start + len(content), side="right")) - 1
                if left < right and content.strip() != (frame.joint or None):
                    found.append(Saying(role, first + left, first + right))
                start += len(content)
        return found

    def _piece(self, token: int) -> str:
        if token not in self._pieces:
            self._pieces[token] = str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))
        return self._pieces[token]


def _frame(tokenizer: Any, role: str) -> Frame | None:
    """None: the template has no such role."""
    user, call = {"role": "user", "content": "-"}, {"name": "tool", "arguments": {}}
    called = [{"id": f"call{number:05d}", "type": "function", "function": call} for number in range(2)]
    for calls in ({}, {"tool_calls": called}):
        answer = {"role": "assistant", "content": ANSWER, **calls}
        said = [{"role": role, "content": CONTENT, "tool_call_id": each["id"], "name": "tool"} for each in called]
        try:
            before, one = (_text(tokenizer, [user, answer, *said[:count]]).rpartition(ANSWER)[2] for count in (0, 1))
        except (TemplateError, TypeError, ValueError, KeyError):
            continue
        closed = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, one)))
        opening, _, end = one[closed:].partition(CONTENT)
        end = end.strip() or generation_prompt(tokenizer).strip()
        try:
            joint = _text(tokenizer, [user, answer, *said]).split(CONTENT)[1]
        except (TemplateError, TypeError, ValueError, KeyError, IndexError):
            joint = ""
        joint = joint.strip()
        return Frame(opening.strip(), "" if joint.startswith(end) else joint, end) if opening.strip() else None
    return None


def _text(tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False))


def generation_prompt(tokenizer: Any) -> str:
    """The text that the template puts before an assistant's turn, such as `<|im_start|>assistant\\n`."""
    opening = [{"role": "user", "content": "?"}]
    without = tokenizer.apply_chat_template(opening, tokenize=False)
    return str(tokenizer.apply_chat_template(opening, tokenize=False, add_generation_prompt=True)[len(without) :])
