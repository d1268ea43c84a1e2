"""How far a recorded log-probability may be from the learner's: what rounding explains, by number format.

`learner.reporting.run_metrics` warns of more in the course of a run, `understudy why` afterwards. The figures are those of
docs/numerics.md.
"""

from __future__ import annotations

from pathlib import Path

from configs.model_folder import half_precision_kind
from configs.schema import Config

MOST_DRIFT = {"float32": 1e-4, "bfloat16": 2e-2}
"""Difference of a log-probability, in nats, by model.dtype; the largest one in float32, the mean one in bfloat16."""
DRIFT_MEASURES = {"float32": "policy/max_logprob_diff", "bfloat16": "policy/mean_logprob_diff"}
MOST_MEAN = {"float32": 1e-3, "bfloat16": 0.15}
"""Mean difference of log-probabilities above which a run ends, unless `learner.max_mean_logprob_diff` says another. What vLLM and
the learner compute alike differs by 1.5e-4 at most in float32 and 0.07 in bfloat16, seen on 60 families of small random models, of
which mixtures of experts differ most; where vLLM keeps a weight in bfloat16 by 0.001 (Apertus), else by 0.01 and more."""
OTHER_CLASS_FROM = 3e-4
"""The same of float32 in the first probe, above which vLLM's other class is tried: twice what is seen where it is not better."""
MOST_MEAN_OF_A_GPU = 1e-2
"""The same of float32 there."""
FLOAT32_HEAD = """--hf-overrides '{"head_dtype": "float32"}' (vLLM) or --enable-fp32-lm-head (SGLang)"""
"""The options for logits in float32, which a run's own engines have."""
OTHER_CLASS_ARGUMENT = {"model_impl": "transformers"}
OTHER_CLASS = "rollout.engine_args={model_impl: transformers}"
"""vLLM's second class of a model, for those whose own computes something else. Seen with Cohere 2: 0.01 on average, and 2e-7 so."""
OF_A_GPU = "on a GPU up to 0.01 is vLLM's attention, which multiplies float32 as TF32 there"
"""Seen on an H200, where vLLM takes its Triton kernel for float32."""


def drift_sentence(difference: float, *, dtype: str) -> str:
    """What is the matter, with the figure."""
    most = f"where {dtype} explains {MOST_DRIFT[dtype]:g}"
    return f"engine and learner disagree: a log-probability differs by {difference:.2g}, {most}"


def drift_remedy(config: Config) -> str:
    """What brings the two together."""
    dtype = config.model.dtype
    arguments = "take extra arguments out of rollout.engine_args (quantization, other kernels)"
    elsewhere = config.rollout.engine.startswith("http")
    if dtype == "bfloat16" and elsewhere:
        return f"start the server with {FLOAT32_HEAD}, or model.dtype=float32 on both sides, or {arguments}"
    if config.rollout.engine == "vllm" and "model_impl" not in config.rollout.engine_args:
        arguments = f"{arguments}, or set {OTHER_CLASS}, where vLLM's own class of the model computes something else"
    if dtype == "bfloat16":
        other = "" if half_precision_kind(Path(config.model.path)) else "model.dtype=float32, or "
        return f"{other}{arguments}"
    if elsewhere:
        return f"check that the server at rollout.engine has this run's weights and number format, or {arguments}"
    return f"{arguments}; {OF_A_GPU}" if config.rollout.engine == "vllm" else arguments
