"""Engines and learner compute the same log-probabilities, or the run ends before it learns from what they do not share.

Made by `learner.pipeline`, used by `learner.learn_loop`: when the first weights are in the engines, when the first that an update
made are (an engine that keeps old ones shows only then), and for each batch. The probe is sampled by each engine, after a prompt
that is longer than any window of the model, and computed again by the learner. Nothing of it is recorded or trained.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from buffers.errors import EngineError, UnderstudyError
from configs.schema import Config
from learner.reporting.run_metrics import MOST_MEAN, MOST_MEAN_OF_A_GPU, drift_remedy
from learner.training.ranks import LearnerRanks

logger = logging.getLogger(__name__)

PROBED = 24
"""Tokens that an engine samples, and as many again behind them, of which it has keys and states in its cache."""
ENOUGH, FAR = 256, 10.0
"""Tokens of batches whose mean is judged, and times the limit at which fewer are: of 32 a few can make half a limit a whole one."""
LEAST_AGREED = 0.75
"""Share of a probe's places at which routers with the same weights choose the same experts, but for near ties."""
SAME_STATE, SAME_STATE_OF_A_GPU = {"float32": 3e-5, "bfloat16": 0.1}, {"float32": 1e-3, "bfloat16": 0.1}
"""Difference of two states over their size, up to which they are the same, by model.dtype."""


class Disagreement(UnderstudyError):
    """Engine and learner compute different log-probabilities. `difference`: in nats, on average; None: the engine dies of the
    probe. `what`: the message without the remedy."""

    def __init__(self, what: str, *, difference: float | None, remedy: str) -> None:
        super().__init__(f"{what}; {remedy}")
        self.what = what
        self.difference = difference


class Engines(Protocol):
    """`mocked_server.fleet.engine_fleet.EngineFleet`."""

    async def probe(self, prompt_token_ids: Sequence[int], *, params: Any, role: str = "") -> Mapping[str, Any]: ...
    async def layer_states(self, name: str, prompt_token_ids: Sequence[int], *, role: str = "") -> list[bytes]: ...


@dataclass(kw_only=True)
class Agreement:
    """`sampling(tokens=, temperature=)`: what asks an engine for so many. `roles`: those that are policies of their own. `has_gpu`:
    engines are on one."""

    config: Config
    engines: Engines
    sampling: Callable[..., Any]
    roles: Collection[str] = ()
    has_gpu: bool = False
    has_other: bool = False
    """vLLM's other class of the model is tried where they disagree, and nothing was trained before."""
    has_begun: bool = False
    """They agreed once."""
    apart: Disagreement | None = None
    """What a probe found."""
    _total: float = 0.0
    """Nats, over `_number` tokens of batches."""
    _number: float = 0.0

    @property
    def most(self) -> float:
        """Nats on average."""
        dtype = self.config.model.dtype
        usual = MOST_MEAN_OF_A_GPU if dtype == "float32" and self.has_gpu else MOST_MEAN[dtype]
        return self.config.learner.max_mean_logprob_diff or usual

    async def probe(self, ranks: LearnerRanks) -> float:
        """Compare all engines, which have the learner's weights; returns the largest difference, in nats on average. Raises
        Disagreement; what `ranks` and engines raise."""
        rollout, prompt, largest = self.config.rollout, await ranks.probe_prompt(), 0.0
        tokens = max(1, min(PROBED, (rollout.max_model_len - len(prompt)) // 2))
        params = self.sampling(tokens=tokens, temperature=rollout.temperature)
        for role in self.roles or ("",):
            try:
                probed = await self.engines.probe(prompt, params=params, role=role)
            except EngineError as lost:
                probe = f"a probe of {len(prompt)} + {2 * tokens} tokens"
                what = f"engines must answer {probe}, and one ended by itself each time: {lost}"
                self.apart = Disagreement(what, difference=None, remedy="see the run's log; train another model")
                raise self.apart from lost
            for name, (ids, sampled, experts) in probed.items():
                computed = await ranks.logprobs_of(ids, last=len(sampled), role=role)
                difference = float(np.abs(np.subtract(sampled, computed)).mean())
                if experts is not None and not difference <= self.most:
                    replayed, agreed = await ranks.replayed(ids, last=len(sampled), experts=experts)
                    if agreed >= LEAST_AGREED:  # near ties; else the engine's routers are others
                        difference = float(np.abs(np.subtract(sampled, replayed)).mean())
                if not difference <= self.most:
                    where = await self._where(name, ranks=ranks, prompt=prompt, role=role)
                    self.apart = Disagreement(
                        f"engine and learner must compute the same log-probabilities, and differ by {difference:.2g} nats on "
                        f"average (engine {name} {np.mean(sampled):.4f}, learner {np.mean(computed):.4f}; {self._limit}) over "
                        f"{len(sampled)} tokens of a probe{where}",
                        difference=difference,
                        remedy=self._remedy,
                    )
                    raise self.apart
                largest = max(largest, difference)
        self.has_begun = True
        return largest

    def check_batch(self, metrics: Mapping[str, float], *, num_tokens: int) -> None:
        """Raises Disagreement where recorded log-probabilities are not the learner's: by ENOUGH tokens, of several batches if need
        be, or by a difference that few show too. `num_tokens`: of the batch."""
        difference = metrics.get("policy/mean_logprob_diff", 0.0)
        number = num_tokens * metrics.get("policy/checked_share", 0.0)
        self._total += difference * number
        self._number += number
        mean, is_enough = self._total / max(self._number, 1.0), self._number >= ENOUGH
        if is_enough or not difference <= FAR * self.most:
            if not mean <= self.most:
                raise Disagreement(
                    f"engine and learner must compute the same log-probabilities, and differ by {mean:.2g} nats on average over "
                    f"the last {self._number:.0f} tokens ({self._limit}); this batch was not trained",
                    difference=mean,
                    remedy=self._remedy,
                )
            self._total = self._number = 0.0

    @property
    def _limit(self) -> str:
        return f"{self.config.model.dtype}: at most {self.most:g}"

    @property
    def _remedy(self) -> str:
        return f"{drift_remedy(self.config)}; learner.max_mean_logprob_diff lets more pass"

    async def _where(self, name: str, *, ranks: LearnerRanks, prompt: Sequence[int], role: str) -> str:
        """The first layer behind which the states differ, as part of a sentence; empty where the engine does not say them."""
        try:
            there = await self.engines.layer_states(name, prompt, role=role)
            here = await ranks.layer_states(prompt) if there else []
        except UnderstudyError as error:  # that they differ is known, and what ends the run
            logger.warning("engine %s or the learner does not say the states of its layers: %s", name, error)
            return ""
        if not there or [len(state) for state in there] != [len(state) for state in here]:
            return ""
        same = (SAME_STATE_OF_A_GPU if self.has_gpu else SAME_STATE)[self.config.model.dtype]
        for number, (state, other) in enumerate(zip(there, here, strict=True)):
            own = np.frombuffer(other, np.float32)
            apart = np.linalg.norm(np.frombuffer(state, np.float32) - own) / np.linalg.norm(own)
            if not apart <= same:
                return (
                    f": layer {number} of 0 to {len(here) - 1} is the first that differs, by {apart:.2g} of its state"
                )
        return f": the states behind all {len(here)} layers agree, what follows them (norm, scale, head) does not"
