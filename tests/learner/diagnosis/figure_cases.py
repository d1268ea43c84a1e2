"""For each rule about a run's figures a run in which it fires, and one just beside it in which it must not."""

from __future__ import annotations

from pathlib import Path

from learner.diagnosis.evidence import Severity
from tests.learner.diagnosis.case import Case
from tests.learner.diagnosis.recorded_run import Figures, RecordedRun, groups

REPLAYS = ("buffer.groups_per_step=8", "buffer.replay.share=0.5")
STILL = {"policy/approx_kl": 1e-9}
MASKED = "learner.mask_truncated=true"
FAR = {"policy/kl_ref": 0.3}
SINGLE = {"learner/updates": 1.0, "policy/approx_kl": 0.0, "policy/ratio_max": 1.0}
BUSY_LEARNER = {"time/engine_idle_s": 0.9, "time/wait_s": 0.2}
WAITING = {"time/wait_s": 1.5}


def recorded(*overrides: str, figures: Figures | None = None, number: int = 12, rises: bool = True):
    """Builds a run whose steps all have these figures."""
    given = () if figures is None else (figures,)
    return lambda folder: RecordedRun(folder, *overrides).steps(*given, number=number, rises=rises)


def in_course(name: str, *values: float | None, rises: bool = True, overrides: tuple[str, ...] = ()):
    """Builds a run in which one figure changes."""
    each = [{name: value} for value in values]
    return lambda folder: RecordedRun(folder, *overrides).steps(*each, number=len(each), rises=rises)


def evicted(number: int):
    """Builds a run with so many stale groups beside ten fresh ones."""

    def build(folder: Path) -> RecordedRun:
        def fill(ledger) -> None:
            groups(*[[0.0, 1.0]] * number)(ledger)
            ledger.evict_stale(min_version=1).result()
            groups(*[[0.0, 1.0]] * 10, instance=1)(ledger)

        return RecordedRun(folder).steps().ledger(fill)

    return build


