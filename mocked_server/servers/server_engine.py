"""An engine of the fleet that is an inference server: asked over HTTP with token ids, given weights by the name of a folder.

Made by `mocked_server.servers.choose`. Which software the server runs is found out when it starts (`vllm_server`, `sglang_server`);
the server itself is one that its owner started (`RunningServer`) or a child of this process (`SGLangProcess`). Text, stop strings
and several completions of one request are made here, by vLLM's own parts (`mocked_server.vllm.engine_requests`).

Invariants: weights change only while the server is paused and its cache dropped, and not before all streams are silent, so a token
has one version: the server's own label at the end of an answer, and until then the version that was in force when it came. A
server that is lost loses all that it was sampling to EngineLost; closing a generation hangs up, which ends it at the server.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from buffers.errors import EngineDied, EngineError, RequestFailed, RequestRefused
from mocked_server.fleet.member import EngineFigures, EngineLost
from mocked_server.servers.http_client import (
    KEY,
    Needs,
    ServerClient,
    ServerFacts,
    ServerLost,
    ServerRefused,
    check_facts,
)
from mocked_server.servers.sglang_server import SGLangProcess, SGLangServer
from mocked_server.servers.vllm_server import VLLMServer
from mocked_server.vllm.engine import EngineBase, tokens_of
from mocked_server.vllm.engine_requests import MAX_MESSAGE_CHARS, Completion, ServedRequests, Tokens

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks at whether the server lives."""
RETRY_S = 0.5
MOST_LOGPROB = 1e-5
"""Rounding may make a logarithm of one."""
UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors of reading an answer that is not what it should be."""
SETTLE_S = 0.05
"""Streams that were silent for so long, of a server that is paused, have nothing more on its way."""


Server = VLLMServer | SGLangServer
"""One server's routes. Any call may raise ServerLost or ServerRefused; `identify` comes first."""


async def recognised(client: ServerClient) -> Server:
    """The server behind `client`. Raises ServerLost where nobody answers, EngineError for another software."""
    for software in (VLLMServer, SGLangServer):
        if await software.recognise(client) is not None:
            return software(client)
    raise EngineError(
        f"{KEY} must be the URL of a vLLM or SGLang server, got {client.url}, where another program answers: it has neither "
        f"/version nor /model_info; name the server's root, without a path"
    )


class RunningServer:
    """A server that runs already, at `url`; it is never ended. `timeout_s`: one that was lost may take so long to come back."""

    begins_with_model = False
    """True if it has the run's model when it starts; else the model is loaded into it."""
    has_ended = False

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self.url = url
        self._timeout_s = timeout_s
        self._was_there = False

    async def start(self) -> str:
        """Returns once it answers. Raises EngineDied where nobody does."""
        deadline = time.monotonic() + (self._timeout_s if self._was_there else 0.0)
        while True:
            client = ServerClient(self.url)
            try:
                await recognised(client)
                self._was_there = True
                return self.url
            except ServerLost as error:
                if time.monotonic() > deadline:
                    raise EngineDied(nobody_answers(self.url, error)) from error
            finally:
                await client.close()
            await asyncio.sleep(RETRY_S)

    async def end(self) -> None:
        """Nothing: its owner ends it."""


def nobody_answers(url: str, error: Exception) -> str:
    """The refusal of a URL."""
    return f"{KEY} must be the URL of a running server, got {url}, where nobody answers ({error}); start it first"


