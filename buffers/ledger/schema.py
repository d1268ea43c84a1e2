"""The ledger's tables, and opening a ledger file.

Called by `Ledger` and by what reads one. Invariants: one process at a time has a file open; ids are never reused; `counter` holds
the number of groups and episodes in each state, kept by triggers in the same transaction as the state itself (and the number
of rounds and tokens, kept by what inserts them), so that reading the counts never scans. A file of another schema is refused; of a
file that is only read, which may be anybody's, also one whose tables hold what no ledger writes.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from threading import Timer

from buffers.errors import UnderstudyError
from buffers.ledger.group_commit import is_passing, why_not_stored
from buffers.records import EpisodeState, GroupState

SCHEMA_VERSION = 9
MAX_SCORE = 1e9
"""The estimators of advantages square scores in float32: from about 1e19 on one judge would silence a whole batch."""
UNREADABLE = (sqlite3.Error, UnicodeDecodeError)
"""What a read of a damaged file raises; the second where the damage is in the text of SQLite's own message."""
LONGEST_READ_S = 60.0
SLOWEST_BYTES_PER_S = 1e6
"""A read of a file takes longer than `LONGEST_READ_S` by its size only, as it leads through no page of it twice."""


# Seconds since 1970. For people who look at the ledger: as clocks jump, nothing is decided by it but that a session is old.
_NOW = "(julianday('now') - 2440587.5) * 86400.0"


def _one_of(states: type[EpisodeState] | type[GroupState]) -> str:
    return "(" + ", ".join(f"'{state}'" for state in states) + ")"


