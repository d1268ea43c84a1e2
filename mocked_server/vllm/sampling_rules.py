"""The sampling parameters of a model call: always those of the run's distribution, and only what vLLM accepts.

Called by `mocked_server.vllm.serving` for every request before it is queued. Invariants: a request that passes has the
types, ranges and sizes that the engine's process expects, which does not check them itself and would end, or never
answer again; what an agent chooses never changes the policy's distribution without a mark (`Prompt.first_trained`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sized
from typing import Any

import msgspec

from buffers.errors import RequestRefused
from buffers.records import Int32
from configs.schema import RolloutConfig
from mocked_server.conversation.live_episodes import LiveEpisode
from mocked_server.http.dialects import too_long
from mocked_server.vllm.engine_requests import MAX_MESSAGE_CHARS, NUMBERS_ONLY, refusal_of

# Checks what a model call asks of sampling: counts and sizes that any agent may ask for, and whether the tokens are still the
# policy's own choice. Pure functions that read attributes; vLLM's own rules (ranges, vocabulary) are checked after these.
# Invariant: what passes costs the engine and the event loop a bounded time, for any values.

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
    """True if sampling has a state beside the tokens (a grammar, penalties): another engine cannot continue the request."""
    penalised = any(getattr(params, field) != NEUTRAL[field] for field in ("presence_penalty", "frequency_penalty"))
    return penalised or bool(params.structured_outputs or params.bad_words)


FORCING = ("structured_outputs", "logit_bias", "bad_words", "allowed_token_ids", "min_tokens")
"""Fields that take the choice from the policy and are served, as the penalties above."""
LEFT_TO_THE_POLICY = ("thinking_token_budget", "watermarking")
"""Fields that would take it, and count as not asked for: agents ask for a budget of thoughts as a limit."""
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


NOT_SENT = (msgspec.MsgspecError, TypeError, OverflowError, UnicodeEncodeError, RecursionError)
"""Errors of encoding and decoding for the engine's process."""


