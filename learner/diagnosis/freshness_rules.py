"""Rules about the data's distance from the policy that trains on it: versions, importance weights, and the engine's
log-probabilities against the learner's.

Listed in `learner.diagnosis.diagnose`; as in `learner.diagnosis.episode_rules`. They look at the last 10 steps.
"""

from __future__ import annotations

from buffers.ledger.batches import STALE
from learner.diagnosis.evidence import Evidence
from learner.diagnosis.finding import Finding, Severity, by_share, counted, percent
from learner.reporting.drift import DRIFT_MEASURES, MOST_DRIFT, drift_remedy, drift_sentence

FAR_DRIFT = 100.0
"""Times that of a difference which is no rounding any more."""
LOST = 0.05
"""Share of the data that may be too old or weigh nothing."""
MANY = 0.3
OLD = 2.0
"""Versions behind from which data without a correction harms."""


def drift(run: Evidence) -> Finding | None:
    """A log-probability of the engine differs from the learner's by more than 1e-4 in float32 (in bfloat16 by more than 0.02 on
    average), for the same version of the weights."""
    dtype = run.config.model.dtype
    name = DRIFT_MEASURES[dtype]
    values = run.values(name)
    if not values or max(values) <= MOST_DRIFT[dtype]:
        return None
    most = max(values)
    return Finding(
        rule="drift",
        severity=by_share(most, harms=FAR_DRIFT * MOST_DRIFT[dtype]),
        sentence=f"{drift_sentence(most, dtype=dtype)}.",
        figure=most,
        measure=name,
        remedy=drift_remedy(run.config),
    )


def stale_groups(run: Evidence) -> Finding | None:
    """At least 5 % of the complete groups were evicted as too old, or of the sampled tokens are not trained as they are too old."""
    evicted = run.count(f"evicted/{STALE}")
    complete = evicted + sum(run.count(f"groups/{state}") for state in ("ready", "leased", "trained"))
    by_group, by_token = evicted / max(complete, 1), run.mean("policy/too_old_share") or 0.0
    share = max(by_group, by_token)
    if share < LOST:
        return None
    lag = run.config.buffer.max_policy_lag
    age = f"more than {counted(lag, 'version')} old"
    if by_group >= by_token:
        sentence = f"{evicted} of {complete} complete groups were thrown away, as their data was {age}."
    else:
        sentence = f"{percent(share)} of the sampled tokens are {age}, and not trained."
    fewer = max(1, int(run.last("pool/slots", default=64.0)) // 2)
    return Finding(
        rule="stale_groups",
        severity=by_share(share, harms=MANY),
        sentence=sentence,
        figure=share,
        measure="share of the complete groups" if by_group >= by_token else "policy/too_old_share",
        remedy=f"buffer.max_policy_lag={lag + 1}, or fewer episodes at once: agents.concurrency={fewer}",
    )


def uncorrected_data(run: Evidence) -> Finding | None:
    """The data is 2 versions old or more, and no correction weighs it."""
    lag, correction = run.mean("staleness/mean"), run.config.learner.correction
    if lag is None or lag < OLD or correction != "none":
        return None
    return Finding(
        rule="uncorrected_data",
        severity=Severity.SLOWS if run.has_risen else Severity.HARMS,
        sentence=f"the data is {lag:.1f} versions old on average, and is trained as if the present policy had sampled it.",
        figure=lag,
        measure="staleness/mean",
        remedy=f"learner.correction=tis, or buffer.max_policy_lag={max(1, int(lag) // 2)}",
    )


def masked_tokens(run: Evidence) -> Finding | None:
    """At least 5 % of the trained tokens were dropped by learner.correction or learner.rejection."""
    share = run.mean("policy/is_masked") or 0.0
    if share < LOST:
        return None
    rejection = run.config.learner.rejection
    if rejection.kind != "none":
        remedy = f"learner.rejection.kind=none, or a wider learner.rejection.high (now {_or_own(rejection.high)})"
        if rejection.kind == "geo_mean":
            remedy += f" and learner.rejection.low (now {_or_own(rejection.low)})"
    else:
        remedy = f"learner.correction=tis, which cuts weights and drops nothing (now {run.config.learner.correction})"
    return Finding(
        rule="masked_tokens",
        severity=Severity.STOPS if share >= 0.99 else by_share(share, harms=MANY),
        sentence=f"{percent(share)} of the trained tokens are dropped, as the policy that sampled them is too far "
        f"from the one that trains.",
        figure=share,
        measure="policy/is_masked",
        remedy=f"{remedy}; fresher data: buffer.max_policy_lag={max(0, run.config.buffer.max_policy_lag - 1)}",
    )


def capped_weights(run: Evidence) -> Finding | None:
    """At least 5 % of the trained tokens have an importance ratio above the correction's largest."""
    share = run.mean("policy/is_capped") or 0.0
    if share < LOST:
        return None
    lag = run.config.buffer.max_policy_lag
    return Finding(
        rule="capped_weights",
        severity=by_share(share, harms=MANY),
        sentence=f"{percent(share)} of the trained tokens are far more likely now than when they were sampled.",
        figure=share,
        measure="policy/is_capped",
        remedy=f"{run.slower}, or fresher data: buffer.max_policy_lag={lag - 1}" if lag else run.slower,
    )


def _or_own(value: float | None) -> str:
    return "its own" if value is None else f"{value:g}"
