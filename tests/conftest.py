"""Shared fixtures: the tiny model, one real engine for the whole session, one scripted server for the fast tests."""

from __future__ import annotations

import functools
import gc
import os
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from configs import fork_server
from mocked_server.vllm.engine_arguments import set_process_environment
from tests.support import stalls
from tests.support.processes import warm_runs

gc.disable()  # until all tests are imported: see `configs.fork_server.imports_kept`
set_process_environment()
# Ray's workers get what other processes leave, which beside the other tests is nothing.
os.environ |= {"RAY_worker_niceness": "0"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs a server with parsers is not part of the fast tier. Files whose tests say that they take minutes come first, then
    those with whole runs, then those with slow tests, so that no worker is left with them at the end."""
    for item in items:
        if "tools_server" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
    slow = {item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("engine")}
    minutes = {
        item.path: marker.kwargs["minutes"] for item in items for marker in item.iter_markers("long") if marker.kwargs
    }
    items.sort(
        key=lambda item: (
            -minutes.get(item.path, 0),
            "tests/project/" not in item.path.as_posix(),
            item.path not in slow,
        )
    )


def pytest_collection_finish() -> None:
    _freeze()
    gc.enable()


def _freeze() -> None:
    """What is there now, torch and vLLM above all, is not looked through again: half a second, at each collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def runs_end_with_their_test() -> Iterator[None]:
    yield
    from tests.support.run_parts import STARTED

    while STARTED:
        STARTED.pop().kill()


@pytest.fixture(autouse=True, scope="module")
def what_is_left_open_is_told_of_its_module() -> Iterator[None]:
    """A socket or file that nothing closed fails a test when it is collected: here, not in another module's test."""
    yield
    _freeze()


@pytest.fixture(autouse=True, scope="session")
def certificates_are_read_once() -> None:
    """Every client of httpx reads all of them, 17 ms, also for an address without TLS."""
    ssl.create_default_context = functools.cache(ssl.create_default_context)


@pytest.fixture(autouse=True, scope="session")
def engines_are_forked() -> None:
    """Engines and server processes of this process are forked of one that has imported vLLM, as those of a run are: this process
    has threads, and cannot be forked as a run is."""
    warm_runs.fork_here()
    fork_server._owner = os.getpid()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with random weights."""
    from configs.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=0)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct in float32, in the folder `model`; the file that it is of and its tasks lie in `data` beside it. All
    workers share it."""
    from env_adapters import smollm2
    from learner.startup.model_and_tasks import plain_folder

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "smollm2"
    with FileLock(f"{folder}.lock"):
        smollm2.make(folder / "data" / "smollm2")
        return plain_folder(
            folder / "data" / "smollm2" / smollm2.MODEL, to=folder / "model", dtype="float32", say=print
        )


@pytest.fixture(scope="session")
def rollout(tiny_model: Path) -> Iterator[object]:
    """The session's one real engine. Tests that change its weights put the tiny model's back as version 0."""
    from configs.schema import RolloutConfig, ServerConfig
    from mocked_server.rollout import VLLMRollout
    from mocked_server.vllm.engine_arguments import EngineSettings
    from tests.support.served_models import MAX_MODEL_LEN

    settings = EngineSettings(
        model_path=tiny_model,
        served_name="policy",
        dtype="float32",
        rollout=RolloutConfig(max_tokens=256, max_model_len=MAX_MODEL_LEN, kv_cache_gb=0.0625),
        server=ServerConfig(),
    )
    with VLLMRollout(settings) as rollout, stalls.watched(rollout._loop):
        yield rollout


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A failed test shows where loops stood still in its last minutes."""
    outcome: Any = yield
    report = outcome.get_result()
    seen = [text for when, text in stalls.found if when > time.monotonic() - 180]
    if report.failed and seen:
        report.sections.append(("loops that stood still", "\n".join(seen)[-20_000:]))


@pytest.fixture(autouse=True)
def engine_is_up(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that leaves the session's engine down fails, and the next one has it nevertheless."""
    rollout: Any = request.getfixturevalue("rollout") if "rollout" in request.fixturenames else None
    yield
    if rollout is not None and not rollout.engine.is_up:
        rollout.wait(rollout.engine.restart())
        pytest.fail("it left the session's engine down")


@pytest.fixture(scope="session")
def server_thread(tiny_model: Path) -> Iterator[object]:
    """A MockedServer with a scripted engine, for the session."""
    from configs.schema import RolloutConfig
    from tests.support.server_parts import ServerThread

    thread = ServerThread(tiny_model, rollout=RolloutConfig(max_tokens=32, max_model_len=512))
    thread.start()
    yield thread
    thread.stop()


@pytest.fixture
def served(server_thread):
    """The session's server, its engine reset to answer `ok`."""
    engine = server_thread.engine
    engine.answer = lambda _: server_thread.ids("ok")
    engine.gate.set()
    engine.dies = False
    engine.version = 0
    engine.prompts.clear()
    engine.params.clear()
    return server_thread


@pytest.fixture(scope="session")
def tools_server(tiny_model: Path) -> Iterator[object]:
    """As `server_thread`, with tools and reasoning parsed."""
    from configs.schema import RolloutConfig
    from tests.support.server_parts import ServerThread

    rollout = RolloutConfig(max_tokens=96, max_model_len=4096)
    thread = ServerThread(tiny_model, rollout=rollout, tool_parser="hermes", reasoning_parser="qwen3")
    thread.start()
    yield thread
    thread.stop()
