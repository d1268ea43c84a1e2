"""Several engines as one: what it costs, what a death costs, how evenly load is spread.

`python -m benchmarks.fleet [--quick] [--parts cost processes kills join cached tail paced weights] [--json PATH]`. Parts:

- cost: `fleet_of_one_vs_direct`, rounds/s of a server whose one engine is in a fleet over those of one that has it directly. The
  engine does nothing, so that nothing hides the difference; 64 agents, both servers asked in turn, medians.
- processes: `rounds_2_processes_vs_1`, rounds/s of a server with `server.processes=2` over those of one with 1, before an engine
  that does nothing; agents ask the process that owns their episode. 64 agents, both servers asked in turn, medians. Agents and
  servers share the machine's processors: of two, the agents take some.
- kills: 64 streaming agents (openai client, no retries) on 3 real engines, of which each is killed once and then one is stopped:
  `client_errors`, `lost_episodes` (rounds that the ledger lacks), `max_logprob_diff` of all that is recorded, `worst_tokens` where
  the largest are; `hung_found_s` from the stop to the end of the stopped process, null where it did not come.
- join: `joined_first_call_s`, from the moment at which a started engine is added to its first call.
- cached: `cached_share_3_engines`, share of the prompts of second rounds that the engines' prefix caches held.
- tail: `tail_vs_hash`, mean time of an episode, routed by the fleet over routed by a consistent hash of its name: 8 paced engines,
  96 episodes at once of 4 rounds whose lengths are spread widely; engines slow down by what they hold.
- paced: `paced_2048_share`, tokens/s of 32 paced engines with 64 generations each over what they could give: 512 tokens of an
  agent from each of its answers to the next, by 2,048 agents that began over the time of one answer. `paced_2048_in_step`: the
  same of agents that begin at once, so that all answers end together and wait for one another. `paced_cpu_ms_per_round`, the
  server's processor time.
- weights: the figures of `benchmarks.weights`, which has a process of its own.

It judges nothing. Invariant: what is compared gets the same requests.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import psutil
import torch
from transformers import AutoModelForCausalLM

from benchmarks.gateway import ROOT, WORDS, Server, servers
from benchmarks.harness import Report, end_on_sigterm, parser_of
from benchmarks.processes.gateway_server import Settings
from benchmarks.processes.paced_engine import PacedEngine
from buffers.ledger.ledger import Ledger
from buffers.records import EpisodeScores
from buffers.training_rows import episode_rows
from configs.schema import RolloutConfig, ServerConfig
from configs.tiny_model import make_tiny_model
from mocked_server.check.logprob_proof import token_logprobs
from mocked_server.fleet.engine_fleet import Caller, EngineFleet
from mocked_server.vllm.engine import VLLMEngine
from mocked_server.vllm.engine_arguments import EngineSettings, make_args, make_vllm_config, set_process_environment

LATER = "Go on, and say what you see now."
WORST = 4
"""Tokens whose places are written down."""


def nothing_settings(model: Path, **more: Any) -> Settings:
    """A server without a real engine."""
    return Settings(
        model=str(model), port=0, ledger="", episodes=1200, engine=False, max_model_len=2048, **more
    )  # fmt: skip


def cost(model: Path, folder: Path, *, quick: bool) -> dict[str, Any]:
    """A fleet of one against no fleet, in turn."""
    rounds, repeats = (4, 2) if quick else (10, 7)
    with ExitStack() as stack:
        pair = {
            name: stack.enter_context(
                servers(nothing_settings(model, in_fleet=name == "fleet"), folder=folder, kinds=["understudy"])
            )[0]
            for name in ("direct", "fleet")
        }
        found: dict[str, list[float]] = {name: [] for name in pair}
        for repeat in range(repeats):
            for name in sorted(pair, reverse=repeat % 2 == 1):
                plan = pair[name].plan(agents=64, rounds=rounds, first=WORDS, later=LATER, max_tokens=32)
                found[name].append(pair[name].load(plan)["rounds_per_s"])
    ratios = [fleet / direct for fleet, direct in zip(found["fleet"], found["direct"], strict=True)]
    return {
        "fleet_of_one_vs_direct": median(ratios),
        "rounds_per_s": {name: median(values) for name, values in found.items()},
    }


def processes(model: Path, folder: Path, *, quick: bool) -> dict[str, Any]:
    """Two server processes against one, in turn."""
    rounds, repeats = (4, 2) if quick else (10, 7)
    found: dict[int, list[float]] = {1: [], 2: []}
    with ExitStack() as stack:
        pair = {
            number: stack.enter_context(
                servers(nothing_settings(model, processes=number), folder=folder, kinds=["understudy"])
            )[0]
            for number in found
        }
        for repeat in range(repeats + 1):
            for number in sorted(pair, reverse=repeat % 2 == 1):
                plan = pair[number].plan(agents=64, rounds=rounds, first=WORDS, later=LATER, max_tokens=32)
                found[number].append(pair[number].load(plan)["rounds_per_s"])
    measured = {number: values[1:] for number, values in found.items()}  # the first begins connections and episodes
    ratios = [two / one for one, two in zip(measured[1], measured[2], strict=True)]
    return {
        "rounds_2_processes_vs_1": median(ratios),
        "processes_rounds_per_s": {str(number): median(values) for number, values in measured.items()},
    }


def engine_processes(server: Server) -> dict[str, psutil.Process]:
    """The engines of a server: process id and start time -> process."""
    found = {}
    for child in psutil.Process(server._process.pid).children(recursive=True):
        with suppress(psutil.Error):
            if "EngineCore" in " ".join(child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
                found[f"{child.pid}-{child.create_time()}"] = child
    return found


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
    first = engine_processes(server)
    for process in first.values():
        until(lambda: len(engine_processes(server)) == len(first))
        time.sleep(1.5)
        process.kill()
    until(lambda: len(engine_processes(server)) == len(first) and not first.keys() & engine_processes(server).keys())
    time.sleep(2.0)
    (name, stopped), *_ = engine_processes(server).items()
    os.kill(stopped.pid, signal.SIGSTOP)
    found_s: float | None = None
    with suppress(RuntimeError):
        found_s = until(lambda: name not in engine_processes(server))
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
            [sys.executable, "-m", "benchmarks.processes.stream_agents"],
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


def engine_of(model: Path, name: str) -> VLLMEngine:
    """One real engine in this process."""
    settings = EngineSettings(
        model_path=model, served_name="policy", dtype="float32",
        rollout=RolloutConfig(max_tokens=32, max_model_len=2048, kv_cache_gb=0.25), server=ServerConfig(),
    )  # fmt: skip
    return VLLMEngine(make_vllm_config(make_args(settings)), name=name)


async def ask(fleet: Any, episode: str, ids: list[int], *, tokens: int, group: int | None = None) -> Any:
    """One answer that comes as a whole."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    params = SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY)
    outputs = fleet.generate(
        ids, params, request_id=f"{episode}-{time.monotonic_ns()}", caller=Caller(episode_id=episode, group_id=group)
    )
    return [output async for output in outputs][-1]


