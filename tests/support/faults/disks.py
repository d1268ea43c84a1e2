"""Real disks that are small: tmpfs mounts that a test fills, and empties again. Only root may mount them."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems of its own: root only")
FAULTS = ("full", "no inodes")
BLOCK = bytes(1 << 16)


@dataclass(frozen=True)
class SmallDisk:
    """A file system of its own. `folder`: where it is mounted."""

    folder: Path

    def refuse(self, fault: str, *, but: int = 0) -> None:
        """From now on it takes nothing: no space is left, or no inode. `but`: bytes that it takes before."""
        ballast = self.folder / ".ballast"
        ballast.mkdir(exist_ok=True)
        number = sum(1 for _ in ballast.iterdir())
        (ballast / "room").write_bytes(bytes(but))
        try:
            with (ballast / f"{number}").open("wb", buffering=0) as sink:
                while fault == "full":
                    while sink.write(BLOCK):
                        pass
            while True:
                number += 1
                (ballast / f"{number}").touch()
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        if but:
            (ballast / "room").unlink()

    def take(self) -> None:
        """Space and inodes are back."""
        for file in (self.folder / ".ballast").iterdir():
            file.unlink()


@contextmanager
def small_disk(folder: Path, *, size: str = "4m", inodes: int = 1000) -> Iterator[SmallDisk]:
    """Mounted at `folder`, which is made, until the end of the block."""
    folder.mkdir(parents=True, exist_ok=True)
    options = f"size={size},nr_inodes={inodes}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
