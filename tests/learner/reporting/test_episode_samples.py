"""Traces: the best and the worst episode of each batch, as text and id for id."""

from __future__ import annotations

import json

import numpy as np

from buffers.records import Row, TrainBatch
from learner.reporting.tracker import Traces


def row(episode_id, score, *, ids, mask):
    mask = np.array(mask, np.uint8)
    return Row(
        episode_id=episode_id,
        group_id=1,
        score=score,
        ids=np.array(ids, np.int32),
        mask=mask,
        logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        versions=np.where(mask, 3, -1).astype(np.int32),
        rounds=np.where(mask, 0, -1).astype(np.int32),
    )


def batch(*scores):
    rows = [row(f"e{n}", score, ids=[1, 2, 3, 4, 5], mask=[0, 1, 1, 0, 1]) for n, score in enumerate(scores)]
    return TrainBatch(rows=[*rows, row("e0", scores[0], ids=[9], mask=[1])])


def read(folder):
    return [json.loads(line) for line in (folder / "traces.jsonl").read_text().splitlines()]


def decode(ids):
    return "-".join(str(i) for i in ids)


def test_the_best_and_the_worst_episode_of_a_batch_are_written_with_all_their_rows(tmp_path):
    traces = Traces(tmp_path, decode=decode)
    traces.add(batch(0.5, 1.0, 0.25), step=1)
    traces.add(batch(2.0), step=2)
    best, worst, only = read(tmp_path)
    assert [(line["step"], line["episode_id"], line["score"]) for line in (best, worst, only)] == [
        (1, "e1", 1.0),
        (1, "e2", 0.25),
        (2, "e0", 2.0),
    ]
    assert len(only["rows"]) == 2
    assert best["rows"][0]["turns"] == [
        {"trained": False, "text": "1"},
        {"trained": True, "text": "2-3"},
        {"trained": False, "text": "4"},
        {"trained": True, "text": "5"},
    ]
    assert best["rows"][0]["ids"] == [1, 2, 3, 4, 5]
    assert best["rows"][0]["logprobs"] == [0.0, -0.5, -0.5, 0.0, -0.5]
    assert best["rows"][0]["versions"] == [-1, 3, 3, -1, 3]


def test_steps_that_are_made_again_are_dropped(tmp_path):
    traces = Traces(tmp_path, decode=decode)
    for step in (1, 2, 3):
        traces.add(batch(1.0), step=step)
    Traces(tmp_path, decode=decode, start=2)
    assert [line["step"] for line in read(tmp_path)] == [1, 2]
