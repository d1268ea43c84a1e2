"""One request to the model API, as the parts of the server see it while it is being answered, and its answer while it is sampled.

The attribution middleware puts a `Call` into a context variable; the renderer hook adds the continuation; the engine client takes
it from there. `mocked_server.generation` adds every output of the engine to an `AnswerRecorder`, once; what comes out goes to the
buffer and to the waiting connection (`PendingReply`) alike, so both know the same answer. Nothing is kept after the answer.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from buffers.errors import RequestRefused
from buffers.prompt_queue import Response
from buffers.training_rows import ABORTED
from mocked_server.conversation.chat_history import Conversation
from mocked_server.conversation.continuation import Continuation, Parse
from mocked_server.conversation.live_episodes import LiveEpisode
from mocked_server.fleet.member import Sampled, logprobs_of

T = TypeVar("T")

LARGE_BYTES = 64 * 1024
"""What takes time in proportion to a larger body is done in a thread."""


class Role(NamedTuple):
    """One who answers requests. The policy plays those that are trained."""

    name: str
    is_trained: bool


NO_ROLE = Role("", True)
"""The policy, in a run without roles."""


ChooseByChat = Callable[[Conversation, Parse], Awaitable[LiveEpisode]]
ChooseByBody = Callable[[Mapping[str, Any]], Awaitable[LiveEpisode | ChooseByChat]]


@dataclass(slots=True)
class Call:
    """A request of `live`'s agent. `continuation` is set once a chat was rendered."""

    live: LiveEpisode
    by_body: ChooseByBody | None = None
    """Finds the session that a request with a user's key belongs to. None: the key is an episode's."""
    by_chat: ChooseByChat | None = None
    """The same by its messages, where the body did not tell."""
    held: ExitStack = field(default_factory=ExitStack)
    """Ends with the request."""
    continuation: Continuation | None = None
    generates: bool = False
    """A generation was begun for it."""
    extra_args: dict[str, Any] = field(default_factory=dict)
    """What an observer of requests passes to the engine, in `SamplingParams.extra_args`."""
    answers: list[list[Any]] = field(default_factory=list)
    """vLLM's outputs of each generation that was begun for it as a whole: none until it has ended."""
    tells_text: bool = False
    """vLLM's layer failed at telling `answers`: they are given once more, as the text that they are."""
    failure: Exception | None = None
    """Why nothing was generated for it: a dialect's route may make an answer of its own of that."""
    num_choices: int = 0
    """Answers asked for, over all its prompts."""
    asked_role: str = ""
    """The role that its path names; empty: none."""
    role: Role = NO_ROLE
    """The one who answers it."""
    num_bytes: int = 0
    """Size of its body."""

    @property
    def is_answered(self) -> bool:
        """All that was asked for was sampled, and vLLM's layer has it."""
        return self.failure is None and bool(self.answers) and all(self.answers)

    def join(self, live: LiveEpisode) -> None:
        """The request is this episode's: its agent lives while it is answered."""
        self.live = live
        self.held.enter_context(live.answering())

    async def apart(self, work: Callable[..., T], *arguments: Any) -> T:
        """The result of `work`, which takes time in proportion to the body: of a large one in a thread, so that the event loop goes
        on meanwhile. What runs there must not change what the loop works with."""
        if self.num_bytes <= LARGE_BYTES:
            return work(*arguments)
        return await asyncio.to_thread(work, *arguments)

    def count_choices(self, number: int, *, limit: int) -> None:
        """Raises RequestRefused when the request asks for more than `limit` answers in all."""
        self.num_choices += number
        if self.num_choices > limit:
            raise RequestRefused(
                f"n x prompts must be at most {limit}, got {self.num_choices} or more; send several requests", field="n"
            )


current_call: ContextVar[Call | None] = ContextVar("current_call", default=None)


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """One step of an answer on its way to the connection."""

    output: Any
    """vLLM's RequestOutput; None: the responses are the whole answer."""
    responses: tuple[Response, ...] | None = None
    """The responses of all completions; set in the last part."""


