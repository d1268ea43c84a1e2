"""Rules of mocked_server/vllm/process/engine_health.py: only the engine's own time counts as its silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from mocked_server.vllm.process.engine_health import IDLE_S, LONG_WORK, STUCK_S, EngineSilence

TIMEOUT_S = 60.0


class Watched:
    """An engine that answers the probe while `answers` is set, and works a share `load` of the time. `pass_s` lets the watch look
    for so many seconds; `stall_s` is added once to its next look."""

    def __init__(self) -> None:
        self.now = self.worked = self.stall_s = self.load = 0.0
        self.looks = asyncio.Semaphore(0)
        self.slept = asyncio.Event()
        self.answers = asyncio.Event()
        self.asked = 0
        self.silence = EngineSilence(TIMEOUT_S, clock=lambda: self.now, sleep=self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.slept.set()
        await self.looks.acquire()
        self.now += seconds + self.stall_s
        self.worked += seconds * self.load
        self.stall_s = 0.0

    async def probe(self) -> None:
        self.asked += 1
        await self.answers.wait()

    @asynccontextmanager
    async def watched(self, **options: object) -> AsyncGenerator[asyncio.Task[None], None]:
        options.setdefault("processor_time", lambda: self.worked)
        watching = asyncio.create_task(self.silence.lasting(self.probe, **options))
        yield watching
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    async def pass_s(self, seconds: float, watching: asyncio.Task[None]) -> None:
        until = self.now + seconds
        while self.now < until and not watching.done():
            self.slept.clear()
            self.looks.release()
            await asyncio.wait({watching, asyncio.ensure_future(self.slept.wait())}, return_when="FIRST_COMPLETED")
            await asyncio.sleep(0)  # what it has asked begins


async def test_an_engine_that_gives_nothing_and_does_nothing_is_stuck() -> None:
    it = Watched()
    async with it.watched() as watching:
        with it.silence.expecting():
            await it.pass_s(STUCK_S - 1, watching)
            assert not watching.done()
            await it.pass_s(2, watching)
            assert watching.done()


async def test_what_an_engine_gave_and_a_reader_or_a_disk_holds_is_no_silence_of_the_engine() -> None:
    it = Watched()
    async with it.watched() as watching:
        with it.silence.expecting():
            with it.silence.given():
                await it.pass_s(20 * TIMEOUT_S, watching)
                assert not watching.done() and it.asked == 0
            await it.pass_s(STUCK_S - 1, watching)
            assert not watching.done(), "it has its whole time again"
            await it.pass_s(2, watching)
            assert watching.done()


async def test_another_request_of_a_reader_that_waits_is_expected_all_the_same() -> None:
    it = Watched()
    async with it.watched() as watching:
        with it.silence.expecting(), it.silence.expecting(), it.silence.given():
            await it.pass_s(STUCK_S + 1, watching)
        assert watching.done()


@pytest.mark.parametrize("how", ["long stalls", "every look is late"])
async def test_time_in_which_this_process_did_not_run_is_nobodys_silence(how: str) -> None:
    it = Watched()
    async with it.watched() as watching:
        with it.silence.expecting():
            for _ in range(8):
                it.stall_s = 10 * TIMEOUT_S if how == "long stalls" else 2.0
                await it.pass_s(0.5, watching)
        assert not watching.done()


async def test_a_long_step_takes_processor_time_and_an_answered_probe_is_a_sign_of_life() -> None:
    it = Watched()
    it.load = 0.9
    it.answers.set()
    async with it.watched() as watching:
        with it.silence.expecting():
            await it.pass_s(5 * TIMEOUT_S, watching)
            assert not watching.done() and it.asked > 4
            it.answers.clear()
            await it.pass_s(TIMEOUT_S + 2, watching)
            assert watching.done()


async def test_a_load_of_weights_has_ten_times_the_time() -> None:
    it = Watched()
    async with it.watched() as watching:
        with it.silence.expecting(), it.silence.long_work():
            await it.pass_s((LONG_WORK - 1) * TIMEOUT_S, watching)
            assert not watching.done()
            await it.pass_s(2 * TIMEOUT_S, watching)
            assert watching.done()


@pytest.mark.parametrize(("asks_idle", "answers"), [(True, False), (True, True), (False, False)])
async def test_an_engine_of_which_nothing_is_asked_is_asked_whether_it_is_there(asks_idle: bool, answers: bool) -> None:
    it = Watched()
    if answers:
        it.answers.set()
    async with it.watched(asks_idle=asks_idle) as watching:
        await it.pass_s(IDLE_S + STUCK_S + 2, watching)
        assert watching.done() is (asks_idle and not answers)
        assert bool(it.asked) is asks_idle


async def test_an_end_that_is_known_already_ends_the_watch() -> None:
    it = Watched()

    async def dead() -> None:
        raise ConnectionError("it is gone")

    it.probe = dead  # type: ignore[method-assign]
    async with it.watched(asks_idle=True) as watching:
        await it.pass_s(IDLE_S + 2, watching)
        with pytest.raises(ConnectionError):
            watching.result()
