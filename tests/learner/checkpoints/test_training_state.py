"""Rules of learner/checkpoints/training_state.py: what was saved is loaded to the bit, in new processes, or refused as
a whole."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from buffers.errors import StorageFull
from buffers.records import Position, TrainBatch
from configs.load import load_config
from configs.schema import Config, LearnerConfig
from learner.checkpoints.store import CheckpointError, CheckpointStore
from learner.run import check_models
from learner.startup.run_folder import check_resumed
from learner.training.ranks import LearnerRanks, RankFailed
from learner.training.trainer import Trainer
from tests.support.faults.disks import FAULTS, NEEDS_ROOT, small_disk
from tests.support.learner_parts import make_model, make_trainer, walks
from tests.support.weights.published_weights import published, published_by

pytestmark = pytest.mark.seconds

KNOBS: dict[str, Any] = {
    "lr": 1e-3, "critic": "separate", "critic_lr": 2e-3, "lr_warmup_steps": 3, "token_budget": 100,
    "kl": {"coef": 0.01, "target": 0.001}, "epochs": 2,
}  # fmt: skip
CLOCKS = {"time/prepare_s", "time/train_s", "learner/mfu"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


def batches() -> list[TrainBatch]:
    """Four steps; the later ones hold tokens of an older version too."""
    mixed = [
        TrainBatch(rows=[*walks(seed=s, version=s - 1).rows[:3], *walks(seed=s, version=s).rows[3:]]) for s in (1, 2, 3)
    ]
    return [walks(), *mixed]


def trained(trainer: Trainer, *, start: int, end: int) -> list[dict[str, float]]:
    return [trainer.train_step(batch, version=v) for v, batch in enumerate(batches()) if start <= v < end]


def without_clocks(figures: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in step.items() if name not in CLOCKS} for step in figures]


def test_a_rank_that_is_alone_asks_nobody(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo's threads would slow down those of its updates."""
    trainer = make_trainer(model, **KNOBS)
    for name in ("all_reduce", "gather_object", "scatter_object_list", "all_gather_object", "broadcast_object_list"):
        monkeypatch.setattr(torch.distributed, name, None)
    try:
        trained(trainer, start=0, end=1)
        trainer.save(tmp_path)
        trainer.load(tmp_path)
    finally:
        trainer.close()


def test_training_goes_on_bit_for_bit_in_a_new_trainer(model: Path, tmp_path: Path) -> None:
    first = make_trainer(model, **KNOBS)
    trained(first, start=0, end=2)
    first.save(tmp_path / "two")
    after = trained(first, start=2, end=4)  # saving changes nothing
    wanted = published(first)
    first.close()
    second = make_trainer(model, **KNOBS)
    torch.rand(5)  # another random state
    second.load(tmp_path / "two")
    again = trained(second, start=2, end=4)
    assert without_clocks(again) == without_clocks(after)
    assert again[0]["policy/checked_share"] == 1.0  # the older version's weights came along
    found = published(second)
    second.close()
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_the_random_state_goes_on(model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model)
    trainer.save(tmp_path / "here")  # before the first step: no optimizer state yet
    wanted = torch.rand(3)
    trainer.load(tmp_path / "here")
    assert torch.equal(torch.rand(3), wanted)
    trainer.train_step(walks(), version=0)
    trainer.close()


ADAPTIVE: dict[str, Any] = {"adaptive_entropy": {"target": 100.0, "step": 0.25}}


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        ({"kl": {"coef": 0.1}}, {"kl": {"coef": 0.5}}, {"kl_coef": 0.5}),
        ({"kl": {"coef": 0.0}}, {"kl": {"coef": 0.5}}, {"kl_coef": 0.5}),
        ({"kl": {"coef": 0.0}}, {"kl": {"coef": 0.5, "in_reward": True}}, {"kl_coef": 0.5}),
        ({"kl": {"coef": 0.1}}, {"kl": {"coef": 0.5, "target": 1e-9}}, {"kl_coef": 0.5}),
        ({"kl": {"coef": 5.0}}, {"kl": {"coef": 0.0}}, {"kl_coef": None, "kl_ref": None}),
        ({"kl": {"coef": 0.1, "target": 1e9}}, {"kl": {"coef": 0.5}}, {"kl_coef": 0.5}),
        (
            {"kl": {"coef": 0.1, "target": 1e9}},
            {"kl": {"coef": 0.5, "target": 1e9}},
            {"kl_coef": 0.1 * (1 - 0.2 * 8 / 500)},
        ),
        ({"entropy_coef": 0.0}, {"entropy_coef": 100.0}, {"grad_norm": 100.0}),
        ({"entropy_coef": 0.5}, {"entropy_coef": 0.1, **ADAPTIVE}, {"entropy_coef": 0.1}),
        ({"entropy_coef": 0.5, **ADAPTIVE}, {"entropy_coef": 0.1, **ADAPTIVE}, {"entropy_coef": 0.75}),
    ],
)
def test_a_fixed_coefficient_is_the_configurations_and_an_adaptive_one_goes_on(
    model: Path, tmp_path: Path, before: dict[str, Any], after: dict[str, Any], wanted: dict[str, float | None]
) -> None:
    first = make_trainer(model, **before)
    trained(first, start=0, end=1)
    first.save(tmp_path / "one")
    first.close()
    second = make_trainer(model, **after)
    second.load(tmp_path / "one")
    (figures,) = trained(second, start=1, end=2)
    second.close()
    for name, value in wanted.items():
        found = figures.get(f"policy/{name}")
        if name == "grad_norm":
            assert found is not None and value is not None and found > value, "the bonus of 100 is in the gradient"
        else:
            assert found == (value if value is None else pytest.approx(value)), (name, figures)


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"critic": "none", "advantage": "grpo"}, r"policy\.value_head\.bias must be absent, got \[1\]"),
        ({"critic": "separate"}, r"critic\.lm\.\S+ must be \[.*\], got absent"),
    ],
)
def test_a_checkpoint_of_other_parts_is_refused_before_any_change(
    model: Path, tmp_path: Path, knobs: dict[str, Any], words: str
) -> None:
    saver = make_trainer(model, critic="shared")
    saver.save(tmp_path / "shared")
    saver.close()
    loader = make_trainer(model, **knobs)
    before = published(loader)
    with pytest.raises(ValueError, match=words):
        loader.load(tmp_path / "shared")
    after = published(loader)
    loader.close()
    assert all(torch.equal(before[name], after[name]) for name in before)


