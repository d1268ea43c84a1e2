"""The trainability report: what one run of an agent gives a learner, what stands in the way, and what to change; and what the tiny
model says to the agent meanwhile.

Pure: figures in, `Report` out, as text or as JSON; a request in, its line out. `mocked_server.check.trial` collects the figures.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from buffers.records import Round, Row
from buffers.training_rows import ABORTED
from configs.schema import RolloutConfig
from mocked_server.conversation.chat_history import EXPECTED, REMEDY, BranchCause
from mocked_server.http.dialects import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    GEMINI,
    GEMINI_COUNT,
    GEMINI_STREAM,
    MESSAGES,
    RESPONSES,
)
from mocked_server.http.other_models import asked_of
from mocked_server.vllm.tool_calls import calls_message

NAMES = {
    CHAT: "OpenAI chat completions",
    COMPLETIONS: "OpenAI completions",
    RESPONSES: "OpenAI responses",
    MESSAGES: "Anthropic messages",
    COUNT_TOKENS: "Anthropic token counts",
    GEMINI: "Google generateContent",
    GEMINI_STREAM: "Google streamGenerateContent",
    GEMINI_COUNT: "Google token counts",
}
ENV_ANSWER = {
    "done": True,
    "score": 0.0,
    "reward": 0.0,
    "observation": "",
    "messages": [{"role": "user", "content": "Hi"}],
}
"""Answer of the stand-in for the environment to everything; see `mocked_server.check.trial`."""
NEEDS_PARSER = "server.tool_parser, for the tools that it offers, unless the model's chat template shows calls"
TIMED_OUT = 124
LAST_LINES = 4
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
NARROWS = ("response_format", "forced tools", "penalties", "logit_bias")
"""Features that change the distribution that is sampled from: the tokens are recorded, and not trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialObservations:
    """Requests of the agent and their answers, as `mocked_server.check.trial` saw it."""

    command: Sequence[str]
    exit_code: int
    seconds: float
    dialects: Counter[str]
    features: Counter[str]
    errors: Sequence[tuple[str, int, str]]
    """(path, status, message) of each error that the agent was answered with."""
    last_words: str = ""
    """The end of what it printed."""
    env_messages: int = 0
    """Messages to `ENV_ADDRESS`."""
    noticed: Sequence[str] = ()
    """What the model's chat template leaves out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchReport:
    """A round that could not continue the answer before it, or that branches off on purpose."""

    round: int
    cause: str
    expected: bool
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """See the module. Counts are of one episode."""

    command: list[str]
    exit_code: int
    seconds: float
    trainable: bool
    rounds: int
    aborted_rounds: int
    branches: int
    rows: int
    tokens: int
    tokens_trained: int
    tokens_masked: int
    tokens_trained_share: float
    max_logprob_diff: float | None
    """Largest difference between a sampled token's recorded log-probability and the learner's; None: not computed."""
    branch_causes: list[BranchReport]
    dialects: dict[str, int]
    features: dict[str, int]
    errors: list[str]
    needs: list[str] = field(default_factory=list)
    """Keys that the configuration of a run must set for it."""
    env_messages: int = 0
    advice: list[str] = field(default_factory=list)

    def as_json(self) -> str:
        """The report as JSON, for programs."""
        return json.dumps(asdict(self), indent=2)

    def as_text(self) -> str:
        """The report as text, for people."""
        lines = [
            f"agent      {' '.join(self.command)} (exit code {self.exit_code}, {self.seconds:.1f} s)",
            f"dialects   {_counts({NAMES.get(path, path): n for path, n in self.dialects.items()})}",
            f"features   {_counts(self.features)}",
            f"rounds     {self.rounds}" + (f" and {self.aborted_rounds} aborted" if self.aborted_rounds else ""),
            f"branches   {self.branches}",
            f"rows       {self.rows} of {self.tokens} tokens in all: {self.tokens_trained} trained, {self.tokens_masked} masked",
        ]
        if self.max_logprob_diff is not None and self.tokens_trained:
            lines.append(f"exactness  log-probabilities computed again differ by at most {self.max_logprob_diff:.1e}")
        ordered = sorted(self.branch_causes, key=lambda one: one.expected)
        lines += [f"branch     round {b.round}: {b.cause}{'' if b.expected else ', unexpected'}" for b in ordered]
        if self.env_messages:
            lines.append(
                f"env        {self.env_messages} messages to ENV_ADDRESS, answered by a stand-in with {json.dumps(ENV_ANSWER)}"
            )
        lines += [f"error      {error}" for error in self.errors]
        lines += [f"advice     {advice}" for advice in self.advice]
        verdict = "can be trained" if self.trainable else "cannot be trained as it is"
        lines.append(f"verdict    {verdict}" + (f"; set {' and '.join(self.needs)}" if self.needs else ""))
        return "\n".join(lines)


def make_report(
    seen: TrialObservations,
    *,
    stored: Sequence[Round],
    rows: Sequence[Row],
    causes: Sequence[BranchCause | None],
    temperature: float,
    max_logprob_diff: float | None = None,
    stops_kept: int = 0,
    reads_calls: bool = False,
) -> Report:
    """`stored`: the episode's rounds; `rows`: its training rows; `causes`: of each round that was not aborted, in order;
    `stops_kept`: prompts with the stop string of the answer that they continue; `reads_calls`: those of the user's model."""
    causes_seen = [
        BranchReport(round=number, cause=cause.value, expected=cause in EXPECTED, remedy=REMEDY[cause])
        for number, cause in enumerate(causes, 1)
        if cause is not None
    ]
    tokens, trained = sum(row.num_tokens for row in rows), sum(row.num_trained for row in rows)
    parents = {round_.parent for round_ in stored}
    kept = [round_ for round_ in stored if round_.finish_reason != ABORTED]
    return Report(
        command=list(seen.command),
        exit_code=seen.exit_code,
        seconds=round(seen.seconds, 3),
        trainable=trained > 0 and seen.exit_code == 0,
        rounds=len(kept),
        aborted_rounds=len(stored) - len(kept),
        branches=sum(round_.round_index not in parents for round_ in kept),
        rows=len(rows),
        tokens=tokens,
        tokens_trained=trained,
        tokens_masked=tokens - trained,
        tokens_trained_share=round(trained / tokens, 4) if tokens else 0.0,
        max_logprob_diff=max_logprob_diff,
        branch_causes=causes_seen,
        dialects=dict(seen.dialects),
        features=dict(seen.features),
        errors=[f"{path}: {status}: {message}" for path, status, message in seen.errors],
        needs=[NEEDS_PARSER] if seen.features["tools"] and not reads_calls else [],
        env_messages=seen.env_messages,
        advice=_advice(seen, kept=len(kept), causes=causes_seen, temperature=temperature, stops_kept=stops_kept),
    )


