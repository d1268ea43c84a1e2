"""The sampling parameters of a model call: always those of the run's distribution, and only what vLLM accepts.

Called by `mocked_server.vllm.serving` for every request before it is queued. Invariants: a request that passes has the
types, ranges and sizes that the engine's process expects, which does not check them itself and would end, or never
answer again; what an agent chooses never changes the policy's distribution without a mark (`Prompt.first_trained`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from buffers.errors import RequestRefused
from buffers.records import Int32
from configs.schema import RolloutConfig
from mocked_server.conversation.live_episodes import LiveEpisode
from mocked_server.http.dialects import too_long
from mocked_server.vllm.engine import MAX_MESSAGE_CHARS, NUMBERS_ONLY, refusal_of
from mocked_server.vllm.sampling_limits import LEFT_TO_THE_POLICY, check_sampling, constraint_of

NOT_SENT = (msgspec.MsgspecError, TypeError, OverflowError, UnicodeEncodeError, RecursionError)
"""What encoding and decoding for the engine's process may raise."""


class SamplingRules:
    """`input_processor`: vLLM's, whose checks are run here first."""

    def __init__(self, input_processor: Any, *, rollout: RolloutConfig) -> None:
        from vllm.sampling_params import SamplingParams

        self._input_processor = input_processor
        self._rollout = rollout
        self._neutral = SamplingParams()
        self._decoder = msgspec.msgpack.Decoder(SamplingParams)
        self._encoder = msgspec.msgpack.Encoder()

    def apply(self, params: Any, *, prompt: Int32, live: LiveEpisode | None) -> int | None:
        """Pin `params` (vLLM's SamplingParams, changed in place) to the run's sampling; the first token that may be trained
        (None: no token). Raises RequestRefused naming the field, or the first token of the prompt that the model does not have.

        `live`: its episode; None: it has none, and nothing is recorded."""
        self._check_prompt(prompt)
        self._check_types(params)
        self._pin(params, len(prompt), live=live)
        check_sampling(params)
        self._check_values(params)
        constraint = constraint_of(params, self._neutral)
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
    _, found, path = message.rpartition("`$.")
    return path.rstrip("`").split("[")[0] if found else None


def leave_tool_calls_free() -> None:
    """Leaves tool calls of `tool_choice: auto` to the policy. By itself vLLM forces calls of tools that say `strict` into their
    schema, which is not the policy's choice then; OpenAI's SDKs say it of every tool. Here the policy chooses freely, and
    learns from what comes of it. Forced calls (`required`, or a tool by name) stay forced, and are not trained
    (`mocked_server.vllm.sampling_limits`)."""
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
