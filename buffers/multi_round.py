"""`MultiRoundBufferDataset` (RFC #1172): scored episodes that are ready to train, as a torch dataset over the ledger.

The generation loop puts batches, environments notify scores, the learner iterates it (directly, through a stock
`DataLoader(dataset)`, or by `await sample(...)`). Invariants: an item is a full batch under one lease; a reply reaches its agent
only once its round is stored; there is no polling. The learner ends a lease by `ledger.commit_step` or `ledger.release`.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace

import torch.utils.data
from torch.utils.data._utils.collate import default_collate_fn_map

from buffers.buffer_dataset import PromptBatch, require_main_process
from buffers.errors import EpisodeError, UnderstudyError
from buffers.ledger.ledger import Ledger, LedgerEvent
from buffers.prompt_queue import Prompt, Response
from buffers.records import Replay, ScoreDetail, TrainBatch
from buffers.training_rows import TokenTree

_MAX_TREES = 4096
"""Token trees kept in memory; others are rebuilt from the ledger at the next round of their episode."""


class ReadyEpisodes:
    """The RFC's `train_dataset.buffer`."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def qsize(self) -> int:
        """Scored episodes of complete groups that wait to be trained."""
        return self._ledger.counts()["scored/ready"]


class MultiRoundBufferDataset(torch.utils.data.IterableDataset[TrainBatch]):  # type: ignore[misc]
    """See the module."""

    def __init__(
        self,
        ledger: Ledger | None = None,
        *,
        batch_size: int | None = None,
        group_size: int = 1,
        max_attempts: int = 1,
    ) -> None:
        """`batch_size`: episodes of one item, in whole groups of `group_size`; None: all that is ready, at least one.
        `max_attempts`: how often an episode is tried that is scored before any model call."""
        if batch_size is not None and (batch_size < 1 or batch_size % group_size):
            raise UnderstudyError(
                f"batch_size must be a multiple of group_size={group_size}, got {batch_size}; batches hold whole groups"
            )
        self.ledger = Ledger(None) if ledger is None else ledger
        self.buffer = ReadyEpisodes(self.ledger)
        self._max_attempts = max_attempts
        self._num_groups = None if batch_size is None else batch_size // group_size
        self._trees: OrderedDict[str, TokenTree] = OrderedDict()
        self._trees_lock = threading.Lock()
        self._waiting: list[threading.Event] = []
        self._closed = False

    def notify_score(self, episode_id: str, score: float, *, detail: ScoreDetail | None = None) -> bool:
        """Store a score; blocks until it is on disk. Returns and raises as `Ledger.notify_score`."""
        future = self.ledger.notify_score(
            episode_id, score, max_attempts=self._max_attempts, detail=detail or ScoreDetail()
        )
        stored = future.result()
        if detail is None:
            self._drop_tree(episode_id)
        return stored

    def put_batch(self, batch: PromptBatch) -> None:
        """Store the rounds of a batch with responses, then answer the waiting agents; blocks until both are done.

        Episodes that no task pool opened are opened here, in a group of their own. An episode that can take no more
        fails its own request only.
        """
        if batch.responses is None:
            raise UnderstudyError(
                "put_batch needs a batch with responses, got prompts only; call batch.union(responses)"
            )
        pairs = zip(batch.prompts, batch.responses, strict=True)
        with self._trees_lock:
            self._load_trees({prompt.episode_id for prompt in batch.prompts if prompt.episode_id is not None})
            submitted = [(prompt, *self._submit(prompt, response=response)) for prompt, response in pairs]
        broken = None
        for prompt, response, stored in submitted:
            try:
                if stored is not None:
                    stored.result()
            except UnderstudyError as error:
                # What is in the tree but not in the ledger must not become a parent: rebuild it next time.
                self._drop_tree(prompt.episode_id)
                prompt.reply.fail(error)
                broken = broken or (None if isinstance(error, EpisodeError) else error)
            else:
                prompt.reply.finish(response)
        if broken is not None:
            raise broken

    def __iter__(self) -> Iterator[TrainBatch]:
        require_main_process("MultiRoundBufferDataset")
        woken = threading.Event()
        self._waiting.append(woken)
        unwatch = self.ledger.watch(lambda _: woken.set())
        try:
            while not self._closed:
                woken.clear()  # before looking: a score that arrives during the look wakes the next wait
                num_groups = self._num_groups or max(1, self.ledger.counts()["groups/ready"])
                batch = self.ledger.claim(num_groups, min_version=0).result()
                if batch is not None:
                    yield batch
                elif not self._closed:
                    woken.wait()
        finally:
            unwatch()
            self._waiting.remove(woken)

    async def sample(
        self, num_groups: int, *, min_version: int, replay: Replay | None = None, patience_s: float | None = None
    ) -> TrainBatch:
        """Wait for a full batch of `num_groups` groups, a fresh one with a token of `min_version` or later. See `Ledger.claim`.
        `patience_s`: after so many seconds a smaller one is taken, of at least one group. None: never."""
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()

        def wake(_: LedgerEvent) -> None:
            with suppress(RuntimeError):  # the loop has ended, and this wait with it
                loop.call_soon_threadsafe(woken.set)

        unwatch = self.ledger.watch(wake)
        patience = None if patience_s is None else loop.call_later(patience_s, woken.set)
        try:
            while True:
                woken.clear()
                fewest = 1 if patience is not None and loop.time() >= patience.when() else None
                future = self.ledger.claim(num_groups, min_version=min_version, replay=replay, fewest=fewest)
                if (batch := await self._claimed(future)) is not None:
                    return batch
                await woken.wait()
        finally:
            unwatch()
            if patience is not None:
                patience.cancel()

    def close(self) -> None:
        """End the iteration. The ledger stays open: it belongs to the caller."""
        self._closed = True
        for woken in list(self._waiting):
            woken.set()

    async def _claimed(self, future: Future[TrainBatch | None]) -> TrainBatch | None:
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(self._give_back)
            raise

    def _give_back(self, future: Future[TrainBatch | None]) -> None:
        """A batch that was claimed while its learner was cancelled is ready again."""
        if not future.cancelled() and future.exception() is None and (batch := future.result()) is not None:
            with suppress(UnderstudyError):  # closed meanwhile: the next opening of the ledger returns it
                self.ledger.release(batch.lease_id)

    def _submit(self, prompt: Prompt, *, response: Response) -> tuple[Response, Future[None] | None]:
        """Hand the round to the ledger: the response with the round's index, and when it is stored or refused."""
        if prompt.episode_id is None:
            return response, None
        try:
            round_ = self._trees[prompt.episode_id].add(
                response,
                prompt_ids=prompt.prompt_token_ids,
                parent=prompt.parent,
                memo=prompt.memo,
                trained=prompt.trained(len(response.sampled_ids)),
                role=prompt.role,
            )
            return replace(response, round_index=round_.round_index), self.ledger.put_round(round_)
        except UnderstudyError as error:
            refused: Future[None] = Future()
            refused.set_exception(error)
            return response, refused

    def _load_trees(self, episode_ids: set[str]) -> None:
        """Have a tree for each episode, from memory or from the ledger; unknown episodes are opened."""
        missing = sorted(episode_ids - self._trees.keys())
        opened = [self.ledger.adopt_episode(episode_id) for episode_id in missing]
        rounds = [self.ledger.rounds(episode_id) for episode_id in missing]
        for episode_id, is_new, stored in zip(missing, opened, rounds, strict=True):
            is_new.result()
            self._trees[episode_id] = TokenTree(episode_id, rounds=stored.result())
        for episode_id in episode_ids:
            self._trees.move_to_end(episode_id)
        while len(self._trees) > max(_MAX_TREES, len(episode_ids)):
            self._trees.popitem(last=False)

    def _drop_tree(self, episode_id: str | None) -> None:
        with self._trees_lock:
            self._trees.pop(episode_id or "", None)


def _only(batches: Sequence[TrainBatch], *, collate_fn_map: object = None) -> TrainBatch:
    if len(batches) != 1:
        raise UnderstudyError(
            f"a DataLoader over train batches must have batch_size=1, got {len(batches)}; they are full"
        )
    return batches[0]


default_collate_fn_map[TrainBatch] = _only
