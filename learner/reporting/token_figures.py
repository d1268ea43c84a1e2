"""The learner's figures of single tokens: log-probabilities, advantages and what had weight, in `tokens/step-N.npz`.

Written by the learn loop before a step is recorded, read by `learner.page`. A step's file holds whole episodes, those of `Traces`
first, until `MOST_TOKENS` trained tokens; the folder holds the newest `MOST_BYTES`. Invariant: the figures of a round are in the
order of its trained tokens, one for each. The learn loop waits for the file.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from buffers.disk import replacing
from buffers.records import Float32, Row, TrainBatch, UInt8

FOLDER = "tokens"
MOST_TOKENS = 32_768
"""Trained tokens of a step that are kept; its first episode is kept however long it is."""
MOST_BYTES = 256 * 1024 * 1024
ARRAYS = ("learner", "start", "advantage", "weighed")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFigures:
    """[M] each: the trained tokens of a batch, row by row, or of one round; rows that were sampled greedily are not among them."""

    learner: Float32
    """Log-probability by the weights that sampled it; nan where those are not kept."""
    start: Float32
    """Log-probability by the weights before the step."""
    advantage: Float32
    weighed: UInt8
    """1: it had weight in the loss; 0: it was too old, or of an answer that was cut and left out."""


class TokenFiles:
    """Writes the steps of the run in `folder`. `start`: the step after which it is resumed; files of later steps are removed."""

    def __init__(self, folder: Path, *, start: int = 0) -> None:
        self._folder = folder / FOLDER
        self._sizes: dict[int, int] = {}
        if self._folder.is_dir():
            for step, file in _files(self._folder).items():
                if step > start:
                    file.unlink()
                else:
                    self._sizes[step] = file.stat().st_size

    def add(self, batch: TrainBatch, figures: TokenFigures, *, step: int) -> None:
        """Write the figures of a step, and remove the oldest where they are too many."""
        kept, places = _kept(batch)
        self._folder.mkdir(exist_ok=True)
        file = _file(self._folder, step)
        names = json.dumps([[row.episode_id, *_rounds(row)] for row in kept]).encode()
        arrays = {name: getattr(figures, name)[places] for name in ARRAYS}
        with replacing(file) as scratch, scratch.open("wb") as sink:
            np.savez_compressed(sink, rows=np.frombuffer(names, np.uint8), **arrays)
        self._sizes[step] = file.stat().st_size
        while sum(self._sizes.values()) > MOST_BYTES and len(self._sizes) > 1:
            oldest = min(self._sizes)
            _file(self._folder, oldest).unlink(missing_ok=True)
            del self._sizes[oldest]


def read_figures(folder: Path, *, step: int, episode_id: str) -> dict[int, TokenFigures]:
    """Round -> the figures of its trained tokens, of an episode that this step trained; empty where none are kept."""
    try:
        with _file(folder / FOLDER, step).open("rb") as source, np.load(source, allow_pickle=False) as found:
            rows = json.loads(found["rows"].tobytes())
            arrays = {name: found[name] for name in ARRAYS}
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
        return {}
    figures: dict[int, TokenFigures] = {}
    place = 0
    for owner, *rounds in rows:
        for index, number in rounds:
            if owner == episode_id:
                figures[index] = TokenFigures(**{name: arrays[name][place : place + number] for name in ARRAYS})
            place += number
    return figures


def _kept(batch: TrainBatch) -> tuple[list[Row], npt.NDArray[np.bool_]]:
    """The rows that are kept, in the batch's order, and which of the batch's trained tokens are theirs."""
    rows = [row for row in batch.rows if row.num_trained > 0 and not row.greedy]
    sizes: dict[str, int] = {}
    scores: dict[str, float] = {}
    for row in rows:
        sizes[row.episode_id] = sizes.get(row.episode_id, 0) + row.num_trained
        scores[row.episode_id] = row.score
    ranked = sorted(sizes, key=lambda name: -scores[name])
    chosen: set[str] = set()
    total = 0
    for name in [*ranked[:1], *ranked[:0:-1]]:  # the best, then the worst
        if not chosen or total + sizes[name] <= MOST_TOKENS:
            chosen.add(name)
            total += sizes[name]
    parts = [np.full(row.num_trained, row.episode_id in chosen) for row in rows]
    return [row for row in rows if row.episode_id in chosen], np.concatenate([np.zeros(0, bool), *parts])


def _rounds(row: Row) -> Sequence[tuple[int, int]]:
    """(round, trained tokens) in the order of the row."""
    rounds = row.rounds[row.mask.astype(bool)]
    borders = np.flatnonzero(np.diff(rounds, prepend=-2))
    return [(int(rounds[start]), int(number)) for start, number in zip(borders, np.diff(borders, append=len(rounds)))]


def _file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.npz"


def _files(folder: Path) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for file in folder.glob("step-*.npz"):
        number = file.stem.removeprefix("step-")
        if number.isdigit():
            found[int(number)] = file
    return found
