"""Rules of buffers/remote/actor.py: an object in a child of this process."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from buffers.errors import StorageFull, TaskError
from buffers.remote.actor import HERE, ActorDied, ActorRefused, CallFailed, ChildActor
from configs.fork_server import own_context
from tests.support.patience import PATIENCE_S
from tests.support.processes.child_process import gone

pytestmark = pytest.mark.seconds


class Counter:
    """Counts."""

    def __init__(self, start: int, *, refuses: str = "") -> None:
        if refuses == "ours":
            raise TaskError("start must be even, got 3;\n  set 4")
        if refuses == "library's":
            raise ValueError("no such kind")
        if refuses == "chance":
            raise RuntimeError("the address is in use")
        self.count = start
        self.cancelled = 0

    def add(self, number: int) -> int:
        self.count += number
        return self.count

    def fail(self, how: str) -> None:
        if how == "no Exception":
            raise CheckpointException("load", {})
        raise StorageFull("no room") if how == "ours" else LookupError(how)

    def unreadable(self) -> Any:
        return lambda: None

    def environment(self) -> tuple[str | None, str | None]:
        return os.environ.get("OMP_NUM_THREADS"), os.environ.get("LATE")

    def memory_score(self) -> int:
        with open("/proc/self/oom_score_adj") as file:
            return int(file.read())

    def title(self) -> bytes:
        with open("/proc/self/cmdline", "rb") as file:
            return file.read().strip(b"\0")

    async def wait(self, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def cancel_itself(self) -> None:
        raise asyncio.CancelledError

    def end(self) -> None:
        os._exit(3)

    def cancellations(self) -> int:
        return self.cancelled


def actor(start: int = 0, *, here: bool = False, **options: Any) -> ChildActor:
    context = HERE if here else own_context({"OMP_NUM_THREADS": "1"})
    return ChildActor(context, "understudy::counter", Counter, start, **options)


anywhere = pytest.mark.parametrize("here", [False, True], ids=["child", "here"])


async def test_calls_are_made_in_their_order_in_a_process_with_its_environment_and_title(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LATE", "2")
    counter = actor(10)
    assert await asyncio.gather(*(counter.call("add", number) for number in (1, 2, 3))) == [11, 13, 16]
    assert await counter.call("environment") == ("1", "2")
    assert await counter.call("title") == b"understudy::counter"
    assert await counter.call("memory_score") > 0, "where memory ends the run's own process would be ended first"
    assert os.getsid(counter.pid) == counter.pid != os.getsid(0), "signals for the run's process group reach it"
    await counter.ready()
    counter.kill()
    assert gone(counter.pid)


@anywhere
async def test_what_a_method_raises_ends_its_own_call_only(here: bool) -> None:
    counter = actor(here=here)
    with pytest.raises(StorageFull, match=r"^no room$"):
        await counter.call("fail", "ours")
    with pytest.raises(CallFailed, match=r"^LookupError: else$"):
        await counter.call("fail", "else")
    with pytest.raises(CallFailed, match="CheckpointException"):
        await asyncio.wait_for(counter.call("fail", "no Exception"), PATIENCE_S)
    with pytest.raises(CallFailed, match="pickle"):
        await counter.call("unreadable")
    with pytest.raises(CallFailed, match="cancelled its own call"):
        await asyncio.wait_for(counter.call("cancel_itself"), PATIENCE_S)
    with pytest.raises((TypeError, AttributeError), match="pickle"):
        await counter.call("add", lambda: None)
    assert await counter.call("add", 1) == 1
    counter.kill()
    with pytest.raises(ActorDied, match=r"^understudy::counter was ended$"):
        await counter.call("add", 1)


@anywhere
async def test_a_call_that_is_given_up_is_cancelled_there_and_others_go_on(here: bool) -> None:
    counter = actor(here=here)
    long, short = counter.call("wait", 3600.0), counter.call("wait", 0.0)
    await asyncio.wait_for(short, PATIENCE_S)
    long.cancel()
    await asyncio.sleep(0)
    assert await counter.call("cancellations") == 1
    counter.kill()


@pytest.mark.parametrize(
    ("refuses", "kind", "told"),
    [
        ("ours", ActorRefused, "start must be even, got 3;\n  set 4"),
        ("library's", ActorRefused, "ValueError: no such kind"),
        ("chance", ActorDied, "RuntimeError: the address is in use"),
    ],
)
async def test_what_its_object_refuses_fails_every_call(refuses: str, kind: type[Exception], told: str) -> None:
    counter = actor(refuses=refuses)
    calls = [counter.ready(), counter.call("add", 1)]
    for failed in [*await asyncio.gather(*calls, return_exceptions=True), *await _failures(counter)]:
        assert type(failed) is kind and str(failed) == told
    assert gone(counter.pid)


async def _failures(counter: ChildActor) -> list[BaseException]:
    return list(await asyncio.gather(counter.ready(), counter.call("add", 1), return_exceptions=True))


@pytest.mark.parametrize(("by", "how"), [(signal.SIGKILL, "by SIGKILL"), (None, "with exit code 3")])
async def test_a_process_that_dies_fails_what_is_under_way_and_what_comes(by: signal.Signals | None, how: str) -> None:
    counter = actor()
    await counter.ready()
    under_way = counter.call("wait", 3600.0)
    if by is None:
        counter.call("end")
    else:
        os.kill(counter.pid, by)
    with pytest.raises(ActorDied, match=f"understudy::counter ended {how}"):
        await asyncio.wait_for(under_way, PATIENCE_S)
    assert [str(failed).split(";")[0] for failed in await _failures(counter)] == [
        f"understudy::counter ended {how}"
    ] * 2