async def real_engines(model: Path, *, parts: list[str]) -> dict[str, Any]:
    """Three real engines: a late one's first call, and the caches of second rounds."""
    engines = [engine_of(model, f"e{number}") for number in range(3)]
    fleet = EngineFleet(engines[:2], record_death=lambda *_: None)
    figures: dict[str, Any] = {}
    try:
        await fleet.start()
        began = time.monotonic()
        await fleet.add(engines[2])
        figures["join_with_start_s"] = time.monotonic() - began
        joined = time.monotonic()
        for number in range(30):
            await ask(fleet, f"join-{number}", [40 + number, 41, 42], tokens=1)
            if engines[2].figures().prompt_tokens:
                break
        figures["joined_first_call_s"] = time.monotonic() - joined
        if "cached" in parts:
            figures["cached_share_3_engines"] = await cached_share(fleet)
        return figures
    finally:
        await fleet.close()


async def cached_share(fleet: EngineFleet) -> float:
    """96 episodes of two rounds, 32 at once."""
    gate, cached, prompts = asyncio.Semaphore(32), 0, 0

    async def episode(number: int) -> None:
        nonlocal cached, prompts
        draw = random.Random(number)
        ids = [draw.randrange(16, 400) for _ in range(512)]
        async with gate:
            first = await ask(fleet, f"cached-{number}", ids, tokens=16)
            ids += [*first.outputs[0].token_ids, *(draw.randrange(16, 400) for _ in range(8))]
            second = await ask(fleet, f"cached-{number}", ids, tokens=16)
            cached += second.num_cached_tokens
            prompts += len(ids) - 24  # what an engine can have of it
            fleet.forget(f"cached-{number}")

    await asyncio.gather(*(episode(number) for number in range(96)))
    return cached / prompts


class Hashed:
    """Engines by a consistent hash of the episode."""

    def __init__(self, engines: list[PacedEngine]) -> None:
        self._engines = engines
        self._ring = sorted((self._point(f"{n}-{v}"), n) for n in range(len(engines)) for v in range(64))

    @staticmethod
    def _point(name: str) -> int:
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")

    def generate(self, ids: list[int], params: Any, *, request_id: str, caller: Caller) -> Any:
        """As `EngineFleet.generate`."""
        here = self._point(caller.episode_id)
        number = next((n for point, n in self._ring if point >= here), self._ring[0][1])
        return self._engines[number].generate(ids, params, request_id=request_id)

    def forget(self, _: str) -> None:
        """It keeps nothing of an episode."""


