"""The versions of the policy that users are served, in a run of `understudy serve`: what was learned is a candidate, which is
promoted where it is not worse at the gate's tasks, else refused; any that was kept can be served again.

Called by `learner.learn_loop` after an update, by the administrator's routes, and by `mocked_server.live_sessions`, which asks
what answers a session. Each version is a folder of the run's `versions/` with its adapter and `version.json`: parent, sessions,
scores, gate. Engines have the adapter of the newest version, with which the gate's tasks are played and a candidate's sessions are
answered, and that of the one that users are served (`SERVED`), with `serve.sessions_keep_version` also of some before it.
Invariants: users are served the version that `served.json` names, also after a restart; one that was refused is served only if an
operator promotes it; a candidate is compared with the best of the versions that led to it, so that losses of several do not add up.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Protocol

from buffers.disk import replacing, until_written
from buffers.errors import TaskError, UnderstudyError
from buffers.ledger.ledger import Ledger
from buffers.records import EpisodeScores, Task, Validated
from buffers.training_rows import episode_rows
from learner.live_gate import MOST_ANSWERS, Answer, level_of, likeness, paired, unpaired
from learner.reporting.run_record import VERSIONS as FOLDER
from learner.validation import play

SERVED = "served"
"""The adapter that users' requests are answered with."""
KEPT_BEFORE = 3
"""Versions whose sessions keep them, with `serve.sessions_keep_version`, beside the one that is served."""
MOST_PLAYS = 4
"""How often a version that others are compared with plays the gate's tasks, in all: with each play it is known better."""


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
    min_entropy: float
    max_drift: float
    max_likeness: float
    session_share: float
    sessions: int
    session_hours: float


Drift = Callable[[Sequence[Answer]], Awaitable[float]]
"""How far the newest version is from the model without its adapter in these answers of its own: nats per token."""


TOO_FAR = ("score", "entropy", "drift", "likeness")
"""Kinds of refusals that a smaller step may avoid."""
MOST_HALVINGS = 4


