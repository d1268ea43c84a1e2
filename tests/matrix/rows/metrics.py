"""Rows of the metrics: a value that follows from the run, or values that move."""

from __future__ import annotations

import math
from typing import Any

from tests.matrix.effects import Effect, all_of, always, expect, metric, moves, warms
from tests.matrix.inventory import metrics
from tests.matrix.records import Ended, Row
from tests.matrix.rows.learner import REPLAYED
from tests.matrix.scenarios.learner_runs import learner_name

GAE, GRPO, OLD = learner_name("gae"), learner_name("grpo"), learner_name("rloo")

SERVER_KILLED = "tests/project/test_recovery.py::test_a_run_goes_on_exactly_when_one_of_its_server_processes_is_killed"
NEXT = "tests/mocked_server/test_next_turn.py::test_a_judge_that_fails_changes_nothing_and_the_next_is_judged"
LEARNED = "tests/project/test_live_watched.py::test_what_another_model_says_is_learned_and_then_said_without_it"
UP = "tests/mocked_server/test_watching.py"
_DOWN = "test_one_that_is_down_costs_no_new_session_its_answer_once_the_policy_is_promoted"
UPSTREAM = {
    "share": "test_the_share_falls_with_each_promoted_version_to_its_floor", "down": _DOWN, "taken_over": _DOWN, "requests": _DOWN,
    "slow": "test_one_that_is_silent_is_a_time_out", "cut": "test_a_stream_that_is_cut_ends_with_an_error_of_its_dialect",
    "refused": "test_what_it_refuses_is_refused_without_the_key", "sessions": "test_feedback_weighs_and_leaves_out",
    "demonstrations": "test_feedback_weighs_and_leaves_out", "unreadable": "test_what_lies_with_the_other_server_is_not_learned",
    "left_out": "test_what_lies_with_the_other_server_is_not_learned",
}  # fmt: skip
OWNED = "tests/mocked_server/test_whose_data.py"
WHOSE = {
    "unrecorded": "test_what_is_not_to_be_recorded_is_answered_and_leaves_nothing",
    "forgotten": "test_a_running_run_forgets_what_its_administrator_asks_for",
}
GATE = "tests/learner/test_live_versions.py"
LIVE = "tests/project/test_live.py::test_users_are_served_learned_from_and_found_again_after_a_kill"
SFT_ALONE = "tests/learner/test_sft_loop.py::test_a_resumed_stage_makes_the_updates_that_were_left"
NOT_FINITE = "tests/learner/reporting/test_summary.py::test_values_that_are_not_finite_are_left_out_and_counted"
"""No figure of a run that works is not finite."""


def rows() -> list[Row]:
    """One for each metric of docs/metrics.md that is shown here; the others are missing."""
    known = {name: (run, effect) for table in (_batch(), _policy(), _rest()) for name, (run, effect) in table.items()}
    shown = [Row(f"metric {name}", "", *known[name]) for name in metrics() if name in known]
    return [
        *shown,
        Row("metric tracker/refused", "", NOT_FINITE),
        Row("metric restarts/server_process", "", SERVER_KILLED),
        *[
            Row(f"metric sft/{name}", "", SFT_ALONE)
            for name in ("loss", "val_loss", "epoch", "val_loss_last", "refused")
        ],
        *[Row(f"metric live/{name}", "", LIVE) for name in ("users", "sessions")],
        *[Row(f"metric live/{name}", "", f"{OWNED}::{test}") for name, test in WHOSE.items()],
        *[
            Row(f"metric live/gate_{name}", "", f"{GATE}::test_the_more_were_refused_the_surer_the_next_one_must_be")
            for name in (
                "candidates",
                "refused",
                "refused_in_a_row",
                "refused_for_score",
                "difference",
                "likeness",
                "sessions",
            )
        ],
        *[
            Row(f"metric live/gate_{name}", "", f"{GATE}::test_a_candidate_that_drifted_from_the_model_is_refused")
            for name in (
                "drift",
                "refused_for_drift",
                "refused_for_entropy",
                "refused_for_likeness",
                "refused_for_sessions",
                "refused_for_unplayed",
            )
        ],
        Row("metric sft/conversations", "", LEARNED),
        *[Row(f"metric upstream/{name}", "", f"{UP}::{test}") for name, test in UPSTREAM.items()],
        *[Row(f"metric live/judge_{name}", "", NEXT) for name in ("judged", "silent", "failed", "left_out")],
        Row("metric policy/router_agreement", "", REPLAYED),
        Row("metric policy/router_aux_loss", "", REPLAYED),
    ]


