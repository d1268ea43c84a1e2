"""The watch loop: shows the queues once a second, says when no episode ends or the ledger waits for its disk, and ends a run whose
episodes cannot succeed.

Run by `learner.pipeline`, which names the parts. It changes nothing.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path

from buffers.errors import AgentError
from buffers.ledger.episodes import GIVEN_UP
from buffers.ledger.scores import CONSTRAINED, NO_ROUNDS

# Why episodes fail, in words: counts by reason, refused model requests, and the error that the agents' logs have most often.
# Invariant: causes, not after-effects: what follows from another failure (members of a group that was given up, requests of an
# episode that has ended) is not counted. It only reads.

FAILED = "failed/"
MEANINGS = {
    NO_ROUNDS: "the agent made no model call with its key; does it use OPENAI_BASE_URL and OPENAI_API_KEY?",
    CONSTRAINED: "each model call of the agent constrained what is sampled (response_format, logit_bias, a forced tool)",
    "deadline": "an episode took longer than agents.deadline_s",
    "silent agent": "an agent sent no request for agents.silence_s",
    "scorer": "data.scorer gave no score for what the agent printed",
    "agent exited with code 0 before a score was reported": (
        "the agent ended without an error, and no score was reported: env.command must report one (POST /scores), or "
        "data.scorer must be set"
    ),
}
"""Reason of a failed episode -> what it means, for readers who see it for the first time."""
LOG_BYTES = 65_536
"""Bytes that are read of the end of each log."""
MAX_LOGS = 64
EXCERPT_LINES = 8
MAX_LINE_CHARS = 240
_RAISED = re.compile(r"[\w.]*(Error|Exception|Exit|Interrupt)\b")
_SAYS_ERROR = re.compile(r"error|exception|panic|fatal", re.IGNORECASE)
_VARIES = re.compile(r"0x[0-9a-f]+|[0-9a-f]{8,}|\d+")


def reasons(counts: Mapping[str, int]) -> dict[str, int]:
    """Reason -> number of failed episodes, the most frequent first."""
    found = {name.removeprefix(FAILED): number for name, number in counts.items() if name.startswith(FAILED) and number}
    found.pop(GIVEN_UP, None)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def in_short(counts: Mapping[str, int]) -> str:
    """`4 failed: deadline` or `7 failed: 4 deadline, 3 scorer`; empty when none did."""
    why = reasons(counts)
    if len(why) < 2:
        return "".join(f"{number} failed: {reason}" for reason, number in why.items())
    return f"{sum(why.values())} failed: " + ", ".join(f"{number} {reason}" for reason, number in why.items())


def why_episodes_fail(
    counts: Mapping[str, int],
    *,
    details: Mapping[str, str],
    refused: Mapping[str, int],
    agents: Path,
    env_log: Path | None,
) -> str:
    """Several lines. `details`: reason -> an example of it with its detail; `refused`: message of a refused model request -> how
    often; `agents`: folder of their logs; `env_log`: that of the environment, if there is one."""
    lines = ["episodes failed because:"]
    for reason, number in reasons(counts).items():
        meaning = f": {MEANINGS[reason]}" if reason in MEANINGS else ""
        lines.append(f"  {number} x {reason}{meaning}")
        if (detail := details.get(reason, reason)) != reason:
            lines.append(f"    most often: {detail.removeprefix(reason).removeprefix(':').strip()}")
    if refused:
        lines.append("model requests were refused because:")
        lines += [f"  {number} x {why}" for why, number in sorted(refused.items(), key=lambda item: -item[1])]
    lines += _told_by_logs(agents)
    if env_log is not None:
        lines.append(f"the environment's log: {env_log}")
    return "\n".join(lines)


def _told_by_logs(agents: Path) -> list[str]:
    if not agents.is_dir():
        return ["the run started no agents (agents.command is empty)"]
    error = most_frequent_error(agents)
    if error is None:
        return [f"the agents' logs say nothing of an error: {agents}"]
    number, log, excerpt = error
    return [f"the error that the agents' logs have most often ({number} x, first in {log}):", excerpt]


def most_frequent_error(folder: Path) -> tuple[int, Path, str] | None:
    """(how often, a log, what it says up to there) of the error that stands most often in `<folder>/*/log.txt`; of several, the
    first. An exception counts; without one any line that mentions an error; without one the end of the first log."""
    logs = [(log, _end_of(log)) for log in sorted(folder.glob("*/log.txt"))[:MAX_LOGS] if _is_own(log, folder)]
    logs = [(log, text) for log, text in logs if text.strip()]
    for pattern in (_RAISED.match, _SAYS_ERROR.search):
        seen: Counter[str] = Counter()
        first: dict[str, tuple[Path, str]] = {}
        for log, text in logs:
            for start, line in _lines(text):
                if not line.startswith((" ", "\t")) and pattern(line):
                    kind = _VARIES.sub("#", line[:300])
                    seen[kind] += 1
                    first.setdefault(kind, (log, _excerpt(text[: start + len(line)])))
        if seen:
            kind, number = seen.most_common(1)[0]
            return number, *first[kind]
    return (1, logs[0][0], _excerpt(logs[0][1])) if logs else None


def _is_own(log: Path, folder: Path) -> bool:
    """Whether it is a file in the folder, which another person may have sent: no pipe, which never ends, and no link out of it."""
    return log.is_file() and log.resolve().is_relative_to(folder.resolve())


def _excerpt(text: str) -> str:
    """Its last lines."""
    lines = text.rstrip().splitlines()[-EXCERPT_LINES:]
    return "\n".join(line if len(line) <= MAX_LINE_CHARS else f"{line[:MAX_LINE_CHARS]} ..." for line in lines)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    start = 0
    for line in text.splitlines(keepends=True):
        yield start, line.rstrip("\r\n")
        start += len(line)


def _end_of(log: Path) -> str:
    with log.open("rb") as source:
        source.seek(max(0, log.stat().st_size - LOG_BYTES))
        return source.read().decode(errors="replace")


WATCH_S = 1.0
QUIET_S = 30.0
"""Seconds without a scored episode until that is reported; twice as long until it is reported again, and so on."""
FAILING_BATCHES = 2
"""Batches of groups given up in a row, without one score in between, that end the run."""
EQUAL_BATCHES = 20
"""Batches of groups dropped in a row because their scores are equal, without one to train in between, that end the run."""
NOBODY_ASKS = "no agent asks for an episode"


async def watch(
    *,
    counts: Callable[[], Mapping[str, int]],
    groups_per_step: int,
    show: Callable[[], Awaitable[None]],
    say: Callable[[str], None],
    disk: Callable[[], str],
    pool: Callable[[], Mapping[str, float]],
    is_starting: Callable[[], bool],
    why: Callable[[Mapping[str, int]], Awaitable[str]],
) -> None:
    """Runs until it is cancelled. Raises AgentError when every episode fails or scores the same.

    `show` updates the display; `say` prints a line; `disk`: why the ledger stores or begins nothing for now, and the remedy;
    `pool`: figures of the task pool; `is_starting`: no episode can start yet;
    `why(counts)` says why episodes failed, given the counts since the last score.
    """
    failures = Streak("evicted/failed", ended_by=("episodes/scored",), patience=FAILING_BATCHES * groups_per_step)
    equals = Streak(
        "evicted/no variance", ended_by=("groups/ready", "groups/trained"), patience=EQUAL_BATCHES * groups_per_step
    )
    quiet = Quiet(counts(), at=time.monotonic())
    said = ""
    while True:
        await asyncio.sleep(WATCH_S)
        now = counts()
        line = quiet.line(now, pool=pool(), at=time.monotonic(), is_starting=is_starting())
        if failures.lasts(now):
            reasons = await why(quiet.since_score(now))
            raise AgentError(f"{failures.patience} groups in a row were given up without one scored episode; {reasons}")
        if equals.lasts(now):
            raise AgentError(
                f"data.reward_manager=dapo needs groups with different scores, got {equals.patience} in a row with equal "
                f"ones; the tasks are solved, or too hard, or the scorer is constant: take others, or "
                f"data.reward_manager=naive"
            )
        if line:
            say(line)
        if (waits := disk()) != said:
            say(f"the ledger waits: {waits}; it continues by itself" if waits else "the ledger stores again")
            said = waits
        await show()


class Streak:
    """A count that grew by `patience` while none of `ended_by` grew."""

    def __init__(self, name: str, *, ended_by: tuple[str, ...], patience: int) -> None:
        self._name = name
        self._ended_by = ended_by
        self.patience = patience
        self._since = 0
        self._seen = 0

    def lasts(self, counts: Mapping[str, int]) -> bool:
        """Look at the present counts."""
        seen = sum(counts.get(name, 0) for name in self._ended_by)
        if seen > self._seen:
            self._since = counts.get(self._name, 0)
        self._seen = max(seen, self._seen)
        return counts.get(self._name, 0) - self._since >= self.patience


class Quiet:
    """Says when no episode was scored for long, at growing intervals. Not a word while the learner is busy: then agents wait for
    room, and no episode runs or fails."""

    def __init__(self, counts: Mapping[str, int], *, at: float) -> None:
        """`at`: monotonic seconds."""
        self._at_score = counts
        self._since, self._next_s, self._failed = at, QUIET_S, counts["episodes/failed"]

    def line(self, counts: Mapping[str, int], *, pool: Mapping[str, float], at: float, is_starting: bool) -> str:
        """What to say now; mostly nothing."""
        has_scored = counts["episodes/scored"] > self._at_score["episodes/scored"]
        if has_scored:
            self._at_score = counts
        running, failed = int(pool["pool/running"]), counts["episodes/failed"]
        nobody_asks = not running and not pool["pool/agents_waiting"] and pool.get("pool/admissible_groups") != 0
        is_idle = not running and failed == self._failed and not nobody_asks
        if is_starting or has_scored or is_idle:
            self._since, self._next_s, self._failed = at, QUIET_S, failed
        if at - self._since < self._next_s:
            return ""
        self._next_s, self._failed = 2 * self._next_s, failed
        told = NOBODY_ASKS if nobody_asks else f"{running} running"
        failures = in_short(self.since_score(counts))
        return ", ".join(filter(None, (f"0 episodes scored in the last {at - self._since:.0f} s", told, failures)))

    def since_score(self, counts: Mapping[str, int]) -> dict[str, int]:
        """What was counted since an episode was scored last."""
        return {name: number - self._at_score.get(name, 0) for name, number in counts.items()}
