"""A real pretrained model trained by GRPO here and by TRL, on one machine, with the same tasks, batch, rate and sampling.

`python -m benchmarks.peers [--steps 20] [--seeds 0] [--micro-batches 8 16] [--json PATH]`. The model and its tasks are those of
`understudy demo --real` (env_adapters/smollm2.py); both sides have all cores, and TRL its own environment (benchmarks.learner's).
Of several micro-batch sizes TRL plays three steps with each first, and then whole runs with the one that is fastest; its memory is
of the one that takes least. Each side validates every `--every` steps with one greedy answer for each task, which is not counted in
its time; ours are played beside the next step's episodes, of which a few seconds are then not counted either.

`--tool`: products in place of sums, by a tool that multiplies, in episodes of two answers and more: TRL's `tools` and our
`tool_agent`, with Qwen 2.5's chat template as TRL ships it. Both begin with the weights that six updates of SFT on 60 such
conversations made here, without which there is nothing to score. Nothing is validated; the mean score of a step's episodes is that
of the weights before it. With `--json` the scores over the time are also drawn, beside it.

Figures: `step_vs_trl`, the median step's time, theirs over ours; `time_to_target_vs_trl`, the same of the time until a score is at
`--target`; `peak_memory_vs_trl`, ours over theirs, the largest proportional set size (PSS; shared pages count once) of all
processes. A side that did not reach the target has `null`. Invariant: sides run one after the other, never together.

Tried on two cores without a GPU, and not here: verl 0.9.1 ("Total available GPUs 0 is less than total desired GPUs 1") and OpenRLHF
0.11.2 (needs flash-attn, whose build needs CUDA); by reading, Trinity-RFT 0.6.0 ("only support cuda for now"), prime-rl 0.8.0.
ms-swift 4.6.0 began to train there, by TRL's trainer.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, cycle
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from matplotlib.figure import Figure
from transformers.utils import get_json_schema

from agents.tools.function_tool import FunctionTool
from benchmarks.harness import ROOT, call, metric_lines, parser_of, play, run_to_end, whole_run
from benchmarks.learner import trl_python
from benchmarks.rivals.product import multiply
from buffers.records import Task
from buffers.tasks.parquet import read_tasks, write_tasks
from env_adapters import smollm2
from learner.startup.model_and_tasks import plain_folder

TRL_SIDE = ROOT / "benchmarks" / "rivals" / "trl_grpo_side.py"
RATE, GROUPS, GROUP_SIZE = 1e-5, 8, 8
TOOL_CALLS, NUM_PRODUCTS, NUM_SHOWN = 2, 700, 60
NUMBERS = range(11, 100)
SCHEMAS = (get_json_schema(multiply), FunctionTool(multiply).get_openai_tool_schema().as_openai())
"""The tool as each side tells of it: of 135 million weights that were shown one form, half as many can answer the other."""
PAIRS = random.Random(0).sample([(a, b) for a in NUMBERS for b in NUMBERS], len(NUMBERS) ** 2)
LIMIT_S = 4 * 3600.0


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What both sides train."""

    model: Path
    train: Path
    test: Path | None
    """Tasks of the validations, where there are some."""
    max_tokens: int
    """Most tokens of an episode after its prompt."""
    words: Sequence[str] = ()
    """What our runs are told besides."""


def product_task(a: int, b: int) -> Task:
    """A question for an agent with the tool `multiply`."""
    prompt = [
        {"role": "system", "content": "Multiply with the tool. Then say the product alone."},
        {"role": "user", "content": f"What is {a} times {b}?"},
    ]
    key, truth = f"{a}x{b}", str(a * b)
    return Task(task_id=key, data_source="product", prompt=prompt, ground_truth=truth, extra_info={}, agent_name=None)


def shown_product(a: int, b: int, *, tool: dict[str, Any] = SCHEMAS[0]) -> dict[str, Any]:
    """A demonstration of it."""
    function = {"name": "multiply", "arguments": json.dumps({"a": a, "b": b})}
    said = [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c", "content": str(a * b)},
        {"role": "assistant", "content": str(a * b)},
    ]
    return {"messages": [*product_task(a, b).prompt, *said], "tools": [tool]}


