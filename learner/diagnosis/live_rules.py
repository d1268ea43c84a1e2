"""Rules about a run of `understudy serve`: what its users say of the answers. Silent in any other run.

Listed by `learner.diagnosis.diagnose`.
"""

from __future__ import annotations

from learner.diagnosis.evidence import Evidence, Observation, percent, rule

FEW_SESSIONS = 16
"""Sessions below which a share says little."""


@rule("share of the sessions", slows=0.8)
def unsaid_sessions(run: Evidence) -> Observation | None:
    """Users are served, and of at least 80 % of 16 sessions or more nothing was said that could be learned from."""
    ended = sum(run.ledger.count(f"groups/{state}") for state in ("ready", "leased", "trained"))
    number = run.ledger.open_sessions + ended
    if not run.config.serve.enabled or number < FEW_SESSIONS:
        return None
    share = run.ledger.open_sessions / number
    judged = "" if run.config.serve.judge.model else "serve.judge.model=policy, or "
    return Observation(
        share,
        f"of {percent(share)} of {number} sessions nothing was said that has ended them: they are not learned from.",
        f"{judged}have tests and merges say what answers were worth (POST /feedback), or ask for a thumb on the page",
    )
