"""TRL's side of `benchmarks.peers`: its GRPO trainer plays and trains the same tasks, in an environment that has nothing but TRL.

Run as a script by that environment's interpreter on a JSON file; imports nothing of ours. Everything is TRL's own (generation by
transformers, loss, AdamW); only the clock and the validation, one greedy answer for each task, are added, and validation is not
counted. Written for trl 1.16.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from product import multiply
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

NUMBER = re.compile(r"-?[0-9.,]+")
"""A number as the scorer of both sides finds it: the answer is its last one."""


def score(answer: str, truth: str) -> float:
    """1 when the last number of the answer is the truth."""
    texts = [text.strip(".,") for text in NUMBER.findall(answer)]
    numbers = [text.replace(",", "") for text in texts if text not in ("", "-")]
    return float(bool(numbers) and numbers[-1] == truth)


def rewards(completions: list[Any], truth: list[str], **_: Any) -> list[float]:
    """What TRL asks: a reward for each completion, which is a list of one message."""
    return [score(messages[-1].get("content") or "", text) for messages, text in zip(completions, truth, strict=True)]


class Clock(TrainerCallback):
    """Seconds of each step, from the first prompt to the new weights, and what the weights answer after some of them."""

    def __init__(self, arguments: SimpleNamespace, tokenizer: Any) -> None:
        self.seconds: list[float] = []
        self.validation: list[tuple[int, float]] = []
        self._arguments, self._tokenizer = arguments, tokenizer
        self._began = 0.0

    def on_train_begin(self, *_: Any, model: Any, **__: Any) -> None:
        self._validate(model)

    def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._began)
        if len(self.seconds) % self._arguments.every == 0:
            self._validate(model)
        self._began = time.perf_counter()

    def _validate(self, model: Any) -> None:
        tasks, texts = self._arguments.test, []
        self._began = time.perf_counter()
        if not tasks:
            return
        for start in range(0, len(tasks), 64):
            batch = self._tokenizer.apply_chat_template(
                [task["prompt"] for task in tasks[start : start + 64]], add_generation_prompt=True, tokenize=True,
                padding=True, padding_side="left", return_dict=True, return_tensors="pt",
            )  # fmt: skip
            with torch.no_grad():
                ids = model.generate(**batch, max_new_tokens=self._arguments.max_tokens, do_sample=False)
            texts += self._tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        scores = [score(text, task["truth"]) for text, task in zip(texts, tasks, strict=True)]
        self.validation.append((len(self.seconds), sum(scores) / len(scores)))
        print(f"step {len(self.seconds)}: validation {self.validation[-1][1]:.3f}, {self.seconds}", flush=True)
        self._began = time.perf_counter()


def settings(arguments: SimpleNamespace, *, folder: str) -> GRPOConfig:
    """The same update as ours, which is GRPO's with clip-higher, a token-mean loss and no KL."""
    answers = arguments.groups * arguments.group_size
    return GRPOConfig(
        output_dir=folder,
        seed=arguments.seed,
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.micro_batch,
        gradient_accumulation_steps=answers // arguments.micro_batch,
        num_generations=arguments.group_size,
        max_completion_length=arguments.max_tokens,
        max_tool_calling_iterations=arguments.tool_calls or None,
        temperature=1.0,
        learning_rate=arguments.lr,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        mask_truncated_completions=False,
        gradient_checkpointing=arguments.gradient_checkpointing,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )


def main() -> None:
    given, out = (Path(word) for word in sys.argv[1:3])
    arguments = SimpleNamespace(**json.loads(given.read_text()))
    torch.set_num_threads(arguments.threads)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    clock = Clock(arguments, tokenizer)
    trainer = GRPOTrainer(
        model=arguments.model,
        reward_funcs=rewards,
        args=settings(arguments, folder=str(out.parent / "trl")),
        train_dataset=Dataset.from_list(arguments.train),
        processing_class=tokenizer,
        callbacks=[clock],
        tools=[multiply] if arguments.tool_calls else None,
    )
    trainer.train()
    means = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    lengths = [entry["completions/mean_length"] for entry in trainer.state.log_history if "reward" in entry]
    calls = [entry.get("tools/call_frequency", 0.0) for entry in trainer.state.log_history if "reward" in entry]
    figures = {
        "step_s": clock.seconds,
        "rewards": means,
        "validation": clock.validation,
        "mean_length": lengths,
        "calls": calls,
    }
    out.write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