def sums(made: Path, *, model: Path) -> Subject:
    """One answer each, with SmolLM2's own template, which has no tools."""
    return Subject(model=model, train=made / "train.parquet", test=made / "test.parquet", max_tokens=64)


def products(folder: Path, *, model: Path) -> Subject:
    """A tool agent's tasks, and weights that were shown how a call looks."""
    plain, room = folder / "tool-model", 128
    shutil.copytree(model, plain)
    wheel = trl_python(log=folder / "install").parents[1]
    (template,) = wheel.glob("lib/python*/site-packages/trl/chat_templates/qwen2_5.jinja")
    shutil.copy(template, plain / "chat_template.jinja")
    write_tasks(folder / "products.parquet", [product_task(*pair) for pair in PAIRS[:NUM_PRODUCTS]])
    shown = zip(PAIRS[NUM_PRODUCTS : NUM_PRODUCTS + NUM_SHOWN], cycle(SCHEMAS), strict=False)
    lines = [json.dumps(shown_product(*pair, tool=tool)) for pair, tool in shown]
    (folder / "shown.jsonl").write_text("\n".join(lines), encoding="utf-8")
    tool, loops = {"function": f"{multiply.__module__}.multiply"}, folder / "loops.yaml"
    (folder / "tools.yaml").write_text(json.dumps({"tools": [tool]}), encoding="utf-8")
    loop = {"name": "tool_agent", "tool_config_path": "tools.yaml", "max_assistant_turns": TOOL_CALLS + 1}
    loops.write_text(json.dumps([{**loop, "response_length": room}]), encoding="utf-8")
    whole_run(
        folder, "shown", "learner.stage=sft", f"sft.demonstrations={folder / 'shown.jsonl'}", "sft.steps=6",
        f"model.path={plain}", "data.tasks=", "data.validation.tasks=", "rollout.max_model_len=512", config="smollm2",
    )  # fmt: skip
    words = [f"agents.loops={loops}", "rollout.max_model_len=512"]
    return Subject(
        model=folder / "shown" / "last", train=folder / "products.parquet", test=None, max_tokens=room, words=words
    )


class PeakMemory:
    """The largest PSS of the processes below one of ours, in MiB. To find it halts what is measured for up to a tenth of a second,
    so it is looked up only where their resident memory has grown."""

    def __init__(self) -> None:
        self.mib = 0.0
        self._pid = 0
        self._over = threading.Event()

    @contextmanager
    def watched(self) -> Iterator[PeakMemory]:
        """Looks once a second while the body runs; the body calls `started`."""
        watcher = threading.Thread(target=self._watch)
        watcher.start()
        try:
            yield self
        finally:
            self._over.set()
            watcher.join()

    def started(self, pid: int) -> None:
        """The process whose children, and theirs, are counted with it."""
        self._pid = pid

    def _watch(self) -> None:
        most = 0.0
        while not self._over.wait(1.0):
            if self._pid and (resident := _memory(self._pid, lambda process: process.memory_info().rss)) > most:
                most = 1.005 * resident
                self.mib = max(self.mib, _memory(self._pid, lambda process: process.memory_full_info().pss) / 2**20)


