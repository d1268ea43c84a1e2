"""Rules of learner/training/hints.py, with the tiny model's own tokenizer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from buffers.records import Row
from learner.training.hints import hinted_sequences, hints_of
from learner.training.packing import Sequences
from learner.training.said import Sayings
from tests.support.learner_parts import make_model, make_row


def test_hint_is_a_user_message_before_the_first_trained_answer(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_model(tmp_path / "tiny"))
    chat = [{"role": "system", "content": "Play."}, {"role": "user", "content": "Go."}]
    hinted_chat = [*chat, {"role": "user", "content": "It is north."}]
    prompt, expected = (
        tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
        for messages in (chat, hinted_chat)
    )
    answer = tokenizer("w<|im_end|>", add_special_tokens=False)["input_ids"]
    ids = np.array(prompt + answer, dtype=np.int32)
    mask = np.array([0] * len(prompt) + [1] * len(answer), dtype=np.uint8)
    plain = Sequences([ids, ids], masks=[mask, mask])
    hinted = hinted_sequences(plain, hints=["It is north.", None], tokenizer=tokenizer)
    assert hinted.ids[0].tolist() == expected + answer
    assert hinted.ids[1].tolist() == ids.tolist()
    assert hinted.masks[0].tolist() == [0] * len(expected) + [1] * len(answer)
    assert hinted.counts.tolist() == plain.counts.tolist()


@pytest.mark.parametrize("first", [1, 4])
def test_row_without_a_generation_prompt_gets_the_hint_right_before_its_answer(tmp_path: Path, first: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_model(tmp_path / "tiny"))
    ids = np.arange(10, 16, dtype=np.int32)
    mask = (np.arange(6) >= first).astype(np.uint8)
    hinted = hinted_sequences(Sequences([ids], masks=[mask]), hints=["x"], tokenizer=tokenizer)
    added = len(hinted.ids[0]) - len(ids)
    assert added > 3
    assert hinted.ids[0].tolist() == [
        *ids[:first],
        *tokenizer("<|im_start|>user\nx<|im_end|>\n")["input_ids"],
        *ids[first:],
    ]
    assert np.flatnonzero(hinted.masks[0]).tolist() == [place + added for place in np.flatnonzero(mask)]


def test_hints_come_from_judges_from_the_environment_and_from_better_siblings(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_model(tmp_path / "tiny"))
    sayings = Sayings(tokenizer)
    chat = [{"role": "user", "content": "Go."}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=True, add_generation_prompt=True, return_dict=False)

    def row(answers: tuple[str, str], *, group: int = 0, score: float = 0.0, **others: Any) -> Row:
        said = "\n<|im_start|>user\nInvalid.<|im_end|>\n<|im_start|>assistant\n"
        pieces = [f"{answers[0]}<|im_end|>", said, f"{answers[1]}<|im_end|>"]
        ids = [prompt, *(tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in pieces)]
        mask = [number % 2 for number, part in enumerate(ids) for _ in part]
        tokens = [token for part in ids for token in part]
        return make_row(tokens, mask=mask, group=group, score=score, episode=f"{group}-{answers[0]}-0", **others)

    rows = [row(("w", "a"), hint="It is north."), row(("s", "d"), score=1.0), row(("a", "a"), group=1)]
    found = {
        source: hints_of(rows, sources=[source], sayings=sayings, tokenizer=tokenizer)
        for source in ("hint", "said", "sibling")
    }
    assert found["hint"] == ["It is north.", None, None]
    assert found["said"] == ["After your answer you will read:\nInvalid."] * 3
    assert found["sibling"] == ["A better answer was:\ns\nd", None, None]
    everything = hints_of(rows, sources=["hint", "said", "sibling"], sayings=sayings, tokenizer=tokenizer)
    assert everything[0] == "\n".join([found["hint"][0] or "", found["said"][0] or "", found["sibling"][0] or ""])
    of_roles = [row(("w", "a"), role="solver"), row(("s", "d"), role="critic", score=1.0)]
    assert hints_of(of_roles, sources=["sibling"], sayings=sayings, tokenizer=tokenizer) == [None, None]
