"""Rules of learner/training/sft.py: the ids are those of real play, and only the policy's own tokens are
trained."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from buffers.tasks.parquet import write_traces
from learner.training.trainer import Trainer
from learner.training.warm_start import load_traces
from tests.support.learner_parts import make_model, make_trainer

CHAT = [
    {"role": "system", "content": "Answer with one letter."},
    {"role": "user", "content": "The exit is north."},
    {"role": "assistant", "content": "\n\nw"},
    {"role": "user", "content": "The exit is west."},
    {"role": "assistant", "content": "a"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)


@pytest.fixture
def trainer(model: Path) -> Iterator[Trainer]:
    made = make_trainer(model, critic="separate", token_budget=256)
    yield made
    made.close()


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_ids_are_those_of_real_play(tmp_path: Path, tokenizer: Any) -> None:
    write_traces(tmp_path / "traces.parquet", [CHAT])
    traces = load_traces(tmp_path / "traces.parquet", tokenizer=tokenizer)
    # as in play: a prompt, sampled ids, the newly rendered tail, sampled ids
    first = tokenizer.apply_chat_template(CHAT[:2], tokenize=False, add_generation_prompt=True)
    second = tokenizer.apply_chat_template(CHAT[:4], tokenize=False, add_generation_prompt=True)
    answer = "\n\nw<|im_end|>"
    assert second.startswith(first + answer)
    pieces = [first, answer, second[len(first + answer) :], "a<|im_end|>"]
    ids = [_tokens(tokenizer, piece) for piece in pieces]
    assert traces.ids[0].tolist() == [token for part in ids for token in part]
    assert traces.masks[0].tolist() == [number % 2 for number, part in enumerate(ids) for _ in part]


def test_the_tools_that_a_trace_offers_stand_in_its_prompt(tmp_path: Path, tokenizer: Any) -> None:
    tools = [{"type": "function", "function": {"name": "add", "description": "Adds."}}]
    write_traces(tmp_path / "traces.parquet", [CHAT], tools=tools)
    traces = load_traces(tmp_path / "traces.parquet", tokenizer=tokenizer)
    first = tokenizer.apply_chat_template(CHAT[:2], tools=tools, tokenize=False, add_generation_prompt=True)
    assert '"name": "add"' in first
    assert traces.ids[0].tolist()[: len(_tokens(tokenizer, first))] == _tokens(tokenizer, first)
    assert traces.counts[0] == len(_tokens(tokenizer, "\n\nw<|im_end|>")) + len(_tokens(tokenizer, "a<|im_end|>"))


def test_no_token_spans_the_border_between_prompt_and_answer(tmp_path: Path, tokenizer: Any) -> None:
    whole = _tokens(tokenizer, tokenizer.apply_chat_template(CHAT[:3], tokenize=False))
    write_traces(tmp_path / "traces.parquet", [CHAT[:3]])
    traces = load_traces(tmp_path / "traces.parquet", tokenizer=tokenizer)
    trained = traces.ids[0][traces.masks[0].astype(bool)].tolist()
    assert trained == _tokens(tokenizer, "\n\nw<|im_end|>")
    assert tokenizer.decode(whole).startswith(tokenizer.decode(traces.ids[0].tolist()))


def test_user_text_after_the_last_answer_is_left_out(tmp_path: Path, tokenizer: Any) -> None:
    write_traces(tmp_path / "traces.parquet", [CHAT[:4], CHAT[:3]])
    longer, shorter = load_traces(tmp_path / "traces.parquet", tokenizer=tokenizer).ids
    assert longer.tolist() == shorter.tolist()


def test_trace_that_the_template_cannot_show_is_named(tmp_path: Path, tokenizer: Any) -> None:
    write_traces(tmp_path / "traces.parquet", [CHAT, CHAT[:2]])
    with pytest.raises(
        ValueError, match=r"trace 1: each assistant message must appear .* got 0 such turns for 0 assistant"
    ):
        load_traces(tmp_path / "traces.parquet", tokenizer=tokenizer)


def test_loss_falls_and_a_separate_critic_starts_from_the_same_weights(trainer: Trainer, tmp_path: Path) -> None:
    traces = [
        [
            {"role": "user", "content": f"The exit is {direction}."},
            {"role": "assistant", "content": letter},
        ]
        for direction, letter in [("north", "w"), ("west", "a"), ("south", "s"), ("east", "d")] * 4
    ]
    write_traces(tmp_path / "traces.parquet", traces)
    metrics = trainer.warm_start(tmp_path / "traces.parquet", steps=12, batch_size=8, lr=3e-3, seed=0)
    assert metrics["first_loss"] > 4.0
    assert metrics["last_loss"] < 0.5 * metrics["first_loss"]
    policy, critic = (
        {name: weight.full_tensor() for name, weight in model.lm.named_parameters()}
        for model in (trainer._policy, trainer._critic)
    )
    assert all(bool((policy[name] == critic[name]).all()) for name in policy)
