"""Rules of buffers/wire/service.py and client.py: what every service on the wire keeps, whatever its methods do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from buffers.errors import EngineDied, EngineError, RequestRefused, UnderstudyError
from buffers.records import Int32
from buffers.wire.address import Way, WireLost
from buffers.wire.client import AsyncClient, Client
from buffers.wire.connection import Connection
from buffers.wire.rpc import Later, remote
from buffers.wire.service import Call, Service
from tests.support.patience import PATIENCE_S

SECRET = b"s" * 32


class Numbers(Service):
    """Counts what it is asked."""

    def __init__(self) -> None:
        super().__init__(name="numbers", secret=SECRET, way=Way.LOCAL, silent_s=20.0)
        self.asked: list[int] = []
        self.open: dict[int, Call[int]] = {}
        self.aborted: list[int] = []

    def state(self) -> int:
        return len(self.asked)

    @remote
    def double(self, values: Int32) -> Later[Int32]:
        self.asked.append(len(values))
        return Later([], lambda: values * 2)

    @remote
    async def fail(self, kind: str) -> None:
        raise {"died": EngineDied("it died"), "system": OSError(2, "no such folder")}.get(kind) or RequestRefused(
            "temperature must be >= 0", field="temperature", status=422
        )

    @remote
    def count(self, call: Call[int], to: int) -> None:
        self.asked.append(to)
        self.open[to] = call
        call.on_abort = lambda: self.aborted.append(to)

    @remote
    def break_off(self) -> None:
        raise OSError(5, "the disk is gone")

    def secret_method(self) -> None:
        raise AssertionError("nobody can ask for it")


@asynccontextmanager
async def pair(**settings: Any) -> AsyncIterator[tuple[Numbers, AsyncClient]]:
    service = Numbers()
    service.listen(asyncio.get_running_loop())
    connection = await asyncio.to_thread(Connection, service.address, secret=SECRET)
    client = AsyncClient(
        connection, Numbers, name="numbers", silent_s=20.0, lost_as=EngineError,
        **{"on_state": lambda _: None, "on_lost": lambda: None, **settings},
    )  # fmt: skip
    try:
        yield service, client
    finally:
        await client.close()
        await service.aclose()


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


async def test_calls_begin_in_their_order_and_arrays_arrive_as_they_were() -> None:
    states: list[int] = []
    async with pair(on_state=states.append) as (service, client):
        values = [np.arange(number, dtype=np.int32) for number in range(50)]
        answers = await asyncio.gather(*(client.call(Numbers.double, values=each) for each in values))
        assert service.asked == list(range(50)) and states[-1] == 50
        assert all(np.array_equal(got, 2 * sent) and got.dtype == np.int32 for got, sent in zip(answers, values))


async def test_what_a_method_raises_comes_as_its_kind_and_ends_nothing_else() -> None:
    async with pair() as (_, client):
        with pytest.raises(EngineDied, match="it died"):
            await client.call(Numbers.fail, kind="died")
        with pytest.raises(UnderstudyError, match=r"FileNotFoundError: .*no such folder"):
            await client.call(Numbers.fail, kind="system")
        with pytest.raises(RequestRefused) as refused:
            await client.call(Numbers.fail, kind="refused")
        assert (refused.value.field, refused.value.status) == ("temperature", 422) and client.lost is None


async def test_items_come_in_their_order_and_who_leaves_aborts() -> None:
    async with pair() as (service, client):
        items: list[Any] = []
        client.begin(Numbers.count, lambda *item: items.append(item), to=1)
        left = client.begin(Numbers.count, lambda *item: items.append(item), to=2)
        await until(lambda: len(service.open) == 2)
        client.abort(left)
        await until(lambda: service.aborted == [2])
        for number in range(300):
            service.open[1].push(number, is_last=number == 299)
            service.open[2].push(number)
        await until(lambda: len(items) == 300)
        assert [item[0] for item in items] == list(range(300)) and items[-1] == (299, None, True)
        service.open[1].push(300)  # after its end: nothing
        assert not service.open[1].is_open and not client._pending


async def test_a_call_that_is_given_up_in_the_turn_in_which_it_was_made_is_aborted() -> None:
    async with pair() as (service, client):
        client.abort(client.begin(Numbers.count, lambda *_: None, to=7))
        await until(lambda: service.aborted == [7])


async def test_what_is_under_way_when_the_service_ends_is_lost() -> None:
    lost: list[str] = []
    async with pair(on_lost=lambda: lost.append("lost")) as (service, client):
        ends: list[Any] = []
        client.begin(Numbers.count, lambda *item: ends.append(item), to=1)
        await until(lambda: service.open)
        await asyncio.to_thread(service.close)
        await until(lambda: ends)
        assert isinstance(ends[0][1], EngineError) and "numbers was lost" in str(ends[0][1]) and lost == ["lost"]
        with pytest.raises(EngineError, match="numbers was lost"):
            await client.call(Numbers.double, values=np.zeros(1, np.int32))
    assert service.aborted == [1]


@pytest.mark.parametrize(
    ("kind", "body", "why"),
    [
        ("secret_method", {}, "must be asked for one of"), ("close", {}, "must be asked for one of"),
        ("double", {"values": 5}, "bytes-like object is required"), ("double", {"values": b"123"}, "multiple of element size"),
        ("double", {"values": b"", "self": 1}, "unknown field `self`"), ("fail", {}, "missing required field `kind`"),
        ("count", {"to": 1, "call": 2}, "unknown field `call`"), ("calls", [[1, "double", 5]], "Expected `object`"),
        ("calls", [[9, "count", {"to": 1}], [9, "count", {"to": 1}]], "a number of its own"),
        ("break_off", {}, "the disk is gone"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("in_thread", [True, False])
async def test_an_invalid_call_ends_its_connection_alone(kind: str, body: Any, why: str, in_thread: bool) -> None:
    service = Numbers()
    service.listen(None if in_thread else asyncio.get_running_loop())
    with await asyncio.to_thread(Connection, service.address, secret=SECRET) as connection:
        connection.send(kind, body)
        with pytest.raises(WireLost, match=why):
            await asyncio.to_thread(read_to_the_end, connection)

    def ask() -> Any:
        with Client(service.address, secret=SECRET, answer_s=PATIENCE_S) as good:
            return good.call(Numbers.double, values=np.ones(3, np.int32))

    assert (await asyncio.to_thread(ask)).tolist() == [2, 2, 2]
    await service.aclose()


def read_to_the_end(connection: Connection) -> None:
    while connection.receive(PATIENCE_S):
        pass
