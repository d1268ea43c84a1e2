"""Rules of env_adapters/scoring/rewards.py and scorers.py, learner/algorithms/overlong_penalty.py, and the ledger's
filter of equal scores."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import httpx2
import pytest

from buffers.errors import ScoreError, TaskError
from buffers.ledger.ledger import Ledger
from buffers.outgoing import SCORER
from buffers.records import ScoreDetail, Task, TrainBatch, Verdict
from env_adapters.scoring import rewards
from env_adapters.scoring.rewards import Rewards
from env_adapters.scoring.scorers import SCORERS
from learner.algorithms.overlong_penalty import overlong_penalty, with_overlong_penalty
from learner.recovery.failure_watch import Streak
from tests.support.buffer_parts import make_ready, make_round, open_running, scored_by_group_state
from tests.support.faults.hostile_http import BOMB, ENDLESS, MIB, hostile, whole
from tests.support.learner_parts import make_row
from tests.support.patience import PATIENCE_S


def task(truth: object = "18", *, source: str = "unknown") -> Task:
    return Task(task_id="t", prompt=[{"role": "user", "content": "?"}], ground_truth=truth, data_source=source)


@pytest.mark.parametrize(
    ("answer", "strict", "flexible"),
    [
        ("The answer is #### 18", 1.0, 1.0),
        ("#### 18", 1.0, 1.0),
        ("#### 20", 0.0, 0.0),
        ("first #### 20, no: #### 18", 1.0, 1.0),
        ("The answer is 18.", 0.0, 1.0),
        ("18 apples, so 20", 0.0, 0.0),
        ("#### 18.0", 0.0, 0.0),
        ("No answer here", 0.0, 0.0),
        ("18 ...", 0.0, 1.0),
        ("#### 18" + " " * 400, 0.0, 0.0),  # too far from the end
    ],
)
def test_gsm8k_answers_are_found_strictly_and_flexibly(answer: str, strict: float, flexible: float) -> None:
    assert SCORERS["gsm8k_strict"](task(), answer) == strict
    assert SCORERS["gsm8k_flexible"](task(), answer) == flexible


def test_gsm8k_commas_and_signs_do_not_matter_and_do() -> None:
    assert SCORERS["gsm8k_strict"](task("1234"), "#### 1,234") == 1.0
    assert SCORERS["gsm8k_flexible"](task("-5"), "it is -5") == 1.0
    assert SCORERS["gsm8k_strict"](task("5"), "#### -5") == 0.0


@pytest.mark.parametrize("truth", [None, ["18"], {"answer": 18}, ""])
async def test_what_is_no_truth_is_compared_with_no_answer(truth: object) -> None:
    for name in ("exact_match", "contains", "gsm8k_strict", "gsm8k_flexible"):
        rewards = Rewards({"mine": name, "default": "json_line"})
        for answer in ("None", str(truth), "#### None"):
            with pytest.raises(ScoreError, match="ground_truth must be a text or a number"):
                await rewards.score(task(truth, source="mine"), answer)
        with pytest.raises(TaskError, match=f"data.scorer={name} compares .* ground_truth"):
            rewards.check(task(truth, source="mine"))
        rewards.check(task(truth, source="other"))
        for number in ("18", 18, 18.5):
            rewards.check(task(number, source="mine"))


async def test_a_task_is_scored_by_its_data_sources_scorer() -> None:
    by_source = Rewards({"openai/gsm8k": "gsm8k_strict", "default": "contains"})
    assert await by_source.score(task(source="openai/gsm8k"), "it is 18") == 0.0
    assert await by_source.score(task(source="other"), "it is 18") == 1.0
    with pytest.raises(ScoreError, match="must cover data_source 'other'"):
        await Rewards({"openai/gsm8k": "gsm8k_strict"}).score(task(source="other"), "18")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gsm8k", "or one of"),
        ("no_such_module.score", "cannot be imported|can be imported"),
        ("json.no_such_function", "can be imported"),
        ("json.__name__", "or one of"),
    ],
)
def test_a_scorer_that_is_not_there_is_refused_by_name(name: str, words: str) -> None:
    with pytest.raises(TaskError, match=words) as refusal:
        Rewards(name)
    assert name in str(refusal.value) and "\n" not in str(refusal.value)


def length(task: Task, answer: str) -> float:
    return float(len(answer))


def lengths(tasks: list[Task], answers: list[str]) -> list[float]:
    seen.append(len(answers))
    started.set()
    gate.wait(PATIENCE_S)
    return [float(len(answer)) for answer in answers]


def broken(task: Task, answer: str) -> float:
    raise KeyError("nothing there")


def too_few(tasks: list[Task], answers: list[str]) -> list[float]:
    return [1.0, 2.0]


def crashing(tasks: list[Task], answers: list[str]) -> list[float]:
    raise AssertionError("a bug")


class Own(Exception):
    """Of a scorer's own library."""