CASES = [
    Case(
        rule="ended_with_error",
        fires=lambda folder: RecordedRun(folder).steps(number=3).summary(error="the disk is full\nmore"),
        quiet=lambda folder: RecordedRun(folder).steps(number=3).summary(),
        severity=Severity.STOPS, figure=3.0, says=("after 3 steps with an error: the disk is full", "understudy resume"),
    ),
    Case(
        rule="no_rate",
        fires=recorded("learner.lr=0"),
        quiet=recorded("learner.lr=1e-9"),
        severity=Severity.STOPS, figure=0.0, says=("learner.lr=1e-6",),
    ),
    Case(
        rule="nothing_updated",
        fires=recorded(figures={"learner/skipped": 1.0, "learner/updates": 1.0}),
        quiet=in_course("learner/skipped", *[0.0] * 11, 1.0),
        severity=Severity.HARMS, figure=0.5, says=("10 of the last 20 updates", "learner.lr=0.0001"),
    ),
    Case(
        rule="nothing_updated",
        fires=recorded(MASKED, "rollout.max_tokens=4", figures={"learner/updates": None, "learner/skipped": None}),
        quiet=in_course("learner/updates", None, *[2.0] * 11),
        severity=Severity.STOPS, figure=1.0, says=("in 10 of the last 10 steps", "rollout.max_tokens=8"),
    ),
    Case(
        rule="no_gradient",
        fires=recorded("learner.rejection.kind=k3_mean", figures={"policy/grad_norm": 0.0}),
        quiet=in_course("policy/grad_norm", *[0.0] * 11, 0.1),
        severity=Severity.STOPS, figure=0.0, says=("scores differ", "learner.rejection.kind=none"),
    ),
    Case(
        rule="drift",
        fires=in_course("policy/max_logprob_diff", *[1e-6] * 11, 2e-4),
        quiet=in_course("policy/max_logprob_diff", 2e-4, *[9e-5] * 11),
        severity=Severity.SLOWS, figure=2e-4, says=("differs by 0.0002, where float32 explains 0.0001", "rollout.engine_args"),
    ),
    Case(
        rule="drift",
        fires=recorded("model.dtype=bfloat16", figures={"policy/mean_logprob_diff": 0.03}),
        quiet=recorded("model.dtype=bfloat16", figures={"policy/max_logprob_diff": 0.06, "policy/mean_logprob_diff": 0.019}),
        severity=Severity.SLOWS, figure=0.03, says=("model.dtype=float32",),
    ),
    Case(
        rule="drift",
        fires=recorded("model.dtype=bfloat16", "rollout.engine=http://127.0.0.1:8000", figures={"policy/mean_logprob_diff": 0.03}),
        quiet=recorded("model.dtype=bfloat16", "rollout.engine=http://127.0.0.1:8000", figures={"policy/mean_logprob_diff": 0.01}),
        severity=Severity.SLOWS, figure=0.03, says=("--hf-overrides",),
    ),
    Case(
        rule="masked_tokens",
        fires=recorded("learner.correction=mis", figures={"policy/is_masked": 0.4}),
        quiet=recorded("learner.correction=mis", figures={"policy/is_masked": 0.04}),
        severity=Severity.HARMS, figure=0.4, says=("40 % of the trained tokens are dropped", "learner.correction=tis"),
    ),
    Case(
        rule="masked_tokens",
        fires=recorded("learner.rejection.kind=geo_mean", figures={"policy/is_masked": 1.0}),
        quiet=recorded("learner.rejection.kind=geo_mean", figures={"policy/is_masked": 0.0}),
        severity=Severity.STOPS, figure=1.0, says=("learner.rejection.kind=none",),
    ),
    Case(
        rule="refused_candidates",
        fires=recorded(
            figures={"live/gate_refused_in_a_row": 4.0, "live/gate_refused_for_score": 1.0, "live/gate_refused_for_drift": 3.0}
        ),
        quiet=recorded(figures={"live/gate_refused_in_a_row": 2.0, "live/gate_refused_for_drift": 2.0}),
        severity=Severity.SLOWS, figure=4.0, says=("3 for their drift from the model, 1 for their score", "learner.kl.coef="),
    ),
    Case(
        rule="idle_replay",
        fires=recorded(*REPLAYS, "buffer.replay.only=all", figures={"replay/counted_share": 0.0}),
        quiet=recorded(*REPLAYS, "buffer.replay.only=all", figures={"replay/counted_share": 0.6}),
        severity=Severity.HARMS, figure=1.0, says=("100 % of the tokens of stored groups", "buffer.replay.only=mixed"),
    ),
    Case(
        rule="missing_replay",
        fires=recorded(*REPLAYS, figures={"replay/short": 3.0}),
        quiet=recorded(*REPLAYS, figures={"replay/short": 1.0}),
        severity=Severity.SLOWS, figure=0.75, says=("of 4 places", "3.0 were filled by fresh ones", "buffer.replay.only=all"),
    ),
    Case(
        rule="stale_groups",
        fires=evicted(2),
        quiet=evicted(0),
        severity=Severity.SLOWS, figure=2 / 12, says=("2 of 12 complete groups", "buffer.max_policy_lag=2"),
    ),
    Case(
        rule="stale_groups",
        fires=recorded(figures={"policy/too_old_share": 0.5}),
        quiet=recorded(figures={"policy/too_old_share": 0.04}),
        severity=Severity.HARMS, figure=0.5, says=("50 % of the sampled tokens are more than 1 version old",),
    ),
    Case(
        rule="uncorrected_data",
        fires=recorded("learner.correction=none", "buffer.max_policy_lag=4", figures={"staleness/mean": 3.0}),
        quiet=recorded("learner.correction=tis", "buffer.max_policy_lag=4", figures={"staleness/mean": 3.0}),
        severity=Severity.SLOWS, figure=3.0, says=("3.0 versions old on average", "learner.correction=tis"),
    ),
    Case(
        rule="capped_weights",
        fires=recorded(figures={"policy/is_capped": 0.1}),
        quiet=recorded(figures={"policy/is_capped": 0.04}),
        severity=Severity.SLOWS, figure=0.1, says=("10 % of the trained tokens", "buffer.max_policy_lag=0"),
    ),
    Case(
        rule="fallen_reward",
        fires=in_course("reward/mean", *[0.8] * 6, *[0.3] * 6),
        quiet=in_course("reward/mean", *[0.8] * 6, *[0.6] * 6),
        severity=Severity.HARMS, figure=0.5, says=("fell from 0.800 (step 5) to 0.300", "learner.lr=0.0001"),
    ),
    Case(
        rule="large_updates",
        fires=recorded(figures={"policy/approx_kl": 0.3}, rises=False),
        quiet=recorded(figures={"policy/approx_kl": 0.04}, rises=False),
        severity=Severity.HARMS, figure=0.3, says=("moves the policy by 0.3 nats", "learner.lr=0.0001"),
    ),
    Case(
        rule="large_updates",  # one step of ten
        fires=in_course("policy/approx_kl", *[0.001] * 9, 0.3, rises=False),
        quiet=in_course("policy/approx_kl", *[0.001] * 9, 0.15, rises=False),
        severity=Severity.HARMS, figure=0.0309, says=("learner.lr=0.0001",),
    ),
    Case(
        rule="large_updates",  # of a single update, which the learner's own ratio cannot show
        fires=recorded(figures={**SINGLE, "policy/is_weight_max": 60.0}, number=3, rises=False),
        quiet=recorded(figures={**SINGLE, "policy/is_weight_max": 60.0, "staleness/max": 4.0}, number=3, rises=False),
        severity=Severity.HARMS, figure=0.0, says=("60 times as likely",),
    ),
    Case(
        rule="large_updates",
        fires=recorded(figures={"policy/ratio_max": 25.0}),
        quiet=in_course("policy/ratio_max", *[25.0] * 4, *[3.0] * 8),
        severity=Severity.SLOWS, figure=0.0025, says=("25 times as likely",),
    ),
    Case(
        rule="small_updates",
        fires=recorded("learner.lr=1e-9", figures=STILL, rises=False),
        quiet=recorded("learner.lr=1e-9", figures={**STILL, "learner/updates": 1.0}, rises=False),  # no ratio to see it by
        severity=Severity.STOPS, figure=1e-9, says=("changes the policy by 1e-09 nats", "learner.lr=1e-08"),
    ),
    Case(
        rule="small_updates",
        fires=recorded("model.dtype=bfloat16", figures={"publish/changed_share": 1e-5}, rises=False),
        quiet=recorded("model.dtype=bfloat16", figures={"publish/changed_share": 1e-2}, rises=False),
        severity=Severity.STOPS, figure=1e-5, says=("of its published weights",),
    ),
    Case(
        rule="entropy_gone",
        fires=in_course("policy/entropy", *[1.2] * 4, *[0.05] * 10, rises=False),
        quiet=in_course("policy/entropy", *[0.4] * 4, *[0.05] * 10, rises=False),
        severity=Severity.HARMS, figure=0.05, says=("0.05 nats per token (1.2 in the first steps)", "learner.entropy_coef=0.01"),
    ),
    Case(
        rule="entropy_gone",  # where the task is solved it may go
        fires=recorded("run.reward_optimum=1", figures={"policy/entropy": 0.01, "reward/mean": 0.9}),
        quiet=recorded("run.reward_optimum=1", figures={"policy/entropy": 0.01, "reward/mean": 0.995}),
        severity=Severity.HARMS, figure=0.01, says=(),
    ),
    Case(
        rule="falling_entropy",
        fires=in_course("policy/entropy", 2.3, 1.1, 0.3, rises=False),
        quiet=in_course("policy/entropy", 2.3, 2.0, 1.7, rises=False),
        severity=Severity.HARMS, figure=0.3, says=("fell from 2.3 to 0.3 nats per token in 3 steps", "learner.lr=0.0001"),
    ),
    Case(
        rule="falling_entropy",  # while the reward rises, as in many a collapse
        fires=in_course("policy/entropy", *[1.5] * 4, 1.4, 1.2, 0.9, 0.5, 0.3, 0.25, 0.2, 0.15),
        quiet=in_course("policy/entropy", *[0.7] * 4, 0.68, 0.66, 0.63, 0.6, 0.5, 0.4, 0.41, 0.3),
        severity=Severity.SLOWS, figure=0.2, says=("learner.adaptive_entropy.target=0.5",),
    ),
    Case(
        rule="blind_critic",
        fires=recorded(figures={"critic/explained_variance": 0.01}, rises=False),
        quiet=recorded(figures={"critic/explained_variance": 0.01}),
        severity=Severity.HARMS, figure=0.01, says=("explains 1 %", "learner.critic=separate", "learner.critic=none"),
    ),
    Case(
        rule="blind_critic",
        fires=recorded("learner.critic=separate", figures={"critic/explained_variance": -3.0}, rises=False),
        quiet=recorded("learner.critic=separate", figures={"critic/explained_variance": 0.06}, rises=False),
        severity=Severity.HARMS, figure=-3.0, says=("explains 0 %", "learner.critic_lr=0.0015"),
    ),
    Case(
        rule="far_from_reference",
        fires=recorded("learner.kl.coef=0.001", "learner.kl.target=0.05", figures=FAR),
        quiet=recorded("learner.kl.coef=0.001", "learner.kl.target=0.2", figures=FAR),
        severity=Severity.SLOWS, figure=0.3, says=("0.3 nats per token", "target is 0.05", "learner.kl.coef=0.003"),
    ),
    Case(
        rule="far_from_reference",
        fires=recorded("learner.kl.coef=0.001", figures={"policy/kl_ref": 2.5}),
        quiet=recorded("learner.kl.coef=0.001", figures=FAR),
        severity=Severity.HARMS, figure=2.5, says=(),
    ),
    Case(
        rule="clipped_tokens",
        fires=recorded(figures={"policy/clipfrac": 0.25}),
        quiet=recorded(figures={"policy/clipfrac": 0.19}),
        severity=Severity.SLOWS, figure=0.25, says=("25 % of the trained tokens are clipped", "learner.minibatches=1"),
    ),
    Case(
        rule="clipped_tokens",
        fires=recorded("learner.recipe=gspo", figures={"policy/clipfrac": 0.6}),
        quiet=recorded("learner.recipe=gspo", figures={"policy/clipfrac": 0.25}),
        severity=Severity.HARMS, figure=0.6, says=(),
    ),
    Case(
        rule="clipped_gradient",
        fires=recorded("learner.grad_clip=0.04"),
        quiet=recorded("learner.grad_clip=0.06"),
        severity=Severity.SLOWS, figure=0.5, says=("12 times learner.grad_clip", "learner.grad_clip=0.5"),
    ),
    Case(
        rule="training_tasks_only",
        fires=lambda folder: RecordedRun(folder).steps().validations(0.2, 0.3),
        quiet=lambda folder: RecordedRun(folder).steps().validations(0.2, 0.6),
        severity=Severity.HARMS, figure=0.1, says=("that of the validation tasks by 0.100", "data.tasks"),
    ),
    Case(
        rule="fallen_validation",
        fires=lambda folder: RecordedRun(folder).steps(number=3, rises=False).validations(0.48, 0.41, 0.22),
        quiet=lambda folder: RecordedRun(folder).steps(number=3, rises=False).validations(0.48, 0.41, 0.3),
        severity=Severity.HARMS, figure=0.26, says=("fell from 0.480 (step 0) to 0.220 (step 2)", "learner.kl.coef=0.01"),
    ),
    Case(
        rule="fallen_validation",  # a smaller fall, of tasks enough
        fires=lambda folder: RecordedRun(folder).steps().validations(0.2, 0.7, 0.55, tasks=400),
        quiet=lambda folder: RecordedRun(folder).steps().validations(0.2, 0.7, 0.55, tasks=40),
        severity=Severity.HARMS, figure=0.15, says=("fell from 0.700 (step 1) to 0.550 (step 2)",),
    ),
    Case(
        rule="idle_learner",
        fires=recorded("buffer.max_policy_lag=0", figures=WAITING),
        quiet=recorded("buffer.max_policy_lag=0", figures={"time/wait_s": 0.8}),
        severity=Severity.SLOWS, figure=1.5 / 1.8, says=("generation takes that long", "buffer.max_policy_lag=1"),
    ),
    Case(
        rule="idle_learner",
        fires=recorded(figures={**WAITING, "time/engine_idle_s": 1.2}),
        quiet=recorded(figures=WAITING, number=4),
        severity=Severity.SLOWS, figure=1.5 / 1.8, says=("the engine is idle for 67 % of it", "buffer.max_policy_lag=2"),
    ),
    Case(
        rule="idle_learner",
        fires=recorded(figures={**WAITING, "time/engine_idle_s": 1.2, "pool/agents_waiting": 0.0}),
        quiet=recorded(figures={"time/wait_s": None}),
        severity=Severity.SLOWS, figure=1.5 / 1.8, says=("agents.processes=2",),
    ),
    Case(
        rule="idle_engine",
        fires=recorded("buffer.max_policy_lag=0", figures=BUSY_LEARNER),
        quiet=recorded("buffer.max_policy_lag=0", figures={**BUSY_LEARNER, "time/engine_idle_s": 0.5}),
        severity=Severity.SLOWS, figure=0.5, says=("nothing to do in 50 % of the time", "buffer.max_policy_lag=1"),
    ),
    Case(
        rule="idle_engine",  # where they take turns with all cores, another flow gains nothing
        fires=recorded("buffer.max_policy_lag=0", "learner.threads=1", figures=BUSY_LEARNER),
        quiet=recorded("buffer.max_policy_lag=0", "learner.threads=2", figures=BUSY_LEARNER),
        severity=Severity.SLOWS, figure=0.5, says=("buffer.max_policy_lag=1",),
    ),
    Case(
        rule="idle_engine",
        fires=recorded("learner.epochs=2", figures=BUSY_LEARNER),
        quiet=recorded("learner.epochs=2", figures={**BUSY_LEARNER, "time/wait_s": 1.2}),  # the learner waits too
        severity=Severity.SLOWS, figure=0.5, says=("learner.token_budget=", "learner.epochs=1"),
    ),
    Case(
        rule="idle_learner",  # another engine is a remedy where there is a card for it
        fires=lambda folder: recorded(figures=WAITING)(folder).machine(cards=4),
        quiet=lambda folder: recorded(figures={"time/wait_s": 0.8})(folder).machine(cards=4),
        severity=Severity.SLOWS, figure=1.5 / 1.8, says=("rollout.engines=2",),
    ),
    Case(
        rule="idle_engine",
        fires=lambda folder: recorded(figures=BUSY_LEARNER)(folder).machine(cards=2),
        quiet=lambda folder: recorded(number=4, figures=BUSY_LEARNER)(folder).machine(cards=2),
        severity=Severity.SLOWS, figure=0.5, says=("learner.ranks=2",),
    ),
    Case(
        rule="preempted_generations",
        fires=in_course("engine/e0/preemptions", *[3.0 * step for step in range(12)]),
        quiet=recorded(figures={"engine/e0/preemptions": 30.0}),
        severity=Severity.SLOWS, figure=27.0, says=("27 generations aside", "agents.concurrency=72", "rollout.kv_cache_gb=0.5"),
    ),
    Case(
        rule="dying_parts",
        fires=recorded(figures={"restarts/environment": 3.0}),
        quiet=recorded(figures={"restarts/environment": 2.0}),
        severity=Severity.SLOWS, figure=3.0, says=("the environment died 3 times", "env.log"),
    ),
    Case(
        rule="long_saving",
        fires=recorded(figures={"time/save_s": 0.4}),
        quiet=recorded(figures={"time/save_s": 0.3}),
        severity=Severity.SLOWS, figure=0.4 / 1.8, says=("run.checkpoints.every=80",),
    ),
    Case(
        rule="long_publishing",
        fires=recorded(figures={"time/publish_s": 0.6}),
        quiet=recorded(figures={"time/publish_s": 0.5}),
        severity=Severity.SLOWS, figure=0.6 / 1.8, says=("buffer.groups_per_step=16",),
    ),
    Case(
        rule="no_step",
        fires=lambda folder: RecordedRun(folder).ledger(groups([0.0, 1.0], [1.0, 0.0])),
        quiet=lambda folder: RecordedRun(folder).steps(number=1).ledger(groups([0.0, 1.0], [1.0, 0.0])),
        severity=Severity.STOPS, figure=0.25, says=("2 of the 8 groups of a batch are complete, 4 episodes are scored, 0 run",),
    ),
    Case(
        rule="few_steps",
        fires=recorded(number=9),
        quiet=recorded(number=10),
        severity=Severity.NOTE, figure=9.0, says=("9 steps are too few",),
    ),
]  # fmt: skip
