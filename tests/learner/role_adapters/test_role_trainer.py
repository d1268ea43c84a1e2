"""Rules of learner/training/role_trainer.py: each role is trained as a policy of its own, and none waits for another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from buffers.records import Row, TrainBatch
from configs.schema import LearnerConfig
from learner.model import fsdp
from learner.training.role_trainer import FILE, RoleTrainer, WaitingRows, of_all, read_waiting, write_waiting
from learner.training.trainer import Trainer
from tests.support.learner_parts import make_model, make_row, make_trainer, walks
from tests.support.ports import held_port

KNOBS: dict[str, Any] = {
    "lora": {"rank": 4, "alpha": 8.0}, "lr": 1e-2, "lr_warmup_steps": 0, "critic": "none", "advantage": "grpo",
    "kl": {"coef": 0.01, "target": 0.05},
}  # fmt: skip
ROLES = ("scout", "runner")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@contextmanager
def two_roles(model: Path, *, roles: Sequence[str] = ROLES, groups_per_step: int = 2) -> Iterator[RoleTrainer]:
    trainer = RoleTrainer(
        LearnerConfig(**KNOBS),
        roles=roles,
        groups_per_step=groups_per_step,
        model_path=str(model),
        dtype="float32",
        temperature=1.0,
        seed=0,
        keep_versions=2,
        address=f"127.0.0.1:{held_port()}",
        rank=0,
        world_size=1,
        device="cpu",
    )
    try:
        yield trainer
    finally:
        trainer.close()


@contextmanager
def one_policy(model: Path) -> Iterator[Trainer]:
    trainer = make_trainer(model, **KNOBS)
    try:
        yield trainer
    finally:
        trainer.close()


def said_by(role: str, *, seed: int, version: int = 0, groups: Sequence[int] = (0, 1)) -> list[Row]:
    """Rows of one role, in two groups of other episodes than another seed's."""
    rows = walks(seed=seed, version=version).rows
    return [replace(row, role=role, group_id=groups[row.group_id]) for row in rows]


def half_stored(rows: Sequence[Row], *, step: int) -> list[Row]:
    """With the second group as one that was trained before, from the second step on."""
    return [replace(row, times_trained=int(step > 0 and row.group_id == 1)) for row in rows]


def adapter_of(trainer: RoleTrainer, role: str) -> fsdp.Shards:
    trainer._enter(role)
    return fsdp.clone_shards(trainer._policy)


def same(one: fsdp.Shards, two: fsdp.Shards) -> bool:
    return all(torch.equal(left, right) for left, right in zip(one, two, strict=True))


@pytest.mark.seconds
def test_a_role_is_trained_bit_for_bit_as_if_it_were_the_only_policy(model: Path) -> None:
    """Batches, optimizer, KL coefficient, reference and earlier versions are its own."""
    alone, figures = {}, {}
    for number, role in enumerate(ROLES):
        with one_policy(model) as trainer:
            for step in range(3):
                rows = [
                    replace(row, role="") for row in said_by(role, seed=10 * number + step, version=max(0, step - 1))
                ]
                figures[role] = trainer.train_step(TrainBatch(rows=half_stored(rows, step=step)), version=step)
            alone[role] = fsdp.clone_shards(trainer._policy)
    assert not same(alone["scout"], alone["runner"])
    with two_roles(model) as trainer:
        for step in range(3):
            rows = [
                row
                for number, role in enumerate(ROLES)
                for row in said_by(role, seed=10 * number + step, version=max(0, step - 1))
            ]
            rows.sort(key=lambda row: row.group_id)
            found = trainer.train_step(TrainBatch(rows=half_stored(rows, step=step)), version=step)
        assert all(same(adapter_of(trainer, role), alone[role]) for role in ROLES)
        assert trainer.versions() == {"scout": 3, "runner": 3}
        for role in ROLES:
            for name in (
                "policy/kl_coef",
                "policy/kl_ref",
                "policy/grad_norm",
                "policy/max_logprob_diff",
                "policy/lag_mean",
                "replay/ratio_mean",
            ):
                assert found[f"adapter/{role}/{name}"] == figures[role][name], (role, name)
    largest = max(figures[role]["policy/max_logprob_diff"] for role in ROLES)
    assert found["policy/max_logprob_diff"] == largest
    tokens = sum(figures[role]["learner/trained_tokens"] for role in ROLES)
    assert found["learner/trained_tokens"] == tokens


def test_a_role_that_says_nothing_keeps_its_weights_and_stops_no_other(model: Path) -> None:
    with two_roles(model) as trainer:
        before = {role: adapter_of(trainer, role) for role in ROLES}
        for step in range(3):
            found = trainer.train_step(TrainBatch(rows=said_by("scout", seed=step, version=step)), version=step)
            assert found["adapter/scout/version"] == step + 1
            assert found["adapter/runner/version"] == found["adapter/runner/groups_trained"] == 0.0
            assert not any(name.startswith("adapter/runner/policy/") for name in found)
        assert trainer.versions() == {"scout": 3, "runner": 0}
        assert same(adapter_of(trainer, "runner"), before["runner"])
        assert not same(adapter_of(trainer, "scout"), before["scout"])
        nobody = trainer.train_step(TrainBatch(rows=said_by("frozen", seed=9)), version=3)
        assert trainer.versions() == {"scout": 3, "runner": 0} and "policy/grad_norm" not in nobody


