"""The requests of engines as vLLM keeps them in this process: what lets an engine continue what another one has begun to sample,
and what makes outputs of the tokens that a server of others samples.

An engine that continues gets prompt and sampled tokens as one prompt; vLLM's state of the request in this process, which counts
tokens, decodes text and finds stop strings, is brought to where the other engine was. Of a server's messages (`ServedRequests`)
only the tokens come from elsewhere: vLLM's input processor judges a request, and its output processor decodes text, finds stop
strings, joins completions and keeps log-probabilities, as `AsyncLLM` has them do. Called by `mocked_server.vllm.engine` and
`mocked_server.servers.server_engine`. Seams relied on (tests/mocked_server/vllm/test_vllm_seams.py, test_served_requests.py):
`RequestState.from_new_request`, its detokenizer, log-probabilities and weight version starts; `InputProcessor.process_inputs`,
`OutputProcessor.add_request`, `process_outputs` and `abort_requests`, `ParentRequest.get_child_info`.

Invariants: no character is sent twice or left out, also within a character of several tokens and within a stop string; versions
are those of the engines that sampled; ids, log-probabilities, text and reasons are those that one engine in this process would
give for the same tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

from buffers.errors import RequestRefused
from mocked_server.fleet.member import EngineLost, Sampled
from mocked_server.vllm.adapters import label_of

NUMBERS_ONLY = "numbers_only"
"""Key in a request's `extra_args`: its log-probabilities need no texts."""
MAX_MESSAGE_CHARS = 600
"""Most characters of vLLM's errors: some repeat the value that they refuse."""
_continued: dict[str, tuple[int, Sampled]] = {}
"""Id of a request that is about to begin -> length of its own prompt, and what was sampled of it."""


def install() -> None:
    """Hook into vLLM, once for a process."""
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.engine.output_processor import RequestState

    original = RequestState.from_new_request
    if getattr(original, "__name__", "") == "from_new_or_continued_request":
        return
    complete, track = RequestState._new_completion_output, RequestState.track_weight_version

    def from_new_or_continued_request(cls: Any, tokenizer: Any, request: Any, *rest: Any, **more: Any) -> Any:
        state = original(tokenizer, request, *rest, **more)
        if (continued := _continued.pop(request.external_req_id, None)) is not None:
            _bring_up(state, tokenizer, request, *continued)
        return state

    def new_completion_output(self: Any, *args: Any, **more: Any) -> Any:
        """vLLM tells the versions at the end only; what continues a request needs them earlier."""
        output = complete(self, *args, **more)
        if output.weight_versions is None:
            output.weight_versions = self._weight_version_spans()
        return output

    def track_weight_version(self: Any, weight_version: str) -> None:
        """vLLM's label is of the base weights: of an adapter's tokens it is the adapter's version."""
        own = None if self.lora_name is None else label_of(self.lora_name)
        track(self, own or weight_version)

    def from_new_request_numbers_only(cls: Any, tokenizer: Any, request: Any) -> Any:
        """vLLM decodes every sampled token once more for its entry in the log-probabilities. Requests with NUMBERS_ONLY do without:
        those texts are not read, and they are a tenth of this process's time."""
        quiet = NUMBERS_ONLY in (request.sampling_params.extra_args or {})
        return make_logprobs(None if quiet else tokenizer, request)

    make_logprobs = LogprobsProcessor.from_new_request
    LogprobsProcessor.from_new_request = classmethod(from_new_request_numbers_only)
    RequestState.track_weight_version = track_weight_version
    RequestState.from_new_request = classmethod(from_new_or_continued_request)
    RequestState._new_completion_output = new_completion_output


def continuing(request_id: str, params: Any, *, prompt_len: int, sampled: Sampled) -> Any:
    """Announce that the next request of this id continues `sampled`; gives its SamplingParams, for one completion."""
    done = len(sampled.token_ids)
    rest = params.clone()
    rest.n = 1
    if rest.max_tokens is not None:
        rest.max_tokens = max(1, rest.max_tokens - done)
    rest.min_tokens = max(0, rest.min_tokens - done)
    _continued[request_id] = prompt_len, sampled
    return rest


def never_began(request_id: str) -> list[Sampled]:
    """Completions that a request was to continue which ended before vLLM knew it."""
    continued = _continued.pop(request_id, None)
    return [] if continued is None else [continued[1]]


def _bring_up(state: Any, tokenizer: Any, request: Any, prompt_len: int, sampled: Sampled) -> None:
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    state.request_index = sampled.index
    state.prompt_token_ids = request.prompt_token_ids[:prompt_len]
    state.prompt_len = prompt_len
    begun = copy(request)
    begun.prompt_token_ids = state.prompt_token_ids
    begun.sampling_params = request.sampling_params.clone()
    begun.sampling_params.min_tokens = len(sampled.token_ids)  # no stop string ended what was sampled
    decoder = IncrementalDetokenizer.from_new_request(
        tokenizer=tokenizer if request.sampling_params.detokenize else None, request=begun
    )
    decoder.update(list(sampled.token_ids), stop_terminated=False)
    if hasattr(decoder, "min_tokens"):
        decoder.min_tokens = len(sampled.token_ids) + request.sampling_params.min_tokens
        decoder._last_output_text_offset = sampled.num_sent_chars
    state.detokenizer = decoder
    state.sent_tokens_offset = len(sampled.token_ids)
    state.weight_version_starts = [*sampled.versions]
    processor = state.logprobs_processor
    if sampled.logprobs is not None and processor is not None and processor.logprobs is not None:
        processor.logprobs = sampled.logprobs
    if processor is not None and processor.cumulative_logprob is not None and sampled.cumulative is not None:
        processor.cumulative_logprob = sampled.cumulative


