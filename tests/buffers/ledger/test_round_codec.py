"""The stored body of a round is exact, or refused."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffers.errors import UnderstudyError
from buffers.ledger.encode import RoundBody, decode, encode

INT32 = st.integers(-(2**31), 2**31 - 1)
TOKEN = st.tuples(INT32, st.floats(width=32, allow_nan=False), INT32 | st.sampled_from([0, 1]))


def make_body(tail: list[int], tokens: list[tuple[int, float, int]]) -> RoundBody:
    return RoundBody(
        tail_ids=np.array(tail, dtype=np.int32),
        sampled_ids=np.array([token[0] for token in tokens], dtype=np.int32),
        logprobs=np.array([token[1] for token in tokens], dtype=np.float32),
        versions=np.array([token[2] for token in tokens], dtype=np.int32),
    )


@given(tail=st.lists(INT32, max_size=20), tokens=st.lists(TOKEN, max_size=20))
def test_decoding_gives_back_every_bit(tail: list[int], tokens: list[tuple[int, float, int]]) -> None:
    body = make_body(tail, tokens)
    again = decode(encode(body))
    for name in ("tail_ids", "sampled_ids", "logprobs", "versions"):
        assert getattr(again, name).tobytes() == getattr(body, name).tobytes()
        assert getattr(again, name).dtype == getattr(body, name).dtype


def test_the_layout_is_little_endian_and_as_documented() -> None:
    data = encode(make_body([258], [(1, 0.5, 3), (2, 0.5, 3)]))
    assert data[:20] == b"USRB\x02\x00\x00\x00\x01\x00\x00\x00\x02\x00\x00\x00\x01\x00\x00\x00"
    assert data[24:44] == b"\x02\x01\x00\x00\x01\x00\x00\x00\x02\x00\x00\x00" + b"\x00\x00\x00\x3f" * 2
    assert data[44:] == b"\x02\x00\x00\x00\x03\x00\x00\x00"


def test_versions_take_no_space_to_speak_of() -> None:
    one = [(5, -0.5, 7)] * 1000
    assert len(encode(make_body([], one))) == 24 + 8 * 1000 + 8
    assert len(encode(make_body([], [*one, (5, -0.5, 8), *one]))) == 24 + 8 * 2001 + 3 * 8


@pytest.mark.parametrize("counts", [(0, 2), (3, -1), (1, 2), (2**31 - 1, 2**31 - 1)])
def test_runs_that_are_not_those_of_the_sampled_tokens_are_refused(counts: tuple[int, int]) -> None:
    header = struct.pack("<4sHHIII", b"USRB", 2, 0, 0, 2, 2)
    payload = struct.pack("<iiffiiii", 1, 2, -0.5, -1.0, counts[0], 3, counts[1], 4)
    with pytest.raises(UnderstudyError, match="a version for each of 2 sampled tokens"):
        decode(header + struct.pack("<I", zlib.crc32(payload, zlib.crc32(header))) + payload)


def test_any_flipped_bit_is_refused() -> None:
    data = encode(make_body([5, 6], [(1, -0.25, 0), (2, -0.5, 1)]))
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(UnderstudyError, match="round body must"):
            decode(bytes(damaged))


def test_a_cut_body_is_refused() -> None:
    data = encode(make_body([5, 6], [(1, -0.25, 0)]))
    for length in range(len(data)):
        with pytest.raises(UnderstudyError, match="damaged"):
            decode(data[:length])


@pytest.mark.parametrize("most", [255, 256])
def test_experts_come_back_in_a_byte_each_where_that_is_enough_and_bodies_without_are_as_before(most: int) -> None:
    experts = np.arange(3 * 2 * 4, dtype=np.uint16).reshape(3, 2, 4)
    experts[-1, -1, -1] = most
    plain = make_body([5, 6], [(1, -0.25, 0), (2, -0.5, 1)])
    data = encode(replace(plain, experts=experts))
    assert len(data) == len(encode(plain)) + 12 + experts.size * (1 if most < 256 else 2)
    again = decode(data)
    assert again.experts is not None and again.experts.dtype == np.uint16 and (again.experts == experts).all()
    assert (again.sampled_ids == plain.sampled_ids).all() and (again.versions == plain.versions).all()
    assert decode(encode(plain)).experts is None
    for length in range(len(data)):
        with pytest.raises(UnderstudyError, match="damaged"):
            decode(data[:length])
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(UnderstudyError, match="round body must"):
            decode(bytes(damaged))
