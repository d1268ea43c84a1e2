"""The manifest of a version of the weights: which tensors it has, which file holds which part of them, and their checksums.

Written by `buffers.weights.store`, read by `buffers.weights.puller`. A version is a folder of shards, one of each rank, with
`manifest.json` beside them; its name is never used twice. A *piece* is a range of a tensor's elements in row-major order: all
that a rank has to know of its part. A piece is dense (all its elements), or a patch (those that differ from the base version,
see `buffers.weights.patch`). Invariant: the pieces of a manifest that was read cover each tensor exactly once. Numbers are
little-endian; a checksum is the CRC-32 of zlib.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from buffers.errors import WeightsError

FORMAT = 1
MANIFEST = "manifest.json"
NAME = re.compile(r"version-\d{6,}-[0-9a-f]{8}")
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of an element, by safetensors' name of the dtype."""


class Tensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole tensor."""

    name: str
    dtype: str
    shape: list[int]

    @property
    def count(self) -> int:
        """Elements."""
        number = 1
        for size in self.shape:
            number *= size
        return number

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return self.count * self.item_bytes


class Piece(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Elements [start, start + count) of a tensor, at `offset` in the shard's file."""

    tensor: str
    start: int
    count: int
    offset: int
    size: int
    """Bytes in the file."""
    checksum: int
    """CRC-32 of the bytes in the file."""
    result_checksum: int
    """CRC-32 of the elements themselves, which in a dense piece are the bytes in the file."""
    num_changed: int | None = None
    """Elements of a patch; None: the piece is dense."""


class Shard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one rank wrote."""

    file: str
    size: int
    """Bytes."""
    tensors: list[Tensor]
    """Those that it has pieces of."""
    pieces: list[Piece]
    is_safetensors: bool = False
    """The file begins with a safetensors header: it holds whole tensors, and an engine can load it as it is."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A version. `base`: the name of the version that its patches are against."""

    format: int
    name: str
    version: int
    base: str | None
    tensors: list[Tensor]
    shards: list[Shard]
    extra: dict[str, str] = {}
    """File name -> text of small files that an engine reads beside the weights (an adapter's description)."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards: what travels."""
        return sum(shard.size for shard in self.shards)

    @property
    def dense_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors)


def manifest_of(name: str, *, version: int, base: str | None, shards: Sequence[Shard]) -> Manifest:
    """The manifest of what the ranks wrote. Raises WeightsError when their pieces do not make whole tensors."""
    patched = any(piece.num_changed is not None for shard in shards for piece in shard.pieces)
    tensors = {tensor.name: tensor for shard in shards for tensor in shard.tensors}
    manifest = Manifest(
        format=FORMAT,
        name=name,
        version=version,
        base=base if patched else None,
        tensors=list(tensors.values()),
        shards=list(shards),
    )
    _check(manifest)
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes `manifest.json`."""
    (folder / MANIFEST).write_bytes(msgspec.json.encode(manifest))


def read_manifest(folder: Path) -> Manifest:
    """Raises WeightsError for one that is missing, malformed, or does not cover its tensors."""
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise WeightsError(f"version {folder.name} must be in {folder.parent}, and is not; publish it again") from None
    except OSError as error:
        raise WeightsError(f"{path} must be a manifest, got {error}; publish the version again") from error
    return decode_manifest(data, where=str(path))


def decode_manifest(data: bytes, *, where: str) -> Manifest:
    """Raises WeightsError for one that is malformed, or does not cover its tensors. `where`: it came from there."""
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.DecodeError as error:
        raise WeightsError(f"{where} must be a manifest, got {error}; publish the version again") from error
    if manifest.format != FORMAT:
        raise WeightsError(f"{where} must have format {FORMAT}, got {manifest.format}; use one version of understudy")
    _check(manifest)
    return manifest


def folder_of(name: str, *, among: Path) -> Path:
    """The folder of a version. Raises WeightsError for what is no version's name."""
    if not NAME.fullmatch(name):
        raise WeightsError(
            f"a version's name must be like version-000007-0a1b2c3d, got {name!r:.100}; publish it again"
        )
    return among / name


def published_file(folder: Path, name: str, file: str) -> Path:
    """A file of a version in `folder`. A node with ranks alone has it under the name that it was written under: a dot before it.

    Raises WeightsError for what is no plain name."""
    if file != MANIFEST and (file != Path(file).name or not file.endswith((".bin", ".safetensors"))):
        raise WeightsError(f"a version's file must be {MANIFEST} or a shard, got {file!r:.100}")
    there = folder_of(name, among=folder)
    return there / file if there.is_dir() else there.with_name(f".{there.name}") / file


def _check(manifest: Manifest) -> None:
    tensors = {tensor.name: tensor for tensor in manifest.tensors}
    for tensor in manifest.tensors:
        if tensor.dtype not in ITEM_BYTES:
            _refuse(manifest, f"dtype of {tensor.name} must be one of {', '.join(ITEM_BYTES)}", tensor.dtype)
    ranges: dict[str, list[Piece]] = {name: [] for name in tensors}
    for shard in manifest.shards:
        if shard.file != Path(shard.file).name or shard.file in ("", ".", ".."):
            _refuse(manifest, "the file of a shard must be a plain name", shard.file)
        for piece in shard.pieces:
            if piece.tensor not in tensors:
                _refuse(manifest, "a piece must be of a tensor of the version", piece.tensor)
            if min(piece.offset, piece.size) < 0 or piece.offset + piece.size > shard.size:
                _refuse(
                    manifest, f"a piece of {piece.tensor} must lie in the {shard.size} bytes of {shard.file}", piece
                )
            if piece.num_changed is None and piece.size != piece.count * tensors[piece.tensor].item_bytes:
                _refuse(manifest, f"a piece of {piece.tensor} must have the bytes of its elements", piece.size)
            ranges[piece.tensor].append(piece)
    for name, pieces in ranges.items():
        at = 0
        for piece in sorted(pieces, key=lambda one: one.start):
            if piece.start != at or piece.count < 0:
                _refuse(manifest, f"the pieces of {name} must join at element {at}", piece.start)
            at += piece.count
        if at != tensors[name].count:
            _refuse(manifest, f"the pieces of {name} must cover its {tensors[name].count} elements", at)


def _refuse(manifest: Manifest, rule: str, value: object) -> None:
    raise WeightsError(f"version {manifest.name}: {rule}, got {value}; publish it again")


def safetensors_header(tensors: Iterable[Tensor]) -> bytes:
    """The beginning of a safetensors file in which these tensors follow one another; a multiple of 8 bytes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [at, at + tensor.num_bytes],
        }
        at += tensor.num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