def own(task: Task, answer: str) -> float:
    raise Own("mine")


def exits(task: Task, answer: str) -> float:
    raise SystemExit("mine")


def hangs(task: Task, answer: str) -> float:
    seen.append(1)
    if len(seen) == 2:
        hangs_twice.set()
    never.wait()
    return 0.0


hangs_twice, never = threading.Event(), threading.Event()
seen: list[int] = []
started, gate = threading.Event(), threading.Event()


async def test_a_function_is_called_by_its_dotted_name() -> None:
    assert await Rewards("tests.env_adapters.scoring.test_rewards.length").score(task(), "four") == 4.0


def several(task: Task, answer: str) -> dict[str, object]:
    return {
        "judges": {"form": 1.0, "truth": 0.0, "hint": "count again"},
        "verl": {"score": 0.5, "acc": True},
        "words": {"score": "much"},
        "huge": {"form": 10**400},
        "long": {"score": 1.0, "hint": "x" * 8193},
        "none": {"hint": "x"},
    }[answer]


async def test_a_scorer_may_say_what_each_judge_thinks_and_a_hint() -> None:
    rewards = Rewards(f"{__name__}.several")
    verdict = await rewards.score(task(), "judges")
    assert verdict == 0.5 and isinstance(verdict, Verdict)
    ends = ScoreDetail(judge="truth", hint="count again")
    assert verdict.reports() == [(1.0, ScoreDetail(judge="form", final=False)), (0.0, ends)]
    verdict = await rewards.score(task(), "verl")
    assert isinstance(verdict, Verdict) and verdict.reports() == [(0.5, ScoreDetail())]
    for answer in ("words", "huge", "long", "none"):
        with pytest.raises(ScoreError, match="must give a number, or a mapping of names"):
            await rewards.score(task(), answer)


async def test_a_batch_function_gets_all_answers_that_piled_up() -> None:
    seen.clear()
    started.clear()
    gate.clear()
    batch = Rewards("tests.env_adapters.scoring.test_rewards.lengths", batch=True)
    first = asyncio.create_task(batch.score(task(), "a"))
    await asyncio.to_thread(started.wait, 5)
    others = [asyncio.create_task(batch.score(task(), "b" * n)) for n in (2, 3, 4)]
    await asyncio.sleep(0)
    gate.set()
    assert await asyncio.gather(first, *others) == [1.0, 2.0, 3.0, 4.0]
    assert seen == [1, 3]


async def test_what_a_batch_function_raises_reaches_all_who_wait() -> None:
    batch = Rewards("tests.env_adapters.scoring.test_rewards.crashing", batch=True)
    outcomes = await asyncio.wait_for(
        asyncio.gather(*[batch.score(task(), "x") for _ in range(3)], return_exceptions=True), 5
    )
    assert [type(outcome) for outcome in outcomes] == [ScoreError] * 3
    assert all("AssertionError: a bug" in str(outcome) for outcome in outcomes)


@pytest.mark.parametrize("name", ["own", "exits"])
async def test_whatever_a_scorer_raises_over_an_answer_is_that_episodes(name: str) -> None:
    rewards = Rewards(f"{__name__}.{name}")
    with pytest.raises(ScoreError, match=r"failed on task .*mine"):
        await rewards.score(task(), "x")


async def test_scorers_that_hang_stop_nothing_else_and_no_more_than_so_many_start(monkeypatch) -> None:
    monkeypatch.setattr("env_adapters.scoring.rewards.THREADS", 2)
    hung, going_on = (
        Rewards("tests.env_adapters.scoring.test_rewards.hangs"),
        Rewards("tests.env_adapters.scoring.test_rewards.length"),
    )
    seen.clear()
    hanging = [asyncio.create_task(hung.score(task(), "x")) for _ in range(40)]  # more than asyncio has threads
    await asyncio.to_thread(hangs_twice.wait, 30)
    assert await asyncio.wait_for(going_on.score(task(), "four"), PATIENCE_S) == 4.0
    assert seen == [1, 1]
    for each in hanging:
        each.cancel()
    assert all(
        isinstance(each, asyncio.CancelledError) for each in await asyncio.gather(*hanging, return_exceptions=True)
    )
    never.set()


