"""Rules of mocked_server/vllm/hosted/engine_host.py and remote_engine.py, with an engine that answers by the word of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from buffers.errors import EngineDied, EngineError, RequestFailed, RequestRefused
from buffers.wire.address import WireLost
from buffers.wire.connection import Connection
from buffers.wire.rpc import MAX_UNREAD, Item, decoder_of
from buffers.wire.session import Session
from mocked_server.fleet.member import EngineFigures, EngineLost, Sampled
from mocked_server.vllm.hosted import remote_engine
from mocked_server.vllm.hosted.engine_host import SILENT_S, EngineHost
from mocked_server.vllm.hosted.outputs import WireCompletion, WireOutput, WireSampled
from mocked_server.vllm.hosted.remote_engine import RemoteEngine
from tests.mocked_server.fleet.hosts_here import SECRET, HostHere
from tests.support.patience import PATIENCE_S


class WordEngine:
    """Says numbers up to what the prompt asks for, as fast as `gate` lets it. `errors`: what its next start raises."""

    def __init__(self) -> None:
        self.name, self.version, self.is_up = "e1", 0, False
        self.gate = asyncio.Event()
        self.gate.set()
        self.died = asyncio.Event()
        self.errors: list[Exception] = []
        self.under_way: set[str] = set()
        self.by_itself = False
        self.done: list[str] = []
        self.sampled: Sequence[Sampled] = ()

    async def start(self) -> None:
        self.done.append("start")
        if self.errors:
            raise self.errors.pop(0)
        self.is_up, self.died = True, asyncio.Event()

    async def restart(self) -> None:
        self.done.append("restart")
        await self.start()

    def die(self) -> None:
        self.is_up = False
        self.died.set()

    async def until_dead(self) -> None:
        await self.died.wait()

    async def close(self) -> None:
        self.done.append("close")
        self.is_up = False

    async def load_weights(self, folder: Path, *, version: int) -> float:
        self.done.append(f"load {folder} {version}")
        self.version = version
        return 0.125

    async def sleep(self) -> None:
        self.done.append("sleep")

    async def wake_up(self) -> None:
        self.done.append("wake_up")

    def figures(self) -> EngineFigures:
        return EngineFigures(
            name=self.name, is_up=self.is_up, version=self.version, running=len(self.under_way), waiting=0,
            tokens_held=0, kv_capacity=0, sampled_tokens=len(self.done), prompt_tokens=0, cached_tokens=0,
            preemptions=0, restarts=0,
        )  # fmt: skip

    async def generate(
        self, ids: list[int], params: Any, *, request_id: str, sampled: Sequence[Sampled] = (), **extra: Any
    ) -> AsyncGenerator[Any, None]:
        self.sampled = sampled
        self.under_way.add(request_id)
        try:
            for number in range(ids[0]):
                await self.gate.wait()
                if not self.is_up:
                    raise EngineLost("it died", life=("e1", 1), by_itself=self.by_itself)
                if params == "refuse":
                    raise RequestRefused(
                        "temperature must be >= 0, got -1; leave it out", field="temperature", status=422
                    )
                if params == "defect":
                    raise ZeroDivisionError("1 / 0")
                yield number, number == ids[0] - 1
                await asyncio.sleep(0)
        finally:
            self.under_way.discard(request_id)


class WordCodec:
    """Both sides' codec: an output is a number."""

    def pack_params(self, params: Any) -> msgspec.Raw:
        return msgspec.Raw(msgspec.msgpack.encode(params))

    def params_of(self, data: msgspec.Raw, *, as_deltas: bool) -> Any:
        return msgspec.msgpack.decode(data)

    def pack_output(self, output: Any) -> WireOutput:
        return WireOutput([WireCompletion(0, "", [output[0]], None, None, None, None, [])], output[1], None, None, None)

    def pack_sampled(self, sampled: Sampled) -> WireSampled:
        return WireSampled(sampled.index, sampled.token_ids, None, sampled.versions, sampled.num_sent_chars, None)

    def sampled_of(self, sampled: WireSampled) -> Sampled:
        return Sampled(index=sampled.index, token_ids=sampled.token_ids, logprobs=None, versions=sampled.versions)

    def rebuilt(self, ids: list[int], params: Any, *, request_id: str, sampled: Sequence[Sampled]) -> Any:
        return WordRebuilt()


class WordRebuilt:
    def __init__(self) -> None:
        self.ids: list[int] = []

    def add(self, delta: WireOutput) -> int:
        self.ids += delta.completions[0].token_ids
        return self.ids[-1]

    def sampled(self) -> list[Sampled]:
        return [Sampled(index=0, token_ids=self.ids, logprobs=None, versions=[])]


