"""How rows are laid out for a model: packed where that gives what the model gives each row alone, else beside one another, where
they may continue stems.

Called by `learner.training.trainer` when a model has been read, on the rank's own device, before anything is trained; in float32,
for half precision rounds more than some layouts change. Packed attention (`learner.model.packed_attention`) keeps rows apart and
shares what they have in common, in a model whose layers meet other tokens in attention only and ask nothing more of it. Rows
beside one another, filled up on the right, are right for any causal model: nothing sees what comes after it; so are rows that
continue what layers keep of a stem, states too (`learner.training.stems`). Nothing is believed: each way is compared with the
model's own forward of each row, log-probabilities and gradients, on rows that part from a common stem and reach beyond each window
and chunk of the model. Invariant: weights are not changed. All ranks of a sharded policy enter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from buffers.records import Int32
from learner.model import fsdp
from learner.model.layers import told
from learner.model.policy import Policy
from learner.training.packing import PaddedSequences, Sequences
from learner.training.stems import StemSequences
from learner.training.tree_packing import LEAST_RATIO, PrefixTree, TreeSequences

MOST = 1e-4
"""Nats on average, and relative difference of the gradients. Rounding makes 1e-6 of both, seen on 67 families; a token that is seen
or not seen 1e-2 and more."""
CHUNK = 64
"""Tokens that recurrent layers take at once where their configuration does not say it."""
REACHES = ("sliding_window", "attention_chunk_size", "chunk_size", "mamba_chunk_size")
"""How configurations call the tokens of a window or a chunk."""
LONGEST = 8192 + CHUNK
"""A row of the test at most: no window or chunk that is in use is longer."""
BRANCHES = (24, 13)
"""Tokens of the rows behind their stem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """`packs`: in one sequence, else beside one another, with transformers' kernel `attention`. `shares`: the tokens once that rows
    begin with. `why`: a line for people."""

    packs: bool
    shares: bool
    attention: str
    why: str

    def lay_out(
        self, sequences: Sequences, *, groups: npt.NDArray[np.int64], num_ranks: int, token_budget: int
    ) -> Sequences:
        """These rows; what they share is computed once where that pays. `groups` [N]: rows that are to stay together."""
        rows = Sequences(sequences.ids, masks=sequences.masks, experts=sequences.experts)
        plain = rows if self.packs else PaddedSequences(rows)
        tree = PrefixTree(sequences.labels)
        if not self.shares or plain.computed[0] < LEAST_RATIO * tree.tokens(range(len(plain.ids))):
            return plain
        found = (TreeSequences if self.packs else StemSequences)(plain, tree=tree, groups=groups)
        found.measure(num_ranks=num_ranks, token_budget=token_budget)
        return found if found.raw_over_unique >= LEAST_RATIO else plain


@dataclass(frozen=True, slots=True, kw_only=True)
class _Computed:
    """Log-probabilities [m], and this rank's part of each gradient."""

    logprobs: Tensor
    gradients: list[Tensor | None]


def choose_layout(policy: Policy, *, shares: bool, longest_row: int = LONGEST) -> Layout:
    """The first layout that is the model's own forward. `policy`: with passes in float32; `shares`: prefixes may be shared;
    `longest_row`: tokens of a row that is trained, at most.

    Rows that are not packed have eager attention where the model's usual kernel leaves something out. Raises ValueError where no
    layout is right."""
    name = type(policy.lm).__name__
    rows = _rows(policy.lm.config, longest=min(longest_row, LONGEST))
    device = next(policy.parameters()).device
    _choose_attention(policy, ids=torch.from_numpy(rows.ids[-1]).long().to(device))
    expected = _alone(policy, rows=rows, device=device)
    apart = ""
    for packs, shared in ((True, shares), *([(False, True)] if shares else []), (False, False)):
        what = "packed" if packs else "beside one another, the shorter filled up"
        what += ", what they begin with computed once" if shared else ""
        layout = Layout(packs=packs, shares=shared, attention=policy.attention, why=f"rows of {name} are {what}{apart}")
        groups = np.zeros(len(rows.ids), dtype=np.int64)
        sequences = layout.lay_out(rows, groups=groups, num_ranks=1, token_budget=2**20)
        try:
            found = _laid_out(policy, sequences=sequences, device=device)
        except torch.OutOfMemoryError:
            raise  # it says nothing about the layout
        except (ValueError, TypeError, RuntimeError, AttributeError, LookupError) as error:
            if not packs and not shared:
                raise
            reason = " ".join(str(error).split())[:200]
        else:
            nats, slope = _differences(found, expected=expected)
            if nats <= MOST and slope <= MOST:
                return layout
            reason = f"off by {nats:.1e} nats, in gradients by {slope:.1e}"
        apart += f"; {what}, they are not what each is alone: {reason}"
    raise ValueError(
        f"model.path must name a causal language model, whose rows do not change by what comes after them; {name} is "
        f"{reason}; train another model"
    )


