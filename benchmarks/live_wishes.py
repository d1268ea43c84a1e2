"""Parts of `benchmarks.live` with a model that can read: what words are worth beside scores, and what wishes cost.

The tiny model first learns by SFT to answer with one of some words, to do as a second message says (`WISHES`), and the alphabet,
which nobody ever complains about. As a pretrained model it can read what people say of it; it does not know what they wish.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.harness import whole_run
from benchmarks.live_run import BATCH, QUESTIONS, TINY, USERS, WINDOW, LiveRun, has_m, learned, sessions

WORDS = [
    "moon", "home", "time", "team", "some", "man", "map", "farm", "room", "arm", "name", "storm", "river", "ship",
    "road", "light", "tree", "water", "day", "sea", "bird", "sun", "hill", "town", "word", "story", "house", "window",
    "green", "orange", "sand", "bell", "door", "fire", "glass", "horse", "king", "leaf", "note", "paper", "queen",
    "rain", "salt", "train",
]  # fmt: skip
ALARMS = ("entropy_gone", "falling_entropy", "fallen_reward")
"""What `understudy why` calls a collapse."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"
ALPHABET = {f"What comes after {LETTERS[place]}?": LETTERS[place + 1] for place in range(25)}
"""What the model knows, and nobody speaks of."""


def has_stop(text: str) -> float:
    """The second wish."""
    return float(text.endswith("."))


WISHES: dict[str, Callable[[str], float]] = {
    "With an m.": has_m,
    "Without an m.": lambda text: 1 - has_m(text),
    "With a full stop.": has_stop,
    "Without a full stop.": lambda text: 1 - has_stop(text),
}


def reader_demonstrations(number: int, *, seed: int) -> Iterator[dict[str, Any]]:
    """A quarter each: answers, the alphabet; half: answers as wished."""
    draw = random.Random(seed)

    def user(text: str) -> dict[str, str]:
        return {"role": "user", "content": text}

    for index in range(number):
        said = [user(draw.choice(QUESTIONS))]
        answer = draw.choice(WORDS) + draw.choice(["", "."])
        if index % 4 == 0:
            place = draw.randrange(25)
            said, answer = [user([*ALPHABET][place])], LETTERS[place + 1]
        elif index % 4 > 1:
            wish, holds = draw.choice(list(WISHES.items()))
            said.append(user(wish))
            answer = draw.choice([word + end for word in WORDS for end in ("", ".") if holds(word + end)])
        yield {"messages": [*said, {"role": "assistant", "content": answer}]}


def reader(folder: Path, seed: int) -> Path:
    """The folder of the model."""
    made = folder / f"reader-{seed}" / "last"
    if not made.exists():
        path = folder / f"reader-{seed}.jsonl"
        path.write_text(
            "".join(json.dumps(each) + "\n" for each in reader_demonstrations(8000, seed=seed)), encoding="utf-8"
        )
        words = [f"sft.demonstrations={path}", "sft.validation=", "sft.epochs=3", f"run.seed={seed}"]
        whole_run(folder, f"reader-{seed}", *words, config="sft")
    return made


def write_tasks(path: Path, answers: Iterable[tuple[str, str]]) -> Path:
    """A task for each question, for a gate."""
    import pyarrow
    import pyarrow.parquet

    rows = [
        {"prompt": [{"role": "user", "content": text}], "reward_model": {"ground_truth": truth}, "data_source": "live"}
        for text, truth in answers
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def ability(run: LiveRun) -> float:
    """Share of the alphabet that it knows: each letter four times."""

    def knows(question: str) -> float:
        return float(run.ask(question)[1].strip() == ALPHABET[question])

    with ThreadPoolExecutor(USERS) as asking:
        return fmean(asking.map(knows, [*ALPHABET] * 4))


@dataclass(frozen=True, slots=True)
class Side:
    """How people tell what they think, and what learns from it: as hard as the alphabet bears for one wish, but for `hard_scores`,
    which learn as hard as words do."""

    settings: Sequence[str] = ()
    is_scored: bool = True
    has_words: bool = False
    batch: int = BATCH
    is_guarded: bool = False
    """The alphabet is the gate's."""


READER = ["serve.gate.every=1", "learner.lr=1e-3", "learner.kl.coef=0.01"]
"""What bears a model that knows something: each update is served, and none is as wide as a random model's."""
WORDS_ALONE = ["learner.recipe=sdpo", "learner.epochs=4"]
SIDES = {
    "scores": Side(),
    "words": Side(WORDS_ALONE, is_scored=False, has_words=True, batch=8),
    "hard_scores": Side(["learner.epochs=4"], batch=8),
    "both": Side(["learner.hints.coef=1.0"], has_words=True),
    "guarded_scores": Side(["learner.kl.coef=0.3"], is_guarded=True),
    "guarded_words": Side(
        [*WORDS_ALONE, "learner.kl.coef=0.1"], is_scored=False, has_words=True, batch=8, is_guarded=True
    ),
}


def wishes(folder: Path, seed: int, most: int) -> dict[str, Any]:
    """A wish is learned, then a second one, by each side."""
    found = {name: two_wishes(folder, seed, most, name=name) for name in SIDES}
    plain = found["scores"]["sessions"]
    ratios = {name: own["sessions"] / plain if own["sessions"] and plain else None for name, own in found.items()}
    told = {f"{name}_{figure}": value for name, own in found.items() for figure, value in own.items()}
    return {f"{name}_vs_scores": ratio for name, ratio in ratios.items() if name != "scores"} | told


def two_wishes(folder: Path, seed: int, most: int, *, name: str) -> dict[str, Any]:
    """Sessions of each wish, what is kept of the first one with the second, and of the alphabet with each."""
    side = SIDES[name]
    words = [
        f"model.path={reader(folder, seed)}", *TINY, *READER, *side.settings, f"buffer.groups_per_step={side.batch}",
        f"run.seed={seed}",
    ]  # fmt: skip
    if side.is_guarded:
        tasks = write_tasks(folder / "alphabet.parquet", ALPHABET.items())
        words += [f"serve.gate.tasks={tasks}", "serve.gate.samples=4", "data.scorer=exact_match"]
    with LiveRun(folder, f"{name}-{seed}", *words) as run:
        before = ability(run)
        learned_at, kept, alarms = list[int | None](), list[float](), list[list[str]]()
        for number, (wish, holds) in enumerate((("With an m.", has_m), ("With a full stop.", has_stop))):
            first: list[float] = []

            def likes(text: str, first: list[float] = first, holds: Callable[[str], float] = holds) -> float:
                first.append(has_m(text))
                return holds(text)

            scores, _ = sessions(
                run, likes, until=learned, most=most, seed=seed + number, words=wish if side.has_words else "",
                is_scored=side.is_scored, batch=side.batch,
            )  # fmt: skip
            learned_at.append(len(scores) if learned(scores) else None)
            kept.append(ability(run) / before)
            alarms.append([each for each in ALARMS if f"[{each}]" in run.command("why", str(run.folder))])
        steps = run.steps
    return {
        "sessions": learned_at[0],
        "ability_kept": kept[0],
        "alarms": alarms[0],
        "second_sessions": learned_at[1],
        "second_wish": sum(first[-WINDOW:]) / WINDOW,
        "second_ability_kept": kept[1],
        "second_alarms": alarms[1],
        "candidates": steps[-1].get("live/gate_candidates"),
        "refused": steps[-1].get("live/gate_refused"),
        "max_logprob_diff": max(step["policy/max_logprob_diff"] for step in steps),
    }
