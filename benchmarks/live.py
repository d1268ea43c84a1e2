"""A live run (`understudy serve`) in use by scripted users: what it learns of their wishes, and whether serving stands.

`python -m benchmarks.live [--seeds 0] [--only PART ...] [--json PATH]`. Users ask one of four questions and wish that the answer
has an `m`, which no prompt says; they score each answer by its id, and begin no more sessions than two batches ahead of what was
trained. Parts, with the demo's tiny model but for `real`; each ends within ten minutes for one seed:

- preference: `preference_first`, `preference_last`: share of answers as wished in the first and in the last 64 sessions;
  `sessions_to_0_8`: sessions until 64 in a row have that share of 0.8; `wish_taken_back`: sessions after the wish was turned around
  until 0.8 of the answers have no `m`; `served_p50_vs_idle`: median latency of eight users who do not wait for updates, during ten
  of them over before the first; `served_p50_vs_idle_whole`: the same of a run that trains all weights and loads them, no adapter.
- replay: `replayed_vs_fresh`: sessions until 0.8 where half of each batch are old sessions, over those with new ones alone;
  `replayed_counted`: share of their tokens that moves the policy.
- gate: the wish is the gate's, too, and is learned; then feedback is turned around. `poisoned_promoted`: candidates of later
  sessions alone that were promoted, of the first five, `poisoned_candidates`; `bad_version_served_s`: seconds until a version that
  was promoted by force is taken back; `wish_promoted`: candidates that were promoted before, of `wish_candidates`.
- two_users: two users wish the opposite at once, each with an adapter of its own. `wish_of_ann`, `wish_of_bob`: share of the last
  64 answers as each wished.
- kills: learner, engine (while it plays the gate's tasks), judge and the other model are killed in turn while users go on.
  `failed_requests`, of `requests`; `sessions_cut`: requests of sessions that the other model had begun, which go on with it alone.
- wishes: the model has learned to read first (`benchmarks.live_wishes`). Users give scores; words alone, of answers that are not as
  they wish; or both. `words_vs_scores`: sessions to 0.8 with words over those with scores; `hard_scores_vs_scores`: with scores
  that train as many epochs of as small a batch as words do. `guarded_`: the alphabet is the gate's, and the KL larger. Of each
  side, `ability_kept`: what users are served knows of it after over before, `alarms`: which of `ALARMS` `understudy why` raises,
  and the same (`second_`) after a second wish was learned, to end with a full stop; `second_wish`: share of the last 64 answers
  that have an `m` then; `refused` of `candidates`.
- takeover: another model is watched for 200 sessions. `takeover_share`: of the 128 sessions after the policy has learned from them,
  the share that it answers (at most 0.9); `takeover_score` beside `takeover_upstream_score`; `upstream_overhead_ms`: median latency
  of the other model through the run, less that without it.
- real: SmolLM2-135M, asked to name things, is told to be short. `real_preference_first`, `real_preference_last`,
  `real_sessions_to_0_8`.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import openai
import psutil

from benchmarks.harness import free_port, parser_of, play, scripted_model
from benchmarks.live_others import real, takeover
from benchmarks.live_run import BATCH, QUESTIONS, TINY, USERS, WINDOW, LiveRun, has_m, learned, sessions
from benchmarks.live_wishes import wishes, write_tasks

UPSTREAM_SAYS = "moon"
OLD_SESSIONS = ["buffer.replay.share=0.5", "buffer.replay.only=all"]


def served_vs_idle(folder: Path, name: str, *words: str) -> float:
    """Median latency of users who ask one question after the other, while their scores are learned over before."""
    with LiveRun(folder, name, *TINY, *words) as run:
        with ThreadPoolExecutor(USERS) as users:
            idle = median(users.map(lambda number: run.ask(QUESTIONS[number % 4])[2], range(32 * USERS)))
        _, seconds = sessions(run, has_m, until=lambda _: len(run.steps) >= 10, most=10_000, seed=0, batch=10_000)
    return median(seconds) / idle


def preference(folder: Path, seed: int, most: int) -> dict[str, Any]:
    """A wish is learned, and another in its place."""
    with LiveRun(folder, f"preference-{seed}", *TINY, f"run.seed={seed}") as run:
        scores, _ = sessions(run, has_m, until=learned, most=most, seed=seed)
        back, _ = sessions(run, lambda text: 1 - has_m(text), until=learned, most=most, seed=seed + 1)
        steps = run.steps
    return {
        "preference_first": sum(scores[:WINDOW]) / WINDOW,
        "preference_last": sum(scores[-WINDOW:]) / WINDOW,
        "sessions_to_0_8": len(scores) if learned(scores) else None,
        "wish_taken_back": len(back) if learned(back) else None,
        "served_p50_vs_idle": served_vs_idle(folder, f"adapter-{seed}"),
        "served_p50_vs_idle_whole": served_vs_idle(
            folder, f"whole-{seed}", "learner.lora={rank: 0, alpha: 16}", "learner.lr=3e-4"
        ),
        "updates": len(steps),
        "max_logprob_diff": max(step["policy/max_logprob_diff"] for step in steps),
    }


def gate(folder: Path, seed: int, most: int) -> dict[str, Any]:
    """What feedback that is turned around does, and a version that is promoted by force."""
    tasks = write_tasks(folder / "wish.parquet", [(text, "m") for text in QUESTIONS * 16])
    guarded = [
        f"serve.gate.tasks={tasks}", "serve.gate.every=2", "serve.gate.samples=2", "data.scorer=contains",
        "serve.gate.max_drift=5",  # the random model has 5.6 nats
    ]  # fmt: skip
    with LiveRun(folder, f"gate-{seed}", *TINY, *guarded, f"run.seed={seed}") as run:
        scores, _ = sessions(run, has_m, until=learned, most=most, seed=seed)
        good = _versions(run)["served"]
        turned = len(scores) // BATCH + 1  # the last update in which a session from before may be

        def poisoned() -> list[dict[str, Any]]:
            return [each for each in _judged(run) if each["version"] - 2 >= turned][:5]

        sessions(run, lambda text: 1 - has_m(text), until=lambda _: len(poisoned()) >= 5, most=most, seed=seed + 1)
        after, wished = poisoned(), [each for each in _judged(run) if each["version"] - 2 < turned]
        promoted = [each for each in after if each["state"] == "promoted"]
        bad = after[-1]["version"]
        run.command("serve", "promote", str(run.folder), str(bad))
        began = time.monotonic()
        run.change(action="rollback", version=good)
        took = time.monotonic() - began
        served = _versions(run)["served"]
    return {
        "poisoned_promoted": len(promoted), "poisoned_candidates": len(after), "bad_version_served_s": took,
        "served_again": served == good, "wish_candidates": len(wished),
        "wish_promoted": sum(each["state"] == "promoted" for each in wished),
    }  # fmt: skip


def replay(folder: Path, seed: int, most: int) -> dict[str, Any]:
    """A wish is learned, by new sessions alone and with old ones as half of each batch."""
    found = dict[str, int | None]()
    for name, words, batch in (("fresh", [], BATCH), ("replayed", OLD_SESSIONS, BATCH // 2)):
        with LiveRun(folder, f"{name}-{seed}", *TINY, *words, f"run.seed={seed}") as run:
            scores, _ = sessions(run, has_m, until=learned, most=most, seed=seed, batch=batch)
            found[name] = len(scores) if learned(scores) else None
            counted = [step["replay/counted_share"] for step in run.steps if step.get("replay/groups")]
    fresh, replayed = found["fresh"], found["replayed"]
    return {
        "fresh_sessions": fresh, "replayed_sessions": replayed,
        "replayed_vs_fresh": replayed / fresh if replayed and fresh else None, "replayed_counted": median(counted),
    }  # fmt: skip


def _versions(run: LiveRun) -> dict[str, Any]:
    folder, found = run.folder / "versions", []
    for path in folder.glob("v*/version.json"):
        with suppress(FileNotFoundError):  # one that was never offered goes
            found.append(json.loads(path.read_text()))
    served = json.loads((folder / "served.json").read_text())["version"]
    return {"served": served, "versions": sorted(found, key=lambda each: each["version"])}


def _judged(run: LiveRun) -> list[dict[str, Any]]:
    """The candidates of which the gate has said something, the oldest first."""
    return [each for each in _versions(run)["versions"] if each["state"] != "candidate"]


class OtherModel:
    """A scripted model in a process of its own, that can be killed and started again at its address."""

    def __init__(self, text: str) -> None:
        self._text, self._port = text, free_port()
        self.url = f"http://127.0.0.1:{self._port}/v1"
        self.start()

    def start(self) -> None:
        self._process = get_context("spawn").Process(target=_answer, args=(self._text, self._port), daemon=True)
        self._process.start()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _answer(text: str, port: int) -> None:
    with scripted_model(lambda _: text, port=port):
        signal.pause()


def kills(folder: Path, seed: int, most: int) -> dict[str, Any]:
    """Users go on while learner, engine (with the gate's tasks on it), judge and the other model are killed in turn, each until
    two more steps were made."""
    failed, cut = list[str](), 0
    judge, upstream = OtherModel('{"score": 9, "hint": ""}'), OtherModel(UPSTREAM_SAYS)
    tasks = write_tasks(folder / "kills.parquet", [(text, "m") for text in QUESTIONS * 4])
    words = [
        f"serve.gate.tasks={tasks}", "serve.gate.every=1", "serve.gate.margin=1", "data.scorer=contains",
        f"serve.judge.model={judge.url}", f"serve.upstream.url={upstream.url}", "serve.upstream.model=large",
        "serve.upstream.terms_allow_learning=true", "serve.upstream.share=0.5",
    ]  # fmt: skip
    with LiveRun(folder, f"kills-{seed}", *TINY, *words, f"run.seed={seed}") as run:
        ended, count = threading.Event(), 0

        def use(number: int) -> None:
            nonlocal cut, count
            while not ended.is_set():
                text = ""
                try:
                    name, text, _ = run.ask(QUESTIONS[number % 4])
                    run.say(name, score=has_m(text))
                    run.ask("Thanks.", before=[QUESTIONS[number % 4], text])
                    count += 2
                except (openai.OpenAIError, httpx.HTTPError) as error:
                    if text == UPSTREAM_SAYS and "serve.upstream" in str(error):
                        cut += 1
                    else:
                        failed.append(repr(error)[:200])

        def kill(what: str) -> int:
            found = run.children(what)
            for child in found:
                with suppress(psutil.Error):
                    child.kill()
            return len(found)

        def until_two_steps() -> None:
            steps, deadline = len(run.steps), time.monotonic() + 120
            while len(run.steps) < steps + 2 and time.monotonic() < deadline:
                time.sleep(0.2)

        killed = dict[str, int]()
        with ThreadPoolExecutor(4) as users:
            using = [users.submit(use, number) for number in range(4)]
            while _versions(run)["served"] < 1:  # then the policy answers where the other model does not
                until_two_steps()
            for what in ("rank", "EngineCore") * 2:
                until = time.monotonic() + 120 * (what == "EngineCore")  # it plays a candidate's tasks
                while _versions(run)["versions"][-1]["state"] != "candidate" and time.monotonic() < until:
                    time.sleep(0.01)
                killed[what] = killed.get(what, 0) + kill(what)
                until_two_steps()
            for name, model in (("judge", judge), ("upstream", upstream)):
                killed[name] = 1
                model.kill()
                until_two_steps()
                model.start()
                until_two_steps()
            ended.set()
            for each in using:
                each.result()
        steps = run.steps
    return {
        "failed_requests": len(failed),
        "sessions_cut": cut,
        "requests": count,
        "killed": killed,
        "failures": failed[:5],
        "updates_in_all": len(steps),
        "judge_failed": steps[-1].get("live/judge_failed"),
        "upstream_down": steps[-1].get("upstream/down"),
    }


def two_users(folder: Path, seed: int, most: int) -> dict[str, Any]:
    """Two users wish the opposite, each with an adapter of its own."""
    words = ["roles={ann: {}, bob: {}}", "learner.lora.per_role=true", f"run.seed={seed}"]
    with LiveRun(folder, f"two-{seed}", *TINY, *words) as ann:
        bob = ann.of("bob")
        with ThreadPoolExecutor(2) as both:
            hers = both.submit(sessions, ann, has_m, until=learned, most=most, seed=seed)
            his = both.submit(sessions, bob, lambda text: 1 - has_m(text), until=_never, most=most // 2, seed=seed + 1)
        last = {"ann": hers.result()[0][-WINDOW:], "bob": his.result()[0][-WINDOW:]}
    return {f"wish_of_{name}": sum(scores) / WINDOW for name, scores in last.items()}


def _never(_: list[float]) -> bool:
    return False


PARTS = {
    "two_users": two_users, "preference": preference, "replay": replay, "gate": gate, "kills": kills, "wishes": wishes,
    "takeover": takeover, "real": real,
}  # fmt: skip


def measure(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Each part with each seed."""
    for name in arguments.only:
        runs = []
        for seed in arguments.seeds:
            runs.append(PARTS[name](folder, seed, arguments.most))
            print(f"{name}, seed {seed}: {runs[-1]}", flush=True)
            yield {f"{name}_runs": runs}
        for figure, value in runs[0].items():
            values = [run[figure] for run in runs]
            if isinstance(value, int | float) and None not in values:
                yield {figure: median(values)}


def main(argv: list[str] | None = None) -> int:
    parser = parser_of("live", doc=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--most", type=int, default=3000, help="most sessions of a wish (default 3000)")
    arguments = parser.parse_args(argv)
    return play("live", arguments, measure)


if __name__ == "__main__":
    sys.exit(main())