_TABLES = f"""
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

CREATE TABLE task(task_id TEXT PRIMARY KEY, payload TEXT NOT NULL);

-- task_id is NULL for an episode that was opened by its first request: there is no task to try again.
-- first_lease: the first that took it. A group that was given back is claimed again in that order, before all others.
-- num_trained: steps that trained it, in this lineage and those it came from.
-- min_size: members that must score; up to size - min_size may be lost, and the group is trained without them.
-- greedy: the first so many members are sampled at temperature 0. In a group that is trained they are the others' baseline.
-- max_version: the newest policy version among the members' trainable tokens.
CREATE TABLE grp(
    group_id    INTEGER PRIMARY KEY AUTOINCREMENT,
    task_id     TEXT REFERENCES task(task_id),
    instance    INTEGER NOT NULL CHECK (instance >= 0),
    size        INTEGER NOT NULL CHECK (size >= 1),
    min_size    INTEGER NOT NULL CHECK (min_size BETWEEN 1 AND size),
    num_scored  INTEGER NOT NULL DEFAULT 0 CHECK (num_scored BETWEEN 0 AND size),
    num_lost    INTEGER NOT NULL DEFAULT 0 CHECK (num_lost BETWEEN 0 AND size),
    max_version INTEGER,
    state       TEXT NOT NULL DEFAULT 'open' CHECK (state IN {_one_of(GroupState)}),
    reason      TEXT,
    lease_id    INTEGER REFERENCES lease(lease_id),
    first_lease INTEGER,
    num_trained INTEGER NOT NULL DEFAULT 0 CHECK (num_trained >= 0),
    greedy      INTEGER NOT NULL DEFAULT 0,
    opened_at   REAL DEFAULT ({_NOW}),
    CHECK (state NOT IN ('ready', 'leased', 'trained', 'validated')
           OR (num_scored + num_lost = size AND num_scored >= min_size)),
    CHECK ((state IN ('leased', 'trained')) = (lease_id IS NOT NULL)),
    CHECK ((state = 'trained') = (num_trained > 0)),
    UNIQUE (task_id, instance)
);
CREATE INDEX grp_by_state ON grp(state, group_id);
CREATE INDEX grp_ready_by_version ON grp(max_version) WHERE state = 'ready';
CREATE INDEX grp_by_lease ON grp(lease_id) WHERE lease_id IS NOT NULL;
CREATE INDEX grp_given_back ON grp(first_lease, group_id) WHERE state = 'ready' AND first_lease IS NOT NULL;
CREATE INDEX grp_trained_by_version ON grp(max_version) WHERE state = 'trained';

-- max_version: the newest policy version among its trainable tokens; num_rounds and num_tokens count trainable ones.
-- score: the mean of its judges'.
CREATE TABLE episode(
    seq          INTEGER PRIMARY KEY AUTOINCREMENT,
    episode_id   TEXT NOT NULL UNIQUE,
    group_id     INTEGER NOT NULL REFERENCES grp(group_id),
    sample_index INTEGER NOT NULL,
    attempt      INTEGER NOT NULL,
    state        TEXT NOT NULL DEFAULT 'pending' CHECK (state IN {_one_of(EpisodeState)}),
    reason       TEXT,
    score        REAL CHECK (score IS NULL OR abs(score) < {MAX_SCORE}),
    version      INTEGER,
    max_version  INTEGER,
    num_rounds   INTEGER NOT NULL DEFAULT 0,
    num_tokens   INTEGER NOT NULL DEFAULT 0,
    started_at   REAL,
    CHECK ((state = 'scored') = (score IS NOT NULL)),
    UNIQUE (group_id, sample_index, attempt)
);
CREATE INDEX episode_pending ON episode(attempt DESC, seq) WHERE state = 'pending';

CREATE TABLE round(
    episode_id    TEXT NOT NULL REFERENCES episode(episode_id),
    round_index   INTEGER NOT NULL CHECK (round_index >= 0),
    parent        INTEGER CHECK (parent BETWEEN 0 AND round_index - 1),
    num_sampled   INTEGER NOT NULL,
    finish_reason TEXT NOT NULL,
    body          BLOB NOT NULL,  -- of no bytes: it was forgotten
    memo          BLOB,
    trained       BLOB,  -- a byte for each sampled token, 0: not to be trained; NULL: all are
    role          TEXT NOT NULL DEFAULT '',  -- the role that was asked; '': the run has none
    UNIQUE (episode_id, round_index)
);

-- Every score that was reported: what was stored, what changed it, and what was refused. The latest that was stored or
-- revised counts; words are a hint alone. part: a round, or the branch that trains this round, or a role; whole: the episode.
CREATE TABLE score(
    score_id    INTEGER PRIMARY KEY AUTOINCREMENT,
    episode_id  TEXT NOT NULL REFERENCES episode(episode_id),
    part        TEXT NOT NULL DEFAULT 'whole' CHECK (part IN ('whole', 'branch', 'round', 'role')),
    round_index INTEGER,
    role        TEXT NOT NULL DEFAULT '',
    judge       TEXT NOT NULL DEFAULT '',
    value       REAL NOT NULL CHECK (abs(value) < {MAX_SCORE}),
    verdict     TEXT NOT NULL CHECK (verdict IN ('stored', 'revised', 'conflict', 'closed', 'no rounds', 'words')),
    hint        TEXT,  -- what the judge would have told the policy
    told_at     REAL DEFAULT ({_NOW}),
    CHECK ((part IN ('whole', 'role')) = (round_index IS NULL)),
    CHECK ((part = 'role') = (role != '')),
    FOREIGN KEY (episode_id, round_index) REFERENCES round(episode_id, round_index)
);
CREATE INDEX score_by_episode ON score(episode_id, part);

-- An episode that is a session of a user's agent (`understudy serve`), or a stretch of one: whose key opened it, what its client
-- calls it ('': nothing), whether its calls stand beside the main line, and whether another model answers them (`serve.upstream`):
-- nothing of those is ever trained. heard_at: when something of it was stored last; 0: it is to be forgotten, NULL: it was.
-- client: the program that opened it, as it names itself.
CREATE TABLE session(
    episode_id TEXT PRIMARY KEY REFERENCES episode(episode_id),
    user       TEXT NOT NULL,
    name       TEXT NOT NULL,
    is_side    INTEGER NOT NULL,
    is_watched INTEGER NOT NULL DEFAULT 0,
    heard_at   REAL DEFAULT ({_NOW}),
    client     TEXT NOT NULL DEFAULT ''
) WITHOUT ROWID;
CREATE INDEX session_by_name ON session(user, name);
CREATE INDEX session_by_age ON session(heard_at) WHERE heard_at IS NOT NULL;

-- The round that is the answer to a request, by the id that the client has read in it.
CREATE TABLE answer(
    request_id  TEXT PRIMARY KEY,
    episode_id  TEXT NOT NULL REFERENCES session(episode_id),
    round_index INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX answer_by_episode ON answer(episode_id);

-- A lease lives as long as the process that has the file open. max_trained: how often it may be that a group of it is trained.
CREATE TABLE lease(
    lease_id INTEGER PRIMARY KEY AUTOINCREMENT,
    state    TEXT NOT NULL CHECK (state IN ('active', 'committed', 'released', 'superseded')),
    max_trained INTEGER NOT NULL DEFAULT 1 CHECK (max_trained >= 1)
);

-- Stored groups, trained before, that are in a lease's batch beside its fresh ones. Kept: the batch may be made again.
CREATE TABLE joined(
    lease_id INTEGER NOT NULL REFERENCES lease(lease_id),
    group_id INTEGER NOT NULL REFERENCES grp(group_id),
    PRIMARY KEY (lease_id, group_id)
) WITHOUT ROWID;
CREATE INDEX joined_by_group ON joined(group_id);

-- Lineage n continues after step `step` of lineage `parent`; steps of the parent beyond it are not part of it.
CREATE TABLE lineage(
    lineage INTEGER PRIMARY KEY,
    parent  INTEGER REFERENCES lineage(lineage),
    step    INTEGER NOT NULL CHECK (step >= 0),
    CHECK ((lineage = 0) = (parent IS NULL))
);

CREATE TABLE step(
    step_id    INTEGER PRIMARY KEY AUTOINCREMENT,
    lineage    INTEGER NOT NULL REFERENCES lineage(lineage),
    step       INTEGER NOT NULL,
    lease_id   INTEGER NOT NULL UNIQUE REFERENCES lease(lease_id),
    version    INTEGER NOT NULL,
    num_groups INTEGER NOT NULL,  -- 0: it learned demonstrations
    UNIQUE (lineage, step)
);

-- Which groups a step trained, fresh and stored ones; kept, as a group may be trained again in a later lineage.
CREATE TABLE trained(
    step_id  INTEGER NOT NULL REFERENCES step(step_id),
    group_id INTEGER NOT NULL REFERENCES grp(group_id),
    PRIMARY KEY (step_id, group_id)
) WITHOUT ROWID;
CREATE INDEX trained_by_group ON trained(group_id);

CREATE TABLE counter(name TEXT PRIMARY KEY, n INTEGER NOT NULL) WITHOUT ROWID;
"""

