"""Which keys of the learner can have no effect beside the others: a value that a user set there is a mistake, and refused.

`configs.schema` asks when a learner's section is complete. Invariant: only what was set counts; a default, or what the recipe
says, is nobody's mistake.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """`keys` have an effect only where the key `beside` has one of `values` (empty: any but none, 0 and false)."""

    keys: tuple[str, ...]
    beside: str
    values: tuple[str, ...] = ()
    example: str = ""
    """A value of `beside` that gives them an effect, where `values` does not say."""


WHITENED = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo")
CLIPPED = ("ppo", "gspo", "cispo", "gmpo", "clip_cov", "dppo_tv", "dppo_kl")
RULES = (
    Needs(keys=("lam", "value_clip", "calibrate_values"), beside="advantage", values=("gae",)),
    Needs(keys=("critic_lr",), beside="critic", values=("separate",)),
    Needs(keys=("min_deviation",), beside="advantage", values=WHITENED),
    Needs(keys=("loss_norm",), beside="aggregation", values=("seq-mean-token-sum-norm",)),
    Needs(keys=("clip.low", "clip.high"), beside="loss", values=CLIPPED),
    Needs(keys=("clip.ratio_max",), beside="loss", values=("ppo", "dppo_tv", "dppo_kl")),
    Needs(keys=("sapo.tau_pos", "sapo.tau_neg"), beside="loss", values=("sapo",)),
    Needs(keys=("cov.share",), beside="loss", values=("clip_cov", "kl_cov")),
    Needs(keys=("cov.low", "cov.high"), beside="loss", values=("clip_cov",)),
    Needs(keys=("cov.kl_coef",), beside="loss", values=("kl_cov",)),
    Needs(keys=("correction_bounds.low",), beside="correction", values=("icepop", "mis", "seq_mis")),
    Needs(keys=("correction_bounds.high",), beside="correction", values=("tis", "seq_tis", "icepop", "mis", "seq_mis")),
    Needs(keys=("rejection.low",), beside="rejection.kind", values=("geo_mean",)),
    Needs(keys=("rejection.high",), beside="rejection.kind", values=("geo_mean", "k3_mean", "stale_negatives")),
    Needs(keys=("kl.target", "kl.kind", "kl.in_reward"), beside="kl.coef", example="0.001"),
    Needs(keys=("kl.horizon",), beside="kl.target", example="0.05"),
    Needs(keys=("adaptive_entropy.step", "adaptive_entropy.most"), beside="adaptive_entropy.target", example="0.2"),
    Needs(keys=("lora.alpha", "lora.per_role"), beside="lora.rank", example="32"),
    Needs(keys=("teacher.coef",), beside="teacher.path", example="models/teacher"),
)
KEYS = {"aggregation": "loss_agg"}
"""What a rule looks at -> the key that sets it."""


def refuse_unused(learner: BaseModel, *, recipe: dict[str, Any]) -> None:
    """Raises ValueError for the first value that was set and can have no effect."""
    rules: tuple[Needs, ...] = RULES
    if getattr(learner, "critic", None) == "separate":
        rules = (Needs(keys=("critic",), beside="advantage", values=("gae",)), *RULES)
    for rule in rules:
        there = _value(learner, rule.beside)
        if there in rule.values if rule.values else there:
            continue
        for key in rule.keys:
            if _is_set(learner, key, recipe=recipe):
                raise ValueError(_refusal(rule, key=key, value=_value(learner, key), there=there))


def _refusal(rule: Needs, *, key: str, value: object, there: object) -> str:
    beside = f"learner.{KEYS.get(rule.beside, rule.beside)}"
    rules = f"{beside}={' or '.join(rule.values)}" if rule.values else f"a {beside}"
    remedy = rule.values[0] if rule.values else rule.example
    return (
        f"learner.{key} has an effect with {rules} only, got learner.{key}={_text(value)} with {beside}={_text(there)}; leave "
        f"learner.{key} out, or set {beside}={remedy}"
    )


def _text(value: object) -> str:
    """A value as YAML writes it."""
    words = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return words[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _value(learner: BaseModel, key: str) -> Any:
    found: Any = learner
    for part in key.split("."):
        found = getattr(found, part)
    return found


def _is_set(learner: BaseModel, key: str, *, recipe: dict[str, Any]) -> bool:
    """Whether a user set it: to something else than its default and the recipe's value."""
    *sections, leaf = key.split(".")
    model: BaseModel = learner
    for section in sections:
        if section not in model.model_fields_set:
            return False
        model, recipe = getattr(model, section), recipe.get(section, {})
    value, default = getattr(model, leaf), type(model).model_fields[leaf].get_default(call_default_factory=True)
    return leaf in model.model_fields_set and value not in (default, recipe.get(leaf, default))
