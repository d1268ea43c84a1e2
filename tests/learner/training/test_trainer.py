"""Rules of learner/training/trainer.py, on one rank in this process with a small random model."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from buffers.records import Row, TrainBatch
from configs.recipes import RECIPES
from learner.algorithms.advantages import ESTIMATORS
from learner.algorithms.importance_weights import CORRECTIONS
from learner.algorithms.losses import AGGREGATIONS
from learner.algorithms.objectives import LOSSES
from learner.model import fsdp, policy
from learner.training.batch_tensors import BatchTensors, token_table
from learner.training.hints import hinted_sequences
from learner.training.packing import Sequences
from learner.training.trainer import Trainer
from tests.support.learner_parts import assert_same_weights, make_model, make_row, make_trainer, walks
from tests.support.weights.published_weights import published

pytestmark = pytest.mark.seconds

MakeTrainer = Callable[..., Trainer]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def trainer(model: Path) -> Iterator[MakeTrainer]:
    """Makes trainers; a process has one process group at a time, so making one closes the one before."""
    made: list[Trainer] = []

    def make(**options: Any) -> Trainer:
        if made:
            made[-1].close()
        made.append(make_trainer(model, **options))
        return made[-1]

    yield make
    made[-1].close()


def _sampled_by(weights: Path, batch: TrainBatch, *, version: int, temperature: float = 1.0) -> TrainBatch:
    """The batch as that model would have recorded it."""
    lm = AutoModelForCausalLM.from_pretrained(weights)

    def record(row: Row) -> Row:
        ids = torch.from_numpy(row.ids).long()[None]
        with torch.no_grad():
            full = (lm(ids).logits[0, :-1] / temperature).log_softmax(-1)
        own = full.gather(-1, ids[0, 1:, None]).squeeze(-1).numpy()
        logprobs = np.concatenate([[0.0], own]).astype(np.float32) * row.mask
        return replace(row, logprobs=logprobs, versions=np.where(row.mask, version, -1).astype(np.int32))

    return replace(batch, rows=[record(row) for row in batch.rows])


def _altered(batch: TrainBatch, *, by: float) -> TrainBatch:
    """One token of the first row recorded wrongly."""
    first = batch.rows[0]
    logprobs = first.logprobs.copy()
    logprobs[np.flatnonzero(first.mask)[0]] += by
    return replace(batch, rows=[replace(first, logprobs=logprobs), *batch.rows[1:]])


@pytest.mark.seconds
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_recorded_logprobs_of_the_same_weights_differ_by_rounding_only(
    trainer: MakeTrainer, model: Path, temperature: float
) -> None:
    batch = _sampled_by(model, walks(), version=0, temperature=temperature)
    metrics = trainer(temperature=temperature).train_step(batch, version=0)
    assert metrics["policy/max_logprob_diff"] < 1e-5
    assert metrics["policy/checked_share"] == 1.0
    assert metrics["policy/is_weight_mean"] == pytest.approx(1.0, abs=1e-5)
    assert 0.0 < metrics["time/prepare_s"] < metrics["time/train_s"]


def test_one_altered_logprob_is_seen(trainer: MakeTrainer, model: Path) -> None:
    batch = _altered(_sampled_by(model, walks(), version=0), by=0.25)
    metrics = trainer().train_step(batch, version=0)
    assert metrics["policy/max_logprob_diff"] == pytest.approx(0.25, abs=1e-5)
    assert metrics["policy/mean_logprob_diff"] == pytest.approx(0.25 / batch.num_trained_tokens, abs=1e-5)


def test_what_weights_have_sampled_that_were_taken_back_is_trained_and_not_checked(
    trainer: MakeTrainer, model: Path, tmp_path: Path
) -> None:
    learner = trainer(lr=1e-2, lr_warmup_steps=0)
    learner.save(tmp_path / "v0")
    learner.train_step(walks(), version=0)
    learner.save_pretrained(tmp_path / "v1")
    refused = _sampled_by(tmp_path / "v1", walks(seed=1), version=1)
    learner.load(tmp_path / "v0")
    told = learner.train_step(refused, version=1, has_gone_back=True)
    assert (told["policy/checked_share"], told["policy/max_logprob_diff"]) == (0.0, 0.0)
    assert told["policy/is_weight_max"] > 1.01 and told["policy/grad_norm"] > 0.0
    learner.save_pretrained(tmp_path / "v2")
    served = _sampled_by(tmp_path / "v2", walks(seed=2), version=2)
    told = learner.train_step(TrainBatch(rows=[*refused.rows, *served.rows]), version=2)
    assert told["policy/checked_share"] == pytest.approx(
        served.num_trained_tokens / (2 * refused.num_trained_tokens), abs=0.1
    )
    assert told["policy/max_logprob_diff"] < 1e-5


@pytest.mark.seconds
def test_older_tokens_are_checked_under_the_version_that_sampled_them(
    trainer: MakeTrainer, model: Path, tmp_path: Path
) -> None:
    learner = trainer(lr=1e-2, lr_warmup_steps=0)
    learner.train_step(walks(), version=0)
    learner.save_pretrained(tmp_path / "v1")
    old, new = _sampled_by(model, walks(seed=1), version=0), _sampled_by(tmp_path / "v1", walks(seed=2), version=1)
    before = published(learner)
    mixed = TrainBatch(rows=[*old.rows, *new.rows])
    metrics = learner.train_step(mixed, version=1)
    assert metrics["policy/max_logprob_diff"] < 1e-5
    assert metrics["policy/checked_share"] == 1.0
    assert metrics["policy/lag_max"] == 1.0
    assert metrics["policy/is_weight_max"] > 1.01  # the weights did change between the versions
    assert not torch.equal(before["model.norm.weight"], published(learner)["model.norm.weight"])
    # two steps on, version 0 is beyond keep_versions=2: neither checked nor trained, and said so
    later = learner.train_step(mixed, version=2)
    share = new.num_trained_tokens / mixed.num_trained_tokens
    assert later["policy/checked_share"] == pytest.approx(share)
    assert later["policy/too_old_share"] == pytest.approx(1.0 - share)


def test_fresh_tail_of_an_old_episode_trains_as_if_its_old_tokens_were_context(
    trainer: MakeTrainer, tmp_path: Path
) -> None:
    base = walks()
    old_rounds = replace(base, rows=[_first_token(row, version=0, mask=1) for row in walks(version=1).rows])
    context = replace(base, rows=[_first_token(row, version=-1, mask=0) for row in walks(version=1).rows])
    weights = []
    for batch in (old_rounds, context):
        learner = trainer(advantage="grpo", lr=1e-3, lr_warmup_steps=0, keep_versions=1)
        learner.train_step(batch, version=1)
        weights.append(published(learner))
    assert_same_weights(*weights)


def _first_token(row: Row, *, version: int, mask: int) -> Row:
    """The row with another version and mask on its first trained token."""
    first = int(np.flatnonzero(row.mask)[0])
    versions, trained = row.versions.copy(), row.mask.copy()
    versions[first], trained[first] = version, mask
    return replace(row, versions=versions, mask=trained)


@pytest.mark.seconds
def test_check_of_older_versions_leaves_the_present_weights(trainer: MakeTrainer, model: Path, tmp_path: Path) -> None:
    learner = trainer(lr=0.0, check_logprobs=True)
    learner.train_step(walks(), version=0)
    before = published(learner)
    learner.train_step(walks(version=0), version=1)
    after = published(learner)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_published_file_gives_the_learners_logits(trainer: MakeTrainer, model: Path, tmp_path: Path) -> None:
    learner = trainer(lr=1e-2, lr_warmup_steps=0)
    learner.train_step(walks(), version=0)
    weights = published(learner)
    fresh = AutoModelForCausalLM.from_pretrained(model)
    missing, unexpected = fresh.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied to the embeddings
    fresh.save_pretrained(tmp_path / "fresh")
    metrics = learner.train_step(_sampled_by(tmp_path / "fresh", walks(seed=3), version=1), version=1)
    assert metrics["policy/max_logprob_diff"] < 1e-5
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_saved_folder_loads_whole_and_replaces_the_one_before(
    trainer: MakeTrainer, model: Path, tmp_path: Path
) -> None:
    learner = trainer(lr=1e-2, lr_warmup_steps=0)
    learner.save_pretrained(tmp_path / "out")
    learner.train_step(walks(), version=0)
    learner.save_pretrained(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, weight in published(learner).items():
        assert torch.equal(loaded[name], weight)
    chat = [{"role": "user", "content": "Hi"}]
    texts = [
        AutoTokenizer.from_pretrained(folder).apply_chat_template(chat, tokenize=False)
        for folder in (model, tmp_path / "out")
    ]
    assert texts[0] == texts[1]
    head = load_file(tmp_path / "out" / "critic" / "value_head.safetensors")
    assert head["weight"].shape == (1, 128) and head["bias"].shape == (1,)
    assert float(head["weight"].abs().max()) > 0.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def _bandit(*, tokens: tuple[int, int] = (7, 9)) -> TrainBatch:
    """Two groups of four one-token episodes after the same prompt; the first token wins."""
    rows = [
        make_row(
            [1, 2, 3, tokens[sample % 2]],
            mask=[0, 0, 0, 1],
            episode=f"{group}-{sample}-0",
            group=group,
            score=float(sample % 2 == 0),
        )
        for group in range(2)
        for sample in range(4)
    ]
    return TrainBatch(rows=rows)


@pytest.mark.seconds
@pytest.mark.parametrize(
    "knobs",
    [
        {"advantage": "grpo"},
        {"advantage": "gae", "critic": "shared"},
        {"advantage": "gae", "critic": "separate", "critic_lr": 5e-3},
        {"advantage": "grpo", "kl": {"coef": 0.01}, "entropy_coef": 0.001},
        {"advantage": "rloo", "loss": "gspo", "clip": {"low": 0.2, "high": 0.2}, "loss_agg": "seq-mean-token-mean"},
        {"advantage": "dr_grpo", "loss_agg": "seq-mean-token-sum-norm"},
        {"advantage": "opo", "loss": "cispo", "loss_agg": "seq-mean-token-sum"},
        {"advantage": "reinforce_plus_plus", "kl": {"coef": 0.01, "target": 0.01, "kind": "k1", "in_reward": True}},
        {"advantage": "reinforce_plus_plus_baseline", "correction": "icepop"},
    ],
)
def test_token_that_wins_becomes_likelier(
    trainer: MakeTrainer, model: Path, tmp_path: Path, knobs: dict[str, object]
) -> None:
    learner = trainer(lr=5e-3, lr_warmup_steps=0, **knobs)
    path = model
    for version in range(3):
        learner.train_step(_sampled_by(path, _bandit(), version=version), version=version)
        learner.save_pretrained(tmp_path / "now")
        path = tmp_path / "now"
    start, end = (AutoModelForCausalLM.from_pretrained(folder) for folder in (model, path))
    with torch.no_grad():
        before, after = (lm(torch.tensor([[1, 2, 3]])).logits[0, -1].log_softmax(-1) for lm in (start, end))
    assert float(after[7] - before[7]) > 0.2
    assert float(after[7] - after[9]) > float(before[7] - before[9]) + 0.5


BESIDE: list[dict[str, object]] = [
    {"advantage": "gae"},
    {"advantage": "gae", "calibrate_values": False},
    {"advantage": "gae", "min_deviation": 9.0},
    {"advantage": "gae", "value_clip": 1e-4},
    {"advantage": "grpo"},
    {"advantage": "grpo_passk"},
    {"advantage": "otb"},
    {"advantage": "gpg"},
    {"advantage": "gdpo"},
    *({"advantage": "grpo", "loss": loss} for loss in LOSSES if loss not in ("ppo", "clip_cov")),
    {"advantage": "grpo", "loss": "dppo_tv", "clip": {"ratio_max": 1.01}},
    {"advantage": "grpo", "loss": "sapo", "sapo": {"tau_neg": 3.0}},
    {"advantage": "grpo", "loss": "clip_cov", "cov": {"share": 0.5, "low": 0.0}},
    {"advantage": "grpo", "loss": "kl_cov", "cov": {"share": 0.5}},
    {"advantage": "grpo", "loss": "kl_cov", "cov": {"share": 0.5, "kl_coef": 9.0}},
    *({"advantage": "grpo", "loss_agg": each} for each in AGGREGATIONS if each != "token-mean"),
    {"advantage": "grpo", "loss_agg": "seq-mean-token-sum-norm", "loss_norm": 7},
    *({"advantage": "grpo", "correction": each} for each in [*CORRECTIONS, "naive"] if each != "tis"),
    {"advantage": "grpo", "correction_bounds": {"high": 0.9}},
    {"advantage": "grpo", "rejection": {"kind": "geo_mean"}},
    {"advantage": "grpo", "rejection": {"kind": "geo_mean", "low": 0.9, "high": 1.1}},
    {"advantage": "grpo", "rejection": {"kind": "k3_mean", "high": 0.03}},
    {"advantage": "grpo", "rejection": {"kind": "stale_negatives", "high": 1e-3}},
    {"advantage": "grpo", "mask_truncated": True},
    {"advantage": "grpo", "entropy_coef": 0.01},
    {"advantage": "grpo", "entropy_coef": 0.01, "adaptive_entropy": {"target": 99.0, "step": 0.5}},
    *({"advantage": "grpo", "kl": {"coef": 0.5, "kind": each}} for each in ("k1", "abs", "k2", "k3")),
    {"advantage": "grpo", "kl": {"coef": 0.5, "kind": "k3", "target": 9.0, "horizon": 8}},
]


@pytest.fixture(scope="module")
def mixed(model: Path) -> list[TrainBatch]:
    """Two batches of rows with several branches, scores, ages and lengths, as the first weights would nearly have sampled them."""
    batches = []
    for seed in (0, 1):
        batch = _sampled_by(model, walks(seed=seed), version=0)
        rng = np.random.default_rng(seed)
        rows = [
            replace(
                row,
                score=float(rng.integers(0, 5)) / 4,
                logprobs=row.logprobs + row.mask * rng.normal(0.0, 0.3 * (number % 3), len(row.ids)).astype(np.float32),
                judges={"a": float(number % 2), "b": float(number % 3)},
                truncated=tuple(sorted({int(each) for each in row.rounds if each >= 0})) if number == 5 else (),
            )
            for number, row in enumerate(batch.rows)
        ]
        batches.append(replace(batch, rows=rows))
    return batches


@pytest.mark.slow
def test_every_value_of_the_algorithms_keys_changes_the_weights_in_its_own_way(
    trainer: MakeTrainer, mixed: list[TrainBatch], tmp_path: Path
) -> None:
    found: dict[str, torch.Tensor] = {}
    for knobs in BESIDE:
        learner = trainer(lr=1e-2, lr_warmup_steps=0, check_logprobs=False, minibatches=1, epochs=2, **knobs)
        for version, batch in enumerate(mixed):
            metrics = learner.train_step(batch, version=version)
            assert metrics["learner/skipped"] == 0.0 and all(np.isfinite(value) for value in metrics.values()), knobs
        trained = learner._policy.state_dict().values()  # the value head's too
        found[str(knobs)] = torch.cat([fsdp.local(weight).flatten() for weight in trained])
    names = list(found)
    alike = [
        (one, other)
        for place, one in enumerate(names)
        for other in names[place + 1 :]
        if len(found[one]) == len(found[other]) and float((found[one] - found[other]).abs().mean()) < 1e-8
    ]
    assert alike == [], "\n".join(map(str, alike))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name not in ("remax", "sdpo", "sdft")])
def test_a_recipe_makes_the_token_that_wins_likelier(
    trainer: MakeTrainer, model: Path, tmp_path: Path, recipe: str
) -> None:
    learner = trainer(
        lr=2e-4, lr_warmup_steps=0, recipe=recipe
    )  # small: the second update is no correction of the first
    learner.train_step(_sampled_by(model, _bandit(), version=0), version=0)
    learner.save_pretrained(tmp_path / "now")
    start, end = (AutoModelForCausalLM.from_pretrained(folder) for folder in (model, tmp_path / "now"))
    with torch.no_grad():
        before, after = (lm(torch.tensor([[1, 2, 3]])).logits[0, -1].log_softmax(-1) for lm in (start, end))
    assert float(after[7] - after[9]) > float(before[7] - before[9]) + 0.1


@pytest.mark.seconds
def test_clip_of_a_critic_of_its_own_grows_with_the_scores(trainer: MakeTrainer, mixed: list[TrainBatch]) -> None:
    losses = []
    for size in (1.0, 100.0):
        learner = trainer(
            advantage="gae", critic="separate", critic_lr=1e-2, lr=1e-4, lr_warmup_steps=0, value_clip=0.01, epochs=2,
            check_logprobs=False,
        )  # fmt: skip
        for version, batch in enumerate(mixed):
            sized = [replace(row, score=size * row.score) for row in batch.rows]
            metrics = learner.train_step(replace(batch, rows=sized), version=version)
        losses.append(metrics["critic/vf_loss"] / size**2)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.seconds
@pytest.mark.parametrize("advantage", [name for name in ESTIMATORS if name not in ("remax", "gdpo", "none")])
def test_scores_of_any_size_teach_the_same(
    trainer: MakeTrainer, mixed: list[TrainBatch], tmp_path: Path, advantage: str
) -> None:
    updates = []
    for size in (1.0, 0.01, 100.0):
        learner = trainer(advantage=advantage, lr=1e-3, lr_warmup_steps=0, check_logprobs=False, grad_clip=0.1)
        start = published(learner)
        for version, batch in enumerate(mixed):
            sized = [replace(row, score=size * row.score) for row in batch.rows]
            learner.train_step(replace(batch, rows=sized), version=version)
        end = published(learner)
        updates.append(torch.cat([(end[name] - start[name]).flatten() for name in end]))
    for other in updates[1:]:
        assert float((other - updates[0]).norm() / updates[0].norm()) < 0.02


@pytest.mark.seconds
@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_a_critic_learns_large_scores_as_fast_as_small_ones(trainer: MakeTrainer, critic: str) -> None:
    found = []
    for size in (1.0, 100.0):
        rate = {"critic_lr": 3e-3} if critic == "separate" else {}
        learner = trainer(critic=critic, lr=1e-3, lr_warmup_steps=0, check_logprobs=False, **rate)
        batch = replace(_bandit(), rows=[replace(row, score=size * (0.5 + row.score)) for row in _bandit().rows])
        found.append([learner.train_step(batch, version=0)["critic/value_mean"] / size for _ in range(5)])
    assert found[0][-1] > 0.1
    assert found[1] == pytest.approx(found[0], rel=0.02)


def test_a_batch_of_which_every_answer_was_cut_changes_nothing(trainer: MakeTrainer, tmp_path: Path) -> None:
    batch = replace(walks(), rows=[replace(row, truncated=(0,)) for row in walks().rows])
    learner = trainer(advantage="grpo", mask_truncated=True, kl={"coef": 0.1}, lr_warmup_steps=0)
    before = published(learner)
    assert learner.train_step(batch, version=0)["policy/truncated_share"] == 1.0
    after = published(learner)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_entropys_weight_rises_below_its_target_and_is_part_of_a_checkpoint(
    trainer: MakeTrainer, tmp_path: Path
) -> None:
    knobs = {"advantage": "grpo", "adaptive_entropy": {"target": 99.0, "step": 0.25, "most": 0.6}}
    learner = trainer(**knobs)
    weights = [learner.train_step(walks(), version=0)["policy/entropy_coef"] for _ in range(2)]
    assert weights == [0.0, 0.25]
    learner.save(tmp_path / "state")
    again = trainer(**knobs)
    again.load(tmp_path / "state")
    assert [again.train_step(walks(), version=0)["policy/entropy_coef"] for _ in range(2)] == [0.5, 0.6]
    far = trainer(advantage="grpo", entropy_coef=0.1, adaptive_entropy={"target": 1e-3})
    assert far.train_step(walks(), version=0)["policy/entropy_coef"] == 0.0


def test_useful_work_counts_a_separate_critics_passes_and_each_epoch(trainer: MakeTrainer, model: Path) -> None:
    rows = walks(seed=0).rows
    sequences = Sequences([row.ids for row in rows], masks=[row.mask for row in rows])
    once = trainer(critic="none", advantage="grpo")._useful_flops(sequences)
    assert trainer(critic="none", advantage="grpo", epochs=3)._useful_flops(sequences) == 3 * once
    assert trainer(critic="separate")._useful_flops(sequences) == 2 * once


@pytest.mark.seconds
@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_critic_learns_the_score(trainer: MakeTrainer, model: Path, critic: str) -> None:
    rate = {"critic_lr": 3e-3} if critic == "separate" else {}
    learner = trainer(critic=critic, lr=1e-3, lr_warmup_steps=0, **rate)
    batch = _bandit()
    always = replace(batch, rows=[replace(row, score=0.8) for row in batch.rows])
    values = [learner.train_step(always, version=0)["critic/value_mean"] for _ in range(25)]
    assert values[0] == 0.0
    assert values[-1] == pytest.approx(0.8, abs=0.25)


def test_reference_is_the_policy_before_the_first_step(trainer: MakeTrainer) -> None:
    learner = trainer(advantage="grpo", kl={"coef": 0.1}, lr=1e-2, lr_warmup_steps=0, minibatches=1)
    first = learner.train_step(_bandit(), version=0)
    second = learner.train_step(_bandit(), version=1)
    assert first["policy/kl_ref"] == pytest.approx(0.0, abs=1e-9)
    assert second["policy/kl_ref"] > 1e-4


def test_kl_in_the_reward_is_taken_off_token_by_token(trainer: MakeTrainer, model: Path, tmp_path: Path) -> None:
    kl = {"coef": 0.5, "target": 0.01, "horizon": 5_000, "kind": "k1", "in_reward": True}
    learner = trainer(advantage="reinforce_plus_plus", kl=kl, lr=1e-2, lr_warmup_steps=0)
    first = learner.train_step(_sampled_by(model, _bandit(), version=0), version=0)
    assert first["policy/kl_ref"] == pytest.approx(0.0, abs=1e-6)
    assert first["policy/kl_coef"] == 0.5
    second = learner.train_step(_bandit(), version=1)
    # the KL was below its target: eight episodes of a horizon of 5,000 at the largest error
    assert second["policy/kl_coef"] == pytest.approx(0.5 * (1 - 0.2 * 8 / 5_000))
    assert abs(second["policy/kl_ref"]) > 1e-4


def test_round_scores_reach_the_critics_targets(trainer: MakeTrainer) -> None:
    row = make_row([1, 2, 3, 4, 5], mask=[0, 1, 0, 1, 1], rounds=[0, 0, 0, 1, 1], score=1.0, round_scores={0: 0.25})
    other = make_row([1, 2], mask=[0, 1], episode="0-1-0")
    metrics = trainer(gamma=0.5, lam=1.0, minibatches=1).train_step(TrainBatch(rows=[row, other]), version=0)
    # returns 0.25 + 0.5 * 1, 1, 1 and 0; values 0
    assert metrics["critic/vf_loss"] == pytest.approx(0.5 * (0.75**2 + 1.0 + 1.0) / 4)


@pytest.mark.seconds
@pytest.mark.parametrize("echo", [0.0, 0.1])
def test_a_hint_draws_the_policy_to_what_it_says_after_reading_it(
    trainer: MakeTrainer, model: Path, monkeypatch: pytest.MonkeyPatch, echo: float
) -> None:
    """The gradient is that of the KL to the same weights with the hint in their prompt, a mean over hinted tokens."""
    monkeypatch.setattr("learner.training.trainer.CHOICES", 600)  # all of the vocabulary
    rows = [
        replace(row, score=0.0, hint="<|im_end|> yes" if number < 2 else None)
        for number, row in enumerate(walks().rows)
    ]
    options = {"advantage": "grpo", "critic": "none", "lr": 0.0, "minibatches": 1, "grad_clip": 1e9}
    learner = trainer(**options, hints={"coef": 0.5}, echo={"user": echo}, token_budget=80)
    metrics = learner.train_step(TrainBatch(rows=rows), version=0)
    lm, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    plain = Sequences([row.ids for row in rows], masks=[row.mask for row in rows])
    hinted = hinted_sequences(plain, hints=[row.hint for row in rows], tokenizer=tokenizer)

    def distributions(sequences: Sequences, row: int) -> Tensor:
        before = torch.from_numpy(np.flatnonzero(sequences.masks[row]) - 1)
        return lm(torch.from_numpy(sequences.ids[row]).long()[None]).logits[0, before].log_softmax(-1)

    divergences = []
    for row in range(2):
        own, taught = distributions(plain, row), distributions(hinted, row).detach()
        divergences.append((own.exp() * (own - taught)).sum(-1))
    mean = torch.cat(divergences).mean()
    (0.5 * mean).backward()
    norm = torch.stack([each.grad.norm() for each in lm.parameters() if each.grad is not None]).norm()
    assert metrics["policy/hinted_share"] == 0.25
    assert metrics["policy/kl_hinted"] == pytest.approx(mean.item(), rel=1e-4)
    assert metrics["policy/grad_norm"] == pytest.approx(norm.item(), rel=1e-3)


@pytest.mark.seconds
def test_hints_bring_the_policy_nearer_to_itself_with_them(trainer: MakeTrainer) -> None:
    failed = _bandit()
    unhinted = replace(failed, rows=[replace(row, score=0.0) for row in failed.rows])
    hinted = replace(failed, rows=[replace(row, score=0.0, hint="<|im_end|>" * 3) for row in failed.rows])
    learner = trainer(advantage="none", critic="none", hints={"coef": 1.0}, lr=3e-3, lr_warmup_steps=0, keep_versions=9)
    metrics = learner.train_step(unhinted, version=0)
    assert (metrics["policy/grad_norm"], metrics["policy/hinted_share"]) == (0.0, 0.0)
    assert "policy/kl_hinted" not in metrics
    found = [learner.train_step(hinted, version=version)["policy/kl_hinted"] for version in range(1, 5)]
    assert found[-1] < 0.5 * found[0]


def test_hints_are_read_by_the_policy_of_the_first_step_after_a_resume_too(
    trainer: MakeTrainer, tmp_path: Path
) -> None:
    hinted = [replace(row, score=0.0, hint="<|im_end|>" * 3) for row in _bandit().rows]
    options = {
        "advantage": "none",
        "critic": "none",
        "hints": {"coef": 1.0},
        "lr": 3e-2,
        "lr_warmup_steps": 0,
        "keep_versions": 9,
    }
    learner = trainer(**options)
    first, second = (
        learner._hinted(_with_hints(learner, hinted))
        for _ in range(2)
        if learner.train_step(TrainBatch(rows=hinted), version=0)
    )
    assert first is not None and second is not None and torch.equal(first.logprobs, second.logprobs)
    learner.save(tmp_path / "state")
    resumed = trainer(**options)
    resumed.load(tmp_path / "state")
    again = resumed._hinted(_with_hints(resumed, hinted))
    assert again is not None and torch.equal(first.logprobs, again.logprobs)


def _with_hints(learner: Trainer, rows: list[Row]) -> BatchTensors:
    table = learner._with_words(token_table(TrainBatch(rows=rows), min_version=0), rows=rows)
    return replace(table, sequences=learner._laid_out(table.sequences, table=table))


def test_grpo_builds_no_value_head_whatever_the_critic(trainer: MakeTrainer, tmp_path: Path) -> None:
    learner = trainer(advantage="grpo", critic="shared")
    assert not any(name.startswith("critic/") for name in learner.train_step(walks(), version=0))
    learner.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out" / "critic" / "value_head.safetensors").exists()


def test_episode_of_two_equal_branches_trains_like_one(trainer: MakeTrainer, tmp_path: Path) -> None:
    batch = _bandit()
    half = replace(batch.rows[0], loss_weight=0.5)
    split = replace(batch, rows=[half, half, *batch.rows[1:]])
    weights = []
    for one in (batch, split):
        learner = trainer(lr=1e-3, minibatches=1, lr_warmup_steps=0)
        learner.train_step(one, version=0)
        weights.append(published(learner))
    assert_same_weights(*weights)


def test_micro_batches_of_any_size_give_the_same_weights(trainer: MakeTrainer, tmp_path: Path) -> None:
    weights = []
    for budget in (8192, 40):
        learner = trainer(lr=1e-3, token_budget=budget, lr_warmup_steps=0)
        learner.train_step(walks(), version=0)
        weights.append(published(learner))
    assert_same_weights(*weights)


def test_few_logits_at_once_give_the_same_weights(
    trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output matrix is needed again in the backward pass, after FSDP has given it back."""
    weights = []
    for limit in (policy.LOGITS_AT_ONCE, 512 * 5):
        monkeypatch.setattr(policy, "LOGITS_AT_ONCE", limit)
        learner = trainer(lr=1e-3, lr_warmup_steps=0, entropy_coef=0.01)
        learner.train_step(walks(), version=0)
        weights.append(published(learner))
    assert_same_weights(*weights)


