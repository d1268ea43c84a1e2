"""`BufferDataset` (RFC #1172): the prompts that wait, as a torch dataset whose items are batches.

The generation loop iterates it, directly or through a stock `DataLoader(dataset)` (default arguments: one item is one
batch). Invariant: an item holds at least one prompt and all that had piled up, up to `max_batch`. It generates nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch.utils.data
from torch.utils.data._utils.collate import default_collate_fn_map

from buffers.errors import UnderstudyError
from buffers.prompt_queue import Prompt, PromptQueue, QueueClosed, Response


class PromptBatch:
    """Prompts and, after `union`, their responses, as columns of equal length (verl's DataProto in small).

    Columns: request_id, episode_id, prompt_token_ids, sampling; after `union` also sampled_ids, logprobs, versions,
    finish_reason.
    """

    def __init__(self, prompts: Sequence[Prompt], *, responses: Sequence[Response] | None = None) -> None:
        self.prompts = list(prompts)
        self.responses = None if responses is None else list(responses)

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def columns(self) -> dict[str, list[Any]]:
        """Column name -> one value per prompt."""
        names = ("request_id", "episode_id", "prompt_token_ids", "sampling")
        columns = {name: [getattr(prompt, name) for prompt in self.prompts] for name in names}
        if self.responses is not None:
            for name in ("sampled_ids", "logprobs", "versions", "finish_reason"):
                columns[name] = [getattr(response, name) for response in self.responses]
        return columns

    def __getitem__(self, name: str) -> list[Any]:
        columns = self.columns
        if name not in columns:
            raise KeyError(f"column must be one of {sorted(columns)}, got {name!r}; responses come with union()")
        return columns[name]

    def union(self, responses: Sequence[Response]) -> Self:
        """Add the responses, in any order, in place. Raises ValueError unless there is exactly one for each prompt."""
        by_id = {response.request_id: response for response in responses}
        wanted = [prompt.request_id for prompt in self.prompts]
        if len(by_id) != len(responses) or set(by_id) != set(wanted):
            raise ValueError(
                f"responses must answer each of the {len(wanted)} prompts once, got {len(responses)} for "
                f"{len(by_id)} request ids (missing {sorted(set(wanted) - set(by_id))[:3]}, "
                f"unknown {sorted(set(by_id) - set(wanted))[:3]}); keep request_id as it came"
            )
        self.responses = [by_id[request_id] for request_id in wanted]
        return self


class BufferDataset(torch.utils.data.IterableDataset[PromptBatch]):  # type: ignore[misc]
    """See the module. Iteration ends when the queue is closed."""

    def __init__(self, buffer: PromptQueue, *, max_batch: int | None = None) -> None:
        self.buffer = buffer
        self._max_batch = max_batch

    def __iter__(self) -> Iterator[PromptBatch]:
        require_main_process("BufferDataset")
        while True:
            try:
                prompts = self.buffer.get_all(at_most=self._max_batch)
            except QueueClosed:
                return
            yield PromptBatch(prompts)


def require_main_process(name: str) -> None:
    """Raise in a DataLoader's worker process: what waits there is a copy that is never filled."""
    if torch.utils.data.get_worker_info() is not None:
        raise UnderstudyError(
            f"{name} must be read in the process that fills it; use DataLoader(dataset, num_workers=0)"
        )


def _concatenate(batches: Sequence[PromptBatch], *, collate_fn_map: object = None) -> PromptBatch:
    return PromptBatch([prompt for batch in batches for prompt in batch.prompts])


default_collate_fn_map[PromptBatch] = _concatenate
