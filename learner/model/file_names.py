"""The names and layout of weights in files and in the model: transformers knows both, and the way between them.

Made by `learner.model.load` for a model and its files, kept by the policy, used for all that is written (`learner.checkpoints`).
Most weights have one name or two; experts are one weight in the model and one for each expert in files. Invariant: what was read
from a folder is written under the names that the folder had.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)


class FileNames:
    """`lm`: a plain model, before it has an adapter; `names`: of its files, or none for one that was read nowhere."""

    def __init__(self, lm: Any, names: Iterable[str] = ()) -> None:
        self._lm = lm
        steps = get_model_conversion_mapping(lm)
        self._converters = [step for step in steps if isinstance(step, WeightConverter)]
        renamings = [step for step in steps if isinstance(step, WeightRenaming)]
        known = lm.state_dict()
        self._of_files: dict[str, list[tuple[str, str | None]]] = {}
        """Name in the model -> names in files, each with the pattern by which it is converted."""
        told: dict[str, Any] = {"base_model_prefix": lm.base_model_prefix, "meta_state_dict": known}
        for stored in sorted(names, key=dot_natural_key):
            name, pattern = rename_source_key(stored, renamings, self._converters, **told)
            if name not in known and stored in known:
                name, pattern = stored, None
            if name in known:
                self._of_files.setdefault(name, []).append((stored, pattern))
        # transformers' own way to remember it; without files nothing was used, and it takes what is usual for the architecture
        used = [step for step in steps if step.was_used()]
        lm._weight_conversions = used if self._of_files else None

    def plain(self, name: str) -> str | None:
        """The one name in the files of what is there as it is in the model; None: it has none, or is not."""
        found = self._of_files.get(name, [])
        return found[0][0] if len(found) == 1 and found[0][1] is None else None

    def converted(self) -> Iterator[tuple[str, list[str]]]:
        """Weights that files have in another layout: the first name in the model, and all names in files."""
        for name, found in self._of_files.items():
            if self.plain(name) is None:
                yield name, [stored for stored, _ in found]

    def convert(self, name: str, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the files have for one of `converted` -> weights of the model by name."""
        pattern = self._of_files[name][0][1]
        step = deepcopy(next(one for one in self._converters if pattern in one.source_patterns))
        for each, own in self._of_files[name]:
            step.add_tensor(name, each, own, stored[each])
        found = step.convert(name, model=self._lm, config=self._lm.config)
        return {one: value[0] if isinstance(value, list) else value for one, value in found.items()}

    def written(self, name: str, whole: Tensor) -> dict[str, Tensor]:
        """A weight of the model -> what files have of it, by name; whole, for a part has no name."""
        found: dict[str, Tensor] = revert_weight_conversion(self._lm, {name: whole})
        return found

    def plain_written(self, name: str, shape: list[int]) -> str | None:
        """The name in files of a weight that is written as it is; None: it is laid out otherwise."""
        weight = torch.empty(shape, device="meta")
        ((stored, value), *more) = self.written(name, weight).items()
        return stored if not more and value is weight else None
