"""The RFC's two datasets and the prompt queue: full batches, exact answers, no lost wake-ups."""

from __future__ import annotations

import asyncio
import queue
import threading
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from buffers.buffer_dataset import BufferDataset, PromptBatch
from buffers.errors import EpisodeClosed, EpisodeError, UnderstudyError
from buffers.ledger.ledger import Ledger
from buffers.multi_round import MultiRoundBufferDataset
from buffers.prompt_queue import Prompt, PromptQueue, QueueClosed, Response
from tests.support.buffer_parts import make_ready, make_round, open_running
from tests.support.patience import PATIENCE_S


class FakeReply:
    def __init__(self) -> None:
        self.response: Response | None = None
        self.error: Exception | None = None

    def finish(self, *responses: Response, last: Any = None) -> None:
        assert self.response is None and self.error is None and last is None
        (self.response,) = responses

    def fail(self, error: Exception) -> None:
        assert self.response is None and self.error is None
        self.error = error


def make_prompt(
    name: str, *, episode_id: str | None = None, ids: tuple[int, ...] = (1, 2), parent: int | None = None
) -> Prompt:
    return Prompt(
        request_id=name,
        episode_id=episode_id,
        prompt_token_ids=np.array(ids, dtype=np.int32),
        sampling={"n": name},
        reply=FakeReply(),
        parent=parent,
    )


def make_response(name: str, *, ids: tuple[int, ...] = (7, 8), version: int = 0, logprob: float = -0.5) -> Response:
    return Response(
        request_id=name,
        sampled_ids=np.array(ids, dtype=np.int32),
        logprobs=np.full(len(ids), logprob, dtype=np.float32),
        versions=np.full(len(ids), version, dtype=np.int32),
    )


def names(prompts: list[Prompt]) -> list[str]:
    return [prompt.request_id for prompt in prompts]