def _rows(config: Any, *, longest: int) -> Sequences:
    """Rows with a common stem, longer than each window and chunk or as long as rows get, and one of its own; of ordinary tokens."""
    most = min(longest, told(config.get_text_config(), "max_position_embeddings") or longest)
    stem = max(8, min(reach_of(config), most - max(BRANCHES)))
    plain, rng = plain_tokens(config), np.random.default_rng(0)
    start = rng.choice(plain, stem)
    ids = [np.concatenate([start, rng.choice(plain, length)]) for length in BRANCHES]
    ids.append(rng.choice(plain, max(BRANCHES)))
    return Sequences(ids, masks=[np.array([0, *[1] * (len(row) - 1)], dtype=np.uint8) for row in ids])


def reach_of(config: Any) -> int:
    """Tokens of the longest window or chunk."""
    reaches: list[int] = [told(config.get_text_config(), name) or CHUNK for name in REACHES]
    return max(CHUNK, *reaches)


def plain_tokens(config: Any) -> Int32:
    """Ids that stand for text."""
    rows = min(config.get_text_config().vocab_size, 4096)
    special = {
        value for name, value in config.to_dict().items() if name.endswith(("_id", "_index")) and isinstance(value, int)
    }
    return np.array([one for one in range(3, rows) if one not in special], dtype=np.int32)


def _choose_attention(policy: Policy, *, ids: Tensor) -> None:
    """transformers' usual kernel leaves out what it does not know (Gemma 2's soft cap); its eager attention leaves out nothing."""
    usual = policy.attention
    with torch.no_grad():
        found = policy.own_logits(ids).log_softmax(-1)
        policy.attention = "eager"
        apart = float((policy.own_logits(ids).log_softmax(-1) - found).abs().mean())
    if apart <= MOST:
        policy.attention = usual


def _alone(policy: Policy, *, rows: Sequences, device: torch.device) -> _Computed:
    logprobs = []
    for ids in rows.ids:
        row = torch.from_numpy(ids).long().to(device)
        own = policy.own_logits(row)[:-1].float().log_softmax(-1).gather(1, row[1:, None])[:, 0]
        (own * _weights(len(own), device=device)).sum().backward()
        logprobs.append(own.detach())
    return _Computed(logprobs=torch.cat(logprobs), gradients=_taken(policy))


def _laid_out(policy: Policy, *, sequences: Sequences, device: torch.device) -> _Computed:
    everything = range(len(sequences.ids))
    starts = np.concatenate([[0], np.cumsum(sequences.counts)])
    weights = torch.cat([_weights(int(count), device=device) for count in sequences.counts])
    logprobs = torch.zeros(int(starts[-1]), device=device)
    try:
        for piles in sequences.plan(everything, num_ranks=1, token_budget=2**20):
            micro = sequences.micro_batch(piles[0], device=device)
            found = policy(micro, temperature=1.0).logprobs
            (found * weights[micro.index]).sum().backward()
            logprobs[micro.index] = found.detach()
    finally:
        gradients = _taken(policy)
    return _Computed(logprobs=logprobs, gradients=gradients)


def _weights(count: int, *, device: torch.device) -> Tensor:
    """Another for each token of a row."""
    return torch.linspace(0.0, 5.0, count, device=device).cos()


def _taken(policy: nn.Module) -> list[Tensor | None]:
    """This rank's gradients, which the model has no more."""
    found = [None if one.grad is None else fsdp.local(one.grad).clone() for one in policy.parameters()]
    policy.zero_grad()
    return found


def _differences(found: _Computed, *, expected: _Computed) -> tuple[float, float]:
    """Mean difference of a log-probability; norm of the difference of all gradients over their norm, of all ranks."""
    nats = float((found.logprobs - expected.logprobs).abs().mean())
    sums = torch.zeros(2, dtype=torch.float64, device=found.logprobs.device)
    for one, other in zip(found.gradients, expected.gradients, strict=True):
        if other is not None:
            sums[0] += (other if one is None else one - other).double().square().sum()
            sums[1] += other.double().square().sum()
    apart, whole = fsdp.all_sum(sums).tolist()
    return nats, (apart / whole) ** 0.5 if whole else 0.0
