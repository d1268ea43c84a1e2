"""What callers hand to the ledger, checked and brought into the form in which it is stored; and the stored body of a round.

Called by `Ledger` in the caller's thread, so that bad input is refused at once and encoding does not hold up the writer.
Pure functions.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from buffers.errors import EpisodeError, ScoreError, TaskError, UnderstudyError
from buffers.ledger.episodes import StoredRound
from buffers.ledger.schema import MAX_SCORE
from buffers.records import Float32, Int32, Round, Task, UInt16


def checked_score(score: object, *, episode_id: str) -> float:
    """`score` as a float; raises ScoreError for anything but a finite number."""
    try:
        value = float(score) if isinstance(score, Real) and not isinstance(score, bool) else math.nan
    except OverflowError:
        value = math.inf
    if not abs(value) < MAX_SCORE:
        raise ScoreError(
            f"score of episode {episode_id} must be a finite number below {MAX_SCORE:g} in size, got {score!r:.100}; "
            f"report it as failed if it has no score"
        )
    return value


def task_payload(task: Task) -> str:
    fields: dict[str, Any] = {
        "prompt": task.prompt,
        "data_source": task.data_source,
        "ground_truth": task.ground_truth,
        "agent_name": task.agent_name,
        "extra_info": task.extra_info,
    }
    try:
        return json.dumps(fields, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise TaskError(
            f"task {task.task_id!r} must be JSON (finite numbers, text, lists, objects): {error}"
        ) from error


def stored_round(round_: Round) -> StoredRound:
    """The round as the table has it. Raises EpisodeError for numbers that could not be trained."""
    return stored_body(
        round_,
        episode_id=round_.episode_id,
        round_index=round_.round_index,
        parent=round_.parent,
        finish_reason=round_.finish_reason,
        memo=round_.memo,
        trained=None if round_.trained is None else round_.trained.astype("uint8").tobytes(),
        role=round_.role,
    )


def stored_body(
    arrays: Round | RoundBody,
    *,
    episode_id: str,
    round_index: int,
    parent: int | None,
    finish_reason: str,
    memo: bytes,
    trained: bytes | None = None,
    role: str = "",
    body: bytes | None = None,
) -> StoredRound:
    """Makes what `stored_round` makes from a round's arrays. `body`: their encoded form, where it is known."""
    if np.count_nonzero(np.isfinite(arrays.logprobs)) < arrays.logprobs.size:
        raise EpisodeError(
            f"round {round_index} of episode {episode_id}: logprobs must be finite, got nan or inf; record it with "
            f"finish_reason abort and none"
        )
    num_sampled = len(arrays.sampled_ids)
    max_version = int(arrays.versions.max()) if num_sampled else None
    if num_sampled and (oldest := int(arrays.versions.min())) < 0:
        raise EpisodeError(
            f"round {round_index} of episode {episode_id}: versions must be >= 0, got {oldest}; stamp every sampled token"
        )
    if trained is not None and len(trained) != num_sampled:
        raise EpisodeError(
            f"round {round_index} of episode {episode_id}: trained must have a flag for each of {num_sampled} sampled tokens, "
            f"got {len(trained)}; leave it out where all are trained"
        )
    stored = encode(arrays) if body is None else body
    # By place: a put of many rounds spends a fiftieth of its time on names.
    return StoredRound(
        episode_id, round_index, parent, num_sampled, max_version, finish_reason, stored, memo or None, trained, role
    )


# The stored body of a round: a checked, versioned header and raw little-endian arrays.
#
# The ledger writes and reads it. Invariant: what `decode` returns is bit for bit what `encode` was given; a body that is
# cut, altered or of an unknown format version is refused. It knows nothing of episodes: names are added by the caller.
#
#     offset  type   field
#     0       4s     b"USRB"
#     4       u16    format version (2; 3 with experts)
#     6       u16    reserved, 0
#     8       u32    P, number of tail ids
#     12      u32    S, number of sampled ids
#     16      u32    R, number of runs of equal versions: one, unless weights changed while it was sampled
#     20      u32    crc32 of everything but this field
#     24      i32[P] tail ids, i32[S] sampled ids, f32[S] logprobs, (u32 tokens, i32 version)[R]
#     then, in version 3: u32 n tokens, u16 layers, u16 K, u16 w of 1 or 2, u16 0, u8[w][n][layers][K] experts
#
# Experts are not compressed: of 8 among 128, zlib saves an eighth.

FORGOTTEN = b"forgotten"
"""Takes the place of a body that was forgotten."""
MAGIC = b"USRB"
FORMAT_VERSION, WITH_EXPERTS = 2, 3
_FORMAT = struct.Struct("<4sHH")
_HEADER = struct.Struct("<4sHHIII")
_CRC = struct.Struct("<I")
_RUN = struct.Struct("<Ii")
_EXPERTS = struct.Struct("<IHHHH")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundBody:
    """The arrays of a round; shapes as in `buffers.records.Round`."""

    tail_ids: Int32
    sampled_ids: Int32
    logprobs: Float32
    versions: Int32
    experts: UInt16 | None = None


