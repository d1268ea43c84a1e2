"""Rules of configs/recipes.py and configs/rules.py: a recipe sets what its paper sets, a user wins, and a value without
effect is refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.keys import all_keys
from configs.load import FOLDER, ConfigError, load_config
from configs.recipes import RECIPES, SYSTEM_KEYS
from configs.rules import RULES
from configs.schema import LearnerConfig


def _leaves(values: dict[str, Any], prefix: str = "learner.") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_sets_what_it_says_and_shows_it(name: str) -> None:
    config = load_config(overrides=[f"learner.recipe={name}"])
    shown = _leaves(config.learner.model_dump())
    for key, value in _leaves(RECIPES[name]).items():
        assert shown[key] == value, key
    assert shown["learner.recipe"] == name and config.learner.loss_agg is not None
    assert config.learner.lr == 3e-4, "the rate is the demo's"


@pytest.mark.seconds
@pytest.mark.parametrize("name", RECIPES)
def test_a_run_is_resumed_from_the_configuration_that_it_wrote(name: str, tmp_path: Path) -> None:
    config = load_config(overrides=[f"learner.recipe={name}", "learner.advantage=grpo", "learner.critic=none"])
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config.model_dump()))
    assert load_config(path) == config


def test_the_schema_offers_every_recipe_and_a_recipe_names_keys() -> None:
    for name, values in RECIPES.items():
        LearnerConfig(recipe=name)
        assert set(_leaves(values)) <= set(all_keys())
        assert not set(values) & SYSTEM_KEYS
    assert set(LearnerConfig.model_fields) >= SYSTEM_KEYS
    kind = all_keys()["learner.recipe"].kind.replace(" or null", "").replace(" or ", ", ")
    assert set(kind.split(", ")) == set(RECIPES)


def test_a_key_beside_a_recipe_wins_wherever_it_is_set(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("learner: {recipe: dapo, clip: {high: 0.3}, kl: {coef: 0.01}}\n")
    mine = load_config(path).learner
    assert (mine.clip.low, mine.clip.high, mine.kl.coef, mine.loss_agg) == (0.2, 0.3, 0.01, "token-mean")
    line = load_config(path, ["learner.loss_agg=token-sum", "learner.kl.coef=0"]).learner
    assert (line.clip.high, line.loss_agg, line.kl.coef) == (0.3, "token-sum", 0.0)


def test_a_recipe_takes_the_place_of_the_algorithm_below_it(tmp_path: Path) -> None:
    base = load_config(FOLDER / "ppo_critic.yaml").learner
    over = load_config(FOLDER / "ppo_critic.yaml", ["learner.recipe=gspo"]).learner
    assert (base.critic, base.kl.coef, base.critic_lr) == ("separate", 0.001, 1e-3)
    assert (over.advantage, over.critic, over.kl.coef, over.loss) == ("grpo", "none", 0.0, "gspo")
    assert over.lr == base.lr and over.critic_lr == 5e-4
    (tmp_path / "base.yaml").write_text("learner: {recipe: grpo, lr: 0.1, kl: {coef: 0.5}}\n")
    (tmp_path / "top.yaml").write_text("extends: base.yaml\nlearner: {recipe: rloo}\n")
    top = load_config(tmp_path / "top.yaml").learner
    assert (top.advantage, top.kl.coef, top.lr) == ("rloo", 0.03, 0.1)
    kept = load_config(FOLDER / "ppo_critic.yaml", ["learner.recipe="]).learner
    assert kept == base


def test_a_loss_of_ones_own_leaves_the_recipes_clip_behind() -> None:
    learner = LearnerConfig(recipe="gspo", loss="ppo")
    assert (learner.clip.low, learner.loss_agg, learner.advantage) == (None, None, "grpo")


def test_a_wrong_recipe_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"learner\.recipe must be .*, got 'dr_grop'; did you mean dr_grpo\?"):
        load_config(overrides=["learner.recipe=dr_grop"])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["advantage=grpo", "critic=none", "lam=0.9"], "learner.lam has an effect with learner.advantage=gae only"),
        (["critic_lr=0.1"], "learner.critic_lr has an effect with learner.critic=separate only"),
        (["advantage=grpo", "critic=separate"], "learner.critic has an effect with learner.advantage=gae only"),
        (["advantage=rloo", "min_deviation=0"], "learner.min_deviation has an effect with"),
        (["loss_norm=100"], "learner.loss_norm has an effect with learner.loss_agg=seq-mean-token-sum-norm only"),
        (["loss=gpg", "clip.low=0.1"], "learner.clip.low has an effect with learner.loss=ppo or gspo"),
        (["loss=gspo", "clip.ratio_max=9"], "learner.clip.ratio_max has an effect with learner.loss=ppo or dppo_tv"),
        (["sapo.tau_pos=2"], "learner.sapo.tau_pos has an effect with learner.loss=sapo only"),
        (["loss=kl_cov", "cov.high=2"], "learner.cov.high has an effect with learner.loss=clip_cov only"),
        (["correction_bounds.low=0.1"], "learner.correction_bounds.low has an effect with learner.correction=icepop"),
        (["correction=none", "correction_bounds.high=3"], "learner.correction_bounds.high has an effect with"),
        (["rejection.high=2"], "learner.rejection.high has an effect with learner.rejection.kind=geo_mean or"),
        (
            ["kl.kind=k1"],
            "learner.kl.kind has an effect with a learner.kl.coef only, got learner.kl.kind=k1 with learner",
        ),
        (["kl.in_reward=true"], "got learner.kl.in_reward=true with learner.kl.coef=0; leave learner.kl.in_reward out"),
        (["kl.coef=0.1", "kl.horizon=9"], "learner.kl.horizon has an effect with a learner.kl.target only"),
        (["adaptive_entropy.step=0.1"], "learner.adaptive_entropy.step has an effect with a learner.adaptive_entropy."),
        (["lora.alpha=3"], "learner.lora.alpha has an effect with a learner.lora.rank only"),
    ],
)
def test_a_value_without_effect_is_refused_in_one_line(given: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config(overrides=[f"learner.{each}" for each in given])
    line = str(refusal.value)
    assert words in line and "; leave learner." in line and "\n" not in line


def test_only_what_a_user_set_is_refused() -> None:
    """Neither defaults, which a file may repeat, nor what a recipe sets for a key that is then overridden."""
    LearnerConfig(advantage="grpo", critic="none", lam=0.95, kl={"horizon": 500.0})
    LearnerConfig(recipe="ppo", advantage="grpo", critic="none")
    LearnerConfig(recipe="rloo", kl={"coef": 0.0})
    with pytest.raises(ValueError, match=r"learner\.lam has an effect"):
        LearnerConfig(recipe="grpo", lam=0.9)


def test_rules_name_keys_that_exist_and_remedies_that_load() -> None:
    for rule in RULES:
        assert {f"learner.{key}" for key in rule.keys} <= set(all_keys())
        remedy = rule.values[0] if rule.values else rule.example
        beside = {"aggregation": "loss_agg"}.get(rule.beside, rule.beside)
        coef = ["learner.kl.coef=0.1"] if beside == "kl.target" else []
        load_config(overrides=[*coef, f"learner.{beside}={remedy}"])
