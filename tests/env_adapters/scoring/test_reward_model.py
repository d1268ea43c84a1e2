"""Rules of env_adapters/scoring/reward_model.py: a checkpoint with one label scores; anything else is refused when it
is loaded."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

from buffers.errors import ScoreError, TaskError
from buffers.records import Task
from configs.load import load_config
from configs.tiny_model import make_tiny_model
from env_adapters.scoring import reward_model
from env_adapters.scoring.reward_model import RewardModel
from env_adapters.scoring.rewards import Rewards

ANSWERS = ["the lamp is in the left room", "no", "I do not know, " * 9, "north"]


def task(number: int = 0, *, source: str = "unknown") -> Task:
    question = [{"role": "system", "content": "Judge."}, {"role": "user", "content": "Where is the lamp? " * number}]
    return Task(task_id=f"t-{number}", prompt=question, data_source=source)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random reward model on the tiny model's tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "judge"
    make_tiny_model(folder)
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=512, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        intermediate_size=32, initializer_range=0.3, num_labels=1, max_position_embeddings=400,
    )  # fmt: skip
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    return folder


def by_hand(folder: Path, *, task: Task, answer: str) -> float:
    """The conversation alone in a batch, its last token's logit."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder)
    chat = [*task.prompt, {"role": "assistant", "content": answer}]
    ids = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False), add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        states = model.model(torch.tensor([ids])).last_hidden_state[0, -1]
        return float(model.score(states))


def test_a_score_is_the_logit_after_prompt_and_answer_whatever_else_is_in_the_batch(folder: Path) -> None:
    tasks = [task(number) for number in range(len(ANSWERS))]
    expected = [by_hand(folder, task=one, answer=answer) for one, answer in zip(tasks, ANSWERS, strict=True)]
    model = RewardModel(str(folder))
    assert model(tasks, ANSWERS) == pytest.approx(expected, abs=1e-4)
    assert model(tasks[1:2], ANSWERS[1:2]) == pytest.approx(expected[1:2], abs=1e-4)
    assert len({round(score, 3) for score in expected}) == len(expected)


@pytest.mark.parametrize("padded", [True, False])
def test_passes_hold_the_budget_and_without_a_padding_token_one_row_each(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, padded: bool
) -> None:
    own = shutil.copytree(folder, tmp_path / "own")
    if not padded:
        settings = json.loads((own / "tokenizer_config.json").read_text())
        settings.pop("pad_token")
        (own / "tokenizer_config.json").write_text(json.dumps(settings))
    tasks = [task(number) for number in range(len(ANSWERS))]
    expected = RewardModel(str(folder))(tasks, ANSWERS)
    model = RewardModel(str(own))
    shapes: list[tuple[int, ...]] = []
    seen: list[int] = []

    def note(module: Any, words: Any, named: Any) -> None:
        shapes.append(tuple(words[0].shape))
        seen.append(int(named["attention_mask"].sum()))

    model._model.register_forward_pre_hook(note, with_kwargs=True)
    monkeypatch.setattr(reward_model, "PASS_TOKENS", 150)
    assert model(tasks, ANSWERS) == pytest.approx(expected, abs=1e-4)
    assert sum(rows for rows, _ in shapes) == 4
    assert all(rows == 1 or rows * width <= 150 for rows, width in shapes)
    assert max(rows for rows, _ in shapes) == (2 if padded else 1)
    texts = [model._shown(one, answer) for one, answer in zip(tasks, ANSWERS, strict=True)]
    assert sum(seen) == sum(len(model._tokenizer(text)["input_ids"]) for text in texts)  # no padding is looked at


def test_an_answer_that_is_too_long_is_no_number_and_spoils_no_other(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING")  # a library that was imported before may have raised the root's
    scores = RewardModel(str(folder))([task(), task(), task(1)], ["no", "word " * 500, ANSWERS[0]])
    assert math.isnan(scores[1]) and math.isfinite(scores[0]) and math.isfinite(scores[2])
    assert "task t-0 must have at most 400 tokens for the reward model, got" in caplog.text


async def test_a_configuration_names_it_and_two_sources_share_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    class Counted(RewardModel):
        def __call__(self, tasks: Any, answers: Any) -> list[float]:
            sizes.append(len(tasks))
            return super().__call__(tasks, answers)

    loaded: list[Counted] = []
    monkeypatch.setattr(reward_model, "RewardModel", lambda path: loaded.append(Counted(path)) or loaded[-1])
    named = f"model:{folder}"
    rewards = Rewards({"one": named, "default": named})
    first = asyncio.create_task(rewards.score(task(source="one"), "no"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # the first is being judged; what comes now piles up
    others = [rewards.score(task(1, source=source), answer) for source, answer in (("one", "a"), ("two", "b"))]
    scores = await asyncio.gather(first, *others)
    assert len(loaded) == 1 and sizes == [1, 2]
    assert scores[0] == pytest.approx(by_hand(folder, task=task(), answer="no"), abs=1e-4)


@pytest.mark.parametrize("manager", ["naive", "dapo"])
def test_the_configuration_takes_it_with_each_manager_that_judges_one_answer(manager: str) -> None:
    config = load_config(overrides=["data.scorer=model:some/folder", f"data.reward_manager={manager}"])
    assert config.data.scorer == "model:some/folder"


def _changed(folder: Path, own: Path, **keys: Any) -> str:
    shutil.copytree(folder, own)
    settings = json.loads((own / "config.json").read_text()) | keys
    (own / "config.json").write_text(json.dumps(settings))
    return str(own)


def test_what_cannot_score_is_refused_by_name_when_it_is_loaded(folder: Path, tmp_path: Path) -> None:
    causal = str(make_tiny_model(tmp_path / "causal"))
    two = _changed(folder, tmp_path / "two", id2label={"0": "bad", "1": "good"}, label2id={"bad": 0, "good": 1})
    headless = _changed(folder, tmp_path / "headless")
    lm: Any = AutoModelForSequenceClassification.from_pretrained(folder)
    lm.model.save_pretrained(headless)
    _write_architecture(Path(headless))
    silent = _changed(folder, tmp_path / "silent")
    (Path(silent) / "chat_template.jinja").unlink()
    for name, words in [
        (str(tmp_path / "nowhere"), "must name a Hugging Face folder with a config.json, got .*nowhere"),
        (causal, "must be a sequence-classification checkpoint, got Qwen3ForCausalLM"),
        (two, "must have one label, its score, got 2"),
        (headless, r"must hold every weight of Qwen3ForSequenceClassification, got none for \['score.weight'\]"),
        (silent, "needs a chat template"),
    ]:
        with pytest.raises(TaskError, match=words) as refusal:
            Rewards(f"model:{name}")
        assert "\n" not in str(refusal.value)


def _write_architecture(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    (folder / "config.json").write_text(json.dumps(settings))


async def test_a_conversation_that_the_template_cannot_show_fails_its_own_episode(folder: Path) -> None:
    rewards = Rewards(f"model:{folder}")
    broken = Task(task_id="t-0", prompt=[{"role": "nobody", "content": "?"}])
    with pytest.raises(ScoreError, match=r"failed on task t-0: .*must show task t-0, got unknown role nobody"):
        await rewards.score(broken, "no")
