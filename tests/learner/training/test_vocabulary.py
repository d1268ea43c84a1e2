"""A model with another tokenizer is refused by name, before anything starts."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from buffers.errors import TaskError
from configs.tiny_model import make_tiny_model
from learner.model.weight_files import check_folders


def test_another_vocabulary_is_refused_by_name(tmp_path: Path) -> None:
    policy, other = make_tiny_model(tmp_path / "policy"), make_tiny_model(tmp_path / "other", seed=3)
    check_folders(policy, other, key="learner.teacher.path")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(other)
    with pytest.raises(
        TaskError, match=r"learner.teacher.path must name a model with the policy's own tokenizer, got .*'<new>'"
    ):
        check_folders(policy, other, key="learner.teacher.path")
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(TaskError, match="must name a model with a tokenizer"):
        check_folders(policy, empty, key="roles.old.frozen")
