"""Supervised learning on traces: teaches a fresh model the protocol (who speaks when, where a turn ends), not the task.

Called by `learner.training.trainer.Trainer.warm_start` on every rank. Invariant: the ids are those of real multi-round
play: all that the policy would have sampled (an assistant turn with the token that ends it) is tokenized on its own, as
is all text between two such turns, so no token spans the border; only sampled tokens are trained. Does not sample,
score or write files.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from buffers.tasks.parquet import Trace, read_demonstrations
from learner.algorithms.losses import cross_entropy
from learner.model import fsdp
from learner.model.fsdp import make_adamw
from learner.model.policy import Policy
from learner.training.packing import Sequences


def load_traces(path: Path, *, tokenizer: Any) -> Sequences:
    """Reads a parquet file's column `messages`. Raises ValueError naming a trace that the template cannot show."""
    prefix = generation_prompt(tokenizer)
    traces = list(read_demonstrations(Path(path)))
    pieces = [_split(trace, number=number, prefix=prefix, tokenizer=tokenizer) for number, trace in enumerate(traces)]
    tokens = tokenizer([text for trace in pieces for text in trace], add_special_tokens=False)["input_ids"]
    ids, masks, first = [], [], 0
    for trace in pieces:
        parts = tokens[first : first + len(trace)]
        first += len(trace)
        ids.append(np.array([token for part in parts for token in part], dtype=np.int32))
        masks.append(np.repeat(np.arange(len(trace)) % 2, [len(part) for part in parts]).astype(np.uint8))
    return Sequences(ids, masks=masks)


def generation_prompt(tokenizer: Any) -> str:
    """The text that the template puts before an assistant's turn, such as `<|im_start|>assistant\\n`."""
    opening = [{"role": "user", "content": "?"}]
    without = tokenizer.apply_chat_template(opening, tokenize=False)
    return str(tokenizer.apply_chat_template(opening, tokenize=False, add_generation_prompt=True)[len(without) :])


def _split(trace: Trace, *, number: int, prefix: str, tokenizer: Any) -> list[str]:
    """The conversation's text as [context, turn, context, turn, ...]; what follows the last turn is left out."""
    text = tokenizer.apply_chat_template(trace.messages, tools=trace.tools, tokenize=False)
    context, *replies = text.split(prefix)
    turns = sum(message["role"] == "assistant" for message in trace.messages)
    if turns == 0 or len(replies) != turns or any(tokenizer.eos_token not in reply for reply in replies):
        raise ValueError(
            f"trace {number}: each assistant message must appear as {prefix!r}, its text, {tokenizer.eos_token!r}; "
            f"got {len(replies)} such turns for {turns} assistant messages; use a ChatML-like chat template"
        )
    pieces = [context + prefix]
    for reply in replies:
        turn, rest = reply.split(tokenizer.eos_token, 1)
        pieces += [turn + tokenizer.eos_token, rest + prefix]
    return pieces[:-1]


def train_on_traces(
    policy: Policy,
    *,
    traces: Sequences,
    steps: int,
    batch_size: int,
    lr: float,
    lr_warmup_steps: int,
    grad_clip: float,
    token_budget: int,
    seed: int,
    rank: int,
    world_size: int,
) -> dict[str, float]:
    """`steps` AdamW updates on `batch_size` traces each. Returns first and last mean loss (nats per token) and seconds."""
    started = time.monotonic()
    device = next(policy.parameters()).device
    optimizer = make_adamw([{"params": fsdp.trained(policy)}], lr=lr)
    rng = np.random.default_rng(seed)
    losses: list[float] = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / (lr_warmup_steps + 1))
        rows = rng.choice(len(traces.ids), size=min(batch_size, len(traces.ids)), replace=False).tolist()
        shares = traces.plan(rows, num_ranks=world_size, token_budget=token_budget)
        scale = 1.0 / float(traces.counts[rows].sum())
        loss = torch.zeros((), device=device)
        for piles in shares:
            micro = traces.micro_batch(piles[rank], device=device)
            outputs = policy(micro, temperature=1.0)
            own = cross_entropy(outputs.logprobs, weights=torch.full_like(outputs.logprobs, scale))
            (own * world_size).backward()  # FSDP averages over ranks; the sum is wanted
            loss += own.detach()
        fsdp.update(policy, optimizer=optimizer, clip=grad_clip)
        losses.append(float(fsdp.all_sum(loss)))
    return {"first_loss": losses[0], "last_loss": losses[-1], "seconds": time.monotonic() - started}
