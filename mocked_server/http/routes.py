"""Our own HTTP routes beside vLLM's: tasks, scores, and the server's state. The only file that knows FastAPI and
Prometheus' client.

| route            | key    | what it does                                                                     |
|------------------|--------|----------------------------------------------------------------------------------|
| `GET /tasks`     | worker | leases the next episode: its key and its task (`?wait=` seconds; 204: none yet; 410: no more) |
| `POST /tasks`    | admin  | adds tasks (`{"tasks": [row, ...]}` in verl's columns)                            |
| `POST /scores`   | scorer | `{"episode_id", "score"}`, or `{"episode_id", "failed": reason}`; see `ScoreBody`  |
| `GET /episode`   | scorer | the task with its ground truth, of the episode whose key is in `X-Episode-Key`    |
| `POST /feedback` | user's | what is thought of a session, a round or an answer: see `FeedbackBody`; the scorer's key will do |
| `GET /health`    | none   | 200 while the server answers                                                      |
| `POST /versions` | admin  | serves another version to users: see `VersionBody` |
| `POST /forget`   | admin  | overwrites sessions of users: see `ForgetBody` |
| `GET /status`    | admin  | counts of everything, as JSON                                                     |

A leased episode is owned by the server process that was asked for it. The administrator's routes are an application of their own,
on a port of its own. Every route but `/health` has a key among its dependencies. While the disk is full, what would have to be
stored is answered with 507 and Retry-After.

`GET /metrics` of the administrator's port has engines and counts as Prometheus reads them, from a registry of its own: what other
libraries count in this process is not on the page, and nothing is kept between two scrapes. Names:
`understudy_engine_<figure>{engine="e0"}`, and `understudy_` with the name that a count has in `GET /status` (`pool/running`:
`understudy_pool_running`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal, Protocol

from fastapi import Depends, FastAPI, Header, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException

from buffers.errors import (
    EpisodeClosed,
    EpisodeError,
    ScoreConflict,
    ScoreError,
    StorageFull,
    TaskError,
    UnderstudyError,
    UnknownEpisode,
)
from buffers.records import MAX_HINT_CHARS, MAX_JUDGE_CHARS, MAX_SESSION_CHARS, LeasedEpisode, ScoreDetail
from buffers.tasks.task_pool import PoolClosed
from mocked_server.fleet.engine_watch import kv_share
from mocked_server.fleet.member import EngineFigures
from mocked_server.http.dialects import RETRY_AFTER_S, kind_of
from mocked_server.http.request_limits import unless_gone
from mocked_server.keys import KeyRing

MAX_WAIT_S = 60.0
MAX_INDEX = 1 << 31
MAX_ROLE_CHARS = 64
MAX_TASKS = 10_000
"""Added at once; more of them go into a task file."""


class EpisodeService(Protocol):
    """The server as the routes use it."""

    keys: KeyRing

    async def lease_episode(
        self, *, wait_s: float, worker: str = "", process: int | None = None
    ) -> LeasedEpisode | None: ...
    async def add_tasks(self, rows: list[dict[str, Any]]) -> int: ...
    async def notify_score(self, episode_id: str, score: float, *, detail: ScoreDetail | None = None) -> bool: ...
    async def fail(self, episode_id: str, reason: str) -> None: ...
    def episode_view(self, episode_key: str) -> dict[str, Any]: ...
    def user_of(self, key: str) -> str | None:
        """Whose key this is, in a run that serves users."""
        ...

    async def feedback(self, *, user: str | None, **said: Any) -> dict[str, Any]: ...
    async def change_version(self, action: str, version: int | None) -> dict[str, Any]: ...
    async def forget(self, **what: str) -> dict[str, Any]: ...
    def status(self) -> dict[str, Any]: ...
    def engine_figures(self) -> Sequence[EngineFigures]: ...
    def check_storage(self) -> None:
        """Raises StorageFull while the disk takes nothing."""
        ...

    def check_role(self, role: str) -> None:
        """Raises ScoreError for a role that the run does not have."""
        ...


class ScoreBody(BaseModel):
    """Exactly one of `score` and `failed`. Without more the score is of the whole episode, which it ends."""

    model_config = ConfigDict(extra="forbid", strict=True)
    episode_id: Annotated[str, Field(max_length=200)]
    score: Annotated[float, Field(allow_inf_nan=False)] | None = None
    failed: Annotated[str, Field(max_length=500)] | None = None
    round_index: Annotated[int, Field(ge=0, le=MAX_INDEX)] | None = None
    """The score is of this model call of the episode, counted from 0 as they end."""
    branch: Annotated[int, Field(ge=0, le=MAX_INDEX)] | None = None
    """The score is of the branch that this model call is in."""
    role: Annotated[str, Field(max_length=MAX_ROLE_CHARS)] = ""
    """The score is of this role, whose rows are trained by it; the episode still needs its own, which ends it."""
    judge: Annotated[str, Field(max_length=MAX_JUDGE_CHARS)] = ""
    """An episode's score is the mean of its judges'."""
    final: bool = True
    """False: scores of other judges follow."""
    revise: bool = False
    """Replaces what this judge said before; possible until the episode is in a batch."""
    hint: Annotated[str, Field(max_length=MAX_HINT_CHARS)] = ""
    """What the judge would have told the policy before it answered; learner.hints learns from it."""

    @model_validator(mode="after")
    def _one(self) -> ScoreBody:
        if (self.score is None) == (self.failed is None):
            raise ValueError("exactly one of score and failed must be given")
        if sum((self.round_index is not None, self.branch is not None, bool(self.role))) > 1:
            raise ValueError("a score is of a round or of a branch or of a role, not of two of them")
        if not self.judge.isprintable():
            raise ValueError("judge must be printable")
        return self

    def detail(self) -> ScoreDetail | None:
        """None: nothing beyond the score is said."""
        detail = ScoreDetail(**self.model_dump(exclude={"episode_id", "score", "failed"}))
        return None if detail == ScoreDetail() else detail


class FeedbackBody(BaseModel):
    """A score, words or both, of exactly one of a session (with or without one of its rounds) and an answer."""

    model_config = ConfigDict(extra="forbid", strict=True)
    session: Annotated[str, Field(max_length=MAX_SESSION_CHARS)] = ""
    """The session's name, as its client sends it, or its id."""
    response_id: Annotated[str, Field(max_length=MAX_SESSION_CHARS)] = ""
    """The id that the client has read in an answer."""
    round_index: Annotated[int, Field(ge=0, le=MAX_INDEX)] | None = None
    """A model call of the session, counted from 0 as they end."""
    score: Annotated[float, Field(allow_inf_nan=False)] | None = None
    text: Annotated[str, Field(max_length=MAX_HINT_CHARS)] = ""
    """What should have been otherwise, in words."""
    source: Annotated[str, Field(max_length=MAX_JUDGE_CHARS)] = ""
    """Name of who says it: a later score of the same source takes the place of the one before."""

    @model_validator(mode="after")
    def _one(self) -> FeedbackBody:
        if bool(self.session) == bool(self.response_id):
            raise ValueError("exactly one of session and response_id must be given")
        if self.response_id and self.round_index is not None:
            raise ValueError("round_index counts the calls of a session; an answer is one")
        if self.score is None and not self.text:
            raise ValueError("score or text must be given")
        if not self.source.isprintable():
            raise ValueError("source must be printable")
        return self