def positive(name: str) -> Effect:
    """Above zero in every step, and finite."""
    return metric(name, lambda values: all(0 < each < math.inf for each in values))


def within(name: str, low: float, high: float) -> Effect:
    """Between these in every step."""
    return metric(name, lambda values: all(low <= each <= high for each in values))


def sql(name: str, query: str) -> Effect:
    """In each step what the ledger says of it: a query with `{step}`."""

    def effect(ended: Ended) -> str:
        wanted = [ended.sql(query.format(step=step + 1))[0] for step in range(len(ended.metric(name)))]
        found = ended.metric(name)
        same = all(abs(one - other) < 1e-5 for one, other in zip(found, wanted, strict=True))
        return expect(same, f"{name}: {found}, from the ledger: {wanted}")

    return effect


OF_STEP = (
    "FROM step JOIN trained USING (step_id) JOIN episode USING (group_id) WHERE state = 'scored' AND step = {step}"
)


def _batch() -> dict[str, tuple[str, Effect]]:
    run = "prompts"
    return {
        "reward/mean": (run, sql("reward/mean", f"SELECT avg(score) {OF_STEP}")),
        "reward/min": (run, sql("reward/min", f"SELECT min(score) {OF_STEP}")),
        "reward/max": (run, sql("reward/max", f"SELECT max(score) {OF_STEP}")),
        "reward/std": (run, _std),
        "reward/greedy": (learner_name("remax"), within("reward/greedy", 0, 1)),
        "reward/overlong": ("dapo", metric("reward/overlong", lambda values: min(values) < 0)),
        "staleness/mean": (run, within("staleness/mean", 0, 1)),
        "staleness/max": (OLD, metric("staleness/max", lambda values: 1 <= max(values) <= 2)),
        "batch/episodes": (run, sql("batch/episodes", f"SELECT count(*) {OF_STEP}")),
        "batch/equal_groups": (run, _equal_groups),
        "batch/rows": ("strict", always("batch/rows", 16)),
        "batch/tokens": (run, _more_than("batch/tokens", "batch/trained_tokens")),
        "batch/trained_tokens": (run, sql("batch/trained_tokens", f"SELECT sum(num_tokens) {OF_STEP}")),
        "replay/groups": ("replayed", metric("replay/groups", lambda values: values[0] == 0 and max(values) == 3)),
        "replay/short": ("replayed", metric("replay/short", lambda values: values[0] == 3 and min(values) == 0)),
        "replay/age_mean": ("replayed", within("replay/age_mean", 1, 2)),
        "replay/age_max": ("replayed", within("replay/age_max", 1, 2)),
        "replay/trained_tokens": ("replayed", positive("replay/trained_tokens")),
        "replay/ratio_mean": ("replayed", all_of(moves("replay/ratio_mean"), positive("replay/ratio_mean"))),
        "replay/counted_share": ("replayed", metric("replay/counted_share", lambda values: 0 < max(values) <= 1)),
        "judge/rounds": ("model-judge", positive("judge/rounds")),
        "judge/tokens": ("model-judge", positive("judge/tokens")),
        "judge/seconds": ("model-judge", positive("judge/seconds")),
        "judge/failed": ("model-judge", metric("judge/failed", lambda values: min(values) >= 0)),
        "judge/agreement_truth": ("model-judge", within("judge/agreement_truth", 0, 1)),
        "judge/agreement_orders": ("ranked", within("judge/agreement_orders", 0, 1)),
        "sampler/pass_rate": ("mapped", metric("sampler/pass_rate", lambda values: values[0] == 0.5)),
        "sampler/new_share": ("mapped", metric("sampler/new_share", lambda values: values[0] == 1.0)),
        "sampler/tasks": ("mapped", positive("sampler/tasks")),
        "agent_loop/rounds_mean": ("rounds", always("agent_loop/rounds_mean", 2)),
        "restarts/engine": ("deaths", metric("restarts/engine", lambda values: max(values) == 1)),
        "restarts/learner": ("deaths", metric("restarts/learner", lambda values: max(values) == 1)),
        "restarts/environment": ("deaths", metric("restarts/environment", lambda values: max(values) == 1)),
        "val/mean": ("mix", within("val/mean", 0, 1)),
        "val/best": ("mix", _no_less("val/best", "val/mean")),
        "val/step": ("mix", metric("val/step", lambda values: values[0] == 0 and values[-1] == 4)),
        "val/tasks": ("mix", always("val/tasks", 3)),
        "val/failed": ("mix", always("val/failed", 0)),
        "val/skipped": ("mix", within("val/skipped", 0, 2)),
        "val/seconds": ("mix", positive("val/seconds")),
    }  # fmt: skip