def _advice(
    seen: TrialObservations, *, kept: int, causes: Sequence[BranchReport], temperature: float, stops_kept: int
) -> list[str]:
    advice = list(dict.fromkeys([*seen.noticed, *(f"{b.cause}: {b.remedy}" for b in causes if not b.expected)]))
    if seen.exit_code == TIMED_OUT:
        advice.append("the agent did not end in time: it was stopped; --timeout gives it longer")
    elif seen.exit_code != 0:
        words = seen.last_words.rstrip().splitlines()[-LAST_LINES:]
        advice.append(
            f"the agent failed with exit code {seen.exit_code}: such an episode has no score, unless env.command reports one. "
            + (f"It printed at its end: {' | '.join(words)}" if words else "It printed nothing")
        )
    if not seen.dialects and seen.exit_code == 0:
        advice.append(
            "no request came: the agent must read OPENAI_BASE_URL and OPENAI_API_KEY (or ANTHROPIC_BASE_URL and "
            "ANTHROPIC_API_KEY, or GOOGLE_GEMINI_BASE_URL and GEMINI_API_KEY) from its environment, and take its model's "
            "name from MODEL"
        )
    elif not seen.dialects:
        advice.append("it made no model call before that: mend this first, then check again")
    elif not kept:
        advice.append("no request was answered; see the errors")
    if seen.features["temperature"]:
        advice.append(
            f"the agent sets sampling values; in training every token is sampled at temperature {temperature:g}"
        )
    if seen.features["stop"]:
        advice.append(
            f"the agent stops answers at strings of its own, which are sampled and stay in the next prompt ({stops_kept} here), "
            "though its history ends before them: put them back into the history, so that it says what the model will read"
        )
    if seen.features["long answers"]:
        advice.append(
            f"the agent asks for more than {RolloutConfig().max_model_len} tokens of an answer: in training it gets at most "
            "rollout.max_tokens, and what its prompt leaves of rollout.max_model_len; raise these if its answers are longer"
        )
    narrowing = [name for name in NARROWS if seen.features[name]]
    if narrowing:
        advice.append(
            f"{', '.join(narrowing)}: what such calls sample is not the policy's own choice, so it is recorded and not trained; "
            "leave it out of the calls that are to be learned from"
        )
    return advice


def features_of(path: str, fields: dict[str, Any]) -> list[str]:
    """Features that a request asks for beyond a plain answer."""
    choice = fields.get("tool_choice")
    penalties = ("presence_penalty", "frequency_penalty", "repetition_penalty")
    text = str(fields.get("messages") or fields.get("input") or "")
    asked = {
        "stream": fields.get("stream"),
        "tools": fields.get("tools"),
        "forced tools": choice == "required"
        or (isinstance(choice, dict) and choice.get("type") in ("any", "tool", "function")),
        "one call at a time": fields.get("parallel_tool_calls") is False,
        "response_format": _format(fields).get("type") not in (None, "text"),
        "several choices": (fields.get("n") or 1) > 1,
        "stop": fields.get("stop") or fields.get("stop_sequences"),
        "seed": fields.get("seed") is not None,
        "penalties": any(fields.get(name) not in (None, 0, 1) for name in penalties),
        "logit_bias": fields.get("logit_bias"),
        "logprobs": fields.get("logprobs"),
        "long answers": any(
            isinstance(n := fields.get(name), int) and n > RolloutConfig().max_model_len for name in LENGTHS
        ),
        "temperature": any(fields.get(name) is not None for name in ("temperature", "top_p", "top_k")),
        "system prompt": fields.get("system")
        or fields.get("instructions")
        or "'system'" in text
        or "'developer'" in text,
        "reasoning": fields.get("reasoning") or fields.get("reasoning_effort") or fields.get("thinking"),
    }
    return [name for name, value in asked.items() if value]


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} ({n})" for name, n in counts.items()) or "none"


