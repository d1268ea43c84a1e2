"""Requests that nobody thought of, to every route, with every kind of key and none (schemathesis).

`fuzz(served, cases=...)` sends them to a server with a scripted engine and counts the answers; anything from 500 up is a
failure, but for 503 and 507, which say why and when to come back. `python -m tests.fuzz 5000` is part of `make faults`.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
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
from mocked_server.app import build_admin_app, build_app
from mocked_server.vllm_engine import cpu_environment
from tests.server_parts import ServerThread

TIMEOUT_S = 60.0
NEEDED = {"model", "messages", "prompt", "input", "max_tokens", "episode_id", "tasks"}
"""Without these no body is served."""


def operations(served: ServerThread) -> list[tuple[str, Any]]:
    """(where it listens, operation) of every route that has a schema: ours, the administrator's, the model API's."""
    server = served.server
    apps = ((server.base_url, build_app(server)), (server.admin_url, build_admin_app(server)))
    found = []
    for url, app in (*apps, (server.base_url, served.serving_app())):
        for result in schemathesis.openapi.from_dict(app.openapi()).get_all_operations():
            found.append((url, result.ok()))
    return found


def fuzz(served: ServerThread, *, cases: int, seed: int = 0) -> Counter[str]:
    """Send so many cases; how often each `METHOD path status` was the answer. Raises AssertionError for one that is at fault, and
    when a route was never reached because no key opened it."""
    _, client = served.lease()
    served.call(add_tasks(served))  # who asks for one need not wait
    keys = served.server.keys
    others = st.sampled_from([client.api_key, keys.worker, keys.scorer, keys.admin, client.api_key[:-1], "", "é"])
    own = {"/tasks": keys.worker, "/scores": keys.scorer, "/episode": keys.scorer}
    targets = operations(served)
    seen: Counter[str] = Counter()
    for number in itertools.count(seed):
        missing = cases - seen.total()
        if missing <= 0:
            break
        url, operation = targets[number % len(targets)]
        is_admin = url == served.server.admin_url
        right = keys.admin if is_admin else own.get(operation.path, client.api_key)
        attack = attack_on(operation, served, url=url, authorizations=st.just(right) | others, seen=seen)
        attack = settings(
            max_examples=min(missing, max(1, cases // len(targets))), database=None, deadline=None,
            phases=[Phase.generate], suppress_health_check=list(HealthCheck),
        )(attack)  # fmt: skip
        use_seed(number)(attack)()
    reached = {tuple(name.split()[:2]) for name in seen if name.split()[-1] not in ("401", "403")}
    missed = {(operation.method.upper(), operation.path) for _, operation in targets} - reached
    assert cases < 10 * len(targets) or not missed, f"never reached beyond their keys: {missed}"
    return seen


async def add_tasks(served: ServerThread) -> None:
    question = [{"role": "user", "content": "Where?"}]
    served.pool.add_source(Task(task_id=f"fuzz:{number}", prompt=question) for number in itertools.count())


def attack_on(
    operation: Any, served: ServerThread, *, url: str, authorizations: Any, seen: Counter[str]
) -> Callable[[], None]:
    """A property of one route: whatever is sent, the server is not at fault."""
    session = requests.Session()
    names: dict[str, Callable[[], str]] = {
        "episode_id": lambda: running_episode(served),
        "model": lambda: served.server.model,
    }
    either = st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in GenerationMode))

    @given(case=either, key=authorizations, kept=st.none() | st.sets(st.integers(0, 80), max_size=3))
    def attack(case: Case, key: str, kept: set[int] | None) -> None:
        headers = {"Authorization": f"Bearer {key}".encode()} if key else {}
        if kept is not None and isinstance(case.body, dict):  # one wrong field of many would hide all others
            few = {name for number, name in enumerate(sorted(case.body, key=str)) if number in kept}
            case.body = {name: value for name, value in case.body.items() if name in few | NEEDED}
            case.body.update({name: make() for name, make in names.items() if name in case.body})
        try:
            status = case.call(base_url=url, session=session, headers=headers, timeout=TIMEOUT_S).status_code
        except (ValueError, requests.exceptions.InvalidHeader, requests.exceptions.InvalidURL):
            return  # no client can send this
        seen[f"{case.method} {case.operation.path} {status}"] += 1
        assert status < 500 or status in (503, 507), f"{status}: {case.as_curl_command()}"

    return attack


def running_episode(served: ServerThread) -> str:
    leased = served.call(served.server.lease_episode(wait_s=TIMEOUT_S / 4))
    assert leased is not None
    return leased.episode_id


def serve_for_fuzz(model: Path) -> ServerThread:
    """A server whose episodes last until it ends: requests with their keys go all the way."""
    rollout = RolloutConfig(max_tokens=8, max_model_len=512)
    served = ServerThread(model, rollout=rollout, pool={"deadline_s": 1e6, "max_running": 1_000_000})
    served.start()
    return served


def main() -> None:
    cpu_environment()
    with tempfile.TemporaryDirectory(prefix="understudy-fuzz-") as folder:
        served = serve_for_fuzz(make_tiny_model(Path(folder) / "tiny"))
        seen = fuzz(served, cases=int(sys.argv[1]))
        served.stop()
    for name, number in sorted(seen.items()):
        print(f"{number:6} {name}")
    print(f"{seen.total()} cases, none of them a failure of the server")


if __name__ == "__main__":
    main()