def interrupted(llm: Any, request_id: str) -> list[Sampled]:
    """Completions that a dead engine had sampled of a request whose answer comes as a whole, in this process's state of it."""
    processor = llm.output_processor
    states = [
        processor.request_states[inner]
        for inner in processor.external_req_ids.get(request_id, ())
        if inner in processor.request_states
    ]
    completions = [_sampled(state) for state in states]
    parents: Sequence[Any] = [state.parent_req for state in states if state.parent_req is not None]
    if parents:
        ended = [output for output in parents[0].output_aggregator if output is not None]
        completions += [_ended(output) for output in ended]
    return sorted(completions, key=lambda sampled: sampled.index)


def given_up(output: Any) -> list[Sampled]:
    """Completions of a request that its engine gives up, as one does that was told to end (SIGTERM); empty: it does not."""
    if not any(completion.finish_reason == "abort" for completion in output.outputs):
        return []
    return [
        replace(_ended(completion), output=None) if completion.finish_reason == "abort" else _ended(completion)
        for completion in output.outputs
    ]


def _sampled(state: Any) -> Sampled:
    processor = state.logprobs_processor
    return Sampled(
        index=state.request_index,
        token_ids=list(state.detokenizer.output_token_ids),
        logprobs=processor.logprobs,
        cumulative=processor.cumulative_logprob,
        versions=list(state.weight_version_starts),
        num_sent_chars=0,
    )


def _ended(output: Any) -> Sampled:
    return Sampled(
        index=output.index,
        token_ids=list(output.token_ids),
        logprobs=output.logprobs,
        cumulative=output.cumulative_logprob,
        versions=[(span.version, span.start) for span in output.weight_versions or ()],
        num_sent_chars=0,
        output=output,
    )


def refusal_of(error: Exception) -> RequestRefused:
    """An error of vLLM's about one request, as ours: at most a few hundred characters of it, and its field."""
    text = str(error) or type(error).__name__
    return RequestRefused(text[:MAX_MESSAGE_CHARS], field=getattr(error, "parameter", None))


async def continued(
    generate: Callable[[list[int], Any, str, dict[str, Any]], AsyncGenerator[Any, None]],
    prompt_token_ids: list[int],
    params: Any,
    *,
    request_id: str,
    sampled: Sequence[Sampled],
    extra: dict[str, Any],
) -> AsyncGenerator[Any, None]:
    """The outputs of a request after what another engine has `sampled`: each completion that had not ended is a request of its own
    to `generate(prompt, params, id, extra)`."""
    from vllm.sampling_params import RequestOutputKind

    rest = [
        generate(
            [*prompt_token_ids, *one.token_ids],
            continuing(name := f"{request_id}-{one.index}", params, prompt_len=len(prompt_token_ids), sampled=one),
            name,
            extra,
        )
        for one in sampled
        if one.output is None
    ]
    outputs = merged(
        rest,
        ended=[one for one in sampled if one.output is not None],
        as_whole=params.output_kind is RequestOutputKind.FINAL_ONLY,
        request_id=request_id,
    )
    async with aclosing(outputs):
        async for output in outputs:
            yield output


async def merged(
    rest: Sequence[AsyncGenerator[Any, None]], *, ended: Sequence[Sampled], as_whole: bool, request_id: str
) -> AsyncGenerator[Any, None]:
    """The outputs of one request whose completions are generated one by one (`rest`). `as_whole`: it gets a single output, with
    those that had `ended` before. Raises EngineLost, with what all of them had sampled, once each has ended or was lost."""
    outputs: asyncio.Queue[Any] = asyncio.Queue()

    async def read(stream: AsyncGenerator[Any, None]) -> None:
        async with aclosing(stream):
            async for output in stream:
                outputs.put_nowait(output)

    reading = [asyncio.create_task(read(stream)) for stream in rest]
    for task in reading:
        task.add_done_callback(outputs.put_nowait)
    done, lost, left = [one.output for one in ended], list[EngineLost](), len(rest)
    try:
        while left:
            output = await outputs.get()
            if isinstance(output, asyncio.Task):
                if isinstance(error := output.exception(), EngineLost):
                    lost.append(error)
                    left -= 1
                elif error is not None:
                    raise error
                continue
            left -= output.finished
            done += output.outputs if as_whole else ()
            output.request_id, output.finished = request_id, not left and not lost
            if output.finished and as_whole:
                output.outputs = sorted(done, key=lambda completion: completion.index)
            if output.finished or not as_whole:
                yield output
        if lost:
            sampled = [*(_ended(output) for output in done), *(one for error in lost for one in error.sampled)]
            raise EngineLost(str(lost[0]), life=lost[0].life, sampled=sampled, by_itself=lost[0].by_itself) from lost[0]
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


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

        install()
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
        """Completions of a request that its server lost, for another engine."""
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
