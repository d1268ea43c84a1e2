"""Rows of `learner.*`: the run's weights follow from its ledger and the value, and not from a neighbour of the value."""

from __future__ import annotations

from typing import Any

from configs.schema import LearnerConfig
from tests.matrix.effects import absent, all_of, always, changes_no_weight, expect, metric, moves, prints, trains, warms
from tests.matrix.inventory import NULL, SET, annotations, values_of
from tests.matrix.records import Effect, Ended, NoEffect, Row
from tests.matrix.scenarios.learner_runs import PACKED, RECIPE, learner_name, packed, recipes, setting

EXPERTS = "tests/learner/experts/test_expert_training.py"
TOOLS = "tests/project/test_run_loops.py::test_a_tool_agent_trains_from_the_shipped_problems_on_the_real_engine"
TOLD = "test_a_step_uses_the_recorded_experts_and_says_how_many_the_learner_would_have_chosen"
REPLAYED = (
    "tests/project/test_run_folders.py::test_a_mixture_of_experts_is_trained_with_the_experts_that_its_engine_used"
)


def rows() -> list[Row]:
    """One for each key and value."""
    return [*_packed_rows(), *_recipe_rows(), *_switches(), *_numbers(), *_of_losses()]


def _packed_rows() -> list[Row]:
    """Each value in the first run that has it, beside another value."""
    found = []
    for key in PACKED:
        values = values_of(annotations()[key])
        for number, value in enumerate(values):
            run = next(one.name for one in packed() if one.values.get(key) == value)
            found.append(Row(key, value, run, trains(key, setting(_neighbour(key, values, number)))))
    return found


def _neighbour(key: str, values: list[Any], number: int) -> Any:
    """The next value, of null the last one; of advantages one that asks for nothing in the batch."""
    if key == PACKED[0]:
        return "rloo" if values[number] == "grpo" else "grpo"
    if values[number] == NULL:
        return values[-1]
    return values[(number + 1) % len(values)]


def _recipe_rows() -> list[Row]:
    rows = [Row(RECIPE, name, f"recipe-{name}", _follows_the_recipe) for name in recipes()]
    return [*rows, Row(RECIPE, NULL, learner_name("grpo"), _has_no_recipe)] if rows else []


def _follows_the_recipe(ended: Ended) -> str:
    """The run has every key as the recipe says, and other weights than with the keys' defaults."""
    from tests.matrix.replay import largest_difference, replay

    plain, own = (flat(LearnerConfig(**said).model_dump()) for said in ({}, {"recipe": ended.config[RECIPE]}))
    told = {f"learner.{key}": value for key, value in own.items() if value != plain[key]}
    wrong = {key: ended.config[key] for key, value in told.items() if ended.config[key] != value}
    expect(told and not wrong, f"not as the recipe says: {wrong}")
    defaults = {key: plain[key.removeprefix("learner.")] for key in told}
    other = largest_difference(replay(ended, defaults).weights, replay(ended).weights)
    seen = f"{len(told)} keys as the recipe says; without them the weights differ by {other:.1e}; {_is_its_own_replay(ended)}"
    return expect(other > 1e-6, seen)


def _has_no_recipe(ended: Ended) -> str:
    words = f"recipe {ended.config[RECIPE]}, advantage {ended.config['learner.advantage']}"
    return expect(ended.config[RECIPE] is None, words)


