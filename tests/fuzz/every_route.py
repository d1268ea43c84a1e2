"""Requests that nobody thought of, to every route, with every kind of key and none (schemathesis).

`fuzz(served, cases=...)` sends them to a server with a scripted engine and counts the answers; anything from 500 up is a
failure, but for 503 and 507, which say why and when to come back. Half of the bodies are cut down to a few fields, and half
of those are sound but for these.

    python -m tests.fuzz 5000                           a server with a scripted engine
    python -m tests.fuzz --engine real 5000 --seed 1    the whole, with the real one (`tests.fuzz.real_engine`)

Both are part of `make faults`.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as use_seed
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode

from buffers.records import Task
from configs.schema import RolloutConfig
from configs.tiny_model import make_tiny_model
from mocked_server.http.dialects import TOKENIZE
from mocked_server.http.gemini_requests import CountTokensRequest, GenerateContentRequest
from mocked_server.http.routes import build_admin_app, build_app
from mocked_server.vllm.engine_arguments import set_process_environment
from tests.fuzz.drawn_requests import GOOGLE, GOOGLE_COUNT, GOOGLE_STREAM, GOOGLES_QUESTION
from tests.fuzz.real_engine import MAX_FAILURES, attack
from tests.support.server_parts import ServerThread

TIMEOUT_S = 180.0
QUESTION = [{"role": "user", "content": "Where?"}]
PLAIN: dict[str, dict[str, Any]] = {
    "/tasks": {"tasks": [{"task_id": "fuzzed", "prompt": QUESTION}]},
    "/scores": {"score": 1.0},
    "/v1/chat/completions": {"messages": QUESTION},
    "/v1/completions": {"prompt": "Where?"},
    "/v1/messages": {"messages": QUESTION, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": QUESTION},
    "/v1/responses": {"input": "Where?"},
    GOOGLE: {"contents": GOOGLES_QUESTION},
    GOOGLE_STREAM.partition("?")[0]: {"contents": GOOGLES_QUESTION},
    GOOGLE_COUNT: {"contents": GOOGLES_QUESTION},
}
"""Path -> a body that is served, but for names that only the server knows."""


def operations(served: ServerThread) -> list[tuple[str, Any]]:
    """(where it listens, operation) of every route that has a schema: ours, the administrator's, the model API's."""
    server = served.server
    ours, model_api = server.base_url, served.serving_app().openapi()
    del model_api["paths"][TOKENIZE]  # it is not open to anybody
    descriptions = (
        (ours, build_app(server).openapi()),
        (server.admin_url, build_admin_app(server).openapi()),
        (ours, model_api),
        (ours, googles_openapi()),
    )
    found = []
    for url, description in descriptions:
        for result in schemathesis.openapi.from_dict(description).get_all_operations():
            found.append((url, result.ok()))
    return found


def googles_openapi() -> dict[str, Any]:
    """Google's dialect, which is no route of an application that describes itself."""
    kinds = {GOOGLE: GenerateContentRequest, GOOGLE_STREAM: GenerateContentRequest, GOOGLE_COUNT: CountTokensRequest}
    paths, schemas = {}, {}
    for path, kind in kinds.items():
        schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs")
        body = {"content": {"application/json": {"schema": schema}}, "required": True}
        alternatives = [{"name": "alt", "in": "query", "schema": {"enum": ["sse", "json"]}}]
        paths[path.partition("?")[0]] = {
            "post": {"requestBody": body, "parameters": alternatives, "responses": {"200": {"description": ""}}}
        }
    return {
        "openapi": "3.1.0", "info": {"title": "Google's dialect", "version": "1"}, "paths": paths,
        "components": {"schemas": schemas},
    }  # fmt: skip


