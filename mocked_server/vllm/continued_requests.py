"""Lets an engine continue what another one has begun to sample: its outputs are as if it had been one engine all along.

The engine's core gets prompt and sampled tokens as one prompt; vLLM's state of the request in this process, which counts tokens,
decodes text and finds stop strings, is brought to where the other engine was. Called by `mocked_server.vllm.engine` and
`mocked_server.servers.server_engine`. Seams relied on (tests/mocked_server/vllm/test_vllm_seams.py):
`RequestState.from_new_request`, its detokenizer, log-probabilities and weight version starts.

Invariants: no character is sent twice or left out, also within a character of several tokens and within a stop string; versions
are those of the engines that sampled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from copy import copy
from dataclasses import replace
from typing import Any

from mocked_server.fleet.member import EngineLost, Sampled
from mocked_server.vllm.adapters import label_of

_continued: dict[str, tuple[int, Sampled]] = {}
"""Id of a request that is about to begin -> length of its own prompt, and what was sampled of it."""


def install() -> None:
    """Hook into vLLM, once for a process."""
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
    """What it was to continue, of a request that ended before vLLM knew it."""
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
    """What a dead engine had sampled of a request whose answer comes as a whole, in this process's state of it."""
    processor = llm.output_processor
    states = [
        processor.request_states[inner]
        for inner in processor.external_req_ids.get(request_id, ())
        if inner in processor.request_states
    ]
    found = [_sampled(state) for state in states]
    parents: Sequence[Any] = [state.parent_req for state in states if state.parent_req is not None]
    if parents:
        ended = [output for output in parents[0].output_aggregator if output is not None]
        found += [_ended(output) for output in ended]
    return sorted(found, key=lambda sampled: sampled.index)


def given_up(output: Any) -> list[Sampled]:
    """What was sampled of a request that its engine gives up, as one does that was told to end (SIGTERM); empty: it does not."""
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