@pytest.mark.seconds
def test_the_rows_of_a_role_wait_until_they_are_of_enough_groups(model: Path) -> None:
    with one_policy(model) as trainer:
        rows = [replace(row, role="") for row in said_by("runner", seed=5)]
        trainer.train_step(TrainBatch(rows=rows), version=0)
        together = fsdp.clone_shards(trainer._policy)
    with two_roles(model) as trainer:
        runner = said_by("runner", seed=5)
        for step, group in enumerate((0, 1)):
            own = [row for row in runner if row.group_id == group]
            scout = said_by("scout", seed=step, version=step, groups=(10 + step, 20 + step))
            found = trainer.train_step(TrainBatch(rows=[*scout, *own]), version=step)
            assert found["adapter/runner/groups_waiting"] == 1 - step
            assert found["adapter/runner/groups_trained"] == 2 * step
            figures = trainer.token_figures()
            assert figures is not None
            weighed = figures.weighed.sum() - sum(row.num_trained for row in scout)
            assert weighed == step * sum(row.num_trained for row in own), "of this step's rows only"
            assert len(figures.learner) == sum(row.num_trained for row in [*scout, *own])
        assert trainer.versions() == {"scout": 2, "runner": 1}
        assert same(adapter_of(trainer, "runner"), together)


def test_a_token_is_too_old_by_the_versions_of_its_own_role(model: Path) -> None:
    with two_roles(model) as trainer:
        for step in range(3):
            trainer.train_step(TrainBatch(rows=said_by("scout", seed=step, version=step)), version=step)
        rows = [*said_by("scout", seed=3, version=1), *said_by("runner", seed=4, version=0)]
        found = trainer.train_step(TrainBatch(rows=rows), version=3)
        assert found["adapter/scout/groups_too_old"] == 2.0 and found["adapter/scout/version"] == 3.0
        assert found["adapter/runner/groups_too_old"] == 0.0 and found["adapter/runner/version"] == 1.0
        assert found["adapter/runner/policy/lag_max"] == 0.0


@pytest.mark.seconds
def test_a_checkpoint_gives_back_every_role_and_the_rows_that_wait(model: Path, tmp_path: Path) -> None:
    runner = said_by("runner", seed=5)
    last = [
        *said_by("scout", seed=7, version=1, groups=(30, 31)),
        *[row for row in runner if row.group_id == 1],
    ]

    def begin(trainer: RoleTrainer) -> None:
        rows = [*said_by("scout", seed=6, groups=(10, 11)), *[row for row in runner if row.group_id == 0]]
        trainer.train_step(TrainBatch(rows=rows), version=0)

    with two_roles(model) as trainer:
        begin(trainer)
        trainer.save(tmp_path / "saved")
        expected = trainer.train_step(TrainBatch(rows=last), version=1)
        weights = {role: adapter_of(trainer, role) for role in ROLES}
    assert expected["adapter/runner/groups_trained"] == 2.0
    with two_roles(model) as trainer:
        trainer.load(tmp_path / "saved")
        assert trainer.versions() == {"scout": 1, "runner": 0}
        found = trainer.train_step(TrainBatch(rows=last), version=1)
        assert all(same(adapter_of(trainer, role), weights[role]) for role in ROLES)
    timed = {name for name in found if "time/" in name or name.endswith("learner/mfu")}
    assert {name: found[name] for name in found.keys() - timed} == {
        name: expected[name] for name in expected.keys() - timed
    }
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "saved" / "scout").iterdir()}
    assert max(sizes.values()) < (model / "model.safetensors").stat().st_size, "the base is not in it"


@pytest.mark.seconds
def test_a_checkpoint_of_others_is_refused_in_a_line(model: Path, tmp_path: Path) -> None:
    with one_policy(model) as trainer:
        trainer.save(tmp_path / "one")
    with two_roles(model) as trainer:
        trainer.save(tmp_path / "two")
        with pytest.raises(ValueError, match=r"the roles scout, runner, got one policy; resume with"):
            trainer.load(tmp_path / "one")
    with two_roles(model, roles=("scout", "judge")) as trainer, pytest.raises(ValueError, match="got runner, scout"):
        trainer.load(tmp_path / "two")
    with (
        one_policy(model) as trainer,
        pytest.raises(ValueError, match=r"one policy, got no counters.json; resume with"),
    ):
        trainer.load(tmp_path / "two")


