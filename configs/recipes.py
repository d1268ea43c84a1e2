"""Named algorithms: what each paper sets of the learner, as keys of the learner's section.

`configs.schema` fills what a configuration leaves out with its `learner.recipe`; `configs.load` lets a recipe take the place of the
algorithm that a base file describes. Invariant: a recipe names only keys of the learner, by values that `LearnerConfig` takes
(`tests/configs/test_recipes.py` loads each). Systems settings (rates, ranks, budgets) are no recipe's business.
"""

from __future__ import annotations

from typing import Any

Values = dict[str, Any]

CLIP = {"low": 0.2, "high": 0.2}
RECIPES: dict[str, Values] = {
    # arXiv:1707.06347 with a critic of its own, and nothing that is ours: no calibration, no least deviation
    "ppo": {
        "advantage": "gae",
        "critic": "separate",
        "lam": 0.95,
        "calibrate_values": False,
        "min_deviation": 0.0,
        "loss": "ppo",
        "loss_agg": "token-mean",
        "clip": CLIP,
    },
    # arXiv:2402.03300, equation 3 and section 4.2: KL as a term of the loss, coefficient 0.04
    "grpo": {
        "advantage": "grpo",
        "critic": "none",
        "loss": "ppo",
        "loss_agg": "seq-mean-token-mean",
        "clip": CLIP,
        "kl": {"coef": 0.04, "kind": "k3"},
    },
    # arXiv:2503.14476, section 3; its two changes of the data are data.reward_manager=dapo
    "dapo": {
        "advantage": "grpo",
        "critic": "none",
        "loss": "ppo",
        "loss_agg": "token-mean",
        "clip": {"low": 0.2, "high": 0.28},
    },
    # arXiv:2503.20783, section 3.2
    "dr_grpo": {
        "advantage": "dr_grpo",
        "critic": "none",
        "loss": "ppo",
        "loss_agg": "seq-mean-token-sum-norm",
        "clip": CLIP,
    },
    # arXiv:2507.18071, section 5.1
    "gspo": {
        "advantage": "grpo",
        "critic": "none",
        "loss": "gspo",
        "loss_agg": "seq-mean-token-mean",
        "clip": {"low": 3e-4, "high": 4e-4},
    },
    # arXiv:2506.13585, section 3.1: no lower bound, no KL
    "cispo": {
        "advantage": "grpo",
        "critic": "none",
        "loss": "cispo",
        "loss_agg": "token-mean",
        "clip": {"low": 1.0, "high": 4.0},
    },
    # arXiv:2402.14740: REINFORCE on whole answers, KL in the reward
    "rloo": {
        "advantage": "rloo",
        "critic": "none",
        "loss": "gpg",
        "loss_agg": "seq-mean-token-sum",
        "kl": {"coef": 0.03, "kind": "k1", "in_reward": True},
    },
    # arXiv:2501.03262, equations 4 to 6
    "reinforce++": {
        "advantage": "reinforce_plus_plus",
        "critic": "none",
        "min_deviation": 0.0,
        "loss": "ppo",
        "loss_agg": "token-mean",
        "clip": CLIP,
        "kl": {"coef": 0.01, "kind": "k1", "in_reward": True},
    },
    # arXiv:2501.03262, section 3.2: KL by k2, as a term of the loss
    "reinforce++_baseline": {
        "advantage": "reinforce_plus_plus_baseline",
        "critic": "none",
        "min_deviation": 0.0,
        "loss": "ppo",
        "loss_agg": "token-mean",
        "clip": CLIP,
        "kl": {"coef": 0.01, "kind": "k2"},
    },
    # arXiv:2310.10505, algorithm 1: REINFORCE against the greedy answer
    "remax": {
        "advantage": "remax",
        "critic": "none",
        "loss": "gpg",
        "loss_agg": "seq-mean-token-sum",
        "kl": {"coef": 0.05, "kind": "k1", "in_reward": True},
    },
    # arXiv:2602.04879: the trust region is around the policy that sampled
    "dppo": {
        "advantage": "grpo",
        "critic": "none",
        "loss": "dppo_tv",
        "loss_agg": "token-mean",
        "clip": {"low": 0.15, "high": 0.15, "ratio_max": 20.0},
        "correction": "naive",
    },
    # arXiv:2507.20673
    "gmpo": {
        "advantage": "grpo",
        "critic": "none",
        "loss": "gmpo",
        "loss_agg": "seq-mean-token-mean",
        "clip": {"low": 0.4, "high": 0.4},
    },
    # arXiv:2511.20347
    "sapo": {
        "advantage": "grpo",
        "critic": "none",
        "loss": "sapo",
        "loss_agg": "seq-mean-token-mean",
        "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
    },
    # arXiv:2504.02546
    "gpg": {"advantage": "gpg", "critic": "none", "loss": "gpg", "loss_agg": "token-mean"},
    # arXiv:2505.23585: exactly on policy, so one update of a batch
    "opo": {
        "advantage": "opo",
        "critic": "none",
        "loss": "gpg",
        "loss_agg": "token-mean",
        "minibatches": 1,
        "epochs": 1,
    },
    # arXiv:2601.05242, in GRPO's loss
    "gdpo": {
        "advantage": "gdpo",
        "critic": "none",
        "min_deviation": 0.0,
        "loss": "ppo",
        "loss_agg": "seq-mean-token-mean",
        "clip": CLIP,
    },
    # arXiv:2505.22617
    "clip_cov": {
        "advantage": "grpo",
        "critic": "none",
        "loss": "clip_cov",
        "loss_agg": "token-mean",
        "clip": CLIP,
        "cov": {"share": 2e-4, "low": 1.0, "high": 5.0},
    },
    # arXiv:2505.22617
    "kl_cov": {
        "advantage": "grpo",
        "critic": "none",
        "loss": "kl_cov",
        "loss_agg": "token-mean",
        "cov": {"share": 2e-4, "kl_coef": 1.0},
    },
    # arXiv:2601.20802: no advantage; the policy that has read the feedback, or a better answer, teaches
    "sdpo": {
        "advantage": "none",
        "critic": "none",
        "loss": "gpg",
        "loss_agg": "token-mean",
        "hints": {"coef": 1.0, "sources": ["hint", "said", "sibling"]},
    },
    # arXiv:2601.19897: the same from a demonstration that the task brings
    "sdft": {
        "advantage": "none",
        "critic": "none",
        "loss": "gpg",
        "loss_agg": "token-mean",
        "hints": {"coef": 1.0, "sources": ["hint"]},
    },
}
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
