"""What the server costs: MockedServer beside vLLM's own server, with the same engine settings and with an engine that does
nothing.

`python -m benchmarks.gateway [--quick] [--json PATH]`. Servers and agents run in processes of their own; both servers stay up
and are asked in turn, every figure is the median over the repeats. Parts:

- throughput: rounds per second and latency at 1 to 256 agents, conversations from 1k tokens on, tiny model on the real engine;
- cached: the share of a round's prompt that the engine takes from its prefix cache, at a 4k-token context;
- round_4k: processor time and memory kept for each round at a 4k-token context, the engine doing nothing (conversations of 4
  rounds, 256 tokens sampled in each; the first round tokenises the whole prompt); memory is what stays while episodes are open;
- episode_32k: the same over conversations of 50 rounds that grow to 32k tokens;
- streams: 1,000 answers open at once;
- long_prompt: the longest gap in one stream while another connection sends a prompt of 128k tokens, and without that.

It judges nothing. Invariant: both servers get the same requests in the same order.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gateway_load import Plan
from benchmarks.gateway_server import Settings
from benchmarks.harness import ROOT, free_port, medians, parser_of, play
from configs.tiny_model import make_tiny_model

KINDS = ("vllm", "understudy")
ROUNDS_AT = {1: 24, 16: 8, 64: 4, 256: 2}
"""Rounds of each conversation, by the number of agents."""
WORDS = (
    "the lamp is in the left room and the key lies under the table; go there, take it, come back and say what you saw. "
)
LATER = "Go on, and say what you see now."
LONG_PROMPT_TOKENS = 128_000


class Server:
    """A server process. `load` runs agents against it."""

    def __init__(self, kind: str, settings: Settings, *, log: Path) -> None:
        self.kind = kind
        self._log = log.open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gateway_server", kind, json.dumps(asdict(settings))],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )
        self.pid = self._process.pid
        self._path = log
        self._keys: list[str] = []
        self._used = 0

    def ready(self) -> None:
        """Wait until it answers. Raises RuntimeError with the end of its log."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(b'{"base_url"'):
                announced = json.loads(line)
                self.base_url, self._keys = announced["base_url"], announced["keys"]
                self._urls = announced.get("urls", {})
                return
        raise RuntimeError(f"the {self.kind} server did not start; its log ends:\n{self._path.read_text()[-3000:]}")

    def plan(self, *, agents: int, **plan: Any) -> Plan:
        """A plan with keys that were not used before."""
        num_keys = agents * plan.pop("conversations", 1)
        self._used += num_keys
        keys = self._keys[self._used - num_keys : self._used]
        urls = {key: self._urls[key] for key in keys if key in self._urls}
        return Plan(base_url=self.base_url, keys=keys, agents=agents, urls=urls, **plan)

    def load(self, plan: Plan) -> dict[str, Any]:
        """Run the agents; adds `cpu_ms_per_round`, the server's own processor time. Raises RuntimeError when requests failed."""
        before = self.cpu_s()
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.gateway_load"],
            cwd=ROOT,
            input=json.dumps(asdict(plan)).encode(),
            capture_output=True,
        )
        if done.returncode != 0:
            raise RuntimeError(f"the agents failed: {done.stderr.decode()[-2000:]}")
        figures: dict[str, Any] = json.loads(done.stdout)
        if figures["errors"]:
            raise RuntimeError(f"the {self.kind} server refused requests: {figures['errors']}")
        if "rounds" in figures:
            figures["cpu_ms_per_round"] = 1000 * (self.cpu_s() - before) / figures["rounds"]
        return figures

    def cpu_s(self) -> float:
        """Processor time of the server's process so far; its engine is another process."""
        return time.clock_gettime(~self._process.pid << 3 | 2)  # Linux's clock of that process: /proc counts in 10 ms

    def memory_kb(self) -> int:
        """Private memory of the server's process, in kB."""
        lines = Path(f"/proc/{self._process.pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Dirty", "Swap:")))

    def close(self) -> None:
        """End the process and its engine."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()


@contextmanager
def servers(settings: Settings, *, folder: Path, kinds: Sequence[str] = KINDS) -> Iterator[list[Server]]:
    """One of each kind, started together."""
    started = []
    try:
        for kind in kinds:
            name = f"{kind}-{len(list(folder.iterdir()))}"
            own = replace(settings, port=free_port(), ledger=str(folder / f"{name}.sqlite"))
            started.append(Server(kind, own, log=folder / f"{name}.log"))
        for server in started:
            server.ready()
        yield started
    finally:
        for server in started:
            server.close()


class Words:
    """Texts of a given length in tokens of the model."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
        self._chars_per_token = len(WORDS * 20) / len(tokenizer.encode(WORDS * 20))

    def __call__(self, tokens: int) -> str:
        chars = int(tokens * self._chars_per_token)
        return (WORDS * (chars // len(WORDS) + 1))[:chars]


def throughput(settings: Settings, words: Words, *, folder: Path, quick: bool, repeats: int) -> dict[str, Any]:
    """Measures both servers on the real engine, in turn."""
    counts = [16, 64] if quick else list(ROUNDS_AT)
    episodes = 16 + repeats * sum(counts)
    seen: dict[int, dict[str, list[dict[str, Any]]]] = {count: {kind: [] for kind in KINDS} for count in counts}
    with servers(replace(settings, engine=True, episodes=episodes, max_tokens=64), folder=folder) as pair:
        for server in pair:  # the first requests of an engine are slow
            server.load(server.plan(agents=16, rounds=2, first=words(1000), later=words(64), max_tokens=64))
        for repeat in range(repeats):
            for count in counts:
                plan = {"agents": count, "rounds": ROUNDS_AT[count], "max_tokens": 64}
                for server in pair[:: 1 if repeat % 2 else -1]:
                    first = f"try {repeat} of {count}: {words(1000)}"
                    seen[count][server.kind].append(server.load(server.plan(first=first, later=words(64), **plan)))
    return {str(count): _compared(of) for count, of in seen.items()}


def _compared(seen: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    names = ("rounds_per_s", "p50_ms", "p99_ms", "cpu_ms_per_round")
    middle = {kind: medians(runs, *names) for kind, runs in seen.items()}
    ours, theirs = middle["understudy"], middle["vllm"]
    pairs = zip(seen["understudy"], seen["vllm"], strict=True)
    ratios = [mine["rounds_per_s"] / other["rounds_per_s"] for mine, other in pairs]
    return {
        **middle,
        "ratio": median(ratios),  # of neighbours in time: the machine's moods cancel out
        "ratios": ratios,
        "p50_added_ms": ours["p50_ms"] - theirs["p50_ms"],
        "p99_added_ms": ours["p99_ms"] - theirs["p99_ms"],
    }


def cached(settings: Settings, words: Words, *, folder: Path) -> dict[str, Any]:
    """Prefix-cache shares of both servers, round by round."""
    own = replace(settings, engine=True, episodes=8, max_tokens=64)
    with servers(own, folder=folder) as pair:
        plan = {"agents": 8, "rounds": 4, "first": words(4000), "later": words(32), "max_tokens": 64}
        return {server.kind: server.load(server.plan(**plan))["cached_share"] for server in pair}


def rounds_of(settings: Settings, *, folder: Path, repeats: int, plan: dict[str, Any]) -> dict[str, Any]:
    """Processor time and memory of a round on both servers, their engine doing nothing."""
    keys = plan["agents"] * plan.get("conversations", 1)
    own = replace(settings, engine=False, episodes=keys * (repeats + 1))
    results = {}
    with servers(own, folder=folder) as pair:
        for server in pair:
            server.load(server.plan(**plan))  # fills caches and pools
            memory, runs = server.memory_kb(), []
            for _ in range(repeats):
                runs.append(server.load(server.plan(**plan)))
            time.sleep(1.0)
            results[server.kind] = {
                **medians(runs, "cpu_ms_per_round", "p50_ms", "rounds_per_s"),
                "kept_kb_per_round": (server.memory_kb() - memory) / sum(run["rounds"] for run in runs),
                "prompt_tokens_of_the_last_round": runs[-1]["prompt_tokens"][-1],
            }
    results["added_cpu_ms_per_round"] = results["understudy"]["cpu_ms_per_round"] - results["vllm"]["cpu_ms_per_round"]
    return results


def streams(settings: Settings, *, folder: Path, count: int) -> dict[str, Any]:
    """`count` streams open at once."""
    own = replace(settings, engine=False, episodes=count, token_ms=4000.0)
    with servers(own, folder=folder, kinds=("understudy",)) as (server,):
        plan = server.plan(agents=count, rounds=1, first="go", later="", max_tokens=5, stream=True)
        figures = server.load(plan)
    figures["open_at_once"] = figures["first_part_max_s"] is not None and figures["first_part_max_s"] < 5 * 4.0
    return figures


def long_prompt(settings: Settings, words: Words, *, folder: Path, repeats: int) -> dict[str, Any]:
    """One stream of a token every 10 ms, alone and while another client sends 128k tokens."""
    own = replace(settings, engine=False, token_ms=10.0, max_model_len=2 * LONG_PROMPT_TOKENS)
    own = replace(own, episodes=4 * repeats + 2, max_tokens=400)
    alone, beside, tokens = [], [], 0
    with servers(own, folder=folder, kinds=("understudy",)) as (server,):
        stream = {"agents": 1, "rounds": 1, "first": "go", "later": "", "max_tokens": 400, "stream": True}
        server.load(server.plan(**{**stream, "max_tokens": 4}))
        for _ in range(repeats):
            alone.append(server.load(server.plan(**stream))["longest_gap_s"])
            big = server.plan(agents=1, rounds=1, first=words(LONG_PROMPT_TOKENS), later="", max_tokens=1)
            sent: dict[str, Any] = {}
            thread = threading.Thread(target=_send_later, args=(server, big, sent))
            thread.start()
            beside.append(server.load(server.plan(**stream))["longest_gap_s"])
            thread.join()
            tokens = sent["prompt_tokens"][0]
    return {
        "prompt_tokens": tokens,
        "gap_alone_ms": 1000 * median(alone),
        "gap_beside_ms": 1000 * median(beside),
        "delay_ms": 1000 * (median(beside) - median(alone)),
    }


def _send_later(server: Server, plan: Plan, sent: dict[str, Any]) -> None:
    time.sleep(0.5)  # both agents take about as long to start; the stream lasts 4 s
    sent.update(server.load(plan))


def measure(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """All parts."""
    quick, repeats = arguments.quick, 1 if arguments.quick else arguments.repeats
    model = make_tiny_model(folder / "models" / "tiny", positions=2 * LONG_PROMPT_TOKENS)
    (logs := folder / "servers").mkdir()
    words, base = Words(model), Settings(model=str(model))
    parts: dict[str, Any] = {}

    def told(name: str, part: dict[str, Any]) -> dict[str, Any]:
        print(f"{name}: {json.dumps(part)}", flush=True)
        parts[name] = part
        return part

    plan: dict[str, Any] = {"agents": 16, "conversations": 4 if quick else 10, "rounds": 4, "max_tokens": 256}
    plan |= {"first": words(3500), "later": words(32)}
    at_4k = told("round_4k", rounds_of(base, folder=logs, repeats=repeats, plan=plan))
    yield {
        "cpu_ms_per_round_4k": at_4k["understudy"]["cpu_ms_per_round"],
        "cpu_ms_per_round_4k_of_vllm": at_4k["vllm"]["cpu_ms_per_round"],
        "cpu_ms_added_per_round_4k": at_4k["added_cpu_ms_per_round"],
        "kept_kb_per_round_4k": at_4k["understudy"]["kept_kb_per_round"],
        "parts": parts,
    }
    shares = told("cached", cached(base, words, folder=logs))
    yield {"cached_share_round2": shares["understudy"][1], "cached_share_round2_of_vllm": shares["vllm"][1]}
    busy = told("throughput", throughput(base, words, folder=logs, quick=quick, repeats=repeats))
    yield {"throughput_vs_vllm": busy["64"]["ratio"]}
    if not quick:
        longest = replace(base, max_model_len=65536)  # vLLM encodes answers again, in more tokens
        plan = {"agents": 4, "rounds": 50, "first": words(600), "later": words(360), "max_tokens": 256}
        told("episode_32k", rounds_of(longest, folder=logs, repeats=repeats, plan=plan))
        told("streams", streams(base, folder=logs, count=1000))
        told("long_prompt", long_prompt(base, words, folder=logs, repeats=repeats))
        yield {"parts": parts}


def main(argv: list[str] | None = None) -> int:
    parser = parser_of("gateway", doc=__doc__)
    parser.add_argument("--quick", action="store_true", help="the figures of the summary only, fewer rounds")
    parser.add_argument("--repeats", type=int, default=3, help="of each measurement (default 3, quick 1)")
    return play("gateway", parser.parse_args(argv), measure)


if __name__ == "__main__":
    sys.exit(main())
