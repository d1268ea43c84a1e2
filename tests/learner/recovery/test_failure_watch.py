"""Rules of learner/recovery/failure_watch.py and learner/recovery/failure_watch.py: causes are told, and silence is."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path

from learner.recovery import failure_watch
from learner.recovery.failure_watch import (
    NOBODY_ASKS,
    QUIET_S,
    Quiet,
    Streak,
    in_short,
    most_frequent_error,
    reasons,
    why_episodes_fail,
)

AFTER_EFFECT = "openai.PermissionDeniedError: Error code: 403 - episode 3-1-2 has ended (failed); lease a new task"
CAUSE = "openai.BadRequestError: Error code: 400 - the request offers tools, which needs server.tool_parser"


def counts(**more: int) -> Counter[str]:
    return Counter(
        {"episodes/scored": 0, "episodes/failed": 0} | {name.replace("__", "/"): n for name, n in more.items()}
    )


def pool(running: int = 0, waiting: int = 0, room: int = 4) -> dict[str, float]:
    return {"pool/running": running, "pool/agents_waiting": waiting, "pool/admissible_groups": room}


def log(folder: Path, *, lane: int, words: str) -> None:
    (folder / f"lane-{lane}").mkdir(parents=True)
    (folder / f"lane-{lane}" / "log.txt").write_text(words)


def test_a_group_that_was_given_up_is_no_reason_and_the_most_frequent_reason_comes_first() -> None:
    now = counts(**{"failed__deadline": 2, "failed__group given up": 7, "failed__scorer": 5, "failed__restart": 0})
    assert list(reasons(now).items()) == [("scorer", 5), ("deadline", 2)]
    assert in_short(now) == "7 failed: 5 scorer, 2 deadline"
    assert in_short(counts(failed__deadline=4)) == "4 failed: deadline" and in_short(counts()) == ""


def test_the_error_that_is_told_is_the_most_frequent_one_and_not_the_last(tmp_path: Path) -> None:
    trace = 'Traceback (most recent call last):\n  File "agent.py", line 3\n'
    log(tmp_path, lane=0, words=f"{trace}{CAUSE} (id 1)\n{trace}{CAUSE} (id 22)\n{trace}{AFTER_EFFECT}\n")
    log(tmp_path, lane=1, words=f"{trace}{CAUSE} (id 3)\n{trace}{AFTER_EFFECT}\n")
    found = most_frequent_error(tmp_path)
    assert found is not None
    number, where, excerpt = found
    assert (number, where) == (3, tmp_path / "lane-0" / "log.txt")
    assert excerpt == f"{trace}{CAUSE} (id 1)"


def test_an_error_of_another_language_and_a_log_without_one_are_told_too(tmp_path: Path) -> None:
    assert most_frequent_error(tmp_path) is None
    log(tmp_path, lane=0, words="hello\nbye\n")
    assert most_frequent_error(tmp_path) == (1, tmp_path / "lane-0" / "log.txt", "hello\nbye")
    log(tmp_path, lane=1, words="thread 'main' panicked at src/main.rs:2\n")
    assert most_frequent_error(tmp_path) == (
        1,
        tmp_path / "lane-1" / "log.txt",
        "thread 'main' panicked at src/main.rs:2",
    )


def test_the_final_error_names_what_was_refused_and_only_logs_that_are_there(tmp_path: Path) -> None:
    log(tmp_path / "agents", lane=0, words=CAUSE)
    told = why_episodes_fail(
        counts(**{"failed__no rounds": 3, "failed__scorer": 2}),
        details={"no rounds": "no rounds", "scorer": "scorer: data.scorer judge failed: ValueError: no"},
        refused={"rare": 1, "often": 9},
        agents=tmp_path / "agents",
        env_log=None,
    )
    assert (
        "2 x scorer: data.scorer gave no score" in told and "most often: data.scorer judge failed: ValueError" in told
    )
    assert told.count("most often:") == 1
    assert "3 x no rounds: the agent made no model call with its key; does it use OPENAI_BASE_URL" in told
    assert told.index("9 x often") < told.index("1 x rare") and CAUSE in told and "env.log" not in told
    alone = why_episodes_fail(counts(), details={}, refused={}, agents=tmp_path / "none", env_log=tmp_path / "env.log")
    assert "started no agents" in alone and str(tmp_path / "env.log") in alone


async def test_a_ledger_that_waits_is_told_of_once_with_its_reason_and_when_it_goes_on(monkeypatch) -> None:
    monkeypatch.setattr(failure_watch, "WATCH_S", 0.0)
    locked = "locked, by other (process 7); end its transaction"
    reasons_of_looks = iter(["", "full; free space", "full; free space", locked, "", ""])
    said: list[str] = []

    async def show() -> None:
        pass

    with suppress(StopIteration, RuntimeError):
        await failure_watch.watch(
            counts=counts, groups_per_step=1, show=show, say=said.append, disk=lambda: next(reasons_of_looks), pool=pool,
            is_starting=lambda: True, why=None,
        )  # fmt: skip
    assert said == [
        "the ledger waits: full; free space; it continues by itself",
        f"the ledger waits: {locked}; it continues by itself",
        "the ledger stores again",
    ]


def test_silence_is_told_after_a_while_and_again_after_twice_as_long() -> None:
    quiet = Quiet(counts(), at=0.0)
    busy = {"pool": pool(running=4), "is_starting": False}
    now = counts(episodes__failed=4, failed__deadline=4)
    assert quiet.line(now, at=QUIET_S - 1, **busy) == ""
    assert quiet.line(now, at=QUIET_S, **busy) == "0 episodes scored in the last 30 s, 4 running, 4 failed: deadline"
    assert [quiet.line(now, at=at, **busy) for at in (31, 59)] == ["", ""]
    assert "in the last 60 s" in quiet.line(now, at=60, **busy)
    assert quiet.line(now, at=119, **busy) == "" and "in the last 120 s" in quiet.line(now, at=120, **busy)


def test_a_score_begins_anew_and_older_failures_are_told_no_more() -> None:
    quiet = Quiet(counts(), at=0.0)
    scored = counts(episodes__scored=1, episodes__failed=4, failed__deadline=4)
    assert quiet.line(scored, pool=pool(running=4), at=40, is_starting=False) == ""
    assert quiet.line(scored, pool=pool(running=4), at=69, is_starting=False) == ""
    assert (
        quiet.line(scored, pool=pool(running=4), at=70, is_starting=False)
        == "0 episodes scored in the last 30 s, 4 running"
    )
    assert reasons(quiet.since_score(scored)) == {}


def test_a_busy_learner_and_a_start_are_not_silence_but_agents_that_do_not_ask_are() -> None:
    quiet = Quiet(counts(), at=0.0)
    assert quiet.line(counts(), pool=pool(running=4), at=100, is_starting=True) == ""
    assert quiet.line(counts(), pool=pool(waiting=4, room=0), at=200, is_starting=False) == "", "agents wait for room"
    assert quiet.line(counts(), pool=pool(room=0), at=229, is_starting=False) == ""
    assert NOBODY_ASKS in quiet.line(counts(), pool=pool(), at=300, is_starting=False)


def test_failures_that_pass_between_two_looks_are_no_idle_time() -> None:
    quiet = Quiet(counts(), at=0.0)
    lines = [
        quiet.line(counts(episodes__failed=at), pool=pool(waiting=4), at=at, is_starting=False) for at in range(1, 31)
    ]
    assert lines[-1].startswith("0 episodes scored in the last 30 s, 0 running")


def test_a_streak_lasts_until_it_is_broken() -> None:
    streak = Streak("evicted/failed", ended_by=("episodes/scored",), patience=3)
    assert not streak.lasts({"evicted/failed": 2})
    assert not streak.lasts({"evicted/failed": 4, "episodes/scored": 1})
    assert streak.lasts({"evicted/failed": 7, "episodes/scored": 1})
