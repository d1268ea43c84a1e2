"""Who commits: the writer's thread, or a caller that waits anyway. What is promised holds either way."""

import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from itertools import count

import pytest

from buffers.errors import StorageFull, UnderstudyError
from buffers.ledger import group_commit
from buffers.ledger.group_commit import GroupCommit, Rules, holders, is_passing, why_not_stored
from tests.support.patience import PATIENCE_S
from tests.support.processes.child_process import Lines as Output
from tests.support.processes.child_process import child_process

PUTS = 200


class Disk(sqlite3.Connection):
    """A connection whose disk may be full; notes each statement that is no operation's."""

    full = False

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.statements = []

    def execute(self, statement, *arguments):
        self.statements.append(statement)
        if self.full and statement == "COMMIT":
            raise sqlite3.OperationalError("database or disk is full")
        return super().execute(statement, *arguments)


class Lines:
    """A writer over one table, and what it told of each commit."""

    def __init__(self, path):
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, factory=Disk)
        db.execute("CREATE TABLE line(number INTEGER PRIMARY KEY, text TEXT)")
        self.published = []
        self.probes = []
        self.recovered = threading.Event()
        self.writer = GroupCommit(
            db, name=str(path), read_event=lambda db: db.execute("SELECT count(*) FROM line").fetchone()[0],
            keep_event=lambda _: None, publish=self._publish, probe=lambda _: self.probes.append(self.writer.waits_for),
        )  # fmt: skip

    def _publish(self, event, *, recovered):
        self.published.append(event)
        if recovered:
            self.recovered.set()

    def put(self, text, *, inline=False, **rules):
        def operation(db):
            db.execute("INSERT INTO line(text) VALUES (?)", (text,))
            return threading.current_thread()

        return self.writer.submit(operation, rules=Rules(inline=inline, **rules))

    @property
    def disk(self):
        return self.writer._db

    @contextmanager
    def held(self):
        """Its thread stands in an operation of its own meanwhile."""
        standing, let_go = threading.Event(), threading.Event()

        def hold(_):
            standing.set()
            assert let_go.wait(PATIENCE_S)

        future = self.writer.submit(hold)
        assert standing.wait(PATIENCE_S)
        try:
            yield
        finally:
            let_go.set()
        future.result(PATIENCE_S)

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
    assert done.wait(PATIENCE_S)


def test_a_caller_that_may_not_commit_leaves_it_to_the_thread(lines):
    held, let_go = threading.Event(), threading.Event()

    def hold(_):
        held.set()
        let_go.wait(PATIENCE_S)

    lines.writer.submit(hold)
    assert held.wait(PATIENCE_S)
    future = elsewhere(lambda: lines.put("later", inline=True))
    assert not future.done()
    let_go.set()
    assert future.result(PATIENCE_S) is lines.writer._thread


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
    lines.writer._thread.join(PATIENCE_S)
    with pytest.raises(UnderstudyError, match="must be open"):
        lines.put("late")


@pytest.mark.seconds
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


def synchronous(lines):
    told = "PRAGMA synchronous = "
    return [each.removeprefix(told) for each in lines.disk.statements if each.startswith(told)]


def test_only_a_transaction_of_transient_operations_alone_does_not_wait_for_the_disk(lines):
    lines.put("kept").result(PATIENCE_S)
    assert synchronous(lines) == []  # it begins so
    lines.put("passing", transient=True).result(PATIENCE_S)
    assert synchronous(lines) == ["NORMAL"]
    lines.put("kept").result(PATIENCE_S)
    assert synchronous(lines) == ["NORMAL", "FULL"]
    (level,) = lines.disk.execute("PRAGMA synchronous").fetchone()
    assert level == 2
    lines.put("passing", transient=True).result(PATIENCE_S)
    with lines.held():  # what holds is no transient operation
        pass
    assert synchronous(lines) == ["NORMAL", "FULL", "NORMAL", "FULL"]
    with lines.held():
        mixed = [lines.put("one", transient=True), lines.put("two"), lines.put("three", transient=True)]
    wait(mixed, timeout=PATIENCE_S)
    lines.texts().result(PATIENCE_S)
    assert synchronous(lines) == ["NORMAL", "FULL", "NORMAL", "FULL"], "the mixed transaction waited for the disk"