@pytest.mark.parametrize("knobs", [{}, {"minibatches": 2}, {"loss": "clip_cov", "token_budget": 40}])
def test_rows_without_a_gradient_have_no_backward_pass_and_no_number_changes(
    trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, knobs: dict[str, Any]
) -> None:
    batch = walks(num_groups=3, group_size=3)
    batch = replace(batch, rows=[replace(row, score=row.score if row.group_id else 1.0) for row in batch.rows])
    results = []
    for spares in (True, False):
        if not spares:
            monkeypatch.setattr(Trainer, "_moving", lambda self, rows, goals: list(rows))
        learner = trainer(
            lr=1e-3, lr_warmup_steps=0, **{"advantage": "grpo", "critic": "none", "minibatches": 1} | knobs
        )
        metrics = learner.train_step(batch, version=0)
        results.append((published(learner), metrics))
    (weights, found), (expected, plain) = results
    assert found["learner/backward_share"] < 0.9 < plain["learner/backward_share"] == 1.0
    assert_same_weights(weights, expected)
    for name in found.keys() - {"learner/backward_share", "learner/mfu", "time/prepare_s", "time/train_s"}:
        assert found[name] == pytest.approx(plain[name], rel=1e-3, abs=1e-5), name


def test_learning_rate_warms_up_over_its_steps(trainer: MakeTrainer) -> None:
    learner = trainer(lr=1e-4, lr_warmup_steps=3)
    rates = [learner.train_step(_bandit(), version=0)["learner/lr"] for _ in range(5)]
    assert rates == pytest.approx([0.25e-4, 0.5e-4, 0.75e-4, 1e-4, 1e-4])
    assert learner.train_step(_bandit(), version=0, pace=0.5)["learner/lr"] == pytest.approx(0.5e-4)


