"""Rules about the policy and what it trains on: versions and importance weights, engine against learner, the reward's course, the
entropy, the critic, and how far an update moves the policy.

Listed by `learner.diagnosis.diagnose`. They look at the last 10 steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from statistics import fmean, median

from buffers.ledger.batches import STALE
from learner.diagnosis.evidence import CLEAR_RISE, Evidence, Observation, Severity, by_share, counted, percent, rule
from learner.reporting.run_metrics import (
    DRIFT_MEASURES,
    FIRST_STEPS,
    LAST_STEPS,
    MOST_DRIFT,
    drift_remedy,
    drift_sentence,
)

ENOUGH_STEPS = 10
"""Steps that a rule about a trend needs."""
LOST, MANY_LOST = 0.05, 0.3
"""Shares of the data that are too old or weigh nothing."""
NO_ENTROPY = 0.02
"""Nats below which a policy says nearly always the same."""
LOW_ENTROPY = 0.1
"""Nats that count as little."""
PLUNGE = 0.2
"""Part of the entropy that a step takes away in a plunge; where a run learns well it is some hundredths."""
LARGE_KL, HUGE_KL = 0.05, 0.2
"""Nats between the policies before and after a step."""
REFUSED, MANY_REFUSED = 3, 8
"""Candidates in a row that the gate of a live run refuses."""
REFUSED_FOR = {
    "score": "their score at its tasks", "entropy": "a fall of their entropy", "likeness": "answers that are alike",
    "drift": "their drift from the model", "sessions": "what users think of their sessions", "unplayed": "tasks that failed",
}  # fmt: skip
"""What `learner.live_versions` refuses for, in words."""
SCALED = ("dr_grpo", "rloo", "remax", "opo", "gpg", "otb")
"""Advantages that grow with the scores; so does their gradient's limit."""


@rule("learner/lr", Severity.STOPS)
def no_rate(run: Evidence) -> Observation | None:
    """The learning rate is 0."""
    if run.config.learner.lr > 0.0:
        return None
    return Observation(
        0.0,
        "the learning rate is 0: the policy stays as it is.",
        "learner.lr=1e-6 for a pretrained model, learner.lr=3e-4 for the tiny one",
    )


@rule("learner/updates", slows=0.1, harms=0.3, stops=1.0)
def nothing_updated(run: Evidence) -> Observation | None:
    """At least 10 % of the last 10 steps made no update: nothing to train, or gradients that are not finite."""
    if not run.recent:
        return None
    skipped, made = sum(run.values("learner/skipped")), sum(run.values("learner/updates"))
    without = sum("learner/updates" not in step or step["learner/updates"] == 0.0 for step in run.recent)
    share = max(skipped / max(skipped + made, 1.0), without / len(run.recent))
    if skipped:
        precise = ", and model.dtype=float32, also help" if run.config.model.dtype != "float32" else " also help"
        return Observation(
            share,
            f"{skipped:.0f} of the last {skipped + made:.0f} updates were left out, as their gradient was not finite.",
            f"{run.slower}; scores of a size of about 1{precise}",
            measure="learner/skipped",
        )
    masks = run.config.learner.mask_truncated
    why, other = ("all answers were cut", ", or learner.mask_truncated=false") if masks else ("no token counts", "")
    return Observation(
        share,
        f"in {without} of the last {len(run.recent)} steps there was nothing to train: {why}.",
        f"rollout.max_tokens={2 * run.config.rollout.max_tokens}{other}",
    )


@rule("policy/grad_norm", Severity.STOPS)
def no_gradient(run: Evidence) -> Observation | None:
    """The gradient is 0 in all of the last steps, though scores differ."""
    norms, are_equal = run.values("policy/grad_norm"), run.mean("batch/equal_groups") == 1.0
    if not norms or max(norms) > 0.0 or max(run.values("reward/std"), default=0.0) == 0.0 or are_equal:
        return None
    learner = run.config.learner
    keep_all = {
        "learner.rejection.kind=none": learner.rejection.kind == "none",
        "learner.correction=tis": learner.correction == "tis",
    }
    return Observation(
        0.0,
        f"the gradient is 0 in the last {len(norms)} steps, though scores differ: no token of theirs is trained.",
        " ".join(key for key, is_in_force in keep_all.items() if not is_in_force) or "see policy/is_masked",
    )