class VersionBody(BaseModel):
    """promote: serve this version; rollback: this one, or the one before; status: change nothing."""

    model_config = ConfigDict(extra="forbid", strict=True)
    action: Literal["promote", "rollback", "status"]
    version: Annotated[int, Field(ge=0, le=MAX_INDEX)] | None = None

    @model_validator(mode="after")
    def _named(self) -> VersionBody:
        if self.action == "promote" and self.version is None:
            raise ValueError("version must be given to promote")
        return self


class ForgetBody(BaseModel):
    """An episode, or sessions: those of a user, those of a name, or both."""

    model_config = ConfigDict(extra="forbid", strict=True)
    user: Annotated[str, Field(max_length=MAX_SESSION_CHARS)] = ""
    session: Annotated[str, Field(max_length=MAX_SESSION_CHARS)] = ""
    episode_id: Annotated[str, Field(max_length=MAX_SESSION_CHARS)] = ""

    @model_validator(mode="after")
    def _named(self) -> ForgetBody:
        if bool(self.episode_id) == bool(self.user or self.session):
            raise ValueError("either episode_id must be given, or user or session or both")
        return self


class TasksBody(BaseModel):
    """Rows as in a task file."""

    model_config = ConfigDict(extra="forbid")
    tasks: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_TASKS)