def test_gradient_checkpointing_computes_layers_again_and_changes_no_number(
    trainer: MakeTrainer, tmp_path: Path
) -> None:
    weights, passes = [], []
    for again in (False, True):
        learner = trainer(lr=1e-3, minibatches=1, lr_warmup_steps=0, gradient_checkpointing=again)
        seen: list[bool] = []
        learner._policy.layers[0].mlp.register_forward_pre_hook(lambda *_, seen=seen: seen.append(True))
        learner.train_step(walks(), version=0)
        weights.append(published(learner))
        passes.append(len(seen))
    assert passes == [2, 3]  # a pass without gradient, a pass with, and that one again
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_bfloat16_computes_in_it_and_publishes_it(trainer: MakeTrainer, tmp_path: Path) -> None:
    learner = trainer(dtype="bfloat16", lr=1e-5, lr_warmup_steps=0)
    computed: list[torch.dtype] = []
    learner._policy.layers[0].mlp.register_forward_hook(lambda *call: computed.append(call[2].dtype))
    metrics = learner.train_step(walks(), version=0)
    assert metrics["learner/skipped"] == 0.0
    assert set(computed) == {torch.bfloat16}
    assert {weight.dtype for weight in published(learner).values()} == {torch.bfloat16}


def test_updates_below_the_resolution_of_bfloat16_add_up(trainer: MakeTrainer) -> None:
    """The master weights are float32: a step of 1e-6 on a weight of 0.1, whose bfloat16 neighbours are 5e-4 away, is kept."""
    learner = trainer(dtype="bfloat16", lr=1e-6, minibatches=1, lr_warmup_steps=0)
    name = "lm.model.layers.0.mlp.up_proj.weight"
    masters = dict(learner._policy.named_parameters())
    assert {parameter.dtype for parameter in masters.values()} == {torch.float32}
    start = masters[name].detach().full_tensor().clone()
    learner.train_step(walks(), version=0)
    once = masters[name].detach().full_tensor().clone()
    for _ in range(4):
        learner.train_step(walks(), version=0)
    moved_once, moved = (once - start).abs(), (masters[name].detach().full_tensor() - start).abs()
    large = start.abs() > 0.05
    assert float(moved_once[large].median()) == pytest.approx(1e-6, rel=0.2)
    assert float(moved[large].median()) > 3e-6
    assert float((once.bfloat16() == start.bfloat16())[large].float().mean()) > 0.9  # in bfloat16 it would be lost