def flat(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Keys with dots -> values."""
    found: dict[str, Any] = {}
    for name, value in section.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def _switches() -> list[Row]:
    layers = "learner.gradient_checkpointing"
    gae, separate, plain, lora = learner_name("gae"), "rounds", learner_name("grpo"), learner_name("dr_grpo")
    steered, opo, again = learner_name("reinforce_plus_plus"), learner_name("opo"), learner_name("rloo")
    apart = learner_name("remax")
    return [
        Row("learner.critic", "shared", gae, all_of(_has("critic/value_mean"), _value_head)),
        Row("learner.critic", "separate", separate, trains("learner.critic", "shared")),
        Row("learner.critic", "none", plain, absent("critic/value_mean")),
        Row(layers, False, plain, _passes(layers, True, more=True)),
        Row(layers, True, again, _passes(layers, False, more=False)),
        Row(
            "learner.prefix_tree",
            True,
            "rounds",
            all_of(_shares(True), changes_no_weight("learner.prefix_tree", False)),
        ),
        Row(
            "learner.prefix_tree", False, apart, all_of(_shares(False), changes_no_weight("learner.prefix_tree", True))
        ),
        Row("learner.clip.low", "null", lora, trains("learner.clip.low", 0.01)),
        Row("learner.clip.low", "set", gae, trains("learner.clip.low", None)),
        Row("learner.clip.high", "null", lora, trains("learner.clip.high", 0.01)),
        Row("learner.clip.high", "set", gae, trains("learner.clip.high", None)),
        Row("learner.kl.target", "null", gae, always("policy/kl_coef", 0.05)),
        Row("learner.kl.target", "set", steered, all_of(trains("learner.kl.target", None), _steered)),
        Row("learner.kl.in_reward", False, gae, trains("learner.kl.in_reward", True)),
        Row("learner.kl.in_reward", True, steered, trains("learner.kl.in_reward", False)),
        Row("learner.check_logprobs", False, opo, absent("policy/max_logprob_diff")),
        Row("learner.check_logprobs", "number", plain, _exact),
        Row(
            "learner.check_logprobs",
            "number",
            steered,
            metric("policy/checked_share", lambda shares: 0.0 < min(shares) < 1.0),
        ),
        Row(
            "learner.max_mean_logprob_diff",
            SET,
            "drifts",
            metric("policy/mean_logprob_diff", lambda each: max(each) > 1e-3),
        ),
        Row("learner.max_mean_logprob_diff", NULL, "disagrees", prints("float32: at most 3e-05")),
        Row("learner.router_replay", True, REPLAYED),
        Row("learner.router_replay", False, f"{EXPERTS}::{TOLD}"),
        Row("learner.keep_on", "device", plain, changes_no_weight("learner.keep_on", "host")),
        Row("learner.keep_on", "host", steered, changes_no_weight("learner.keep_on", "device")),
        Row("learner.offload", False, plain, changes_no_weight("learner.offload", True)),
        Row("learner.offload", True, steered, changes_no_weight("learner.offload", False)),
    ]


def _of_losses() -> list[Row]:
    """Keys that belong to some estimators, losses and corrections."""
    gae, plain, steered = learner_name("gae"), learner_name("grpo"), learner_name("reinforce_plus_plus")
    clip_cov, kl_cov, tv = learner_name("reinforce_plus_plus_baseline"), learner_name("opo"), learner_name("gpg")
    geo, open_geo = learner_name("gdpo"), "hints"
    k3, stale = learner_name("grpo_passk"), learner_name("otb")
    icepop, mis, kind = learner_name("rloo"), learner_name("remax"), "learner.rejection.kind"
    return [
        Row("learner.calibrate_values", True, gae, trains("learner.calibrate_values", False)),
        Row("learner.calibrate_values", False, "rounds", trains("learner.calibrate_values", True)),
        Row("learner.mask_truncated", True, "truncated", trains("learner.mask_truncated", False)),
        Row("learner.mask_truncated", False, plain, trains("learner.mask_truncated", True)),
        Row("learner.clip.ratio_max", "null", geo, trains("learner.clip.ratio_max", 1.01)),
        Row("learner.clip.ratio_max", "set", tv, trains("learner.clip.ratio_max", None)),
        Row("learner.correction_bounds.low", "null", icepop, trains("learner.correction_bounds.low", 0.99)),
        Row("learner.correction_bounds.low", "set", mis, trains("learner.correction_bounds.low", None)),
        Row("learner.correction_bounds.high", "null", icepop, trains("learner.correction_bounds.high", 1.01)),
        Row("learner.correction_bounds.high", "set", mis, trains("learner.correction_bounds.high", None)),
        Row(kind, "none", plain, trains(kind, "geo_mean")),
        Row(kind, "geo_mean", geo, trains(kind, "none")),
        Row(kind, "k3_mean", k3, trains(kind, "none")),
        Row(kind, "stale_negatives", stale, trains(kind, "none")),
        Row("learner.rejection.low", "null", open_geo, trains("learner.rejection.low", 1e-6)),
        Row("learner.rejection.low", "set", geo, trains("learner.rejection.low", 1e-6)),
        Row("learner.rejection.high", "null", k3, trains("learner.rejection.high", 1e6)),
        Row("learner.rejection.high", "set", geo, trains("learner.rejection.high", 1e6)),
        Row("learner.adaptive_entropy.target", "null", plain, trains("learner.adaptive_entropy.target", 0.1)),
        Row("learner.adaptive_entropy.target", "set", tv, trains("learner.adaptive_entropy.target", None)),
        Row("learner.adaptive_entropy.step", "", tv, trains("learner.adaptive_entropy.step", 0.005)),
        Row("learner.adaptive_entropy.most", "", tv, trains("learner.adaptive_entropy.most", 1.0)),
        Row("learner.value_clip", "", gae, _other_values("learner.value_clip", 1e-4)),
        Row("learner.min_deviation", "", gae, trains("learner.min_deviation", 5.0)),
        Row("learner.loss_norm", "", steered, trains("learner.loss_norm", 4)),
        Row("learner.sapo.tau_pos", "", steered, trains("learner.sapo.tau_pos", 4.0)),
        Row("learner.sapo.tau_neg", "", steered, trains("learner.sapo.tau_neg", 4.0)),
        Row("learner.cov.share", "", clip_cov, trains("learner.cov.share", 0.02)),
        Row("learner.cov.low", "", clip_cov, trains("learner.cov.low", 1.0)),
        Row("learner.cov.high", "", clip_cov, trains("learner.cov.high", 0.05)),
        Row("learner.cov.kl_coef", "", kl_cov, trains("learner.cov.kl_coef", 0.0)),
    ]


def _numbers() -> list[Row]:
    gae, plain, lora = learner_name("gae"), learner_name("grpo"), learner_name("dr_grpo")
    again, two = learner_name("rloo"), learner_name("otb")
    return [
        Row("learner.ranks", "", two, all_of(_is_its_own_replay, _shards(2))),
        Row("learner.lora.rank", "", lora, all_of(trains("learner.lora.rank", 0), _adapter(4))),
        Row("learner.lora.alpha", "", lora, trains("learner.lora.alpha", 4.0)),
        Row("learner.lr", "", plain, trains("learner.lr", 1e-3)),
        Row("learner.critic_lr", "", "rounds", _other_values("learner.critic_lr", 1e-4)),
        Row("learner.lr_warmup_steps", "", plain, all_of(warms, trains("learner.lr_warmup_steps", 0))),
        Row("learner.grad_clip", "", again, trains("learner.grad_clip", 1.0)),
        Row("learner.minibatches", "", plain, all_of(always("learner/updates", 6), trains("learner.minibatches", 1))),
        Row("learner.epochs", "", plain, trains("learner.epochs", 1)),
        Row(
            "learner.threads",
            "null",
            "tests/learner/training/test_trainer.py::test_a_rank_computes_with_as_many_threads_as_it_is_told",
        ),
        Row(
            "learner.threads",
            "set",
            "tests/learner/training/test_trainer.py::test_a_rank_computes_with_as_many_threads_as_it_is_told",
        ),
        Row("learner.token_budget", "", again, _passes("learner.token_budget", 8192, more=False)),
        Row("learner.gamma", "", "rounds", trains("learner.gamma", 1.0)),
        Row("learner.lam", "", gae, trains("learner.lam", 1.0)),
        Row("learner.kl.coef", "", plain, trains("learner.kl.coef", 0.0)),
        Row("learner.teacher.path", "", learner_name("none"), trains("learner.teacher.coef", 1e-6)),
        Row("learner.teacher.coef", "", learner_name("none"), trains("learner.teacher.coef", 1.0)),
        Row("learner.hints.coef", "", "hints", trains("learner.hints.coef", 0.25)),
        Row("learner.hints.sources", "hint", "hints", trains("learner.hints.coef", 1e-6)),
        Row("learner.hints.sources", "said", "rounds", trains("learner.hints.sources", ["hint"])),
        Row("learner.hints.sources", "sibling", "recipe-sdpo", trains("learner.hints.sources", ["hint", "said"])),
        Row("learner.echo.tool", "", TOOLS),
        Row("learner.echo.user", "", "rounds", trains("learner.echo.user", 0.0)),
        Row("learner.kl.horizon", "", learner_name("reinforce_plus_plus"), trains("learner.kl.horizon", 10_000.0)),
        Row("learner.router_aux_coef", "", f"{EXPERTS}::test_the_routers_loss_counts_by_its_coefficient"),
        Row("learner.entropy_coef", "", plain, trains("learner.entropy_coef", 0.0)),
    ]


_exact = metric("policy/max_logprob_diff", lambda values: 0.0 < max(values) < 1e-4)
_steered = moves("policy/kl_coef")


def _other_values(key: str, neighbour: float) -> Effect:
    """The critic's values of the last step are others with the neighbour. The policy's weights need not be: with
    `learner.calibrate_values` the values are fitted to the returns before, which may leave nothing of them."""

    def effect(ended: Ended) -> str:
        from tests.matrix.replay import replay

        own, other = (replay(ended, changes).metrics[-1]["critic/value_mean"] for changes in ({}, {key: neighbour}))
        return expect(abs(own - other) > 1e-4, f"critic/value_mean {own:.5f}, with {neighbour} instead {other:.5f}")

    return effect


def _has(name: str) -> Effect:
    return metric(name, lambda values: any(values))


def _value_head(ended: Ended) -> str:
    path = ended.folder / "last" / "critic" / "value_head.safetensors"
    return expect(path.is_file(), f"{path.name} in the checkpoint: {path.is_file()}")


def _passes(key: str, neighbour: Any, *, more: bool) -> Effect:
    """Layers are computed more often with the neighbour (`more`), or less, and the weights stay the same."""

    def effect(ended: Ended) -> str:
        from tests.matrix.replay import replay

        own, other = replay(ended).passes, replay(ended, {key: neighbour}).passes
        seen = expect(other > own if more else other < own, f"{own} passes of a layer, {other} with {neighbour}")
        return f"{seen}; {changes_no_weight(key, neighbour)(ended)}"

    return effect


def _shares(is_on: bool) -> Effect:
    """The run computes what rows share once, or each row by itself, and its replay with the other value does the other."""

    def effect(ended: Ended) -> str:
        from tests.matrix.replay import replay

        name = "learner/raw_over_unique"
        other = [line[name] for line in replay(ended, {"learner.prefix_tree": not is_on}).metrics]
        tree, rows = (ended.metric(name), other) if is_on else (other, ended.metric(name))
        return expect(max(tree) > 1.1 and set(rows) == {1.0}, f"{name}: {tree} with the tree, {rows} without")

    return effect


def _is_its_own_replay(ended: Ended) -> str:
    from tests.matrix.replay import mean_difference, replay, trained_weights

    mean = mean_difference(replay(ended).weights, trained_weights(ended))
    return expect(mean < 1e-5, f"one rank gives the same weights up to {mean:.0e}")


def _shards(number: int) -> Effect:
    def effect(ended: Ended) -> str:
        newest = sorted((ended.folder / "checkpoints").glob("step-*"))[-1]
        found = sorted(path.name for path in (newest / "learner").glob("*.distcp"))
        ranks = {name.split("_")[2] for name in found}
        return expect(len(ranks) == number, f"files of {len(ranks)} ranks in the checkpoint")

    return effect


def _adapter(rank: int) -> Effect:
    def effect(ended: Ended) -> str:
        import json

        found = list((ended.folder / "last").rglob("adapter_config.json"))
        if not found:
            raise NoEffect("no adapter_config.json in the checkpoint")
        r = json.loads(found[0].read_text())["r"]
        return expect(r == rank, f"an adapter of rank {r} in the checkpoint")

    return effect
