"""Rules of a trainer with the prefix tree: the same weights and metrics as with rows packed one by one, whatever is trained."""

from pathlib import Path
from typing import Any

import pytest
import torch

from learner.model import packed_attention as attention
from learner.model.packed_attention import Paths
from tests.support.learner_parts import assert_same_weights, branching_batch, make_model, make_trainer
from tests.support.weights.published_weights import published

HINTS = {"advantage": "grpo", "critic": "none", "hints": {"coef": 0.5, "sources": ["hint", "sibling"]}}
WAYS: dict[str, dict[str, Any]] = {
    "groups": {"advantage": "grpo", "critic": "none", "minibatches": 2, "token_budget": 150},
    "critic": {"critic": "separate", "kl": {"coef": 0.05}, "gradient_checkpointing": True, "minibatches": 1},
    "adapter": {"lora": {"rank": 4, "alpha": 8.0}, "entropy_coef": 0.01, "epochs": 2},
    "hints": {**HINTS, "loss": "gspo", "minibatches": 1},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.seconds
@pytest.mark.parametrize("way", WAYS)
def test_steps_on_a_tree_are_those_on_packed_rows(model: Path, way: str) -> None:
    """Two steps: in the second the tokens are of an older version, and of the reference's."""
    found = []
    for prefix_tree in (True, False):
        learner = make_trainer(model, lr=1e-3, lr_warmup_steps=0, prefix_tree=prefix_tree, **WAYS[way])
        steps = [learner.train_step(branching_batch(seed=seed), version=seed) for seed in range(2)]
        found.append((steps, published(learner)))
        learner.close()
    (tree, tree_weights), (packed, packed_weights) = found
    for one, other in zip(tree, packed, strict=True):
        assert one["learner/raw_over_unique"] > 1.3 > other["learner/raw_over_unique"] == 1.0
        for name in other.keys() - {"learner/raw_over_unique", "learner/mfu", "time/prepare_s", "time/train_s"}:
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name
        assert one["policy/grad_norm"] > 0.01
    assert_same_weights(tree_weights, packed_weights)


@pytest.mark.parametrize("window", [None, 3])
def test_one_kernel_is_asked_for_segments_and_their_paths(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    """torch's kernel runs on a GPU only; here a stand-in does what torch documents: the last query sees the last key."""
    torch.manual_seed(0)
    states = [torch.randn(1, heads, 9, 8) for heads in (4, 2, 2)]
    paths = Paths(
        places=torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 6, 7, 8]),
        starts=torch.tensor([0, 4, 10, 17], dtype=torch.int32),
        longest=7,
    )
    options: dict[str, Any] = {"cu_seq_lens_q": torch.tensor([0, 4, 6, 9], dtype=torch.int32), "max_length_q": 4}
    options |= {"sliding_window": window, "paths": paths, "scaling": 0.3}
    expected, _ = attention.packed_attention(torch.nn.Identity(), *states, None, **options)
    asked: list[Any] = []

    def varlen(
        query: Any, key: Any, value: Any, starts: Any, seen: Any, most: int, most_seen: int, **others: Any
    ) -> Any:
        asked.append((most, most_seen, others["window_size"]))
        out = []
        for first, end, low, high in zip(starts[:-1], starts[1:], seen[:-1], seen[1:], strict=True):
            q, k, v = (part.transpose(0, 1) for part in (query[first:end], key[low:high], value[low:high]))
            k, v = (part.repeat_interleave(2, dim=0) for part in (k, v))
            back = torch.arange(len(q[0]))[:, None] + len(k[0]) - len(q[0]) - torch.arange(len(k[0]))
            hidden = (back < 0) | ((back > others["window_size"][0]) if window else False)
            out.append(((q @ k.mT * others["scale"]).masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1))
        return torch.cat(out)

    monkeypatch.setattr(attention, "has_kernel", lambda query: True)
    monkeypatch.setattr(attention, "varlen_attn", varlen)
    found, _ = attention.packed_attention(torch.nn.Identity(), *states, None, **options)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert asked == [(4, 7, (-1, 0) if window is None else (window - 1, 0))]


def test_long_segments_behind_others_are_computed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(21, 4, 8), torch.randn(30, 2, 8), torch.randn(30, 2, 8)
    for window in (None, 6):
        whole = attention._segment_attention(query, key, value, scaling=None, window=window)
        monkeypatch.setattr(attention, "MASKED_AT_ONCE", 4)
        pieces = attention._segment_attention(query, key, value, scaling=None, window=window)
        monkeypatch.undo()
        torch.testing.assert_close(pieces, whole, atol=1e-6, rtol=0)