class ServerEngine(EngineBase):
    """`requests`: makes vLLM's outputs; one for each engine. `weights`: (folder, version) to begin with; None: the model's own, of
    `model`, as version 0."""

    def __init__(
        self,
        place: RunningServer | SGLangProcess,
        requests: ServedRequests,
        *,
        model: Path,
        needs: Needs,
        weights: tuple[Path, int] | None = None,
        timeout_s: float = 120.0,
        name: str = "e0",
    ) -> None:
        super().__init__(name, timeout_s=timeout_s)
        self._place = place
        self._requests = requests
        self._model = model
        self._needs = needs
        self._weights = weights
        self._timeout_s = timeout_s
        self._url = ""
        self._client: ServerClient | None = None
        self._server: Server | None = None
        self._facts: ServerFacts | None = None
        self._is_up = False
        self._dead = asyncio.Event()
        self._loading = asyncio.Lock()
        self._last_tokens_at = 0.0

    @property
    def is_up(self) -> bool:
        """It takes requests."""
        return self._is_up

    async def start(self) -> None:
        """Returns when the server takes requests, with the run's weights. Raises EngineDied where it was lost meanwhile,
        EngineError for a server that cannot be used."""
        self._life += 1
        self._dead = asyncio.Event()
        self._url = await self._place.start()
        self._client = ServerClient(self._url)
        try:
            self._server, self._facts = await examined(self._client, needs=self._needs)
            await self._load_first()
        except ServerRefused as error:
            raise EngineError(f"{KEY}={self._url} cannot be used, it answered {error}") from error
        self._is_up = True
        self._watching = asyncio.create_task(self._watch(), name=f"watch engine {self.name}")

    async def _load_first(self) -> None:
        assert self._facts is not None
        loaded: tuple[Path, int] | None = None
        while True:
            weights = self._weights
            if weights is None and not self._place.begins_with_model:
                weights = (self._model, 0)
            if weights is None or weights == loaded:
                return
            if not self._facts.no_weights:
                await self._load(*weights)
            loaded = weights

    async def until_dead(self) -> None:
        """Returns when the server is lost."""
        await self._dead.wait()

    async def close(self) -> None:
        """Leave the server; a child process is ended. What it was still answering ends with EngineLost."""
        self._is_up = False
        self._dead.set()
        await self._end_watching()
        client, self._client = self._client, None
        if client is not None:
            await client.close()
        await self._place.end()

    def _lose(self, why: str, *, life: int) -> None:
        """The server of that life is lost: what still read from a former one says so late, when its successor may be there."""
        if life != self._life:
            return
        if self._is_up:
            logger.error("the server of engine %s (%s) is lost: %s", self.name, self._url, why)
        self._is_up = False
        self._dead.set()

    async def _watch(self) -> None:
        """Find out that the server is lost: nobody answers, it says so itself, its process is gone, or it makes no progress."""
        client, server, life = self._client, self._server, self._life
        assert client is not None and server is not None
        deaf = asyncio.create_task(self._silence.lasting(self._answers))
        try:
            while not deaf.done():
                await asyncio.wait({deaf}, timeout=LOOK_S)
                if self._place.has_ended:
                    return self._lose("its process is gone", life=life)
                if self._loading.locked():
                    continue
                try:
                    await client.get(server.alive, timeout_s=self._timeout_s)
                except (ServerLost, ServerRefused) as error:
                    if not self._loading.locked():
                        return self._lose(str(error), life=life)
            self._lose("it makes no progress with requests waiting", life=life)
        finally:
            deaf.cancel()

    async def _answers(self) -> None:
        assert self._client is not None and self._server is not None
        life = self._life
        try:
            await self._client.get(self._server.answers)
        except (ServerLost, ServerRefused) as error:
            self._lose(str(error), life=life)

    # Generation

    async def _generate(
        self, ids: list[int], params: Any, request_id: str, extra: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        server, life = self._server, (self.name, self._life)
        if not self._is_up or server is None:
            raise EngineLost(
                f"the server of engine {self.name} is lost", life=life, sampled=self._requests.lost(request_id)
            )
        reading: list[asyncio.Task[None]] = []
        try:
            server.check(params)
            completions, queue = self._requests.begin(ids, params, request_id=request_id, extra=extra)
            with self._silence.expecting():
                reading += [asyncio.create_task(self._read(server, one, queue.put)) for one in completions]
                finished = False
                while not finished:
                    output = await queue.get()
                    finished = output.finished
                    self._count(output)
                    with self._silence.given():
                        yield output
        except (ServerLost, EngineDied) as error:
            self._lose(str(error), life=life[1])
            raise EngineLost(
                f"the server of engine {self.name} was lost while it answered {request_id}: {error}",
                life=life,
                sampled=self._requests.lost(request_id),
            ) from error
        except ServerRefused as error:
            raise _request_error(error) from error
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
            self._requests.end(request_id)

    async def _read(self, server: Server, completion: Completion, put: Callable[[Any], None]) -> None:
        """Bring one completion's tokens from the server into the request's queue, and what ends it there."""
        ended, num_sampled = False, 0
        try:
            async with aclosing(server.sample(completion)) as stream:
                async for tokens in stream:
                    self._silence.heard()
                    self._last_tokens_at = time.monotonic()
                    if tokens.finish_reason == "abort":
                        raise ServerLost("it gave its requests up, as a server does that ends")
                    if tokens.versions is not None and self._facts is not None and self._facts.no_weights:
                        tokens = replace(tokens, versions=None)  # labels of its owner's, and not of this run's
                    num_sampled += len(tokens.token_ids)
                    check_sampled(
                        tokens, completion, num=num_sampled, vocabulary=self._needs.vocabulary, newest=self.version
                    )
                    ended = self._requests.feed(completion, tokens, version=self.version)
                    if ended:
                        break
            if not ended:
                raise ServerLost("its answer ended without a reason")
        except EngineError as error:
            put(error)
        except UNREADABLE as error:
            put(
                RequestFailed(
                    f"the server at {self._url} answered what cannot be read ({type(error).__name__}: {error})"
                )
            )

    # Weights and memory

    async def load_weights(self, folder: Path, *, version: int) -> float:
        """Sample with these weights from now on: running requests freeze and continue. Returns the seconds that they froze. A
        server that is lost gets them with its restart. Raises EngineError where it refuses them; it stays paused then."""
        self._weights = folder, version
        if not self._is_up:
            return 0.0
        began, life = time.monotonic(), self._life
        try:
            await self._load(folder, version)
        except ServerLost as error:
            self._lose(str(error), life=life)
            return 0.0
        return time.monotonic() - began

    async def _load(self, folder: Path, version: int) -> None:
        server = self._server
        assert server is not None
        async with self._loading:
            with self._silence.expecting(), self._silence.long_work():
                try:
                    await server.pause()
                    await self._settled()
                    await server.load(folder, version=version)
                    self.version = version
                    await server.resume()
                except ServerRefused as error:
                    raise EngineError(
                        f"{KEY} must be a server that can load the run's weights, got {self._url}, which answered {error}; it "
                        f"needs a model of the same shape, and must see the folder {folder}"
                    ) from error

    async def _settled(self) -> None:
        """Wait until what was sampled before the pause has arrived."""
        paused_at = time.monotonic()
        while self._requests.under_way():
            left = max(paused_at, self._last_tokens_at) + SETTLE_S - time.monotonic()
            if left <= 0:
                return
            await asyncio.sleep(left)

    async def sleep(self) -> None:
        """A server's memory is its own: `rollout.sleep` is refused at the start."""

    async def wake_up(self) -> None:
        """Undo `sleep`."""

    def figures(self) -> EngineFigures:
        """See `EngineFigures`. A server does not say how often it set a request aside."""
        states = self._requests.under_way()
        return self._figures(
            states, kv_capacity=0 if self._facts is None else self._facts.kv_capacity, held=tokens_of(states)
        )


def check_sampled(tokens: Tokens, completion: Completion, *, num: int, vocabulary: int, newest: int) -> None:
    """Raises ValueError where no sampler of the run's model can have said this: it would be trained, or end what reads it. `num`:
    tokens of the completion up to here; `newest`: version of the weights that the server was given last."""

    def whole(value: object, most: int) -> bool:
        return type(value) is int and 0 <= value <= most

    pairs = [pair for row in tokens.logprobs for pair in row]
    for token in (*tokens.token_ids, *(token for token, _ in pairs)):
        if not whole(token, vocabulary - 1):
            raise ValueError(f"a token's id must be from 0 to {vocabulary - 1}, got {token!r:.40}")
    for _, value in pairs:
        if type(value) not in (int, float) or not value <= MOST_LOGPROB:
            raise ValueError(f"a log-probability must be at most 0, got {value!r:.40}")
    if num > completion.params.max_tokens:
        raise ValueError(f"at most {completion.params.max_tokens} tokens were asked for, got {num}")
    if tokens.finish_reason not in (None, "stop", "length", "abort", "error"):
        raise ValueError(f"finish_reason must be stop, length, abort or error, got {tokens.finish_reason!r:.40}")
    if tokens.stop_reason is not None and type(tokens.stop_reason) not in (int, str):
        raise ValueError(f"stop_reason must be a text or a token's id, got {tokens.stop_reason!r:.40}")
    if not all(whole(rank, vocabulary) for rank in tokens.ranks):
        raise ValueError(f"ranks must be from 0 to {vocabulary}, got {tokens.ranks!r:.40}")
    if tokens.num_cached_tokens is not None and not whole(tokens.num_cached_tokens, len(completion.prompt_token_ids)):
        raise ValueError(f"cached tokens must be some of the prompt's, got {tokens.num_cached_tokens!r:.40}")
    for label, start in tokens.versions or ():
        if not (_is_version(label, newest=newest) and whole(start, num)):
            raise ValueError(
                f"weight versions must be up to {newest}, from a token up to {num} on, got {label!r:.40} from {start!r:.40} on"
            )


def _is_version(label: object, *, newest: int) -> bool:
    text = str(label)[:20]
    return text.isascii() and text.isdecimal() and int(text) <= newest


def _request_error(error: ServerRefused) -> RequestRefused | RequestFailed:
    if 400 <= error.status < 500:
        return RequestRefused(error.text[:MAX_MESSAGE_CHARS], field=error.field)
    return RequestFailed(f"the server failed on this request: {error.text[:MAX_MESSAGE_CHARS]}")


async def examined(client: ServerClient, *, needs: Needs) -> tuple[Server, ServerFacts]:
    """The server behind `client`, and what it says of itself, once it is seen to give what the run needs. Raises EngineError for
    one that cannot be the engine; ServerLost, ServerRefused."""
    try:
        server: Server = await recognised(client)
        facts = await server.identify()
        check_facts(facts, url=client.url, needs=needs)
        await check_tokens(server, url=client.url, vocabulary=needs.vocabulary)
    except UNREADABLE as error:
        raise EngineError(
            f"{KEY} must be a vLLM or SGLang server of a version that is known, got {client.url}, which answers what cannot be "
            f"read ({type(error).__name__}: {error}); use vLLM >= 0.32, < 0.34 or SGLang 0.5.23"
        ) from error
    return server, facts


async def check_tokens(server: Server, *, url: str, vocabulary: int) -> None:
    """Ask for one token after the last id of the vocabulary, and after the id beyond it. Raises EngineError for a server that does
    not give ids with log-probabilities, or has another vocabulary; ServerLost."""
    try:
        tokens = await _first_token(server, vocabulary - 1)
    except ServerRefused as error:
        why = f"token id {vocabulary - 1}" if error.status == 400 else "the request"
        raise EngineError(
            f"{KEY} must take and give token ids of model.path's vocabulary of {vocabulary}, got {url}, which refuses {why}: "
            f"{error}; serve the same model, with the route for token ids"
        ) from error
    if len(tokens.token_ids) != 1 or len(tokens.logprobs) != 1 or not tokens.logprobs[0][0][1] <= 0.0:
        raise EngineError(
            f"{KEY} must give each token's id and log-probability, got {url}, which gave {tokens.token_ids} with "
            f"{tokens.logprobs}; use vLLM >= 0.32 or SGLang"
        )
    with suppress(ServerRefused):
        await _first_token(server, vocabulary)
        raise EngineError(
            f"{KEY} must serve model.path's vocabulary of {vocabulary} tokens, got {url}, which has more; serve the same model"
        )


async def _first_token(server: Server, token_id: int) -> Tokens:
    from mocked_server.vllm.engine_requests import probe

    async with aclosing(server.sample(probe(token_id))) as stream:
        parts = [tokens async for tokens in stream]
    joined = [token for tokens in parts for token in tokens.token_ids]
    return Tokens(token_ids=joined, logprobs=[row for tokens in parts for row in tokens.logprobs])
