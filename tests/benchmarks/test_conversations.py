"""The benchmark of conversations, on a tiny model: it plays for real, and it sees what it is there for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import conversations
from benchmarks.chat_families import FAMILIES
from buffers.records import Round
from configs.tiny_model import make_tiny_model

PATIENCE_S = 600.0


@pytest.mark.engine
@pytest.mark.long(minutes=2)
def test_whole_conversations_lose_nothing_and_are_one_row(tmp_path: Path) -> None:
    words = ["--model", str(make_tiny_model(tmp_path / "model", positions=4096)), "--json", str(tmp_path / "out.json")]
    only = ["--quick", "--only", "hermes", "llama-3.1", "glm-4", "phi-2"]
    run = [sys.executable, "-m", "benchmarks.conversations", *words, *only]
    subprocess.run(run, check=True, capture_output=True, timeout=PATIENCE_S)
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["lost_or_repeated_text"], found["refused"]) == (0, 0), found["families"]
    assert (found["rows_per_straight_conversation"], found["in_ordinary_text"]) == (1.0, 3.0)
    assert found["conversations"] > 100 and 0.0 < found["max_logprob_diff"] < 1e-4


class Letters:
    """A stage whose tokens are letters."""

    family = FAMILIES["chatml"]

    def text(self, ids: np.ndarray) -> str:
        return "".join(map(chr, ids))


def round_of(tail: str, sampled: str, *, parent: int | None) -> Round:
    ids = [np.array([*map(ord, text)], np.int32) for text in (tail, sampled)]
    logprobs = np.zeros(len(sampled), np.float32)
    index = 0 if parent is None else parent + 1
    return Round(
        episode_id="e", round_index=index, parent=parent, tail_ids=ids[0], sampled_ids=ids[1], logprobs=logprobs,
        versions=np.zeros(len(sampled), np.int32), finish_reason="stop",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("tail", "is_wrong"),
    [
        ("\n<|im_start|>user\nTwo.<|im_end|>\n<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n", True),
        ("\n<|im_start|>assistant\n", True),
        ("<|im_end|>\n<|im_start|>user\nTwo.<|im_end|>\n<|im_start|>assistant\n", True),
    ],
    ids=["right", "the question is lost", "all but a line break", "the end of the turn stands twice"],
)
def test_a_prompt_that_lacks_or_repeats_something_is_seen(tail: str, is_wrong: bool) -> None:
    said = {"role": "assistant", "content": "First."}
    messages = [{"role": "user", "content": "One."}, said, {"role": "user", "content": "Two."}, said]
    first = FAMILIES["chatml"].render(messages[:1])
    rounds = [round_of(first, "First.<|im_end|>", parent=None), round_of(tail, "First.<|im_end|>", parent=0)]
    assert len(list(conversations._wrong_prompts(Letters(), messages, rounds))) == is_wrong
