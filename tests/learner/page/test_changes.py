"""Rules of the page's events: what changed and no more, once, and again for a reader that comes back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from buffers.ledger.ledger import Ledger
from learner.page import run_set
from learner.page.run_set import Changes, Known, RunSet, here, read_tick, tick_of
from tests.learner.page.page_parts import machine_line, make_run, open_group, write_lines


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path)


@pytest.fixture
def runs(run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunSet]:
    monkeypatch.setattr(run_set, "LOOK_S", 0.01)
    monkeypatch.setattr(run_set, "MOST_LOOK_S", 0.01)
    found = RunSet([run], meanings={})
    yield found
    found.close()


class Reader:
    """One connection."""

    def __init__(self, stream: AsyncIterator[bytes]) -> None:
        self._stream = stream
        self.tick = ""

    async def bundle(self) -> dict[str, dict[str, Any]]:
        """The events until one with an id, by name."""
        found: dict[str, dict[str, Any]] = {}
        async for text in self._stream:
            fields = dict(line.split(": ", 1) for line in text.decode().splitlines() if ": " in line and line[0] != ":")
            if "event" in fields:
                found[fields["event"]] = json.loads(fields["data"])
            if "id" in fields:
                self.tick = fields["id"]
                return found
        raise AssertionError("the stream has ended")

    async def close(self) -> None:
        await self._stream.aclose()  # type: ignore[attr-defined]


async def test_a_new_reader_learns_the_state_and_then_what_changes(run, runs):
    known = tick_of({"seen": here(runs.view("seen"))})
    reader = Reader(Changes(runs).stream(["seen"], since=known))
    first = await reader.bundle()
    assert set(first) == {"run", "ledger"} and first["run"]["step"] == 2
    assert first["ledger"]["counts"]["groups/trained"] == 2 and first["ledger"]["version"] == 2
    write_lines(run / "metrics.jsonl", [{"step": 3, "reward/mean": 1.0}], mode="a")
    second = await reader.bundle()
    assert set(second) == {"run", "metrics"} and second["metrics"]["rows"] == [{"step": 3, "reward/mean": 1.0}]
    write_lines(run / "machine.jsonl", [machine_line(at=9.0)], mode="a")
    assert (await reader.bundle())["machine"]["now"]["at"] == 9.0
    with Ledger(run / "ledger.sqlite") as ledger:
        open_group(ledger, 9, version=2)
        while "ledger" not in (told := await reader.bundle()):
            pass
    assert told["ledger"]["counts"]["groups/open"] >= 1
    await reader.close()


async def test_a_reader_that_comes_back_is_told_what_it_missed(run, runs):
    reader = Reader(Changes(runs).stream(["seen"], since=tick_of({"seen": here(runs.view("seen"))})))
    await reader.bundle()
    await reader.close()
    write_lines(run / "metrics.jsonl", [{"step": 3, "a": 1.0}, {"step": 4, "a": 2.0}], mode="a")
    again = Reader(Changes(runs).stream(["seen"], since=reader.tick))
    told = await again.bundle()
    assert set(told) == {"run", "metrics"} and [row["step"] for row in told["metrics"]["rows"]] == [3, 4]
    await again.close()


@pytest.mark.parametrize(
    "since",
    ["nonsense", "00000000!seen.3.-.-.live-2", f"{run_set.BOOT}!seen.x.y"],
    ids=["nonsense", "another process", "no numbers"],
)
async def test_an_id_of_another_process_means_all_again(runs, since):
    reader = Reader(Changes(runs).stream(["seen"], since=since))
    told = await reader.bundle()
    assert set(told) == {"reset"} and read_tick(told["reset"]["tick"]) == {"seen": here(runs.view("seen"))}
    await reader.close()


async def test_figures_that_were_rewritten_mean_all_again(run, runs):
    reader = Reader(Changes(runs).stream(["seen"], since=tick_of({"seen": here(runs.view("seen"))})))
    await reader.bundle()
    write_lines(run / "metrics.jsonl", [{"step": 1, "reward/mean": 0.5}])
    assert "reset" in await reader.bundle()
    await reader.close()


async def test_a_run_that_appears_is_told(run, tmp_path, monkeypatch):
    monkeypatch.setattr(run_set, "LOOK_S", 0.01)
    times = iter(range(0, 10_000, 10))
    runs = RunSet([tmp_path], meanings={}, clock=lambda: float(next(times)))
    reader = Reader(Changes(runs).stream(["seen"], since=""))
    assert "ledger" in await reader.bundle()
    make_run(tmp_path, name="later")
    assert set(await reader.bundle()) == {"runs"}
    await reader.close()
    runs.close()


def test_a_tick_says_all_that_its_reader_knows_whatever_a_run_is_called():
    known = {"a!b. c": Known(line=3, machine="17", ledger="4", state="live-2"), "d": Known()}
    assert read_tick(tick_of(known)) == known and "\n" not in tick_of({"a\nb": Known()})


async def test_several_pages_look_at_the_same_moments_and_less_often(runs, monkeypatch):
    monkeypatch.setattr(run_set, "LOOK_S", 1.0)
    monkeypatch.setattr(run_set, "MORE_LOOK_S", 1.0)
    monkeypatch.setattr(run_set, "MOST_LOOK_S", 4.0)
    told = Changes(runs)
    readers = [Reader(told.stream(["seen"], since="")) for _ in range(4)]
    await readers[0].bundle()
    assert [told._pause_s(now) for now in (7.25, 8.75)] == [0.75, 0.25]
    await readers[1].bundle()
    assert [told._pause_s(now) for now in (7.25, 8.75, 10.0)] == [0.75, 1.25, 2.0]
    for reader in readers[2:]:
        await reader.bundle()
    assert [told._pause_s(now) for now in (7.25, 8.75, 10.0)] == [0.75, 3.25, 2.0]
    for reader in readers[1:]:
        await reader.close()
    assert told._pause_s(8.75) == 0.25
    await readers[0].close()