def _policy() -> dict[str, tuple[str, Effect]]:
    plain = {
        name: (GRPO, moves(f"policy/{name}"))
        for name in ("loss", "approx_kl", "clipfrac", "entropy", "grad_norm", "is_weight_mean")
    }
    return {
        **{f"policy/{name}": place for name, place in plain.items()},
        "policy/ratio_max": (GRPO, metric("policy/ratio_max", lambda values: min(values) >= 1.0)),
        "policy/is_weight_max": (GRPO, metric("policy/is_weight_max", lambda values: max(values) > 1.01)),
        "policy/is_capped": (GRPO, metric("policy/is_capped", lambda values: 0 < max(values) < 1)),
        "policy/is_masked": (OLD, metric("policy/is_masked", lambda values: 0 < max(values) < 1)),
        "policy/hinted_share": ("hints", always("policy/hinted_share", 1)),
        "policy/kl_hinted": ("hints", all_of(moves("policy/kl_hinted"), positive("policy/kl_hinted"))),
        "policy/echo_loss": ("rounds", all_of(moves("policy/echo_loss"), positive("policy/echo_loss"))),
        "learner/echo_tokens": ("rounds", positive("learner/echo_tokens")),
        "policy/truncated_share": ("truncated", metric("policy/truncated_share", lambda values: 0 < max(values) <= 1)),
        "policy/entropy_coef": (learner_name("gpg"), moves("policy/entropy_coef")),
        "policy/too_old_share": ("aged", metric("policy/too_old_share", lambda values: 0 < max(values) < 1)),
        "policy/kl_ref": (GRPO, all_of(moves("policy/kl_ref"), positive_once("policy/kl_ref"))),
        "policy/kl_teacher": (learner_name("none"), moves("policy/kl_teacher")),
        "policy/kl_coef": (learner_name("reinforce_plus_plus"), moves("policy/kl_coef")),
        "policy/max_logprob_diff": (GRPO, metric("policy/max_logprob_diff", lambda values: 0 < max(values) < 1e-4)),
        "policy/mean_logprob_diff": (GRPO, metric("policy/mean_logprob_diff", lambda values: 0 < max(values) < 1e-5)),
        "policy/checked_share": (GRPO, always("policy/checked_share", 1)),
        "policy/lag_mean": (GRPO, _equals("policy/lag_mean", "staleness/mean")),
        "policy/lag_max": (GRPO, _equals("policy/lag_max", "staleness/max")),
        "critic/vf_loss": (GAE, moves("critic/vf_loss")),
        "critic/explained_variance": (GAE, moves("critic/explained_variance")),
        "critic/value_mean": (GAE, moves("critic/value_mean")),
        "learner/lr": (GRPO, warms),
        "learner/updates": (GRPO, always("learner/updates", 6)),
        "learner/skipped": (GRPO, always("learner/skipped", 0)),
        "learner/backward_share": (GRPO, metric("learner/backward_share", lambda values: all(0.0 < value <= 1.0 for value in values))),
        "learner/mfu": (GRPO, metric("learner/mfu", lambda values: all(0.0 < value < 1.0 for value in values))),
        "learner/tokens": (GRPO, _equals("learner/tokens", "batch/tokens")),
        "learner/raw_over_unique": ("rounds", metric("learner/raw_over_unique", lambda values: 1.1 < max(values) < 8)),
        "learner/trained_tokens": (GRPO, _equals("learner/trained_tokens", "batch/trained_tokens")),
        "sft/loss_first": ("mix", positive("sft/loss_first")),
        "sft/loss_last": ("mix", _less("sft/loss_last", "sft/loss_first")),
        "sft/seconds": ("mix", positive("sft/seconds")),
    }  # fmt: skip


