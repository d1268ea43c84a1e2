"""All records that flow: frozen, keyword-only, numpy arrays for tokens.

Lifetimes: a `Task` lives as long as the run; an `Episode` from its lease to its score; a `Round` is written once, when its
generation ends; a `Row` and a `TrainBatch` are assembled from rounds when the learner claims a batch, and are not stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]
UInt16 = npt.NDArray[np.uint16]
UNKNOWN_EXPERT = 65535
"""Stands for each expert of a token whose experts nobody recorded."""


class EpisodeState(StrEnum):
    """PENDING -> RUNNING -> SCORED | FAILED. A failed episode may be retried as a new attempt (a new episode)."""

    PENDING = "pending"
    RUNNING = "running"
    SCORED = "scored"
    FAILED = "failed"


class GroupState(StrEnum):
    """OPEN (members outstanding) -> READY (all scored) -> LEASED (in a batch) -> TRAINED; or EVICTED with a reason.

    Groups of validation tasks: VALIDATING -> VALIDATED, or EVICTED; none of these states leads to training.
    """

    OPEN = "open"
    READY = "ready"
    LEASED = "leased"
    TRAINED = "trained"
    EVICTED = "evicted"
    VALIDATING = "validating"
    VALIDATED = "validated"


HIDDEN = frozenset({"answer", "ground_truth", "hint", "interaction_kwargs", "reward_model", "solution", "tools_kwargs"})
"""Keys of `extra_info` that hold the answer in verl's data sets, or a hint at it: not for agents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One parquet row, in verl's columns."""

    task_id: str
    """Unique in the run: `<file stem>:<row number>` unless the row has a `task_id` of its own."""
    prompt: list[dict[str, Any]]
    """Chat messages, each with `role` and `content`."""
    data_source: str = "unknown"
    ground_truth: Any = None
    """`reward_model.ground_truth`: for the scorer only, never sent to an agent."""
    agent_name: str | None = None
    extra_info: dict[str, Any] = field(default_factory=dict)

    def public(self) -> dict[str, Any]:
        """What an agent may see: everything but the ground truth, and those of verl's fields that repeat it (`HIDDEN`)."""
        return {
            "task_id": self.task_id,
            "data_source": self.data_source,
            "prompt": self.prompt,
            "agent_name": self.agent_name,
            "extra_info": {name: value for name, value in self.extra_info.items() if name not in HIDDEN},
        }

    def private(self) -> dict[str, Any]:
        """What a scorer sees: all of it."""
        return {**self.public(), "extra_info": self.extra_info, "ground_truth": self.ground_truth}


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One try at a task: member `sample_index` of group `group_id`."""

    episode_id: str
    """`<group_id>-<sample_index>-<attempt>`; never reused."""
    task: Task
    group_id: int
    sample_index: int
    attempt: int = 0
    greedy: bool = False
    """Sampled at temperature 0."""

    @property
    def seed(self) -> int:
        """What an environment starts from, in 0..2^31 - 1: the same for all members of a group and all their attempts."""
        digest = hashlib.sha256(f"{self.group_id} {self.task.task_id}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1  # fits the seeds of every library: 31 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedEpisode:
    """An episode that was handed to an agent; the body of `GET /tasks`."""

    episode_id: str
    api_key: str
    task: dict[str, Any]
    """The task as agents see it: without the ground truth."""
    env_address: str = ""
    """HOST:PORT of the environment, where there is one."""
    seed: int = 0
    """What the episode's environment starts from: the same for all episodes of a group."""
    base_url: str = ""
    """Root of the server process that owns the episode, without /v1."""


