"""Rules of mocked_server/vllm/process/worker_extension.py: what vLLM's own computation gives, row by row."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch

from mocked_server.vllm.process.worker_extension import _add_to_layer, _add_to_logits, groups_of

SLOTS = [torch.tensor([0, 0, 0, 0, 0]), torch.tensor([1, 0, 1, 2, 2]), torch.tensor([-1, 1, 1, -1, 0])]


def random_(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_gets_its_own_adapters_product_in_each_slice(slots: torch.Tensor, dtype: torch.dtype) -> None:
    x, y = random_(5, 8).to(dtype), random_(5, 10).to(dtype)
    downs = tuple(random_(3, 1, 4, 8).to(dtype) for _ in range(2))
    ups = (random_(3, 1, 6, 4).to(dtype), random_(3, 1, 4, 4).to(dtype))
    wanted = y.float()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            added = [
                0.5 * x[row].float() @ down[slot, 0].T.float() @ up[slot, 0].T.float() for down, up in zip(downs, ups)
            ]
            wanted[row] += torch.cat(added)
    _add_to_layer(SimpleNamespace(token_groups=groups_of(slots)), y, x, downs, ups, 0.5, (6, 4))
    torch.testing.assert_close(y.float(), wanted, atol=1e-5 if dtype == torch.float32 else 0.2, rtol=1e-2)


@pytest.mark.parametrize("slots", SLOTS)
def test_logits_as_well(slots: torch.Tensor) -> None:
    x, y, down, up = random_(5, 8), random_(5, 10), random_(3, 1, 4, 8), random_(3, 1, 10, 4)
    wanted = y.clone()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            wanted[row] += x[row] @ down[slot, 0].T @ up[slot, 0].T
    _add_to_logits(SimpleNamespace(sampler_groups=groups_of(slots)), y, x, down, up, 1.0)
    torch.testing.assert_close(y, wanted)


def test_vllms_methods_take_what_ours_take() -> None:
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    for theirs, ours in (
        (PunicaWrapperCPU.add_lora_linear, _add_to_layer),
        (PunicaWrapperCPU.add_lora_logits, _add_to_logits),
    ):
        names = [name for name, one in inspect.signature(ours).parameters.items() if one.kind != one.VAR_KEYWORD]
        assert list(inspect.signature(theirs).parameters)[: len(names)] == names


def test_vllm_finds_its_computation_by_the_name_of_the_class_that_is_changed() -> None:
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
    from vllm.platforms.cpu import CpuPlatform

    assert CpuPlatform.get_punica_wrapper() == f"{PunicaWrapperCPU.__module__}.{PunicaWrapperCPU.__qualname__}"
