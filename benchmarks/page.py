"""The page of a run with 10^5 episodes and 10^6 rounds, and with an episode of 10^5 tokens: what its readers wait for.

    python -m benchmarks.page --json PATH [--episodes N]

The ledger is written by its own schema, in bulk. Of the page's process, medians of requests: `start_ms` (its first answer),
`index_ms` (the first list of episodes, which reads the index), `server_filter_ms`, `server_open_episode_ms` (tree, conversation
and one window of tokens of the long episode), `server_mb`. Of a browser, where there is a Chromium, what
`benchmarks.page_browser` measures: `first_paint_ms`, `filter_ms`, `open_episode_ms`, `heap_mb`, `page_kb`; and
what open pages cost a run (`benchmarks.page_share`).
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import yaml
from playwright.sync_api import Browser

from benchmarks import page_browser
from benchmarks.harness import parser_of, play, taken_s
from benchmarks.page_share import share
from buffers.ledger.ledger import Ledger
from buffers.ledger.round_codec import RoundBody, encode
from configs.tiny_model import make_tiny_model

GROUP_SIZE, ROUNDS = 8, 10
LONG_TOKENS = 100_000
FILTERS = (
    {"state": "scored", "min_score": "0.5"},
    {"step": "100-200", "sort": "-tokens"},
    {"untrained": "1", "reason": "deadline"},
    {"q": "task-77", "max_tokens": "60"},
)
REPEATS = 5


def make_run(run: Path, *, episodes: int) -> Path:
    """A run's folder; its last episode is the long one."""
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(
        yaml.safe_dump({"run": {"name": "many", "steps": 1}, "buffer": {"max_policy_lag": 1}})
    )
    with (run / "metrics.jsonl").open("w") as sink:
        for step in range(1, episodes // (GROUP_SIZE * 8) + 1):
            sink.write(json.dumps({"step": step, **{f"figure/{n}": step / (n + 1) for n in range(60)}}) + "\n")
    make_tiny_model(run / "model")
    Ledger(run / "ledger.sqlite").close()
    db = sqlite3.connect(run / "ledger.sqlite", isolation_level=None)
    db.execute("PRAGMA synchronous = OFF")
    db.execute("BEGIN")
    fill(db, episodes=episodes)
    db.execute("COMMIT")
    db.close()
    return run


def fill(db: sqlite3.Connection, *, episodes: int) -> None:
    """Groups of `GROUP_SIZE`, eight of them in a step; every twentieth failed."""
    groups = episodes // GROUP_SIZE
    bodies = [_body(number, tail=40, sampled=5) for number in range(64)]
    db.executemany(
        "INSERT INTO task VALUES (?, ?)", ((f"task-{n}", '{"prompt": [], "agent_name": "walk"}') for n in range(groups))
    )
    steps = range(1, groups // 8 + 2)
    db.executemany("INSERT INTO lease VALUES (?, 'committed')", ((step,) for step in steps))
    db.executemany("INSERT INTO step VALUES (?, 0, ?, ?, ?, 8)", ((step, step, step, step) for step in steps))
    columns = "group_id, task_id, instance, size, min_size, num_scored, state, reason, lease_id, max_version"
    db.executemany(f"INSERT INTO grp({columns}) VALUES (?, ?, 0, 8, 8, ?, ?, ?, ?, 1)", _groups(groups))
    db.executemany("INSERT INTO trained VALUES (?, ?)", ((n // 8 + 1, n + 1) for n in range(groups) if n % 20))
    columns = "episode_id, group_id, sample_index, attempt, state, reason, score, version, max_version, num_rounds, num_tokens"
    db.executemany(f"INSERT INTO episode({columns}) VALUES (?, ?, ?, 0, ?, ?, ?, 0, 0, {ROUNDS}, ?)", _episodes(groups))
    columns = "episode_id, round_index, parent, num_sampled, finish_reason, body"
    insert = f"INSERT INTO round({columns}) VALUES (?, ?, ?, 5, 'stop', ?)"
    last = groups * GROUP_SIZE - 1
    for number in range(groups * GROUP_SIZE):
        name = _name(number)
        some = (
            [_body(index, tail=LONG_TOKENS // ROUNDS - 500, sampled=500) for index in range(ROUNDS)]
            if number == last
            else bodies
        )
        db.executemany(insert, ((name, k, k - 1 if k else None, some[k]) for k in range(ROUNDS)))


def _groups(groups: int) -> Iterator[tuple[Any, ...]]:
    for n in range(groups):
        is_lost = n % 20 == 0
        yield (
            n + 1, f"task-{n}", 0 if is_lost else GROUP_SIZE, "evicted" if is_lost else "trained",
            "failed: deadline" if is_lost else None, None if is_lost else n // 8 + 1,
        )  # fmt: skip


def _episodes(groups: int) -> Iterator[tuple[Any, ...]]:
    for number in range(groups * GROUP_SIZE):
        group, sample = divmod(number, GROUP_SIZE)
        is_lost = group % 20 == 0
        state, reason, score = ("failed", "deadline", None) if is_lost else ("scored", None, number % 5 / 4)
        yield _name(number), group + 1, sample, state, reason, score, 40 + number % 50


def _name(number: int) -> str:
    return f"{number // GROUP_SIZE + 1}-{number % GROUP_SIZE}-0"


def _body(seed: int, *, tail: int, sampled: int) -> bytes:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 250, tail + sampled).astype(np.int32)
    logprobs = -rng.random(sampled).astype(np.float32)
    return encode(
        RoundBody(tail_ids=ids[:tail], sampled_ids=ids[tail:], logprobs=logprobs, versions=np.zeros(sampled, np.int32))
    )


def of_page(run: Path, browser: Browser | None) -> dict[str, float]:
    """The figures of the page's process, and of a real browser where there is one."""
    began = time.monotonic()
    command = [sys.executable, "-m", "learner.page", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None, "it is a pipe"
            links = (word for line in server.stdout for word in line.split() if word.startswith("http"))
            link = next(links)
            root = link.partition("/open")[0]
            with httpx.Client(base_url=root, timeout=120) as client:
                client.get(link).raise_for_status()
                found = {"start_ms": 1000 * (time.monotonic() - began), **requests(client, pid=server.pid)}
                longest = client.get(f"/api/runs/{run.name}/episodes", params={"limit": "1"}).json()["episodes"][0]
            if browser is not None:
                place = {"root": root, "link": next(links), "run": run.name}
                found |= page_browser.measure(browser, **place, episode=longest["episode_id"])
            return found
        finally:
            server.terminate()


def requests(browser: httpx.Client, *, pid: int) -> dict[str, float]:
    """Times of what a page asks for, in milliseconds."""

    def get(path: str, **query: str) -> httpx.Response:
        return browser.get(f"/api/runs/many{path}", params=query).raise_for_status()

    index_ms = _ms(lambda: get("/episodes"))
    found = {
        "index_ms": index_ms,
        "run_ms": _ms(times=REPEATS, act=lambda: get("")),
        "metrics_ms": _ms(
            times=REPEATS, act=lambda: browser.get("/api/metrics", params={"runs": "many", "names": "figure/1"})
        ),
        "server_filter_ms": max(
            _ms(times=REPEATS, act=lambda query=query: get("/episodes", **query)) for query in FILTERS
        ),  # type: ignore[misc]
        "order_ms": _ms(times=REPEATS, act=lambda: get("/episodes/order")),
    }
    began = time.monotonic()
    while get("/episodes").json()["indexed"] < 1.0:
        time.sleep(0.1)
    name = get("/episodes", limit="1").json()["episodes"][0]["episode_id"]
    parts = (f"/episodes/{name}", f"/episodes/{name}/conversation", f"/episodes/{name}/tokens")
    opened = sum(_ms(lambda path=path: get(path)) for path in parts)  # type: ignore[misc]
    return {
        **found,
        "causes_s": time.monotonic() - began,
        "filter_cause_ms": _ms(times=REPEATS, act=lambda: get("/episodes", cause="any")),
        "server_open_episode_ms": opened,
        "window_ms": _ms(times=REPEATS, act=lambda: get(f"/episodes/{name}/tokens", start="50000")),
        "server_mb": psutil.Process(pid).memory_info().rss / 1e6,
    }


def _ms(act: Callable[[], object], *, times: int = 1) -> float:
    return 1000 * statistics.median(taken_s(act, times=times))


def measure(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, float]]:
    run = make_run(folder / "many", episodes=arguments.episodes)
    with page_browser.chromium() as browser:
        yield {"episodes": arguments.episodes, "rounds": ROUNDS * arguments.episodes, **of_page(run, browser)}
        if browser is not None:
            yield share(browser)


def main(words: list[str] | None = None) -> int:
    parser = parser_of("page", doc=__doc__)
    parser.add_argument("--episodes", type=int, default=100_000)
    return play("page", parser.parse_args(words), measure)


if __name__ == "__main__":
    sys.exit(main())
