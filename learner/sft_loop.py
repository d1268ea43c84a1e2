"""The SFT loop: demonstrations in, weights that give such answers out; a run of its own, or the stage before a run's first RL step.

Built by `learner.pipeline`, and begun by `learner.training.ranks.LearnerProcesses` on fresh ranks, again after a rank has died.
Invariants: the order of conversations follows from the file, `run.seed` and the step alone, and what was validated is read back
from the step's lines, so a run that was killed and resumed makes the same updates, bit for bit; a conversation that cannot be
shown as play shows it is left out, counted and named.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from buffers.errors import TaskError
from buffers.records import Position, Row
from buffers.tasks.parquet import Trace, read_demonstrations
from configs.schema import Config, SftConfig
from learner.checkpoints.saving import save_checkpoint
from learner.checkpoints.store import Checkpoint, CheckpointStore
from learner.recovery.restarts import RestartLimit
from learner.reporting.display import Display
from learner.reporting.tracker import Tracker
from learner.training.ranks import LearnerRanks
from learner.training.sft import SftRow

RUN_ID = "sft"
"""Stands for a ledger's id in checkpoints."""
SHOWN = 3
"""Refused conversations that are named."""
LAST_STEPS = 5
"""Steps whose mean is the last loss."""
HELD_OUT_AT_ONCE = 64
"""Held-out conversations that ranks are given together."""

Conversation = Sequence[SftRow]
Render = Callable[[Iterable[Trace]], Iterator[list[Row] | Exception]]
"""The training rows of each conversation, or why it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """What is learned, and what is held out."""

    trained: Sequence[Conversation]
    held_out: Sequence[Conversation]
    num_refused: int
    """Conversations that cannot be shown as play shows them."""
    num_low: int
    """Those left out by `sft.min_score`."""


def read(config: SftConfig, *, seed: int, render: Render, say: Callable[[str], object]) -> Demonstrations:
    """The conversations of the configured files. `say` gets a line for those refused. Raises TaskError where none is left."""
    trained, low, refused = _conversations(
        config.demonstrations, key="sft.demonstrations", config=config, render=render, say=say
    )
    held_out: list[Conversation] = []
    if isinstance(config.validation, float):
        number = max(1, round(config.validation * len(trained)))
        if number >= len(trained):
            raise TaskError(
                f"sft.validation={config.validation} must leave conversations to learn, got {len(trained)} in all; take more, or a "
                f"smaller share"
            )
        order = np.random.default_rng((seed, len(trained))).permutation(len(trained))
        held_out, trained = (
            [trained[at] for at in sorted(order[:number])],
            [trained[at] for at in sorted(order[number:])],
        )
    elif config.validation:
        held_out, more_low, more = _conversations(
            config.validation, key="sft.validation", config=config, render=render, say=say
        )
        low, refused = low + more_low, refused + more
    return Demonstrations(trained=trained, held_out=held_out, num_refused=refused, num_low=low)


def _conversations(
    path: str, *, key: str, config: SftConfig, render: Render, say: Callable[[str], object]
) -> tuple[list[Conversation], int, int]:
    """Those of a file, how many have too low a score, and how many are refused."""
    numbers: list[int] = []
    weights: list[float] = []

    def kept() -> Iterator[Trace]:
        for number, trace in enumerate(read_demonstrations(Path(path))):
            if config.min_score is None or (trace.score is not None and trace.score >= config.min_score):
                numbers.append(number)
                weights.append(trace.weight)
                yield trace

    found: list[Conversation] = []
    refused: list[str] = []
    at = -1
    for at, rows in enumerate(render(kept())):
        if isinstance(rows, Exception):
            refused.append(f"row {numbers[at]}: {rows}")
        else:
            found.append(
                [SftRow(ids=row.ids, mask=row.mask, conversation=numbers[at], weight=weights[at]) for row in rows]
            )
    total = sum(1 for _ in read_demonstrations(Path(path))) if config.min_score is not None else at + 1
    if refused:
        say(f"{key}={path}: {len(refused)} of {at + 1} conversations are left out: " + "; ".join(refused[:SHOWN]))
    if not found:
        why = "; ".join(refused[:SHOWN]) or f"none has a score of {config.min_score} or more (sft.min_score)"
        raise TaskError(f"{key}={path} must have a conversation that can be learned, got none of {total}: {why}")
    return found, total - (at + 1), len(refused)


def num_updates(config: SftConfig, *, number: int) -> int:
    """Those of a stage on `number` conversations."""
    return config.epochs * -(-number // config.batch_size) if config.steps is None else config.steps


def rows_of_update(trained: Sequence[Conversation], *, step: int, batch_size: int, seed: int) -> list[SftRow]:
    """The rows of an update (the first is 1): each pass goes through all conversations, in an order of its own."""
    epoch, place = divmod(step - 1, -(-len(trained) // batch_size))
    order = np.random.default_rng((seed, epoch)).permutation(len(trained))
    return [row for at in order[place * batch_size : (place + 1) * batch_size] for row in trained[at]]


Play = Callable[[int], Awaitable[dict[str, float]]]
"""Plays the run's validation tasks with the present weights, which are those of this step; the figures."""


