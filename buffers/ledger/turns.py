"""A branch as a conversation: its tokens as turns with roles, and each turn as text, thoughts, tool calls and tool results.

Used by `buffers.ledger.export` and the page. The ledger keeps token ids and no messages, so roles are read off the chat template's
own marks, which are looked for in the decoded prompts; what was sampled is the assistant's in any case. A template whose marks are
not known gives `prompt` turns. Invariant: turns are in order and do not overlap; tokens that only open or close a turn may be in
none.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from buffers.ledger.branches import Branch

_BROKEN = "�"
_MOST_PIECES = 8
"""Tokens that one character may be made of."""


class TokenDecoder:
    """Token ids as text, control tokens included, by a tokenizer.json; the text of a single token is kept."""

    def __init__(self, file: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(file))
        self._pieces: dict[int, str] = {}

    def decode(self, ids: Sequence[int]) -> str:
        """The text of consecutive tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def piece(self, token: int) -> str:
        """The text of one token."""
        found = self._pieces.get(token)
        if found is None:
            found = self._pieces[token] = self.decode([token])
        return found


def pieces_of(ids: Sequence[int], *, decoder: TokenDecoder) -> list[str]:
    """The text of each token."""
    found = [decoder.piece(token) for token in ids]
    place = 0
    while place < len(found):
        if _BROKEN in found[place]:
            place = _join(found, ids, place, decoder=decoder)
        place += 1
    return found


def _join(found: list[str], ids: Sequence[int], first: int, *, decoder: TokenDecoder) -> int:
    """Put the character that begins here together, if the next tokens end it; the place of its last token."""
    for last in range(first + 1, min(first + _MOST_PIECES, len(ids))):
        text = decoder.decode(ids[first : last + 1])
        if _BROKEN not in text:
            found[first : last + 1] = [text, *[""] * (last - first)]
            return last
    return first


MOST_TURN_CHARS = 65_536
ASSISTANT, PROMPT, TOOL = "assistant", "prompt", "tool"

