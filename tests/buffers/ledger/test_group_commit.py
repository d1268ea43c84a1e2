"""Who commits: the writer's thread, or a caller that waits anyway. What is promised holds either way."""

import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest

from buffers.errors import UnderstudyError
from buffers.ledger.group_commit import GroupCommit, Rules

PUTS = 200


class Lines:
    """A writer over one table, and what it told of each commit."""

    def __init__(self, path):
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        db.execute("CREATE TABLE line(number INTEGER PRIMARY KEY, text TEXT)")
        self.published = []
        self.writer = GroupCommit(
            db, name="test", read_event=lambda db: db.execute("SELECT count(*) FROM line").fetchone()[0],
            keep_event=lambda _: None, publish=lambda event, recovered: self.published.append(event),
            probe=lambda _: None,
        )  # fmt: skip

    def put(self, text, *, inline=False):
        def operation(db):
            db.execute("INSERT INTO line(text) VALUES (?)", (text,))
            return threading.current_thread()

        return self.writer.submit(operation, rules=Rules(inline=inline))

    def texts(self):
        return self.writer.submit(lambda db: [text for (text,) in db.execute("SELECT text FROM line ORDER BY number")])


@pytest.fixture
def lines(tmp_path):
    lines = Lines(tmp_path / "lines.sqlite")
    yield lines
    lines.writer.close()


def elsewhere(work):
    """What `work` returns in another thread than the main one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def test_a_caller_commits_itself_when_nobody_else_does(lines):
    def work():
        return [lines.put(str(n), inline=True).result() for n in range(PUTS)], threading.current_thread()

    threads, own = elsewhere(work)
    assert set(threads) == {own}


def test_the_main_thread_never_commits(lines):
    threads = {lines.put(str(n), inline=True).result() for n in range(PUTS)}
    assert threads == {lines.writer._thread}


def test_what_nobody_waits_for_is_stored_as_well(lines):
    done = threading.Event()
    lines.put("alone").add_done_callback(lambda _: done.set())
    assert done.wait(10)


def test_a_caller_that_may_not_commit_leaves_it_to_the_thread(lines):
    held, let_go = threading.Event(), threading.Event()

    def hold(_):
        held.set()
        let_go.wait(10)

    lines.writer.submit(hold)
    assert held.wait(10)
    future = elsewhere(lambda: lines.put("later", inline=True))
    assert not future.done()
    let_go.set()
    assert future.result(10) is lines.writer._thread


def test_many_callers_keep_their_order_and_lose_nothing(lines):
    def work(name):
        for n in range(0, PUTS, 2):
            lines.put(f"{name} {n}")
            lines.put(f"{name} {n + 1}", inline=True).result()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, "abcdefgh"))
    texts = lines.texts().result()
    assert len(texts) == 8 * PUTS
    for name in "abcdefgh":
        assert [text for text in texts if text.startswith(name)] == [f"{name} {n}" for n in range(PUTS)]
    assert lines.published == sorted(lines.published)
    assert len(lines.published) < 8 * PUTS  # what had piled up was one transaction


def test_a_defect_in_an_operation_that_a_caller_commits_stops_the_writer(lines):
    def broken(_):
        raise AttributeError("a defect")

    with pytest.raises(AttributeError, match="a defect"):
        elsewhere(lambda: lines.writer.submit(broken, rules=Rules(inline=True)))
    lines.writer._thread.join(10)
    with pytest.raises(UnderstudyError, match="must be open"):
        lines.put("late")


def test_closing_while_callers_commit_stores_all_that_was_taken(tmp_path):
    for round_ in range(20):
        lines = Lines(tmp_path / f"{round_}.sqlite")
        taken = []

        def work(lines=lines, taken=taken):
            for n in count():
                try:
                    future = lines.put(str(n), inline=True)
                except UnderstudyError:
                    return
                future.result()
                taken.append(n)

        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(work) for _ in range(2)]
            while len(taken) < 20:
                time.sleep(0.001)
            lines.writer.close()
            for future in futures:
                future.result()
        with sqlite3.connect(tmp_path / f"{round_}.sqlite") as db:
            assert db.execute("SELECT count(*) FROM line").fetchone() == (len(taken),)
        db.close()
