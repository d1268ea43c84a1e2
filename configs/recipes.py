"""Named algorithms: what each paper sets of the learner, as keys of the learner's section.

`configs.schema` fills what a configuration leaves out with its `learner.recipe`; `configs.load` lets a recipe take the place of the
algorithm that a base file describes. Invariant: a recipe names only keys of the learner, by values that `LearnerConfig` takes
(`tests/configs/test_recipes.py` loads each). They stand in `algorithms/recipes.toml`. Systems
settings (rates, ranks, budgets) are no recipe's business.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

Values = dict[str, Any]

RECIPES: dict[str, Values] = tomllib.loads(
    (Path(__file__).parent / "algorithms" / "recipes.toml").read_text(encoding="utf-8")
)
"""Recipe -> what it sets in the learner's section."""
SYSTEM_KEYS = frozenset(
    {
        "stage",
        "ranks",
        "lora",
        "gradient_checkpointing",
        "lr",
        "lr_warmup_steps",
        "grad_clip",
        "token_budget",
        "prefix_tree",
        "check_logprobs",
        "max_mean_logprob_diff",
        "keep_on",
        "offload",
    }
)
"""Keys of the learner that say how a step is computed, not which: no recipe sets them, and a later recipe leaves them."""

LOSS_AGGREGATIONS = {
    "gspo": "seq-mean-token-mean",
    "gmpo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
}
"""Loss -> the aggregation that its paper defines it with."""
ADVANTAGE_AGGREGATIONS = {"dr_grpo": "seq-mean-token-sum-norm"}
"""Advantage -> the same, where the loss has none of its own."""
DEFAULT_AGGREGATION = "token-mean"
"""DAPO's (arXiv:2503.14476, section 3.3): in the mean of rows' means, a long answer's tokens count less the longer it is."""


def own_aggregation(*, advantage: str, loss: str) -> str:
    """The aggregation of the paper that the loss is from, or else the advantage; `DEFAULT_AGGREGATION` for the others."""
    return LOSS_AGGREGATIONS.get(loss) or ADVANTAGE_AGGREGATIONS.get(advantage, DEFAULT_AGGREGATION)


def filled(given: Values, *, recipe: Values) -> Values:
    """What was given, and of the recipe what was not. A loss of one's own leaves the recipe's clip and aggregation behind."""
    values = dict(recipe)
    if given.get("loss", values["loss"]) != values["loss"]:
        values = {key: value for key, value in values.items() if key not in ("clip", "loss_agg", "sapo", "cov")}
    for key, value in given.items():
        old = values.get(key)
        values[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return values