STATUS_OF: dict[type[UnderstudyError], int] = {
    UnknownEpisode: 404,
    EpisodeClosed: 410,
    ScoreConflict: 409,
    ScoreError: 422,
    TaskError: 422,
    PoolClosed: 410,
    EpisodeError: 422,
    StorageFull: 507,
}


def build_app(service: EpisodeService) -> FastAPI:
    """The routes of agents and scorers."""
    app = _bare_app()
    its_worker = _requires(service, KeyRing.worker_of, "worker")
    its_user = _requires(
        service,
        lambda keys, given: service.user_of(given) or ("" if keys.same(given, keys.scorer) else None),
        "user's or the scorer's",
    )
    its_scorer = _requires(service, lambda keys, given: "" if keys.same(given, keys.scorer) else None, "scorer")

    @app.get("/tasks", dependencies=[its_worker])
    async def lease(
        request: Request,
        wait: Annotated[float, Query(ge=0.0, le=MAX_WAIT_S, allow_inf_nan=False)] = 0.0,
        worker: str = its_worker,
        x_server_process: Annotated[int, Header(ge=0)] = 0,
    ) -> Response:
        lease = service.lease_episode(wait_s=wait, worker=worker, process=x_server_process)
        leased = await unless_gone(request.receive, lease)
        return Response(status_code=204) if leased is None else JSONResponse(asdict(leased))

    @app.post("/scores", dependencies=[its_scorer])
    async def scores(body: ScoreBody) -> dict[str, Any]:
        service.check_storage()
        if body.score is None:
            await service.fail(body.episode_id, body.failed or "no reason given")
            return {"episode_id": body.episode_id, "stored": True}
        if body.role:
            service.check_role(body.role)
        stored = await service.notify_score(body.episode_id, body.score, detail=body.detail())
        return {"episode_id": body.episode_id, "stored": stored}

    @app.post("/feedback")
    async def feedback(body: FeedbackBody, user: str = its_user) -> dict[str, Any]:
        service.check_storage()
        return await service.feedback(user=user or None, **body.model_dump())

    @app.get("/episode", dependencies=[its_scorer])
    async def episode(x_episode_key: Annotated[str, Header()]) -> dict[str, Any]:
        return service.episode_view(x_episode_key)

    return app


def build_admin_app(service: EpisodeService) -> FastAPI:
    """The administrator's routes."""
    app = _bare_app()
    admin = [_requires(service, lambda keys, given: "" if keys.same(given, keys.admin) else None, "admin")]
    text = PrometheusText(status=service.status, engines=service.engine_figures)

    @app.post("/tasks", dependencies=admin)
    async def add_tasks(body: TasksBody) -> dict[str, int]:
        service.check_storage()
        return {"added": await service.add_tasks(body.tasks)}

    @app.post("/versions", dependencies=admin)
    async def versions(body: VersionBody) -> dict[str, Any]:
        return await service.change_version(body.action, body.version)

    @app.post("/forget", dependencies=admin)
    async def forget(body: ForgetBody) -> dict[str, Any]:
        return await service.forget(**body.model_dump())

    @app.get("/status", dependencies=admin)
    async def status() -> dict[str, Any]:
        return service.status()

    @app.get("/metrics", dependencies=admin)
    async def metrics() -> Response:
        return Response(text.page(), media_type=CONTENT_TYPE)

    return app