def fuzz(served: ServerThread, *, cases: int, seed: int = 0) -> Counter[str]:
    """Send at least so many different requests; how often each `METHOD path status` was the answer. Raises AssertionError for one
    that is at fault, and when a route was never reached because no key opened it."""
    _, client = served.lease()
    served.call(add_tasks(served))  # who asks for one need not wait
    keys = served.server.keys
    others = st.sampled_from([client.api_key, keys.worker, keys.scorer, keys.admin, client.api_key[:-1], "", "é"])
    own = {"/tasks": keys.worker, "/scores": keys.scorer, "/episode": keys.scorer}
    targets = operations(served)
    seen: Counter[str] = Counter()
    examples = max(1, cases // len(targets))
    waiting = deque((url, operation, set[str]()) for url, operation in targets)
    for number in itertools.count(seed):
        if (already := seen.total()) >= cases:
            break
        assert waiting, f"only {already} different requests were found"
        url, operation, sent = waiting.popleft()
        is_admin = url == served.server.admin_url
        right = keys.admin if is_admin else own.get(operation.path, client.api_key)
        attack = attack_on(operation, served, url=url, authorizations=st.just(right) | others, seen=seen, sent=sent)
        attack = settings(
            max_examples=examples, database=None, deadline=None,
            phases=[Phase.generate], suppress_health_check=list(HealthCheck),
        )(attack)  # fmt: skip
        use_seed(number)(attack)()
        if seen.total() - already > examples // 4:  # else little is left that was not sent to this route
            waiting.append((url, operation, sent))
    reached = {tuple(name.split()[:2]) for name in seen if name.split()[-1] not in ("401", "403")}
    missed = {(operation.method.upper(), operation.path) for _, operation in targets} - reached
    assert cases < 10 * len(targets) or not missed, f"never reached beyond their keys: {missed}"
    return seen


async def add_tasks(served: ServerThread) -> None:
    served.pool.add_source(Task(task_id=f"fuzz:{number}", prompt=QUESTION) for number in itertools.count())


def attack_on(
    operation: Any, served: ServerThread, *, url: str, authorizations: Any, seen: Counter[str], sent: set[str]
) -> Callable[[], None]:
    """A property of one route: whatever is sent, the server is not at fault. Nothing of `sent` is sent again."""
    session = requests.Session()
    either = st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in GenerationMode))
    bodies = st.none() | st.tuples(st.sets(st.integers(0, 9), max_size=2), st.booleans())

    @given(case=either, key=authorizations, smaller=bodies)
    def attack(case: Case, key: str, smaller: tuple[set[int], bool] | None) -> None:
        headers = {"Authorization": f"Bearer {key}".encode()} if key else {}
        if smaller is not None and isinstance(case.body, dict):
            case.body = smaller_body(case.body, *smaller, path=operation.path)
        what = repr((case.path_parameters, case.query, case.headers, case.cookies, case.body, key))
        if what in sent:
            return
        if smaller is not None and isinstance(case.body, dict):
            case.body |= known_names(served, operation.path)
        try:
            status = case.call(base_url=url, session=session, headers=headers, timeout=TIMEOUT_S).status_code
        except (ValueError, requests.exceptions.InvalidHeader, requests.exceptions.InvalidURL):
            return  # no client can send this
        seen[f"{case.method} {case.operation.path} {status}"] += 1
        assert status < 500 or status in (503, 507), f"{status}: {case.as_curl_command()}"
        sent.add(what)

    return attack


def smaller_body(body: dict[str, Any], kept: set[int], is_sound: bool, *, path: str) -> dict[str, Any]:
    """A few of its fields: one that is wrong hides all others. `is_sound`: those that a body needs are right."""
    plain = PLAIN.get(path, {})
    few = {name for number, name in enumerate(sorted(body, key=str)) if number in kept} | plain.keys()
    return {name: value for name, value in body.items() if name in few} | (plain if is_sound else {})


def known_names(served: ServerThread, path: str) -> dict[str, str]:
    """What a body has to name, and nobody guesses."""
    if path == "/scores":
        leased = served.call(served.server.lease_episode(wait_s=15.0))
        assert leased is not None
        return {"episode_id": leased.episode_id}
    return {"model": served.server.model} if path.startswith("/v1/") else {}


def serve_for_fuzz(model: Path) -> ServerThread:
    """A server whose episodes last until it ends: requests with their keys go all the way."""
    rollout = RolloutConfig(max_tokens=8, max_model_len=512)
    served = ServerThread(model, rollout=rollout, pool={"deadline_s": 1e6, "max_running": 1_000_000})
    served.start()
    return served


def fuzz_scripted(cases: int, *, seed: int) -> None:
    """Every route, with every kind of key; the engine is scripted."""
    set_process_environment()
    with tempfile.TemporaryDirectory(prefix="understudy-fuzz-") as folder:
        served = serve_for_fuzz(make_tiny_model(Path(folder) / "tiny"))
        seen = fuzz(served, cases=cases, seed=seed)
        served.stop()
    for name, number in sorted(seen.items()):
        print(f"{number:6} {name}")
    print(f"{seen.total()} different requests, none of them a failure of the server")


def fuzz_real(numbers: Sequence[int], *, seed: int, timeout_s: float, max_failures: int) -> int:
    """The model's routes, with the real engine; the exit code."""
    set_process_environment()
    with tempfile.TemporaryDirectory(prefix="understudy-fuzz-") as folder:
        say = partial(print, flush=True)
        figures = attack(
            numbers, seed=seed, folder=Path(folder), timeout_s=timeout_s, max_failures=max_failures, say=say
        )
    print(figures)
    return 1 if figures.failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("cases", type=int, nargs="?", default=1000, help="how many requests")
    parser.add_argument("--engine", choices=("scripted", "real"), default="scripted")
    parser.add_argument("--seed", type=int, default=0, help="the same seed sends the same requests")
    parser.add_argument("--only", default="", help="real: the numbers of the requests to send, as 35,36,200-300")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="real: seconds that an answer may take")
    parser.add_argument("--failures", type=int, default=MAX_FAILURES, help="real: the attack ends after so many")
    given = parser.parse_args()
    if given.engine == "scripted":
        fuzz_scripted(given.cases, seed=given.seed)
        return 0
    numbers = numbers_of(given.only) if given.only else range(given.cases)
    return fuzz_real(numbers, seed=given.seed, timeout_s=given.timeout, max_failures=given.failures)


def numbers_of(text: str) -> list[int]:
    """`35,200-202` -> 35, 200, 201, 202."""
    parts = [part.partition("-") for part in text.split(",")]
    return [number for first, _, last in parts for number in range(int(first), int(last or first) + 1)]