class Pair:
    """An engine, its host and its client, in one process."""

    def __init__(self) -> None:
        self.engine, self.codec = WordEngine(), WordCodec()
        self.process = HostHere(self.engine, self.codec)
        self.remote = RemoteEngine(self.process, self.codec, secret=SECRET, name="e1", weights=(Path("/w"), 4))

    async def __aenter__(self) -> Pair:
        await self.remote.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.remote.close()

    async def all_of(self, number: int, params: Any = None, **more: Any) -> list[int]:
        stream = self.remote.generate([number], params, request_id=f"r{number}", **more)
        async with aclosing(stream):
            return [output async for output in stream]

    async def cut(self) -> None:
        """As when the host's process is killed."""
        assert self.process.host is not None and self.process.host._listener is not None
        await asyncio.to_thread(self.process.host._listener.close)


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


def asked(number: int, name: str) -> dict[str, Any]:
    """Arguments of `EngineHost.generate`."""
    none = msgspec.Raw(b"\xc0")
    return {"prompt_token_ids": [number], "params": none, "request_id": name, "sampled": [], "extra": {}}


async def read_to_the_end(connection: Connection) -> None:
    while await asyncio.to_thread(connection.receive, 5):
        pass


async def test_outputs_come_in_their_order_however_many_there_are() -> None:
    async with Pair() as pair:
        assert pair.engine.done[:2] == ["load /w 4", "start"] and pair.remote.version == 4
        answers = await asyncio.gather(*(pair.all_of(number) for number in (1, 300, 50, 299)))
        assert answers == [list(range(number)) for number in (1, 300, 50, 299)]
        sampled = [Sampled(index=0, token_ids=[7], logprobs=None, versions=[("4", 0)])]
        await pair.all_of(1, sampled=sampled)
        assert pair.engine.sampled[0].token_ids == [7] and pair.engine.sampled[0].versions == [("4", 0)]


async def test_each_kind_of_failure_is_the_callers_and_ends_nothing_else() -> None:
    async with Pair() as pair:
        going = asyncio.create_task(pair.all_of(400))
        with pytest.raises(RequestRefused, match="temperature must be >= 0") as refused:
            await pair.all_of(1, "refuse")
        assert (refused.value.field, refused.value.status) == ("temperature", 422)
        with pytest.raises(RequestFailed, match="ZeroDivisionError: 1 / 0"):
            await pair.all_of(1, "defect")
        assert await going == list(range(400)) and not pair.engine.under_way


async def test_orders_reach_the_engine_and_their_errors_the_caller() -> None:
    async with Pair() as pair:
        await pair.remote.load_weights(Path("/x"), version=9)
        await pair.remote.sleep()
        await pair.remote.wake_up()
        assert pair.engine.done[2:] == ["load /x 9", "sleep", "wake_up"] and pair.remote.version == 9
        pair.engine.die()
        await asyncio.wait_for(pair.remote.until_dead(), PATIENCE_S)
        pair.engine.errors = [
            EngineDied("killed while it started"),
            EngineError("its arguments are wrong"),
            OSError(2, "no such folder"),
        ]
        with pytest.raises(EngineDied, match="killed while it started"):
            await pair.remote.restart()
        with pytest.raises(EngineError, match="its arguments are wrong") as refused:
            await pair.remote.restart()
        assert not isinstance(refused.value, EngineDied) and not pair.remote.is_up
        with pytest.raises(EngineError, match="engine e1 could not restart: FileNotFoundError"):
            await pair.remote.restart()
        await pair.remote.restart()
        assert pair.remote.is_up and pair.remote.figures().restarts == 4


@pytest.mark.parametrize("by_itself", [True, False])
async def test_a_dead_engine_behind_a_living_host_is_told_with_what_it_sampled(by_itself: bool) -> None:
    async with Pair() as pair:
        pair.engine.by_itself = by_itself
        seen: list[int] = []

        async def read() -> None:
            async for output in pair.remote.generate([10_000_000], None, request_id="long"):
                seen.append(output)

        reading = asyncio.create_task(read())
        await until(lambda: len(seen) > 20)
        pair.engine.die()
        with pytest.raises(EngineLost) as lost:
            await reading
        assert lost.value.sampled[0].token_ids == seen and lost.value.life == ("e1", 1)
        assert lost.value.by_itself is by_itself
        assert seen == list(range(len(seen)))
        await asyncio.wait_for(pair.remote.until_dead(), PATIENCE_S)
        with pytest.raises(EngineLost, match="is down"):
            await pair.all_of(1)