def _memory(pid: int, look: Callable[[psutil.Process], int]) -> int:
    """Bytes of a process and all below it."""
    try:
        parent = psutil.Process(pid)
        processes = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    total = 0
    for process in processes:
        try:
            total += look(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # it has just ended
    return total


def ours(folder: Path, subject: Subject, *, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """A run of this project's own configuration, with TRL's rate and batch, which are that configuration's too."""
    name = f"ours-{seed}"
    words = [
        f"run.dir={folder}", f"run.name={name}", f"model.path={subject.model}", f"data.tasks={subject.train}",
        f"data.validation.tasks={subject.test or ''}", f"data.validation.every={arguments.every}",
        f"run.steps={arguments.steps}", f"run.seed={seed}",
        f"learner.lr={RATE}", "learner.lr_warmup_steps=0", f"buffer.groups_per_step={GROUPS}", f"buffer.group_size={GROUP_SIZE}",
        f"rollout.max_tokens={subject.max_tokens}", *subject.words, *arguments.override,
    ]  # fmt: skip
    command = [sys.executable, "-m", "learner.run", "--config", "smollm2", *words]
    environment = {"OMP_NUM_THREADS": str(os.cpu_count())} if "OMP_NUM_THREADS" not in os.environ else {}
    with PeakMemory().watched() as memory:
        run_to_end(
            command, log=folder / f"{name}.log", limit_s=LIMIT_S, started=memory.started, environment=environment
        )
    lines = metric_lines(folder / name)
    steps = [line for line in lines if "reward/mean" in line]
    return {
        "step_s": [step["time/step_s"] - step.get("val/seconds", 0.0) for step in steps],
        "rewards": [step["reward/mean"] for step in steps],
        "tokens": [step["batch/trained_tokens"] for step in steps],
        "rounds": [step["agent_loop/rounds_mean"] for step in steps],
        "validation": [[int(line["val/step"]), line["val/mean"]] for line in lines if "val/mean" in line],
        "max_logprob_diff": max(step["policy/max_logprob_diff"] for step in steps),
        "peak_mib": memory.mib,
    }


def trl(folder: Path, subject: Subject, *, micro_batch: int, seed: int, steps: int, every: int) -> dict[str, Any]:
    """A run of TRL's trainer."""
    tasks = {
        name: [{"prompt": task.prompt, "truth": task.ground_truth} for task in (read_tasks(path) if path else ())]
        for name, path in (("train", subject.train), ("test", subject.test))
    }
    with PeakMemory().watched() as memory:
        (figures,) = call(
            TRL_SIDE, python=trl_python(log=folder / "install"), folder=folder, limit_s=LIMIT_S, started=memory.started,
            model=subject.model, **tasks, micro_batch=micro_batch, groups=GROUPS, group_size=GROUP_SIZE,
            max_tokens=subject.max_tokens, tool_calls=0 if subject.test else TOOL_CALLS,
            lr=RATE, steps=steps, every=every, seed=seed, threads=os.cpu_count(), gradient_checkpointing=False,
        )  # fmt: skip
    return {**figures, "micro_batch": micro_batch, "peak_mib": memory.mib}


def curve(run: dict[str, Any]) -> list[tuple[int, float]]:
    """Updates and the score after them: the validations, or without one each step's own episodes."""
    return run["validation"] or [*enumerate(run["rewards"])]


def time_to(run: dict[str, Any], target: float) -> float | None:
    """Seconds of the steps before the score first reached the target; None where it never did."""
    reached = next((step for step, score in curve(run) if score >= target), None)
    return None if reached is None else sum(run["step_s"][:reached])


def figures(
    own: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]], tried: Sequence[dict[str, Any]], *, target: float
) -> dict[str, Any]:
    """What is compared: medians over the runs of all seeds. A process's first step is left out of step times, as it warms up, and
    so is the one after a validation, with which ours overlaps."""
    step_s = {
        side: median(
            second
            for run in runs
            for number, second in enumerate(run["step_s"])
            if number and number not in dict(run["validation"])
        )
        for side, runs in (("ours", own), ("trl", theirs))
        if runs
    }
    found: dict[str, Any] = {
        "step_s": step_s,
        "peak_mib": {"ours": max(run["peak_mib"] for run in own), "trl": min(run["peak_mib"] for run in tried)},
        "seconds_to_target": {
            side: [time_to(run, target) for run in runs] for side, runs in (("ours", own), ("trl", theirs))
        },
    }
    found["peak_memory_vs_trl"] = found["peak_mib"]["ours"] / found["peak_mib"]["trl"]
    if theirs:
        found["step_vs_trl"] = step_s["trl"] / step_s["ours"]
        mine, other = (found["seconds_to_target"][side] for side in ("ours", "trl"))
        whole = None not in mine and None not in other
        found["time_to_target_vs_trl"] = median(other) / median(mine) if whole else None
    return found