@rule("")
def drift(run: Evidence) -> Observation | None:
    """A log-probability of the engine differs from the learner's by more than 1e-4 in float32 (in bfloat16 by more than 0.02 on
    average), for the same version of the weights."""
    dtype = run.config.model.dtype
    name, limit = DRIFT_MEASURES[dtype], MOST_DRIFT[dtype]
    most = max(run.values(name), default=0.0)
    if most <= limit:
        return None
    sentence, severity = (
        f"{drift_sentence(most, dtype=dtype)}.",
        by_share(most, harms=100.0 * limit),
    )  # no rounding any more
    return Observation(most, sentence, drift_remedy(run.config), severity, name)


@rule("live/gate_refused_in_a_row", slows=REFUSED, harms=MANY_REFUSED)
def refused_candidates(run: Evidence) -> Observation | None:
    """The gate of a live run has refused at least the last 3 candidates."""
    number = run.last("live/gate_refused_in_a_row")
    of_kind = {kind: int(run.last(f"live/gate_refused_for_{kind}")) for kind in REFUSED_FOR}
    if number < REFUSED or not any(of_kind.values()):
        return None
    kinds = sorted((kind for kind in of_kind if of_kind[kind]), key=lambda kind: -of_kind[kind])
    gate, learner = run.config.serve.gate, run.config.learner
    remedies = {
        "score": f"serve.gate.samples={2 * gate.samples}, more tasks, or serve.gate.margin={2 * gate.margin or 0.05:g}, if they "
        f"are as good; else see what people gave that led there",
        "entropy": f"learner.entropy_coef={2 * learner.entropy_coef or 0.001:g}",
        "likeness": f"learner.entropy_coef={2 * learner.entropy_coef or 0.001:g}",
        "drift": f"learner.kl.coef={2 * learner.kl.coef or 0.01:g}",
        "sessions": f"serve.gate.session_share={min(0.5, 2 * gate.session_share) or 0.1:g}, or a wider serve.gate.margin",
        "unplayed": f"see {run.folder / 'log.txt'} on why tasks of {gate.tasks} fail",
    }
    causes = ", ".join(f"{of_kind[kind]} for {REFUSED_FOR[kind]}" for kind in kinds)
    told = f"the gate refused the last {number:.0f} candidates ({causes}): users are served what was learned before."
    return Observation(number, told, f"{remedies[kinds[0]]} (`understudy serve status {run.folder}` has the figures)")


@rule("policy/is_masked", slows=LOST, harms=MANY_LOST, stops=0.99)
def masked_tokens(run: Evidence) -> Observation:
    """At least 5 % of the trained tokens were dropped by learner.correction or learner.rejection."""
    share, rejection = run.mean("policy/is_masked") or 0.0, run.config.learner.rejection
    if rejection.kind != "none":
        remedy = f"learner.rejection.kind=none, or a wider learner.rejection.high (now {_or_own(rejection.high)})"
        if rejection.kind == "geo_mean":
            remedy += f" and learner.rejection.low (now {_or_own(rejection.low)})"
    else:
        remedy = f"learner.correction=tis, which cuts weights and drops nothing (now {run.config.learner.correction})"
    return Observation(
        share,
        f"{percent(share)} of the trained tokens are dropped, as the policy that sampled them is too far "
        f"from the one that trains.",
        f"{remedy}; fresher data: buffer.max_policy_lag={max(0, run.config.buffer.max_policy_lag - 1)}",
    )


@rule("policy/too_old_share", slows=LOST, harms=MANY_LOST)
def stale_groups(run: Evidence) -> Observation:
    """At least 5 % of the complete groups were evicted as too old, or of the sampled tokens are not trained as they are too old."""
    evicted, complete = run.given_up(STALE)
    by_group, by_token = evicted / max(complete, 1), run.mean("policy/too_old_share") or 0.0
    lag = run.config.buffer.max_policy_lag
    age = f"more than {counted(lag, 'version')} old"
    remedy = f"buffer.max_policy_lag={lag + 1}, or fewer episodes at once: {run.fewer_at_once}"
    if by_group >= by_token:
        told = f"{evicted} of {complete} complete groups were thrown away, as their data was {age}."
        return Observation(by_group, told, remedy, measure="share of the complete groups")
    return Observation(by_token, f"{percent(by_token)} of the sampled tokens are {age}, and not trained.", remedy)


