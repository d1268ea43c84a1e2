"""Whether versions of the weights arrive bit for bit when what carries them dies.

`python -m tests.faults.engines.weight_faults [--quick] [--json PATH]`: 50 patches from two learner ranks, by the node's puller,
into a real engine that serves all the while; puller, engine and a rank are killed in turn, at random moments of a publication.
`bit_identical_after_50_patches`: the dense file is the learner's weights to the bit, and the engine gives the very
log-probabilities of one that started with them. `served_max_logprob_diff`: of every token that was served meanwhile, from the
weights of the version that it is labelled with; `served_control_diff`: the least that an answer differs by from the version after.

It judges nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from benchmarks.engines import engine_of
from benchmarks.harness import free_port, parser_of, play
from buffers.errors import EngineError, UnderstudyError
from buffers.weights.manifest import Shard
from configs.tiny_model import make_tiny_model
from learner.checkpoints.store import WEIGHTS
from learner.checkpoints.weight_shards import Published
from learner.checkpoints.weight_sync import WeightSync
from learner.recovery.restarts import RestartLimit, ended
from mocked_server.fleet.engine_fleet import EngineFleet
from mocked_server.request_context import AnswerRecorder
from mocked_server.vllm.engine import VLLMEngine, start_fork_server
from tests.faults.engines.weights_learner import changed
from tests.faults.killer import killed

RANKS = 2
PROMPT = list(range(40, 60))
SERVED_AT_ONCE, SERVED_TOKENS = 4, 60


class RanksDied(UnderstudyError):
    """A learner rank was killed while it published."""


class ProcessRanks:
    """The learner: `RANKS` processes, which end together as the real ones do."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._processes: list[Process] = []
        self.version = 0
        self.restarts = 0

    async def start(self) -> None:
        address = f"127.0.0.1:{free_port()}"
        words = ["-m", "tests.faults.engines.weights_learner", "--model", str(self._model), "--address", address]
        for rank in range(RANKS):
            self._processes.append(
                await asyncio.create_subprocess_exec(
                    sys.executable, *words, "--rank", str(rank), "--world-size", str(RANKS), stdin=PIPE, stdout=PIPE,
                    limit=2**24, env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
                )
            )  # fmt: skip
        await asyncio.gather(*(self._line(process) for process in self._processes))

    async def _line(self, process: Process) -> bytes:
        assert process.stdout is not None
        if not (line := await process.stdout.readline()):
            raise RanksDied("a rank has ended")
        return line

    async def publish(self, folder: Path, *, base: str | None) -> list[Published]:
        call = json.dumps({"version": self.version, "folder": str(folder), "base": base}).encode() + b"\n"
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(call)
        lines = await asyncio.gather(*(self._line(process) for process in self._processes))
        return [
            Published(
                shard=msgspec.convert(answer["shard"], Shard), changed_share=answer["changed_share"], description=None
            )
            for answer in map(json.loads, lines)
        ]

    def pid(self) -> int:
        """PID of the last rank."""
        return self._processes[-1].pid

    async def close(self) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        self._processes = []

    async def restart(self) -> None:
        self.restarts += 1
        await self.close()
        await self.start()


@dataclass
class Served:
    """What the engine answered while versions came and went."""

    engine: VLLMEngine
    responses: list[Any] = field(default_factory=list)
    lost: int = 0
    """Answers that an engine took with it."""

    async def run(self) -> None:
        """Ask without end."""
        await asyncio.gather(*(self._ask(number) for number in range(SERVED_AT_ONCE)))

    async def _ask(self, number: int) -> None:
        for turn in range(10**9):
            try:
                self.responses.append(await generate(self.engine, SERVED_TOKENS, seed=number + SERVED_AT_ONCE * turn))
            except EngineError:
                self.lost += 1
                while not self.engine.is_up:
                    await asyncio.sleep(0.05)


