"""A live run as a process, and scripted users of it: what the parts of `benchmarks.live` share."""

from __future__ import annotations

import copy
import os
import random
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil

from benchmarks.harness import ROOT, RunFailed, metric_lines

QUESTIONS = ["Say a word.", "Name a word.", "Write a word.", "Find a word."]
WINDOW = 64
TARGET = 0.8
BATCH = 16
USERS = 8
"""Requests at once."""
START_S = 300.0
TINY = [
    "run.checkpoints.every=0", "server.port=0", "rollout.max_tokens=6", "rollout.max_model_len=512", "serve.silence_s=0.5",
    f"buffer.groups_per_step={BATCH}", "learner.lr=1e-2", "learner.entropy_coef=0.01", "learner.kl.coef=0.001",
]  # fmt: skip


class LiveRun:
    """A run of `understudy serve` and a client of one user of it."""

    def __init__(self, folder: Path, name: str, *overrides: str) -> None:
        self.folder = folder / name
        self._words = [f"run.dir={folder}", f"run.name={name}", *overrides]
        self._log = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LiveRun:
        self.key = self.command("serve", "keys", "add", "ann", *self._words).strip()
        self.start()
        return self

    def of(self, user: str) -> LiveRun:
        """The same run, seen by another user."""
        other = copy.copy(self)
        other.key = self.command("serve", "keys", "add", user, *self._words).strip()
        other.client = openai.OpenAI(base_url=self.url, api_key=other.key, timeout=120.0)
        other.http = httpx.Client(headers={"Authorization": f"Bearer {other.key}"}, timeout=120.0)
        return other

    def start(self) -> None:
        """Start it, or start it again; returns when it answers."""
        with self._log.open("ab") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "learner.cli", "serve", *self._words], cwd=ROOT, stdout=sink, stderr=subprocess.STDOUT,
                env={"OMP_NUM_THREADS": "1", **os.environ}, start_new_session=True,
            )  # fmt: skip
        deadline, place = time.monotonic() + START_S, self.folder / "agent.env"
        while not place.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RunFailed(
                    f"a live run must start; its output ends:\n{self._log.read_text(errors='replace')[-2000:]}"
                )
            time.sleep(0.2)
        told = dict(word.split("=", 1) for word in shlex.split(place.read_text()))
        self.url = told["OPENAI_BASE_URL"]
        self.client = openai.OpenAI(base_url=self.url, api_key=self.key, timeout=120.0)
        self.http = httpx.Client(headers={"Authorization": f"Bearer {self.key}"}, timeout=120.0)

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(60)
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def command(self, *words: str) -> str:
        """What `understudy` prints. Raises RunFailed."""
        done = subprocess.run([sys.executable, "-m", "learner.cli", *words], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RunFailed(f"understudy {shlex.join(words)}: {done.stderr}")
        return done.stdout

    def ask(self, question: str, *, before: Sequence[str] = (), **more: Any) -> tuple[str, str, float]:
        """(id, text, seconds) of an answer. `before`: what user and model have said, in turn."""
        began = time.monotonic()
        said: list[Any] = [
            {"role": ("user", "assistant")[place % 2], "content": text}
            for place, text in enumerate((*before, question))
        ]
        answer = self.client.chat.completions.create(model="policy", messages=said, **more)
        return answer.id, answer.choices[0].message.content or "", time.monotonic() - began

    def say(self, response_id: str, **feedback: Any) -> None:
        """Feedback on an answer."""
        self.http.post(f"{self.url[:-3]}/feedback", json={"response_id": response_id, **feedback}).raise_for_status()

    def change(self, **body: Any) -> None:
        """Serve another version."""
        told = dict(word.split("=", 1) for word in shlex.split((self.folder / "admin.env").read_text()))
        headers = {"Authorization": f"Bearer {told['ADMIN_KEY']}"}
        httpx.post(f"{told['SERVER_URL']}/versions", json=body, headers=headers, timeout=120.0).raise_for_status()

    @property
    def steps(self) -> list[dict[str, Any]]:
        is_there = (self.folder / "metrics.jsonl").is_file()
        return [line for line in metric_lines(self.folder) if "reward/mean" in line] if is_there else []

    def children(self, what: str) -> list[psutil.Process]:
        """The run's processes whose title or command has this word."""
        assert self._process is not None
        found = []
        for child in psutil.Process(self._process.pid).children(recursive=True):
            with suppress(psutil.Error):
                if what in " ".join(child.cmdline()) or what in child.name():
                    found.append(child)
        return found


def sessions(
    run: LiveRun,
    likes: Callable[[str], float],
    *,
    until: Callable[[list[float]], bool],
    most: int,
    seed: int,
    words: str = "",
    is_scored: bool = True,
    batch: int = BATCH,
    questions: Sequence[str] = QUESTIONS,
) -> tuple[list[float], list[float]]:
    """Scores and latencies of sessions that users begin one after the other, `USERS` at once, until `until` says so of all scores
    or `most` were played. `words`: what they say of an answer that is not as they wish; `is_scored`: they give its
    score; `batch`: sessions of an update, of which two may be ahead."""
    draw, lock = random.Random(seed), threading.Lock()
    scores: list[float] = []
    seconds: list[float] = []
    told, before = [0], len(run.steps)

    def play_some(_: int) -> None:
        while True:
            with lock:
                if len(scores) >= most or until(scores):
                    return
                is_ahead = told[0] >= batch * (len(run.steps) - before + 2)
                told[0] += not is_ahead
                question = draw.choice(questions)
            if is_ahead:
                time.sleep(0.05)
                continue
            name, text, took = run.ask(question)
            score = likes(text)
            said = ({"score": score} if is_scored else {}) | ({"text": words} if words and score < 1 else {})
            if said:
                run.say(name, **said)
            with lock:
                told[0] -= not said
                scores.append(score)
                seconds.append(took)

    with ThreadPoolExecutor(USERS) as users:
        list(users.map(play_some, range(USERS)))
    return scores, seconds


def learned(scores: list[float]) -> bool:
    """Whether the last sessions are as wished."""
    return len(scores) >= WINDOW and sum(scores[-WINDOW:]) / WINDOW >= TARGET


def has_m(text: str) -> float:
    """The wish."""
    return float("m" in text.lower())