scored_episode: ContextVar[LeasedEpisode | None] = ContextVar("scored_episode", default=None)
"""The episode that the running task plays or scores: a scorer may ask a model under its key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One request and its generation. Only the new tokens are stored: the rest is the parent's."""

    episode_id: str
    round_index: int
    """0, 1, 2, ... in the order in which generations ended, within the episode."""
    parent: int | None
    """`round_index` of the round whose prompt + sampled ids this prompt starts with; None: a root."""
    tail_ids: Int32
    """[P] prompt ids after the parent's prompt + sampled ids (the whole prompt for a root)."""
    sampled_ids: Int32
    """[S] ids that the policy sampled."""
    logprobs: Float32
    """[S] natural-log probabilities under the behaviour policy, at the sampling temperature."""
    versions: Int32
    """[S] policy version that sampled each token."""
    finish_reason: str = "stop"
    """stop | length | tool_calls | abort | abandoned. An aborted round is recorded and never trained; one whose agent hung up after
    it had read some of it is abandoned, and trained."""
    trained: UInt8 | None = None
    """[S] 1 where the token is to be trained; None: everywhere."""
    memo: bytes = b""
    """What the server needs to recognise this round in a later request, after a restart too. Opaque to the buffer."""
    role: str = ""
    """The role that was asked; empty: the run has no roles."""
    experts: UInt16 | None = None
    """[n, layers, K] the experts that the engine used for the n tokens before the round's last, of its prompt and sampled: the last
    has met no layer, and its parent's last is the first of them. None: not recorded."""

    def __post_init__(self) -> None:
        sizes = {len(self.sampled_ids), len(self.logprobs), len(self.versions)}
        if len(sizes) != 1:
            raise ValueError(
                f"round {self.round_index} of episode {self.episode_id}: sampled_ids, logprobs and versions must have equal "
                f"lengths, got {len(self.sampled_ids)}, {len(self.logprobs)}, {len(self.versions)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreDetail:
    """What a score is of, and whose it is. Without more: the whole episode's, of the one judge there is."""

    round_index: int | None = None
    """The score is of this single round, beside the episode's."""
    branch: int | None = None
    """The score is of the branch (the row) that trains this round; it takes the place of the episode's there."""
    role: str = ""
    """The score is of this role, beside the episode's: it takes that one's place in the role's rows."""
    judge: str = ""
    """An episode's score is the mean of its judges'."""
    final: bool = True
    """False: other judges of the episode follow, it does not end yet."""
    revise: bool = False
    """Replaces what this judge said before, while the episode's group is not in a batch."""
    hint: str = ""
    """What this judge would have told the policy before it answered; `learner.hints` learns from it."""

    def __post_init__(self) -> None:
        if sum((self.round_index is not None, self.branch is not None, bool(self.role))) > 1:
            raise ValueError("a score is of a round or of a branch or of a role, got two of them; send two scores")


MAX_JUDGE_CHARS, MAX_HINT_CHARS, MAX_SESSION_CHARS = 100, 8192, 200
"""Longest name of a judge, longest hint, and longest name of a session."""


class Verdict(float):
    """A scorer's whole answer: the mean of its judges' scores, with what each of them said and a hint."""

    judges: dict[str, float]
    hint: str

    def __new__(cls, judges: Mapping[str, float], *, hint: str = "") -> Self:
        """`judges`: at least one score by name; the name of a single judge may be empty."""
        verdict = super().__new__(cls, sum(judges.values()) / len(judges))
        verdict.judges, verdict.hint = dict(judges), hint
        return verdict

    def reports(self) -> list[tuple[float, ScoreDetail]]:
        """A score report for each judge; the last one ends the episode."""
        last = len(self.judges) - 1
        return [
            (score, ScoreDetail(judge=name, final=number == last, hint=self.hint if number == last else ""))
            for number, (name, score) in enumerate(self.judges.items())
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeScores:
    """The scores of one episode that count, for its rows."""

    whole: float
    branches: dict[int, float] = field(default_factory=dict)
    """Scores by a round that the branch trains; the last of several counts."""
    rounds: dict[int, float] = field(default_factory=dict)
    """Scores by round."""
    roles: dict[str, float] = field(default_factory=dict)
    """Scores by role; the episode's holds for the others."""
    judges: dict[str, float] = field(default_factory=dict)
    """Scores of the whole episode by judge."""
    hint: str | None = None
    """The judges' hint, the last one of several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One branch (root-to-leaf path) of an episode's token tree: one training row of T tokens."""

    episode_id: str
    group_id: int
    score: float
    """The episode's score, as the environment reported it."""
    ids: Int32
    """[T] prompt and sampled ids, as the engine saw them."""
    mask: UInt8
    """[T] 1 where the policy sampled the token and this row trains it; 0 for prompts, observations, shared prefixes."""
    logprobs: Float32
    """[T] behaviour log-probability where mask is 1, else 0."""
    versions: Int32
    """[T] policy version where mask is 1, else -1."""
    rounds: Int32
    """[T] round index where mask is 1, else -1."""
    loss_weight: float = 1.0
    """1 / number of rows of the episode: an episode counts once however many branches it has. With roles: once for each role."""
    branch_score: float | None = None
    """This branch's own score; None: it shares the episode's."""
    role: str = ""
    """Whose rounds the row trains; empty: the run has no roles."""
    role_score: float | None = None
    """The role's own score in this episode; None: it shares the episode's."""
    round_scores: dict[int, float] = field(default_factory=dict)
    """Scores of single rounds beside that, by round index; only rounds that this row trains."""
    greedy: bool = False
    """Sampled at temperature 0: the baseline of its group, never trained."""
    hint: str | None = None
    """A hint for the task, which the policy did not see: of a judge, or of the task's `extra_info`."""
    baseline: float | None = None
    """What the sessions of its user scored before, in the mean; None: it is no session, or the user's first."""
    judges: dict[str, float] | None = None
    """The episode's score of each judge, by name; `score` is their mean. None: not told apart."""
    truncated: tuple[int, ...] = ()
    """Rounds that this row trains and whose generation was cut at the most tokens (finish reason `length`)."""
    experts: UInt16 | None = None
    """[T, layers, K] the experts that the engine used for each token, UNKNOWN_EXPERT where that is not known. None: nowhere."""
    expert_versions: Int32 | None = None
    """[T] the policy version whose router chose them."""
    times_trained: int = 0
    """Steps that trained its group before; 0: it is fresh."""

    @property
    def own_score(self) -> float:
        """The score that its tokens are trained by: the branch's, else the role's, else the episode's."""
        if self.branch_score is not None:
            return self.branch_score
        return self.score if self.role_score is None else self.role_score

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def num_trained(self) -> int:
        return int(self.mask.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Validated:
    """What the episodes of one validation task scored."""

    task_id: str
    data_source: str
    scores: tuple[float, ...]
    num_failed: int = 0
    """Episodes that have no score, after all their attempts."""
    episodes: tuple[str, ...] = ()
    """Those that have one, in the order of `scores`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """A group of a task, and what its members scored until now, those at temperature 0 apart."""

    group_id: int
    task_id: str
    state: str
    num_scored: int
    passes: float
    """Sum of the scores, each moved into 0 to 1."""
    version: int
    """The newest policy version under which a member began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A position in a run's ledger, as a checkpoint stores it."""

    run_id: str
    """Id of the ledger's run."""
    lineage: int
    """0, then one more for each time that the run went back to a checkpoint."""
    step: int
    """Steps trained."""


Eligible = Literal["all", "mixed", "solved"]
"""Which stored groups may be trained again, see `configs.schema.ReplayConfig`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Which stored groups join a batch."""

    num_groups: int
    """At most so many."""
    min_version: int
    """Each has a token of this version or later."""
    only: Eligible
    times: int
    """No group is trained more often, its first time among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """A full batch of scored groups under one lease. `rows` are grouped by `group_id`, fresh groups first, the oldest first."""

    rows: list[Row]
    lease_id: int = 0
    group_ids: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def fresh(self) -> TrainBatch:
        """The batch without groups that were trained before."""
        return replace(self, rows=[row for row in self.rows if not row.times_trained])

    @property
    def num_stored(self) -> int:
        """Groups that were trained before."""
        return len({row.group_id for row in self.rows if row.times_trained})

    @property
    def scores(self) -> Float32:
        """[E] one score per episode that is trained, in first-seen order."""
        seen: dict[str, float] = {}
        for row in self.rows:
            if not row.greedy:
                seen.setdefault(row.episode_id, row.score)
        return np.array(list(seen.values()), dtype=np.float32)

    @property
    def num_trained_tokens(self) -> int:
        return sum(row.num_trained for row in self.rows if not row.greedy)
