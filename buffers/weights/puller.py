"""Makes a dense folder, which engines load, of a published version: the one puller of a node.

Used by `buffers.weights.puller_process`. It takes what it lacks: the patches since the version that it has, or
the newest dense version and the patches after that when it joins late. Invariants: a folder in its place is whole and its
weights have the checksums of the manifest, down to the last bit; it never changes, so an engine that loads it is not disturbed by
the next version. After a crash it resumes with what is complete. It fetches and checks; its caller says what
is loaded, and when.
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from buffers.errors import WeightsError
from buffers.weights import patch
from buffers.weights.dense_file import DenseFile, corrupt, create_dense_file, mapped, room_for
from buffers.weights.manifest import (
    Manifest,
    Shard,
    folder_of,
    published_file,
    read_manifest,
    safetensors_header,
    write_manifest,
)
from buffers.weights.shard_writer import BITS

LONGEST_CHAIN = 1000
"""More patches in a row than any publisher makes."""


class Source(Protocol):
    """The place that versions come from: a folder (`FolderSource`), or another machine."""

    def manifest(self, name: str) -> Manifest:
        """Raises WeightsError when there is no such version."""
        ...

    def fetch(self, name: str, shard: Shard, *, to: Path) -> None:
        """Puts the shard's file at `to`; it is only read there."""
        ...


class FolderSource:
    """Versions of a `buffers.weights.store.VersionStore` on this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def manifest(self, name: str) -> Manifest:
        return read_manifest(folder_of(name, among=self._folder))

    def fetch(self, name: str, shard: Shard, *, to: Path) -> None:
        there = published_file(self._folder, name, shard.file)
        try:
            os.link(there, to)  # the same memory
        except FileNotFoundError:
            raise WeightsError(f"version {name} must have its shard {there}, which is gone; publish it again") from None
        except OSError:  # another file system
            with room_for(shard.size, folder=to.parent, what=f"version {name}"):
                shutil.copyfile(there, to)


class Puller:
    """`folder`: of its own. `file`: the name of the dense file in each version's folder, as the engine expects it."""

    def __init__(self, source: Source, folder: Path, *, file: str) -> None:
        self._source = source
        self._folder = folder
        self._file = file
        for left in folder.glob(".*"):
            shutil.rmtree(left)

    def pull(self, name: str) -> Path:
        """The dense folder of the version. Raises WeightsError; then nothing has changed, and a dense version helps."""
        target = folder_of(name, among=self._folder)
        if target.is_dir():
            return target
        chain = self._chain(name)
        scratch = self._folder / f".{target.name}"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            self._make(scratch, chain)
            scratch.rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return target

    def copy(self, name: str) -> Path:
        """The dense folder of the version, from a source that has it as it is here: for who joins late. Raises WeightsError."""
        target = folder_of(name, among=self._folder)
        if target.is_dir():
            return target
        manifest = self._source.manifest(name)
        scratch = self._folder / f".{target.name}"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            size = len(safetensors_header(manifest.tensors)) + manifest.dense_bytes
            whole = Shard(file=self._file, size=size, tensors=[], pieces=[])
            self._source.fetch(name, whole, to=scratch / self._file)
            self._finish(scratch, manifest)
            scratch.rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return target

    def keep(self, names: Sequence[str]) -> None:
        """Removes all other versions."""
        for old in self._folder.glob("version-*"):
            if old.name not in names:
                gone = old.with_name(f".{old.name}")  # a folder that is half removed must not look whole
                old.rename(gone)
                shutil.rmtree(gone)

    def _chain(self, name: str) -> list[Manifest]:
        """The versions to bring together, oldest first: it begins with one that is here or a dense one."""
        chain = [self._source.manifest(name)]
        while (base := chain[0].base) is not None:
            if (here := folder_of(base, among=self._folder)).is_dir():
                return [read_manifest(here), *chain]
            chain.insert(0, self._source.manifest(base))
            if len(chain) > LONGEST_CHAIN:
                raise WeightsError(
                    f"version {name} must rest on a dense one, got {LONGEST_CHAIN} patches; publish densely"
                )
        return chain

    def _make(self, scratch: Path, chain: Sequence[Manifest]) -> None:
        """Writes the last version of the chain, whose first one is here or dense."""
        first, newest = chain[0], chain[-1]
        for manifest in chain:
            if manifest.tensors != newest.tensors:
                raise WeightsError(
                    f"version {newest.name} must have the tensors of {manifest.name}, which it rests on, got others; "
                    f"publish it densely"
                )
        have, path = self._folder / first.name / self._file, scratch / self._file
        if first is newest and len(first.shards) == 1 and first.shards[0].is_safetensors:
            self._source.fetch(first.name, first.shards[0], to=path)
        else:
            create_dense_file(path, first.tensors, what=f"version {newest.name}")
            dense = DenseFile(path, newest.tensors, writable=True)
            if have.is_file():
                dense.copy_from(DenseFile(have, first.tensors))
            for manifest in chain[1:] if have.is_file() else chain:
                self._apply(manifest, scratch, target=dense)
        self._finish(scratch, newest)

    def _finish(self, scratch: Path, manifest: Manifest) -> None:
        """Compares the dense file with the manifest, and writes what is beside it."""
        DenseFile(scratch / self._file, manifest.tensors).verify(manifest)
        for name, text in manifest.extra.items():
            (scratch / Path(name).name).write_text(text, encoding="utf-8")
        write_manifest(scratch, manifest)

    def _apply(self, manifest: Manifest, scratch: Path, *, target: DenseFile) -> None:
        for shard in manifest.shards:
            path = scratch / f"{manifest.name}.{shard.file}"
            self._source.fetch(manifest.name, shard, to=path)
            content = mapped(path)
            path.unlink()
            if len(content) != shard.size:
                raise corrupt(manifest, shard.file, "the size")
            for piece in shard.pieces:
                data = content[piece.offset : piece.offset + piece.size]
                if zlib.crc32(data.data) != piece.checksum:
                    raise corrupt(manifest, shard.file, f"the checksum of {piece.tensor}")
                own = target.range(piece)
                if piece.num_changed is None:
                    own[:] = data
                    continue
                bits = own.view(BITS[own.nbytes // piece.count]) if piece.count else own
                try:
                    patch.apply(data.data, changed=piece.num_changed, target=bits)
                except ValueError as error:
                    raise corrupt(manifest, shard.file, f"the patch of {piece.tensor} ({error})") from error
