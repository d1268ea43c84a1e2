"""What comes to a ledger over the wire: exact, checked, stored once however often it is sent; and all that it answers."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from buffers.errors import (
    EpisodeClosed,
    EpisodeError,
    LeaseError,
    RequestRefused,
    ScoreConflict,
    UnderstudyError,
    UnknownEpisode,
)
from buffers.ledger import episodes
from buffers.ledger.encode import stored_round
from buffers.ledger.ledger import Ledger
from buffers.records import Round, Row, ScoreDetail, Task, TrainBatch
from buffers.remote.ledger_server import LedgerServer
from buffers.remote.messages import job_of
from buffers.wire.address import Way, WireLost
from buffers.wire.client import Client
from buffers.wire.connection import Connection
from buffers.wire.rpc import RemoteError
from tests.support.buffer_parts import make_round, make_task, open_running
from tests.support.remote.in_process_remote_ledger import open_nearby

ROOT = Path(__file__).parents[3]
SECRET = b"s" * 32


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        yield ledger


@pytest.fixture
def server(ledger: Ledger) -> Iterator[LedgerServer]:
    server = LedgerServer(ledger, secret=SECRET)
    yield server
    server.close()


def client_of(server: LedgerServer) -> Client:
    return Client(str(server.address), secret=SECRET, answer_s=20)


def put_rounds(client: Client, rounds: list[Round]) -> list[EpisodeError | None]:
    outcomes = client.call(LedgerServer.put_rounds, rounds=[stored_round(each) for each in rounds])
    return [refusal and refusal.error() for _, refusal in outcomes]


@pytest.mark.parametrize("way", list(Way))
def test_rounds_arrive_bit_for_bit_and_a_bad_one_harms_no_other(ledger: Ledger, way: Way) -> None:
    first, second = open_running(ledger, task=0, group_size=2)
    rounds = [
        make_round(first.episode_id, sampled=range(2000)),
        make_round("nobody"),
        make_round(first.episode_id, index=1, parent=0, tail=(), finish_reason="length"),
        make_round(second.episode_id, index=1, parent=0),
        make_round(second.episode_id),
    ]
    server = LedgerServer(ledger, secret=SECRET, way=way)
    with client_of(server) as client:
        errors = put_rounds(client, rounds)
        assert [error is None for error in errors] == [True, False, True, False, True]
        assert isinstance(errors[1], UnknownEpisode) and "nobody" in str(errors[1]) and "parent" in str(errors[3])
        one, two = ledger.rounds(first.episode_id).result()
        assert np.array_equal(one.sampled_ids, np.arange(2000)) and one.logprobs.dtype == np.float32
        assert np.array_equal(one.logprobs, rounds[0].logprobs) and two.finish_reason == "length"
        assert put_rounds(client, [rounds[0]]) == [None] and ledger.counts()["rounds"] == 3  # sent again, stored once
        changed = make_round(first.episode_id, sampled=range(1999))
        assert put_rounds(client, [changed])[0] is not None and put_rounds(client, []) == []
    server.close()


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, 5), (0, {"a": 1}), (0, None), (1, "x"), (1, 1.5), (1, True), (1, 2**40), (2, "x"), (2, [1]),
        (3, "x"), (3, None), (4, "x"), (5, 5), (5, None), (5, "x" * 1000), (6, -1), (6, None), (6, "body"), (7, 1),
        (8, -1), (8, True),
    ],
)  # fmt: skip
def test_what_no_round_can_be_ends_its_connection_and_stores_nothing(
    ledger: Ledger, server: LedgerServer, place: int, value: object
) -> None:
    """Also from a process that knows the secret."""
    (episode,) = open_running(ledger, task=0)
    entry: list[Any] = [
        episode.episode_id,
        0,
        None,
        1,
        0,
        "stop",
        stored_round(make_round(episode.episode_id)).body,
        b"",
        None,
    ]
    entry[place] = value
    with Connection(server.address, secret=SECRET) as connection:
        connection.send("put_rounds", {"rounds": [entry]})
        with pytest.raises(WireLost, match="ended the connection: Expected"):
            connection.receive(20)
    with client_of(server) as good:
        assert ledger.counts()["rounds"] == 0
        assert put_rounds(good, [make_round(episode.episode_id)]) == [None]


def test_a_pickle_is_no_round_and_no_argument(ledger: Ledger, server: LedgerServer, tmp_path: Path) -> None:
    class Touch:
        def __reduce__(self):
            return Path.touch, (tmp_path / "touched",)

    (episode,) = open_running(ledger, task=0)
    code = pickle.dumps(Touch())
    with Connection(server.address, secret=SECRET) as connection:
        connection.send("put_rounds", {"rounds": [[episode.episode_id, 0, None, 1, 0, "stop", code, b"", None]]})
        with pytest.raises(WireLost, match="round body must be"):
            connection.receive(20)
    with Connection(server.address, secret=SECRET) as connection:
        connection.send(
            "apply", {"caller": "me", "number": 1, "oldest": 1, "jobs": [["adopt_episode", {"episode_id": code}]]}
        )
        answer = connection.receive(20)
        assert answer is not None and b"the arguments of adopt_episode must be of its types" in bytes(answer.body)
    assert ledger.counts()["rounds"] == 0 and not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    ("name", "arguments", "line"),
    [
        ("os.system", {"command": "true"}, "an operation must be one of put_tasks, open_group"),
        ("recover", {"resume_episodes": False}, "an operation must be one of"),
        ("put_round", {"stored": []}, "an operation must be one of"),
        ("start_episode", {"episode_id": "a"}, "must be of its types: Object missing required field `version`"),
        ("start_episode", {"episode_id": "a", "version": "0"}, "Expected `int`, got `str`"),
        ("claim", {"num_groups": 1, "min_version": 0, "db": 1}, "unknown field `db`"),
        ("notify_score", {"episode_id": "a", "score": 1.0, "max_attempts": 1, "detail": {"round_index": 1, "branch": 1}},
         "a score is of a round or of a branch"),
        ("start_episode", {"episode_id": "nobody", "version": 0}, "episode_id must name an episode"),
    ],
)  # fmt: skip
def test_an_operation_that_cannot_be_is_refused_in_a_line_and_its_neighbours_are_done(
    ledger: Ledger, server: LedgerServer, name: str, arguments: dict[str, Any], line: str
) -> None:
    with Connection(server.address, secret=SECRET) as connection:
        jobs = [[name, arguments], ["adopt_episode", {"episode_id": "mine"}]]
        connection.send("apply", {"caller": "me", "number": 1, "oldest": 1, "jobs": jobs})
        message = connection.receive(20)
        while message is not None and message.kind == "beat":
            message = connection.receive(20)
    assert message is not None
    (refused, done), _, _ = msgspec.msgpack.decode(message.body)
    assert refused[0] is None and line in refused[1][1] and done == [True, None]
    assert ledger.counts()["episodes/running"] == 1


def test_only_operations_of_the_ledger_can_be_asked_for() -> None:
    with pytest.raises(UnderstudyError, match="must be asked for one of its own operations, got exec"):
        job_of(partial(exec, "x"))  # no print: Ray has its own in its place, once it is used
    with pytest.raises(UnderstudyError, match="got recover"):
        job_of(partial(episodes.recover, resume_episodes=True))


def test_what_is_not_asked_for_ends_the_connection(server: LedgerServer) -> None:
    cursor = {"life": "a", "number": "x"}
    for kind, body in (("dance", None), ("events", cursor), ("forget", {"caller": 7}), ("apply", {}), ("close", {})):
        with Connection(server.address, secret=SECRET) as connection:
            connection.send(kind, body)
            with pytest.raises(WireLost, match=r"must be asked for one of|Expected|Object missing"):
                connection.receive(20)


def test_every_method_of_a_ledger_elsewhere_answers_as_one_here(tmp_path: Path) -> None:
    """Types too: what an operation answers comes as the record that it is."""
    found: list[list[Any]] = []
    for ledger in (Ledger(tmp_path / "here.sqlite"), open_nearby(tmp_path / "there.sqlite")):
        with ledger:
            found.append(list(everything(ledger)))
    here, there = found
    assert [type(answer) for answer in here] == [type(answer) for answer in there]
    assert list(map(plain, here)) == list(map(plain, there)) and len(here) > 25


def everything(ledger: Ledger) -> Iterator[Any]:
    huge = 10**40  # of JSON, which has no largest number
    tasks = [make_task(0), Task(task_id="t:big", prompt=[{"role": "user", "content": "\ud800"}], ground_truth=huge)]
    yield ledger.put_tasks(tasks).result()
    yield (opened := ledger.open_group("t:0", instance=0, group_size=2, min_size=1).result())
    yield ledger.open_group("t:big", instance=0, group_size=1).result()[0].task.ground_truth
    yield ledger.start_pending(limit=3, version=0).result()
    yield ledger.running_episodes().result()
    one, two = (episode.episode_id for episode in opened)
    yield ledger.put_round(make_round(one, sampled=range(5))).result()
    yield ledger.put_round(make_round(two)).result()
    yield ledger.mask_tokens(one, {0: np.array([1, 0, 1, 1, 1], np.uint8)}).result()
    yield ledger.rounds(one).result()
    yield ledger.notify_score(one, 0.5, detail=ScoreDetail(judge="a", hint="try", final=False)).result()
    yield ledger.settle_scores(one).result()
    yield ledger.notify_score(one, 0.5, detail=ScoreDetail(judge="a", hint="try", final=False)).result()
    yield [{**each, "told_at": 0} for each in ledger.score_history(one).result()]
    yield ledger.fail_episode(two, "lost: its agent left", max_attempts=2).result()
    yield ledger.failure_details().result()
    yield ledger.ended([one, two]).result()
    yield ledger.fail_episode("nobody", "lost", max_attempts=1).exception()
    yield ledger.start_pending(limit=1, version=1).result()
    yield ledger.fail_episode("1-1-1", "lost", max_attempts=1).result()
    yield ledger.claim(1, min_version=0).result()
    yield ledger.claim(1, min_version=0).result()
    yield ledger.release(1).result()
    yield ledger.claim(1, min_version=0).result().lease_id
    yield ledger.commit_step(2, step=1, version=1).result()
    yield ledger.evict_stale(5).result()
    yield ledger.adopt_episode("mine").result()
    yield ledger.open_validation([make_task(7)], group_size=1, greedy=True).result()
    yield ledger.validated([3, 4]).result()
    yield {**vars_of(place := ledger.position().result()), "run_id": ""}
    yield ledger.restore(place).result()
    yield ledger.times_opened().result()
    yield ledger.group_outcomes(0).result()
    for wrong, kind in (
        (lambda: ledger.start_episode("nobody", version=0), UnknownEpisode),
        (lambda: ledger.put_round(make_round(two, index=1)), EpisodeClosed),
        (lambda: ledger.release(99), LeaseError),
        (lambda: ledger.notify_score(one, 0.7, detail=ScoreDetail(judge="a")), (ScoreConflict, EpisodeClosed)),
        (lambda: ledger.put_round(make_round("mine", index=-1)), EpisodeError),
        (lambda: ledger.adopt_episode("\ud800"), ValueError),
    ):
        try:
            error = wrong().exception()
        except UnderstudyError as refused:
            error = refused
        assert isinstance(error, kind), error
        yield kind


def vars_of(record: Any) -> dict[str, Any]:
    return {name: plain(getattr(record, name)) for name in record.__dataclass_fields__}


def plain(answer: Any) -> Any:
    """With arrays as lists and their types, for comparing."""
    match answer:
        case np.ndarray():
            return [str(answer.dtype), answer.tolist()]
        case TrainBatch() | Row():
            return vars_of(answer)
        case list() | tuple():
            return type(answer)(map(plain, answer))
        case Exception():
            return type(answer).__name__, str(answer)
    return vars_of(answer) if hasattr(answer, "__dataclass_fields__") else answer


def test_errors_keep_their_kind_where_it_is_known() -> None:
    class Own(EpisodeClosed):
        """A kind that the other side does not know."""

    for error, kind in (
        (Own("x"), EpisodeClosed), (UnicodeEncodeError("utf-8", "a", 0, 1, "why"), ValueError), (KeyError("x"), LookupError),
        (OSError(5, "x"), UnderstudyError), (RequestRefused("x"), RequestRefused),
    ):  # fmt: skip
        told = RemoteError.of(error).error()
        assert type(told) is kind
    assert type(RemoteError("SystemExit", "x").error()) is UnderstudyError
    refused = RemoteError.of(RequestRefused("x", field="temperature", status=422)).error()
    assert isinstance(refused, RequestRefused) and (refused.field, refused.status) == ("temperature", 422)
    assert not hasattr(RemoteError("EngineError", "x", {"nothing": 1}).error(), "nothing")


def test_another_process_stores_rounds(ledger: Ledger, server: LedgerServer) -> None:
    (episode,) = open_running(ledger, task=0)
    code = (
        "from tests.buffers.remote.test_ledger_server import Client, make_round, put_rounds;"
        f"client = Client({str(server.address)!r}, secret={SECRET!r}, answer_s=20);"
        f"print(put_rounds(client, [make_round({episode.episode_id!r}, index=i) for i in range(3)])); client.close()"
    )
    path = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run([sys.executable, "-c", code], env=path, capture_output=True, text=True, check=False)
    assert done.stdout == "[None, None, None]\n", done.stderr
    assert len(ledger.rounds(episode.episode_id).result()) == 3