def _rest() -> dict[str, tuple[str, Effect]]:
    run, loops = "prompts", "loops"
    times = ("step_s", "update_s", "prepare_s", "train_s", "publish_s")
    figures = (
        "generate_sequences",
        "tool_calls",
        "compute_score",
        "num_turns",
        "prompt_length",
        "response_length",
        "total",
    )
    return {
        **{f"time/{name}": (run, positive(f"time/{name}")) for name in times},
        "publish/bytes": (run, positive("publish/bytes")),
        "publish/changed_share": (run, metric("publish/changed_share", lambda values: values and values[0] > 0.5)),
        "publish/paused_s": (run, within("publish/paused_s", 1e-4, 60)),
        "time/sleep_s": ("batch", positive("time/sleep_s")),
        "time/wait_s": (run, within("time/wait_s", 0, 300)),
        "time/save_s": ("mix", metric("time/save_s", lambda values: max(values) > 0)),
        "time/engine_idle_s": (run, metric("time/engine_idle_s", lambda values: len(values) == 2 and min(values) >= 0)),
        "throughput/tokens_per_s": (run, positive_once("throughput/tokens_per_s")),
        "throughput/cached_share": ("judged", within("throughput/cached_share", 0, 1)),
        "generation/aborted": ("deadline", metric("generation/aborted", lambda values: max(values) > 0)),
        "generation/constrained_share": ("no-parsers", metric("generation/constrained_share", lambda values: 0 < max(values) < 1)),
        "agent_loop/episodes": (loops, metric("agent_loop/episodes", lambda values: sum(values) >= 24)),
        **{f"agent_loop/{name}/mean": (loops, _ordered(f"agent_loop/{name}")) for name in figures},
        "agent_loop/num_preempted/mean": ("small-cache", metric("agent_loop/num_preempted/mean", lambda values: max(values) > 0)),
        "agent_loop/slowest/total": (loops, _equals("agent_loop/slowest/total", "agent_loop/total/max")),
        "engine/up": (run, always("engine/up", 1)),
        "engine/e0/running": ("auto-large", metric("engine/e0/running", lambda values: 0 < max(values) <= 32)),
        "engine/e0/waiting": ("auto-small", metric("engine/e0/waiting", lambda values: min(values) >= 0)),
        "engine/e0/tokens_per_s": (run, positive_once("engine/e0/tokens_per_s")),
        "engine/e0/kv_share": ("auto-large", metric("engine/e0/kv_share", lambda values: 0 < max(values) < 1)),
        "engine/e0/cached_share": ("auto-large", metric("engine/e0/cached_share", lambda values: 0 < max(values) < 1)),
        "engine/e0/version": (run, metric("engine/e0/version", lambda values: values == [1, 2, 3])),
        "engine/e0/restarts": ("deaths", metric("engine/e0/restarts", lambda values: max(values) == 1)),
        "engine/e0/preemptions": ("small-cache", metric("engine/e0/preemptions", lambda values: max(values) > 0)),
        "engine/e0/moved_in": (run, always("engine/e0/moved_in", 0)),
        "pool/slots": ("program", always("pool/slots", 3)),
        "pool/started": (run, metric("pool/started", lambda values: values == sorted(values) and values[0] >= 8)),
        "pool/running": ("program", metric("pool/running", lambda values: 0 < max(values) <= 3)),
        "pool/agents_waiting": ("silent", metric("pool/agents_waiting", lambda values: max(values) > 0)),
        "pool/scored": (run, metric("pool/scored", lambda values: values == sorted(values) and values[0] >= 8)),
        "pool/failed": ("crashes", metric("pool/failed", lambda values: max(values) >= 2)),
        "pool/closed": (run, always("pool/closed", 0)),
        "pool/admissible_groups": (run, metric("pool/admissible_groups", lambda values: min(values) >= 0)),
        "ledger/scored": (run, metric("ledger/scored", lambda values: values == sorted(values) and values[0] >= 8)),
        "ledger/open": (run, _sum_is_scored),
        "ledger/ready": (run, metric("ledger/ready", lambda values: min(values) >= 0)),
        "ledger/leased": (run, metric("ledger/leased", lambda values: min(values) >= 0)),
        "ledger/trained": (run, metric("ledger/trained", lambda values: values == [8, 16, 24])),
        "ledger/evicted": ("dapo", metric("ledger/evicted", lambda values: max(values) > 0)),
        "ledger/dead": ("given-up", metric("ledger/dead", lambda values: max(values) > 0)),
        "ledger/validation": ("mix", metric("ledger/validation", lambda values: max(values) >= 9)),
        "ledger/difference": (run, always("ledger/difference", 0)),
    }  # fmt: skip