async def test_a_scorer_that_fails_names_the_task_and_the_error() -> None:
    with pytest.raises(ScoreError, match=r"test_rewards\.broken failed on task t: KeyError: 'nothing there'"):
        await Rewards("tests.env_adapters.scoring.test_rewards.broken").score(task(), "x")
    with pytest.raises(ScoreError, match="must give one score for each of 1"):
        await Rewards("tests.env_adapters.scoring.test_rewards.too_few", batch=True).score(task(), "x")


@contextmanager
def scoring_server(*statuses: int) -> Iterator[tuple[str, list[dict]]]:
    """Answers with these statuses in turn, then with scores: the length of each answer."""
    asked: list[dict] = []

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            status = statuses[len(asked) - 1] if len(asked) <= len(statuses) else 200
            answer = json.dumps({"scores": [len(item["answer"]) for item in body["items"]]}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Judge)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/score", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.seconds
async def test_a_remote_scorer_is_asked_again_after_its_own_errors_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "PAUSE_S", 0.0)
    with scoring_server(500, 503) as (url, asked):
        assert await Rewards(url).score(task(), "four") == 4.0
        assert len(asked) == 3
        assert asked[0]["items"] == [{"task": task().private(), "answer": "four"}]
    with scoring_server(422) as (url, asked):
        with pytest.raises(ScoreError, match="422"):
            await Rewards(url).score(task(), "four")
        assert len(asked) == 1
    with pytest.raises(ScoreError, match="ConnectError"):  # nobody listens there any more
        await Rewards(url).score(task(), "four")


def test_a_scorer_that_cannot_be_reached_is_asked_three_times_with_growing_pauses(monkeypatch) -> None:
    asked, pauses = [], []

    async def post(url: str, body: dict) -> httpx2.Response:
        asked.append((url, len(body["items"])))
        if len(asked) < 3 or len(asked) > 3:
            raise httpx2.ConnectError("nobody there")
        return httpx2.Response(200, json={"scores": [0.5]}, request=httpx2.Request("POST", url))

    monkeypatch.setattr(rewards, "_post", post)
    monkeypatch.setattr(rewards, "time", SimpleNamespace(sleep=pauses.append))
    score = rewards.resolve("http://x/score", batch=False)
    assert score([task()], ["four"]) == [0.5]
    assert asked == [("http://x/score", 1)] * 3 and pauses == [0.5, 1.0]
    with pytest.raises(httpx2.ConnectError):
        score([task()], ["four"])
    assert len(asked) == 6 and pauses == [0.5, 1.0, 0.5, 1.0], "no pause after the last"


@pytest.mark.parametrize(
    ("answer", "then", "reason"),
    [
        (BOMB, b"", "must not be compressed"),
        (ENDLESS, b"x" * MIB, "may have 16777216 bytes, got more"),
        (whole(status="600 X"), b"", "a status of HTTP, got 600"),
        (whole(b"", "location: http://127.0.0.1:1/", status="307 X"), b"", "got a redirect"),
        (whole(b"[" * 100_000), b"", "RecursionError"),
    ],
    ids=["compressed", "endless", "status 600", "redirect", "deep"],
)
async def test_what_a_remote_scorer_may_answer_is_bounded(answer: bytes, then: bytes, reason: str) -> None:
    async with hostile(answer, then=then) as server:
        with pytest.raises(ScoreError, match=reason):
            await Rewards(server.url).score(task(), "four")
        if then:
            await asyncio.wait_for(server.hung_up.wait(), PATIENCE_S)
            assert server.sent < SCORER.max_bytes + 16 * MIB  # of buffers
    assert len(server.asked) == 1, "what was said is final"


async def test_a_remote_scorer_that_answers_a_byte_at_a_time_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "SCORER", replace(SCORER, total_s=0.1))
    monkeypatch.setattr(rewards, "PAUSE_S", 0.0)
    async with hostile(ENDLESS, then=b" ", pause_s=0.01) as server:
        with pytest.raises(ScoreError, match="ReadTimeout: the answer took too long in all"):
            await Rewards(server.url).score(task(), "four")
    assert len(server.asked) == 3