def in_thread(call: Any) -> tuple[threading.Thread, list[Any]]:
    """Start `call` in a thread; what it returned or raised is in the list after `join`."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(call())
        except UnderstudyError as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


def test_prompts_come_out_in_order_and_once() -> None:
    prompts = PromptQueue()
    for name in "abc":
        prompts.put(make_prompt(name))
    assert prompts.qsize() == 3
    assert prompts.get().request_id == "a"
    assert names(prompts.get_all(at_most=1)) == ["b"]
    assert names(prompts.get_all()) == ["c"]
    with pytest.raises(queue.Empty):
        prompts.get(timeout=0.01)


def test_a_full_prompt_queue_refuses_instead_of_blocking() -> None:
    prompts = PromptQueue(max_size=1)
    prompts.put(make_prompt("a"))
    with pytest.raises(queue.Full, match="at most 1 prompts"):
        prompts.put(make_prompt("b"))


async def test_prompts_pass_from_a_loop_to_a_blocking_thread() -> None:
    prompts = PromptQueue()
    thread, outcome = in_thread(lambda: [prompts.get(timeout=PATIENCE_S).request_id for _ in range(100)])
    for number in range(100):
        prompts.put(make_prompt(str(number)))
        await asyncio.sleep(0)
    await asyncio.to_thread(thread.join)
    assert outcome == [[str(number) for number in range(100)]]


async def test_prompts_pass_from_a_thread_to_a_loop_and_within_one_loop() -> None:
    prompts = PromptQueue()
    taken: list[str] = []

    async def consume(wanted: int) -> None:
        while len(taken) < wanted:
            taken.extend(names(await prompts.take(at_most=3)))

    thread, _ = in_thread(lambda: [prompts.put(make_prompt(str(number))) for number in range(100)])
    await asyncio.wait_for(consume(100), PATIENCE_S)
    thread.join()
    waiting = asyncio.create_task(consume(105))
    await asyncio.sleep(0)
    for number in range(100, 105):
        prompts.put(make_prompt(str(number)))
    await asyncio.wait_for(waiting, PATIENCE_S)
    assert taken == [str(number) for number in range(105)]


async def test_a_cancelled_taker_does_not_swallow_a_wake_up() -> None:
    prompts = PromptQueue()
    first, second = asyncio.create_task(prompts.take()), asyncio.create_task(prompts.take())
    await asyncio.sleep(0)
    prompts.put(make_prompt("a"))
    first.cancel()
    assert names(await asyncio.wait_for(second, PATIENCE_S)) == ["a"]
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_closing_the_prompt_queue_wakes_all_who_wait() -> None:
    prompts = PromptQueue()
    thread, outcome = in_thread(prompts.get)
    taking = asyncio.create_task(prompts.take())
    await asyncio.sleep(0)
    assert prompts.close() == []
    await asyncio.to_thread(thread.join)
    assert isinstance(outcome[0], QueueClosed)
    with pytest.raises(QueueClosed):
        await taking
    with pytest.raises(QueueClosed, match="prompt late"):
        prompts.put(make_prompt("late"))


def test_closing_the_prompt_queue_returns_what_nobody_took() -> None:
    prompts = PromptQueue()
    prompts.put(make_prompt("a"))
    assert names(prompts.close()) == ["a"]
    assert list(BufferDataset(prompts)) == []


def test_a_stock_dataloader_gives_all_prompts_that_piled_up() -> None:
    prompts = PromptQueue()
    batches = iter(DataLoader(BufferDataset(prompts, max_batch=2)))
    for name in "abc":
        prompts.put(make_prompt(name))
    first, second = next(batches), next(batches)
    assert isinstance(first, PromptBatch)
    assert first["request_id"] == ["a", "b"] and len(second) == 1
    assert first["sampling"] == [{"n": "a"}, {"n": "b"}] and first["prompt_token_ids"][0].tolist() == [1, 2]


def test_a_dataset_in_a_worker_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils.data.get_worker_info", lambda: "a worker")
    with Ledger(None) as ledger:
        for dataset in (BufferDataset(PromptQueue()), MultiRoundBufferDataset(ledger)):
            with pytest.raises(UnderstudyError, match=f"{type(dataset).__name__} must be read .* num_workers=0"):
                next(iter(dataset))


def test_a_union_pairs_responses_with_their_prompts_in_place() -> None:
    batch = PromptBatch([make_prompt("a"), make_prompt("b")])
    assert batch.union([make_response("b", ids=(9,)), make_response("a")]) is batch
    assert [ids.tolist() for ids in batch["sampled_ids"]] == [[7, 8], [9]]
    assert batch["finish_reason"] == ["stop", "stop"] and len(batch) == 2


@pytest.mark.parametrize("answered", [["a"], ["a", "b", "c"], ["a", "a"], ["a", "a", "b"], ["a", "c"]])
def test_a_union_that_does_not_answer_each_prompt_once_is_refused(answered: list[str]) -> None:
    batch = PromptBatch([make_prompt("a"), make_prompt("b")])
    with pytest.raises(ValueError, match="must answer each of the 2 prompts once"):
        batch.union([make_response(name) for name in answered])
    with pytest.raises(KeyError, match="sampled_ids"):
        batch["sampled_ids"]


def test_the_demo_of_rfc_1172_runs() -> None:
    prompt_queue = PromptQueue()
    train_dataset = MultiRoundBufferDataset()
    train_dataloader_iter = iter(DataLoader(train_dataset))
    prompt_dataloader_iter = iter(DataLoader(BufferDataset(buffer=prompt_queue)))
    first, plain = make_prompt("r1", episode_id="ep", ids=(1, 2)), make_prompt("r2")
    prompt_queue.put(first)
    prompt_queue.put(plain)
    batch = next(prompt_dataloader_iter)
    batch.union([make_response("r1", ids=(7, 8)), make_response("r2")])
    train_dataset.put_batch(batch)
    assert first.reply.response.sampled_ids.tolist() == [7, 8] and plain.reply.response.request_id == "r2"
    assert first.reply.response.round_index == 0 and plain.reply.response.round_index is None

    prompt_queue.put(make_prompt("r3", episode_id="ep", ids=(1, 2, 7, 8, 3), parent=0))
    train_dataset.put_batch(next(prompt_dataloader_iter).union([make_response("r3", ids=(9,), version=1)]))
    assert train_dataset.buffer.qsize() == 0
    assert train_dataset.notify_score("ep", 0.5) is True
    assert train_dataset.buffer.qsize() == 1

    train_batch = next(train_dataloader_iter)
    (row,) = train_batch.rows
    assert row.ids.tolist() == [1, 2, 7, 8, 3, 9] and row.mask.tolist() == [0, 0, 1, 1, 0, 1]
    assert row.versions.tolist() == [-1, -1, 0, 0, -1, 1] and train_batch.scores.tolist() == [0.5]
    assert train_dataset.ledger.commit_step(train_batch.lease_id, step=1, version=1).result() == 1
    assert train_dataset.buffer.qsize() == 0
    train_dataset.close()
    train_dataset.ledger.close()


def test_rounds_of_a_pool_episode_go_to_its_own_group_even_after_its_tree_was_forgotten() -> None:
    with Ledger(None) as ledger:
        (episode,) = open_running(ledger, task=0)
        for name, ids, parent in (("a", (1, 2), None), ("b", (1, 2, 7, 8, 3), 0)):
            dataset = MultiRoundBufferDataset(ledger)  # a new one: its memory of the episode is empty
            batch = PromptBatch([make_prompt(name, episode_id=episode.episode_id, ids=ids, parent=parent)])
            dataset.put_batch(batch.union([make_response(name)]))
        assert [(r.round_index, r.parent) for r in ledger.rounds(episode.episode_id).result()] == [(0, None), (1, 0)]
        assert ledger.counts()["groups/open"] == 1


def test_a_request_of_an_ended_episode_fails_alone() -> None:
    with Ledger(None) as ledger:
        dataset = MultiRoundBufferDataset(ledger)
        ended, running = open_running(ledger, task=0, group_size=2)
        ledger.put_round(make_round(ended.episode_id))
        ledger.notify_score(ended.episode_id, 1.0)
        late, bad, good = (make_prompt(n, episode_id=e.episode_id) for n, e in zip("abc", (ended, running, running)))
        batch = PromptBatch([late, bad, good])
        dataset.put_batch(
            batch.union([make_response("a"), make_response("b", ids=(9, 9), logprob=np.nan), make_response("c")])
        )
        assert isinstance(late.reply.error, EpisodeClosed) and late.reply.response is None
        assert isinstance(bad.reply.error, EpisodeError) and "finite" in str(bad.reply.error)
        assert good.reply.response is not None and good.reply.error is None
        for name, ids, parent in (("d", (1, 2, 9, 9), None), ("e", (1, 2, 7, 8), 1)):
            batch = PromptBatch([make_prompt(name, episode_id=running.episode_id, ids=ids, parent=parent)])
            dataset.put_batch(batch.union([make_response(name)]))
        stored = ledger.rounds(running.episode_id).result()
        assert [(round_.round_index, round_.parent) for round_ in stored] == [(1, None), (2, None), (3, 1)]


@pytest.mark.parametrize("parent", [0, 1, 2], ids=["refused by the ledger", "other ids", "not there"])
def test_a_prompt_with_a_wrong_parent_fails_alone(parent: int) -> None:
    with Ledger(None) as ledger:
        dataset = MultiRoundBufferDataset(ledger)
        (episode,) = open_running(ledger, task=0)
        begun = PromptBatch(
            [make_prompt("a", episode_id=episode.episode_id), make_prompt("b", episode_id=episode.episode_id)]
        )
        dataset.put_batch(begun.union([make_response("a", logprob=np.nan), make_response("b")]))
        wrong = make_prompt("c", episode_id=episode.episode_id, ids=(1, 2, 7, 9), parent=parent)
        good = make_prompt("d", episode_id=episode.episode_id, ids=(1, 2, 7, 8, 9), parent=1)
        batch = PromptBatch([wrong, good]).union([make_response("c"), make_response("d")])
        with pytest.raises(UnderstudyError, match=f"must start with the ids of .* those of round {parent}"):
            dataset.put_batch(batch)
        assert wrong.reply.response is None and "give parent=None" in str(wrong.reply.error)
        assert good.reply.response.round_index == 2
        assert [(r.round_index, r.parent) for r in ledger.rounds(episode.episode_id).result()] == [(1, None), (2, 1)]


def test_a_batch_without_responses_is_refused() -> None:
    with Ledger(None) as ledger, pytest.raises(UnderstudyError, match=r"call batch.union\(responses\)"):
        MultiRoundBufferDataset(ledger).put_batch(PromptBatch([make_prompt("a")]))


def test_batch_size_holds_whole_groups() -> None:
    with Ledger(None) as ledger:
        with pytest.raises(UnderstudyError, match="batch_size must be a multiple of group_size=4, got 6"):
            MultiRoundBufferDataset(ledger, batch_size=6, group_size=4)
        for task in range(3):
            make_ready(ledger, task=task, group_size=2)
        dataset = MultiRoundBufferDataset(ledger, batch_size=4, group_size=2)
        assert dataset.buffer.qsize() == 6
        batch = next(iter(dataset))
        assert batch.group_ids == (1, 2) and len(batch) == 4
        assert next(iter(MultiRoundBufferDataset(ledger))).group_ids == (3,)


def test_without_a_batch_size_an_item_is_all_that_is_ready() -> None:
    with Ledger(None) as ledger:
        for task in range(3):
            make_ready(ledger, task=task)
        assert next(iter(DataLoader(MultiRoundBufferDataset(ledger)))).group_ids == (1, 2, 3)


def test_a_waiting_iterator_is_woken_by_the_score_that_fills_its_batch() -> None:
    with Ledger(None) as ledger:
        dataset = MultiRoundBufferDataset(ledger, batch_size=2)
        thread, outcome = in_thread(lambda: [batch.group_ids for batch in dataset])
        make_ready(ledger, task=0)
        make_ready(ledger, task=1)
        filled = threading.Event()
        unwatch = ledger.watch(lambda news: filled.set() if news.counts["groups/leased"] == 2 else None)
        if ledger.counts()["groups/leased"] < 2:
            assert filled.wait(PATIENCE_S)
        unwatch()
        dataset.close()
        thread.join()
        assert outcome == [[(1, 2)]]


def test_closing_ends_a_waiting_iterator() -> None:
    with Ledger(None) as ledger:
        dataset = MultiRoundBufferDataset(ledger)
        thread, outcome = in_thread(lambda: list(dataset))
        dataset.close()
        thread.join()
        assert outcome == [[]]


async def test_sample_waits_for_a_full_batch_of_fresh_groups() -> None:
    with Ledger(None) as ledger:
        dataset = MultiRoundBufferDataset(ledger)
        make_ready(ledger, task=0, version=0)
        sampling = asyncio.create_task(dataset.sample(2, min_version=1))
        for task in (1, 2):
            await asyncio.sleep(0)
            assert not sampling.done()
            await asyncio.to_thread(make_ready, ledger, task=task, version=1)
        batch = await asyncio.wait_for(sampling, PATIENCE_S)
        assert batch.group_ids == (2, 3) and ledger.counts()["evicted/stale"] == 1


async def test_a_cancelled_sample_keeps_no_batch() -> None:
    with Ledger(None) as ledger:
        dataset = MultiRoundBufferDataset(ledger)
        for number in range(20):
            make_ready(ledger, task=number)
            sampling = asyncio.create_task(dataset.sample(1, min_version=0))
            for _ in range(number % 4):
                await asyncio.sleep(0)
            sampling.cancel()
            await asyncio.wait([sampling])
            if not sampling.cancelled():
                ledger.release(sampling.result().lease_id)
        for _ in range(2):  # after the claims are done, then after the releases that they caused
            await asyncio.wrap_future(ledger.put_tasks([]))
        assert ledger.counts()["groups/leased"] == 0 and ledger.counts()["groups/ready"] == 20


async def test_a_batch_that_waited_for_long_is_smaller() -> None:
    """And one that is full at once does not wait; one of nothing waits for the first."""
    with Ledger(None) as ledger:
        dataset = MultiRoundBufferDataset(ledger)
        for task in range(3):
            make_ready(ledger, task=task)
        assert len((await dataset.sample(2, min_version=0, patience_s=3600.0)).group_ids) == 2
        assert len((await dataset.sample(2, min_version=0, patience_s=0.01)).group_ids) == 1
        waiting = asyncio.create_task(dataset.sample(2, min_version=0, patience_s=0.01))
        await asyncio.sleep(0.05)
        make_ready(ledger, task=3)
        assert len((await asyncio.wait_for(waiting, PATIENCE_S)).group_ids) == 1