def _pairs(ended: Ended, one: str, other: str) -> list[tuple[float, float]]:
    return [(line[one], line[other]) for line in ended.lines if one in line and other in line]


def _compare(one: str, other: str, holds: Any, word: str) -> Effect:
    def effect(ended: Ended) -> str:
        pairs = _pairs(ended, one, other)
        return expect(
            pairs and all(holds(a, b) for a, b in pairs), f"{one} {word} {other} in {len(pairs)} lines: {pairs[:3]}"
        )

    return effect


def _equals(one: str, other: str) -> Effect:
    return all_of(positive_once(one), _compare(one, other, lambda a, b: abs(a - b) < 1e-5, "is"))


def positive_once(name: str) -> Effect:
    """Above zero at least once."""
    return metric(name, lambda values: max(values) > 0)


def _more_than(one: str, other: str) -> Effect:
    return _compare(one, other, lambda a, b: a > b > 0, "is more than")


def _no_less(one: str, other: str) -> Effect:
    return all_of(_compare(one, other, lambda a, b: a >= b, "is at least"), positive_once(one))


def _less(one: str, other: str) -> Effect:
    return _compare(one, other, lambda a, b: a < b, "is less than")


def _ordered(name: str) -> Effect:
    """min <= mean <= max, and something at all."""

    def effect(ended: Ended) -> str:
        lines = [
            tuple(line[f"{name}/{kind}"] for kind in ("min", "mean", "max"))
            for line in ended.lines
            if f"{name}/mean" in line
        ]
        fine = lines and all(low <= mean <= high for low, mean, high in lines) and any(high > 0 for *_, high in lines)
        return expect(fine, f"{name} (min, mean, max): {lines[:2]}")

    return effect


def _std(ended: Ended) -> str:
    pairs = _pairs(ended, "reward/std", "reward/mean")  # scores are 0 and 1
    fine = pairs and all(abs(std - math.sqrt(mean * (1 - mean))) < 1e-5 for std, mean in pairs)
    return expect(fine and any(std > 0 for std, _ in pairs), f"reward/std {[round(std, 3) for std, _ in pairs]}")


def _equal_groups(ended: Ended) -> str:
    query = f"SELECT min(score) = max(score) {OF_STEP} GROUP BY group_id"
    wanted = [sum(found := ended.sql(query.format(step=step))) / len(found) for step in (1, 2, 3)]
    return expect(ended.metric("batch/equal_groups") == wanted, f"batch/equal_groups {wanted}, as in the ledger")


def _sum_is_scored(ended: Ended) -> str:
    parts = ("open", "ready", "leased", "trained", "evicted", "dead", "validation")
    sums = [
        (sum(line[f"ledger/{part}"] for part in parts), line["ledger/scored"])
        for line in ended.lines
        if "ledger/open" in line
    ]
    return expect(sums and all(a == b for a, b in sums), f"the parts add up to ledger/scored: {sums}")
