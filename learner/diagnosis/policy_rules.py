"""Rules about the policy itself: its entropy, its critic, how far an update moves it, and whether an update was made at all.

Listed in `learner.diagnosis.diagnose`; as in `learner.diagnosis.episode_rules`. They look at the last 10 steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from statistics import fmean, median

from learner.diagnosis.evidence import FIRST_STEPS, Evidence
from learner.diagnosis.finding import Finding, Severity, by_share, percent

ENOUGH_STEPS = 10
"""Steps that a rule about a trend needs."""
NO_ENTROPY = 0.02
"""Nats below which a policy says nearly always the same."""
ENTROPY_LEFT = 0.1
"""Share of the first steps' entropy below which it has collapsed, where little is left."""
LOW_ENTROPY = 0.1
"""Nats that count as little."""
PLUNGE = 0.2
"""Part of the entropy that a step takes away in a plunge; where a run learns well it is some hundredths."""
BLIND = 0.05
"""Explained variance up to which a critic explains nothing."""
LARGE_KL, HUGE_KL = 0.05, 0.2
"""Nats between the policies before and after a step."""
LARGE_RATIO = 20.0
SMALL_KL = 1e-7
"""Nats below which an update changed nothing that sampling would notice."""
KL_FAR, KL_GONE = 0.5, 2.0
"""Nats per token from the reference."""
CLIPPED_SIZE = 10.0
"""Times that a gradient is larger than its limit."""
SCALED = ("dr_grpo", "rloo", "remax", "opo", "gpg", "otb")
"""Advantages that grow with the scores; so does their gradient's limit."""


def nothing_updated(run: Evidence) -> Finding | None:
    """At least 10 % of the last 10 steps made no update: nothing to train, or gradients that are not finite."""
    if not run.recent:
        return None
    skipped = sum(run.values("learner/skipped"))
    without = sum("learner/updates" not in step or step["learner/updates"] == 0.0 for step in run.recent)
    made = sum(run.values("learner/updates"))
    share = max(skipped / max(skipped + made, 1.0), without / len(run.recent))
    if share < 0.1:
        return None
    if skipped:
        sentence = (
            f"{skipped:.0f} of the last {skipped + made:.0f} updates were left out, as their gradient was not finite."
        )
        precise = ", and model.dtype=float32, also help" if run.config.model.dtype != "float32" else " also help"
        remedy = f"{run.slower}; scores of a size of about 1{precise}"
    else:
        masks = run.config.learner.mask_truncated
        why, other = ("all answers were cut", ", or learner.mask_truncated=false") if masks else ("no token counts", "")
        sentence = f"in {without} of the last {len(run.recent)} steps there was nothing to train: {why}."
        remedy = f"rollout.max_tokens={2 * run.config.rollout.max_tokens}{other}"
    return Finding(
        rule="nothing_updated",
        severity=Severity.STOPS if share == 1.0 else by_share(share, harms=0.3),
        sentence=sentence,
        figure=share,
        measure="learner/skipped" if skipped else "learner/updates",
        remedy=remedy,
    )


def no_rate(run: Evidence) -> Finding | None:
    """The learning rate is 0."""
    if run.config.learner.lr > 0.0:
        return None
    return Finding(
        rule="no_rate",
        severity=Severity.STOPS,
        sentence="the learning rate is 0: the policy stays as it is.",
        figure=0.0,
        measure="learner/lr",
        remedy="learner.lr=1e-6 for a pretrained model, learner.lr=3e-4 for the tiny one",
    )


def small_updates(run: Evidence) -> Finding | None:
    """The policy moved by less than 1e-7 nats a step for 10 steps, though there is a gradient; or in bfloat16 by less than 1 weight
    in 10,000."""
    if len(run.steps) < ENOUGH_STEPS or run.config.learner.lr == 0.0 or run.is_solved:
        return None
    if not any(norm > 0.0 for norm in run.values("policy/grad_norm")):
        return None  # another rule's finding
    moved, changed = run.values("policy/approx_kl"), run.values("publish/changed_share")
    several = [step for step in run.recent if step.get("learner/updates", 0.0) > 1.0]
    still = bool(moved) and len(several) == len(run.recent) and max(moved) < SMALL_KL
    same = run.config.model.dtype == "bfloat16" and bool(changed) and max(changed) < 1e-4
    if not still and not same:
        return None
    figure, measure = (max(moved), "policy/approx_kl") if still else (max(changed), "publish/changed_share")
    return Finding(
        rule="small_updates",
        severity=Severity.STOPS if not run.has_risen else Severity.SLOWS,
        sentence=f"the updates are too small for anything to move: a step changes the policy by {figure:.1g} "
        + ("nats." if still else "of its published weights."),
        figure=figure,
        measure=measure,
        remedy=f"learner.lr={run.config.learner.lr * 10:.3g}",
    )


