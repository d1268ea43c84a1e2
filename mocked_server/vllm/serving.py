"""vLLM's own OpenAI and Anthropic HTTP layer, with our two hooks: exact continuation, and generation through the prompt queue.

vLLM's serving code is used as it is; it is given `QueueClient` in place of an engine. Rendering a chat passes `ExactRendering`,
every generation of every dialect passes `QueueClient.generate`. The engine itself may be anywhere: this module never boots one.

Seams relied on (checked by tests/mocked_server/vllm/test_vllm_seams.py): the serving layer reads
`engine_client.renderer`; chats are rendered by `render_chat_async`; generations go through `engine_client.generate`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from argparse import Namespace
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from uuid import uuid4

import msgspec
import numpy as np
from pydantic_core import SchemaValidator

from buffers.did_you_mean import one_of
from buffers.errors import EngineError, RequestRefused
from buffers.prompt_queue import Prompt, Response, Sampling
from buffers.records import Int32
from configs.schema import RolloutConfig
from mocked_server.conversation.continuation import Continuation, continue_tokens
from mocked_server.conversation.live_episodes import LiveEpisode, LiveRound, memo_of
from mocked_server.fleet.engine_fleet import EngineFleet
from mocked_server.fleet.member import ADAPTER_OF
from mocked_server.http.dialects import FAILURES, GENERATE, SERVED, SLEEP, WAKE_UP, failure_of
from mocked_server.request_context import (
    LARGE_BYTES,
    NO_ROLE,
    AnswerPart,
    Call,
    PendingReply,
    Role,
    current_call,
)
from mocked_server.vllm.engine_requests import refusal_of
from mocked_server.vllm.exact_rendering import ExactRendering
from mocked_server.vllm.reply_parser import ReplyParser, send_any_input, tell_true_ends, telling
from mocked_server.vllm.sampling_rules import MAX_CHOICES, SamplingRules, leave_limits_to_the_run, leave_tool_calls_free

if TYPE_CHECKING:
    from fastapi import FastAPI

T = TypeVar("T")

PASSED_ON = ("reasoning_ended", "reasoning_parser_kwargs", "lora_request")
"""Arguments of `generate` that the engine needs too."""


class PromptSink(Protocol):
    """A sink of prompts to be generated: the queue of this process, or the way to the run's."""

    def put(self, prompt: Prompt) -> None:
        """Raises queue.Full, QueueClosed, EngineError."""
        ...


class Honoured(msgspec.Struct):
    """The sampling parameters that have an effect, with their types; ranges are vLLM's."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    seed: int | None = None


HONOURED = Honoured.__struct_fields__
PINNED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logprobs", "n", "detokenize")
"""verl's loops pass these; the run decides."""
STOP_REASONS = {"stop": "completed", "length": "length", "abort": "aborted"}


@dataclass(frozen=True, slots=True)
class TokenRoute:
    """`POST /generate`: token ids in, token ids out, for agent loops (verl's `AsyncLLMServer.generate`).

        {"prompt_ids": [int, ...], "sampling_params": {"max_tokens": 64, "stop": ["</code>"]}, "model": ROLE}
        -> {"token_ids": [...], "log_probs": [...], "versions": [...], "stop_reason": "completed" | "length", "num_preempted": 0,
            "is_trained": true}

    With an episode's key the generation is a round of that episode, like any other; with the worker's key nothing is
    recorded. `model`: who answers, in a run with roles; left out, the first. Temperature and the rest of the distribution are the
    run's: what loops pass for them is accepted and has no effect. `POST /sleep` and `POST /wake_up` (worker's key) are the
    engine's, where the server has one.
    """

    client: QueueClient

    async def answer(self, request: Any) -> Any:
        """The route (starlette)."""
        from starlette.responses import JSONResponse

        try:
            body = await request.body()
            is_large = len(body) > LARGE_BYTES
            prompt_ids, params = await asyncio.to_thread(self._read, body) if is_large else self._read(body)
            answer = await self.client.generate_tokens(prompt_ids, params, request_id=f"generate-{uuid4().hex}")
        except (ValueError, TypeError) as error:
            raise error if isinstance(error, RequestRefused) else RequestRefused(str(error)) from error
        assert answer.responses is not None
        (response,), metrics = answer.responses, answer.output.metrics
        return JSONResponse({
            "token_ids": response.sampled_ids.tolist(),
            "log_probs": response.logprobs.tolist(),
            "versions": response.versions.tolist(),
            "stop_reason": STOP_REASONS.get(response.finish_reason, response.finish_reason),
            "num_preempted": 0 if metrics is None else getattr(metrics, "num_preemptions", 0),
            "is_trained": _role().is_trained,
        })  # fmt: skip

    async def rest(self, request: Any) -> Any:
        """The routes of sleep and wake_up: the engine's cache is given back, and its weights wait in main memory where it can do
        that, until it is woken."""
        from starlette.responses import Response

        if (engine := self.client.sleeper) is not None:
            await (engine.sleep() if request.url.path == SLEEP else engine.wake_up())
        return Response(status_code=200)

    def _read(self, body: bytes) -> tuple[list[int], Any]:
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        try:
            fields = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the body must be JSON, got {body[:60]!r} ({error}); send prompt_ids") from error
        known = {"prompt_ids", "sampling_params"} | ({"model"} if _role() is not NO_ROLE else set())
        if not isinstance(fields, dict) or fields.keys() - known:
            raise ValueError(
                f"the body must hold prompt_ids and sampling_params, got {str(fields)[:80]}; send these two"
                + ("" if "model" in known else ", and a model in a run with roles")
            )
        ids = fields.get("prompt_ids")
        if not isinstance(ids, list) or not ids or not all(type(one) is int and abs(one) < 2**31 for one in ids):
            raise ValueError(f"prompt_ids must be a list of token ids, not empty, got {str(ids)[:80]}; send integers")
        given = fields.get("sampling_params") or {}
        if not isinstance(given, dict):
            raise ValueError(f"sampling_params must be an object, got {str(given)[:80]}; send {{}}")
        for name in given:
            if name not in HONOURED and name not in PINNED:
                raise ValueError(f"sampling_params must hold {one_of(name[:60], HONOURED)}")
        honoured = {name: value for name, value in given.items() if name in HONOURED and value is not None}
        try:
            msgspec.convert(honoured, Honoured)
            return ids, SamplingParams(**honoured, output_kind=RequestOutputKind.FINAL_ONLY)
        except (msgspec.ValidationError, VLLMClientError, ValueError, TypeError, OverflowError) as error:
            raise refusal_of(error) from error