_COUNT = "INSERT INTO counter VALUES ({name}, {n}) ON CONFLICT (name) DO UPDATE SET n = n + excluded.n;"


def _count(name: str, n: str = "1") -> str:
    return _COUNT.format(name=name, n=n)


# A reason is a short kind, then optionally ": detail"; kinds are counted.
_KIND = "substr(NEW.reason, 1, instr(NEW.reason || ':', ':') - 1)"

_WATCHED = "(SELECT is_watched FROM session WHERE episode_id = NEW.episode_id)"

_TRIGGERS = f"""
CREATE TRIGGER watched_round BEFORE INSERT ON round
WHEN {_WATCHED} AND (NEW.trained IS NULL OR NEW.trained != zeroblob(NEW.num_sampled)) BEGIN
    SELECT RAISE(ABORT, 'what another model said is never trained');
END;
CREATE TRIGGER watched_flags BEFORE UPDATE OF trained ON round
WHEN {_WATCHED} AND (NEW.trained IS NULL OR NEW.trained != zeroblob(NEW.num_sampled)) BEGIN
    SELECT RAISE(ABORT, 'what another model said is never trained');
END;
CREATE TRIGGER grp_opened AFTER INSERT ON grp BEGIN
    {_count("'groups/' || NEW.state")}
END;
CREATE TRIGGER grp_moved AFTER UPDATE OF state, num_scored ON grp BEGIN
    {_count("'groups/' || OLD.state", "-1")}
    {_count("'groups/' || NEW.state")}
    {_count("'scored/' || OLD.state", "-OLD.num_scored")}
    {_count("'scored/' || NEW.state", "NEW.num_scored")}
END;
CREATE TRIGGER grp_evicted AFTER UPDATE OF state ON grp WHEN NEW.state = 'evicted' BEGIN
    {_count(f"'evicted/' || {_KIND}")}
    {_count(f"'lost/' || {_KIND}", "NEW.num_scored")}
END;
CREATE TRIGGER grp_trained AFTER INSERT ON trained BEGIN
    UPDATE grp SET state = 'trained', num_trained = num_trained + 1 WHERE group_id = NEW.group_id;
    SELECT RAISE(ABORT, 'a group was trained more often than its lease allows') FROM step JOIN lease USING (lease_id)
    WHERE step_id = NEW.step_id AND max_trained < (SELECT num_trained FROM grp WHERE group_id = NEW.group_id);
END;
CREATE TRIGGER grp_joins BEFORE INSERT ON joined BEGIN
    SELECT RAISE(ABORT, 'a stored group joins a batch once, and only while it may be trained again')
    WHERE NOT EXISTS (
        SELECT 1 FROM grp JOIN lease ON num_trained BETWEEN 1 AND max_trained - 1
        WHERE group_id = NEW.group_id AND lease.lease_id = NEW.lease_id
    ) OR EXISTS (
        SELECT 1 FROM joined JOIN lease USING (lease_id) WHERE group_id = NEW.group_id AND state = 'active'
    );
END;
CREATE TRIGGER episode_opened AFTER INSERT ON episode BEGIN
    {_count("'episodes/' || NEW.state")}
END;
CREATE TRIGGER episode_moved AFTER UPDATE OF state ON episode BEGIN
    {_count("'episodes/' || OLD.state", "-1")}
    {_count("'episodes/' || NEW.state")}
END;
CREATE TRIGGER episode_failed AFTER UPDATE OF state ON episode WHEN NEW.state = 'failed' BEGIN
    {_count(f"'failed/' || {_KIND}")}
END;
"""

