"""Requests whose tokens another server samples: that server's messages become the outputs that vLLM makes for its own engine.

Called by `mocked_server.servers.server_engine`. vLLM's input processor judges a request, and its output processor decodes text,
finds stop strings, joins completions and keeps log-probabilities, as `AsyncLLM` has them do; only the tokens come from elsewhere.
Seams relied on (tests/mocked_server/vllm/test_served_requests.py): `InputProcessor.process_inputs`, `OutputProcessor.add_request`,
`process_outputs` and `abort_requests`, `ParentRequest.get_child_info`.

Invariant: ids, log-probabilities, text and reasons are those that an engine in this process would give for the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from buffers.errors import RequestRefused
from mocked_server.fleet.member import Sampled
from mocked_server.vllm import continued_requests
from mocked_server.vllm.continued_requests import interrupted, never_began
from mocked_server.vllm.engine import numbers_only_where_asked, refusal_of

PASSED_ON = ("reasoning_ended", "reasoning_parser_kwargs")
"""Arguments beside the sampling parameters that a request may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """One message of a server about one completion: what it sampled since the last one."""

    token_ids: list[int]
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    """Each token's own (id, log-probability) first, then those of the likeliest tokens that were asked for."""
    ranks: list[int] = field(default_factory=list)
    """Rank of each token among all of the vocabulary; 0: not known."""
    finish_reason: str | None = None
    """`stop`, `length`, `abort` (the server gave it up), or None: it continues."""
    stop_reason: int | str | None = None
    """The stop string or the token that ended it."""
    versions: list[tuple[str, int]] | None = None
    """(weight version, index of the first token that it sampled), of the whole completion; None: the server does not say yet."""
    num_cached_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One completion of a request, as it is asked of the server."""

    id: str
    prompt_token_ids: list[int]
    params: Any
    """vLLM's SamplingParams, for one completion."""
    extra: Mapping[str, Any]
    num_before: int
    """Tokens that another engine has sampled of it; they are in the prompt."""
    versions_before: list[tuple[str, int]]


class ServedRequests:
    """`vllm_config`: of the model, as vLLM's HTTP layer has it; no engine is started."""

    def __init__(self, vllm_config: Any) -> None:
        from vllm.renderers import renderer_from_config
        from vllm.v1.engine.input_processor import InputProcessor
        from vllm.v1.engine.output_processor import OutputProcessor

        numbers_only_where_asked()
        continued_requests.install()
        renderer = renderer_from_config(vllm_config)
        self._input_processor = InputProcessor(vllm_config, renderer)
        self.output_processor = OutputProcessor(renderer.tokenizer, log_stats=False)

    def begin(
        self, prompt_token_ids: list[int], params: Any, *, request_id: str, extra: Mapping[str, Any]
    ) -> tuple[list[Completion], Any]:
        """The completions to ask for, and the queue of the request's outputs. Raises RequestRefused."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import tokens_input
        from vllm.v1.engine.output_processor import RequestOutputCollector
        from vllm.v1.engine.parallel_sampling import ParentRequest

        if strange := sorted(name for name, value in extra.items() if value is not None and name not in PASSED_ON):
            raise RequestRefused(
                f"{strange[0]} is for the engines of this run; leave it out where rollout.engine is a server",
                field=strange[0],
            )
        try:
            request = self._input_processor.process_inputs(
                request_id, tokens_input(prompt_token_ids), params, supported_tasks=("generate",)
            )
        except (VLLMClientError, ValueError, TypeError, OverflowError) as error:
            raise refusal_of(error) from error
        self._input_processor.assign_request_id(request)
        params = request.params
        queue = RequestOutputCollector(params.output_kind, request.request_id)
        if params.n == 1:
            self.output_processor.add_request(request, None, None, 0, queue)
            return [self._completion(request, extra)], queue
        parent, children = ParentRequest(request), []
        for index in range(params.n):
            child = copy(request)
            child.request_id, child.sampling_params = parent.get_child_info(index)
            self.output_processor.add_request(child, None, parent, index, queue)
            children.append(self._completion(child, extra))
        return children, queue

    def feed(self, completion: Completion, tokens: Tokens, *, version: int) -> bool:
        """Take a server's message; an output may be put into the request's queue. `version`: of the policy that samples now.
        Returns whether the completion has ended: by the server's word, or by a stop string that was found here."""
        from vllm.v1.engine import EngineCoreOutput, FinishReason

        state = self.output_processor.request_states.get(completion.id)
        if state is None:
            return True
        if tokens.versions is not None:
            starts = list(completion.versions_before)
            for label, start in tokens.versions:
                if not starts or starts[-1][0] != label:
                    starts.append((label, completion.num_before + start))
            state.weight_version_starts = starts
        if tokens.num_cached_tokens is not None:
            state.num_cached_tokens = tokens.num_cached_tokens
        by_string = tokens.finish_reason == "stop" and isinstance(tokens.stop_reason, str)
        reason = None if by_string or tokens.finish_reason is None else FinishReason[tokens.finish_reason.upper()]
        has_logprobs = bool(tokens.token_ids) and state.logprobs_processor.num_logprobs is not None
        output = EngineCoreOutput(
            completion.id,
            list(tokens.token_ids),
            new_logprobs=_logprobs_lists(tokens) if has_logprobs else None,
            finish_reason=reason,
            stop_reason=None if by_string else tokens.stop_reason,
        )
        self.output_processor.process_outputs([output], weight_version=None if tokens.versions else str(version))
        if by_string and completion.id in self.output_processor.request_states:
            # The server has found a stop string that is none here: its word ends the answer.
            last = EngineCoreOutput(completion.id, [], finish_reason=FinishReason.STOP, stop_reason=tokens.stop_reason)
            self.output_processor.process_outputs([last])
        return completion.id not in self.output_processor.request_states

    def lost(self, request_id: str) -> list[Sampled]:
        """What was sampled of a request that its server lost, for another engine."""
        return never_began(request_id) or interrupted(self, request_id)

    def end(self, request_id: str) -> None:
        """Nothing more is expected of it."""
        never_began(request_id)
        self.output_processor.abort_requests([request_id], internal=False)

    def _completion(self, request: Any, extra: Mapping[str, Any]) -> Completion:
        state = self.output_processor.request_states[request.request_id]
        return Completion(
            id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            params=request.sampling_params,
            extra={name: value for name, value in extra.items() if value is not None},
            num_before=state.detokenizer.num_output_tokens(),
            versions_before=list(state.weight_version_starts),
        )

    def under_way(self) -> Sequence[Any]:
        """vLLM's states of the completions that have not ended."""
        return list(self.output_processor.request_states.values())


def _logprobs_lists(tokens: Tokens) -> Any:
    """The log-probabilities in the form of vLLM's engine: rows of equal length, the sampled token's first."""
    import numpy as np
    from vllm.v1.outputs import LogprobsLists

    rows = tokens.logprobs
    return LogprobsLists(
        np.array([[token for token, _ in row] for row in rows], np.int64),
        np.array([[value for _, value in row] for row in rows], np.float64),
        np.array(tokens.ranks or [0] * len(rows), np.int64),
    )


def probe(token_id: int) -> Completion:
    """A request for one token after this one, with its log-probability."""
    from vllm.sampling_params import SamplingParams

    return Completion(
        id=f"probe-{token_id}",
        prompt_token_ids=[token_id],
        params=SamplingParams(max_tokens=1, logprobs=0, ignore_eos=True),
        extra={},
        num_before=0,
        versions_before=[],
    )
