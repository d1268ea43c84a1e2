"""Several engines as one: what it costs, what a death costs, how evenly load is spread.

`python -m benchmarks.fleet [--quick] [--parts cost processes kills join cached tail paced] [--json PATH]`. Parts:

- cost: `fleet_of_one_vs_direct`, rounds/s of a server whose one engine is in a fleet over those of one that has it directly. The
  engine does nothing, so that nothing hides the difference; 64 agents, both servers asked in turn, medians.
- processes: `rounds_2_processes_vs_1`, rounds/s of a server with `server.processes=2` over those of one with 1, before an engine
  that does nothing; agents ask the process that owns their episode. 64 agents, both servers asked in turn, medians. Agents and
  servers share the machine's processors: of two, the agents take some.
- kills: 64 streaming agents (openai client, no retries) on 3 real engines, of which each is killed once and then one is stopped:
  `client_errors`, `lost_episodes` (rounds that the ledger lacks), `max_logprob_diff` of all that is recorded, `worst_tokens` where
  the largest are; `hung_found_s` from the stop to the end of the stopped process, null where it did not come.
- join, cached: `joined_first_call_s`, from the moment at which a started engine is added to its first call;
  `cached_share_3_engines`, share of the prompts of second rounds that the engines' prefix caches held.
- tail: `tail_vs_hash`, mean time of an episode, routed by the fleet over routed by a consistent hash of its name: 8 paced engines,
  96 episodes at once of 4 rounds whose lengths are spread widely; engines slow down by what they hold.
- paced: `paced_2048_share`, tokens/s of 32 paced engines with 64 generations each over what they could give: 512 tokens of an
  agent from each of its answers to the next, by 2,048 agents that began over the time of one answer. `paced_2048_in_step`: the
  same of agents that begin at once, so that all answers end together and wait for one another. `paced_cpu_ms_per_round`, the
  server's processor time.

It judges nothing. Invariant: what is compared gets the same requests.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import count
from operator import truediv
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.engines import PacedEngine, engine_of
from benchmarks.gateway import LATER, WORDS, servers
from benchmarks.gateway_server import Settings
from benchmarks.harness import in_turn, parser_of, play
from configs.tiny_model import make_tiny_model
from mocked_server.fleet.engine_fleet import Caller, EngineFleet
from mocked_server.vllm.engine_arguments import set_process_environment


def nothing_settings(model: Path, **more: Any) -> Settings:
    """A server without a real engine."""
    return Settings(model=str(model), episodes=1200, max_model_len=2048, **more)


def asked_in_turn(sides: Mapping[str, Settings], folder: Path, *, quick: bool) -> dict[str, list[float]]:
    """Rounds/s of servers with these settings, in turn."""
    rounds, repeats = (4, 2) if quick else (10, 7)
    with ExitStack() as stack:
        up = {
            name: stack.enter_context(servers(settings, folder=folder, kinds=["understudy"]))[0]
            for name, settings in sides.items()
        }

        def rate(name: str) -> float:
            plan = up[name].plan(agents=64, rounds=rounds, first=WORDS, later=LATER, max_tokens=32)
            return float(up[name].load(plan)["rounds_per_s"])

        found = in_turn({name: partial(rate, name) for name in up}, repeats=repeats + 1)
    return {name: rates[1:] for name, rates in found.items()}  # the first begins connections and episodes


def cost(model: Path, folder: Path, *, quick: bool) -> dict[str, Any]:
    """A fleet of one against no fleet."""
    sides = {name: nothing_settings(model, in_fleet=name == "fleet") for name in ("direct", "fleet")}
    found = asked_in_turn(sides, folder, quick=quick)
    return {
        "fleet_of_one_vs_direct": median(map(truediv, found["fleet"], found["direct"])),
        "rounds_per_s": {name: median(rates) for name, rates in found.items()},
    }


def processes(model: Path, folder: Path, *, quick: bool) -> dict[str, Any]:
    """Two server processes against one."""
    found = asked_in_turn({n: nothing_settings(model, processes=int(n)) for n in ("1", "2")}, folder, quick=quick)
    return {
        "rounds_2_processes_vs_1": median(map(truediv, found["2"], found["1"])),
        "processes_rounds_per_s": {name: median(rates) for name, rates in found.items()},
    }


async def ask(fleet: Any, episode: str, ids: list[int], *, tokens: int, group: int | None = None) -> Any:
    """One answer that comes as a whole."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    params = SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY)
    outputs = fleet.generate(
        ids, params, request_id=f"{episode}-{time.monotonic_ns()}", caller=Caller(episode_id=episode, group_id=group)
    )
    return [output async for output in outputs][-1]


def join(model: Path, folder: Path, *, quick: bool) -> dict[str, Any]:
    """Three real engines: a late one's first call, and the caches of second rounds."""
    return asyncio.run(real_engines(model))


async def real_engines(model: Path) -> dict[str, Any]:
    """The figures of both parts."""
    settings = {"max_tokens": 32, "max_model_len": 2048, "kv_cache_gb": 0.25}
    engines = [engine_of(model, name=f"e{number}", **settings) for number in range(3)]
    fleet = EngineFleet(engines[:2], record_death=lambda *_: None)
    try:
        await fleet.start()
        began = time.monotonic()
        await fleet.add(engines[2])
        joined = time.monotonic()
        for number in range(30):
            await ask(fleet, f"join-{number}", [40 + number, 41, 42], tokens=1)
            if engines[2].figures().prompt_tokens:
                break
        figures = {"join_with_start_s": joined - began, "joined_first_call_s": time.monotonic() - joined}
        return figures | {"cached_share_3_engines": await cached_share(fleet)}
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


def tail(model: Path, folder: Path, *, quick: bool) -> dict[str, Any]:
    """The fleet's routes and hashed ones, in turn, on the same episodes."""
    seeds: dict[str, Iterator[int]] = {"fleet": count(), "hash": count()}

    def episode_s(name: str) -> float:
        engines = [PacedEngine(name=f"e{n}", token_s=0.003, room=2000, prefill_s=0.0002) for n in range(8)]
        router: Any = EngineFleet(engines) if name == "fleet" else Hashed(engines)
        return asyncio.run(episodes_on(router, seed=next(seeds[name]), episodes=96))

    found = in_turn({name: partial(episode_s, name) for name in seeds}, repeats=2 if quick else 5)
    ratios = map(truediv, found["fleet"], found["hash"])
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


def kills(model: Path, folder: Path, *, quick: bool) -> dict[str, Any]:
    """Streams over deaths: what kills is with the fault tests."""
    from tests.faults.engines.stream_faults import kills

    return kills(model, folder, quick=quick)


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "cost": cost, "processes": processes, "paced": paced, "kills": kills, "tail": tail, "join": join, "cached": join,
}  # fmt: skip


def measure(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """All figures of these parts; engines that join are also those whose caches are measured."""
    model = make_tiny_model(folder / "model", positions=8192)
    for name, part in PARTS.items():
        if name in arguments.parts and not (name == "cached" and "join" in arguments.parts):
            (scratch := folder / name).mkdir()
            found = part(model, scratch, quick=arguments.quick)
            print(name, json.dumps(found), flush=True)
            yield found


def main() -> int:
    parser = parser_of("fleet", doc=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    set_process_environment()
    return play("fleet", parser.parse_args(), measure)


if __name__ == "__main__":
    sys.exit(main())