class Program:
    """Makes a folder wherever it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._folder),)


@pytest.mark.parametrize("content", ["a program", "bytes", "a part", "no file"])
def test_a_checkpoint_of_somebody_else_runs_nothing_and_changes_nothing(
    model: Path, tmp_path: Path, content: str
) -> None:
    trainer = make_trainer(model)
    trainer.save(tmp_path / "saved")
    before = published(trainer)
    index = tmp_path / "saved" / ".metadata"
    stored = pickle.loads(index.read_bytes())
    if content == "a program":
        stored.planner_data = Program(tmp_path / "ran")
    if content == "bytes":  # which DCP unpickles
        stored.state_dict_metadata[next(iter(stored.state_dict_metadata))] = BytesStorageMetadata()
    index.write_bytes(pickle.dumps(stored)[: 500 if content == "a part" else None])
    if content == "no file":
        index.unlink()
    with pytest.raises(ValueError, match=r"must have an index \(.metadata\) of tensors, got .*; resume"):
        trainer.load(tmp_path / "saved")
    after = published(trainer)
    trainer.close()
    assert not (tmp_path / "ran").exists()
    assert all(torch.equal(before[name], after[name]) for name in before)


async def _ranks(model: Path, *, num: int) -> LearnerRanks:
    config = LearnerConfig(ranks=num, **KNOBS)
    ranks = LearnerRanks(config, model_path=str(model), dtype="float32", temperature=1.0, seed=0, keep_versions=2)
    await ranks.start()
    return ranks


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("num", [1, 2])
async def test_four_steps_are_two_steps_and_two_more_in_new_processes(model: Path, tmp_path: Path, num: int) -> None:
    first = await _ranks(model, num=num)
    for version, batch in enumerate(batches()):
        if version == 2:
            await first.save(tmp_path / "two")
        await first.train_step(batch, version=version)
    wanted = await published_by(first)
    await first.close()
    second = await _ranks(model, num=num)
    await second.load(tmp_path / "two")
    for version, batch in list(enumerate(batches()))[2:]:
        await second.train_step(batch, version=version)
    found = await published_by(second)
    await second.close()
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


@pytest.mark.slow
async def test_two_ranks_go_on_from_what_one_saved_and_a_damaged_folder_is_refused(model: Path, tmp_path: Path) -> None:
    single = make_trainer(model, **KNOBS)
    trained(single, start=0, end=2)
    single.save(tmp_path / "one")
    wanted = published(single)
    single.close()
    two = await _ranks(model, num=2)
    await two.load(tmp_path / "one")
    found = await published_by(two)
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    (tmp_path / "one" / "__0_0.distcp").unlink()
    with pytest.raises(RankFailed, match="failed in load"):
        await two.load(tmp_path / "one")


@NEEDS_ROOT
@pytest.mark.parametrize("fault", FAULTS)
def test_a_disk_that_takes_no_checkpoint_is_told_and_takes_it_later(model: Path, tmp_path: Path, fault: str) -> None:
    trainer = make_trainer(model, **KNOBS)
    with small_disk(tmp_path / "disk", size="24m") as disk:
        for method in ("save", "save_pretrained"):
            folder = disk.folder / method
            folder.mkdir()
            disk.refuse(fault)
            assert trainer.written(method, folder / "new") == "No space left on device"
            disk.take()
            shutil.rmtree(folder)
            assert trainer.written(method, folder / "new") == ""
        trainer.load(disk.folder / "save" / "new")
    trainer.close()


@NEEDS_ROOT
@pytest.mark.slow
async def test_ranks_live_on_where_a_disk_takes_the_checkpoint_of_none_or_of_one(model: Path, tmp_path: Path) -> None:
    ranks = await _ranks(model, num=2)
    with small_disk(tmp_path / "disk", size="24m") as disk:
        for room in (0, 1 << 20):  # of two shards one fits
            disk.refuse("full", but=room)
            with pytest.raises(StorageFull, match="No space left on device"):
                await ranks.save(disk.folder / f"but-{room}")
            with pytest.raises(StorageFull, match="No space left on device"):
                await ranks.save_pretrained(disk.folder / f"model-{room}")
            disk.take()
        await ranks.save(disk.folder / "whole")
        await ranks.load(disk.folder / "whole")
    await ranks.close()


KINDS: dict[str, dict[str, Any]] = {
    "shared": {"advantage": "gae", "critic": "shared"},
    "separate": {"advantage": "gae", "critic": "separate"},
    "none": {"advantage": "grpo", "critic": "none"},
    "lora": {"advantage": "grpo", "critic": "none", "lora": {"rank": 2}},
}


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each kind of learner, as a run of `model` leaves it."""
    runs = tmp_path_factory.mktemp("runs")
    for kind, knobs in KINDS.items():
        store, trainer = CheckpointStore(runs / kind / "checkpoints", keep=1), make_trainer(model, **knobs)
        scratch = store.scratch(1)
        trainer.save(scratch / "learner")
        trainer.save_pretrained(scratch / "model")
        trainer.close()
        store.commit(scratch, position=Position(run_id="a", lineage=0, step=1), score=None)
        (runs / kind / "ledger.sqlite").touch()
    return runs


