"""`RunPages`: a run with its episodes, each as its record, its tree, its conversation, and windows of its tokens.

Used by `learner.page.reports`. Invariant: a request costs what its window holds: an episode's rounds are decoded once and kept
for the few episodes that were asked for last. It only reads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from buffers.ledger import episode_views
from buffers.ledger.batches import WAS_FORGOTTEN, read_rounds
from buffers.ledger.branches import (
    MEANT,
    NOT_SAMPLED,
    Branch,
    Window,
    branches_of,
    causes_of,
    num_trained,
    window_of,
)
from buffers.ledger.episode_query import MOST_POINTS, Query
from buffers.ledger.episode_views import EpisodeView
from buffers.ledger.sessions import SETTLED
from buffers.ledger.turns import Turn, pieces_of, turns_of, with_text
from buffers.records import Round
from buffers.training_rows import CUT
from learner.page.metric_columns import plain
from learner.page.run_view import RunView
from learner.page.token_window import MOST_TOKENS, packed
from learner.recovery.failure_watch import MEANINGS
from learner.reporting.token_figures import ARRAYS, TokenFigures, read_figures

Numbers = npt.NDArray[np.floating[Any]]
MOST_TURNS = 500
MOST_BRANCHES = 1 << 30
KEPT = 8
"""Episodes whose rounds are in memory."""
_SCORE = ("part", "round", "judge", "value", "verdict", "hint", "told_at", "is_settled")
_SCORES = (
    "SELECT part, round_index, judge, value, verdict, hint, told_at, EXISTS (SELECT 1 FROM session WHERE session.episode_id = "
    f"f.episode_id) AND {SETTLED} FROM score AS f WHERE episode_id = ? ORDER BY score_id LIMIT 5000"
)


@dataclass(slots=True, kw_only=True)
class Opened:
    """An episode with its rounds; `turns` by branch, once they were asked for."""

    rounds: list[Round]
    branches: list[Branch]
    causes: dict[int, str]
    figures: dict[int, TokenFigures]
    turns: dict[int, list[Turn]] = field(default_factory=dict)


class RunPages(RunView):
    """`meanings`: what each cause of a break means, in a sentence."""

    def __init__(self, run_id: str, folder: Path, *, meanings: Mapping[str, str]) -> None:
        super().__init__(run_id, folder)
        self._meanings = meanings
        self._lock = threading.Lock()
        self._opened: OrderedDict[tuple[Any, ...], Opened] = OrderedDict()

    def detail(self, query: Query) -> dict[str, Any]:
        """All of an episode but its texts and tokens. Raises Unknown."""
        one, opened = self._read(query)
        with self.ledger() as db:
            members = [each.episode_id for each in episode_views.episodes_of(db, group_id=one.group_id)]
            task = episode_views.task_of(db, task_id=one.task_id)
            told = db.execute(_SCORES, (one.episode_id,)).fetchall()
        place = members.index(one.episode_id)
        scores = [dict(zip(_SCORE, each, strict=True)) for each in told]
        one = replace(
            one,
            breaks=sorted(set(opened.causes.values())),
            cut=any(each.finish_reason == CUT for each in opened.rounds),
        )
        return {
            "episode": asdict(one),
            "task": task,
            "neighbours": {
                "previous": members[place - 1] if place else None,
                "next": members[place + 1] if place + 1 < len(members) else None,
                "group": members,
            },
            "scores": scores,
            "advantages": _spread(opened.figures),
            "rounds": _rounds(opened, scores=scores, meanings=self._meanings),
            "branches": [
                {
                    "branch": branch.number,
                    "leaf": branch.leaf,
                    "path": [each.round_index for each in branch.path],
                    "tokens": branch.num_tokens,
                    "trained_tokens": branch.num_trained,
                    "aborted": branch.aborted,
                }
                for branch in opened.branches
            ],
            "why_untrained": why_untrained(one),
        }

    def conversation(self, query: Query) -> dict[str, Any]:
        """Some turns of a branch, with their text."""
        start, count = query.window(default=200, most=MOST_TURNS)
        opened, found = self._branch(query)
        branch, decoder = found.number, self.decoder()
        if branch not in opened.turns:
            opened.turns[branch] = turns_of(found, decoder=decoder)
        turns = opened.turns[branch]
        shown = []
        for turn in turns[start : start + count]:
            ids = window_of(found, start=turn.token_start, count=turn.token_end - turn.token_start).ids
            shown.append(asdict(with_text(turn, ids.tolist(), decoder=decoder)))
        return {"branch": branch, "num_turns": len(turns), "start": start, "turns": shown}

    def tokens(self, query: Query) -> bytes:
        """A window of a branch's tokens; see `learner.page.token_window`."""
        start, count = query.window(default=MOST_TOKENS, most=MOST_TOKENS)
        opened, found = self._branch(query)
        window = window_of(found, start=start, count=count)
        figures, known = _figures_of(window, opened.figures)
        masked = window.mask.astype(bool)
        kept = "all" if bool(known[masked].all()) and masked.any() else "some" if known.any() else "none"
        head = {
            "branch": found.number,
            "start": start,
            "count": len(window.ids),
            "num_tokens": found.num_tokens,
            "pieces": pieces_of(window.ids.tolist(), decoder=self.decoder()),
            "figures": kept,
        }
        arrays: dict[str, np.ndarray[Any, Any]] = {
            "ids": window.ids, "sampled": window.sampled, "mask": window.mask, "trained": figures.weighed,
            "version": window.version, "round": window.round_index, "logprob": window.logprob, "learner": figures.learner,
            "start_logprob": figures.start, "advantage": figures.advantage,
        }  # fmt: skip
        return packed(head, arrays)

    def overview(self, query: Query) -> dict[str, Any]:
        """A whole branch in so many buckets: where to look in a long one."""
        buckets = query.number("buckets", 400, most=MOST_POINTS, least=1)
        opened, found = self._branch(query)
        window = window_of(found, start=0, count=found.num_tokens)
        figures, _ = _figures_of(window, opened.figures)
        number = min(buckets, len(window.ids))
        ends = [place * len(window.ids) // max(number, 1) for place in range(number + 1)]
        version = np.where(window.sampled > 0, window.version, np.nan)
        columns: dict[str, tuple[Callable[[Numbers], Any], Numbers]] = {
            "logprob": (np.min, window.logprob),
            "difference": (np.max, np.abs(figures.learner - window.logprob)),
            "version": (np.max, version),
            "advantage": (np.mean, figures.advantage),
            "mask": (np.mean, window.mask.astype(np.float64)),
        }
        shown = {name: _bucketed(values, ends, reduce=reduce) for name, (reduce, values) in columns.items()}
        return {"branch": found.number, "num_tokens": len(window.ids), "buckets": number, **shown}

    def _branch(self, query: Query) -> tuple[Opened, Branch]:
        number = query.number("branch", 0, most=MOST_BRANCHES)
        _, opened = self._read(query)
        if not 0 <= number < len(opened.branches):
            raise episode_views.Unknown(
                f"branch must be one of the episode's {len(opened.branches)}, got {number}; they begin at 0"
            )
        return opened, opened.branches[number]

    def _read(self, query: Query) -> tuple[episode_views.EpisodeView, Opened]:
        """The episode as it is now, with its rounds."""
        episode_id = query.text("episode")
        with self.ledger() as db:
            one = episode_views.episode(db, episode_id=episode_id)
            (last,) = db.execute("SELECT max(rowid) FROM round WHERE episode_id = ?", (episode_id,)).fetchone()
            key = (episode_id, one.state, one.step, last)
            with self._lock:
                if (opened := self._opened.get(key)) is not None:
                    self._opened.move_to_end(key)
                    return one, opened
            rounds = read_rounds(db, episode_id=episode_id)
        causes = causes_of([(r.round_index, r.parent, r.finish_reason, r.memo) for r in rounds])
        figures = {} if one.step is None else read_figures(self.folder, step=one.step, episode_id=episode_id)
        opened = Opened(rounds=rounds, branches=branches_of(rounds), causes=causes, figures=figures)
        with self._lock:
            self._opened[key] = opened
            while len(self._opened) > KEPT:
                self._opened.popitem(last=False)
        return one, opened


def _figures_of(window: Window, kept: Mapping[int, TokenFigures]) -> tuple[TokenFigures, npt.NDArray[np.bool_]]:
    """[n] the learner's figures of a window's tokens, and of which tokens they are kept."""
    number = len(window.ids)
    found = TokenFigures(
        learner=np.full(number, np.nan, np.float32),
        start=np.full(number, np.nan, np.float32),
        advantage=np.full(number, np.nan, np.float32),
        weighed=window.mask.copy(),
    )
    known = np.zeros(number, bool)
    for index, figures in kept.items():
        own = np.flatnonzero((window.round_index == index) & (window.order != NOT_SAMPLED))
        order = window.order[own]
        if len(order) and order.max() < len(figures.learner):
            for name in ARRAYS:
                getattr(found, name)[own] = getattr(figures, name)[order]
            known[own] = True
    return found, known


def _bucketed(values: Numbers, ends: Sequence[int], *, reduce: Callable[[Numbers], Any]) -> list[float | None]:
    """One value for each bucket, of what is a number in it."""
    found = []
    for start, end in pairwise(ends):
        some = values[start:end]
        some = some[np.isfinite(some)]
        found.append(float(reduce(some)) if len(some) else np.nan)
    return plain(np.array(found, dtype=np.float64))


def _rounds(opened: Opened, *, scores: list[dict[str, Any]], meanings: Mapping[str, str]) -> list[dict[str, Any]]:
    of_branch = {index: branch.number for branch in opened.branches for index in branch.fresh}
    for branch in opened.branches:
        for each in branch.path:
            of_branch.setdefault(each.round_index, branch.number)
    by_round: dict[int, list[dict[str, Any]]] = {}
    for score in scores:
        if score["round"] is not None:
            by_round.setdefault(score["round"], []).append(score)
    return [
        {
            "round": each.round_index,
            "parent": each.parent,
            "branch": of_branch[each.round_index],
            "finish": each.finish_reason,
            "tail": len(each.tail_ids),
            "sampled": len(each.sampled_ids),
            "trained": num_trained(each),
            "versions": np.unique(each.versions).tolist(),
            "mean_logprob": float(each.logprobs.mean()) if len(each.logprobs) else None,
            "cause": (cause := opened.causes.get(each.round_index)),
            "cause_expected": cause in MEANT,
            "cause_sentence": meanings.get(cause or "", ""),
            "scores": by_round.get(each.round_index, []),
        }
        for each in opened.rounds
    ]


def _spread(figures: dict[int, TokenFigures]) -> dict[str, float] | None:
    values = np.concatenate([np.zeros(0, np.float32), *(each.advantage for each in figures.values())])
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    return {"mean": float(values.mean()), "min": float(values.min()), "max": float(values.max())}


# Why something was not trained, in sentences: of one episode, and of a whole run as a list with the most frequent first. Pure
# functions of what the ledger and the run's figures say.

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
    WAS_FORGOTTEN: ("it was forgotten before it was trained (`understudy ledger forget`, serve.retention_days)", ""),
}
"""Kind of reason of an evicted group -> what it means, what to change."""
EPISODE_REASONS: dict[str, tuple[str, str]] = {
    "stale": GROUP_REASONS["stale"],
    "no variance": GROUP_REASONS["no variance"],
    WAS_FORGOTTEN: GROUP_REASONS[WAS_FORGOTTEN],
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
LEFT_OUT_FIGURES = {
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
    if (session := one.session) is not None and (session.is_side or session.is_watched):
        return "a side call (a title, a summary) is never trained" if session.is_side else "another model answers it"
    if session is not None:
        return "not yet: it is open until something was said of it and serve.silence_s went by without a request"
    return "not yet: it has no score"


def meaning_of(kind: str) -> tuple[str, str]:
    """What a failed episode's kind of reason means, and what to change; empty where nothing is known of it."""
    return EPISODE_REASONS.get(kind, (MEANINGS.get(kind, ""), ""))


def reasons_of(
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
    for name, (reason, sentence, remedy) in LEFT_OUT_FIGURES.items():
        if share := figures.get(name):
            found.append(_entry("token", reason, share, sentence, remedy))
    return sorted(found, key=lambda entry: (entry["what"] == "token", -entry["number"]))


def _entry(
    what: str, reason: str, number: float, sentence: str, remedy: str, *, filter_: bool = False
) -> dict[str, Any]:
    from urllib.parse import urlencode

    query = urlencode({"untrained": "1", "reason": reason}) if filter_ and reason != "no reason" else None
    return {"what": what, "reason": reason, "number": number, "sentence": sentence, "remedy": remedy, "filter": query}
