"""Agent loops in worker processes, for the run and as verl's batch interface: real workers and HTTP, a scripted engine."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager

import pytest

from agents.workers.config import LoopSpec, loop_class
from agents.workers.manager import AgentLoopManager
from buffers.errors import AgentError, TaskError
from buffers.records import Task
from configs.schema import RolloutConfig
from mocked_server.http.roles import Roles
from tests.support.patience import PATIENCE_S
from tests.support.server_parts import ServerThread

pytestmark = [pytest.mark.slow]

LOOPS = [
    LoopSpec(name="verl_loop", target="tests.agents.verl_loop.VerlLoop", arguments={"max_turns": 2}),
    LoopSpec(name="one_turn", target="tests.agents.verl_loop.VerlLoop", arguments={"max_turns": 1}),
    LoopSpec(name="bad_loop", target="tests.agents.verl_loop.BadLoop"),
]
HELLO = [{"role": "user", "content": "Hello."}]


def wait(served, work, timeout_s=PATIENCE_S):
    return asyncio.run_coroutine_threadsafe(work, served._loop).result(timeout_s)


@contextmanager
def playing(model, loops, *, workers=2, roles=None, score_fn=None):
    """A server whose rows are played by these loops."""
    served = ServerThread(model, rollout=RolloutConfig(max_tokens=32, max_model_len=512), roles=roles)
    manager = AgentLoopManager(loops, num_workers=workers, score_fn=score_fn)
    served.loops = manager
    served.start()
    try:
        wait(
            served,
            manager.start(
                model_path=str(model), server_url=served.server.base_url, worker_key=served.server.keys.worker,
                prompt_length=256, response_length=256,
            ),
        )  # fmt: skip
        yield served, manager
        wait(served, manager.close())
    finally:
        served.stop()


@pytest.fixture(scope="module")
def played(tiny_model):
    """Played by two workers; the manager judges by the answer's length."""
    with playing(tiny_model, LOOPS, score_fn=lambda task, answer: float(len(answer))) as (served, manager):
        yield served, manager


def put(served, *tasks):
    """Queue tasks; returns a function that waits until `number` more episodes have ended, and gives the ledger's news of them."""
    closed, enough = [], threading.Event()

    def watcher(news):
        closed.extend(news.closed)
        if len(closed) >= len(tasks):
            enough.set()

    unwatch = served.ledger.watch(watcher)
    wait(served, served.pool.put(tasks))
    assert enough.wait(PATIENCE_S), f"{len(closed)} of {len(tasks)} ended"
    unwatch()
    return closed


def task(name, agent_name, **extra_info):
    return Task(task_id=name, prompt=HELLO, agent_name=agent_name, extra_info=extra_info)


def test_a_loop_written_for_verl_is_played_recorded_and_scored(played):
    served, _ = played
    served.engine.answer = lambda _: served.ids("ok")
    (ended,) = put(served, task("t1", "verl_loop", word="please"))
    assert ended.state == "scored"
    first, second = served.stored(ended.episode_id)
    assert (first.parent, second.parent) == (None, 0)
    assert served.tokenizer.decode(second.tail_ids) == "\nagain please\n"
    batch = served.ledger.claim(1, min_version=0).result(PATIENCE_S)
    (row,) = batch.rows
    assert row.score == len("ok\nagain please\nok") - len("\nagain please\n"), (
        "what the model said, without the loop's words"
    )
    assert row.num_trained == 2 * len(served.ids("ok"))
    served.ledger.release(batch.lease_id).result(PATIENCE_S)


def test_two_entries_of_one_class_have_their_own_settings(played):
    served, _ = played
    (ended,) = put(served, task("t2", "one_turn"))
    assert len(served.stored(ended.episode_id)) == 1


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raises", "ValueError: on purpose"),
        ("claims", "position 0 of response_ids"),
        ("dies", "worker process"),
    ],
)
def test_a_loop_that_fails_ends_its_own_episode_with_the_reason(played, how, reason):
    served, _ = played
    served.engine.answer = lambda _: [5, 6]
    (ended,) = put(served, task(f"bad-{how}", "bad_loop", how=how))
    assert ended.state == "failed"
    assert reason in ended.reason
    (after,) = put(served, task(f"good-after-{how}", "bad_loop", how="well"))
    assert after.state == "scored", f"the workers go on, but: {after.reason}"