def _bare_app() -> FastAPI:
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    for kind in (UnderstudyError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _refuse)

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200)

    return app


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    match error:
        case RequestValidationError():
            lines = [f"{'.'.join(str(part) for part in e['loc'])}: {e['msg']}" for e in error.errors()]
            status, kind, message = 422, "invalid_request_error", "; ".join(lines)
        case HTTPException():
            status, kind = error.status_code, kind_of(error.status_code)
            message = f"{request.method} {request.url.path}: {error.detail}"
        case _:
            status = next((code for ours, code in STATUS_OF.items() if isinstance(error, ours)), 500)
            kind, message = type(error).__name__, str(error)
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return JSONResponse(body, status, {"retry-after": str(RETRY_AFTER_S)} if status == STATUS_OF[StorageFull] else None)


def _requires(service: EpisodeService, opens: Callable[[KeyRing, str], str | None], name: str) -> Any:
    """A dependency that lets one kind of key through: what `opens` says of the given one, unless that is None."""

    def check(authorization: Annotated[str, Header()] = "") -> str:
        given = authorization[7:].strip() if authorization[:7].lower() == "bearer " else ""
        whose = opens(service.keys, given)
        if whose is None:
            raise _Unauthorized(f"this route needs the {name} key as `Authorization: Bearer <key>`")
        return whose

    return Depends(check)


class _Unauthorized(UnderstudyError):
    """The wrong key, or none."""


STATUS_OF[_Unauthorized] = 401


CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX = "understudy"
GAUGES: dict[str, tuple[str, Callable[[EngineFigures], float]]] = {
    "up": ("1 while the engine takes requests.", lambda engine: engine.is_up),
    "version": ("Policy version that it samples with.", lambda engine: engine.version),
    "running": ("Generations under way.", lambda engine: engine.running),
    "waiting": ("Generations whose prompt waits for room in the cache.", lambda engine: engine.waiting),
    "held_tokens": ("Tokens of the generations under way.", lambda engine: engine.tokens_held),
    "kv_capacity_tokens": ("Tokens that the cache holds; 0: not known yet.", lambda engine: engine.kv_capacity),
    "kv_share": ("held_tokens / kv_capacity_tokens.", kv_share),
}
COUNTERS: dict[str, tuple[str, Callable[[EngineFigures], float]]] = {
    "sampled_tokens": ("Tokens sampled.", lambda engine: engine.sampled_tokens),
    "prompt_tokens": ("Prompt tokens of the generations that ended.", lambda engine: engine.prompt_tokens),
    "cached_tokens": ("Prompt tokens that the cache held already.", lambda engine: engine.cached_tokens),
    "preemptions": ("Generations set aside for lack of cache.", lambda engine: engine.preemptions),
    "restarts": ("Processes started in place of dead ones.", lambda engine: engine.restarts),
    "moved_in": ("Episodes that came from another engine.", lambda engine: engine.moved_in),
}
COUNTED = ("pool/started", "pool/scored", "pool/failed", "pool/closed")
"""Counts of the status that only grow; the others are gauges."""


class PrometheusText:
    """`status`: counts by name, as `GET /status` has them; what is no number is left out. `engines`: the figures of all engines."""

    def __init__(
        self, *, status: Callable[[], Mapping[str, Any]], engines: Callable[[], Sequence[EngineFigures]]
    ) -> None:
        self._status = status
        self._engines = engines
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def page(self) -> bytes:
        """The text of one scrape."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Nothing: what there is depends on the scrape. The registry asks this once."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The figures now."""
        engines = list(self._engines())
        for kind, figures in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, (meaning, value) in figures.items():
                family = kind(f"{PREFIX}_engine_{name}", meaning, labels=["engine"])
                for engine in engines:
                    family.add_metric([engine.name], float(value(engine)))
                yield family
        for name, value in self._status().items():
            if isinstance(value, int | float):
                kind = CounterMetricFamily if name in COUNTED else GaugeMetricFamily
                yield kind(f"{PREFIX}_{name.replace('/', '_')}", f"{name} of GET /status.", value=float(value))
