"""AdamW in one kernel, with its two moments on the card or in the host's memory.

Made by `learner.training.trainer` and `learner.training.warm_start`. Invariant: where the moments lie changes no bit of an
update. A parameter at a time: with the moments on the host, those of one are on the card at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from learner.model.fsdp import local, on_host

BETAS = (0.9, 0.95)
EPS = 1e-8
"""What is added to the size of a gradient that Adam divides by."""
MOMENTS = ("exp_avg", "exp_avg_sq")


def make_adamw(groups: list[dict[str, Any]], *, lr: float, moments_on_host: bool = False) -> torch.optim.AdamW:
    """AdamW without weight decay. `moments_on_host`: its moments are in the host's memory between updates."""
    kind = HostAdamW if moments_on_host else torch.optim.AdamW
    return kind(groups, lr=lr, betas=BETAS, eps=EPS, weight_decay=0.0, fused=True)


class HostAdamW(torch.optim.AdamW):  # type: ignore[misc]
    """AdamW whose moments go to the card for the update of their parameter, and back."""

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """One update. There is no closure."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group=group)

    def _update(self, parameter: Tensor, *, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            for name in MOMENTS:
                state[name] = on_host(torch.zeros_like(parameter))
        weight, gradient = local(parameter), local(parameter.grad)
        step, *moments = (local(state[name]).to(weight.device) for name in ("step", *MOMENTS))
        first, second = group["betas"]
        adamw(
            [weight], [gradient], [moments[0]], [moments[1]], [], [step], fused=True, amsgrad=False, beta1=first, beta2=second,
            lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        )  # fmt: skip
        for name, moved in zip(("step", *MOMENTS), (step, *moments), strict=True):
            if (kept := local(state[name])) is not moved:
                kept.copy_(moved)