def test_while_the_disk_is_full_operations_wait_in_their_order_and_a_probe_opens_each_try(lines, monkeypatch):
    monkeypatch.setattr(group_commit, "_RETRY_S", 0.01)
    lines.disk.full = True
    first = lines.put("first")
    until(lambda: len(lines.probes) >= 2)
    assert all(lines.probes) and lines.writer.waits_for and not first.done()
    refused = lines.put("refused", refusable=True)
    with pytest.raises(StorageFull, match="disk is full; free space on its disk"):
        refused.result(PATIENCE_S)
    later = [lines.put(text) for text in ("second", "third")]
    lines.disk.full = False
    for future in (first, *later):
        future.result(PATIENCE_S)
    assert lines.texts().result(PATIENCE_S) == ["first", "second", "third"]
    assert lines.recovered.wait(PATIENCE_S) and not lines.writer.waits_for
    num_probes = len(lines.probes)
    lines.put("fourth").result(PATIENCE_S)
    assert len(lines.probes) == num_probes, "no probe once there is room"


HOLDER = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute(sys.argv[2])
db.execute("BEGIN IMMEDIATE")
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("mode", ["PRAGMA journal_mode = WAL", "PRAGMA journal_mode = DELETE"])
def test_a_file_that_another_program_holds_is_waited_for_and_the_program_is_named(tmp_path, monkeypatch, mode):
    monkeypatch.setattr(group_commit, "_RETRY_S", 0.01)
    path = tmp_path / "lines.sqlite"
    with closing(sqlite3.connect(path)) as db:
        db.execute(mode)
    lines = Lines(path)
    lines.disk.execute("PRAGMA busy_timeout = 0")
    with child_process([sys.executable, "-c", HOLDER, str(path), mode], stdin=subprocess.PIPE) as holder:
        assert Output(holder.stdout.fileno()).next(until=time.monotonic() + PATIENCE_S) is not None
        kept, refused = lines.put("kept"), lines.put("refused", refusable=True)
        with pytest.raises(
            StorageFull, match=rf"database is locked, by python\S* \(process {holder.pid}\); end its transaction there"
        ):
            refused.result(PATIENCE_S)
        until(lambda: len(lines.probes) == 0 and lines.writer.waits_for)
        assert not kept.done() and str(holder.pid) in lines.writer.waits_for
    kept.result(PATIENCE_S)
    assert lines.texts().result(PATIENCE_S) == ["kept"] and not lines.writer.waits_for
    lines.writer.close()


def test_a_ledger_whose_disk_or_file_is_not_to_be_had_is_refused_in_words_of_that(tmp_path):
    path = tmp_path / "lines.sqlite"
    Lines(path).writer.close()
    assert holders(path) == {} and holders(tmp_path / "none") == {}
    full = sqlite3.OperationalError("database or disk is full")
    full.sqlite_errorcode = sqlite3.SQLITE_FULL
    assert (
        is_passing(full) and why_not_stored(full, name=str(path)) == "database or disk is full; free space on its disk"
    )
    full.sqlite_errorcode = sqlite3.SQLITE_READONLY
    assert why_not_stored(full, name=str(path)).endswith("free space on its disk, or make it writable")
    full.sqlite_errorcode = sqlite3.SQLITE_BUSY_SNAPSHOT
    assert why_not_stored(full, name=str(path)).endswith(
        "by a program that this system does not show; end its transaction there"
    )
    full.sqlite_errorcode = sqlite3.SQLITE_NOTADB
    assert not is_passing(full)


def until(condition):
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_who_waits_for_the_transaction_of_a_defect_is_told_and_does_not_hang(lines):
    def broken(_):
        raise AttributeError("a defect")

    with lines.held():
        before, defect, after = lines.put("before"), lines.writer.submit(broken), lines.put("after")
    for future in (before, defect, after):
        with pytest.raises(UnderstudyError, match="its writer stopped before this was stored"):
            future.result(PATIENCE_S)


def test_more_than_a_transaction_takes_is_stored_without_another_call(lines):
    with lines.held():
        futures = [lines.put(str(number)) for number in range(3000)]
    assert not wait(futures, timeout=PATIENCE_S).not_done
    assert lines.texts().result(PATIENCE_S) == [str(number) for number in range(3000)]


def test_who_brings_more_than_can_wait_waits(lines, monkeypatch):
    monkeypatch.setattr(group_commit, "_MAX_WAITING", 3)
    with ThreadPoolExecutor(1) as pool:
        with lines.held():
            futures = [lines.put(str(number)) for number in range(3)]
            beyond = pool.submit(lines.put, "3")
            with pytest.raises(TimeoutError):
                beyond.result(0.2)
            assert len(lines.writer._waiting) == 3
        futures.append(beyond.result(PATIENCE_S))
    wait(futures, timeout=PATIENCE_S)
    assert lines.texts().result(PATIENCE_S) == ["0", "1", "2", "3"]