async def episodes_on(router: Any, *, seed: int, episodes: int) -> float:
    """Mean time of an episode: all begin at once, in groups of 8 with one prompt, and each takes 4 rounds."""
    lengths = random.Random(seed)
    sizes = [[max(8, min(600, int(lengths.lognormvariate(4.0, 1.0)))) for _ in range(4)] for _ in range(episodes)]
    prompts = [
        [number // 8 + 1000] * max(32, min(1200, int(lengths.lognormvariate(5.0, 1.0)))) for number in range(episodes)
    ]
    times = []

    async def episode(number: int) -> None:
        ids, began = list(prompts[number - number % 8]), time.monotonic()
        for tokens in sizes[number]:
            await ask(router, f"{seed}-{number}", ids, tokens=tokens, group=number // 8)
            ids += [number] * (tokens + 16)
            await asyncio.sleep(0.05)  # its tool
        times.append(time.monotonic() - began)
        router.forget(f"{seed}-{number}")

    await asyncio.gather(*(episode(number) for number in range(episodes)))
    return mean(times)


async def tail(*, quick: bool) -> dict[str, Any]:
    """The fleet's routes and hashed ones, in turn, on the same episodes."""
    found: dict[str, list[float]] = {"fleet": [], "hash": []}
    for seed in range(2 if quick else 5):
        for name in sorted(found, reverse=seed % 2 == 1):
            engines = [PacedEngine(f"e{n}", token_s=0.003, room=2000, prefill_s=0.0002) for n in range(8)]
            router: Any = EngineFleet(engines) if name == "fleet" else Hashed(engines)
            found[name].append(await episodes_on(router, seed=seed, episodes=96))
    ratios = [fleet / hashed for fleet, hashed in zip(found["fleet"], found["hash"], strict=True)]
    return {"tail_vs_hash": median(ratios), "episode_s": {name: median(values) for name, values in found.items()}}


def paced(model: Path, folder: Path, *, quick: bool) -> dict[str, Any]:
    """2,048 agents before 32 engines that cost nothing."""
    token_ms, tokens, rounds = 50.0, 512, 2 if quick else 3
    settings = replace(
        nothing_settings(model, paced=32, token_ms=token_ms), episodes=4096, max_tokens=tokens, max_model_len=8192
    )
    answer_s = tokens * token_ms / 1000
    plan: dict[str, Any] = {"agents": 2048, "rounds": rounds, "first": WORDS, "later": LATER, "max_tokens": tokens}
    with servers(settings, folder=folder, kinds=["understudy"]) as (server,):
        in_step = server.load(server.plan(**plan))
        figures = server.load(server.plan(**plan, spread_s=answer_s))
    return {
        "paced_2048_share": answer_s / figures["cycle_s"],
        "paced_2048_in_step": answer_s / in_step["cycle_s"],
        "paced_cpu_ms_per_round": figures["cpu_ms_per_round"],
    }


def weights(folder: Path, *, quick: bool) -> dict[str, Any]:
    """What new weights cost, and whether they arrive bit for bit."""
    path = folder / "weights.json"
    words = [sys.executable, "-m", "benchmarks.weights", "--json", str(path), *(["--quick"] if quick else [])]
    subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads(path.read_text())
    return {name: value for name, value in found.items() if name not in ("benchmark", "settings", "machine", "wall_s")}


PARTS = ("cost", "processes", "kills", "join", "cached", "tail", "paced", "weights")


def measure(parts: list[str], *, quick: bool) -> Mapping[str, Any]:
    """All figures of these parts."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="understudy-fleet-") as scratch:
        model = make_tiny_model(Path(scratch) / "model", positions=8192)

        def take(name: str, found: Mapping[str, Any]) -> None:
            print(name, json.dumps(found), flush=True)
            figures.update(found)

        for name, part in (("cost", cost), ("processes", processes), ("paced", paced), ("kills", kills)):
            if name in parts:
                folder = Path(scratch) / name
                folder.mkdir()
                take(name, part(model, folder, quick=quick))
        if "tail" in parts:
            take("tail", asyncio.run(tail(quick=quick)))
        if "join" in parts or "cached" in parts:
            take("join", asyncio.run(real_engines(model, parts=parts)))
        if "weights" in parts:
            take("weights", weights(Path(scratch), quick=quick))
    return figures


def main() -> None:
    parser = parser_of("fleet", doc=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    end_on_sigterm()
    set_process_environment()
    report = Report("fleet")
    figures = measure(options.parts, quick=options.quick)
    report.write(options.json, settings={"quick": options.quick, "parts": options.parts}, figures=figures)


if __name__ == "__main__":
    main()
