"""What a run has seen so far: per-step figures, and the summary at the end.

Called by the pipeline after each step. Pure bookkeeping: no files, no clock but a monotonic one given at construction.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from buffers.records import TrainBatch
from configs.model_folder import half_precision_kind, has_experts
from configs.schema import Config

# How far a recorded log-probability may be from the learner's: what rounding explains, by number format.
# `learner.reporting.run_metrics` warns of more in the course of a run, `understudy why` afterwards. The figures are those of
# docs/numerics.md.

MOST_DRIFT = {"float32": 1e-4, "bfloat16": 2e-2}
"""Difference of a log-probability, in nats, by model.dtype; the largest one in float32, the mean one in bfloat16."""
DRIFT_MEASURES = {"float32": "policy/max_logprob_diff", "bfloat16": "policy/mean_logprob_diff"}
MOST_MEAN = {"float32": 3e-5, "bfloat16": 0.15}
"""Mean difference of log-probabilities above which a run ends, unless `learner.max_mean_logprob_diff` says another. What vLLM and
the learner compute alike differs by 2.3e-6 at most in float32 and 0.07 in bfloat16, seen on 60 families of small random models, of
which mixtures of experts differ most, and by 5.6e-6 in a real model of 135 million weights (SmolLM2). What they do not, by 1e-4 and
more: Nemotron-H (vLLM has no smallest time step), Bloom (another GELU), Apertus (a weight in bfloat16)."""
MOST_MEAN_OF_A_GPU = 1e-2
"""The same of float32 there."""
FLOAT32_HEAD = """--hf-overrides '{"head_dtype": "float32"}' (vLLM) or --enable-fp32-lm-head (SGLang)"""
"""The options for logits in float32, which a run's own engines have."""
OTHER_CLASS_ARGUMENT = {"model_impl": "transformers"}
OTHER_CLASS = "rollout.engine_args={model_impl: transformers}"
"""vLLM's second class of a model, for those whose own computes something else. Seen with Cohere 2: 0.01 on average, and 2e-7 so."""
OF_A_GPU = "on a GPU up to 0.01 is vLLM's attention, which multiplies float32 as TF32 there"
"""Seen on an H200, where vLLM takes its Triton kernel for float32."""


def drift_sentence(difference: float, *, dtype: str) -> str:
    """What is the matter, with the figure."""
    most = f"where {dtype} explains {MOST_DRIFT[dtype]:g}"
    return f"engine and learner disagree: a log-probability differs by {difference:.2g}, {most}"


def drift_remedy(config: Config) -> str:
    """What brings the two together."""
    dtype = config.model.dtype
    arguments = "take extra arguments out of rollout.engine_args (quantization, other kernels)"
    elsewhere = config.rollout.engine.startswith("http")
    if dtype == "bfloat16" and elsewhere:
        return f"start the server with {FLOAT32_HEAD}, or model.dtype=float32 on both sides, or {arguments}"
    if config.rollout.engine == "vllm" and "model_impl" not in config.rollout.engine_args:
        arguments = f"{arguments}, or set {OTHER_CLASS}, where vLLM's own class of the model computes something else"
    if dtype == "bfloat16" and not config.learner.router_replay and has_experts(Path(config.model.path)):
        arguments = f"set learner.router_replay=true, or {arguments}"
    if dtype == "bfloat16":
        other = "" if half_precision_kind(Path(config.model.path)) else "model.dtype=float32, or "
        return f"{other}{arguments}"
    if elsewhere:
        return f"check that the server at rollout.engine has this run's weights and number format, or {arguments}"
    return f"{arguments}; {OF_A_GPU}" if config.rollout.engine == "vllm" else arguments


FIRST_STEPS, LAST_STEPS = 3, 5
"""Steps that the first and the last reward are the mean of."""
EQUAL_STEPS = 3
"""Steps in a row with equal scores until that is said."""
FLAT_STEPS = 10
"""Steps of a run whose reward should have risen."""
SOLVED = 0.01
"""Distance from `run.reward_optimum` within which a task counts as solved."""
COMPARE_THE_BATCH = ("gae", "reinforce_plus_plus")
"""Estimators that compare all episodes of a batch; the others compare those of one task."""
REMEDY = "take tasks that the model solves now and then, a scorer that gives part marks, or a larger buffer.group_size"


