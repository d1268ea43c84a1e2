"""The weights of a Hugging Face folder, read by parts: some rows of one parameter at a time, from any number of files.

Called by `learner.model.policy`, on each rank for what that rank holds. Invariant: no more than PIECE elements of a safetensors
file are in memory at once, beside what they are written to, and no page of the file stays mapped. It knows files and names, not
models.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from buffers.errors import TaskError
from configs.model_folder import weight_files

PIECE = 2**24
"""Elements that are read at once."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class WeightFiles:
    """`*.safetensors`, or else `*.bin`, with an index file or without one."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError for a folder without weights, or with an index that names a file that is not there."""
        self.folder = folder
        self._bins: dict[Path, dict[str, Tensor]] = {}
        self._files = {name: file for file in weight_files(folder) for name in self._names_in(file)}
        if not self._files:
            raise ValueError(
                f"model.path must name a folder with weights (*.safetensors or *.bin), got {self.folder} without any; name the "
                f"folder that has them"
            )
        self.names = frozenset(self._files)

    def _names_in(self, file: Path) -> list[str]:
        if file.suffix == ".bin":
            return list(self._bin(file))
        try:
            with safe_open(file, framework="pt") as opened:
                return list(opened.keys())
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} must be a safetensors file: {error}; download the model again") from error

    def shape(self, name: str) -> list[int]:
        """The parameter's whole shape."""
        file = self._files[name]
        if file.suffix == ".bin":
            return list(self._bin(file)[name].shape)
        with safe_open(file, framework="pt") as opened:
            return list(opened.get_slice(name).get_shape())

    def pieces(self, name: str, *, start: int, count: int) -> Iterator[Tensor]:
        """Whole rows of a parameter, one piece after another, flat: the elements [start, start + count) in row-major order, which
        are whole rows. Raises ValueError where they are no plain floats."""
        shape = self.shape(name)
        if not shape:
            yield self.whole(name).flatten()
            return
        width = torch.Size(shape[1:]).numel()
        first, last = start // width, (start + count) // width
        step = max(1, PIECE // width)
        for row in range(first, last, step):
            piece = self._rows(name, row, min(row + step, last))
            if piece.dtype not in FLOATS:
                raise ValueError(
                    f"model.path must name a model of plain weights, got {str(piece.dtype).removeprefix('torch.')} for {name} in "
                    f"{self.folder}; use the model as it was before it was quantized"
                )
            yield piece.flatten()

    def whole(self, name: str) -> Tensor:
        """All of it, as it is stored."""
        file = self._files[name]
        if file.suffix == ".bin":
            return self._bin(file)[name]
        with safe_open(file, framework="pt") as opened:
            found: Tensor = opened.get_tensor(name)
        return found

    def _rows(self, name: str, first: int, last: int) -> Tensor:
        file = self._files[name]
        if file.suffix == ".bin":
            return self._bin(file)[name][first:last]
        with safe_open(file, framework="pt") as opened:  # closed each time: what was read would stay mapped
            part: Tensor = opened.get_slice(name)[first:last]
        return part

    def _bin(self, file: Path) -> dict[str, Tensor]:
        """A file of torch's own, mapped if it is of its format since 1.6: what is not read takes no memory."""
        if file not in self._bins:
            try:
                loaded: Any = torch.load(file, map_location="cpu", mmap=is_zipfile(file), weights_only=True)
                self._bins[file] = {name: weight for name, weight in loaded.items() if isinstance(weight, Tensor)}
            except Exception as error:  # of any kind: it may hold anything, and is no program
                raise ValueError(
                    f"{file} must be a dictionary of tensors as torch.save writes it, got something else ({type(error).__name__}); "
                    f"download the model again, as *.safetensors if there is such a file"
                ) from None
        return self._bins[file]


# Whether two models have one vocabulary: a teacher, or a frozen model that plays a role, reads the policy's token ids.
# Invariant: an id is the same text in both.


def check_same_vocabulary(policy: Any, other: Any, *, key: str, folder: str) -> None:
    """Tokenizers of both. Raises TaskError naming the first token in which they differ."""
    ours, theirs = policy.get_vocab(), other.get_vocab()
    if ours == theirs:
        return
    token = min((token for token in {**ours, **theirs} if ours.get(token) != theirs.get(token)), key=_order(ours))
    raise TaskError(
        f"{key} must name a model with the policy's own tokenizer, got {folder} with {len(theirs):,} tokens for "
        f"{len(ours):,}: {token!r:.40} has the id {theirs.get(token)} there and {ours.get(token)} here; take a model of the same "
        f"family"
    )


def _order(ids: dict[str, int]) -> Any:
    return lambda token: (ids.get(token, len(ids)), token)


def check_folders(policy: Path, other: Path, *, key: str, trust_remote_code: bool = False) -> None:
    """The same for two folders. Raises TaskError, also for a folder without a tokenizer."""
    from transformers import AutoTokenizer

    found = []
    for folder in (policy, other):
        try:
            found.append(AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code))
        except (OSError, ValueError) as error:
            raise TaskError(f"{key} must name a model with a tokenizer, got {folder} ({str(error)[:200]})") from error
    check_same_vocabulary(*found, key=key, folder=str(other))