def config_of(run: Path, kind: str, *overrides: str, model: Path) -> Config:
    knobs = [f"learner.{name}={value}" for name, value in KINDS[kind].items()]
    words = [f"run.dir={run}", f"run.name={kind}", f"model.path={model}", "sft.demonstrations=", *knobs]
    return load_config(overrides=[*words, *overrides])


def resumed(run: Path, kind: str, *overrides: str, model: Path) -> None:
    check_models(config_of(run, kind, *overrides, model=model), resume="auto")


def test_kl_that_is_turned_on_late_says_what_its_reference_is(run: Path, model: Path) -> None:
    for kind in ("shared", "lora"):
        checkpoint = CheckpointStore(run / kind / "checkpoints", keep=1).newest()
        assert checkpoint is not None
        assert check_resumed(config_of(run, kind, model=model), checkpoint) == []
        (line,) = check_resumed(config_of(run, kind, "learner.kl.coef=0.1", model=model), checkpoint)
        assert "the reference is the policy after step 1" in line


@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_with_what_was_saved_passes(run: Path, model: Path, kind: str, tmp_path: Path) -> None:
    resumed(run, kind, "learner.lr=0.5", model=model)
    resumed(run, kind, "model.dtype=bfloat16", model=shutil.copytree(model, tmp_path / "moved"))


@pytest.mark.parametrize(
    ("kind", "override", "name"),
    [
        ("none", "learner.lora.rank=4", "learner.lora.rank"),
        ("lora", "learner.lora.rank=0", "learner.lora.rank"),
        ("lora", "learner.lora.rank=4", "learner.lora.rank"),
        ("lora", "learner.lora.alpha=4", "learner.lora.alpha"),
        ("lora", "{roles: {a: {}, b: {}}}", "roles with learner.lora.per_role"),
        ("shared", "learner.critic=separate", "learner.critic"),
        ("separate", "learner.critic=shared", "learner.critic"),
        ("none", "{learner.advantage: gae, learner.critic: shared}", "learner.critic"),
        ("shared", "{learner.advantage: grpo, learner.critic: none}", "learner.critic"),
        ("none", "layers", "num_hidden_layers of model.path"),
        ("shared", "kind", "model_type of model.path"),
        ("shared", "model.path=tiny", "cannot be compared with model.path=tiny"),
    ],
)
def test_a_resume_that_cannot_be_is_refused_in_one_line_before_anything_starts(
    run: Path, model: Path, tmp_path: Path, kind: str, override: str, name: str
) -> None:
    words = [override] if "=" in override else []
    if override.startswith("{"):
        words = [f"{key}={value}" for key, value in yaml.safe_load(override).items()]
        words += ["learner.lora.per_role=true"] if "roles" in override else []
    if override in ("layers", "kind"):
        model = shutil.copytree(model, tmp_path / "other")
        told = json.loads((model / "config.json").read_text())
        told |= {"num_hidden_layers": 1} if override == "layers" else {"model_type": "llama"}
        (model / "config.json").write_text(json.dumps(told))
    with pytest.raises(CheckpointError) as refused:
        resumed(run, kind, *words, model=model)
    assert name in str(refused.value) and "\n" not in str(refused.value)
