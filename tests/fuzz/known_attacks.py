"""Attacks that are known by name, each of which once ended a run or made it stand still: sent before anything is drawn.

A case that `python -m tests.fuzz --engine real` finds is added here, with what it did.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mocked_server.http.dialects import CHAT, COMPLETIONS, GENERATE, RESPONSES
from tests.fuzz.hostile_values import Raw

QUESTION = [{"role": "user", "content": "Where?"}]
MB = 1_000_000
PARENTHESES = 60_000
TIME = b"@TIME@"
"""Stands in a body for the number of the time that it is sent."""
THOUGHT = "</think> Where?"
"""With a reasoning parser the prompt decides whether the form of the output holds from the first token on."""
THOUGHTFUL = [{"role": "user", "content": THOUGHT}]


@dataclass(frozen=True, slots=True)
class Case:
    """One request of an attack."""

    name: str
    path: str
    body: dict[str, Any]
    times: int = 1


def chat(name: str, **values: Any) -> Case:
    return Case(name, CHAT, {"model": "policy", "messages": QUESTION, "max_tokens": 4, **values})


def completions(name: str, **values: Any) -> Case:
    return Case(name, COMPLETIONS, {"model": "policy", "prompt": "Where?", "max_tokens": 4, **values})


def generate(name: str, **params: Any) -> Case:
    return Case(name, GENERATE, {"prompt_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4, **params}})


NO_TOKEN_LEFT = {"$ref": "#"}
"""A schema that allows nothing: the log-probabilities are not finite."""
REFUSED_BY_THE_ENGINE = (
    chat("top_logprobs below 0", logprobs=True, top_logprobs=-1),
    chat("top_logprobs beyond the engine's", logprobs=True, top_logprobs=100_000),
    chat("logit_bias beyond the vocabulary", logit_bias={"99999999": 1}),
    chat("logit_bias below 0", logit_bias={"-5": 1}),
    chat("allowed_token_ids beyond the vocabulary", allowed_token_ids=[10**8]),
    chat("allowed_token_ids below 0", allowed_token_ids=[-1]),
    chat("stop_token_ids beyond the vocabulary", stop_token_ids=[10**7]),
    chat("stop_token_ids below 0", stop_token_ids=[-700]),
    chat("stop_token_ids beyond 64 bits", stop_token_ids=[2**70]),
    generate("seed beyond 64 bits", seed=2**64),
    generate("stop with half a surrogate pair", stop="\ud800"),
    chat("kv_transfer_params in vllm_xargs, a string", vllm_xargs={"kv_transfer_params": "x"}),
    chat("kv_transfer_params in vllm_xargs, a list", vllm_xargs={"kv_transfer_params": ["x"]}),
    chat("numbers_only in vllm_xargs, with logprobs", vllm_xargs={"numbers_only": 1}, logprobs=True, top_logprobs=2),
    chat("a regex of parentheses", structured_outputs={"regex": "(" * PARENTHESES + ")" * PARENTHESES}),
    chat("a grammar of parentheses",
         structured_outputs={"grammar": "root ::= " + "(" * PARENTHESES + '"a"' + ")" * PARENTHESES}),
)  # fmt: skip
NOT_FINITE = (
    chat("json that allows nothing", structured_outputs={"json": NO_TOKEN_LEFT}),
    chat("json that allows nothing, at once", structured_outputs={"json": NO_TOKEN_LEFT}, messages=THOUGHTFUL),
    chat("json_schema that allows nothing, at once", messages=THOUGHTFUL,
         response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": NO_TOKEN_LEFT}}),
    completions("a grammar without an end", structured_outputs={"grammar": 'root ::= root "a" | root'}, prompt=THOUGHT),
    chat("the only token may not come yet", allowed_token_ids=[2], stop_token_ids=[2], min_tokens=3),
    chat("the only token is a bad word", allowed_token_ids=[70], bad_words=["g"]),
)  # fmt: skip
DEAF = (
    generate("seed of another type", seed="abc"),
    generate("min_tokens a fraction", min_tokens=1.5),
    generate("min_tokens not a number", min_tokens=Raw("NaN")),
)
LARGE = (
    Case("template arguments of 15 MB", CHAT, {"model": "policy", "messages": QUESTION, "max_tokens": 1,
         "chat_template_kwargs": {"x": "x" * 15 * MB, "i": Raw(TIME.decode())}}, times=12),
    chat("100,000 choices", structured_outputs={"choice": [f"choice {n}" for n in range(100_000)]}),
    generate("200,000 stop strings", max_tokens=64, stop=[f"stop {n}" for n in range(200_000)]),
    generate("a stop string of 12 MB", stop="s" * 12 * MB),
    completions("n of 300", n=300, max_tokens=1),
    completions("n of 2,000", n=2000, max_tokens=1),
    completions("n of 17,000", n=17_000, max_tokens=1),
)  # fmt: skip
OTHERS = (
    completions("a token chosen by its bias", logit_bias={"70": 100}),
    completions("a token chosen as the only one", allowed_token_ids=[71]),
    generate("stop as an object", stop={"a": 1}),
    completions("one of several prompts is empty", prompt=["a", ""]),
    chat("no token allowed", allowed_token_ids=[]),
    chat("a grammar without rules", structured_outputs={"grammar": "root ::="}),
    chat("a schema of 2^31 letters", response_format={
        "type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "string", "minLength": 2**31}}}),
    Case("null where a stream is asked for", RESPONSES,
         {"model": "policy", "input": "Where?", "max_output_tokens": 4, "background": None, "stream": True}),
    Case("a constraint that is refused on a stream", RESPONSES,
         {"model": "policy", "input": "Where?", "max_output_tokens": 4, "stream": True,
          "structured_outputs": {"grammar": "%ignore x"}}),
)  # fmt: skip
CASES: tuple[Case, ...] = (*OTHERS, *REFUSED_BY_THE_ENGINE, *NOT_FINITE, *DEAF, *LARGE)
"""In the order in which they are sent."""