def _role() -> Role:
    """The role that answers the current request."""
    call = current_call.get()
    return NO_ROLE if call is None else call.role


@dataclass(frozen=True, slots=True)
class _Generation:
    """A prompt that is ready for the queue. `live`, `plan`: of its episode; None: it has none."""

    prompt: Prompt
    reply: PendingReply
    live: LiveEpisode | None
    plan: Continuation | None

    def remember(self, responses: Sequence[Response]) -> None:
        """Make each completion a round that a later request can continue."""
        live, plan = self.live, self.plan
        if live is None or plan is None:
            return
        for response in (each for each in responses if each.round_index is not None):
            live_round = LiveRound(
                parent=plan.parent,
                ids=np.concatenate([plan.tail_ids, response.sampled_ids]),
                num_sampled=len(response.sampled_ids),
                finish_reason=response.finish_reason,
                text=response.text or "",
                stop=response.stop,
                asked=plan.chat.asked if plan.chat else None,
                cause=plan.cause,
                round_index=response.round_index,
            )
            live.add_round(live_round, chat=plan.chat)


class QueueClient:
    """The engine client of vLLM's serving layer: every generation becomes a `Prompt` in the queue."""

    errored = False
    dead_error = EngineError("the engine died")

    def __init__(
        self,
        vllm_config: Any,
        *,
        queue: PromptSink,
        rollout: RolloutConfig,
        strict: bool,
        default_role: Role = NO_ROLE,
    ) -> None:
        """`default_role`: of prompts that name none."""
        from vllm.exceptions import VLLMClientError
        from vllm.renderers import renderer_from_config
        from vllm.v1.engine.input_processor import InputProcessor

        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.renderer = renderer_from_config(vllm_config)
        self.rendering = ExactRendering(self.renderer, strict=strict, refusal=VLLMClientError)
        self.input_processor = InputProcessor(vllm_config, self.renderer)
        self.sleeper: EngineFleet | None = None
        self._queue = queue
        self._rollout = rollout
        self._default_role = default_role
        self._rules = SamplingRules(self.input_processor, rollout=rollout)

    def check_admission(self, *_: Any, **__: Any) -> None:
        """Admission is the task pool's: a request of a running episode is always taken."""

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """Generation only."""
        return ("generate",)

    async def do_log_stats(self) -> None:
        """vLLM's statistics belong to the engine, not to this client."""

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any) -> AsyncIterator[Any]:
        """Queue one generation and yield its outputs. A plain function: the context variable is read in the caller's
        context."""
        call = current_call.get()
        if call is None:
            raise ValueError("this request belongs to no episode; use the api_key that came with the task")
        if call.tells_text:
            return _again(call.answers.pop(0))
        if (
            prompt.get("type") != "token"
        ):  # else a model that sees would be shown, and trained on, the places of images alone
            raise RequestRefused(
                "only text is served: an image would not be recorded; describe it in words", field="messages"
            )
        rendered = list(prompt["prompt_token_ids"])
        plan = call.continuation or continue_tokens(call.live, rendered)
        call.continuation = None  # a second prompt of the same request (completions with a list) is planned on its own
        extra = {k: kwargs[k] for k in PASSED_ON if kwargs.get(k) is not None}
        if (parser_kwargs := extra.get("reasoning_parser_kwargs")) is not None:
            self._rules.check_sendable(parser_kwargs)
        call.count_choices(getattr(sampling_params, "n", 1), limit=MAX_CHOICES)
        generation = self._prepare(
            request_id, plan.prompt_ids(), sampling_params, call=call, live=call.live, plan=plan, extra=extra
        )
        call.generates = True
        call.answers.append([])
        return self._outputs(generation, call=call, rendered=rendered, answer=call.answers[-1])

    async def ask(
        self,
        live: LiveEpisode,
        messages: list[dict[str, Any]],
        *,
        request_id: str,
        max_tokens: int | None = None,
    ) -> str:
        """One generation without an HTTP request: a plain prompt of a task file. Returns the text."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        tokenizer = self.renderer.get_tokenizer()
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
        params = SamplingParams(
            max_tokens=max_tokens or self._rollout.max_tokens, output_kind=RequestOutputKind.FINAL_ONLY
        )
        answer = await self._whole(self._prepare(request_id, ids, params, live=live))
        return str(answer.output.outputs[0].text)

    async def generate_tokens(self, prompt_ids: list[int], params: Any, *, request_id: str) -> AnswerPart:
        """Sample after exactly these ids: for the current call's episode, or unrecorded without one."""
        call = current_call.get()
        live = None if call is None else call.live
        return await self._whole(
            self._prepare(request_id, np.array(prompt_ids, np.int32), params, call=call, live=live)
        )

    def _prepare(
        self,
        request_id: str,
        ids: Int32,
        params: Any,
        *,
        live: LiveEpisode | None,
        call: Call | None = None,
        plan: Continuation | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> _Generation:
        """A generation after exactly these ids, by the run's rules. `live`: None: nothing of it is recorded. `plan`: None: it
        continues the longest round of the episode that the ids start with. Raises RequestRefused."""
        if live is not None:
            live.check_room()
            plan = plan or continue_tokens(live, ids)
        role = self._default_role if call is None else call.role
        first_trained = self._rules.apply(params, prompt=ids, live=live, is_trained=role.is_trained)
        if call is not None and call.extra_args:
            params.extra_args = {**(params.extra_args or {}), **call.extra_args}
        reply = PendingReply()
        name = "" if live is None else live.adapter()
        adapter = {ADAPTER_OF: name} if name else {}
        live = live if live is None or live.is_recorded else None
        prompt = Prompt(
            request_id=request_id,
            episode_id=None if live is None else live.episode_id,
            group_id=None if live is None else live.episode.group_id,
            prompt_token_ids=ids,
            sampling=Sampling(params=params, extra={**(extra or {}), **adapter}),
            reply=reply,
            parent=None if plan is None else plan.parent_index,
            memo=b"" if plan is None else memo_of(plan.chat, plan.cause),
            first_trained=first_trained,
            role="" if live is None else role.name,
        )
        return _Generation(prompt, reply, live, plan)

    async def _outputs(
        self, generation: _Generation, *, call: Call, rendered: list[int], answer: list[Any]
    ) -> AsyncIterator[Any]:
        """The outputs as they come. `rendered`: the prompt as vLLM's layer made it; `answer`: gets the output of a generation that
        comes as a whole."""
        has_begun = False
        try:
            async with aclosing(self._parts(generation)) as parts:
                async for part in parts:
                    is_whole, has_begun = part.responses is not None and not has_begun, True
                    # vLLM's reasoning parsers look at the prompt: they must see this request's rendering, not earlier thoughts.
                    part.output.prompt_token_ids = rendered
                    if is_whole:
                        answer.append(part.output)
                    yield part.output
        except FAILURES as error:
            if not has_begun:
                call.failure = error
            raise

    async def _whole(self, generation: _Generation) -> AnswerPart:
        """The last part of an answer: all of it, where it comes in one part."""
        *_, last = [part async for part in self._parts(generation)]
        return last

    async def _parts(self, generation: _Generation) -> AsyncGenerator[AnswerPart, None]:
        """Queue a prompt, and yield its answer as it comes. The last part has vLLM's form of it; its completions become rounds that
        a later request can continue."""
        try:
            self._queue.put(generation.prompt)
            async for part in generation.reply.parts():
                if part.responses is not None:
                    responses = tuple(map(self._decoded, part.responses))
                    generation.remember(responses)
                    part = AnswerPart(_output_of(responses) if part.output is None else part.output, responses)
                yield part
        finally:
            generation.reply.abandon()

    def _decoded(self, response: Response) -> Response:
        """An answer that came as tokens only (the RFC's rollout) gets its text here."""
        if response.text is not None:
            return response
        text = self.renderer.get_tokenizer().decode(response.sampled_ids.tolist(), skip_special_tokens=True)
        return replace(response, text=text)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"vLLM's serving layer asked the engine client for {name!r}, which this version does not offer"
        )


