"""Rules of learner/sft_loop.py: which conversations, in which order, until when; what is left out; a resume changes nothing."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffers.errors import TaskError
from buffers.records import Row
from buffers.tasks.parquet import Trace
from configs.schema import Config, SftConfig
from learner.checkpoints.store import CheckpointStore
from learner.recovery.restarts import RestartLimit
from learner.reporting.display import Display, Terminal
from learner.reporting.tracker import Tracker
from learner.sft_loop import Demonstrations, SftLoop, num_updates, read, rows_of_update
from learner.training.sft import SftRow
from tests.support.learner_parts import make_row


def conversation(number: int) -> list[SftRow]:
    mask = np.array([0, 1, 1], np.uint8)
    return [SftRow(ids=np.array([number, 1, 2], np.int32), mask=mask, conversation=number)]


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return str(path)


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}], **more}


def render(traces: Iterable[Trace]) -> Iterator[list[Row] | Exception]:
    for trace in traces:
        text = trace.messages[-1]["content"]
        yield ValueError("it is bad") if text == "bad" else [make_row([1, 2, ord(text[0])], mask=[0, 0, 1])]


def test_each_pass_goes_through_all_conversations_in_an_order_of_its_own() -> None:
    data = [conversation(number) for number in range(7)]
    orders = []
    for epoch in range(2):
        batches = [rows_of_update(data, step=3 * epoch + step, batch_size=3, seed=5) for step in (1, 2, 3)]
        assert [len(batch) for batch in batches] == [3, 3, 1]
        orders.append([row.conversation for batch in batches for row in batch])
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(7)) and orders[0] != orders[1]
    assert num_updates(SftConfig(epochs=2, batch_size=3), number=7) == 6
    assert num_updates(SftConfig(steps=5, batch_size=3), number=7) == 5


def test_what_is_refused_is_counted_and_named_and_low_scores_are_left_out(tmp_path: Path) -> None:
    path = write(
        tmp_path / "d.jsonl",
        said("a", score=1.0),
        said("bad", score=1.0),
        said("b", score=0.2),
        said("c"),
        said("d", score=2, weight=0.5),
    )
    told: list[str] = []
    data = read(SftConfig(demonstrations=path), seed=0, render=render, say=told.append)
    assert [each[0].conversation for each in data.trained] == [0, 2, 3, 4] and data.num_refused == 1
    assert [each[0].weight for each in data.trained] == [1.0, 1.0, 1.0, 0.5]
    assert told == [f"sft.demonstrations={path}: 1 of 5 conversations are left out: row 1: it is bad"]
    data = read(SftConfig(demonstrations=path, min_score=0.5), seed=0, render=render, say=told.append)
    assert [each[0].conversation for each in data.trained] == [0, 4] and (data.num_low, data.num_refused) == (2, 1)
    only = write(tmp_path / "bad.jsonl", said("bad"))
    with pytest.raises(
        TaskError, match=r"must have a conversation that can be learned, got none of 1: row 0: it is bad"
    ):
        read(SftConfig(demonstrations=only), seed=0, render=render, say=told.append)
    with pytest.raises(TaskError, match=r"none has a score of 9.0 or more"):
        read(SftConfig(demonstrations=path, min_score=9.0), seed=0, render=render, say=told.append)


def test_what_is_held_out_is_never_trained(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", *(said(chr(97 + number)) for number in range(10)))
    data = read(SftConfig(demonstrations=path, validation=0.2), seed=0, render=render, say=print)
    trained, held_out = ({each[0].conversation for each in part} for part in (data.trained, data.held_out))
    assert len(held_out) == 2 and trained | held_out == set(range(10)) and not trained & held_out
    other = write(tmp_path / "v.jsonl", said("z"))
    data = read(SftConfig(demonstrations=path, validation=other), seed=0, render=render, say=print)
    assert (len(data.trained), len(data.held_out)) == (10, 1) and data.held_out[0][0].ids[-1] == ord("z")
    with pytest.raises(TaskError, match=r"sft.validation=0.9 must leave conversations to learn, got 1 in all"):
        read(SftConfig(demonstrations=other, validation=0.9), seed=0, render=render, say=print)


@dataclass
class FakeRanks:
    """Notes what it is told; the held-out loss of step n is `losses[n]`."""

    losses: Sequence[float] = ()
    told: list[Any] = field(default_factory=list)
    step: int = 0

    async def begin_sft(self) -> None:
        self.step = 0

    async def sft_step(self, rows: Sequence[SftRow], *, lr: float) -> dict[str, float]:
        self.step += 1
        self.told.append((self.step, [row.conversation for row in rows], lr))
        return {"sft/loss": 1.0 / self.step, "learner/tokens": 3.0, "learner/trained_tokens": 2.0}

    async def sft_loss(self, rows: Sequence[SftRow]) -> tuple[float, float]:
        return 2.0 * self.losses[self.step], 2.0

    async def end_sft(self) -> None:
        self.told.append("end")

    async def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "step").write_text(str(self.step))

    async def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(parents=True)

    async def load(self, folder: Path) -> None:
        self.step = int((folder / "step").read_text())
        self.told.append(("load", self.step))


async def learn(folder: Path, ranks: FakeRanks, *, stop_after: int = 0, play: Any = None, **keys: Any) -> SftLoop:
    sft = {"demonstrations": "d.jsonl", "batch_size": 2, "epochs": 2, "lr": 1.0, "validation": "v.jsonl", **keys}
    data: dict[str, Any] = {"validation": {"every": 1}}
    config = Config.model_validate(
        {
            "sft": sft,
            "data": data,
            "run": {"checkpoints": {"every": 2}},
            "learner": {"stage": "sft", "lr_warmup_steps": 1},
        }
    )
    held_out = [conversation(99)] if ranks.losses else []

    async def rows() -> Demonstrations:
        return Demonstrations(trained=[conversation(n) for n in range(6)], held_out=held_out, num_refused=1, num_low=0)

    store = CheckpointStore(folder / "checkpoints", keep=1)
    newest = store.newest()
    with closing(Tracker(folder, trackers=(), start=newest.position.step if newest else 0)) as tracker:
        loop = SftLoop(
            config, ranks=ranks, read_rows=rows, store=store, tracker=tracker, play=play,
            display=Display(0, console=Terminal(io.StringIO())), restart_limit=RestartLimit(),
            on_step=lambda: loop.step == stop_after and loop.stop(),
        )  # fmt: skip
        await loop.run()
    return loop


def lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


async def test_updates_have_their_learning_rate_their_lines_and_a_checkpoint(tmp_path: Path) -> None:
    ranks = FakeRanks()
    loop = await learn(tmp_path, ranks)
    steps = [told for told in ranks.told if isinstance(told, tuple)]
    assert [step for step, _, _ in steps] == [1, 2, 3, 4, 5, 6] and ranks.told[-1] == "end"
    assert [lr for _, _, lr in steps] == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert all(type(line["step"]) is int for line in lines(tmp_path)), "the page reads no others"
    assert lines(tmp_path)[-1]["sft/epoch"] == 2.0
    assert [each.position.step for each in CheckpointStore(tmp_path / "checkpoints", keep=1).all()] == [6]
    summary = loop.summary()
    assert (summary["steps"], summary["loss_first"], summary["conversations"], summary["refused"]) == (6, 1.0, 6, 1)


async def test_a_resumed_stage_makes_the_updates_that_were_left(tmp_path: Path) -> None:
    losses = [9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0]
    whole, first, second = FakeRanks(losses), FakeRanks(losses), FakeRanks(losses)
    await learn(tmp_path / "whole", whole)
    await learn(tmp_path / "parts", first, stop_after=3)
    await learn(tmp_path / "parts", second)
    assert second.told[0] == ("load", 3)
    assert [*first.told[:-1], *second.told[1:]] == whole.told
    same = [
        {name: value for name, value in line.items() if not name.startswith(("time/", "throughput/"))}
        for line in lines(tmp_path / "parts")
    ]
    assert same == [
        {name: value for name, value in line.items() if not name.startswith(("time/", "throughput/"))}
        for line in lines(tmp_path / "whole")
    ]
    assert [line["sft/val_loss"] for line in same] == losses


@pytest.mark.parametrize("stop_after", [0, 4])
async def test_it_ends_early_with_the_weights_of_the_lowest_loss(tmp_path: Path, stop_after: int) -> None:
    ranks = FakeRanks([9.0, 5.0, 6.0, 4.0, 4.5, 4.2, 1.0])
    if stop_after:
        await learn(tmp_path, ranks, patience=2, stop_after=stop_after)
        ranks.told.clear()
    loop = await learn(tmp_path, ranks, patience=2)
    assert loop.step == 5 and ranks.told[-2:] == [("load", 3), "end"], "the decision is the same after a resume"
    assert (tmp_path / "best").resolve().parent.name == "step-000003"
    assert loop.summary()["val_loss_best"] == 4.0


async def test_what_is_played_scores_the_checkpoints(tmp_path: Path) -> None:
    async def play(step: int) -> dict[str, float]:
        return {"val/mean": 1.0 if step == 2 else 0.1, "val/best": 1.0, "val/step": float(step)}

    await learn(tmp_path, FakeRanks(), play=play)
    kept = CheckpointStore(tmp_path / "checkpoints", keep=1).all()
    assert [(each.position.step, each.score) for each in kept] == [(2, 1.0), (6, 0.1)]
    assert [line["val/step"] for line in lines(tmp_path)] == [0, 1, 2, 3, 4, 5, 6]