async def test_the_loop_goes_on_while_a_scorer_works() -> None:
    seen.clear()
    started.clear()
    gate.clear()
    scoring = asyncio.create_task(Rewards(f"{__name__}.waits").score(task(), "four"))
    async with asyncio.timeout(PATIENCE_S):
        while not started.is_set():
            await asyncio.sleep(0.001)
    assert not scoring.done(), "this line is reached while it waits"
    gate.set()
    assert await scoring == 4.0


def waits(task: Task, answer: str) -> float:
    started.set()
    assert gate.wait(PATIENCE_S)
    return float(len(answer))


async def test_who_gives_up_a_batch_takes_no_one_with_it() -> None:
    seen.clear()
    started.clear()
    gate.clear()
    batch = Rewards(f"{__name__}.lengths", batch=True)
    given_up = asyncio.create_task(batch.score(task(), "a"))
    await asyncio.to_thread(started.wait, 5)
    others = [asyncio.create_task(batch.score(task(), "b" * n)) for n in (2, 3, 4)]
    await asyncio.sleep(0)
    given_up.cancel()
    others[1].cancel()
    gate.set()
    outcomes = await asyncio.wait_for(asyncio.gather(given_up, *others, return_exceptions=True), PATIENCE_S)
    kinds = [outcome if isinstance(outcome, float) else type(outcome) for outcome in outcomes]
    assert kinds == [asyncio.CancelledError, 2.0, asyncio.CancelledError, 4.0]


def test_the_overlong_penalty_is_that_of_the_paper() -> None:
    penalties = [overlong_penalty(n, max_tokens=100) for n in (0, 80, 85, 90, 100, 120)]
    assert penalties == pytest.approx([0.0, 0.0, -0.25, -0.5, -1.0, -1.0])


def test_shaping_lowers_the_score_by_the_episodes_longest_generation() -> None:
    ids = range(12)
    long = make_row(ids, mask=[0] + [1] * 9 + [0, 1], rounds=[0] * 10 + [0, 1], episode="a", score=1.0)
    other = make_row(ids, mask=[0] * 11 + [1], rounds=2, episode="a", score=1.0)  # the same episode's other branch
    short = make_row(ids, mask=[0] * 8 + [1] * 4, episode="b", score=1.0)
    batch, mean = with_overlong_penalty(TrainBatch(rows=[long, other, short]), max_tokens=10)
    assert [row.score for row in batch.rows] == pytest.approx([0.5, 0.5, 1.0])
    assert mean == pytest.approx(-0.25)
    assert long.score == 1.0


def test_shaping_a_batch_of_one_episode_and_of_none() -> None:
    alone = make_row(range(12), mask=[0] + [1] * 9 + [0, 1], rounds=[0] * 10 + [0, 1], episode="a", score=1.0)
    batch, mean = with_overlong_penalty(TrainBatch(rows=[alone]), max_tokens=10)
    assert [row.score for row in batch.rows] == pytest.approx([0.5]) and mean == pytest.approx(-0.5)
    untrained = make_row(range(2), mask=[0, 0], episode="b", score=1.0)
    batch, mean = with_overlong_penalty(TrainBatch(rows=[untrained]), max_tokens=10)
    assert [row.score for row in batch.rows] == [1.0] and mean == 0.0
    assert with_overlong_penalty(TrainBatch(rows=[]), max_tokens=10) == (TrainBatch(rows=[]), 0.0)


def test_groups_with_equal_scores_are_dropped_and_counted_when_asked() -> None:
    ledger = Ledger(None, drop_zero_variance=True)
    make_ready(ledger, task=0, group_size=2, score=1.0)
    assert ledger.counts()["groups/ready"] == 0 and ledger.counts()["evicted/no variance"] == 1
    episodes = open_running(ledger, task=1, group_size=2)
    for score, episode in enumerate(episodes):
        ledger.put_round(make_round(episode.episode_id))
        ledger.notify_score(episode.episode_id, float(score)).result()
    make_ready(ledger, task=2)  # a group of one has nothing to compare
    assert ledger.counts()["groups/ready"] == 2
    assert scored_by_group_state(ledger) == ledger.counts()["episodes/scored"] == 5
    ledger.close()


def test_a_streak_is_broken_by_progress() -> None:
    streak = Streak("evicted/x", ended_by=("groups/trained",), patience=3)
    assert not streak.lasts({"evicted/x": 2, "groups/trained": 0})
    assert not streak.lasts({"evicted/x": 4, "groups/trained": 1})
    assert not streak.lasts({"evicted/x": 6, "groups/trained": 1})
    assert streak.lasts({"evicted/x": 7, "groups/trained": 1})