def test_a_rank_computes_with_as_many_threads_as_it_is_told(trainer: MakeTrainer) -> None:
    before = torch.get_num_threads()
    try:
        trainer()
        assert torch.get_num_threads() == before
        trainer(threads=3).train_step(walks(), version=0)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


LOOKS_AHEAD = {
    "critic": {"advantage": "gae"},
    "energy": {"advantage": "otb"},
    "in reward": {"advantage": "grpo", "kl": {"coef": 0.1, "in_reward": True}},
    "adaptive entropy": {"advantage": "grpo", "adaptive_entropy": {"target": 1.0}},
    "clip_cov": {"advantage": "grpo", "loss": "clip_cov"},
    "kl_cov": {"advantage": "grpo", "loss": "kl_cov"},
}
"""What needs the policy's figures of the whole batch before the first update."""


@pytest.mark.parametrize("settings", LOOKS_AHEAD.values(), ids=list(LOOKS_AHEAD))
def test_all_rows_are_computed_first_where_the_whole_batch_is_needed(
    trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    learner = trainer(minibatches=2, **settings)
    swept: list[Any] = []
    sweep = learner._sweep
    monkeypatch.setattr(
        learner, "_sweep", lambda *given, **asked: swept.append(asked.get("rows")) or sweep(*given, **asked)
    )
    batch = walks()
    learner.train_step(batch, version=0)
    assert list(swept[0]) == list(range(len(batch.rows)))


@pytest.mark.parametrize(
    "settings",
    [
        {"minibatches": 1},
        {"minibatches": 2},
        {"minibatches": 3, "epochs": 2},
        {"minibatches": 2, "epochs": 2, "kl": {"coef": 0.1}, "entropy_coef": 0.01},
        {"minibatches": 2, "loss": "gspo", "correction": "seq_mis"},
        {"minibatches": 2, "loss": "cispo", "correction": "naive", "rejection": {"kind": "geo_mean"}},
        {"minibatches": 2, "advantage": "rloo", "mask_truncated": True, "token_budget": 16},
    ],
    ids=str,
)
def test_the_first_mini_batch_is_computed_once_and_nothing_else_changes(
    trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    def trained(*, ahead: bool) -> tuple[list[dict[str, float]], Any, dict[str, torch.Tensor], list[int]]:
        learner = trainer(**{"advantage": "grpo", **settings})
        assert not learner._looks_ahead
        tokens: list[int] = []
        forward = learner._forward
        with monkeypatch.context() as patched:
            if ahead:
                patched.setattr(Trainer, "_looks_ahead", True)
            patched.setattr(
                learner, "_forward", lambda micro, **asked: tokens.append(len(micro.tokens)) or forward(micro, **asked)
            )
            metrics = [learner.train_step(walks(version=step), version=step) for step in (0, 1)]
            weights = {name: fsdp.local(p).clone() for name, p in learner._policy.named_parameters()}
        return metrics, learner.token_figures(), weights, tokens

    once, figures, weights, tokens = trained(ahead=False)
    twice, figures_before, weights_before, tokens_before = trained(ahead=True)
    for step, (one, other) in enumerate(zip(once, twice)):
        assert one.keys() == other.keys()
        for name in one.keys() - {"time/prepare_s", "time/train_s", "learner/mfu"}:
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=2e-6), (step, name)
    for name in ("learner", "start", "advantage", "weighed"):
        assert getattr(figures, name) == pytest.approx(getattr(figures_before, name), abs=1e-5, nan_ok=True), name
    assert all(torch.allclose(weights[name], weights_before[name], atol=1e-6) for name in weights)
    assert sum(tokens) < sum(tokens_before)


def test_each_mini_batch_draws_its_tokens_anew(trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = trainer(advantage="grpo", loss="clip_cov", minibatches=2, epochs=3)
    seeds: list[int] = []
    pick = learner._pick
    monkeypatch.setattr(learner, "_pick", lambda targets, seed: seeds.append(seed) or pick(targets, seed=seed))
    learner.train_step(_bandit(), version=0)
    assert len(set(seeds)) == len(seeds) == 6


@pytest.mark.parametrize(("dtype", "rounds"), [("float32", False), ("bfloat16", True)])
def test_the_learner_rounds_as_the_engine_in_half_precision(
    trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, dtype: str, rounds: bool
) -> None:
    rounded: list[object] = []
    monkeypatch.setattr("learner.training.trainer.round_as_engine", rounded.append)
    learner = trainer(dtype=dtype)
    assert rounded == ([learner._policy.lm] if rounds else [])


def test_a_separate_critics_steps_keep_their_size_where_scores_are_large(trainer: MakeTrainer) -> None:
    learner = trainer(critic="separate")
    assert learner._critic_optimizer is not None
    found = []
    for size in (1.0, 100.0):
        learner.train_step(
            replace(_bandit(), rows=[replace(row, score=size * row.score) for row in _bandit().rows]), version=0
        )
        found.append(learner._critic_optimizer.param_groups[0]["eps"])
    assert found[1] > 10.0 * found[0]


def test_kl_to_the_reference_is_a_mean_over_tokens(trainer: MakeTrainer) -> None:
    found = []
    for copies in (1, 3):
        kl = {"coef": 0.5, "kind": "k3", "in_reward": True}
        learner = trainer(advantage="reinforce_plus_plus", kl=kl, lr=1e-2, lr_warmup_steps=0, minibatches=1)
        batch = _bandit()
        learner.train_step(batch, version=0)
        rows = [
            replace(row, episode_id=f"{row.episode_id}-{copy}", group_id=row.group_id + 1000 * copy)
            for copy in range(copies)
            for row in batch.rows
        ]
        found.append(learner.train_step(replace(batch, rows=rows), version=1)["policy/kl_ref"])
    assert found[0] > 1e-4 and found[1] == pytest.approx(found[0], rel=1e-3)


def test_a_rank_makes_the_folder_that_it_publishes_into(trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer().publish(tmp_path / "of_another_node" / "scratch")
    assert list((tmp_path / "of_another_node" / "scratch").iterdir())


def test_figures_of_the_last_steps_tokens_are_given_once(trainer: MakeTrainer) -> None:
    learner = trainer(advantage="grpo")
    assert learner.token_figures() is None
    learner.train_step(_bandit(), version=0)
    figures = learner.token_figures()
    assert figures is not None and len(figures.start) == sum(int(row.mask.sum()) for row in _bandit().rows)
    assert np.isfinite(figures.advantage).all() and learner.token_figures() is None


def test_metrics_are_floats_under_their_names(trainer: MakeTrainer) -> None:
    metrics = trainer().train_step(walks(), version=0)
    assert metrics["learner/tokens"] == sum(len(row.ids) for row in walks().rows)
    assert all(type(value) is float and np.isfinite(value) for value in metrics.values())
    expected = "policy/loss policy/approx_kl policy/clipfrac policy/grad_norm policy/entropy critic/vf_loss learner/lr"
    expected += " critic/explained_variance policy/is_weight_mean policy/is_weight_max learner/tokens learner/skipped"
    expected += " time/train_s policy/max_logprob_diff policy/mean_logprob_diff learner/mfu"
    assert set(expected.split()) <= set(metrics)


@pytest.mark.seconds
def test_a_policy_comes_nearer_to_its_teacher_on_what_it_samples(
    trainer: MakeTrainer, model: Path, tmp_path: Path
) -> None:
    teacher = make_model(tmp_path / "teacher", seed=11)
    learner = trainer(
        advantage="none", teacher={"path": str(teacher)}, lr=3e-3, lr_warmup_steps=0, minibatches=1, critic="none"
    )
    batch, found = walks(), []
    for version in range(6):
        metrics = learner.train_step(batch, version=version)
        found.append(metrics["policy/kl_teacher"])
        learner.save_pretrained(tmp_path / "now")
        batch = _sampled_by(tmp_path / "now", walks(), version=version + 1)
    lm = AutoModelForCausalLM.from_pretrained
    rows = walks().rows
    assert found[0] == pytest.approx(_gap(lm(model), lm(teacher), rows), abs=1e-5)
    assert found[-1] < found[0] - 0.01
    assert learner._teacher is not None
    held = list(learner._teacher.parameters())
    assert not any(each.requires_grad for each in held), "it is frozen"


def test_a_teacher_in_half_precision_rounds_as_the_policy_does(trainer: MakeTrainer, model: Path) -> None:
    learner = trainer(advantage="none", teacher={"path": str(model)}, critic="none", dtype="bfloat16")
    assert learner.train_step(walks(), version=0)["policy/kl_teacher"] == 0.0, "the policy is its own teacher"


def _gap(policy: Any, teacher: Any, rows: list[Row]) -> float:
    """Mean of log pi - log pi_T over the trained tokens."""
    gaps = []
    for row in rows:
        ids = torch.from_numpy(row.ids).long()[None]
        with torch.no_grad():
            ours, theirs = (one(ids).logits[0, :-1].log_softmax(-1) for one in (policy, teacher))
        own = (ours - theirs).gather(-1, ids[0, 1:, None]).squeeze(-1)
        gaps.append(own[torch.from_numpy(row.mask[1:].astype(bool))])
    return float(torch.cat(gaps).mean())