def picture(runs: dict[str, list[dict[str, Any]]], *, to: Path, target: float) -> None:
    """Each run as a line of its scores over the minutes of its steps."""
    figure = Figure(figsize=(7.5, 3.0), layout="constrained")
    axes = figure.add_subplot(xlabel=f"minutes of training, {os.cpu_count()} CPU cores", ylabel="score", ylim=(0, 1))
    for side, colour, name in (("ours", "#2166ac", "understudy"), ("trl", "#b2182b", "TRL's GRPO")):
        for number, run in enumerate(runs[side]):
            minutes = [0.0, *accumulate(seconds / 60 for seconds in run["step_s"])]
            times, scores = zip(*((minutes[step], score) for step, score in curve(run)), strict=True)
            axes.plot(times, scores, color=colour, marker="o", markersize=3, label=None if number else name)
    axes.axhline(target, color="grey", linewidth=0.8, linestyle=":")
    axes.legend(loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(to, dpi=130)


def measure(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """TRL's sizes, then ours and TRL in turn, seed by seed."""
    made = smollm2.make(arguments.data)
    model = plain_folder(made / smollm2.MODEL, to=folder / "model", dtype="float32", say=print)
    subject = products(folder, model=model) if arguments.tool else sums(made, model=model)
    tried: list[dict[str, Any]] = []
    sizes: list[int] = arguments.micro_batches
    for micro_batch in sizes if len(sizes) > 1 else ():
        tried.append(trl(folder, subject, micro_batch=micro_batch, seed=0, steps=3, every=4))
        print(
            f"TRL, micro-batches of {micro_batch}: steps of {tried[-1]['step_s']} s, {tried[-1]['peak_mib']:,.0f} MiB"
        )
        yield {"trl_tried": tried}
    fastest = min(tried, key=lambda run: median(run["step_s"][1:]))["micro_batch"] if tried else sizes[0]
    own: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    for seed in arguments.seeds:
        own.append(ours(folder, subject, seed=seed, arguments=arguments))
        scores = own[-1]["validation"] or own[-1]["rewards"]
        print(f"ours, seed {seed}: {median(own[-1]['step_s'][1:]):.1f} s a step, score {scores}", flush=True)
        yield {"trl_tried": tried, "runs": {"ours": own, "trl": theirs}}
        size = {"micro_batch": fastest, "steps": arguments.steps, "every": arguments.every}
        theirs.append(trl(folder, subject, seed=seed, **size))
        scores = theirs[-1]["validation"] or theirs[-1]["rewards"]
        print(f"TRL, seed {seed}: {median(theirs[-1]['step_s'][1:]):.1f} s a step, score {scores}", flush=True)
        runs = {"ours": own, "trl": theirs}
        yield {"trl_tried": tried, "runs": runs, **figures(own, theirs, tried or theirs, target=arguments.target)}
        if arguments.json is not None:
            picture(runs, to=arguments.json.with_suffix(".png"), target=arguments.target)


def main(argv: list[str] | None = None) -> int:
    parser = parser_of("peers", doc=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="updates of each run (default 20)")
    parser.add_argument("--every", type=int, default=5, help="steps between validations (default 5)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--target", type=float, default=0.8, help="validation score that is waited for (default 0.8)")
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[8, 16, 32], help="TRL's, tried for two steps")
    parser.add_argument("--tool", action="store_true", help="products by a tool, in place of sums")
    parser.add_argument("--data", type=Path, default=Path("data/smollm2"), help="folder of model and tasks")
    parser.add_argument("--override", action="append", default=[], metavar="section.key=value", help="of our runs")
    arguments = parser.parse_args(argv)
    if arguments.steps < 2 or any(GROUPS * GROUP_SIZE % size for size in arguments.micro_batches):
        parser.error(
            f"--steps must be >= 2 and --micro-batches must divide {GROUPS * GROUP_SIZE}, got {arguments.steps} and "
            f"{arguments.micro_batches}"
        )
    return play("peers", arguments, measure)


if __name__ == "__main__":
    sys.exit(main())