def test_an_episode_that_ends_otherwise_is_played_no_further(played):
    served, manager = played
    closed = threading.Event()
    unwatch = served.ledger.watch(lambda news: closed.set() if news.closed else None)
    began = served.ledger.counts()["rounds"]
    wait(served, served.pool.put([task("hang", "bad_loop", how="hangs")]))
    recorded = threading.Event()
    for _ in range(200):
        if served.ledger.counts()["rounds"] > began:
            break
        recorded.wait(0.1)
    (episode_id,) = served.pool._slots
    wait(served, served.server.fail(episode_id, "deadline"))
    assert closed.wait(PATIENCE_S)
    unwatch()
    for _ in range(100):
        if all(worker.running == 0 for worker in manager._workers):
            break
        recorded.wait(0.1)
    assert [worker.running for worker in manager._workers] == [0, 0]


def test_roles_of_a_run_play_the_players_of_an_environment(tiny_model):
    roles = Roles(trained=["new"], frozen=["old"])
    arguments = {"env": "tests.matrix.letters.env.Duel", "roles": ["new", "old"]}
    duel = LoopSpec(name="env_agent", target="agents.loops.env_agent.EnvAgentLoop", arguments=arguments)
    with playing(tiny_model, [duel], workers=1, roles=roles) as (served, _):
        (closed,) = put(served, task("duel", "env_agent"))
        rounds = served.stored(closed.episode_id)
        told = served.ledger.score_history(closed.episode_id).result(PATIENCE_S)
    assert [(round_.role, round_.parent) for round_ in rounds] == [("new", None), ("old", None), ("new", 0), ("old", 1)]
    assert [round_.trained is None for round_ in rounds] == [True, False, True, False]
    scores = {score["role"]: score["value"] for score in told}
    assert scores == {"new": 1.0, "old": -1.0, "": 1.0}, (
        "ok has a larger share of early letters than frozen; the policy's own"
    )


def test_figures_are_of_the_episodes_since_the_last_call(played):
    served, manager = played
    manager.figures.take()
    put(served, task("f1", "verl_loop"), task("f2", "one_turn"))
    figures = manager.figures.take()
    assert figures["agent_loop/episodes"] == 2
    assert figures["agent_loop/num_turns/max"] == 4
    assert figures["agent_loop/num_turns/min"] == 2
    assert 0 < figures["agent_loop/generate_sequences/min"] <= figures["agent_loop/total/max"]
    assert figures["agent_loop/slowest/total"] == figures["agent_loop/total/max"]
    assert manager.figures.take() == {}


def test_generate_sequences_plays_a_batch_over_the_workers_and_records_nothing(played):
    served, manager = played
    served.engine.answer = lambda _: served.ids("ok")
    rounds = served.ledger.counts()["rounds"]
    rows = [
        {"prompt": HELLO, "agent_name": "verl_loop", "extra_info": {"word": str(number)}} for number in range(7)
    ] + [{"prompt": HELLO, "agent_name": "verl_lop", "extra_info": {}}]
    results = wait(served, manager.generate_sequences(rows))
    assert served.ledger.counts()["rounds"] == rounds
    for number, result in enumerate(results[:7]):
        (output,) = result.outputs
        told = served.tokenizer.decode(
            [i for i, m in zip(output.response_ids, output.response_mask, strict=True) if not m]
        )
        assert told == f"\nagain {number}\n"
    assert "did you mean 'verl_loop'?" in results[7].error
    assert wait(served, manager.generate_sequences([])) == []


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("tests.agents.verl_loop.NoSuchLoop", "_target_ must be module.Class"),
        ("buffers.records.Task", "must be an AgentLoopBase"),
    ],
)
def test_what_is_no_loop_is_refused(target, says):
    with pytest.raises(TaskError, match=says):
        loop_class(LoopSpec(name="x", target=target))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "tool_config_path"),
        ({"tool_config_path": "tools.yaml"}, "did you mean 'hermes'"),  # the run's, as the loop names none
        ({"tool_config_path": "tools.yaml", "format": "xlom"}, "did you mean 'xlam'"),
    ],
)
def test_a_loop_that_cannot_be_set_up_is_known_at_the_start(tiny_model, played, tmp_path, given, says):
    served, _ = played
    (tmp_path / "tools.yaml").write_text("tools: [{function: agents.tools.shipped.calculator.calculator}]")
    arguments = {name: str(tmp_path / value) if name == "tool_config_path" else value for name, value in given.items()}
    manager = AgentLoopManager(
        [LoopSpec(name="x", target="agents.loops.tool_agent.ToolAgentLoop", arguments=arguments)], num_workers=1
    )
    with pytest.raises(AgentError, match=says):
        wait(
            served,
            manager.start(
                model_path=str(tiny_model), server_url="http://127.0.0.1:9", worker_key="", prompt_length=1,
                response_length=1, tool_parser="hermez",
            ),
        )  # fmt: skip