async def _again(answer: list[Any]) -> AsyncIterator[Any]:
    """Outputs that were generated already."""
    for output in answer:
        yield output


def _output_of(responses: Sequence[Response]) -> Any:
    """vLLM's form of an answer that no engine output came with."""
    from vllm.outputs import CompletionOutput, RequestOutput

    completions = [
        CompletionOutput(
            index=index,
            text=response.text or "",
            token_ids=response.sampled_ids.tolist(),
            cumulative_logprob=None,
            logprobs=None,
            finish_reason=response.finish_reason,
        )
        for index, response in enumerate(responses)
    ]
    return RequestOutput(
        request_id=responses[0].request_id,
        prompt=None,
        prompt_token_ids=[],
        prompt_logprobs=None,
        outputs=completions,
        finished=True,
    )


async def build_serving_app(args: Namespace, client: QueueClient) -> FastAPI:
    """vLLM's application with `client` for its engine, reduced to the routes of the model API."""
    from vllm import envs
    from vllm.entrypoints.openai.api_server import build_app, init_app_state

    envs.enable_envs_cache()  # vLLM reads its settings from the environment for each part of each message
    leave_tool_calls_free()
    leave_limits_to_the_run()
    send_any_input()
    stop_at_the_first_fault()

    tasks = ("generate",)
    root = logging.getLogger()
    level = root.level
    app: FastAPI = build_app(args, tasks, client.model_config)
    root.setLevel(level)  # a library that this imports sets it to ERROR, which would hide this program's warnings
    await init_app_state(client, app.state, args, tasks)
    client.rendering.parse = ReplyParser(
        app.state.online_renderer.parser, tokenizer=client.renderer.get_tokenizer(), model_config=client.model_config
    )
    chat, responses, messages = (
        getattr(app.state, name)
        for name in ("openai_serving_chat", "openai_serving_responses", "anthropic_serving_messages")
    )
    chat.parser_cls, responses.parser = telling(chat.parser_cls), telling(responses.parser)
    messages.parser_cls = telling(messages.parser_cls, in_objects=True)
    tell_true_ends(chat=chat, responses=responses, messages=messages)
    # Metrics and CORS of a public server: each costs every request of an agent some of its time.
    app.user_middleware.clear()
    app.middleware_stack = None
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) in SERVED]
    tokens = TokenRoute(client)
    for path, endpoint in ((GENERATE, tokens.answer), (SLEEP, tokens.rest), (WAKE_UP, tokens.rest)):
        app.router.add_route(path, endpoint, methods=["POST"])
    for kind in FAILURES:
        app.add_exception_handler(kind, _fail)
    messages.create_messages = _telling(messages.create_messages)
    messages.count_tokens = _telling(messages.count_tokens)
    return app