@rule("replay/counted_share", slows=0.5, harms=0.8)
def idle_replay(run: Evidence) -> Observation | None:
    """At least half of the tokens of stored groups change nothing: too old, dropped, clipped, or of groups that scored alike."""
    share, replay, learner = run.mean("replay/counted_share"), run.config.buffer.replay, run.config.learner
    if share is None:
        return None
    ways = {
        "buffer.replay.only=mixed": replay.only == "mixed",
        "learner.correction=tis": learner.correction == "tis",
        "learner.rejection.kind=none": learner.rejection.kind == "none",
    }
    other = [key for key, is_in_force in ways.items() if not is_in_force]
    return Observation(
        1.0 - share,
        f"{percent(1.0 - share)} of the tokens of stored groups change nothing: they are too old, dropped by learner.correction or "
        f"learner.rejection, clipped, or of groups that scored alike.",
        ", ".join([*other, f"buffer.replay.oldest={max(1, replay.oldest // 2)}, or a smaller buffer.replay.share"]),
        measure="tokens of stored groups that change nothing",
    )


@rule("replay/short", slows=0.5)
def missing_replay(run: Evidence) -> Observation | None:
    """At least half of the places of stored groups were filled by fresh ones, as too few stored groups may be trained again."""
    short, wanted = run.mean("replay/short"), run.config.buffer.num_replayed
    if short is None or not wanted or len(run.steps) < ENOUGH_STEPS:
        return None
    replay = run.config.buffer.replay
    wider = "" if replay.only == "all" else "buffer.replay.only=all, "
    return Observation(
        short / wanted,
        f"of {counted(wanted, 'place')} for stored groups in a batch {short:.1f} were filled by fresh ones: too few may be trained "
        f"again.",
        f"{wider}buffer.replay.oldest={2 * replay.oldest}, buffer.replay.times={replay.times + 1}, or a smaller "
        f"buffer.replay.share",
        measure="places that fresh groups filled",
    )


@rule("staleness/mean", slows=2.0)
def uncorrected_data(run: Evidence) -> Observation | None:
    """The data is 2 versions old or more, and no correction weighs it."""
    lag = run.mean("staleness/mean")
    if lag is None or run.config.learner.correction != "none":
        return None
    return Observation(
        lag,
        f"the data is {lag:.1f} versions old on average, and is trained as if the present policy had sampled it.",
        f"learner.correction=tis, or buffer.max_policy_lag={max(1, int(lag) // 2)}",
        None if run.has_risen else Severity.HARMS,
    )


@rule("policy/is_capped", slows=LOST, harms=MANY_LOST)
def capped_weights(run: Evidence) -> Observation:
    """At least 5 % of the trained tokens have an importance ratio above the correction's largest."""
    share, lag = run.mean("policy/is_capped") or 0.0, run.config.buffer.max_policy_lag
    return Observation(
        share,
        f"{percent(share)} of the trained tokens are far more likely now than when they were sampled.",
        run.slower
        + (f", or fresher data: buffer.max_policy_lag={lag - 1}" if lag and not run.config.serve.enabled else ""),
    )


@rule("reward/mean", Severity.HARMS)
def fallen_reward(run: Evidence) -> Observation | None:
    """The mean of the last 5 steps is below that of the best 5 by a quarter of the scores' range."""
    means = [fmean(run.rewards[end - LAST_STEPS : end]) for end in range(LAST_STEPS, len(run.rewards) + 1)]
    if not means or run.score_range == 0.0:
        return None
    best = max(means)
    step = int(run.steps[means.index(best) + LAST_STEPS - 1]["step"])
    if best - means[-1] < 0.25 * run.score_range:
        return None
    return Observation(
        best - means[-1],
        f"the reward fell from {best:.3f} (step {step}) to {means[-1]:.3f}.",
        f"{run.slower}, from the start or a better checkpoint; or hold the policy: {run.held}",
    )


@rule("val/mean", Severity.HARMS)
def fallen_validation(run: Evidence) -> Observation | None:
    """The newest validation is below the best one by a quarter of the scores' range; by a tenth, where it has tasks enough to tell
    that from chance."""
    if len(run.validations) < 2 or run.score_range == 0.0 or _lag_of_validation(run) is not None:
        return None
    best, last = max(run.validations, key=lambda line: line["val/mean"]), run.validations[-1]
    lost = best["val/mean"] - last["val/mean"]
    chance = run.score_range * (0.5 / max(last.get("val/tasks", 1.0), 1.0)) ** 0.5  # of two means that lie in the range
    if lost < 0.25 * run.score_range and lost < max(0.1 * run.score_range, CLEAR_RISE * chance):
        return None
    return Observation(
        lost,
        f"the validation fell from {best['val/mean']:.3f} (step {best.get('val/step', best['step']):.0f}) to "
        f"{last['val/mean']:.3f} (step {last.get('val/step', last['step']):.0f}).",
        f"{run.slower}, from the start or a better checkpoint; or hold the policy: {run.held}",
    )