def large_updates(run: Evidence) -> Finding | None:
    """A step moves the policy by 0.05 nats or more (mean of the last 10), or one of them by 0.2; or the largest ratio of a token is
    20 in half of them (in steps of a single update the ratio to the version before, where the data is one version old)."""
    moves = run.values("policy/approx_kl")
    ratios = [max(step.get("policy/ratio_max", 1.0), _since_one_version(step)) for step in run.recent]
    if not moves or (fmean(moves) < LARGE_KL and max(moves) < HUGE_KL and median(ratios) < LARGE_RATIO):
        return None
    moved = fmean(moves)
    return Finding(
        rule="large_updates",
        severity=by_share(moved, harms=HUGE_KL) if run.has_risen else Severity.HARMS,
        sentence=f"a step moves the policy by {moved:.2g} nats; some token became {max(ratios):.3g} times as likely.",
        figure=moved,
        measure="policy/approx_kl",
        remedy=run.slower,
    )


def _since_one_version(step: Mapping[str, float]) -> float:
    """The largest ratio of a token to the version before: all that shows the size of a single update, which `approx_kl` and
    `ratio_max` compare with itself."""
    return step.get("policy/is_weight_max", 1.0) if step.get("staleness/max") == 1.0 else 1.0


def clipped_tokens(run: Evidence) -> Finding | None:
    """At least 20 % of the trained tokens were clipped in the last 10 steps; 50 % with losses that clip more by design."""
    share = run.mean("policy/clipfrac") or 0.0
    limit = 0.2 if run.config.learner.loss == "ppo" else 0.5
    if share < limit:
        return None
    updates = run.config.learner.epochs * run.config.learner.minibatches
    fewer = " or learner.epochs=1 learner.minibatches=1" if updates > 1 else ""
    return Finding(
        rule="clipped_tokens",
        severity=by_share(share, harms=0.5),
        sentence=f"{percent(share)} of the trained tokens are clipped: the updates of a step go further than the loss lets them.",
        figure=share,
        measure="policy/clipfrac",
        remedy=f"{run.slower}{fewer}",
    )


def no_gradient(run: Evidence) -> Finding | None:
    """The gradient is 0 in all of the last steps, though scores differ."""
    norms, spreads = run.values("policy/grad_norm"), run.values("reward/std")
    if (
        not norms
        or max(norms) > 0.0
        or not spreads
        or max(spreads) == 0.0
        or (run.mean("batch/equal_groups") or 0.0) == 1.0
    ):
        return None
    learner = run.config.learner
    keep_all = {
        "learner.rejection.kind=none": learner.rejection.kind == "none",
        "learner.correction=tis": learner.correction == "tis",
    }
    return Finding(
        rule="no_gradient",
        severity=Severity.STOPS,
        sentence=f"the gradient is 0 in the last {len(norms)} steps, though scores differ: no token of theirs is trained.",
        figure=0.0,
        measure="policy/grad_norm",
        remedy=" ".join(key for key, is_in_force in keep_all.items() if not is_in_force) or "see policy/is_masked",
    )


def clipped_gradient(run: Evidence) -> Finding | None:
    """The gradient was at least ten times larger than learner.grad_clip in each of 10 steps."""
    norms = run.values("policy/grad_norm")
    size = max((abs(step[name]) for step in run.recent for name in ("reward/min", "reward/max")), default=1.0)
    limit = run.config.learner.grad_clip * (max(size, 1e-9) if run.config.learner.advantage in SCALED else 1.0)
    if len(norms) < ENOUGH_STEPS or min(norms) < CLIPPED_SIZE * limit:
        return None
    middle = median(norms)
    return Finding(
        rule="clipped_gradient",
        severity=Severity.SLOWS,
        sentence=f"each gradient is scaled down: its norm is {middle:.3g}, {middle / limit:.0f} times learner.grad_clip.",
        figure=middle,
        measure="policy/grad_norm",
        remedy=f"learner.grad_clip={run.config.learner.grad_clip * middle / limit:.2g}, or {run.slower}",
    )


