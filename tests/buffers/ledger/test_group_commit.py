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


class Books:
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
def books(tmp_path):
    books = Books(tmp_path / "lines.sqlite")
    yield books
    books.writer.close()


def elsewhere(work):
    """What `work` returns in another thread than the main one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def test_a_caller_commits_itself_when_nobody_else_does(books):
    def work():
        return [books.put(str(n), inline=True).result() for n in range(PUTS)], threading.current_thread()

    threads, own = elsewhere(work)
    assert set(threads) == {own}


def test_the_main_thread_never_commits(books):
    threads = {books.put(str(n), inline=True).result() for n in range(PUTS)}
    assert threads == {books.writer._thread}


def test_what_nobody_waits_for_is_stored_as_well(books):
    done = threading.Event()
    books.put("alone").add_done_callback(lambda _: done.set())
    assert done.wait(10)


def test_a_caller_that_may_not_commit_leaves_it_to_the_thread(books):
    held, let_go = threading.Event(), threading.Event()

    def hold(_):
        held.set()
        let_go.wait(10)

    books.writer.submit(hold)
    assert held.wait(10)
    future = elsewhere(lambda: books.put("later", inline=True))
    assert not future.done()
    let_go.set()
    assert future.result(10) is books.writer._thread


def test_many_callers_keep_their_order_and_lose_nothing(books):
    def work(name):
        for n in range(0, PUTS, 2):
            books.put(f"{name} {n}")
            books.put(f"{name} {n + 1}", inline=True).result()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, "abcdefgh"))
    texts = books.texts().result()
    assert len(texts) == 8 * PUTS
    for name in "abcdefgh":
        assert [text for text in texts if text.startswith(name)] == [f"{name} {n}" for n in range(PUTS)]
    assert books.published == sorted(books.published)
    assert len(books.published) < 8 * PUTS  # what had piled up was one transaction


def test_a_defect_in_an_operation_that_a_caller_commits_stops_the_writer(books):
    def broken(_):
        raise AttributeError("a defect")

    with pytest.raises(AttributeError, match="a defect"):
        elsewhere(lambda: books.writer.submit(broken, rules=Rules(inline=True)))
    books.writer._thread.join(10)
    with pytest.raises(UnderstudyError, match="must be open"):
        books.put("late")


def test_closing_while_callers_commit_stores_all_that_was_taken(tmp_path):
    for round_ in range(20):
        books = Books(tmp_path / f"{round_}.sqlite")
        taken = []

        def work(books=books, taken=taken):
            for n in count():
                try:
                    future = books.put(str(n), inline=True)
                except UnderstudyError:
                    return
                future.result()
                taken.append(n)

        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(work) for _ in range(2)]
            while len(taken) < 20:
                time.sleep(0.001)
            books.writer.close()
            for future in futures:
                future.result()
        with sqlite3.connect(tmp_path / f"{round_}.sqlite") as db:
            assert db.execute("SELECT count(*) FROM line").fetchone() == (len(taken),)
        db.close()
