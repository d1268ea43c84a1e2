"""Rules of learner/policy.py: the log-probabilities are the model's own."""

import pytest
import torch
from learner_parts import VOCABULARY, random_lm

from learner.policy import Policy

IDS = torch.randint(0, VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(1))
MASK = torch.rand(3, 12, generator=torch.Generator().manual_seed(2)) < 0.4
MASK[:, 0] = False


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropy_are_those_of_the_plain_model(temperature: float) -> None:
    lm = random_lm()
    with torch.no_grad():
        outputs = Policy(lm, value_head=False)(IDS, MASK, temperature=temperature, entropy=True)
        full = (lm(IDS).logits[:, :-1] / temperature).log_softmax(-1)
    expected = full.gather(-1, IDS[:, 1:, None]).squeeze(-1)[MASK[:, 1:]]
    torch.testing.assert_close(outputs.logprobs, expected, atol=2e-6, rtol=0)
    torch.testing.assert_close(outputs.entropy, -(full.exp() * full).sum(-1)[MASK[:, 1:]], atol=1e-5, rtol=0)
    assert outputs.values is None


def test_padding_on_the_right_changes_nothing() -> None:
    policy = Policy(random_lm(), value_head=False)
    row, mask = IDS[:1, :8], MASK[:1, :8]
    padded = torch.cat([row, torch.zeros(1, 4, dtype=torch.long)], dim=1)
    wide = torch.cat([mask, torch.zeros(1, 4, dtype=torch.bool)], dim=1)
    with torch.no_grad():
        alone = policy(row, mask, temperature=1.0).logprobs
        beside = policy(torch.cat([padded, IDS[1:2]]), torch.cat([wide, MASK[1:2]]), temperature=1.0).logprobs
    torch.testing.assert_close(beside[: len(alone)], alone, atol=2e-6, rtol=0)


def test_fresh_value_head_predicts_zero_from_the_state_before_the_token() -> None:
    policy = Policy(random_lm(), value_head=True)
    assert policy(IDS, MASK, temperature=None).values.tolist() == [0.0] * int(MASK.sum())
    with torch.no_grad():
        policy.value_head.weight.normal_(generator=torch.Generator().manual_seed(0))
        values = policy(IDS, MASK, temperature=None).values
        hidden = policy.lm.get_decoder()(input_ids=IDS).last_hidden_state
    expected = policy.value_head(hidden).squeeze(-1)[:, :-1][MASK[:, 1:]]
    torch.testing.assert_close(values, expected)


def test_critic_alone_computes_no_logprobs() -> None:
    outputs = Policy(random_lm(), value_head=True)(IDS, MASK, temperature=None)
    assert outputs.logprobs is None and outputs.entropy is None
