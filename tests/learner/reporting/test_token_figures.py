"""Rules of the learner's figures of single tokens: whole episodes, by round, bounded, and gone with steps that are made again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from buffers.records import TrainBatch
from learner.reporting import token_figures
from learner.reporting.token_figures import TokenFigures, TokenFiles, read_figures
from tests.support.learner_parts import walks


def figures(batch: TrainBatch) -> TokenFigures:
    number = sum(row.num_trained for row in batch.rows if not row.greedy)
    ramp = np.arange(number, dtype=np.float32)
    return TokenFigures(learner=-ramp, start=ramp / 2, advantage=ramp, weighed=(ramp % 2).astype(np.uint8))


def test_an_episodes_figures_come_back_by_round_in_order(tmp_path):
    batch = walks()
    TokenFiles(tmp_path).add(batch, figures(batch), step=3)
    place = 0
    for row in batch.rows:
        found = read_figures(tmp_path, step=3, episode_id=row.episode_id)
        together = np.concatenate([found[index].advantage for index in sorted(found)])
        assert together.tolist() == list(range(place, place + row.num_trained))
        assert sorted(found) == np.unique(row.rounds[row.mask == 1]).tolist()
        assert all(np.array_equal(one.learner, -one.advantage) for one in found.values())
        place += row.num_trained
    assert read_figures(tmp_path, step=4, episode_id=batch.rows[0].episode_id) == {}
    assert read_figures(tmp_path, step=3, episode_id="none") == {}


def test_greedy_rows_have_no_figures_and_shift_none(tmp_path):
    batch = walks()
    batch = TrainBatch(rows=[replace(batch.rows[0], greedy=True), *batch.rows[1:]])
    TokenFiles(tmp_path).add(batch, figures(batch), step=1)
    assert read_figures(tmp_path, step=1, episode_id=batch.rows[0].episode_id) == {}
    second = read_figures(tmp_path, step=1, episode_id=batch.rows[1].episode_id)
    assert second[min(second)].advantage[0] == 0.0


def test_a_step_keeps_whole_episodes_until_it_is_full(tmp_path, monkeypatch):
    batch = walks()
    monkeypatch.setattr(token_figures, "MOST_TOKENS", sum(row.num_trained for row in batch.rows[:3]) + 1)
    TokenFiles(tmp_path).add(batch, figures(batch), step=1)
    kept = [row for row in batch.rows if read_figures(tmp_path, step=1, episode_id=row.episode_id)]
    scores = [row.score for row in batch.rows]
    assert 1 < len(kept) < len(batch.rows)
    assert max(scores) in [row.score for row in kept] and min(scores) in [row.score for row in kept]
    for row in kept:
        found = read_figures(tmp_path, step=1, episode_id=row.episode_id)
        assert sum(len(one.start) for one in found.values()) == row.num_trained


def test_old_steps_make_room_and_later_ones_are_made_again(tmp_path, monkeypatch):
    batch = walks()
    files = TokenFiles(tmp_path)
    files.add(batch, figures(batch), step=1)
    size = (tmp_path / "tokens" / "step-000001.npz").stat().st_size
    monkeypatch.setattr(token_figures, "MOST_BYTES", 3 * size + size // 2)
    for step in range(2, 6):
        files.add(batch, figures(batch), step=step)
    assert sorted(file.name for file in (tmp_path / "tokens").iterdir()) == [
        f"step-00000{step}.npz" for step in (3, 4, 5)
    ]
    TokenFiles(tmp_path, start=4)
    assert sorted(file.name for file in (tmp_path / "tokens").iterdir()) == ["step-000003.npz", "step-000004.npz"]


def test_a_damaged_file_gives_nothing(tmp_path):
    batch = walks()
    TokenFiles(tmp_path).add(batch, figures(batch), step=1)
    file = tmp_path / "tokens" / "step-000001.npz"
    file.write_bytes(file.read_bytes()[:100])
    assert read_figures(tmp_path, step=1, episode_id=batch.rows[0].episode_id) == {}
    file.write_bytes(b"")
    assert read_figures(tmp_path, step=1, episode_id=batch.rows[0].episode_id) == {}
