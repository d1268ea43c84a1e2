"""Parts of `benchmarks.live` with a model that can read: what words are worth beside scores, and what wishes cost.

The tiny model first learns by SFT to answer with one of some words, to do as a second message says (`WISHES`), and the alphabet,
which nobody ever complains about. As a pretrained model it can read what people say of it; it does not know what they wish.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.harness import whole_run
from benchmarks.live_run import QUESTIONS, USERS, LiveRun, has_m

WORDS = [
    "moon",
    "home",
    "time",
    "team",
    "some",
    "man",
    "map",
    "farm",
    "room",
    "arm",
    "name",
    "storm",
    "river",
    "ship",
    "road",
    "light",
    "tree",
    "water",
    "day",
    "sea",
    "bird",
    "sun",
    "hill",
    "town",
    "word",
    "story",
    "house",
    "window",
    "green",
    "orange",
    "sand",
    "bell",
    "door",
    "fire",
    "glass",
    "horse",
    "king",
    "leaf",
    "note",
    "paper",
    "queen",
    "rain",
    "salt",
    "train",
]
LETTERS = "abcdefghijklmnopqrstuvwxyz"


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
            said, answer = [user(f"What comes after {LETTERS[place]}?")], LETTERS[place + 1]
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


def ability(run: LiveRun) -> float:
    """Share of the alphabet that it knows: each letter four times."""

    def knows(place: int) -> float:
        return float(run.ask(f"What comes after {LETTERS[place]}?")[1].strip() == LETTERS[place + 1])

    with ThreadPoolExecutor(USERS) as asking:
        return fmean(asking.map(knows, [*range(25)] * 4))