# Of this connection only, in memory: which episodes ended in the transaction at hand. Rolled back with it.
_CLOSED = """
CREATE TEMP TABLE closed(episode_id TEXT NOT NULL, state TEXT NOT NULL, reason TEXT);
CREATE TEMP TRIGGER episode_closed AFTER UPDATE OF state ON main.episode
WHEN NEW.state IN ('scored', 'failed') BEGIN
    INSERT INTO closed VALUES (NEW.episode_id, NEW.state, NEW.reason);
END;
"""


def open_database(path: Path | None) -> tuple[sqlite3.Connection, sqlite3.Connection | None]:
    """The connection to the ledger at `path` (made if missing) or, for None, to a new one in memory; and what keeps other
    owners away until it is closed."""
    name = ":memory:" if path is None else str(path)
    owner = None if path is None else _own(path)
    try:
        db = sqlite3.connect(name, isolation_level=None, check_same_thread=False, timeout=10.0, cached_statements=256)
    except sqlite3.Error as error:
        raise _cannot_open(name, error) from error
    try:
        _prepare(db, name=name)
    except sqlite3.Error as error:
        _close(db, owner)
        if is_passing(error):
            raise UnderstudyError(f"ledger {name} cannot be written: {why_not_stored(error, name=name)}") from error
        raise UnderstudyError(f"ledger {name} must be a ledger file: {error}; name another file") from error
    except UnderstudyError:
        _close(db, owner)
        raise
    return db, owner


def check_files(path: Path) -> None:
    """Raises UnderstudyError where a database, or what SQLite keeps beside it, is a device, on which a read would wait."""
    for file in (path, *(path.with_name(f"{path.name}-{end}") for end in ("wal", "shm", "owner", "journal"))):
        if file.exists() and not file.is_file():
            raise UnderstudyError(f"{file} must be a file, got a folder or a device; get it from its run again")


def read_database(path: Path, *, any_thread: bool = False, leave_no_trace: bool = False) -> sqlite3.Connection:
    """A connection that only reads, at any time: what it sees within a transaction is one commit of the owner, if there is one.

    `any_thread`: the caller sees to it that one thread at a time uses it. `leave_no_trace`: where nobody has the ledger open and it
    was closed in order, SQLite makes no files beside it. Raises UnderstudyError for what is no ledger of this version, and for one
    that says what no ledger of ours does.
    """
    check_files(path)
    immutable = "&immutable=1" if leave_no_trace and _is_closed(path) else ""
    try:
        db = sqlite3.connect(
            f"{path.resolve().as_uri()}?mode=ro{immutable}",
            uri=True,
            isolation_level=None,
            timeout=10.0,
            check_same_thread=not any_thread,
        )
        with bounded(db, path=path):
            version = _read_version(db)
            strange = _strange(db) if version == str(SCHEMA_VERSION) else ""
    except UNREADABLE as error:
        raise UnderstudyError(f"{path} must be a ledger file: {error}; name a run's folder or its ledger") from error
    if version != str(SCHEMA_VERSION):
        db.close()
        raise UnderstudyError(
            f"ledger {path} must have schema version {SCHEMA_VERSION}, got {version}; open it with "
            f"the release that wrote it"
        )
    if strange:
        db.close()
        raise UnderstudyError(f"ledger {path} must hold what a run writes, got {strange}; get it from its run again")
    return db