async def generate(engine: VLLMEngine, num_tokens: int, *, seed: int) -> Any:
    """One answer to PROMPT."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    params = SamplingParams(
        max_tokens=num_tokens, logprobs=0, seed=seed, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    recorder = AnswerRecorder(f"r-{seed}")
    async for output in engine.generate(PROMPT, params, request_id=f"r-{seed}-{time.monotonic_ns()}"):
        recorder.add(output)
    (response,) = recorder.responses(version=-1)
    return response


def make_engine(model: Path, *, weights: tuple[Path, int] | None = None) -> VLLMEngine:
    return engine_of(model, weights=weights, max_tokens=256, max_model_len=1024, kv_cache_gb=0.0625)


class Kills:
    """Publishes until `num_patches` patches have arrived, and kills something every few versions."""

    def __init__(self, folder: Path, *, num_patches: int, every: int, seed: int = 0) -> None:
        self._folder = folder
        self._num_patches = num_patches
        self._every = every
        self._chance = random.Random(seed)
        self.model = make_tiny_model(folder / "model")
        self.done: dict[str, int] = {"puller": 0, "engine": 0, "learner": 0}
        self.patches = self.dense = self.version = 0

    async def run(self) -> dict[str, Any]:
        """The part's figures."""
        ranks, engine = ProcessRanks(self.model), make_engine(self.model)
        sync, limit = WeightSync(self._folder), RestartLimit()
        fleet = EngineFleet([engine], record_death=lambda name, error: limit.record("engine", error, name=name))
        await asyncio.gather(ranks.start(), fleet.start())
        keeping = asyncio.create_task(fleet.run())
        served = Served(engine)
        serving: asyncio.Task[None] | None = None
        try:
            while self.patches < self._num_patches:
                await self._publish(sync, ranks, engine)
                limit.reset()
                serving = serving or asyncio.create_task(served.run())
            await ended(serving or keeping)
            figures = await self._compare(sync, engine)
        finally:
            for task in filter(None, (serving, keeping)):
                await ended(task)
            await asyncio.gather(ranks.close(), engine.close())
            await sync.close()
        return {
            **figures,
            **self._check_served(served),
            "served": len(served.responses),
            "lost": served.lost,
            "kills": self.done,
            "versions": self.version + 1,
            "dense_versions": self.dense,
            "patches": self.patches,
        }

    async def _publish(self, sync: WeightSync, ranks: ProcessRanks, engine: VLLMEngine) -> None:
        ranks.version = self.version
        killing: asyncio.Task[None] | None = None
        if self.version % self._every == self._every - 1:
            part = list(self.done)[self.version // self._every % len(self.done)]
            killing = asyncio.create_task(self._kill(part, sync, ranks, engine))
        while True:
            try:
                figures = await sync.publish(ranks, engine, version=self.version)
                break
            except RanksDied:
                await ranks.restart()
        if killing is not None:
            await killing
            if ranks.restarts < self.done["learner"]:  # it died after it had published
                await ranks.restart()
        is_patch = figures["publish/bytes"] < 0.5 * self._dense_bytes
        self.patches += is_patch
        self.dense += not is_patch
        self.version += 1

    @property
    def _dense_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.model.glob("*.safetensors"))

    async def _kill(self, part: str, sync: WeightSync, ranks: ProcessRanks, engine: VLLMEngine) -> None:
        await asyncio.sleep(self._chance.uniform(0.0, 0.05))
        pids = {"puller": sync._puller.pid, "learner": ranks.pid(), "engine": None}
        if (llm := engine._llm) is not None:  # else it died in the publication before, and is being started
            pids["engine"] = llm.engine_core.resources.engine_manager.processes[0].pid
        if (pid := pids[part]) is not None:
            self.done[part] += killed(pid)

    async def _compare(self, sync: WeightSync, engine: VLLMEngine) -> dict[str, Any]:
        """The last version: its file with the learner's weights, the engine with one that starts with them."""
        wanted = weights_of(self.model, self.version - 1)
        (file,) = (sync.folder / "pulled").rglob(WEIGHTS)
        found = load_file(file)
        same_file = found.keys() == wanted.keys() and all(
            torch.equal(found[name].view(torch.int32), wanted[name].view(torch.int32)) for name in wanted
        )
        fresh = self._folder / "fresh"
        fresh.mkdir()
        save_file(wanted, fresh / WEIGHTS, metadata={"format": "pt"})
        other = make_engine(self.model, weights=(fresh, self.version - 1))
        await other.start()
        try:
            answers = [[await generate(one, SERVED_TOKENS, seed=seed) for seed in range(8)] for one in (engine, other)]
        finally:
            await other.close()
        same_engine = all(
            np.array_equal(one.logprobs.view(np.int32), two.logprobs.view(np.int32))
            and set(one.versions.tolist()) == {self.version - 1}
            for one, two in zip(*answers, strict=True)
        )
        return {
            f"bit_identical_after_{self._num_patches}_patches": same_file and same_engine,
            "file_is_identical": same_file,
            "engine_is_identical": same_engine,
        }

    def _check_served(self, served: Served) -> dict[str, Any]:
        """Every token that was served, beside what the version that it names gives, and beside what the version after that
        does: the least of those differences is the control."""
        largest, control, mixed, checked = 0.0, float("inf"), 0, 0
        lm, weights = AutoModelForCausalLM.from_pretrained(self.model), weights_of(self.model, 0)
        for version in range(self.version):
            if version:
                weights = {name: changed(name, weight, version=version) for name, weight in weights.items()}
            lm.load_state_dict(weights, strict=False)
            for response in served.responses:
                own, older = (torch.from_numpy(response.versions == number) for number in (version, version - 1))
                if not bool((own | older).any()):
                    continue
                differences = (logprobs_of(lm, response) - torch.tensor(response.logprobs)).abs()
                if bool(own.any()):
                    largest = max(largest, float(differences[own].max()))
                    checked, mixed = checked + int(own.sum()), mixed + (not bool(own.all()))
                if int(older.sum()) >= SERVED_TOKENS // 2:
                    control = min(control, float(differences[older].max()))
        return {
            "served_max_logprob_diff": largest,
            "served_control_diff": control,
            "served_tokens": checked,
            "served_by_several_versions": mixed,
        }


def logprobs_of(lm: Any, response: Any) -> Tensor:
    """[S] the log-probabilities that the model gives a response's tokens."""
    ids = torch.tensor([PROMPT + response.sampled_ids.tolist()])
    with torch.no_grad():
        logprobs = lm(ids).logits.log_softmax(-1)[0, len(PROMPT) - 1 : -1]
    found: Tensor = logprobs.gather(1, ids[0, len(PROMPT) :, None])[:, 0]
    return found


def weights_of(model: Path, version: int) -> dict[str, Tensor]:
    """What the ranks have at this version."""
    lm = AutoModelForCausalLM.from_pretrained(model)
    weights = {name: weight.detach().clone() for name, weight in lm.named_parameters()}
    for number in range(1, version + 1):
        weights = {name: changed(name, weight, version=number) for name, weight in weights.items()}
    return weights


def measure(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """The course's figures."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    start_fork_server()
    quick = arguments.quick
    yield asyncio.run(Kills(folder, num_patches=6 if quick else 50, every=2 if quick else 5).run())


def main() -> int:
    parser = parser_of("weight_faults", doc=__doc__)
    parser.prog = "python -m tests.faults.engines.weight_faults"
    parser.add_argument("--quick", action="store_true", help="6 patches")
    return play("weight_faults", parser.parse_args(), measure)


if __name__ == "__main__":
    sys.exit(main())
