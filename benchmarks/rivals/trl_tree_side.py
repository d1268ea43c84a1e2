"""TRL's side of the prefix tree in `benchmarks.learner`: updates on rows that TRL packs as its prefix trie.

Run as a script by TRL's own interpreter on a JSON file; imports nothing of ours. Planner, trie, layout, attention with
gathered keys and the chunked output layer are TRL's (`trl.experimental.async_grpo`), and so is the loss, term by term; the
trainer around them wants a vLLM server and is left out. Its kernel, FlashAttention 3, needs a GPU: where there is none, each
segment is computed with torch's own attention, as our learner does on a CPU. Invariant: a time has everything from the rows to
the new weights in it. Written for trl 1.16.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM
from trl.experimental.async_grpo import packing
from trl.experimental.async_grpo.async_grpo_trainer import TokenBudgetBatcher, add_fused_lm_head

LOWEST, HIGHEST = 0.8, 1.28
"""Clip of the ratio, as on our side."""


def samples_of(rows: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """The rows as TRL's rollout samples, with advantages of their groups."""
    ends = np.cumsum(rows["lengths"])[:-1]
    ids, masks = np.split(rows["ids"], ends), np.split(rows["mask"], ends)
    scores, groups = rows["scores"], rows["groups"]
    advantages = [float(scores[n] - scores[groups == groups[n]].mean()) for n in range(len(scores))]
    return [
        {
            "input_ids": torch.from_numpy(row.astype(np.int64)),
            "completion_mask": torch.from_numpy(mask.astype(np.int64)),
            "old_log_probs": torch.zeros(len(row)),
            "advantage": advantages[number],
            "group_id": int(groups[number]),
        }
        for number, (row, mask) in enumerate(zip(ids, masks, strict=True))
    ]


def varlen_on_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, q_ends: torch.Tensor, k_ends: torch.Tensor, *_: Any,
    softmax_scale: float, **__: Any,
) -> torch.Tensor:  # fmt: skip
    """What the kernel computes: segment after segment, causal from the lower right corner. [tokens, heads, width]."""
    found = []
    bounds = zip(q_ends.tolist(), q_ends.tolist()[1:], k_ends.tolist(), k_ends.tolist()[1:], strict=False)
    for q_from, q_to, k_from, k_to in bounds:
        q, k, v = (part.transpose(0, 1)[None] for part in (query[q_from:q_to], key[k_from:k_to], value[k_from:k_to]))
        many, before = q_to - q_from, (k_to - k_from) - (q_to - q_from)
        mask = torch.ones(many, k_to - k_from, dtype=torch.bool).tril(before) if before else None
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=softmax_scale, enable_gqa=True
        )
        found.append(out[0].transpose(0, 1))
    return torch.cat(found)


class Updates:
    """One model, and updates of it."""

    def __init__(self, path: Path, *, token_budget: int, device: str, dtype: str) -> None:
        packing.register_tree_attention()
        if device == "cpu":
            packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen_on_cpu)
        self._model = AutoModelForCausalLM.from_pretrained(
            path, attn_implementation=packing.TREE_ATTENTION, dtype=getattr(torch, dtype)
        ).to(device)
        add_fused_lm_head(self._model, temperature=1.0, outputs=("log_probs", "entropy"))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-6, betas=(0.9, 0.95), fused=True)
        self._budget = token_budget
        self._device = device

    def update(self, samples: list[dict[str, Any]]) -> tuple[float, float]:
        """Seconds of one on all samples, and their tokens over those computed."""
        began = time.perf_counter()
        trained, raw, unique = sum(int(one["completion_mask"].sum()) for one in samples), 0, 0
        for row in self._rows(samples):
            packed = {name: value.to(self._device) for name, value in row.pack().items()}
            raw += sum(len(one["input_ids"]) for one in row.samples)
            unique += len(packed["input_ids"])
            (self._loss(packed) / trained).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - began, raw / unique

    def _rows(self, samples: list[dict[str, Any]]) -> list[packing.TreeRow]:
        """All of TRL's micro-batches; its planner gives one when the next sample has no room, and the last one stays open."""
        rows: list[packing.TreeRow] = []
        last: list[packing.TreeRow] = []

        class Watched(TokenBudgetBatcher):
            def _place(self, rows: list[packing.TreeRow], sample: dict[str, Any]) -> packing.TreeRow | None:
                last[:] = rows
                placed: packing.TreeRow | None = super()._place(rows, sample)
                return placed

        for (row,) in Watched(samples, 1, self._budget, {}):
            rows.append(row)
        return rows + [row for row in last if row.samples and row not in rows]

    def _loss(self, packed: dict[str, torch.Tensor]) -> torch.Tensor:
        longest, path = packed["tree_max_seqlens"].tolist()
        out = self._model(
            input_ids=packed["input_ids"][None], position_ids=packed["position_ids"][None],
            shift_labels=packed["shift_labels"][None], fused_lm_head=True, tree_kv_index=packed["tree_kv_index"],
            tree_cu_seqlens_q=packed["tree_cu_seqlens_q"], tree_cu_seqlens_k=packed["tree_cu_seqlens_k"],
            tree_max_seqlen_q=longest, tree_max_seqlen_k=path,
        )  # fmt: skip
        found = out.log_probs.flatten()[packed["token_index"]]
        ratio = torch.exp(found - found.detach())  # of an update on data of the present weights
        gain = packed["advantages"]
        loss: torch.Tensor = -torch.min(ratio * gain, ratio.clamp(LOWEST, HIGHEST) * gain).sum()
        return loss


def main() -> None:
    given, out = (Path(word) for word in sys.argv[1:3])
    arguments = SimpleNamespace(**json.loads(given.read_text()))
    with np.load(arguments.rows) as stored:
        samples = samples_of(dict(stored))
    updates = Updates(
        arguments.model, token_budget=arguments.token_budget, device=arguments.device, dtype=arguments.dtype
    )
    updates.update(samples)
    found = [updates.update(samples) for _ in range(arguments.repeats)]
    figures = {"tree_s": [seconds for seconds, _ in found], "raw_over_unique": [ratio for _, ratio in found]}
    out.write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
