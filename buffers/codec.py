"""The stored body of a round: a checked, versioned header and raw little-endian arrays.

The ledger writes and reads it. Invariant: what `decode` returns is bit for bit what `encode` was given; a body that is
cut, altered or of another format version is refused. It knows nothing of episodes: names are added by the caller.

    offset  type   field
    0       4s     b"USRB"
    4       u16    format version (1)
    6       u16    reserved, 0
    8       u32    P, number of tail ids
    12      u32    S, number of sampled ids
    16      u32    crc32 of everything but this field
    20      i32[P] tail ids, i32[S] sampled ids, f32[S] logprobs, i32[S] versions
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np

from buffers.errors import UnderstudyError
from buffers.records import Float32, Int32

MAGIC = b"USRB"
FORMAT_VERSION = 1
_HEADER = struct.Struct("<4sHHII")
_CRC = struct.Struct("<I")
_START = _HEADER.size + _CRC.size


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundBody:
    """The arrays of a round; shapes as in `buffers.records.Round`."""

    tail_ids: Int32
    sampled_ids: Int32
    logprobs: Float32
    versions: Int32


def encode(body: RoundBody) -> bytes:
    """The stored form of `body`."""
    arrays = (
        np.ascontiguousarray(body.tail_ids, dtype="<i4"),
        np.ascontiguousarray(body.sampled_ids, dtype="<i4"),
        np.ascontiguousarray(body.logprobs, dtype="<f4"),
        np.ascontiguousarray(body.versions, dtype="<i4"),
    )
    header = _HEADER.pack(MAGIC, FORMAT_VERSION, 0, len(body.tail_ids), len(body.sampled_ids))
    crc = zlib.crc32(header)
    for array in arrays:
        crc = zlib.crc32(array.data, crc)
    return b"".join((header, _CRC.pack(crc), *(array.data for array in arrays)))


def decode(data: bytes) -> RoundBody:
    """The arrays in `data`, read-only and without a copy; raises UnderstudyError for a damaged or foreign body."""
    if len(data) < _START:
        raise UnderstudyError(f"round body must have a header of {_START} bytes, got {len(data)} bytes; it is damaged")
    magic, version, _, num_tail, num_sampled = _HEADER.unpack_from(data)
    if magic != MAGIC or version != FORMAT_VERSION:
        raise UnderstudyError(
            f"round body must be {MAGIC!r} version {FORMAT_VERSION}, got {magic!r} version {version}; "
            f"open it with the release that wrote it"
        )
    expected = _START + 4 * (num_tail + 3 * num_sampled)
    if len(data) != expected:
        raise UnderstudyError(f"round body must have {expected} bytes, got {len(data)}; it is damaged")
    (stored,) = _CRC.unpack_from(data, _HEADER.size)
    actual = _crc(data[: _HEADER.size], payload=memoryview(data)[_START:])
    if stored != actual:
        raise UnderstudyError(f"round body must have checksum {stored:#010x}, got {actual:#010x}; it is damaged")
    tokens = np.frombuffer(data, dtype="<i4", offset=_START)
    sampled_end = num_tail + num_sampled
    return RoundBody(
        tail_ids=tokens[:num_tail],
        sampled_ids=tokens[num_tail:sampled_end],
        logprobs=tokens[sampled_end : sampled_end + num_sampled].view("<f4"),
        versions=tokens[sampled_end + num_sampled :],
    )


def _crc(header: bytes, *, payload: bytes | memoryview) -> int:
    return zlib.crc32(payload, zlib.crc32(header))