class GenerationTotals(Protocol):
    """Totals of the generate loop since its start (`mocked_server.generation.GenerationStats`)."""

    @property
    def tokens(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def constrained(self) -> int: ...
    @property
    def aborted(self) -> int: ...
    def busy_until(self, now: float) -> float:
        """Seconds with at least one generation under way."""
        ...


class History:
    """Collects steps; `summary()` is what goes to summary.json."""

    def __init__(
        self,
        config: Config,
        *,
        earlier: Iterable[dict[str, float]] = (),
        earlier_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`earlier`: figures of the steps that were made before this process; `earlier_s`: the time that was taken then."""
        self._config = config
        self._clock = clock
        self._began = clock()
        self._earlier_s = earlier_s
        self._last = self._began
        self._last_tokens = 0
        self._last_busy_s = 0.0
        self._first_step_at: float | None = None
        self._is_under_way = False
        self._told_at = 0
        self._drift_told = False
        self.steps = [dict(figures) for figures in earlier if "reward/mean" in figures]
        self.rewards = [figures["reward/mean"] for figures in self.steps]
        self.sft: Mapping[str, Any] = {}
        """The figures of SFT (`learner.sft_loop.SftLoop.summary`); empty: there was none."""
        self._final: dict[str, Any] = {}

    def add(
        self,
        batch: TrainBatch,
        metrics: Mapping[str, float],
        *,
        version: int,
        stats: GenerationTotals,
        of_roles: Mapping[str, int] | None = None,
    ) -> dict[str, float]:
        """One step trained `batch` at `version`; returns all of its figures by metric name. `of_roles`: the versions of roles that
        have their own."""
        now = self._clock()
        if self._first_step_at is None:
            self._first_step_at = now
        everything, batch = batch, batch.fresh
        scores = batch.scores
        busy_s = stats.busy_until(now)
        rows = [row for row in batch.rows if not row.greedy]
        versions = of_roles or {}
        lags = np.concatenate([versions.get(row.role, version) - row.versions[row.mask == 1] for row in rows])
        lags = lags[lags <= self._config.buffer.max_policy_lag]  # older tokens are not trained
        figures = {
            **metrics,
            **_baseline(batch),
            **_by_role(batch),
            **self._of_stored(everything, version=version, metrics=metrics),
            "reward/mean": float(scores.mean()),
            "reward/min": float(scores.min()),
            "reward/max": float(scores.max()),
            "reward/std": float(scores.std()),
            "staleness/mean": float(lags.mean()) if len(lags) else 0.0,
            "staleness/max": float(lags.max(initial=0)),
            "batch/episodes": float(len(scores)),
            "batch/equal_groups": _equal_groups(batch),
            "batch/rows": float(len(rows)),
            "batch/tokens": float(sum(row.num_tokens for row in rows)),
            "batch/trained_tokens": float(batch.num_trained_tokens),
            "agent_loop/rounds_mean": float(np.mean([len(np.unique(row.rounds[row.mask == 1])) for row in rows])),
            "throughput/tokens_per_s": (stats.tokens - self._last_tokens) / max(now - self._last, 1e-9),
            "throughput/cached_share": stats.cached_tokens / max(stats.prompt_tokens, 1),
            "generation/aborted": float(stats.aborted),
            "generation/constrained_share": stats.constrained / max(stats.tokens, 1),
        }
        if self._is_under_way:  # the time before this process's first step holds its start-up
            figures["time/engine_idle_s"] = (now - self._last) - (busy_s - self._last_busy_s)
        self._is_under_way = True
        self._last, self._last_tokens, self._last_busy_s = now, stats.tokens, busy_s
        self.rewards.append(figures["reward/mean"])
        self.steps.append(figures)
        return figures

    def _of_stored(self, batch: TrainBatch, *, version: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """The groups of a batch that were trained before, in a run that replays; all other figures are of fresh ones."""
        wanted = self._config.buffer.num_replayed
        if not wanted:
            return {}
        figures = {"replay/groups": float(batch.num_stored), "replay/short": float(wanted - batch.num_stored)}
        ages = [version - row.versions[row.mask == 1] for row in batch.rows if row.times_trained and not row.greedy]
        if not ages:
            return figures
        own = np.concatenate(ages)
        return figures | {
            "replay/age_mean": float(own.mean()),
            "replay/age_max": float(own.max()),
            "replay/trained_tokens": float(len(own)),
            "replay/counted_share": metrics.get("replay/counted_share", 0.0),
        }

    def recent_reward(self) -> float | None:
        """Mean score of the last steps; None before the first."""
        return float(np.mean(self.rewards[-LAST_STEPS:])) if self.rewards else None

    def news(self) -> str:
        """A line when nothing was learned for some steps: after 3 in a row, and at each doubling."""
        number = self._num_equal()
        if number < EQUAL_STEPS:
            self._told_at = 0
        if number < max(EQUAL_STEPS, 2 * self._told_at):
            return ""
        self._told_at = number
        return self._nothing_learned(number)

    def drift(self) -> str:
        """A line when the last step's log-probabilities differ by more than rounding explains: the first time in this process."""
        dtype = self._config.model.dtype
        difference = self.steps[-1].get(DRIFT_MEASURES[dtype], 0.0) if self.steps else 0.0
        if self._drift_told or difference <= MOST_DRIFT[dtype]:
            return ""
        self._drift_told = True
        return f"{drift_sentence(difference, dtype=dtype)}; {drift_remedy(self._config)}"

    def verdicts(self) -> list[str]:
        """Remarks at the end of a run, for readers who look at its reward only."""
        number, steps = self._num_equal(), len(self.rewards)
        if number >= EQUAL_STEPS:
            return [self._nothing_learned(number)]
        first, last = float(np.mean(self.rewards[:FIRST_STEPS] or [0])), self.recent_reward() or 0.0
        if steps < FLAT_STEPS or last > first or self.is_solved:
            return []
        return [
            f"the reward did not rise: {first:.3f} in the first {FIRST_STEPS} steps, {last:.3f} in the last {LAST_STEPS}; "
            f"{REMEDY}, or try more steps (run.steps) and another learner.lr"
        ]

    @property
    def is_solved(self) -> bool:
        """The last steps' mean reward is the best there is; never where `run.reward_optimum` is not set."""
        return self._is_solved(self.recent_reward() or 0.0)

    def _num_equal(self) -> int:
        """Steps at the end whose scores gave the learner nothing to compare, or that had no hint where these alone teach."""
        learner, number = self._config.learner, 0
        if learner.teacher.path or (learner.hints.coef and learner.advantage != "none"):  # they learn where all fail
            return 0
        name, still = ("reward/std", 0.0) if learner.advantage in COMPARE_THE_BATCH else ("batch/equal_groups", 1.0)
        if learner.hints.coef:
            name, still = "policy/hinted_share", 0.0
        for figures in reversed(self.steps):
            if figures.get(name) != still:
                break
            number += 1
        return number

    def _nothing_learned(self, number: int) -> str:
        reward = self.rewards[-1]
        if self._config.learner.hints.coef:
            return f"nothing was learned in the last {number} steps: no row had a hint; `understudy why` says what gives some"
        remedy = "the tasks are solved: stop, or take harder ones" if self._is_solved(reward) else REMEDY
        return (
            f"nothing was learned in the last {number} steps: all answers of each task have the same score (mean {reward:.3f}); "
            f"{remedy}"
        )

    def _is_solved(self, reward: float) -> bool:
        best = self._config.run.reward_optimum
        return best is not None and reward >= best - SOLVED

    def finish(
        self, counts: Mapping[str, int], status: Mapping[str, Any], restarts: Mapping[str, float] | None = None
    ) -> None:
        """Final counts of the buffer and the server; what died on the way."""
        self._final = {"buffer": dict(counts), "server": dict(status), "restarts": dict(restarts or {})}

    def summary(self) -> dict[str, Any]:
        """The run in figures. Rewards are mean scores: of the first 3 steps, of the last 5, and of the best step."""
        config, steps = self._config, self.steps
        if config.learner.stage == "sft":
            wall_s = self._earlier_s + self._clock() - self._began
            named = {"name": config.run.name, "seed": config.run.seed}
            return {**named, **self.sft, "wall_s": wall_s, **self._final}

        def most(name: str) -> float | None:
            return max((s[name] for s in steps if name in s), default=None)

        def mean(name: str) -> float | None:
            values = [s[name] for s in steps if name in s]
            return float(np.mean(values)) if values else None

        return {
            "name": config.run.name,
            "seed": config.run.seed,
            "steps": len(steps),
            "steps_planned": config.run.steps,
            "reward_first": float(np.mean(self.rewards[:FIRST_STEPS])) if steps else None,
            "reward_last": float(np.mean(self.rewards[-LAST_STEPS:])) if steps else None,
            "reward_best": most("reward/mean"),
            "reward_optimum": config.run.reward_optimum,
            "wall_s": self._earlier_s + self._clock() - self._began,
            "startup_s": None if self._first_step_at is None else self._first_step_at - self._began,
            "max_logprob_diff": most("policy/max_logprob_diff"),
            "max_policy_lag": config.buffer.max_policy_lag,
            "max_policy_lag_seen": None if not steps else int(most("staleness/max") or 0),
            "mean_policy_lag": mean("staleness/mean"),
            "episodes": int(sum(s["batch/episodes"] for s in steps)),
            "tokens_trained": int(sum(s["batch/trained_tokens"] for s in steps)),
            "learner_idle_share": time_share(steps, "time/wait_s"),
            "engine_idle_share": time_share(steps, "time/engine_idle_s"),
            "step_s_mean": mean("time/step_s"),
            "publish_s_mean": mean("time/publish_s"),
            "sft": dict(self.sft),
            **self._final,
        }


def _baseline(batch: TrainBatch) -> dict[str, float]:
    """Mean score of the greedy episodes, where there are some."""
    scores = {row.episode_id: row.score for row in batch.rows if row.greedy}
    return {"reward/greedy": sum(scores.values()) / len(scores)} if scores else {}


def _by_role(batch: TrainBatch) -> dict[str, float]:
    """Mean score of each role, and its share of the trained tokens, in a run with roles."""
    scores: dict[str, dict[tuple[str, int], float]] = {}
    tokens: Counter[str] = Counter()
    for number, row in enumerate(batch.rows):
        if row.role and not row.greedy:
            unit = -1 if row.branch_score is None else number
            scores.setdefault(row.role, {})[row.episode_id, unit] = row.own_score
            tokens[row.role] += row.num_trained
    return {f"reward/role/{role}": sum(own.values()) / len(own) for role, own in scores.items()} | {
        f"batch/role_tokens/{role}": number / tokens.total() for role, number in tokens.items()
    }


def _equal_groups(batch: TrainBatch) -> float:
    """Share of the groups whose episodes all scored the same, in their branches and rounds too: estimators that compare them learn
    nothing there."""
    scores: dict[tuple[int, str], set[tuple[float, ...]]] = {}
    for row in batch.rows:
        parts = (() if row.branch_score is None else (row.branch_score,)) + tuple(row.round_scores.values())
        whole = row.score if row.role_score is None else row.role_score
        scores.setdefault((row.group_id, row.role), set()).add((whole, *parts))
    return sum(len(some) == 1 for some in scores.values()) / len(scores)


def time_share(steps: Sequence[Mapping[str, float]], name: str) -> float | None:
    """Share that a figure in seconds has in the time of the steps that have it; None: no step has it. Where a learner started again
    between two steps, the figure may be longer than the step."""
    known = [s for s in steps if name in s and "time/step_s" in s]
    total = sum(max(s["time/step_s"], s[name]) for s in known)
    return sum(s[name] for s in known) / total if total > 0 else None