def encode(body: Round | RoundBody) -> bytes:
    """The stored form of a round's arrays."""
    runs = _runs(np.ascontiguousarray(body.versions, dtype="<i4"))
    parts = (
        np.ascontiguousarray(body.tail_ids, dtype="<i4").data,
        np.ascontiguousarray(body.sampled_ids, dtype="<i4").data,
        np.ascontiguousarray(body.logprobs, dtype="<f4").data,
        runs,
        b"" if body.experts is None else _packed(body.experts),
    )
    sizes = len(body.tail_ids), len(body.sampled_ids), len(runs) // _RUN.size
    header = _HEADER.pack(MAGIC, FORMAT_VERSION if body.experts is None else WITH_EXPERTS, 0, *sizes)
    crc = zlib.crc32(header)
    for part in parts:
        crc = zlib.crc32(part, crc)
    return b"".join((header, _CRC.pack(crc), *parts))


def decode(data: bytes) -> RoundBody:
    """The arrays in `data`, read-only and, but for the versions, without a copy; raises UnderstudyError for a damaged or foreign
    body."""
    magic, version, _ = _FORMAT.unpack_from(data) if len(data) >= _FORMAT.size else (MAGIC, FORMAT_VERSION, 0)
    if magic != MAGIC or version not in (FORMAT_VERSION, WITH_EXPERTS):
        raise UnderstudyError(
            f"round body must be {MAGIC!r} version {FORMAT_VERSION} or {WITH_EXPERTS}, got {magic!r} version {version}; "
            f"open it with the release that wrote it"
        )
    start = _HEADER.size + _CRC.size
    if len(data) < start:
        raise UnderstudyError(f"round body must have a header of {start} bytes, got {len(data)} bytes; it is damaged")
    _, _, _, num_tail, num_sampled, num_runs = _HEADER.unpack_from(data)
    end = expected = start + 4 * (num_tail + 2 * num_sampled) + _RUN.size * num_runs
    shape: list[int] = []
    width = 0
    if version == WITH_EXPERTS:
        *shape, width, _ = _EXPERTS.unpack_from(data, end) if len(data) >= end + _EXPERTS.size else (0, 0, 0, 0, 0)
        expected = end + _EXPERTS.size + math.prod(shape) * width
    if len(data) != expected:
        raise UnderstudyError(f"round body must have {expected} bytes, got {len(data)}; it is damaged")
    (stored,) = _CRC.unpack_from(data, _HEADER.size)
    actual = zlib.crc32(memoryview(data)[start:], zlib.crc32(data[: _HEADER.size]))
    if stored != actual:
        raise UnderstudyError(f"round body must have checksum {stored:#010x}, got {actual:#010x}; it is damaged")
    words = np.frombuffer(data, dtype="<i4", offset=start, count=(end - start) // 4)
    sampled_end = num_tail + num_sampled
    return RoundBody(
        tail_ids=words[:num_tail],
        sampled_ids=words[num_tail:sampled_end],
        logprobs=words[sampled_end : sampled_end + num_sampled].view("<f4"),
        versions=_versions(words[sampled_end + num_sampled :], number=num_sampled),
        experts=None if version == FORMAT_VERSION else _unpacked(data[end + _EXPERTS.size :], shape=shape, width=width),
    )


def _packed(experts: UInt16) -> bytes:
    """A byte for each where it is enough."""
    width = 1 if experts.max(initial=0) < 256 else 2
    return _EXPERTS.pack(*experts.shape, width, 0) + experts.astype(f"<u{width}").tobytes()


def _unpacked(data: bytes, *, shape: Sequence[int], width: int) -> UInt16:
    if width not in (1, 2):
        raise UnderstudyError(f"round body must have experts of 1 or 2 bytes, got {width}; it is damaged")
    return np.frombuffer(data, dtype=f"<u{width}").astype(np.uint16).reshape(tuple(shape))


def _runs(versions: Int32) -> bytes:
    """Each run of equal ones: how many, and which."""
    number = len(versions)
    if number == 0:
        return b""
    if versions.tobytes() == versions[:1].tobytes() * number:
        return _RUN.pack(number, versions[0])
    starts = np.flatnonzero(versions[1:] != versions[:-1]) + 1
    counts = np.diff(starts, prepend=0, append=number)
    return np.stack((counts.astype("<i4"), versions[np.concatenate(([0], starts))]), axis=1).tobytes()


def _versions(runs: Int32, *, number: int) -> Int32:
    """The opposite; a version for each of so many tokens."""
    counts, values = runs[0::2], runs[1::2]
    if np.any(counts <= 0) or counts.sum(dtype=np.int64) != number:
        raise UnderstudyError(
            f"round body must have a version for each of {number} sampled tokens, got {counts.tolist()!s:.60}; it is damaged"
        )
    versions = np.repeat(values, counts)
    versions.setflags(write=False)
    return versions
