"""A process for the fault tests: plays and trains on the ledger named on its command line, and prints what was acknowledged.

    python tests/faults/ledger_program.py LEDGER SEED [POSITION]

A line on stdout is an acknowledgement: it is written after the ledger's future was done. POSITION (JSON): go back to this
checkpoint first. It is killed at any moment; it never ends by itself.
"""

from __future__ import annotations

import json
import random
import sys
import threading
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from buffers.errors import EpisodeClosed, LeaseError
from buffers.ledger.ledger import Ledger
from buffers.records import Episode, Position
from tests.support.buffer_parts import make_round, make_task
from tests.support.processes.child_process import end_with_thread

GROUP_SIZE = 3

_output = threading.Lock()


def tell(**what: Any) -> None:
    with _output:
        print(json.dumps(what), flush=True)


def play(ledger: Ledger, episode: Episode, *, chance: random.Random) -> None:
    """One or two rounds, then a score, sent twice at times; or a failure, and the next attempt."""
    ledger.put_round(make_round(episode.episode_id))
    if chance.random() < 0.5:
        ledger.put_round(make_round(episode.episode_id, index=1, parent=0, tail=(3,)))
    if chance.random() < 0.15:
        ledger.fail_episode(episode.episode_id, "lost", max_attempts=3).result()
        return
    value = chance.randrange(1000) / 8
    ledger.notify_score(episode.episode_id, value).result()
    tell(score=[episode.episode_id, value])
    if chance.random() < 0.2:
        assert ledger.notify_score(episode.episode_id, value).result() is False


def produce(ledger: Ledger, *, lane: int, seed: int) -> None:
    chance, number = random.Random(seed * 100 + lane), ledger.counts()["groups/open"] * 1000 + seed * 100_000
    while True:
        task = make_task(100_000_000 * lane + number)
        number += 1
        ledger.put_tasks([task])
        min_size = chance.choice((GROUP_SIZE, GROUP_SIZE - 1))
        ledger.open_group(task.task_id, instance=0, group_size=GROUP_SIZE, min_size=min_size).result()
        for episode in ledger.start_pending(limit=GROUP_SIZE, version=0).result():
            with suppress(EpisodeClosed):  # another lane's failure gave its group up
                play(ledger, episode, chance=chance)


def train(ledger: Ledger, *, seed: int) -> None:
    """Steps; now and then a learner that gives its batch back, and one that commits too late."""
    chance = random.Random(seed)
    released: list[int] = []
    step = ledger.position().result().step
    while True:
        batch = ledger.claim(chance.randint(1, 3), min_version=0).result()
        if batch is None:
            continue
        kind = chance.random()
        if kind < 0.15:
            ledger.release(batch.lease_id).exception()
            released.append(batch.lease_id)
        else:
            try:
                ledger.commit_step(batch.lease_id, step=step + 1, version=step + 1).result()
            except LeaseError:
                continue
            step += 1
            tell(step=step, lease=batch.lease_id, groups=len(batch.group_ids))
            tell(position=asdict(ledger.position().result()))
        if released and chance.random() < 0.5:
            refused = ledger.commit_step(released.pop(0), step=10_000_000 + step, version=1).exception()
            if not isinstance(refused, LeaseError):
                raise SystemExit("a lease could commit after it had been released")


def main() -> None:
    threading.excepthook = end_with_thread
    path, seed = Path(sys.argv[1]), int(sys.argv[2])
    ledger = Ledger(path)
    if len(sys.argv) > 3:
        ledger.restore(Position(**json.loads(sys.argv[3]))).result()
    tell(open=seed)
    lanes = [
        threading.Thread(target=produce, args=(ledger,), kwargs={"lane": lane, "seed": seed}, daemon=True)
        for lane in range(3)
    ]
    for thread in lanes:
        thread.start()
    train(ledger, seed=seed)


if __name__ == "__main__":
    main()