class PendingReply:
    """Carries an answer from the generator to the connection that waits (`buffers.prompt_queue.Reply`). Made on the server's
    event loop; `push`, `finish` and `fail` from any thread, `parts` and `abandon` on the server's loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._parts: asyncio.Queue[AnswerPart | Exception] = asyncio.Queue()
        self._on_abandon: list[Callable[[], object]] = []
        self._ended = False
        self.abandoned = False

    def push(self, output: Any) -> None:
        """Send one engine output to the waiting connection; more follow."""
        self._put(AnswerPart(output))

    def finish(self, *responses: Response, last: Any = None) -> None:
        """The answer is complete. `last`: the engine's last output; None: nothing was pushed."""
        self._put(AnswerPart(last, responses))

    def fail(self, error: Exception) -> None:
        """End the answer with an error that the HTTP layer turns into the dialect's error body."""
        self._put(error)

    def on_abandon(self, callback: Callable[[], object]) -> None:
        """Call `callback()` (from the server's loop) when the client hangs up; at once if it already has."""
        if self.abandoned:
            callback()
        else:
            self._on_abandon.append(callback)

    def abandon(self) -> None:
        """The client went away: what generates for it is stopped. No effect once the last part was taken."""
        if not self.abandoned and not self._ended:
            self.abandoned = True
            for callback in self._on_abandon:
                callback()

    async def parts(self) -> AsyncIterator[AnswerPart]:
        """Yield the parts up to the last one; raise what `fail` was given."""
        while True:
            part = await self._parts.get()
            if isinstance(part, Exception):
                self._ended = True
                raise part
            self._ended = part.responses is not None
            yield part
            if self._ended:
                return

    def _put(self, part: AnswerPart | Exception) -> None:
        try:
            here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            here = False
        if here:
            self._parts.put_nowait(part)
        else:
            self._loop.call_soon_threadsafe(self._parts.put_nowait, part)


@dataclass(slots=True)
class _Completion:
    """One completion while it grows (n > 1 gives several)."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    stop: str = ""
    finish_reason: str = ABORTED
    spans: Sequence[Any] = ()
    experts: Any = None


class AnswerRecorder:
    """Collects one prompt's outputs (deltas, or a single final one) into responses, one per completion.

    Raises RequestRefused for a token without a finite log-probability: the request's constraints left none to sample.
    """

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._completions: dict[int, _Completion] = {}

    def add(self, output: Any) -> None:
        """Take one engine output."""
        for completion in output.outputs:
            part = self._completions.setdefault(completion.index, _Completion())
            ids = list(completion.token_ids)
            logprobs = logprobs_of(completion, ids)
            if not all(map(math.isfinite, logprobs)):
                raise RequestRefused(
                    f"the constraints of this request must leave a token to sample at every position, got none after "
                    f"{len(part.ids)} tokens; loosen structured_outputs, response_format, allowed_token_ids or bad_words"
                )
            part.ids += ids
            part.logprobs += logprobs
            part.text += completion.text
            if isinstance(completion.stop_reason, str):
                part.stop = completion.stop_reason
            if completion.finish_reason is not None:
                part.finish_reason = completion.finish_reason
            part.spans = completion.weight_versions or part.spans
            part.experts = getattr(completion, "routed_experts", None)  # of a whole answer, with its last output

    def so_far(self, number: int) -> list[Sampled]:
        """Unfinished ones of `number` completions, for an engine that continues them."""
        parts = ((index, self._completions.setdefault(index, _Completion())) for index in range(number))
        return [
            Sampled(
                index=index,
                token_ids=part.ids.copy(),
                logprobs=None,
                versions=[(span.version, span.start) for span in part.spans],
                num_sent_chars=len(part.text),
            )
            for index, part in parts
            if part.finish_reason == ABORTED
        ]

    def end(self, finish_reason: str) -> None:
        """Give completions that have not finished this reason."""
        for part in self._completions.values():
            if part.finish_reason == ABORTED:
                part.finish_reason = finish_reason

    def responses(self, *, version: int) -> list[Response]:
        """The completions by their index. `version` labels tokens without a span of the engine's (those of an aborted
        generation)."""
        return [self._response(part, version) for _, part in sorted(self._completions.items())]

    def _response(self, part: _Completion, version: int) -> Response:
        versions = np.full(len(part.ids), version, np.int32)
        for span in part.spans:
            versions[span.start : span.end] = int(span.version)
        return Response(
            request_id=self._request_id,
            sampled_ids=np.array(part.ids, np.int32),
            logprobs=np.array(part.logprobs, np.float32),
            versions=versions,
            finish_reason=part.finish_reason,
            text=part.text,
            stop=part.stop,
            experts=part.experts,
        )
