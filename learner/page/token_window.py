"""A window of a branch's tokens as bytes: a small head, then arrays that a browser takes as they are.

Used by `learner.page`. The form: `USPT`, the head's length, the head as JSON, then each array on a multiple of four bytes,
little-endian. A token that is part of a character has an empty text; the character stands with its first one.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

MAGIC = b"USPT"
MOST_TOKENS = 4096
_TYPES = {"int32": "i32", "float32": "f32", "uint8": "u8"}


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
