"""The versions of the policy that users are served, in a run of `understudy serve`: what was learned is a candidate, which is
promoted where it is not worse at the gate's tasks, else refused; any that was kept can be served again.

Called by `learner.learn_loop` after an update, and by the administrator's routes. Each version is a folder of the run's
`versions/` with its adapter and `version.json`: parent, sessions, scores, gate. Engines have two adapters: the newest version, with
which the gate's tasks are played, and the one that users are served (`SERVED`). Invariants: users are served the version that
`served.json` names, also after a restart; one that was refused is served only if an operator promotes it.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import sqrt
from pathlib import Path
from statistics import fmean, variance
from typing import Any, Protocol

from buffers.disk import replacing, until_written
from buffers.errors import TaskError, UnderstudyError
from buffers.ledger.ledger import Ledger
from buffers.records import Task
from learner.reporting.run_record import VERSIONS as FOLDER
from learner.validation import play

SERVED = "served"
"""The adapter that users' requests are answered with."""
ONE_SIDED_95 = 1.645
"""Standard errors below a mean that the true one is above in 95 of 100 cases."""
LEAST_ENTROPY = 0.6
"""Share of the entropy of the first update below which a policy has collapsed."""


class VersionError(UnderstudyError):
    """There is no such version, or none to go back to."""


class Engines(Protocol):
    """`mocked_server.fleet.engine_fleet.EngineFleet`."""

    async def load_weights(self, folder: Path, *, version: int) -> float: ...
    async def load_adapter(self, folder: Path, *, role: str, version: int) -> float: ...


class Gate(Protocol):
    """The section `serve.gate` of the configuration."""

    every: int
    samples: int
    margin: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What people think of the policy's sessions, and of those that another model answered; None: nothing was said of any."""

    policy: float | None
    policy_sessions: int
    upstream: float | None
    upstream_sessions: int

    @classmethod
    def of(cls, *, policy: Sequence[float], upstream: Sequence[float]) -> Compared:
        """Means of the sessions' scores."""
        means = [fmean(each) if each else None for each in (policy, upstream)]
        return cls(policy=means[0], policy_sessions=len(policy), upstream=means[1], upstream_sessions=len(upstream))