class SamplingRules:
    """`input_processor`: vLLM's, whose checks are run here first."""

    def __init__(self, input_processor: Any, *, rollout: RolloutConfig) -> None:
        from vllm.sampling_params import SamplingParams

        self._input_processor = input_processor
        self._rollout = rollout
        self._neutral = SamplingParams()
        self._decoder = msgspec.msgpack.Decoder(SamplingParams)
        self._encoder = msgspec.msgpack.Encoder()

    def apply(self, params: Any, *, prompt: Int32, live: LiveEpisode | None, is_trained: bool = True) -> int | None:
        """Pin `params` (vLLM's SamplingParams, changed in place) to the run's sampling; the first token that may be trained
        (None: no token). Raises RequestRefused naming the field, or the first token of the prompt that the model does not have.

        `live`: its episode; None: it has none, and nothing is recorded. `is_trained`: whether the role is that answers; another may
        speak for as long as there is room, and at a lower temperature."""
        self._check_prompt(prompt)
        self._check_types(params)
        asked = params.temperature, params.max_tokens
        self._pin(params, len(prompt), live=live)
        if not is_trained:
            room = self._rollout.max_model_len - len(prompt)
            params.temperature, params.max_tokens = (
                min(asked[0], self._rollout.temperature),
                min(asked[1] or room, room),
            )
        check_sampling(params)
        self._check_values(params)
        constraint = constraint_of(params, self._neutral)
        if not is_trained:
            return None
        if constraint is None:
            return 0
        field, num_first = constraint
        if live is not None:
            live.constrained[field] += 1
        return num_first

    def _check_prompt(self, prompt: Int32) -> None:
        """A tokenizer may know more tokens than the model has rows for. vLLM's own check takes the larger number, and the engine
        dies of such a token."""
        rows = self._input_processor.model_config.get_vocab_size()
        if len(unknown := prompt[(prompt < 0) | (prompt >= rows)]):
            token = int(unknown[0])
            text = "" if token < 0 else f" ({self._input_processor.get_tokenizer().decode([token])!r})"
            raise RequestRefused(
                f"the prompt must hold tokens of the model's vocabulary of {rows}, got {token}{text}; leave that text out"
            )

    def _pin(self, params: Any, prompt_len: int, *, live: LiveEpisode | None) -> None:
        """The run's temperature, the whole distribution, log-probabilities of what is sampled, a seed of the episode's own."""
        params.temperature = 0.0 if live is not None and live.episode.greedy else self._rollout.temperature
        params.top_p, params.top_k, params.min_p = 1.0, 0, 0.0
        for field in LEFT_TO_THE_POLICY:
            setattr(params, field, None)
        if params.n > 1 and params.temperature == 0.0:
            raise RequestRefused(
                f"n must be 1 in an episode that is played greedily, got {params.n}; all answers would be the same",
                field="n",
            )
        room = self._rollout.max_model_len - prompt_len
        if room < 1:
            raise RequestRefused(too_long(prompt_len, self._rollout.max_model_len))
        params.max_tokens = min(params.max_tokens or room, self._rollout.max_tokens, room)
        params.min_tokens = min(params.min_tokens, params.max_tokens)
        if params.seed is not None and live is not None:
            params.seed = seed_of(live.episode_id, params.seed)
        params.extra_args = None  # for plugins of sampling; there are none, and some of its names are vLLM's own
        if params.logprobs is None:
            params.logprobs = 0  # the sampled token only; the HTTP layer does not show it unless it was asked for
            params.flat_logprobs = True
            params.extra_args = {NUMBERS_ONLY: True}

    def _check_types(self, params: Any) -> None:
        """The engine's process reads the same bytes by the same types, in a thread that ends when they are wrong."""
        try:
            self._decoder.decode(self._encoder.encode(params))
        except NOT_SENT as error:
            field = _field_in(str(error)) or self._unsendable(params)
            raise RequestRefused(
                f"{field} must have the type and size that vLLM documents: {str(error)[:MAX_MESSAGE_CHARS]}",
                field=field,
            ) from error

    def check_sendable(self, values: Mapping[str, Any]) -> None:
        """Raises RequestRefused for what cannot be sent to the engine's process beside the sampling parameters: what the chat
        template was given, which the reasoning parser reads there."""
        try:
            self._encoder.encode(values)
        except NOT_SENT as error:
            raise RequestRefused(
                f"chat_template_kwargs must hold JSON with numbers of 64 bits, got {str(error)[:MAX_MESSAGE_CHARS]}",
                field="chat_template_kwargs",
            ) from error

    def _unsendable(self, params: Any) -> str | None:
        """The first field that cannot be encoded."""
        for field in params.__struct_fields__:
            try:
                self._encoder.encode(getattr(params, field))
            except NOT_SENT:
                return str(field)
        return None

    def _check_values(self, params: Any) -> None:
        from vllm.exceptions import VLLMClientError

        try:
            self._input_processor._validate_params(params, ("generate",))
        except (VLLMClientError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise refusal_of(error) from error


def seed_of(episode_id: str, seed: int) -> int:
    """The seed that an agent asks for, in 0..2^63 - 1, made its episode's own: episodes of a group that all ask for the same seed
    must not all get the same answer."""
    digest = hashlib.blake2b(f"{episode_id} {seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _field_in(message: str) -> str | None:
    """`$.seed` at the end of a message of msgspec's."""
    _, mark, path = message.rpartition("`$.")
    return path.rstrip("`").split("[")[0] if mark else None


def leave_tool_calls_free() -> None:
    """Leaves tool calls of `tool_choice: auto` to the policy. By itself vLLM forces calls of tools that say `strict` into their
    schema, which is not the policy's choice then; OpenAI's SDKs say it of every tool. Here the policy chooses freely, and
    learns from what comes of it. Forced calls (`required`, or a tool by name) stay forced, and are not trained
    (`mocked_server.vllm.sampling_rules`)."""
    from vllm.parser import abstract_parser

    original = abstract_parser.resolve_tool_strictness
    if getattr(original, "__name__", "") == "resolve_unless_auto":
        return

    def resolve_unless_auto(tools: Any, tool_choice: Any, strict_level: Any) -> Any:
        return None if tool_choice == "auto" else original(tools, tool_choice, strict_level)

    abstract_parser.resolve_tool_strictness = resolve_unless_auto


def leave_limits_to_the_run() -> None:
    """Leaves to `SamplingRules` what vLLM's layer judges before the run's own numbers are in force: more tokens than the model's
    length, which are capped as all numbers above `rollout.max_tokens` are, several answers at an agent's temperature of 0, and a
    prompt that is too long with what it continues, of which each dialect's route has words of its own."""
    from vllm.entrypoints.openai.chat_completion import serving as chat
    from vllm.entrypoints.openai.completion import serving as completion
    from vllm.entrypoints.openai.responses import serving as responses
    from vllm.renderers.params import TokenizeParams
    from vllm.sampling_params import SamplingParams

    original, room = TokenizeParams.__post_init__, chat.get_max_tokens
    if getattr(original, "__name__", "") == "capped":
        return

    def at_least_one(max_model_len: int, max_tokens: int | None, input_length: int, *args: Any, **kwargs: Any) -> int:
        return int(room(max_model_len, max_tokens, min(input_length, max_model_len - 1), *args, **kwargs))

    for route in (chat, completion, responses):
        route.get_max_tokens = at_least_one
    responses.OpenAIServingResponses._validate_generator_input = lambda *_: None

    def capped(self: Any) -> None:
        if self.max_total_tokens is not None and self.max_output_tokens is not None:
            object.__setattr__(self, "max_output_tokens", min(self.max_output_tokens, self.max_total_tokens))
        original(self)

    TokenizeParams.__post_init__ = capped
    SamplingParams._verify_greedy_sampling = lambda _: None