def entropy_gone(run: Evidence) -> Finding | None:
    """The entropy is below 0.02 nats, or below 0.1 nats and a tenth of the first steps', and the task is not solved."""
    entropy = run.mean("policy/entropy")
    if entropy is None or run.is_solved:
        return None
    began = [step["policy/entropy"] for step in run.steps[:FIRST_STEPS] if "policy/entropy" in step]
    first = fmean(began) if began else entropy
    if entropy >= NO_ENTROPY and (entropy >= LOW_ENTROPY or entropy >= ENTROPY_LEFT * first):
        return None
    was = f" ({first:.3g} in the first steps)" if first > entropy else ""
    return Finding(
        rule="entropy_gone",
        severity=Severity.HARMS,
        sentence=f"the policy's entropy is {entropy:.2g} nats per token{was}: it nearly always says the same.",
        figure=entropy,
        measure="policy/entropy",
        remedy=_more_entropy(run, was=first),
    )


def falling_entropy(run: Evidence) -> Finding | None:
    """The entropy fell to half or less in the last 10 steps, by a fifth in each step on average, and the task is not solved."""
    values = run.values("policy/entropy")
    few = max(1, len(values) // 3)
    if len(values) < FIRST_STEPS or run.is_solved or entropy_gone(run) is not None:
        return None
    before, now, steps = max(values[:few]), fmean(values[-few:]), len(values) - few
    if now > before / 2 or before - now < LOW_ENTROPY or log(before / now) < PLUNGE * steps:
        return None
    return Finding(
        rule="falling_entropy",
        severity=Severity.SLOWS if run.has_risen else Severity.HARMS,
        sentence=f"the policy's entropy fell from {before:.2g} to {now:.2g} nats per token in {len(values)} steps: what it no "
        f"longer says it cannot learn from.",
        figure=now,
        measure="policy/entropy",
        remedy=_more_entropy(run, was=before),
    )


def _more_entropy(run: Evidence, *, was: float) -> str:
    target = max(2 * NO_ENTROPY, round(was / 3, 2))
    if run.config.learner.adaptive_entropy.target is not None:
        remedy = f"learner.adaptive_entropy.target={target:g}, and a higher learner.adaptive_entropy.step"
    else:
        coef = run.config.learner.entropy_coef
        remedy = f"learner.entropy_coef={2 * coef if coef else 0.01:g}, or learner.adaptive_entropy.target={target:g}"
    return f"{remedy}; {run.slower} from the beginning keeps more of it"


def blind_critic(run: Evidence) -> Finding | None:
    """The critic explains at most 5 % of its targets' variance after 10 steps in which the reward has not risen, by the median of
    the steps in which scores differ."""
    learner = run.config.learner
    spread = 0.05 * run.score_range
    known = [
        step["critic/explained_variance"]
        for step in run.recent
        if "critic/explained_variance" in step and step["reward/std"] > spread
    ]
    if learner.advantage != "gae" or len(run.steps) < ENOUGH_STEPS or len(known) < ENOUGH_STEPS // 2 or run.has_risen:
        return None
    explained = median(known)
    if explained > BLIND:
        return None
    own = learner.critic == "separate"
    raised = f"learner.critic_lr={3 * learner.critic_lr:.3g}" if own else "learner.critic=separate"
    return Finding(
        rule="blind_critic",
        severity=Severity.HARMS,
        sentence=f"the critic explains {percent(max(explained, 0.0))} of its targets' variance: its values are noise.",
        figure=explained,
        measure="critic/explained_variance",
        remedy=f"{raised}, or no critic: learner.advantage=grpo learner.critic=none",
    )


def far_from_reference(run: Evidence) -> Finding | None:
    """The KL to the reference is three times learner.kl.target; without a target, 0.5 nats per token."""
    kl = run.mean("policy/kl_ref")
    target = run.config.learner.kl.target
    limit = KL_FAR if target is None else 3.0 * target
    if kl is None or kl < limit:
        return None
    return Finding(
        rule="far_from_reference",
        severity=by_share(kl, harms=KL_GONE if target is None else 10.0 * target) if run.has_risen else Severity.HARMS,
        sentence=f"the policy is {kl:.2g} nats per token away from the reference"
        + (f", whose target is {target:g}." if target is not None else "."),
        figure=kl,
        measure="policy/kl_ref",
        remedy=f"{run.held}, or {run.slower}",
    )