class Refusal(NamedTuple):
    """Why a candidate is not served. `kind`: score, entropy, drift, likeness, sessions, or unplayed."""

    kind: str
    why: str


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
        keeps_sessions: bool = False,
    ) -> None:
        """`keeps_sessions`: a session stays with the version that it began with, as long as that is among those kept in engines."""
        self._compare = compare
        self._slots: dict[str, int | None] = dict.fromkeys(
            [SERVED, *(f"{SERVED}-{number + 1}" for number in range(KEPT_BEFORE if keeps_sessions else 0))]
        )
        """Adapter in engines, by name -> the version that it is."""
        self._candidate: int | None = None
        """It answers a share of the sessions that begin."""
        self._woken, self._is_stopped = asyncio.Event(), False
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
        self._figures = self._figures_of_all()

    async def begin(self) -> None:
        """Give the engines the version that is served, before they start, and those before it that sessions keep."""
        before = [each["version"] for each in reversed(self._history) if self._at(each["version"]).is_dir()]
        latest = [] if self.served is None else dict.fromkeys([self.served, *before])
        for role, version in zip(self._slots, latest, strict=False):
            await self._engines.load_adapter(self._at(version), role=role, version=version)
            self._slots[role] = version

    def draw(self) -> int:
        """The version that answers a session that begins now."""
        if self._candidate is not None and random.random() < self.gate.session_share:
            return self._candidate
        return self.served or 0

    def adapter_of(self, version: int | None) -> tuple[int, str]:
        """The version that answers a session that this one has begun, and its adapter in engines; None: it is of no session."""
        if version is not None and version == self._candidate:
            return version, ""
        known = {there: role for role, there in self._slots.items()}
        kept = version if version is not None and version in known and len(self._slots) > 1 else self.served
        return kept or 0, known.get(kept, SERVED)

    def stop(self) -> None:
        """The run ends: a candidate's sessions are not waited for."""
        self._is_stopped = True
        self._woken.set()

    async def published(self, folder: Path, *, version: int) -> None:
        """The engines have a new version, whose adapter is in `folder`: it is kept. The first one is served. One that was judged
        before a death of the learner, and is made again, stays as it was."""
        if self._verdict(version) is not None:
            return
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

    async def admit(
        self, version: int, *, episodes: Sequence[str], entropy: float | None, drift: Drift | None = None
    ) -> bool | None:
        """Whether a candidate is promoted: what `serve.gate` asks for holds, in its answers to the gate's tasks and in users'
        sessions. `episodes`: what it was trained on. None: the run ends before that is known."""
        parent = self.served
        assert parent is not None, "the first version was published"
        if (verdict := self._verdict(version)) is not None:
            self._tell(version, {"made_again": True})
            if verdict and all(each["version"] != version for each in self._history):
                await self._serve(version, why="gate")
            return verdict
        about: dict[str, Any] = {"parent": parent, "sessions": list(episodes)}
        about |= {} if entropy is None else {"entropy": entropy}
        if self._compare is not None:
            about["compared"] = asdict(await self._compare(parent))
        self._tell(version, about)
        level = level_of(sum(each.get("state") == "refused" and each.get("parent") == parent for each in self.list()))
        refusal = self._collapsed(entropy) or await self._weigh(version, parent=parent, level=level, drift=drift)
        if refusal is None and self.gate.session_share:
            refusal = await self._try(version, parent=parent, level=level)
            if refusal is None and self._is_stopped:
                return None
        if refusal is not None:
            self._tell(version, {"state": "refused", "why": refusal.why, "refused_for": refusal.kind})
            self._figures = self._figures_of_all()
            self._say(f"version {version} is refused: {refusal.why}; version {self.served} is served on")
            return False
        self._tell(version, {"state": "promoted", "why": ""})
        self._figures = self._figures_of_all()
        await self._serve(version, why="gate")
        return True

    def _collapsed(self, entropy: float | None) -> Refusal | None:
        first = next((each["entropy"] for each in self.list() if "entropy" in each), entropy)
        if entropy is None or not first or entropy >= self.gate.min_entropy * first:
            return None
        most = f"below {self.gate.min_entropy:g} of that"
        return Refusal(
            "entropy", f"its entropy is {entropy:.3g} nats, and was {first:.3g} at the first candidate: {most}"
        )

    async def _weigh(self, version: int, *, parent: int, level: float, drift: Drift | None) -> Refusal | None:
        """What the gate's tasks say of a candidate."""
        if self._tasks is None:
            return None
        gate = self.gate
        try:
            tasks = await asyncio.to_thread(self._tasks)
        except TaskError as error:
            self._say(f"the gate's tasks cannot be read: {error}")
            tasks = []
        answers = await self._play(version, tasks)
        against = await self._reference(parent, tasks, candidate=version)
        own, others = self._about(version).get("scores", {}), self._about(against).get("scores", {})
        both = [own[name] - others[name] for name in own if name in others]
        found: dict[str, Any] = {"tasks": len(both), "least_difference": None}
        alike = await asyncio.to_thread(likeness, answers)
        found |= {} if alike is None else {"likeness": alike}
        found |= {"drift": await drift(answers)} if drift is not None and answers else {}
        if len(both) < max(2, len(tasks) // 2):
            self._tell(version, {"gate": found})
            return Refusal("unplayed", "too few of the gate's tasks could be played")
        bounds = paired(both, level=level)
        found |= {
            "against": against, "mean": fmean(own.values()), "parent_mean": fmean(others.values()), "level": level,
            "difference": bounds.mean, "least_difference": bounds.least,
        }  # fmt: skip
        self._tell(version, {"gate": found})
        first = next((each["gate"]["likeness"] for each in self.list() if "likeness" in each.get("gate", {})), 0.0)
        if found.get("drift", 0.0) > gate.max_drift:
            return Refusal(
                "drift", f"it is {found['drift']:.3g} nats per token from the model, above {gate.max_drift:g}"
            )
        if alike is not None and alike > (most := max(gate.max_likeness, (1 + first) / 2)):
            said = f"its answers to different tasks are alike by {alike:.3f}, above {most:.3g}"
            return Refusal("likeness", f"{said}; those of the first candidate by {first:.3f}")
        if bounds.least < -gate.margin:
            return Refusal(
                "score",
                f"it scores {found['mean']:.3f} at the gate, version {against} {found['parent_mean']:.3f}: the difference may be "
                f"{bounds.least:.3f}, below -{gate.margin:g}",
            )
        return None

    async def _reference(self, parent: int, tasks: Sequence[Task], *, candidate: int) -> int:
        """The version with which a candidate is compared: the best of those that led to it, back to one that an operator has
        promoted although it was refused. It plays once more, as long as its scores are not known well."""
        names = {task.task_id for task in tasks}
        line: list[int] = []
        means: dict[int, float] = {}
        each: int | None = parent
        while each is not None and each not in line:
            line.append(each)
            about = self._about(each)
            if names and set(scores := about.get("scores", {})) == names:
                means[each] = fmean(scores.values())
            each = None if about.get("state") == "refused" else about.get("parent")
        best = max(means, key=lambda each: means[each], default=parent)
        plays = self._about(best).get("plays", 1) if means else 0
        if tasks and plays < (1 if self.gate.samples == 1 else MOST_PLAYS):  # a greedy one plays the same again
            await self._engines.load_weights(self._at(best), version=best)
            try:
                await self._play(best, tasks)
            finally:
                await self._engines.load_weights(self._at(candidate), version=candidate)
        return best

    async def _play(self, version: int, tasks: Sequence[Task]) -> list[Answer]:
        """Has the newest version play the tasks; what it scored is added to what is known of it. Some of its answers."""
        found = await play(self._ledger, tasks, samples=self.gate.samples, fewest=1)
        scores = {one.task_id.partition("/")[2]: fmean(one.scores) for one in found}
        known, plays = self._about(version).get("scores", {}), self._about(version).get("plays", 0)
        if set(known) != {task.task_id for task in tasks}:
            known, plays = {}, 0
        scores = {name: (known.get(name, new) * plays + new) / (plays + 1) for name, new in scores.items()}
        self._tell(version, {"scores": scores, "plays": plays + 1})
        step = max(1, len(found) // MOST_ANSWERS)
        some = [await self._answer(each) for each in found[::step][:MOST_ANSWERS]]
        return [each for each in some if each is not None]

    async def _answer(self, played: Validated) -> Answer | None:
        rounds = await asyncio.wrap_future(self._ledger.rounds(played.episodes[0]))
        rows = episode_rows(rounds, group_id=0, scores=EpisodeScores(whole=played.scores[0]))
        return Answer(rows[0].ids.tolist(), rows[0].mask.tolist()) if rows else None

    async def _try(self, version: int, *, parent: int, level: float) -> Refusal | None:
        """Have a candidate answer a share of the sessions that begin, until what people think of them is known well enough."""
        gate, began = self.gate, time.time() - 0.002  # SQLite's clock counts milliseconds
        looks, wanted = 0, gate.sessions
        trial: dict[str, Any] = {"sessions": 0, "parent_sessions": 0}
        loop, kind = asyncio.get_running_loop(), "sessions"

        def wake(_: object) -> None:
            with suppress(RuntimeError):  # the loop has ended, and this wait with it
                loop.call_soon_threadsafe(self._woken.set)

        unwatch = self._ledger.watch(wake)
        self._candidate = version
        self._say(f"version {version} answers {gate.session_share:.0%} of the sessions that begin")
        try:
            async with asyncio.timeout(3600 * gate.session_hours):
                while True:
                    self._woken.clear()
                    if self._is_stopped:
                        return None
                    if self.served != parent:
                        return Refusal(kind, f"an operator has promoted version {self.served} meanwhile")
                    scores = await asyncio.wrap_future(self._ledger.session_scores(since=began))
                    own, others = (
                        [each.score for each in scores if each.version == of and not each.is_watched]
                        for of in (version, parent)
                    )
                    trial |= {"sessions": len(own), "parent_sessions": len(others)}
                    if min(len(own), len(others)) >= max(2, wanted):
                        looks, wanted = looks + 1, 2 * wanted
                        bounds = unpaired(own, others, level=level / 2**looks)  # all looks together have the level
                        trial |= {"mean": fmean(own), "parent_mean": fmean(others), "least_difference": bounds.least}
                        if bounds.least >= -gate.margin:
                            return None
                        if bounds.most < -gate.margin:
                            break
                    self._tell(version, {"trial": trial})
                    await self._woken.wait()
        except TimeoutError:
            pass
        finally:
            self._candidate = None
            unwatch()
            self._tell(version, {"trial": trial})
        if "mean" not in trial:
            return Refusal(
                kind,
                f"{trial['sessions']} of its sessions and {trial['parent_sessions']} of version {parent} had feedback in "
                f"{gate.session_hours:g} hours, fewer than {gate.sessions} each",
            )
        return Refusal(
            kind,
            f"people give its sessions {trial['mean']:.3f}, those of version {parent} {trial['parent_mean']:.3f}: the difference "
            f"may be {trial['least_difference']:.3f}, below -{gate.margin:g}",
        )

    def figures(self) -> dict[str, float]:
        """How many candidates there were, what was refused for what, and what the gate measured of the last one."""
        return self._figures

    def has_other_weights(self, version: int) -> bool:
        """Whether the learner, which had come to this version, has other weights than those that users were served as it: it was
        refused, users were given an earlier one again, or it was made again, for which feedback may have changed."""
        verdict = self._verdict(version)
        is_earlier = self.served is not None and self.served < version
        return verdict is False or (verdict is True and is_earlier) or "made_again" in self._about(version)

    def _verdict(self, version: int) -> bool | None:
        """Whether it was promoted; None: it was not judged."""
        return {"promoted": True, "refused": False}.get(self._about(version).get("state", ""))

    def pace(self, version: int) -> float:
        """The share of the learning rate with which this version is trained: the same weights on much the same sessions would
        make the same losing step again. Halved by each candidate before it that was refused for what it is, doubled by each
        promoted."""
        halvings = 0
        for each in self.list():
            if each["version"] >= version:
                break
            if each.get("state") == "promoted":
                halvings = max(0, halvings - 1)
            elif each.get("refused_for") in TOO_FAR:
                halvings = min(MOST_HALVINGS, halvings + 1)
        return 0.5**halvings

    def _figures_of_all(self) -> dict[str, float]:
        judged = [each for each in self.list() if each.get("state") in ("promoted", "refused")]
        if not judged:
            return {}
        refused = [each for each in judged if each["state"] == "refused"]
        in_a_row = next((n for n, each in enumerate(reversed(judged)) if each["state"] != "refused"), len(judged))
        kinds = Counter(each.get("refused_for", "score") for each in refused[len(refused) - in_a_row :])
        last = judged[-1].get("gate", {})
        return {
            "live/gate_candidates": float(len(judged)),
            "live/gate_refused": float(len(refused)),
            "live/gate_refused_in_a_row": float(in_a_row),
            "live/gate_sessions": float(judged[-1].get("trial", {}).get("sessions", 0)),
            **{f"live/gate_refused_for_{kind}": float(number) for kind, number in kinds.items()},
            **{f"live/gate_{name}": last[name] for name in ("difference", "drift", "likeness") if name in last},
        }

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

    async def _serve(self, version: int, *, why: str) -> None:
        async with self._changing:
            if version not in self._slots.values():
                role = min(self._slots, key=lambda role: self._last_served(self._slots[role]))
                await self._engines.load_adapter(self._at(version), role=role, version=version)
                self._slots[role] = version
            self.served = version
            self._history.append({"version": version, "at": time.time(), "why": why})
            state = {"version": version, "history": self._history}
            await asyncio.to_thread(_write, self._folder / "served.json", state)
        self._woken.set()

    def _last_served(self, version: int | None) -> int:
        """Place in the history, the higher the later; -1: it was not served."""
        return max((place for place, each in enumerate(self._history) if each["version"] == version), default=-1)

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
