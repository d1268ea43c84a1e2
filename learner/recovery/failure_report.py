"""Why episodes fail, in words: counts by reason, refused model requests, and the error that the agents' logs have most often.

Called by `learner.recovery.failure_watch` and at the end of a run. Invariant: causes, not after-effects: what follows from another
failure (members of a group that was given up, requests of an episode that has ended) is not counted. It only reads.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from buffers.ledger.episodes import GIVEN_UP
from buffers.ledger.scores import CONSTRAINED, NO_ROUNDS

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
