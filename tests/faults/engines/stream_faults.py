"""Streams over deaths of engines: agents that stream while each engine is killed once and then one is stopped.

`python -m benchmarks.fleet --parts kills` calls it. The witness: what is recorded is compared with transformers' own forward.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.gateway import LATER, WORDS, Server, servers
from benchmarks.gateway_server import Settings
from benchmarks.harness import ROOT
from buffers.ledger.ledger import Ledger
from buffers.records import EpisodeScores
from buffers.training_rows import episode_rows
from mocked_server.check.vllm_scripted_engine import token_logprobs
from tests.faults.killer import killed, living

WORST = 4
"""Tokens whose places are written down."""


def until(check: Callable[[], bool], *, seconds: float = 120.0) -> float:
    """Wait for it; how long it took."""
    began = time.monotonic()
    while not check():
        if time.monotonic() - began > seconds:
            raise RuntimeError(f"what was awaited did not come within {seconds:.0f} s")
        time.sleep(0.02)
    return time.monotonic() - began


def kill_each_and_stop_one(server: Server) -> dict[str, Any]:
    """Each of the engines that run now is killed, the next one when three run again; then one is stopped."""

    def engines() -> set[int]:
        return set(living(server.pid, marks={"engine": "EngineCore"}).get("engine", ()))

    first = engines()
    for pid in first:
        until(lambda: len(engines()) == len(first))
        time.sleep(1.5)
        killed(pid)
    until(lambda: len(engines()) == len(first) and not first & engines())
    time.sleep(2.0)
    stopped = min(engines())
    killed(stopped, by=signal.SIGSTOP)
    found_s: float | None = None
    with suppress(RuntimeError):
        found_s = until(lambda: stopped not in engines())
    return {"killed": len(first), "hung_found_s": found_s}


def kills(model: Path, folder: Path, *, quick: bool) -> dict[str, Any]:
    """Streams over deaths."""
    settings = Settings(
        model=str(model), port=0, ledger="", episodes=6400, engine=True, engines=3, max_model_len=2048, max_tokens=256,
        kv_cache_gb=0.0625,
    )  # fmt: skip
    with servers(settings, folder=folder, kinds=["understudy"]) as (server,):
        plan = server.plan(
            agents=64,
            conversations=100,
            rounds=3 if quick else 5,
            first=WORDS,
            later=LATER,
            max_tokens=100,
            stream=True,
        )
        agents = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.engines.stream_agents"],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert agents.stdin is not None
        agents.stdin.write(json.dumps(asdict(plan)).encode() + b"\n")
        agents.stdin.flush()
        time.sleep(3.0)
        figures = kill_each_and_stop_one(server)
        time.sleep(2.0)
        said = json.loads(agents.communicate(timeout=600)[0])
        ledger_path = next(folder.glob("understudy-*.sqlite"))
    worst, rounds, episodes, lost = recorded(ledger_path, model, rounds=plan.rounds, tokens=plan.max_tokens)
    return {
        "client_errors": len(said["errors"]), "errors": said["errors"][:3], "lost_episodes": lost,
        "max_logprob_diff": worst[0]["diff"], "worst_tokens": worst, "rounds": rounds, "episodes": episodes,
        "episodes_ended": said["ended"], "longest_gap_s": said["longest_gap_s"], **figures,
    }  # fmt: skip


def recorded(path: Path, model: Path, *, rounds: int, tokens: int) -> tuple[list[dict[str, Any]], int, int, int]:
    """(the tokens whose log-probabilities differ most, rounds, episodes, episodes that lack some)."""
    worst, found, episodes, lost = list[dict[str, Any]](), 0, 0, 0
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    with Ledger(path, resume_episodes=True) as ledger:
        for episode in ledger.running_episodes().result():
            stored = ledger.rounds(episode.episode_id).result()
            if not stored:  # nobody played it
                continue
            episodes += 1
            whole = [one for one in stored if len(one.sampled_ids) == tokens and one.finish_reason == "length"]
            lost += len(whole) != rounds or len(stored) != rounds
            found += len(stored)
            for row in episode_rows(stored, group_id=episode.group_id, scores=EpisodeScores(whole=0.0)):
                with torch.no_grad():
                    apart = (token_logprobs(lm, row) - torch.tensor(row.logprobs[1:])).abs() * torch.tensor(
                        row.mask[1:]
                    )
                at = int(apart.argmax())
                begin = at - int(np.argmin(row.mask[at + 1 :: -1])) + 1
                worst.append(
                    {
                        "diff": float(apart[at]), "episode": episode.episode_id, "place": at + 1, "sampled_from": begin,
                        "beside": apart[max(0, at - 8) : at + 9].tolist(),
                    }
                )  # fmt: skip
    return sorted(worst, key=lambda one: -one["diff"])[:WORST], found, episodes, lost
