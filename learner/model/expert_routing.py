"""The routers of a mixture of experts: they can be forced to choose experts, and how evenly they choose is measured.

Used by `learner.model.policy`, in any architecture of transformers: the class of its routers is the one whose logits transformers
records. Replay (arXiv:2510.11370): a router computes its logits and weights as ever, and takes them at the experts that the engine
used; gradients flow through the weights, as they do without it. Invariant: a layer that gradient checkpointing computes again
chooses what it chose at first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from buffers.records import UNKNOWN_EXPERT

SELECTIONS = frozenset({torch.topk, Tensor.topk, torch.max, Tensor.max})
"""How routers select: all experts at once, or one after another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """One pass of a model."""

    experts: Tensor | None
    """[places, layers, K] int; None: routers choose."""
    real: Tensor | None
    """[places] bool: false where a row is filled up; None: nowhere."""
    is_first: bool = True
    """Not a layer that is computed again."""


class Routing:
    """The routers of a model. `layers`: those of its decoder, in order."""

    def __init__(self, lm: Any, *, layers: Sequence[nn.Module]) -> None:
        self._name = type(lm).__name__
        self._replays = False
        """Passes choose recorded experts."""
        self._balances = False
        """`balance` is computed, of passes with gradients."""
        self.agreed = torch.zeros(2, dtype=torch.float64)
        """Places, of each layer with experts, whose router would have chosen what was recorded, and all with a record. The trainer
        sets it back."""
        self.num_layers = len(layers)
        self.routed: dict[int, nn.Module] = {}
        """The router of each layer that has experts, by the layer's number."""
        self._now: _Pass | None = None
        self._logits: list[tuple[Tensor, Tensor | None]] = []
        recorded = [getattr(part, "_can_record_outputs", None) or {} for part in lm.modules()]
        recorder = next((one["router_logits"] for one in recorded if "router_logits" in one), None)
        kind = getattr(recorder, "target_class", recorder)
        self._index = getattr(recorder, "index", 0)
        for number, layer in enumerate(layers):
            for router in [part for part in layer.modules() if kind is not None and isinstance(part, kind)]:
                (num_experts,) = {
                    len(weight) for weight in router.parameters() if weight.dim() == 2 and len(weight) > 1
                }
                router.forward = partial(self._route, router.forward, number, num_experts)
                self.routed[number] = router

    def use(self, *, replay: bool, balance: bool) -> None:
        """Raises ValueError for a model without experts."""
        if (replay or balance) and not self.routed:
            key, off = ("router_replay", "false") if replay else ("router_aux_coef", "0")
            raise ValueError(
                f"learner.{key} needs a mixture of experts whose routers transformers records, got {self._name}; set "
                f"learner.{key}={off}"
            )
        self._replays, self._balances = replay, balance

    @contextmanager
    def forcing(self, experts: Tensor | None, *, real: Tensor | None) -> Iterator[None]:
        """A pass over places that used these experts, [places, layers, K], where that is known."""
        if experts is not None and experts.shape[1] != self.num_layers:
            raise ValueError(
                f"learner.router_replay needs engines that count layers as the learner does, got {experts.shape[1]} and "
                f"{self.num_layers}; set learner.router_replay=false"
            )
        self._now = _Pass(experts=experts if self._replays else None, real=real)
        try:
            yield
        finally:
            self._now = None

    def again(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Contexts of a checkpointed layer: of its first time, and of its second, which chooses the same."""
        return nullcontext(), self._repeated(self._now)

    @contextmanager
    def _repeated(self, now: _Pass | None) -> Iterator[None]:
        before, self._now = self._now, None if now is None else replace(now, is_first=False)
        try:
            yield
        finally:
            self._now = before

    def balance(self, *, num_chosen: int) -> Tensor | None:
        """The load-balancing loss of the passes since the last call (arXiv:2101.03961, equations 4 to 6, over all layers, as
        transformers has it): the number of experts times the sum over experts of the share of places that choose one and its mean
        probability, multiplied."""
        if not self._logits:
            return None
        logits = [whole.flatten(0, -2) for whole, _ in self._logits]
        logits = [each if real is None else each[real] for each, (_, real) in zip(logits, self._logits)]
        probabilities = torch.cat(logits).float().softmax(-1)
        self._logits = []
        num_experts = probabilities.shape[-1]
        chosen = probabilities.topk(num_chosen, dim=-1).indices
        shares = nn.functional.one_hot(chosen, num_experts).float().sum(1).mean(0)
        return num_experts * (shares * probabilities.mean(0)).sum()

    def _route(self, forward: Callable[..., Any], number: int, num_experts: int, *given: Any, **options: Any) -> Any:
        now = self._now
        if now is None:
            return forward(*given, **options)
        if now.experts is None:
            answer = forward(*given, **options)
        else:
            forced = now.experts[:, number].long()
            with _Forced(forced, num_experts=num_experts) as choice:
                answer = forward(*given, **options)
            if now.is_first:
                known = forced[:, 0] != UNKNOWN_EXPERT
                agrees = (choice.own().sort(-1).values == forced.sort(-1).values).all(-1) & known
                self.agreed = self.agreed.to(known.device) + torch.stack([agrees.sum(), known.sum()])
        if self._balances and now.is_first and torch.is_grad_enabled():
            self._logits.append((answer[self._index], now.real))  # a layer saves as much when it is computed again
        return answer


class _Forced(TorchFunctionMode):  # type: ignore[misc]
    """Selections from all experts select the `forced`, [places, K]; one that selects fewer takes the next of them. Those from
    groups of experts select as ever."""

    def __init__(self, forced: Tensor, *, num_experts: int) -> None:
        super().__init__()
        self._forced = forced
        self._num_experts = num_experts
        self._own: list[Tensor] = []
        """What would have been selected."""

    def own(self) -> Tensor:
        """[places, K]. Raises ValueError where the router has not selected as many as are forced."""
        own = torch.cat(self._own, dim=-1) if self._own else self._forced[:, :0]
        if own.shape != self._forced.shape:
            raise ValueError(
                f"learner.router_replay needs engines that choose as many experts for a token as the model does, got "
                f"{self._forced.shape[-1]} and {own.shape[-1]}; set learner.router_replay=false"
            )
        return own

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        if (
            func not in SELECTIONS
            or not isinstance(answer, tuple)
            or args[0].shape != (len(self._forced), self._num_experts)
        ):
            return answer
        first = sum(each.shape[1] for each in self._own)
        own = answer[1]
        self._own.append(own)
        forced = self._forced[:, first : first + own.shape[1]]
        chosen = torch.where(forced == UNKNOWN_EXPERT, own, forced) if forced.shape == own.shape else own
        return args[0].gather(1, chosen), chosen
