"""A process for the kill test: writes episodes to the ledger named on its command line and prints each acknowledged score.

A line on stdout is an acknowledgement: it is written after the ledger's future was done.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from buffers.ledger.ledger import Ledger
from tests.support.buffer_parts import make_round, make_task
from tests.support.processes.child_process import end_with_thread


def play(ledger: Ledger, *, lane: int, output: threading.Lock) -> None:
    number = 0
    while True:
        task = make_task(1_000_000 * lane + number)
        ledger.put_tasks([task])
        for episode in ledger.open_group(task.task_id, instance=0, group_size=2).result():
            ledger.start_episode(episode.episode_id, version=0)
            ledger.put_round(make_round(episode.episode_id, sampled=[lane, number]))
            ledger.put_round(make_round(episode.episode_id, index=1, parent=0, sampled=[number]))
            ledger.notify_score(episode.episode_id, float(number)).result()
            with output:
                print(f"{episode.episode_id} {float(number)}", flush=True)
        number += 1


def train(ledger: Ledger) -> None:
    step = ledger.counts()["groups/trained"]
    while True:
        batch = ledger.claim(1, min_version=0).result()
        if batch is not None:
            step += 1
            ledger.commit_step(batch.lease_id, step=step, version=step).result()


def main() -> None:
    threading.excepthook = end_with_thread
    ledger = Ledger(Path(sys.argv[1]))
    output = threading.Lock()
    lanes = [
        threading.Thread(target=play, args=(ledger,), kwargs={"lane": lane, "output": output}) for lane in range(4)
    ]
    for thread in [*lanes, threading.Thread(target=train, args=(ledger,))]:
        thread.start()


if __name__ == "__main__":
    main()