@rule("policy/approx_kl")
def large_updates(run: Evidence) -> Observation | None:
    """A step moves the policy by 0.05 nats or more (mean of the last 10), or one of them by 0.2; or the largest ratio of a token is
    20 in half of them (in steps of a single update the ratio to the version before, where the data is one version old)."""
    moves = run.values("policy/approx_kl")
    ratios = [max(step.get("policy/ratio_max", 1.0), _since_one_version(step)) for step in run.recent]
    if not moves or (fmean(moves) < LARGE_KL and max(moves) < HUGE_KL and median(ratios) < 20.0):
        return None
    moved = fmean(moves)
    return Observation(
        moved,
        f"a step moves the policy by {moved:.2g} nats; some token became {max(ratios):.3g} times as likely.",
        run.slower,
        by_share(moved, harms=HUGE_KL) if run.has_risen else Severity.HARMS,
    )


def _since_one_version(step: Mapping[str, float]) -> float:
    """The largest ratio of a token to the version before: all that shows the size of a single update, which `approx_kl` and
    `ratio_max` compare with itself."""
    return step.get("policy/is_weight_max", 1.0) if step.get("staleness/max") == 1.0 else 1.0


@rule("")
def small_updates(run: Evidence) -> Observation | None:
    """The policy moved by less than 1e-7 nats a step for 10 steps, though there is a gradient; or in bfloat16 by less than 1 weight
    in 10,000."""
    if len(run.steps) < ENOUGH_STEPS or run.config.learner.lr == 0.0 or run.is_solved:
        return None
    if not any(norm > 0.0 for norm in run.values("policy/grad_norm")):
        return None  # another rule's finding
    moved, changed = run.values("policy/approx_kl"), run.values("publish/changed_share")
    several = [step for step in run.recent if step.get("learner/updates", 0.0) > 1.0]
    if moved and len(several) == len(run.recent) and max(moved) < 1e-7:
        figure, measure, unit = max(moved), "policy/approx_kl", "nats"
    elif run.config.model.dtype == "bfloat16" and changed and max(changed) < 1e-4:
        figure, measure, unit = max(changed), "publish/changed_share", "of its published weights"
    else:
        return None
    return Observation(
        figure,
        f"the updates are too small for anything to move: a step changes the policy by {figure:.1g} {unit}.",
        f"learner.lr={run.config.learner.lr * 10:.3g}",
        Severity.STOPS if not run.has_risen else Severity.SLOWS,
        measure,
    )


@rule("policy/entropy", Severity.HARMS)
def entropy_gone(run: Evidence) -> Observation | None:
    """The entropy is below 0.02 nats, or below 0.1 nats and a tenth of the first steps', and the task is not solved."""
    entropy = run.mean("policy/entropy")
    if entropy is None or run.is_solved:
        return None
    began = [step["policy/entropy"] for step in run.steps[:FIRST_STEPS] if "policy/entropy" in step]
    first = fmean(began) if began else entropy
    if entropy >= NO_ENTROPY and (entropy >= LOW_ENTROPY or entropy >= 0.1 * first):
        return None
    was = f" ({first:.3g} in the first steps)" if first > entropy else ""
    return Observation(
        entropy,
        f"the policy's entropy is {entropy:.2g} nats per token{was}: it nearly always says the same.",
        _more_entropy(run, was=first),
    )


