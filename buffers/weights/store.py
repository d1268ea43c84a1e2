"""Published versions of the weights, in a folder that pullers read from.

Used by `learner.checkpoints.weight_sync`, the only writer. A version is written into a scratch folder by all ranks and renamed:
a folder `version-*` is complete and never changes. `newest` names the newest one, for pullers that join late. Kept are the
newest dense version and the patches after it: so the newest version can always be made from what is there.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from buffers.weights.manifest import Manifest, Shard, manifest_of, write_manifest

MOST_PATCHES = 19
"""Patches in a row after which a version is dense."""
NEWEST = "newest"


class VersionStore:
    """Takes an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._chain: list[Manifest] = []
        """The newest dense version and the patches after it."""

    @property
    def base(self) -> str | None:
        """The version that the next one may be a patch against; None: it has to be dense. So it is after MOST_PATCHES patches, or
        when those together are as large as the weights: they take room, and who joins late pulls them all."""
        if not self._chain or len(self._chain) > MOST_PATCHES:
            return None
        patches = sum(manifest.num_bytes for manifest in self._chain[1:])
        return self._chain[-1].name if patches < self._chain[0].dense_bytes else None

    def begin(self, version: int) -> Path:
        """An empty folder for the shards; what `commit` did not take before is removed."""
        for left in self.folder.glob(".version-*"):
            shutil.rmtree(left)
        scratch = self.folder / f".version-{version:06d}-{secrets.token_hex(4)}"
        scratch.mkdir()
        return scratch

    def commit(
        self,
        scratch: Path,
        *,
        version: int,
        base: str | None,
        shards: Sequence[Shard],
        extra: dict[str, str] | None = None,
    ) -> Manifest:
        """Publishes what the ranks wrote into `scratch`. Raises WeightsError when that is not whole."""
        name = scratch.name.removeprefix(".")
        manifest = manifest_of(name, version=version, base=base, shards=shards)
        manifest = msgspec.structs.replace(manifest, extra=extra or {})
        write_manifest(scratch, manifest)
        scratch.rename(self.folder / name)
        unfinished = self.folder / f".{NEWEST}"
        unfinished.write_text(name, encoding="utf-8")
        os.replace(unfinished, self.folder / NEWEST)
        if manifest.base is None:
            for old in self._chain:
                shutil.rmtree(self.folder / old.name, ignore_errors=True)
            self._chain = []
        self._chain.append(manifest)
        return manifest


def version_name(scratch: Path) -> str:
    """The name that the version in a scratch folder will have."""
    return scratch.name.removeprefix(".")
