"""Rules of learner/training/sft.py, with the tiny model's own tokenizer."""

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from learner.training.hinted_rows import hinted_sequences
from learner.training.packing import Sequences
from tests.support.learner_parts import make_model


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
