"""What data and signals are worth: imported sessions, hints, a curriculum, ECHO, replay, a judge. Whole runs, in pairs.

`python -m benchmarks.data [--only NAME ...] [--seeds 0 1 2] [--json PATH]`. The two runs of a pair differ in what `COMPARISONS`
names and in nothing else. A pair's figure is what the second run took to the target over what the first took, for each seed, and
the mean; null where one never got there. `steps` end with the first step at which the mean reward of WINDOW steps is TARGET;
`tokens` (all that were sampled so far) with the first validation that is, as what a curriculum draws is not all that is asked.

- `sft_then_rl_steps_ratio`: the demo after SFT on 200 solved sessions that an earlier run of it played, exported as chat messages
  and imported, over the demo, which begins with as many updates on random play.
- `sdpo_steps_ratio`: hints in the environment's words (how the keys are) without scores, over the demo's advantages without hints,
  16 episodes a step. Both begin with a policy that has learned to read (`reader_traces`): a random model cannot. Each side has the
  epochs (1, 4) and the rate (3e-4, 1e-3) that were best for it.
- `echo_steps_ratio`; `echo_effect`: the mean reward over all steps with ECHO, less that without. The environment says after each
  move which letter was asked for (`ToldWalk`).
- `curriculum_tokens_ratio`: tasks of which three in four cannot be solved, drawn by what they scored, over drawn evenly; full
  batches of groups whose scores differ: what is sampled for the others counts too.
- `replay_episodes_ratio`: episodes that the demo played until then with half of each batch stored groups, over without.
- `judge_agreement`: SmolLM2-135M ranks its own answers to sums, whose truth is known. `judge_agreement_scripted`: a scripted judge
  that takes a tenth of what it sees for its opposite ranks the tiny model's. Of the pairs that the truth tells apart, the share
  that the judge puts in that order, a tie for half.
- `import_sessions_per_s`: `understudy import` of 20,000 sessions of chat messages, from start to end; `import_atif_sessions_per_s`;
  the peak memory of both, and of a tenth of the sessions.
- `loss_streams_max_diff`: `benchmarks.reference_losses`.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.harness import RunFailed, metric_lines, parser_of, play, run_to_end, scripted_model
from benchmarks.learning import TARGET, WINDOW, solved_at
from benchmarks.peers import PeakMemory
from benchmarks.reference_losses import largest_difference
from buffers.log_forms import Session, to_atif
from buffers.records import Task
from buffers.tasks.parquet import write_tasks
from env_adapters import smollm2
from env_adapters.adapter import Message, user
from env_adapters.adapter import task_of as record_of
from env_adapters.walk.game import KEYS, NAMES, RULES, WalkEnv, WalkGame, walk_tasks, walk_traces

SESSIONS = 200
"""Imported sessions that SFT learns."""
MIXED = 48
"""Tasks of the curriculum. Of three in four the exit is outside the room: sets of tasks have many that nobody can solve yet."""
IMPORTED = 20_000
JUDGE_ERRS = 0.1
CLI = [sys.executable, "-c", "import sys; from learner.cli import main; sys.exit(main())"]

Lines = Sequence[Mapping[str, Any]]


# The walk with words: for hints, the letters in each task's hint; for ECHO, what the environment says after each move.


MIRRORED = dict(zip("wasd", "sdwa", strict=True))
AS_USUAL, TURNED = "The keys are as usual.", "The keys are turned round."


def reader_traces(number: int, *, seed: int) -> Iterator[list[Message]]:
    """Conversations from which a model learns to read, and hardly to play. Half are the demo's traces. The others have a hint how
    the keys are, by which each letter means its own direction or the opposite one, and the letters that follow it are learned.
    Moves at random between them are not: who reads about the policy's play will meet such."""
    yield from walk_traces(number // 2, seed=seed)
    for index, messages in enumerate(walk_traces(number // 2, seed=seed + 1, helpful=0.5)):
        for asked, answer in zip(messages[1::2], messages[2::2], strict=True):
            key = answer["content"]
            follows = asked["content"].endswith(f" {NAMES[key]}.")
            answer |= {"content": MIRRORED[key] if index % 2 else key, "weight": int(follows)}
        yield [*messages[:2], user(TURNED if index % 2 else AS_USUAL), *messages[2:]]


class ToldGame(WalkGame):
    """Says after each move which letter was asked for."""

    def step(self, text: str) -> tuple[str, bool, float | None]:
        wanted, pressed = self.hinted_key, text.strip().lower()
        observation, done, score = super().step(text)
        if not done:
            observation = f"{'Yes' if pressed == wanted else 'No'}, {NAMES[wanted]} is {wanted}. {observation}"
        return observation, done, score


class ToldWalk(WalkEnv):
    """The game as an adapter."""

    async def reset(self, task: dict[str, Any], *, seed: int) -> list[Message]:
        self._game = ToldGame(record_of(task))
        return self._game.reset()


def told_traces(number: int, *, seed: int) -> Iterator[list[Message]]:
    """The demo's traces, with the words."""
    draw = random.Random(f"told traces {seed}")
    for task in walk_tasks(number, seed=seed + 1):
        game = ToldGame(task)
        messages, done = game.reset(), False
        while not done:
            answer = game.hinted_key if draw.random() < 0.1 else draw.choice(list(KEYS))
            observation, done, _ = game.step(answer)
            messages += [{"role": "assistant", "content": answer}, *([] if done else [user(observation)])]
        yield messages


# What a pair of runs needs before it starts.


@dataclass(kw_only=True)
class Runs:
    """The runs of a seed in `folder`. `more`: overrides of all; `steps`: None: each comparison's own."""

    folder: Path
    seed: int
    steps: int | None = None
    more: Sequence[str] = ()

    def play(self, name: str, *settings: str, config: str) -> list[dict[str, Any]]:
        """The lines of a run, which is made once. Raises RunFailed."""
        if not (self.folder / name).exists():
            words = [f"run.dir={self.folder}", f"run.name={name}", f"run.seed={self.seed}", *settings, *self.more]
            command = [sys.executable, "-m", "learner.run", "--config", config, *words]
            try:
                run_to_end(command, log=self.folder / f"{name}.log")
            except RunFailed as error:  # full batches of groups that differ: it ends where none do
                if "needs groups with different scores" not in str(error):
                    raise
        return metric_lines(self.folder / name)


def imported_sessions(runs: Runs) -> list[str]:
    """The newest solved sessions of the run before, out as chat messages and in again."""
    exported, chats = runs.folder / f"exported-{runs.seed}.jsonl", runs.folder / f"sessions-{runs.seed}.jsonl"
    demonstrations = runs.folder / f"sessions-{runs.seed}.parquet"
    run_to_end(
        [*CLI, "ledger", "export", str(runs.folder / f"demo-{runs.seed}"), "--messages", str(exported)],
        log=runs.folder / "export.log",
    )
    solved = [line for line in exported.read_text(encoding="utf-8").splitlines() if json.loads(line)["score"] >= 1.0]
    chats.write_text("".join(f"{line}\n" for line in solved[-SESSIONS:]), encoding="utf-8")
    run_to_end([*CLI, "import", str(chats), "--out", str(demonstrations)], log=runs.folder / "import.log")
    return [f"sft.demonstrations={demonstrations}"]


def read_walk(runs: Runs) -> list[str]:
    """A policy that can read, and the demo's tasks, each with a hint."""
    traces, tasks, name = runs.folder / "reader.jsonl", runs.folder / "hinted.parquet", f"reader-{runs.seed}"
    _write_lines(traces, reader_traces(4000, seed=runs.seed))
    hint = {"hint": AS_USUAL}
    write_tasks(tasks, [replace(task, extra_info=task.extra_info | hint) for task in walk_tasks(4000, seed=0)])
    runs.play(name, f"sft.demonstrations={traces}", "sft.validation=", "sft.steps=240", config="sft")
    return [f"model.path={runs.folder / name / 'last'}", "sft.demonstrations=", f"data.tasks={tasks}"]


def told_walk(runs: Runs) -> list[str]:
    """The demo's game and traces with words."""
    traces, loops = runs.folder / "told.jsonl", runs.folder / "told.yaml"
    _write_lines(traces, told_traces(800, seed=runs.seed))
    loops.write_text("- {name: env_agent, env: benchmarks.data.ToldWalk, max_steps: 8, deadline_s: 20}\n")
    return [f"sft.demonstrations={traces}", f"agents.loops={loops}"]


def _write_lines(path: Path, traces: Iterator[list[Message]]) -> None:
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in traces), encoding="utf-8")


def mixed_tasks(runs: Runs) -> list[str]:
    """Tasks that can be solved and others that cannot, and as many of the first kind to validate with."""
    tasks, held_out = walk_tasks(MIXED, seed=100 + runs.seed), walk_tasks(MIXED, seed=200 + runs.seed)
    outside = [
        replace(task, ground_truth=task.ground_truth | {"exit": [9, 2]})
        for index, task in enumerate(tasks)
        if index % 4
    ]
    files = {"data.tasks": [*tasks[::4], *outside], "data.validation.tasks": held_out}
    for key, some in files.items():
        write_tasks(runs.folder / f"{key}-{runs.seed}.parquet", some)
    return [f"{key}={runs.folder}/{key}-{runs.seed}.parquet" for key in files]


# What a run took.


def steps_to(lines: Lines) -> float | None:
    return solved_at([line["reward/mean"] for line in lines if "reward/mean" in line], target=TARGET)


def episodes_to(lines: Lines) -> float | None:
    """Of the steps until then, those that were played."""
    last, steps = steps_to(lines), [line for line in lines if "reward/mean" in line]
    return None if last is None else float(sum(line["batch/episodes"] for line in steps[: int(last)]))


def tokens_to(lines: Lines) -> float | None:
    reached = next((line["val/step"] for line in lines if line.get("val/mean", 0.0) >= TARGET), None)
    if reached is None:
        return None
    steps = [line for line in lines if "reward/mean" in line and line["step"] <= reached]
    return float(sum(line["throughput/tokens_per_s"] * line["time/step_s"] for line in steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two runs with `both`, the first with `one` beside it, the second with `other`. `made` makes what both need, `made_of_first`
    what the second needs and is made of the first run; each returns overrides. `first`: a name that comparisons with the same first
    run share."""

    first: str
    one: Sequence[str] = ()
    other: Sequence[str] = ()
    both: Sequence[str] = ()
    config: str = "demo"
    made: Callable[[Runs], list[str]] = lambda _: []
    made_of_first: Callable[[Runs], list[str]] = lambda _: []
    took: Callable[[Lines], float | None] = steps_to
    target: float | None = None
    """The largest ratio that is hoped for."""
    steps: int = 40


FEW = ("buffer.groups_per_step=4", "buffer.group_size=4")
WORDS = ("learner.recipe=sdpo", "learner.hints.sources=[hint]", "learner.epochs=4", "learner.lr=1e-3")
CURRICULUM = ("data.reward_manager=dapo", "data.validation.every=2", "data.validation.samples=2")
COMPARISONS = {
    "sft_then_rl_steps_ratio": Comparison(first="demo", made_of_first=imported_sessions, target=0.5),
    "sdpo_steps_ratio": Comparison(
        first="scores", made=read_walk, both=FEW, one=["learner.epochs=4"], other=WORDS, target=0.7, steps=24,
    ),
    "echo_steps_ratio": Comparison(first="told", config="walk_env", made=told_walk, other=["learner.echo.user=0.1"]),
    "curriculum_tokens_ratio": Comparison(
        first="mixed", made=mixed_tasks, both=CURRICULUM, other=["data.sampler=thompson"], took=tokens_to, target=0.8, steps=30,
    ),
    "replay_episodes_ratio": Comparison(first="demo", other=["buffer.replay.share=0.5"], took=episodes_to, target=0.8),
}  # fmt: skip


def compared(name: str, runs: Runs) -> dict[str, Any]:
    """Both runs of a seed."""
    pair = COMPARISONS[name]
    settings = [*pair.made(runs), f"run.steps={runs.steps or pair.steps}", *pair.both]
    first = runs.play(f"{pair.first}-{runs.seed}", *settings, *pair.one, config=pair.config)
    other = [*settings, *pair.made_of_first(runs), *pair.other]
    second = runs.play(f"{name}-{runs.seed}", *other, config=pair.config)
    took = [pair.took(lines) for lines in (first, second)]
    rewards = [[line["reward/mean"] for line in lines if "reward/mean" in line] for lines in (first, second)]
    found = {
        name: None if None in took else took[1] / took[0],  # type: ignore[operator]
        f"{name}_of": took,
        f"{name}_episodes": [episodes_to(lines) for lines in (first, second)],
        f"{name}_last_rewards": [mean(each[-WINDOW:]) for each in rewards],
    }
    if name == "echo_steps_ratio":
        found["echo_effect"] = mean(rewards[1]) - mean(rewards[0])
    return found


# A judge.


def scripted_judge(*, errs: float, seed: int) -> Callable[[str], str]:
    """Ranks answers to `letter_tasks`; `errs`: the share that it takes for the opposite."""
    draw = random.Random(seed)

    def answer(question: str) -> str:
        letter = next(key for key in KEYS if f"The exit is {NAMES[key]}." in question)
        said = {
            label: 10 * ((text.strip() == letter) != (draw.random() < errs))
            for label, text in re.findall(r"<(answer_\d+)>\n(.*?)\n</answer_\d+>", question, re.DOTALL)
        }
        return json.dumps(said)

    return answer


def letter_tasks() -> list[Task]:
    """One turn of the walk: the hint, and its letter."""
    return [
        Task(
            task_id=f"letter-{number}-{key}", ground_truth=key, agent_name="single_turn_agent",
            prompt=[{"role": "system", "content": RULES}, user(f"The exit is {NAMES[key]}.")],
        )
        for number in range(64)
        for key in KEYS
    ]  # fmt: skip


RANKED = ("data.scorer=judge", "learner.recipe=grpo", "learner.kl.coef=0")


def judged(runs: Runs, data: Path) -> dict[str, Any]:
    """A scripted judge, which the tiny model learns by, and a small model as its own judge."""
    tasks = runs.folder / "letters.parquet"
    write_tasks(tasks, letter_tasks())
    with scripted_model(scripted_judge(errs=JUDGE_ERRS, seed=runs.seed)) as url:
        scripted = runs.play(
            f"scripted-{runs.seed}", *RANKED, f"data.tasks={tasks}", "agents.command=[]", "env.command=[]",
            "data.judge={mode: ranking, truth: exact_match}", f"roles={{player: {{}}, judge: {{url: '{url}'}}}}",
            "agents.silence_s=null", f"run.steps={runs.steps or 8}", config="demo",
        )  # fmt: skip
    made = smollm2.make(data)
    small = runs.play(
        f"smollm2-{runs.seed}", *RANKED, f"model.path={made / smollm2.MODEL}", f"data.tasks={made / 'train.parquet'}",
        "data.validation.tasks=", "data.judge={mode: ranking, truth: gsm8k_flexible}",
        "roles={player: {}, judge: {frozen: 0}}", "buffer.groups_per_step=16", "buffer.group_size=4",
        "rollout.max_model_len=1024", f"run.steps={runs.steps or 2}", config="smollm2",
    )  # fmt: skip
    return {
        f"{name}{more}": mean(line[key] for line in lines if key in line)
        for name, lines in (("judge_agreement", small), ("judge_agreement_scripted", scripted))
        for more, key in (("", "judge/agreement_truth"), ("_orders", "judge/agreement_orders"))
    }


# Imports and losses: no run.


def chat(number: int) -> list[Message]:
    """A session of three answers, about a kilobyte, unlike all others."""
    draw = random.Random(number)
    words = [" ".join(draw.choices(("so", "then", "the", "list", "of", "files", "is", "read"), k=40)) for _ in range(6)]
    messages = [{"role": "system", "content": "You answer."}]
    for asked, said in zip(words[::2], words[1::2], strict=True):
        messages += [user(f"{number}: {asked}"), {"role": "assistant", "content": said}]
    return messages


def imported(runs: Runs, *, number: int = IMPORTED) -> dict[str, Any]:
    """Sessions a second, and peak memory in MiB."""
    found: dict[str, Any] = {}
    for form, of in (
        ("", lambda at: {"messages": chat(at), "score": 1.0}),
        ("atif_", lambda at: to_atif(Session(messages=chat(at), tools=None, score=1.0, source=f"s{at}", model="m"))),
    ):
        for part, size in (("tenth_", number // 10), ("", number)):
            source = runs.folder / f"{form}{size}.jsonl"
            with source.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(of(at)) + "\n" for at in range(size))
            began = time.monotonic()
            with PeakMemory().watched() as memory:
                command = [*CLI, "import", str(source), "--out", str(source.with_suffix(".parquet"))]
                run_to_end(command, log=runs.folder / "import.log", started=memory.started)
            found[f"import_{form}{part}peak_mib"] = memory.mib
        found[f"import_{form}sessions_per_s"] = number / (time.monotonic() - began)
    return found


def streams(runs: Runs) -> dict[str, Any]:
    """The losses of papers against the one of this project."""
    found = largest_difference(seed=runs.seed, batches=20)
    return {"loss_streams_max_diff": max(found.values()), "loss_streams_diffs": found}


OTHERS = ("judge_agreement", "import_sessions_per_s", "loss_streams_max_diff")


def measure(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """All figures of a seed, then of the next."""
    by_seed = list[dict[str, Any]]()
    for seed in arguments.seeds:
        runs = Runs(folder=folder, seed=seed, steps=arguments.steps, more=arguments.override)
        by_seed.append({"seed": seed})
        for name in arguments.only:
            if name in COMPARISONS:
                found = compared(name, runs)
            elif name == "judge_agreement":
                found = judged(runs, arguments.data.resolve())
            else:
                found = imported(runs) if name == "import_sessions_per_s" else streams(runs)
            print(f"seed {seed}, {name}: {json.dumps(found, default=float)}", flush=True)
            by_seed[-1] |= found
            yield {**over_seeds(by_seed), "seeds": by_seed}


def over_seeds(by_seed: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of each number, and whether it met its target; null where a seed has none."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for one in by_seed for name in one if name != "seed"):
        values = [one[name] for one in by_seed if name in one]
        if not any(isinstance(value, (list, dict)) for value in values):
            found[name] = None if None in values else mean(values)
            if name in COMPARISONS and (target := COMPARISONS[name].target) is not None:
                found[f"{name}_target"] = target
    return found


def main(argv: list[str] | None = None) -> int:
    parser = parser_of("data", doc=__doc__)
    names = [*COMPARISONS, *OTHERS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=None, help="updates of each run (default: each one's own)")
    parser.add_argument("--data", type=Path, default=Path("data/smollm2"), help="folder of SmolLM2 and its sums")
    parser.add_argument("--override", action="append", default=[], metavar="section.key=value", help="of all runs")
    arguments = parser.parse_args(argv)
    if arguments.steps is not None and arguments.steps < WINDOW:
        parser.error(f"--steps must be >= {WINDOW}, got {arguments.steps}")
    return play("data", arguments, measure, about=f"target: mean reward of {WINDOW} steps >= {TARGET}")


if __name__ == "__main__":
    sys.exit(main())
