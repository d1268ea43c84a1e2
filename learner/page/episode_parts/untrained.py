"""Why something was not trained, in sentences: of one episode, and of a whole run as a list with the most frequent first.

Used by `learner.page`. Pure functions of what the ledger and the run's figures say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from buffers.ledger.reading.episodes import EpisodeView
from learner.recovery.failure_report import MEANINGS

GROUP_REASONS: dict[str, tuple[str, str]] = {
    "stale": (
        "all tokens of the group were older than buffer.max_policy_lag versions when a batch was made",
        "raise buffer.max_policy_lag, or let fewer episodes run at once (agents.concurrency)",
    ),
    "no variance": (
        "all members scored the same, so that there was nothing to compare (data.reward_manager=dapo)",
        "take tasks that are solved sometimes, or a scorer with finer scores",
    ),
    "failed": ("a member had no attempt left", "see why its episodes failed; or raise agents.max_attempts"),
}
"""Kind of reason of an evicted group -> what it means, what to change."""
EPISODE_REASONS: dict[str, tuple[str, str]] = {
    "stale": GROUP_REASONS["stale"],
    "no variance": GROUP_REASONS["no variance"],
    "group given up": ("its group was given up, as another member had no attempt left", "see why that one failed"),
    "deadline": (MEANINGS["deadline"], "raise agents.deadline_s, or bound what an agent does"),
    "agent left": (
        "the agent ended or hung up in the middle of its episode; it was tried again",
        "see the agents' logs",
    ),
    "silent agent": (MEANINGS["silent agent"], "raise agents.silence_s, or see why the agent stands still"),
    "environment died": ("the environment's process died while it was running; it was tried again", "see env.log"),
    "killed the engine": ("the engine died of its requests, again and again", "see the run's log"),
    "scorer": (MEANINGS["scorer"], "look at what the agent printed last, and at data.scorer"),
    "no rounds": (MEANINGS["no rounds"], "check that the agent reads its key and address from the environment"),
    "restart": ("the run's process died while it was running; it was tried again", ""),
}
ROUND_REASONS: dict[str, tuple[str, str]] = {
    "abort": (
        "the answer was lost or refused midway, or its agent hung up before it read any of it",
        "see the agents' logs for time-outs of their client",
    ),
}
LEFT_OUT = {
    "policy/too_old_share": (
        "too old",
        "trained tokens of the last step that a version before policy version - buffer.max_policy_lag sampled",
        "raise buffer.max_policy_lag, or shorten episodes",
    ),
    "policy/is_masked": (
        "masked",
        "trained tokens of the last step whose rows were left out by the importance weights (learner.correction)",
        "see the drift between engine and learner: policy/max_logprob_diff",
    ),
}
"""Figure of a step -> (reason, sentence, remedy), for tokens that a trained row left out."""


def kind_of(reason: str | None) -> str:
    """What stands before the colon of a reason."""
    return (reason or "").partition(":")[0]


def why_untrained(one: EpisodeView) -> str | None:
    """A sentence; None: it was trained."""
    if one.group_state in ("trained", "leased"):
        return None if one.state == "scored" else f"it failed ({one.reason}), and its group was trained without it"
    if one.group_state in ("validating", "validated"):
        return "it is of a validation task: those are never trained"
    if one.group_state == "evicted":
        kind = kind_of(one.group_reason)
        return f"its group was given up ({one.group_reason}): {GROUP_REASONS.get(kind, ('', ''))[0] or 'see its other members'}"
    if one.state == "failed":
        kind = kind_of(one.reason)
        return f"it failed ({one.reason}): {meaning_of(kind)[0] or 'another attempt takes its place, if one is left'}"
    if one.state == "scored":
        waits = "the other members of its group" if one.group_state == "open" else "its turn in a batch"
        return f"not yet: it waits for {waits}"
    return "not yet: it has no score"


def meaning_of(kind: str) -> tuple[str, str]:
    """What a failed episode's kind of reason means, and what to change; empty where nothing is known of it."""
    return EPISODE_REASONS.get(kind, (MEANINGS.get(kind, ""), ""))


def reasons(
    counts: Mapping[str, int], *, evictions: list[tuple[str, int]], aborted: int, figures: Mapping[str, float | None]
) -> list[dict[str, Any]]:
    """`counts`: of the ledger; `evictions`: groups given up by kind; `aborted`: rounds; `figures`: of the last step."""
    found = [
        _entry("group", kind or "no reason", number, *GROUP_REASONS.get(kind, ("", "")), filter_=True)
        for kind, number in evictions
    ]
    found += [
        _entry("episode", name.removeprefix("failed/"), number, *meaning_of(name.removeprefix("failed/")), filter_=True)
        for name, number in counts.items()
        if name.startswith("failed/") and number
    ]
    if aborted:
        found.append(_entry("round", "abort", aborted, *ROUND_REASONS["abort"]))
    for name, (reason, sentence, remedy) in LEFT_OUT.items():
        if share := figures.get(name):
            found.append(_entry("token", reason, share, sentence, remedy))
    return sorted(found, key=lambda entry: (entry["what"] == "token", -entry["number"]))


def _entry(
    what: str, reason: str, number: float, sentence: str, remedy: str, *, filter_: bool = False
) -> dict[str, Any]:
    from urllib.parse import urlencode

    query = urlencode({"untrained": "1", "reason": reason}) if filter_ and reason != "no reason" else None
    return {"what": what, "reason": reason, "number": number, "sentence": sentence, "remedy": remedy, "filter": query}