def _telling(serve: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """Wraps `serve`, one of Anthropic's routes; its call knows why there is no answer, of which vLLM's route makes a 500."""

    async def telling(*args: Any, **kwargs: Any) -> T:
        try:
            return await serve(*args, **kwargs)
        except FAILURES as error:
            if (call := current_call.get()) is not None:
                call.failure = error
            raise

    return telling


async def _fail(request: Any, error: Exception) -> Any:
    """One of `FAILURES`, before its answer has begun."""
    failure = failure_of(error)
    assert failure is not None
    return failure.response(request.url.path)


# A list in a request is read up to its first item that is not as it should be. pydantic tries each item as every kind of item,
# and keeps what is wrong with each: 233 errors for one item of a Responses input, so that 4,096 of them, which are 40 KB, take
# some 12 s of the event loop and gigabytes. The first says as much. Seam relied on (tests/mocked_server/test_event_loop.py):
# the requests are pydantic models, whose core schema is a tree of mappings and lists.


def stop_at_the_first_fault() -> None:
    """Changes how vLLM's requests are validated; a second time nothing happens."""
    from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    requests: tuple[Any, ...] = (
        ChatCompletionRequest, CompletionRequest, ResponsesRequest, AnthropicMessagesRequest, AnthropicCountTokensRequest,
    )  # fmt: skip
    for model in requests:
        _mark_lists(model.__pydantic_core_schema__, seen=set())
        model.__pydantic_validator__ = SchemaValidator(model.__pydantic_core_schema__)


def _mark_lists(schema: Any, *, seen: set[int]) -> None:
    if id(schema) in seen:
        return
    seen.add(id(schema))
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for each in schema.values():
            _mark_lists(each, seen=seen)
    elif isinstance(schema, list | tuple):
        for each in schema:
            _mark_lists(each, seen=seen)