@dataclass(eq=False)
class SftLoop:
    """`read_rows` gives the demonstrations. `play`: None: nothing is played. `on_begun` is given the number of updates,
    `on_step` is called behind each."""

    config: Config
    _: KW_ONLY
    ranks: LearnerRanks
    read_rows: Callable[[], Awaitable[Demonstrations]]
    store: CheckpointStore
    tracker: Tracker
    display: Display
    restart_limit: RestartLimit
    play: Play | None = None
    on_begun: Callable[[int], None] = lambda _: None
    on_step: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._data: Demonstrations | None = None
        self._lines: list[dict[str, float]] = [dict(line) for line in self.tracker.earlier]
        """Figures of the steps so far, as they were logged."""
        self._done = max((int(line["step"]) for line in self._lines if "sft/loss" in line), default=0)
        """Steps that were made and logged at least once."""
        self._stopped = False
        self.step = 0
        self.num_steps = 0
        self.activity = "starting"
        """What the learner does now: starting, updating, validating, or saving."""

    def stop(self) -> bool:
        """Finish after the update in progress. False: none was begun, the caller ends the run itself."""
        self._stopped = True
        return self.step > 0

    async def run(self) -> None:
        """Makes the updates that are left after the newest checkpoint. Raises RankDied, after which it may be called again."""
        if self._data is None:
            self._data = data = await self.read_rows()
            self.num_steps = num_updates(self.config.sft, number=len(data.trained))
            self.display.note(
                f"SFT: {len(data.trained)} conversations, {len(data.held_out)} held out, {self.num_steps} updates on "
                f"{self.config.sft.batch_size} each"
            )
            self.on_begun(self.num_steps)
        await self.ranks.begin_sft()
        if (newest := self.store.newest()) is not None:
            await self.ranks.load(newest.learner)
        self.step = 0 if newest is None else newest.position.step
        await self._first_validation()
        while not self._is_over():
            await self._update()
        await self._save()
        if self._is_worse and (best := self._best_checkpoint()) is not None:
            await self.ranks.load(best.learner)
        await self.ranks.end_sft()

    def summary(self) -> dict[str, Any]:
        """The stage in figures; losses in nats a token. First and last loss are those of the first and the last five updates."""
        losses = [line["sft/loss"] for line in self._lines if "sft/loss" in line]
        held_out = [line["sft/val_loss"] for line in self._lines if "sft/val_loss" in line]
        data = self._data
        return {
            "steps": len(losses),
            "steps_planned": self.num_steps,
            "loss_first": losses[0] if losses else None,
            "loss_last": float(np.mean(losses[-LAST_STEPS:])) if losses else None,
            "val_loss_first": held_out[0] if held_out else None,
            "val_loss_last": held_out[-1] if held_out else None,
            "val_loss_best": min(held_out, default=None),
            "conversations": 0 if data is None else len(data.trained),
            "held_out": 0 if data is None else len(data.held_out),
            "refused": 0 if data is None else data.num_refused,
            "below_min_score": 0 if data is None else data.num_low,
            "tokens_trained": int(sum(line["learner/trained_tokens"] for line in self._lines if "sft/loss" in line)),
            "seconds": sum(line["time/step_s"] for line in self._lines if "sft/loss" in line),
        }

    async def _update(self) -> None:
        config, step, began = self.config, self.step + 1, time.monotonic()
        self.activity = "updating"
        warmth = min(1.0, step / (config.learner.lr_warmup_steps + 1))
        assert self._data is not None, "run() reads them"
        rows = rows_of_update(self._data.trained, step=step, batch_size=config.sft.batch_size, seed=config.run.seed)
        figures = await self.ranks.sft_step(rows, lr=config.sft.lr * warmth)
        self.step = step
        epoch = step * config.sft.batch_size / len(self._data.trained)
        figures |= {"sft/epoch": epoch, "time/update_s": time.monotonic() - began}
        if step > self._done and (step % config.data.validation.every == 0 or step == self.num_steps):
            figures |= await self._validated()
        took = time.monotonic() - began
        figures |= {"time/step_s": took, "throughput/tokens_per_s": figures["learner/tokens"] / max(took, 1e-9)}
        if step > self._done:
            self._done = step
            self.restart_limit.reset()
            await self._log(figures)
            self.display.learned(
                step, of=self.num_steps, loss=figures["sft/loss"], tokens_per_s=figures["throughput/tokens_per_s"], step_s=took
            )  # fmt: skip
        every = config.run.checkpoints.every
        if not self._is_over() and ((every and step % every == 0) or (config.sft.patience and self._is_lowest)):
            await self._save()
        self.on_step()

    async def _log(self, figures: dict[str, float]) -> None:
        figures = figures | self.restart_limit.figures()
        self._lines.append({**figures, "step": self.step})
        await asyncio.to_thread(self.tracker.log, self.step, figures)

    async def _first_validation(self) -> None:
        """Validates the weights before the first update."""
        known = any("sft/val_loss" in line or "val/mean" in line for line in self._lines)
        if self.step == 0 and not known and (figures := await self._validated()):
            await self._log(figures)

    async def _validated(self) -> dict[str, float]:
        """The loss of held-out conversations, and what the validation tasks scored."""
        assert self._data is not None, "run() reads them"
        figures: dict[str, float] = {}
        self.activity = "validating"
        if held_out := self._data.held_out:
            sums = np.zeros(2)
            for at in range(0, len(held_out), HELD_OUT_AT_ONCE):
                rows = [row for each in held_out[at : at + HELD_OUT_AT_ONCE] for row in each]
                sums += await self.ranks.sft_loss(rows)
            figures["sft/val_loss"] = float(sums[0] / sums[1])
            self.display.held_out(self.step, loss=figures["sft/val_loss"])
        if self.play is not None and not self._stopped:
            played = await self.play(self.step)
            if "val/mean" in played:
                self.display.validated(self.step, mean=played["val/mean"], best=played["val/best"])
            figures |= played
        return figures

    # What was seen so far decides: the same after a resume.

    def _held_out(self) -> list[tuple[int, float]]:
        """Step and loss of each validation up to this step."""
        lines = (line for line in self._lines if "sft/val_loss" in line)
        return [(int(line["step"]), line["sft/val_loss"]) for line in lines if line["step"] <= self.step]

    @property
    def _is_lowest(self) -> bool:
        """The last loss of held-out conversations is this step's, and lower than all before."""
        seen = self._held_out()
        return bool(seen) and seen[-1][0] == self.step and all(seen[-1][1] < loss for _, loss in seen[:-1])

    @property
    def _is_worse(self) -> bool:
        """It ended early."""
        patience, seen = self.config.sft.patience, self._held_out()
        if patience is None or not seen:
            return False
        lowest = min(range(len(seen)), key=lambda at: seen[at][1])
        return len(seen) - 1 - lowest >= patience

    def _is_over(self) -> bool:
        return self._stopped or self.step >= self.num_steps or self._is_worse

    def _score(self) -> float | None:
        """The figure by which the best checkpoint is kept: what these weights scored, or minus their loss on what is held out;
        None: they were not validated."""
        now: Mapping[str, float] = next((line for line in reversed(self._lines) if line["step"] == self.step), {})
        if self.play is not None and self.config.sft.patience is None:
            return now.get("val/mean")
        if self._data is not None and self._data.held_out:
            return -now["sft/val_loss"] if "sft/val_loss" in now else None
        return -now["sft/loss"] if "sft/loss" in now else None

    def _best_checkpoint(self) -> Checkpoint | None:
        lowest = min(self._held_out(), key=lambda each: each[1])[0]
        return next((each for each in self.store.all() if each.position.step == lowest), None)

    async def _save(self) -> None:
        self.activity = "saving"
        await save_checkpoint(
            self.ranks, store=self.store, position=Position(run_id=RUN_ID, lineage=0, step=self.step), score=self._score,
            say=self.display.note, gives_up=lambda: self._stopped,
        )  # fmt: skip
