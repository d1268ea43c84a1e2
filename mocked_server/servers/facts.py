"""What a server says of itself, and why it can or cannot be the engine of a run.

Made by `mocked_server.servers.vllm_server` and `sglang_server`, judged by `check_facts` at the door and at each start. Invariant: a
refusal is one line with the key, the rule, the value and the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from buffers.errors import EngineError

KEY = "rollout.engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a run asks of its server."""

    max_model_len: int
    vocabulary: int
    """Size of the model's output."""
    temperature: float
    dtype: str
    """`model.dtype`."""
    learns: bool
    """It gets new weights after each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """One server."""

    software: str
    """`vLLM 0.32.0`."""
    max_model_len: int | None
    """Longest prompt + generation; None: it does not say."""
    kv_capacity: int
    """Tokens that its cache holds; 0: it does not say."""
    dtypes: Sequence[str] = ()
    """The number format that it computes in, or those of which it is one; none: it does not say."""
    logprobs_before_temperature: bool = False
    """Its log-probabilities are those of the distribution before the temperature."""
    no_weights: str = ""
    """Why it cannot be given weights, and the remedy; empty: it can."""


def check_facts(facts: ServerFacts, *, url: str, needs: Needs) -> None:
    """Raises EngineError where the server cannot do what the run needs."""
    if needs.learns and facts.no_weights:
        raise EngineError(
            f"{KEY} must be a server that takes new weights, got {url} ({facts.software}), which does not: {facts.no_weights}. "
            f"`understudy eval` can use it as it is"
        )
    if facts.max_model_len is not None and facts.max_model_len < needs.max_model_len:
        raise EngineError(
            f"{KEY} must serve prompts and answers of rollout.max_model_len={needs.max_model_len} tokens, got {url}, which serves "
            f"{facts.max_model_len}; set rollout.max_model_len={facts.max_model_len}, or start it with more"
        )
    if needs.learns and facts.logprobs_before_temperature and needs.temperature != 1.0:
        raise EngineError(
            f"{KEY} must give log-probabilities of the distribution that it samples from, got {url}, which gives those before "
            f"rollout.temperature={needs.temperature:g}; start it with --logprobs-mode processed_logprobs"
        )
    if needs.learns and facts.dtypes and needs.dtype not in facts.dtypes:
        served = " or ".join(facts.dtypes)
        raise EngineError(
            f"{KEY} must compute in model.dtype={needs.dtype}, as the learner does, got {url}, which computes in {served}; "
            f"start it with --dtype {needs.dtype}, or set model.dtype to what it has"
        )
