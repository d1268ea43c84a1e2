"""The states behind the layers of a running model: which of them differ from the learner's is what names a wrong one.

Made in the engine's worker (`worker_extension`) when engine and learner disagree. Invariant: the model computes what it did.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

TAIL = 8
"""Last tokens of the prompt by which a pass that computes its end is known among others."""


class LayerStates:
    """Watches `model` from now on, for passes over the end of `prompt`."""

    def __init__(self, model: Any, *, prompt: list[int]) -> None:
        self._tail = prompt[-TAIL:]
        self._place: int | None = None
        """Place of the prompt's last token in the present pass; None: it has none."""
        lists = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
        layers: Any = max(lists, key=lambda part: sum(each.numel() for each in part.parameters()), default=[])
        self._states: dict[int, bytes] = {}
        self._hooks = [model.register_forward_pre_hook(self._begin, with_kwargs=True)]
        self._hooks += [layer.register_forward_hook(self._keeper(number)) for number, layer in enumerate(layers)]

    def _begin(self, model: Any, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        ids = options.get("input_ids", given[0] if given else None)
        ids = [] if ids is None else ids.flatten().tolist()
        width = len(self._tail)
        ends = (end for end in range(width, len(ids) + 1) if ids[end - width : end] == self._tail)
        self._place = next((end - 1 for end in ends), None)

    def _keeper(self, number: int) -> Any:
        def keep(layer: Any, given: Any, answer: Any) -> None:
            if self._place is None:
                return
            parts = [part for part in (answer if isinstance(answer, tuple) else (answer,)) if isinstance(part, Tensor)]
            # vLLM adds the residual in the next layer's norm.
            rows = [part.flatten(0, -2)[self._place].float() for part in parts if part.shape == parts[0].shape]
            self._states[number] = sum(rows[1:], rows[0]).cpu().numpy().tobytes()

        return keep

    def end(self) -> list[bytes]:
        """What was kept, of the last pass."""
        for hook in self._hooks:
            hook.remove()
        return [state for _, state in sorted(self._states.items())]