class Versions:
    """`tasks`: reads the gate's; None: there are none, and each candidate is promoted. `compare(version)`: this served version to
    the model that was watched; None: there is none."""

    def __init__(
        self,
        run: Path,
        *,
        engines: Engines,
        ledger: Ledger,
        gate: Gate,
        tasks: Callable[[], Sequence[Task]] | None,
        say: Callable[[str], object],
        compare: Callable[[int], Awaitable[Compared]] | None = None,
    ) -> None:
        self._compare = compare
        self._folder = run / FOLDER
        self._engines = engines
        self._ledger = ledger
        self.gate = gate
        self._tasks = tasks
        self._say = say
        self._changing = asyncio.Lock()
        state = _read(self._folder / "served.json")
        self.served: int | None = state.get("version")
        self._history: list[dict[str, Any]] = state.get("history", [])
        self.taken_back: int | None = None
        """The version that was gone back to by hand; the learner, which follows, sets it to None."""
        self.num_refused = sum(each.get("state") == "refused" for each in self.list())

    async def begin(self) -> None:
        """Give the engines the version that is served, before they start."""
        if self.served is not None:
            await self._engines.load_adapter(self._at(self.served), role=SERVED, version=self.served)

    async def published(self, folder: Path, *, version: int) -> None:
        """The engines have a new version, whose adapter is in `folder`: it is kept. The first one is served."""
        await until_written(
            partial(asyncio.to_thread, self._keep, folder, version), what=f"version {version}",
            folder=self._folder.parent, say=self._say,
        )  # fmt: skip
        if self.served is None:
            await self._serve(version, why="first")
        used = {self.served, version, *(each["version"] for each in self._history)}
        for each in self.list():
            if each.get("state") == "candidate" and each["version"] not in used:  # was never offered
                await asyncio.to_thread(shutil.rmtree, self._at(each["version"]), ignore_errors=True)

    async def admit(self, version: int, *, episodes: Sequence[str], entropy: float | None) -> bool:
        """Whether a candidate is promoted: the mean difference of its scores to those of the served version, task by task, is above
        -margin with 95 % certainty (one-sided), and its entropy has not collapsed. `episodes`: what it was trained on."""
        parent = self.served
        assert parent is not None, "the first version was published"
        about: dict[str, Any] = {"parent": parent, "sessions": list(episodes)}
        first = self._about(parent).get("entropy", entropy)
        about |= {} if entropy is None else {"entropy": entropy}
        if self._compare is not None:
            about["compared"] = asdict(await self._compare(parent))
        why = ""
        if entropy is not None and first and entropy < LEAST_ENTROPY * first:
            why = f"its entropy fell from {first:.3g} to {entropy:.3g} nats"
        elif self._tasks is not None:
            try:
                found = await self._play(version, parent=parent)
            except TaskError as error:
                self._say(f"the gate's tasks cannot be read: {error}")
                found = {"tasks": 0, "least_difference": None}
            about["gate"] = found
            if found["least_difference"] is None:
                why = "too few of the gate's tasks could be played"
            elif found["least_difference"] < -self.gate.margin:
                why = (
                    f"it scores {found['mean']:.3f} at the gate, the served one {found['parent_mean']:.3f}: the difference may be "
                    f"{found['least_difference']:.3f}, below -{self.gate.margin:g}"
                )
        self._tell(version, {**about, "state": "refused" if why else "promoted", "why": why})
        if why:
            self.num_refused += 1
            self._say(f"version {version} is refused: {why}; version {parent} is served on")
            return False
        await self._serve(version, why="gate")
        return True

    async def promote(self, version: int) -> None:
        """Serve a version that is kept, whatever the gate said of it."""
        if not self._at(version).is_dir():
            kept = ", ".join(str(each["version"]) for each in self.list()) or "none"
            raise VersionError(f"version must be one that is kept ({kept}), got {version}")
        await self._serve(version, why="by hand")

    async def rollback(self, version: int | None = None) -> int:
        """Serve an earlier version again: this one, or the one that was served before; the learner goes back with it. Raises
        VersionError."""
        if version is None:
            before = [each["version"] for each in self._history if each["version"] != self.served]
            if not before:
                raise VersionError(f"there must be an earlier version to go back to, got only {self.served}")
            version = int(before[-1])
        await self.promote(version)
        self.taken_back = version
        return version

    def list(self) -> list[dict[str, Any]]:
        """What is known of each version that is kept, the oldest first."""
        found = [_read(path) for path in self._folder.glob("v*/version.json")]
        return sorted((each for each in found if "version" in each), key=lambda each: each["version"])

    @property
    def num_promoted(self) -> int:
        """Versions that have passed the gate, up to the one that is served."""
        passed = {each["version"] for each in self._history if each["why"] == "gate"}
        return sum(1 for version in passed if self.served is not None and version <= self.served)

    async def status(self) -> dict[str, Any]:
        """What `understudy serve status` prints."""
        told: dict[str, Any] = {"served": self.served, "history": self._history[-20:], "versions": self.list()}
        if self._compare is not None and self.served is not None:
            told["compared"] = asdict(await self._compare(self.served))
        return told

    async def _play(self, version: int, *, parent: int) -> dict[str, Any]:
        assert self._tasks is not None
        tasks = await asyncio.to_thread(self._tasks)
        own = await self._scores(tasks)
        others = self._about(parent).get("scores")
        if others is None or set(others) != {task.task_id for task in tasks}:
            await self._engines.load_weights(self._at(parent), version=parent)
            try:
                others = await self._scores(tasks)
            finally:
                await self._engines.load_weights(self._at(version), version=version)
            self._tell(parent, {"scores": others})
        self._tell(version, {"scores": own})
        both = [own[name] - others[name] for name in own if name in others]
        if len(both) < max(2, len(tasks) // 2):
            return {"tasks": len(both), "least_difference": None}
        error = sqrt(variance(both) / len(both))
        return {
            "tasks": len(both),
            "mean": fmean(own.values()),
            "parent_mean": fmean(others.values()),
            "least_difference": fmean(both) - ONE_SIDED_95 * error,
        }

    async def _scores(self, tasks: Sequence[Task]) -> dict[str, float]:
        found = await play(self._ledger, tasks, samples=self.gate.samples, fewest=1)
        return {one.task_id.partition("/")[2]: fmean(one.scores) for one in found}

    async def _serve(self, version: int, *, why: str) -> None:
        async with self._changing:
            await self._engines.load_adapter(self._at(version), role=SERVED, version=version)
            self.served = version
            self._history.append({"version": version, "at": time.time(), "why": why})
            state = {"version": version, "history": self._history}
            await asyncio.to_thread(_write, self._folder / "served.json", state)

    def _tell(self, version: int, more: dict[str, Any]) -> None:
        _write(self._at(version) / "version.json", {**self._about(version), "version": version, **more})

    def _about(self, version: int) -> dict[str, Any]:
        return _read(self._at(version) / "version.json")

    def _at(self, version: int) -> Path:
        return self._folder / f"v{version}"

    def _keep(self, folder: Path, version: int) -> None:
        scratch = self._folder / f".v{version}"
        for left in (scratch, self._at(version)):
            shutil.rmtree(left, ignore_errors=True)
        scratch.mkdir(parents=True)
        try:
            for file in folder.iterdir():
                shutil.copyfile(file, scratch / file.name)
            _write(scratch / "version.json", {"version": version, "made": time.time(), "state": "candidate"})
            scratch.rename(self._at(version))
        except OSError:
            shutil.rmtree(scratch, ignore_errors=True)
            raise


def trained_in(run: Path, steps: Sequence[int]) -> str:
    """Which of a run's versions and checkpoints have these steps in their weights, in a line. Where a candidate was refused the
    learner went back: what came after it does not have what it learned."""
    versions = {int(path.name[1:]): _read(path / "version.json") for path in (run / FOLDER).glob("v*")}
    refused = [version for version, about in versions.items() if about.get("state") == "refused"]

    def holds(version: int, *, is_saved: bool) -> bool:
        return any(step <= version and not any(step <= each < version + is_saved for each in refused) for step in steps)

    with_it = [f"version {each}" for each in sorted(versions) if holds(each, is_saved=False)]
    saved = sorted((run / "checkpoints").glob("step-*"))
    with_it += [
        f"checkpoints/{path.name}" for path in saved if holds(int(path.name.removeprefix("step-")), is_saved=True)
    ]
    without = max((each for each in versions if not holds(each, is_saved=False)), default=None)
    named = ", ".join(map(str, steps[:20])) + (f" and {len(steps) - 20} more" if len(steps) > 20 else "")
    return (
        f"trained in step {named}: their weights were made with it: {', '.join(with_it) or 'none that is kept'}; "
        + ("no version that is kept is without it" if without is None else f"the newest without it: version {without}")
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def _write(path: Path, content: dict[str, Any]) -> None:
    with replacing(path) as scratch:
        scratch.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
