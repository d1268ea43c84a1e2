"""A reward model as scorer: a Hugging Face sequence-classification checkpoint with one label, `data.scorer: model:FOLDER`.

Loaded once by `env_adapters.scoring.rewards`, which calls it in a thread with all answers that have piled up. What it
judges is the task's prompt and the answer, written by the checkpoint's own chat template; its score is the label's
logit, as it comes. Invariants: an answer's score does not depend on what else is in the batch; a checkpoint that cannot
score is refused when it is loaded, and no weight of it is made up. It is frozen, and knows neither the policy nor its
tokens.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buffers.errors import TaskError
from buffers.records import Task

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

PREFIX = "model:"
"""Prefix of the folder in `data.scorer`."""
PASS_TOKENS = 16384
"""Most tokens of one forward pass, padding included; a longer answer has a pass of its own."""


class RewardModel:
    """Scores answers. Raises TaskError for a folder that is no such checkpoint. `device` None: a GPU where there is one."""

    def __init__(self, folder: str, *, device: str | None = None) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        _check_folder(Path(folder))
        self._torch = torch
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if not self._tokenizer.chat_template:
            raise TaskError(
                f"data.scorer {PREFIX}{folder} needs a chat template, which the answer is shown in, got none; "
                f"put chat_template.jinja into the folder"
            )
        self._model, info = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype="auto", local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
        if info["missing_keys"]:
            raise TaskError(
                f"data.scorer {PREFIX}{folder} must hold every weight of {type(self._model).__name__}, got none for "
                f"{sorted(info['missing_keys'])}; save the reward model with its head"
            )
        self._model.eval()
        self._tokenizer.padding_side = "right"  # positions count from the first token
        self._pad: int | None = self._tokenizer.pad_token_id
        self._model.config.pad_token_id = self._pad
        self._longest: int = getattr(self._model.config, "max_position_embeddings", None) or 2**31

    def __call__(self, tasks: Sequence[Task], answers: Sequence[str]) -> list[float]:
        """One score for each answer; blocks. nan for one that is longer than the model reads: the ledger refuses it.

        Raises ValueError for a conversation that the chat template cannot show.
        """
        texts = [self._shown(task, answer) for task, answer in zip(tasks, answers, strict=True)]
        rows: list[list[int]] = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        scores = [math.nan] * len(rows)
        self._model.to(self._device)  # not while loading: the engine measures the GPU's free memory meanwhile
        for places in self._passes([row if self._fits(row, task=task) else [] for row, task in zip(rows, tasks)]):
            for place, score in zip(places, self._pass([rows[place] for place in places]).tolist(), strict=True):
                scores[place] = score
        return scores

    def _fits(self, row: Sequence[int], *, task: Task) -> bool:
        if len(row) > self._longest:
            logger.warning(
                "prompt and answer of task %s must have at most %d tokens for the reward model, got %d; "
                "lower rollout.max_model_len",
                task.task_id,
                self._longest,
                len(row),
            )
        return len(row) <= self._longest

    def _shown(self, task: Task, answer: str) -> str:
        from jinja2 import TemplateError

        messages = [*task.prompt, {"role": "assistant", "content": answer}]
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False))
        except TemplateError as error:
            raise ValueError(
                f"the reward model's chat template must show task {task.task_id}, got {error}; change the template"
            ) from error

    def _passes(self, rows: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Places of the rows that are computed together: of like length, within PASS_TOKENS. Empty rows are in none."""
        pile: list[int] = []
        for place in sorted((place for place, row in enumerate(rows) if row), key=lambda place: -len(rows[place])):
            # without a padding token the model cannot tell where a row ends: each is alone
            if pile and (self._pad is None or (len(pile) + 1) * len(rows[pile[0]]) > PASS_TOKENS):
                yield pile
                pile = []
            pile.append(place)
        if pile:
            yield pile

    def _pass(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """[n] scores of n rows."""
        torch = self._torch
        longest = max(len(row) for row in rows)
        ids = torch.tensor([[*row, *[self._pad or 0] * (longest - len(row))] for row in rows])
        seen = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        with torch.inference_mode():
            logits: Tensor = self._model(ids.to(self._device), attention_mask=seen.to(self._device)).logits
        return logits[:, 0].float().cpu()


def _check_folder(folder: Path) -> None:
    """Raises TaskError when there is no checkpoint, or one with another head."""
    description = folder / "config.json"
    if not description.is_file():
        raise TaskError(
            f"data.scorer {PREFIX}FOLDER must name a Hugging Face folder with a config.json, got {str(folder)!r}; "
            f"save the reward model there"
        )
    config = json.loads(description.read_text(encoding="utf-8"))
    heads = config.get("architectures") or ["none"]
    if not heads[0].endswith("ForSequenceClassification"):
        raise TaskError(
            f"data.scorer {PREFIX}{folder} must be a sequence-classification checkpoint, got {heads[0]}; train a reward "
            f"model as AutoModelForSequenceClassification with num_labels=1"
        )
    labels = len(config.get("id2label") or {0: "", 1: ""})  # transformers writes it unless there are two
    if labels != 1:
        raise TaskError(
            f"data.scorer {PREFIX}{folder} must have one label, its score, got {labels}; train it with num_labels=1"
        )
