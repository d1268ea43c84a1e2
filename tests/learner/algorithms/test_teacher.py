"""Rules of learner/algorithms/advantages.py: the gradient of what it adds is that of the reverse KL."""

import torch

from learner.algorithms.advantages import teacher_advantages


def test_expected_policy_gradient_is_that_of_the_reverse_kl() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(6, dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    (kl := (logprobs.exp() * (logprobs - teacher)).sum()).backward(retain_graph=True)
    wanted = logits.grad.clone()
    logits.grad = None
    told = teacher_advantages(logprobs.detach(), teacher=teacher, coef=1.0)
    (-(logprobs.exp().detach() * told * logprobs).sum()).backward()  # every token as often as the policy samples it
    torch.testing.assert_close(logits.grad, wanted)
    assert kl > 0


def test_a_token_that_the_teacher_never_says_counts_a_bounded_number() -> None:
    told = teacher_advantages(torch.tensor([-1.0, -1.0]), teacher=torch.tensor([-200.0, -0.5]), coef=0.5)
    assert told.tolist() == [-10.0, 0.25]
