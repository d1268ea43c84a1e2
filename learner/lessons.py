"""Lessons of a live run: what another model was watched doing (`serve.upstream`) is learned by SFT, within the run.

`learner.learn_loop` waits for a lesson beside its batches, and makes a step of one. Invariants: a lesson is SFT of all that was
watched, the newest `MOST`, weighed by what people have said of it by then; nothing of it is an RL batch; a lesson waits for new
demonstrations also where the candidate that came of the one before is refused; what cannot be learned costs a lesson, not the run;
after a death of the learner a lesson is made again of what it was made of.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Protocol

from buffers.disk import replacing
from buffers.errors import TaskError
from buffers.ledger.ledger import Ledger
from buffers.ledger.sessions import SessionScore
from learner.live_versions import Compared

MOST = 1000
"""Demonstrations in one lesson."""
DEMONSTRATIONS = "demonstrations.jsonl"


class Watched(Protocol):
    """`mocked_server.watching.Watching`."""

    number: int

    async def wait(self, number: int) -> None: ...
    def rows(self) -> Iterator[dict[str, Any]]: ...


Teach = Callable[[Path, Path], Awaitable[dict[str, float]]]
"""Has the learner's ranks learn this file by SFT, in this folder; its figures. Raises TaskError where nothing can be learned."""


@dataclass(eq=False)
class Lessons:
    """`folder`: the run's. `every`: new demonstrations that make a lesson. `weigh(score)`: the fields of a demonstration by what
    people think of its session."""

    folder: Path
    _: KW_ONLY
    watched: Watched
    ledger: Ledger
    every: int
    weigh: Callable[[float | None], dict[str, float | None]]
    teach: Teach
    say: Callable[[str], object]

    def __post_init__(self) -> None:
        self._learned = _read(self.folder / "learned.json")
        self._taken = self._learned

    async def due(self) -> None:
        """Wait until there is enough to learn."""
        await self.watched.wait(self._learned + self.every)

    def was_taken(self, step: int) -> bool:
        """Whether this step is a lesson that has begun, and of which nothing is saved yet."""
        return self._file(step).exists()

    async def take(self, step: int) -> dict[str, float] | None:
        """Learn, on ranks that nobody else uses meanwhile; its figures. None: nothing could be learned."""
        self._taken = self.watched.number
        file = self._file(step)
        place = file.parent
        if not file.exists():  # else it is the one that a death of ranks has cut short
            await asyncio.to_thread(shutil.rmtree, place, ignore_errors=True)
            scores = {each.episode_id: each.score for each in await _of(self.ledger.session_scores())}
            await asyncio.to_thread(self._write, file, scores)
        try:
            told = await self.teach(file, place)
        except TaskError as error:
            self.say(f"nothing is learned of what was watched: {error}")
            await self.end()
            return None
        await asyncio.to_thread(shutil.rmtree, place / "checkpoints", ignore_errors=True)
        return told

    async def end(self) -> None:
        """What came of the lesson is saved: the next one waits for more, and its copy of what was watched goes."""
        for file in self.folder.glob(f"lesson-*/{DEMONSTRATIONS}"):
            file.unlink()
        self._learned = self._taken
        await asyncio.to_thread(_write, self.folder / "learned.json", self._learned)

    def _file(self, step: int) -> Path:
        return self.folder / f"lesson-{step}" / DEMONSTRATIONS

    def _write(self, path: Path, scores: dict[str, float]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = deque(self.watched.rows(), maxlen=MOST)
        weighed = [{**row, **self.weigh(scores.get(str(row["source"])))} for row in rows]
        with replacing(path) as scratch:
            scratch.write_text("".join(f"{json.dumps(row)}\n" for row in weighed if row["weight"]), encoding="utf-8")


async def compared(ledger: Ledger, *, served: int) -> Compared:
    """What people think of the sessions that the served version answered, and of those of the other model."""
    scores: Sequence[SessionScore] = await _of(ledger.session_scores())
    return Compared.of(
        policy=[each.score for each in scores if not each.is_watched and each.version == served],
        upstream=[each.score for each in scores if each.is_watched],
    )


async def _of(future: Future[Any]) -> Any:
    return await asyncio.wrap_future(future)


def _read(path: Path) -> int:
    try:
        return int(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return 0


def _write(path: Path, number: int) -> None:
    with replacing(path) as scratch:
        scratch.write_text(f"{number}\n", encoding="utf-8")