def test_the_saved_model_is_the_base_with_an_adapter_for_each_role(model: Path, tmp_path: Path) -> None:
    with two_roles(model) as trainer:
        trainer.train_step(TrainBatch(rows=said_by("scout", seed=1)), version=0)
        trainer.save_pretrained(tmp_path / "out")
        ids = torch.from_numpy(walks().rows[0].ids).long()
        size = sum(part.numel() for part in adapter_of(trainer, "scout"))
    saved, original = load_file(tmp_path / "out" / "model.safetensors"), load_file(model / "model.safetensors")
    assert all(torch.equal(saved[name], original[name]) for name in original)
    assert (tmp_path / "out" / "adapters" / "versions.json").read_text() == '{"scout": 1, "runner": 0}\n'
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        plain = base(ids[None]).logits
        runner = PeftModel.from_pretrained(base, tmp_path / "out" / "adapters" / "runner")(ids[None]).logits
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        scout = PeftModel.from_pretrained(base, tmp_path / "out" / "adapters" / "scout")(ids[None]).logits
    assert float((runner - plain).abs().max()) < 1e-5, "its adapter has learned nothing"
    assert float((scout - plain).abs().max()) > 0.01
    stored = load_file(tmp_path / "out" / "adapters" / "scout" / "adapter_model.safetensors")
    assert sum(weight.numel() for weight in stored.values()) == size


def test_a_batch_with_a_score_that_is_not_finite_changes_no_role(model: Path) -> None:
    with two_roles(model) as trainer:
        before = adapter_of(trainer, "scout")
        rows = [*said_by("scout", seed=1), *said_by("runner", seed=2)]
        rows[-1] = replace(rows[-1], score=float("nan"))
        with pytest.raises(ValueError, match="must be finite"):
            trainer.train_step(TrainBatch(rows=rows), version=0)
        assert same(adapter_of(trainer, "scout"), before) and trainer.versions() == {"scout": 0, "runner": 0}


def test_a_stored_group_waits_by_its_own_age_and_once() -> None:
    waiting = WaitingRows()
    old = make_row([1, 2], mask=[0, 1], group=4, version=4, role="scout", times_trained=1)
    assert waiting.add([old], min_version=6, min_stored=5) == 1 and waiting.num_groups == 0
    assert waiting.add([old], min_version=6, min_stored=4) == 0 and waiting.num_groups == 1
    assert waiting.add([replace(old, times_trained=2)], min_version=6, min_stored=4) == 0
    assert [row.times_trained for row in waiting.take()] == [1]


def test_rows_that_wait_are_read_as_they_were_written(tmp_path: Path) -> None:
    row = make_row(
        [5, 6, 7, 8], mask=[0, 1, 0, 1], episode="3-1-0", group=3, score=0.1 + 0.2, logprobs=[-0.1, -0.7, -0.2, -1e-9],
        version=[0, 4, 0, 5], rounds=[0, 2, 0, 3], loss_weight=1 / 3, role="scout", role_score=2.5, branch_score=-1.0,
        round_scores={2: 0.5}, hint="ä", judges={"style": 0.25}, truncated=(3,),
        experts=np.arange(16, dtype=np.uint16).reshape(4, 2, 2),
    )  # fmt: skip
    waiting = {role: WaitingRows() for role in ROLES}
    greedy = make_row([1, 2], mask=[0, 1], episode="3-0-0", group=3, version=4, role="scout", greedy=True)
    assert waiting["scout"].add([greedy, row], min_version=5, min_stored=0) == 0
    assert (
        waiting["scout"].add(
            [make_row([1, 2], mask=[0, 1], group=4, version=4, role="scout")], min_version=5, min_stored=0
        )
        == 1
    )
    assert (
        waiting["scout"].add([make_row([1, 2], mask=[0, 0], group=5, role="scout")], min_version=0, min_stored=0) == 0
    )
    write_waiting(tmp_path, waiting)
    assert (tmp_path / FILE).is_file()
    found = read_waiting(tmp_path, roles=ROLES)
    assert found["runner"].take() == [] and found["scout"].num_groups == 1
    first, second = found["scout"].take()
    assert found["scout"].num_groups == 0
    for one, other in ((first, greedy), (second, row)):
        for name in Row.__dataclass_fields__:
            left, right = getattr(one, name), getattr(other, name)
            is_same = (
                np.array_equal(left, right) and left.dtype == right.dtype
                if isinstance(right, np.ndarray)
                else left == right
            )
            assert is_same, name


def test_a_steps_figures_are_weighed_by_trained_tokens() -> None:
    one = {"learner/trained_tokens": 30.0, "policy/entropy": 1.0, "policy/max_logprob_diff": 1e-6, "policy/kl_ref": 0.5}
    two = {"learner/trained_tokens": 10.0, "policy/entropy": 3.0, "policy/max_logprob_diff": 3e-6}
    assert of_all({"a": one, "b": two}) == {
        "learner/trained_tokens": 40.0,
        "policy/entropy": 1.5,
        "policy/max_logprob_diff": 3e-6,
        "policy/kl_ref": 0.5,
    }
    assert of_all({}) == {}
