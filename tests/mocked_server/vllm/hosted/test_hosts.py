"""Hosts with processes of their own: what a killed, a stopped and an orphaned one look like, here and under Ray."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path

import pytest
import ray

from buffers.errors import EngineDied, EngineError
from buffers.remote.actor import ChildActor
from configs.child_processes import python_path
from configs.tiny_model import make_tiny_model
from mocked_server.fleet.member import EngineLost
from mocked_server.vllm.hosted.outputs import VLLMCodec
from mocked_server.vllm.hosted.program import ActorHost, ChildHost
from mocked_server.vllm.hosted.remote_engine import RemoteEngine
from tests.mocked_server.fleet.hosts_here import SECRET, host_settings
from tests.mocked_server.vllm.hosted.test_remote_engine import PROMPT, WatchedCodec, outputs_of, plain, sampling
from tests.support.patience import PATIENCE_S
from tests.support.processes.child_process import gone
from tests.support.remote.remote_parts import ROOT, two_nodes
from tests.support.served_models import ENDLESS

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def pid_of(host: ActorHost) -> int:
    assert isinstance(host.actor, ChildActor)
    return host.actor.pid


def titled(title: str) -> list[int]:
    """All processes of this title."""
    found = subprocess.run(["pgrep", "-f", title], capture_output=True, text=True, check=False)
    return [int(line) for line in found.stdout.split()]


def children_of(pid: int) -> list[int]:
    """All processes below this one."""
    below = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    own = [int(line) for line in below.stdout.split()]
    return own + [each for child in own for each in children_of(child)]


async def lost_after(engine: RemoteEngine, harm: Callable[[], Awaitable[None]]) -> EngineLost:
    """What a long whole answer under way ends with when this is done to its engine."""

    async def read() -> None:
        params = sampling(max_tokens=ENDLESS, kind="FINAL_ONLY", logprobs=0)
        async for _ in engine.generate(PROMPT, params, request_id=f"lost-{time.monotonic_ns()}"):
            pass

    codec = WatchedCodec()
    engine.codec = codec
    reading = asyncio.create_task(read())
    await codec.until_begun()
    await harm()
    with pytest.raises(EngineLost) as lost:
        await asyncio.wait_for(reading, PATIENCE_S)
    await asyncio.wait_for(engine.until_dead(), PATIENCE_S)
    assert not engine.is_up
    return lost.value


@pytest.mark.long
async def test_a_host_that_is_killed_stopped_or_loses_its_engine_is_replaced(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_tiny_model(tmp_path / "other", seed=1)
    child = ChildHost(host_settings(tiny_model, name="e3"))
    engine = RemoteEngine(child, VLLMCodec(), secret=SECRET, name="e3", weights=(tiny_model, 2))
    try:
        await engine.start()
        assert engine.is_up and engine.version == 2
        (before,) = plain(await outputs_of(engine, sampling(), "before"))[0].values()
        assert [span.version for span in before["versions"]] == ["2"]

        host, below = pid_of(child), children_of(pid_of(child))
        while engine.figures().sampled_tokens < 24:  # the host tells them once a second
            await asyncio.sleep(0.1)

        async def kill() -> None:
            os.kill(host, signal.SIGKILL)

        lost = await lost_after(engine, kill)
        assert "sign of life" not in str(lost) and lost.life == ("e3", 1), (
            "it is not by its silence that a killed one is noticed"
        )
        (sampled,) = lost.sampled
        assert 0 < len(sampled.token_ids) == len(sampled.logprobs) < ENDLESS
        assert below and all(gone(pid) for pid in below), "its engine goes with it"
        await engine.load_weights(other, version=3)  # while it is down
        await engine.restart()
        assert engine.is_up and engine.version == 3 and engine.figures().restarts == 1
        assert engine.figures().sampled_tokens >= 24, "counts are of all its lives"

        host = pid_of(child)

        async def stop() -> None:
            os.kill(host, signal.SIGSTOP)

        assert engine._client is not None
        monkeypatch.setattr(engine._client, "_silent_s", 4.0)
        lost = await lost_after(engine, stop)
        assert "gave no sign of life for 4 s" in str(lost) and lost.sampled[0].token_ids
        await engine.restart()
        assert gone(host) and engine.version == 3

        host = pid_of(child)
        core = next(pid for pid in children_of(host) if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes())

        async def kill_engine() -> None:
            os.kill(core, signal.SIGKILL)

        lost = await lost_after(engine, kill_engine)
        assert "died while it answered" in str(lost) and lost.sampled[0].token_ids and lost.life == ("e3", 3)
        await engine.restart()
        assert pid_of(child) == host, "a host outlives its engine"
        (after,) = plain(await outputs_of(engine, sampling(), "after"))[0].values()
        assert [span.version for span in after["versions"]] == ["3"]
    finally:
        await engine.close()
    assert gone(host)


@pytest.mark.long
async def test_a_host_that_cannot_begin_says_why(tmp_path: Path) -> None:
    child = ChildHost(host_settings(tmp_path / "no-model"))
    with pytest.raises(EngineError, match=r"vLLM refuses the engine.s configuration: .*no-model") as refused:
        await child.start()
    assert not isinstance(refused.value, EngineDied)
    await child.end()


PARENT = """
import asyncio, sys
from pathlib import Path
from mocked_server.vllm.hosted.program import ChildHost
from tests.mocked_server.fleet.hosts_here import host_settings

async def main():
    child = ChildHost(host_settings(Path(sys.argv[1])))
    await child.start()
    print(child.actor.pid, flush=True)
    await asyncio.Event().wait()

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_a_host_ends_with_its_parent(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    command = [sys.executable, tmp_path / "parent.py", tiny_model]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": python_path()}
    )
    try:
        assert process.stdout is not None
        host = int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    until = time.monotonic() + PATIENCE_S
    while not gone(host):
        assert time.monotonic() < until, "the host outlives its parent"
        time.sleep(0.05)


@pytest.mark.long
async def test_a_host_on_another_node_of_a_cluster_serves_and_its_actors_death_is_seen(tiny_model: Path) -> None:
    from buffers.remote.ray_actor import RayActor, on_node

    with two_nodes() as nodes:
        place = on_node(nodes.disk, environment={"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])})
        settings = host_settings(tiny_model, name="e4", host=ray.util.get_node_ip_address())
        host = ActorHost("e4", partial(RayActor, place, ChildHost, settings))
        engine = RemoteEngine(host, VLLMCodec(), secret=SECRET, name="e4")
        try:
            await engine.start()
            (told,) = plain(await outputs_of(engine, sampling(), "far"))[0].values()
            assert len(told["ids"]) == 24
            actor = host.actor
            assert actor is not None
            (pid,) = titled("understudy::engine_host_e4")

            async def kill() -> None:
                actor.kill()

            lost = await lost_after(engine, kill)
            assert lost.sampled and gone(pid), "the host goes with its actor"
            await engine.restart()
            async with aclosing(engine.generate(PROMPT, sampling(), request_id="again")) as stream:
                assert [output async for output in stream][-1].finished
        finally:
            await engine.close()
