"""Parts of `benchmarks.live` with other models: one that is watched and then relieved, and a real pretrained one that learns."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, median
from typing import Any

import openai

from benchmarks.harness import RunFailed, in_turn, scripted_model
from benchmarks.live_run import QUESTIONS, START_S, TINY, USERS, WINDOW, LiveRun, has_m, learned, sessions
from benchmarks.live_wishes import READER, WORDS, reader
from env_adapters import smollm2

UPSTREAM = "large"
WATCHED, AFTER, TIMED = 200, 128, 40
"""Sessions of the other model before it is learned from; sessions after; pairs of requests whose latency is compared."""


def takeover(folder: Path, seed: int, most: int) -> dict[str, Any]:
    """Another model is watched, learned from, and relieved of nine sessions in ten."""
    draw, said = random.Random(0), [word for word in WORDS if has_m(word)]
    with scripted_model(lambda _: draw.choice(said)) as url:
        words = [
            f"model.path={reader(folder, seed)}", *TINY, *READER, f"serve.upstream.url={url}", f"serve.upstream.model={UPSTREAM}",
            "serve.upstream.terms_allow_learning=true", f"serve.upstream.lesson_sessions={WATCHED}", "serve.upstream.step=0.9",
            "serve.upstream.floor=0.1", "sft.lr=5e-3", "sft.epochs=4", f"run.seed={seed}",
        ]  # fmt: skip
        with LiveRun(folder, f"takeover-{seed}", *words) as run:
            direct = openai.OpenAI(base_url=url, api_key="none")
            took = in_turn(
                {"through": lambda: _seconds(run.client), "direct": lambda: _seconds(direct)}, repeats=TIMED + 10
            )
            _used(run, WATCHED - TIMED - 10, seed=seed)
            deadline = time.monotonic() + START_S
            while json.loads((run.folder / "versions" / "served.json").read_text())["version"] < 1:
                if time.monotonic() > deadline:
                    raise RunFailed(f"a version that has learned must be served within {START_S:g} s; none was")
                time.sleep(0.2)
            after = _used(run, AFTER, seed=seed + 1)
    scores = {who: [score for name, score in after if name == who] for who in (UPSTREAM, "policy")}
    own, other = (fmean(scores[who]) if scores[who] else None for who in ("policy", UPSTREAM))
    return {
        "takeover_share": len(scores["policy"]) / AFTER,
        "takeover_score": own,
        "takeover_upstream_score": other,
        "upstream_overhead_ms": 1000 * (median(took["through"][10:]) - median(took["direct"][10:])),
        "upstream_direct_ms": 1000 * median(took["direct"][10:]),
    }


def _seconds(client: openai.OpenAI) -> float:
    began = time.perf_counter()
    client.chat.completions.create(model="policy", messages=[{"role": "user", "content": QUESTIONS[0]}])
    return time.perf_counter() - began


def _used(run: LiveRun, number: int, *, seed: int) -> list[tuple[str, float]]:
    """(the model that answered, its score) of sessions."""
    draw = random.Random(seed)

    def one(question: str) -> tuple[str, float]:
        answer = run.client.chat.completions.create(model="policy", messages=[{"role": "user", "content": question}])
        score = has_m(answer.choices[0].message.content or "")
        run.say(answer.id, score=score)
        return answer.model, score

    with ThreadPoolExecutor(USERS) as users:
        return list(users.map(one, [draw.choice(QUESTIONS) for _ in range(number)]))


THINGS = [
    "a fruit", "a colour", "an animal", "a city", "a tree", "a river", "a tool", "a planet", "a metal", "a bird", "a country",
    "a flower",
]  # fmt: skip
MOST_WORDS = 6


def is_short(text: str) -> float:
    """The wish of whoever asks the pretrained model."""
    return float(0 < len(text.split()) <= MOST_WORDS)


def real(folder: Path, seed: int, most: int) -> dict[str, Any]:
    """SmolLM2-135M learns to be short, by words and scores."""
    made = smollm2.make(Path("data/smollm2").resolve())
    words = [
        f"model.path={made / smollm2.MODEL}", "server.port=0", "rollout.max_tokens=24", "rollout.max_model_len=256",
        "run.checkpoints.every=0", "serve.silence_s=0.5", "serve.gate.every=1", "buffer.groups_per_step=16",
        "learner.hints.coef=1.0", "learner.epochs=2", "learner.lr=3e-4", f"run.seed={seed}",
    ]  # fmt: skip
    with LiveRun(folder, f"real-{seed}", *words) as run:
        scores, _ = sessions(
            run, is_short, until=learned, most=min(most, 640), seed=seed, words="Say it in one word.",
            questions=[f"Name {thing}." for thing in THINGS],
        )  # fmt: skip
        steps = run.steps
    return {
        "real_preference_first": sum(scores[:WINDOW]) / WINDOW,
        "real_preference_last": sum(scores[-WINDOW:]) / WINDOW,
        "real_sessions_to_0_8": len(scores) if learned(scores) else None,
        "real_updates": len(steps),
        "real_max_logprob_diff": max(step["policy/max_logprob_diff"] for step in steps),
    }
