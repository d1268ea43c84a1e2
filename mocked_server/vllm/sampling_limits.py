"""Checks what a model call asks of sampling: counts and sizes that any agent may ask for, and whether the tokens are still the
policy's own choice.

Called by the engine client (`mocked_server.vllm.serving`) with vLLM's `SamplingParams` before a request is queued. Pure
functions that read attributes; vLLM's own rules (ranges, vocabulary) are checked after these. Invariant: what passes
costs the engine and the event loop a bounded time, for any values.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sized
from typing import Any

from buffers.errors import RequestRefused

MAX_CHOICES = 128
"""Answers of one request, over all its prompts: OpenAI's limit of `n`."""
MAX_STOPS = 64
MAX_STOP_CHARS = 4096
"""Characters of all stop strings of a request together; of its bad words as well."""
MAX_BAD_WORDS = 256
MAX_TOKEN_IDS = 1024
"""Entries of `stop_token_ids`, `allowed_token_ids`, `logit_bias`."""
MAX_CONSTRAINT_CHARS = 65_536
"""Characters of a schema, grammar, regular expression or list of choices, as JSON: it is compiled for each request."""
MAX_OPTIONS = 512
"""Entries of `structured_outputs.choice`."""
MAX_TEMPLATE_CHARS = 2 * 1024 * 1024
"""Characters of everything that a chat template is given besides the messages (tools, above all), as JSON."""
CONSTRAINTS = ("json", "regex", "choice", "grammar", "structural_tag")


def check_sampling(params: Any) -> None:
    """Raises RequestRefused for the first field with too much in it. `params`: vLLM's SamplingParams."""
    _at_most(params.n, MAX_CHOICES, field="n", what="answers")
    _at_most(_size(params.stop), MAX_STOPS, field="stop", what="strings")
    _at_most(_chars(params.stop), MAX_STOP_CHARS, field="stop", what="characters in all")
    _at_most(_size(params.bad_words), MAX_BAD_WORDS, field="bad_words", what="words")
    _at_most(_chars(params.bad_words), MAX_STOP_CHARS, field="bad_words", what="characters in all")
    for field in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        _at_most(_size(getattr(params, field)), MAX_TOKEN_IDS, field=field, what="token ids")
    if (outputs := params.structured_outputs) is not None:
        _check_constraint(outputs)


def check_template_inputs(num_chars: int) -> None:
    """Raises RequestRefused when a chat template would be given too much besides the messages."""
    _at_most(num_chars, MAX_TEMPLATE_CHARS, field="tools, chat_template_kwargs", what="characters as JSON")


NEUTRAL = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}


def keeps_state(params: Any) -> bool:
    """Whether what is sampled next hangs on what was sampled before in another way than by the tokens of the prompt: another engine
    cannot continue such a request."""
    penalised = any(getattr(params, field) != NEUTRAL[field] for field in ("presence_penalty", "frequency_penalty"))
    return penalised or bool(params.structured_outputs or params.bad_words)


FORCING = ("structured_outputs", "logit_bias", "bad_words", "allowed_token_ids", "min_tokens")
"""Fields that take the choice from the policy and are served, as the penalties above."""
LEFT_TO_THE_POLICY = ("thinking_token_budget", "watermarking")
"""What would take it, and counts as not asked for: agents ask for a budget of thoughts as a limit."""
# fmt: off
UNFORCED = frozenset((
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "stop", "stop_token_ids", "ignore_eos",
    "include_stop_str_in_output", "logprobs", "flat_logprobs", "prompt_logprobs", "prompt_logprob_token_ids",
    "prompt_logprob_start", "logprob_token_ids", "extra_args", "detokenize", "skip_special_tokens",
    "spaces_between_special_tokens", "output_kind", "stream_interval", "output_text_buffer_length", "skip_clone",
    "skip_reading_prefix_cache", "routed_experts_prompt_start",
))
# fmt: on
"""The run's own (`SamplingRules` sets or bounds them), or they bound and show an answer; none changes what is sampled."""


def constraint_of(params: Any, neutral: Any) -> tuple[str, int | None] | None:
    """The field that takes the choice from the policy, and how many first tokens it is about (None: all); None: there is none.

    The recorded log-probabilities are then true of another distribution than the policy's, so those tokens are not trained.
    `neutral`: SamplingParams that ask for nothing. Raises RequestRefused for a field that differs and is not known here: a later
    version of vLLM may have it, and it may force tokens.
    """
    asked = []
    for field in params.__struct_fields__:
        value, default = getattr(params, field), getattr(neutral, field)
        differs = len(value) > 0 if isinstance(value, Sized) and not default else value != default
        if not differs or field in UNFORCED or field.startswith("_"):
            continue
        if field not in NEUTRAL and field not in FORCING:
            raise RequestRefused(
                f"{field} is not served: it may take the choice from the policy; leave it out", field=field
            )
        asked.append(field)
    if not asked:
        return None
    return (asked[0], None) if asked != ["min_tokens"] else ("min_tokens", params.min_tokens)


def _check_constraint(outputs: Any) -> None:
    for kind in CONSTRAINTS:
        value = getattr(outputs, kind)
        if value is None:
            continue
        field = f"structured_outputs.{kind}"
        if kind == "choice":
            _at_most(_size(value), MAX_OPTIONS, field=field, what="choices")
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        _at_most(len(text), MAX_CONSTRAINT_CHARS, field=field, what="characters as JSON")


def _size(values: Sized | None) -> int:
    return 0 if values is None else len(values)


def _chars(texts: Collection[str] | None) -> int:
    return sum(len(text) for text in texts or () if isinstance(text, str))


def _at_most(number: int, limit: int, *, field: str, what: str) -> None:
    if number > limit:
        raise RequestRefused(f"{field} must hold at most {limit:,} {what}, got {number:,}; send fewer", field=field)