async def test_a_lost_host_is_replaced_by_a_restart() -> None:
    async with Pair() as pair:
        pair.engine.gate.clear()
        waiting = asyncio.create_task(pair.all_of(5))
        await until(lambda: pair.engine.under_way)
        await pair.cut()
        with pytest.raises(EngineLost, match="the host of engine e1 was lost") as lost:
            await asyncio.wait_for(waiting, PATIENCE_S)
        assert not lost.value.by_itself
        await asyncio.wait_for(pair.remote.until_dead(), PATIENCE_S)
        before = pair.remote.figures().sampled_tokens
        assert before > 0 and not pair.remote.is_up
        await pair.remote.load_weights(Path("/y"), version=6)  # told by the restart
        pair.engine.gate.set()
        await pair.remote.restart()
        assert "load /y 6" in pair.engine.done and await pair.all_of(3) == [0, 1, 2]
        assert pair.remote.figures().sampled_tokens > before


@pytest.mark.seconds
async def test_a_host_that_says_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_engine, "SILENT_S", 0.5)
    async with Pair() as pair:
        pair.engine.gate.clear()
        waiting = asyncio.create_task(pair.all_of(5))
        await until(lambda: pair.engine.under_way)
        monkeypatch.setattr(EngineHost, "_beat", lambda self: None)
        with pytest.raises(EngineLost, match=r"gave no sign of life for 0 s"):
            await asyncio.wait_for(waiting, PATIENCE_S)
        assert not pair.remote.is_up


@pytest.mark.seconds
async def test_a_client_that_says_nothing_or_leaves_has_its_requests_aborted() -> None:
    async with Pair() as pair:
        assert pair.process.host is not None
        address = str(pair.process.host.address)
        pair.engine.gate.clear()
        for leaves in (False, True):
            with await asyncio.to_thread(Connection, address, secret=SECRET) as connection:
                connection.send("generate", asked(5, "other"), number=1)
                await until(lambda: pair.engine.under_way == {"other"})
                if leaves:
                    continue
                (silent,) = (each for each in pair.process.host._callers.values() if each.calls)
                silent.peer.heard_at -= SILENT_S + 1
                await until(lambda: not pair.engine.under_way)
                with pytest.raises(WireLost, match="must say something every second"):
                    await read_to_the_end(connection)
        await until(lambda: not pair.engine.under_way)
        pair.engine.gate.set()
        assert await pair.all_of(3) == [0, 1, 2]


async def test_a_slow_reader_gets_all_of_it_in_few_batches() -> None:
    async with Pair() as pair:
        assert pair.process.host is not None
        with await asyncio.to_thread(Connection, str(pair.process.host.address), secret=SECRET) as connection:
            connection.send("generate", asked(5000, "slow"), number=1)
            clients = pair.process.host._callers.values
            await until(lambda: any(each.sent == MAX_UNREAD and not each.calls for each in clients()))
            found: list[int] = []
            batches = 0
            decoder, outputs_of = decoder_of(list[Item]), decoder_of(WireOutput)
            while len(found) < 5000:
                message = await asyncio.to_thread(connection.receive, 10)
                assert message is not None
                if message.kind == "items":
                    batches += 1
                    outputs = [outputs_of.decode(item.value) for item in decoder.decode(message.body)]
                    found += [output.completions[0].token_ids[0] for output in outputs]
                    connection.send("ack", number=message.number)
            assert found == list(range(5000)) and batches == MAX_UNREAD + 1


async def test_what_a_client_cannot_say_ends_its_connection_alone() -> None:
    async with Pair() as pair:
        assert pair.process.host is not None
        for kind, body in (
            ("dance", None),
            ("os.system", {}),
            ("aclose", {}),
            ("generate", [1]),
            ("load_weights", {"folder": 1, "version": 1}),
            ("generate", {**asked(1, "r"), "prompt_token_ids": ["x"]}),
        ):
            with await asyncio.to_thread(Connection, str(pair.process.host.address), secret=SECRET) as connection:
                connection.send(kind, body)
                with pytest.raises(WireLost, match=r"must be asked for one of|Expected|Invalid"):
                    await read_to_the_end(connection)
        assert await pair.all_of(3) == [0, 1, 2]


async def test_a_host_of_another_version_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    greeting = Session.greeting

    def newer(self: Session) -> bytes:
        if self._listens:
            self._own = msgspec.structs.replace(self._own, language=99)
        return greeting(self)

    pair = Pair()
    take = Session.take_greeting

    def take_newer(self: Session, data: bytes) -> None:
        if self._listens:
            self._own = msgspec.structs.replace(self._own, language=99)
        take(self, data)

    monkeypatch.setattr(Session, "take_greeting", take_newer)
    monkeypatch.setattr(Session, "greeting", newer)
    with pytest.raises(
        EngineError, match=r"cannot be asked: both sides must run the same version .* got .* \(wire 99\)"
    ):
        await pair.remote.start()
    await pair.remote.close()