def overwrite(path: Path, *, whole: bool, wait_s: float) -> None:
    """Leave nothing of what was deleted in a ledger's file and in its log. `whole`: the file is written anew, which gives its space
    back, too. For the owner, between two transactions. Raises UnderstudyError."""
    try:
        with closing(sqlite3.connect(path, isolation_level=None, timeout=wait_s)) as db:
            db.execute("PRAGMA secure_delete = ON")
            if whole:
                db.execute("VACUUM")
            (is_held, *_) = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    except sqlite3.Error as error:
        raise UnderstudyError(
            f"ledger {path} cannot be written anew: {why_not_stored(error, name=str(path))}"
        ) from error
    if is_held:
        raise UnderstudyError(f"ledger {path} is being read, so that its log keeps what was deleted; ask again later")


@contextmanager
def bounded(db: sqlite3.Connection, *, path: Path) -> Iterator[None]:
    """Ends reads in this block, with sqlite3.OperationalError, that take longer than a file of this size can."""
    try:
        size = 512 * path.stat().st_blocks  # on the disk: a file of holes is no longer than what is in it
    except OSError:  # moved away, and still open
        size = 0
    timer = Timer(LONGEST_READ_S + size / SLOWEST_BYTES_PER_S, db.interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def is_owned(path: Path) -> bool:
    """Whether a process has the ledger at `path` open for writing. It only looks."""
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}-owner?mode=ro", uri=True, timeout=0.0)) as db:
            db.execute("SELECT 1 FROM sqlite_schema")
    except sqlite3.OperationalError as error:  # locked; or there is no such file, and was no owner
        return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY
    return False


def _is_closed(path: Path) -> bool:
    log = path.with_name(f"{path.name}-wal")
    return not is_owned(path) and not (log.is_file() and log.stat().st_size)


def _own(path: Path) -> sqlite3.Connection:
    """A lock beside the file, which ends with the process however that dies, and is not handed on to its children.

    A second owner would take running episodes for those of a dead one; readers need no lock.
    """
    owner = None
    try:
        owner = sqlite3.connect(f"{path}-owner", isolation_level=None, check_same_thread=False, timeout=1.0)
        owner.execute("BEGIN EXCLUSIVE")
    except sqlite3.Error as error:
        if owner is None:
            raise _cannot_open(str(path), error) from error
        owner.close()
        if is_passing(error) and not is_owned(path):
            raise UnderstudyError(
                f"ledger {path} cannot be written: {why_not_stored(error, name=str(path))}"
            ) from error
        raise UnderstudyError(
            f"ledger {path} must be a ledger file that no other process has open: {error}; "
            f"end that process or name another file"
        ) from error
    return owner


def _cannot_open(name: str, error: sqlite3.Error) -> UnderstudyError:
    return UnderstudyError(f"ledger {name} cannot be opened: {error}; make its folder and check its rights")


def _close(*connections: sqlite3.Connection | None) -> None:
    for connection in connections:
        if connection is not None:
            connection.close()


def _prepare(db: sqlite3.Connection, *, name: str) -> None:
    for pragma in ("page_size = 16384", "journal_mode = WAL", "synchronous = FULL"):
        db.execute(f"PRAGMA {pragma}")
    db.execute("PRAGMA temp_store = MEMORY")
    db.execute("PRAGMA secure_delete = ON")
    db.execute("PRAGMA foreign_keys = ON")
    db.execute("PRAGMA journal_size_limit = 67108864")
    db.execute("BEGIN IMMEDIATE")
    (num_tables,) = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    db.execute("ROLLBACK")
    if num_tables == 0:
        _create(db)
    elif (version := _read_version(db)) != str(SCHEMA_VERSION):
        raise UnderstudyError(
            f"ledger {name} must have schema version {SCHEMA_VERSION}, got {version}; "
            f"open it with the release that wrote it"
        )
    db.executescript(_CLOSED)


