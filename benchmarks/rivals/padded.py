"""The rival of packed rows: rows as they come, padded to the longest of their micro-batch.

Used by `benchmarks.learner`. Nothing of it is in the product.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def equal_piles(lengths: npt.NDArray[np.int64], *, rows: Sequence[int], token_budget: int) -> list[list[int]]:
    """Micro-batches of one size, in the rows' order: as many rows as fit the budget when all are as long as the longest."""
    size = max(1, token_budget // int(lengths[list(rows)].max()))
    return [list(rows[start : start + size]) for start in range(0, len(rows), size)]


def padding_share(lengths: npt.NDArray[np.int64], *, piles: Sequence[Sequence[int]]) -> float:
    """Share of the tokens computed that are padding."""
    computed = sum(len(pile) * int(lengths[list(pile)].max()) for pile in piles)
    return 1.0 - sum(int(lengths[list(pile)].sum()) for pile in piles) / computed
