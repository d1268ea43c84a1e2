"""Rules of learner/model/policy.py: the log-probabilities are the model's own."""

import numpy as np
import pytest
import torch

from learner.model import policy as policy_module
from learner.model.policy import Policy
from learner.training.packing import Sequences
from tests.support.learner_parts import VOCABULARY, random_lm

ROWS = torch.randint(0, VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(1))
MASK = torch.rand(3, 12, generator=torch.Generator().manual_seed(2)) < 0.4
MASK[:, 0] = False
PACK = Sequences(list(ROWS.int().numpy()), masks=list(MASK.numpy().astype(np.uint8))).micro_batch(
    range(3), device=torch.device("cpu")
)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropy_are_those_of_the_plain_model(temperature: float) -> None:
    with torch.no_grad():
        outputs = Policy(random_lm(), value_head=False)(PACK, temperature=temperature)
        full = (random_lm()(ROWS).logits[:, :-1] / temperature).log_softmax(-1)
    expected = full.gather(-1, ROWS[:, 1:, None]).squeeze(-1)[MASK[:, 1:]]
    torch.testing.assert_close(outputs.logprobs, expected, atol=2e-6, rtol=0)
    torch.testing.assert_close(outputs.entropy, -(full.exp() * full).sum(-1)[MASK[:, 1:]], atol=1e-5, rtol=0)
    assert outputs.values is None


@pytest.mark.parametrize("cached", [1, 2**18])
def test_gradients_of_logprobs_and_entropy_are_those_of_autograd(monkeypatch: pytest.MonkeyPatch, cached: int) -> None:
    monkeypatch.setattr(policy_module, "LOGITS_IN_CACHE", cached)
    torch.manual_seed(0)
    given, tokens, gains = torch.randn(7, 50).double(), torch.randint(0, 50, (7,)), torch.randn(2, 7).double()
    logits = given.clone().requires_grad_()
    logprobs, entropy, energy = policy_module._OfLogits.apply(logits, tokens, 0.7)
    (gains[0] * logprobs + gains[1] * entropy).sum().backward()
    plain = given.clone().requires_grad_()
    logs = (plain / 0.7).log_softmax(-1)
    own = logs.gather(-1, tokens[:, None])[:, 0]
    (gains[0] * own - gains[1] * (logs.exp() * logs).sum(-1)).sum().backward()
    torch.testing.assert_close(logits.grad, plain.grad)
    torch.testing.assert_close(energy, (1.0 - 2.0 * own.exp() + logs.exp().square().sum(-1)).detach())


def test_fresh_value_head_predicts_zero_from_the_state_before_the_token() -> None:
    policy = Policy(random_lm(), value_head=True)
    assert policy(PACK, temperature=None).values.tolist() == [0.0] * int(MASK.sum())
    with torch.no_grad():
        policy.value_head.weight.normal_(generator=torch.Generator().manual_seed(0))
        values = policy(PACK, temperature=None).values
        hidden = random_lm().get_decoder()(input_ids=ROWS).last_hidden_state
        expected = policy.value_head(hidden).squeeze(-1)[:, :-1][MASK[:, 1:]]
    torch.testing.assert_close(values, expected, atol=1e-5, rtol=0)


def test_a_shared_head_reads_the_policys_states_and_a_critic_of_its_own_trains_them() -> None:
    """A value loss that moves the policy's states makes it forget what it had solved."""
    for temperature, moved in ((1.0, False), (None, True)):
        policy = Policy(random_lm(), value_head=True)
        with torch.no_grad():
            policy.value_head.weight.fill_(1.0)
        policy(PACK, temperature=temperature).values.sum().backward()
        assert policy.value_head.weight.grad.abs().sum() > 0.0
        assert any(parameter.grad is not None for parameter in policy.lm.parameters()) is moved


def test_critic_alone_computes_no_logprobs() -> None:
    outputs = Policy(random_lm(), value_head=True)(PACK, temperature=None)
    assert outputs.logprobs is None and outputs.entropy is None


@pytest.mark.parametrize("entropy", [True, False])
def test_logits_of_few_tokens_exist_at_once_and_the_numbers_stay(
    monkeypatch: pytest.MonkeyPatch, entropy: bool
) -> None:
    results = []
    for limit in (policy_module.LOGITS_AT_ONCE, 3 * VOCABULARY + 1):
        monkeypatch.setattr(policy_module, "LOGITS_AT_ONCE", limit)
        policy = Policy(random_lm(), value_head=True).double()  # in float32 the order of a sum shows, on some machines
        seen: list[int] = []
        policy.lm.get_output_embeddings().register_forward_hook(lambda *call, seen=seen: seen.append(call[2].shape[-2]))
        outputs = policy(PACK, temperature=0.7)
        (outputs.logprobs.sum() + (outputs.entropy.square().sum() if entropy else 0.0)).backward()
        gradients = [weight.grad for weight in policy.lm.parameters()]
        results.append((outputs, gradients, max(seen)))
    (whole, expected, _), (parts, found, largest) = results
    assert largest == 3
    torch.testing.assert_close(parts.logprobs, whole.logprobs, atol=1e-6, rtol=0)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