_OPENINGS = re.compile(
    r"<\|im_start\|>(?P<chatml>[\w.-]+)\n?"
    r"|<\|start_header_id\|>(?P<llama>[\w.-]+)<\|end_header_id\|>\s*"
    r"|<\|header_start\|>(?P<llama4>[\w.-]+)<\|header_end\|>\s*"
    r"|<start_of_turn>(?P<gemma>[\w.-]+)\n?"
    r"|<\|start\|>(?P<harmony>[\w.-]+)[^<]*(?:<\|channel\|>[^<]*)?<\|message\|>"
    r"|<\|(?P<phi>system|user|assistant|tool|observation)\|>\n?"
    r"|<｜(?P<deepseek>User|Assistant|tool▁outputs▁begin)｜>"
    r"|\[(?P<mistral>INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_RESULTS)\]"
)
_CLOSINGS = re.compile(
    r"(?:<\|im_end\|>|<\|eot_id\|>|<\|eot\|>|<end_of_turn>|<\|end\|>|<\|return\|>|<\|call\|>|<｜end▁of▁sentence｜>"
    r"|<｜tool▁outputs▁end｜>|\[/(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_RESULTS)\]|</s>|<\|endoftext\|>)\s*$"
)
_ROLES = {
    "model": ASSISTANT, "INST": "user", "SYSTEM_PROMPT": "system", "AVAILABLE_TOOLS": "system", "TOOL_RESULTS": TOOL,
    "User": "user", "Assistant": ASSISTANT, "tool▁outputs▁begin": TOOL, "observation": TOOL, "ipython": TOOL, "developer": "system",
}  # fmt: skip
_PARTS = re.compile(
    r"<think>(?P<thought>.*?)(?:</think>|\Z)"
    r"|<\|channel\|>analysis<\|message\|>(?P<analysis>.*?)(?:<\|end\|>|\Z)"
    r"|<tool_call>(?P<tool_call>.*?)(?:</tool_call>|\Z)"
    r"|<tool_response>(?P<tool_result>.*?)(?:</tool_response>|\Z)",
    re.DOTALL,
)
_KINDS = {"analysis": "thought"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Consecutive text of one kind: text, thought, tool_call or tool_result."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one side said. Places of tokens are in the branch; `cut`: characters that are left out."""

    n: int = 0
    role: str
    sampled: bool
    round: int
    token_start: int
    token_end: int
    trained: bool = False
    parts: list[Part] = field(default_factory=list)
    cut: int = 0


def turns_of(branch: Branch, *, decoder: TokenDecoder) -> list[Turn]:
    """All turns, without their text."""
    turns: list[Turn] = []
    for round_, (first, middle, last) in zip(branch.path, branch.borders(), strict=True):
        turns += _prompt_turns(round_.tail_ids.tolist(), first=first, number=round_.round_index, decoder=decoder)
        if last > middle:
            trained = round_.round_index in branch.fresh
            turns.append(
                Turn(
                    role=ASSISTANT,
                    sampled=True,
                    round=round_.round_index,
                    token_start=middle,
                    token_end=last,
                    trained=trained,
                )
            )
    return [replace(turn, n=number) for number, turn in enumerate(turns)]


def with_text(turn: Turn, ids: Sequence[int], *, decoder: TokenDecoder) -> Turn:
    """The turn with what its tokens say. `ids`: those of the turn."""
    text = words_of(turn, ids, decoder=decoder)
    return replace(
        turn, cut=max(0, len(text) - MOST_TURN_CHARS), parts=list(_parts(text[:MOST_TURN_CHARS], role=turn.role))
    )


def words_of(turn: Turn, ids: Sequence[int], *, decoder: TokenDecoder) -> str:
    """What its tokens say, without the marks that open and close it."""
    text = decoder.decode(ids)
    if not turn.sampled:
        opening = _OPENINGS.search(text)
        if opening is not None and not text[: opening.start()].strip():
            text = text[opening.end() :]
    return _CLOSINGS.sub("", text)


def _prompt_turns(ids: list[int], *, first: int, number: int, decoder: TokenDecoder) -> Iterator[Turn]:
    """The turns of a prompt's new tokens: cut where the template opens one. An empty one of the assistant, which the sampled tokens
    fill, is left out; so are the marks that close the turn before."""
    text, starts = _decoded(ids, decoder=decoder)
    borders = [(match.start(), _role(match)) for match in _OPENINGS.finditer(text)]
    if not borders or text[: borders[0][0]].strip():
        borders.insert(0, (0, PROMPT))
    elif borders[0][0] > 0:
        borders[0] = (0, borders[0][1])
    ends = [place for place, _ in borders[1:]] + [len(text)]
    for (place, role), end in zip(borders, ends, strict=True):
        start_token, end_token = (
            bisect_left(starts, place),
            bisect_left(starts, end),
        )  # the first that begins there or later
        body = _CLOSINGS.sub("", _OPENINGS.sub("", text[place:end], count=1))
        if end_token > start_token and (body.strip() or role not in (ASSISTANT, PROMPT)):
            yield Turn(
                role=role, sampled=False, round=number, token_start=first + start_token, token_end=first + end_token
            )


def _decoded(ids: list[int], *, decoder: TokenDecoder) -> tuple[str, list[int]]:
    """The text, and where in it each token begins."""
    pieces = [decoder.piece(token) for token in ids]
    starts, place = [], 0
    for piece in pieces:
        starts.append(place)
        place += len(piece)
    return "".join(pieces), starts


def _role(match: re.Match[str]) -> str:
    found = next(text for text in match.groups() if text is not None)
    return _ROLES.get(found, found)


def _parts(text: str, *, role: str) -> Iterator[Part]:
    """The text in order, cut at what is marked as another kind."""
    plain = "tool_result" if role == TOOL else "text"
    place = 0
    for match in _PARTS.finditer(text):
        if before := text[place : match.start()].strip("\n"):
            yield Part(kind=plain, text=before)
        kind, inner = next((name, inner) for name, inner in match.groupdict().items() if inner is not None)
        if inner.strip():
            yield Part(kind=_KINDS.get(kind, kind), text=inner.strip("\n"))
        place = match.end()
    if (rest := text[place:].strip("\n")) or not place:
        yield Part(kind=plain, text=rest)
