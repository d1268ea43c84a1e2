"""A window of a branch's tokens as bytes: a small head, then arrays that a browser takes as they are.

Used by `learner.page.run_view`. The form: `USPT`, the head's length, the head as JSON, then each array on a multiple of
four bytes, little-endian. A token that is part of a character has an empty text; the character stands with its first one.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = b"USPT"
MOST_TOKENS = 4096
_BROKEN = "�"
_MOST_PIECES = 8
"""Tokens that one character may be made of."""
_TYPES = {"int32": "i32", "float32": "f32", "uint8": "u8"}


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


def packed(head: Mapping[str, Any], arrays: Mapping[str, np.ndarray[Any, Any]]) -> bytes:
    """The window's bytes. `arrays`: of int32, float32 or uint8."""
    listed, parts, offset = [], [], 0
    for name, values in arrays.items():
        data = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<")).tobytes()
        listed.append({"name": name, "type": _TYPES[values.dtype.name], "offset": offset})
        parts.append(data + b"\0" * (-len(data) % 4))
        offset += len(parts[-1])
    text = json.dumps({**head, "arrays": listed}, ensure_ascii=False, allow_nan=False).encode("utf-8", errors="replace")
    text += b" " * (-(8 + len(text)) % 8)
    return b"".join((MAGIC, struct.pack("<I", len(text)), text, *parts))


def packed_text(window: bytes) -> str:
    """The text of the tokens in a window's bytes."""
    (length,) = struct.unpack_from("<I", window, len(MAGIC))
    return "".join(json.loads(window[8 : 8 + length])["pieces"])
