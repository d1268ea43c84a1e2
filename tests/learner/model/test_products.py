"""Rules of learner/model/products.py: what oneDNN computes is what torch computes."""

import pytest
import torch
from torch import nn

from learner.model import products


@pytest.mark.parametrize("shape", [(2, 37, 512), (5, 512)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_gives_the_numbers_and_gradients_that_torch_gives(
    shape: tuple[int, ...], bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not products._HAS_ONEDNN:
        pytest.skip("needs oneDNN on an x86 processor")
    torch.manual_seed(0)
    layer, given = nn.Linear(512, 300, bias=bias), torch.randn(shape)
    calls: list[int] = []
    own = products.product
    monkeypatch.setattr(products, "product", lambda *factors: (calls.append(1), own(*factors))[1])
    found = []
    for is_ours in (True, False):
        states = given.clone().requires_grad_()
        answer = products.linear(layer, states) if is_ours else layer(states)
        answer.square().sum().backward()
        found.append((answer.detach(), states.grad, *(weight.grad for weight in layer.parameters())))
        layer.zero_grad()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-2, rtol=1e-4)
    assert len(calls) == 3


def test_small_layers_half_precision_and_no_rows_stay_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "product", None)
    assert products.linear(nn.Linear(8, 8), torch.ones(2, 8)).shape == (2, 8)
    assert products.linear(nn.Linear(512, 512), torch.ones(0, 512)).shape == (0, 512)
    wide = nn.Linear(512, 512).bfloat16()
    assert products.linear(wide, torch.ones(2, 512, dtype=torch.bfloat16)).dtype == torch.bfloat16