@rule("policy/entropy")
def falling_entropy(run: Evidence) -> Observation | None:
    """The entropy fell to half or less in the last 10 steps, by a fifth in each step on average, and the task is not solved."""
    values = run.values("policy/entropy")
    few = max(1, len(values) // 3)
    if len(values) < FIRST_STEPS or run.is_solved or entropy_gone(run) is not None:
        return None
    before, now, steps = max(values[:few]), fmean(values[-few:]), len(values) - few
    if now > before / 2 or before - now < LOW_ENTROPY or log(before / now) < PLUNGE * steps:
        return None
    return Observation(
        now,
        f"the policy's entropy fell from {before:.2g} to {now:.2g} nats per token in {len(values)} steps: what it no "
        f"longer says it cannot learn from.",
        _more_entropy(run, was=before),
        None if run.has_risen else Severity.HARMS,
    )


def _more_entropy(run: Evidence, *, was: float) -> str:
    target = max(2 * NO_ENTROPY, round(was / 3, 2))
    if run.config.learner.adaptive_entropy.target is not None:
        remedy = f"learner.adaptive_entropy.target={target:g}, and a higher learner.adaptive_entropy.step"
    else:
        coef = run.config.learner.entropy_coef
        remedy = f"learner.entropy_coef={2 * coef if coef else 0.01:g}, or learner.adaptive_entropy.target={target:g}"
    return f"{remedy}; {run.slower} from the beginning keeps more of it"


@rule("critic/explained_variance", Severity.HARMS)
def blind_critic(run: Evidence) -> Observation | None:
    """The critic explains at most 5 % of its targets' variance after 10 steps in which the reward has not risen, by the median of
    the steps in which scores differ."""
    learner, name = run.config.learner, "critic/explained_variance"
    known = [step[name] for step in run.recent if name in step and step["reward/std"] > 0.05 * run.score_range]
    if learner.advantage != "gae" or len(run.steps) < ENOUGH_STEPS or len(known) < ENOUGH_STEPS // 2 or run.has_risen:
        return None
    explained = median(known)
    if explained > 0.05:
        return None
    own = learner.critic == "separate"
    raised = f"learner.critic_lr={3 * learner.critic_lr:.3g}" if own else "learner.critic=separate"
    return Observation(
        explained,
        f"the critic explains {percent(max(explained, 0.0))} of its targets' variance: its values are noise.",
        f"{raised}, or no critic: learner.advantage=grpo learner.critic=none",
    )


@rule("policy/kl_ref")
def far_from_reference(run: Evidence) -> Observation | None:
    """The KL to the reference is three times learner.kl.target; without a target, 0.5 nats per token."""
    kl, target = run.mean("policy/kl_ref"), run.config.learner.kl.target
    far, gone = (0.5, 2.0) if target is None else (3.0 * target, 10.0 * target)
    if kl is None or kl < far:
        return None
    aim = f", whose target is {target:g}." if target is not None else "."
    return Observation(
        kl,
        f"the policy is {kl:.2g} nats per token away from the reference{aim}",
        f"{run.held}, or {run.slower}",
        by_share(kl, harms=gone) if run.has_risen else Severity.HARMS,
    )


@rule("policy/clipfrac", harms=0.5)
def clipped_tokens(run: Evidence) -> Observation | None:
    """At least 20 % of the trained tokens were clipped in the last 10 steps; 50 % with losses that clip more by design."""
    share, learner = run.mean("policy/clipfrac") or 0.0, run.config.learner
    if share < (0.2 if learner.loss == "ppo" else 0.5):
        return None
    fewer = " or learner.epochs=1 learner.minibatches=1" if learner.epochs * learner.minibatches > 1 else ""
    return Observation(
        share,
        f"{percent(share)} of the trained tokens are clipped: the updates of a step go further than the loss lets them.",
        f"{run.slower}{fewer}",
    )


@rule("policy/grad_norm")
def clipped_gradient(run: Evidence) -> Observation | None:
    """The gradient was at least ten times larger than learner.grad_clip in each of 10 steps."""
    norms, learner = run.values("policy/grad_norm"), run.config.learner
    size = max((abs(step[name]) for step in run.recent for name in ("reward/min", "reward/max")), default=1.0)
    limit = learner.grad_clip * (max(size, 1e-9) if learner.advantage in SCALED else 1.0)
    if len(norms) < ENOUGH_STEPS or min(norms) < 10.0 * limit:
        return None
    middle = median(norms)
    return Observation(
        middle,
        f"each gradient is scaled down: its norm is {middle:.3g}, {middle / limit:.0f} times learner.grad_clip.",
        f"learner.grad_clip={learner.grad_clip * middle / limit:.2g}, or {run.slower}",
    )


@rule("val/mean", Severity.HARMS)
def training_tasks_only(run: Evidence) -> Observation | None:
    """The reward rose by a quarter of the scores' range more than validation did."""
    validated = _lag_of_validation(run)
    if validated is None:
        return None
    gained = run.last_reward - run.first_reward
    return Observation(
        validated,
        f"the reward of the training tasks rose by {gained:.3f}, that of the validation tasks by {validated:.3f}: "
        f"the policy learns the training tasks by heart.",
        f"more different rows in data.tasks; {run.held} holds the policy near its beginning",
    )


def _lag_of_validation(run: Evidence) -> float | None:
    """What validation gained, where that is less by far than what training gained; None: it is not."""
    if len(run.validations) < 2 or not run.has_risen or run.score_range == 0.0:
        return None
    validated = run.validations[-1]["val/mean"] - run.validations[0]["val/mean"]
    is_behind = run.last_reward - run.first_reward - validated >= 0.25 * run.score_range
    return validated if is_behind else None


def _or_own(value: float | None) -> str:
    return "its own" if value is None else f"{value:g}"