def _create(db: sqlite3.Connection) -> None:
    names = [f"episodes/{state}" for state in EpisodeState]
    names += [f"{kind}/{state}" for kind in ("groups", "scored") for state in GroupState]
    counters = ", ".join(f"('{name}', 0)" for name in [*names, "rounds", "tokens"])
    db.executescript(
        f"BEGIN IMMEDIATE; {_TABLES} {_TRIGGERS} INSERT INTO counter VALUES {counters}; "
        f"INSERT INTO meta VALUES ('schema_version', '{SCHEMA_VERSION}'), ('epoch', '0'), ('run_id', lower(hex(randomblob(8)))); "
        f"INSERT INTO lineage VALUES (0, NULL, 0); COMMIT;"
    )


Column = tuple[str, str, bool, int, int]
"""Name, type, whether it is never NULL, place in the primary key, and what is hidden of it."""
_READ_BY_KEY = ("round",)
"""Tables whose rows are checked when they are read, as a walk through them would be one through the whole file."""


def _columns(db: sqlite3.Connection, table: str) -> tuple[Column, ...]:
    return tuple(
        (name, kind, bool(needed), key, hidden)
        for _, name, kind, needed, _, key, hidden in db.execute(f"PRAGMA table_xinfo({table})")
    )


@cache
def _tables() -> Mapping[str, tuple[Column, ...]]:
    with closing(sqlite3.connect(":memory:")) as db:
        _create(db)
        names = db.execute("SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite%'").fetchall()
        return {name: _columns(db, name) for (name,) in names}


def _strange(db: sqlite3.Connection) -> str:
    """What is not as a ledger of ours has it: views and tables of other columns, which SQLite would compute without end, and values
    of other types or far too large. Empty: nothing."""
    for table, columns in _tables().items():
        found = db.execute("SELECT type, rootpage FROM sqlite_schema WHERE name = ?", (table,)).fetchall()
        if len(found) != 1 or found[0][0] != "table" or not found[0][1] or _columns(db, table) != columns:
            return f"{table!r} as {found[0][0] if found else 'nothing'} of other columns"
    for table, columns in _tables().items():
        if table in _READ_BY_KEY:
            continue
        rules = [_rule(table, *column[:3]) for column in columns]
        wrong = db.execute(f"SELECT {', '.join(rules)} FROM {table} WHERE {' OR '.join(rules)} LIMIT 1").fetchone()
        if wrong is not None:
            return f"a value of {table}.{columns[wrong.index(1)][0]} that is none"
    # Ids are given one after another, and none is taken back: readers make room for the largest.
    for table, key in (("grp", "group_id"), ("episode", "seq")):
        (number, largest) = db.execute(f"SELECT count(*), coalesce(max({key}), 0) FROM {table}").fetchone()
        if largest > 2 * number + 1000:
            return f"{table}.{key} {largest} of {number} rows"
    for table in ("grp", "episode", "trained", "joined"):
        if (lost := db.execute(f"PRAGMA foreign_key_check({table})").fetchone()) is not None:
            return f"a row of {table} that names no {lost[2]}"
    return ""


_STATES: Mapping[str, type[EpisodeState] | type[GroupState]] = {"grp": GroupState, "episode": EpisodeState}


def _rule(table: str, name: str, kind: str, needed: bool) -> str:
    """The condition of SQL that a value of this column is none."""
    is_bad = {
        "INTEGER": f"typeof({name}) != 'integer' OR abs({name}) >= {1 << (53 if table == 'counter' else 31)}",
        "REAL": f"typeof({name}) NOT IN ('real', 'integer') OR abs({name}) > 1e15",
        "TEXT": f"typeof({name}) != 'text'",
    }[kind]
    if name == "state" and table in _STATES:
        is_bad += f" OR {name} NOT IN {_one_of(_STATES[table])}"
    return f"({name} IS {'' if needed else 'NOT '}NULL {'OR' if needed else 'AND'} ({is_bad}))"


def _read_version(db: sqlite3.Connection) -> str:
    if not db.execute("SELECT 1 FROM sqlite_schema WHERE name = 'meta'").fetchone():
        return "none (not a ledger)"
    row = db.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
    return "none" if row is None else str(row[0])