# What the tiny model says while an agent is tried out: valid tool calls first, then a final answer. An untrained model says nothing
# that an agent could act on. So each request is given a line, which the real engine is then made to sample: the tokens, their
# log-probabilities and everything around them are real, only the words are ours.

LINE = "rehearsal_line"
"""Key of the line in `Call.extra_args`, which reaches the engine in every dialect."""
TOOL_ROUNDS = 3
"""Tool results in a conversation after which the model answers in words. The second of these rounds calls two tools at once."""
ANSWER = "Done. The answer is 42."
MAX_DEPTH = 6

Fields = dict[str, Any]


def message_for(path: str, fields: Fields) -> dict[str, Any]:
    """A message of the model: tool calls, an example of the requested format, or a short answer."""
    asked = asked_of(path, {"messages": [], "input": "-", **fields})
    tools = _tools(asked.tools or () if asked else ())
    brings = [message.get("role") == "tool" for message in asked.messages] if asked else []
    results = sum(now and not before for before, now in zip([False, *brings], brings, strict=False))
    choice = fields.get("tool_choice")
    name = _named(choice)
    forced = name is not None or choice in ("required", {"type": "any"})
    if tools and choice not in ("none", {"type": "none"}) and (forced or results < TOOL_ROUNDS):
        called = [tools[results % len(tools)]] if name is None else [tool for tool in tools if tool[0] == name]
        if results == 1 and not forced and fields.get("parallel_tool_calls") is not False:
            called = [tools[1 % len(tools)], tools[2 % len(tools)]]
        return calls_message((tool, example(schema)) for tool, schema in called)
    schema = _output_schema(fields)
    return {"role": "assistant", "content": ANSWER if schema is None else json.dumps(example(schema))}


def hermes(message: Mapping[str, Any]) -> str:
    """The message as models write it that have no form of their own for calls, or the tiny one's."""
    functions = [json.dumps(call["function"]) for call in message.get("tool_calls") or ()]
    return "\n".join(f"<tool_call>\n{function}\n</tool_call>" for function in functions) or str(message["content"])


def example(schema: Any, *, root: Any = None, depth: int = 0) -> Any:
    """The smallest value that a JSON schema describes, as far as its common words say."""
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return "example"
    root = schema if root is None else root
    for word in ("const", "default"):
        if schema.get(word) is not None:
            return schema[word]
    for word in ("enum", "examples"):
        if schema.get(word):
            return schema[word][0]
    for word in ("anyOf", "oneOf", "allOf"):
        if schema.get(word):
            return example(schema[word][0], root=root, depth=depth + 1)
    if "$ref" in schema:
        return example(_referred(root, schema["$ref"]), root=root, depth=depth + 1)
    return _by_type(schema, root=root, depth=depth)


def _by_type(schema: Fields, *, root: Any, depth: int) -> Any:
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind == "object" or "properties" in schema:
        needed = schema.get("required", list(schema.get("properties", {})))
        properties = schema.get("properties", {})
        return {name: example(properties.get(name), root=root, depth=depth + 1) for name in needed}
    if kind == "array":
        return [example(schema.get("items"), root=root, depth=depth + 1)] * max(1, int(schema.get("minItems", 1)))
    if kind in ("integer", "number"):
        return schema.get("minimum", 1)
    return {"boolean": True, "null": None}.get(str(kind), "example")


def _referred(root: Any, reference: str) -> Any:
    for word in reference.removeprefix("#/").split("/"):
        root = root.get(word) if isinstance(root, dict) else None
    return root


def _tools(offered: Iterable[dict[str, Any]]) -> list[tuple[str, Any]]:
    """(name, schema of its arguments) of each function that the request offers."""
    functions = [tool.get("function", tool) for tool in offered]
    return [
        (str(function["name"]), function.get("parameters") or {"type": "object"})
        for function in functions
        if "name" in function
    ]


def _named(choice: Any) -> str | None:
    if not isinstance(choice, dict):
        return None
    name = choice.get("name") or (choice.get("function") or {}).get("name")
    return None if name is None else str(name)


def _format(fields: Fields) -> Fields:
    """The form that the answer must have, of any dialect; empty: none."""
    forms = (
        fields.get("response_format"),
        *((fields.get(name) or {}).get("format") for name in ("text", "output_config")),
    )
    return next(filter(None, forms), {})


def _output_schema(fields: Fields) -> Any:
    """The JSON schema that the answer must follow; None: free text."""
    wanted = _format(fields)
    if wanted.get("type") == "json_object":
        return {"type": "object"}
    if wanted.get("type") != "json_schema":
        return None
    return (wanted.get("json_schema") or wanted).get("schema")
