"""Rules of a run's folder that somebody sent: each command ends, with one line that says what is damaged."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from buffers.ledger import schema
from learner import cli
from tests.configs.test_bounded_yaml import tenfold
from tests.learner.diagnosis.recorded_run import RecordedRun
from tests.learner.page.page_parts import machine_line, make_run, write_lines

COMMANDS: dict[str, Callable[[Path, Path], list[str]]] = {
    "why": lambda run, out: ["why", str(run)],
    "compare": lambda run, out: ["compare", str(run), str(run.with_name("good")), "--picture", str(out / "curves.png")],
    "page": lambda run, out: ["page", str(run), "--export", str(out / "page.html")],
    "inspect": lambda run, out: ["ledger", "inspect", str(run)],
    "inspect one": lambda run, out: ["ledger", "inspect", str(run), "--episode", "1-0-0"],
    "doctor": lambda run, out: ["ledger", "doctor", str(run)],
    "export": lambda run, out: ["ledger", "export", str(run), "--parquet", str(out / "rows.parquet")],
    "rescore": lambda run, out: ["ledger", "rescore", str(run), "--scorer", "env_adapters.scoring.scorers.exact_match"],
}
OF_LEDGER = ("why", "page", "inspect", "inspect one", "doctor", "export", "rescore")
pytestmark = pytest.mark.seconds
Say = Callable[[str], tuple[int, str, str]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("whole"), name="good")
    recorded = RecordedRun(folder.with_name("recorded"), "run.name=good").steps().folder
    for name in ("config.yaml", "metrics.jsonl"):
        shutil.copy(recorded / name, folder / name)
    write_lines(folder / "machine.jsonl", [machine_line()])
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "good")
    return shutil.copytree(whole, tmp_path / "sent")


@pytest.fixture
def say(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Say:
    """Plays a command on the run: exit code, output, errors."""

    def say(name: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main(COMMANDS[name](run, tmp_path))
        told = capsys.readouterr()
        return code, told.out, told.err

    return say


def damage(run: Path, *statements: str) -> None:
    """As somebody does who has the file: no rule of the ledger holds them."""
    with closing(sqlite3.connect(run / "ledger.sqlite", isolation_level=None)) as db:
        db.executescript(
            "PRAGMA ignore_check_constraints = ON; PRAGMA foreign_keys = OFF; PRAGMA writable_schema = ON;"
        )
        for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall():
            db.execute(f"DROP TRIGGER {name}")
        for statement in statements:
            db.execute(statement)


def is_refused(name: str, say: Say, words: str) -> None:
    """In one line: of a page, beside what it could show."""
    code, out, err = say(name)
    if name == "page":
        assert code == 0 and words in out and "left out, as of sent: " in out and out.count("\n") == 1, out + err
    else:
        assert code == (1 if name == "doctor" and not err else 2) and words in out + err, out + err
        assert (out + err).count("\n") <= 2


@pytest.mark.parametrize("name", COMMANDS)
def test_a_run_that_is_whole_is_shown(say: Say, name: str) -> None:
    code, out, err = say(name)
    assert code == 0 and "left out" not in out and "damaged" not in out + err, out + err


ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT "
LEDGERS = {
    "a view without an end": (
        ["ALTER TABLE grp RENAME TO grp_of_before", f"CREATE VIEW grp AS {ENDLESS} x AS group_id, * FROM n JOIN grp_of_before"],
        "'grp' as view of other columns",
    ),
    "a view of the counts": (
        ["DROP TABLE counter", f"CREATE VIEW counter AS {ENDLESS} 'episodes/scored' AS name, x AS n FROM n"],
        "'counter' as view of other columns",
    ),
    "a computed column": (
        ["ALTER TABLE episode ADD COLUMN more AS (length(zeroblob(1000000000)))"],
        "'episode' as table of other columns",
    ),
    "no table": (["DROP TABLE score"], "'score' as nothing of other columns"),
    "text in place of a number": (["UPDATE episode SET num_tokens = 'many'"], "a value of episode.num_tokens that is none"),
    "a number that is too large": (["UPDATE grp SET size = 1 << 60"], "a value of grp.size that is none"),
    "a score without an end": (["UPDATE episode SET score = 9e999"], "a value of episode.score that is none"),
    "a state that is none": (["UPDATE grp SET state = 'owned'"], "a value of grp.state that is none"),
    "an id far away": (["UPDATE episode SET seq = 2000000000 WHERE seq = 1"], "episode.seq 2000000000 of"),
    "a step of no group": (["UPDATE trained SET group_id = 99999 WHERE step_id = 1"], "a row of trained that names no grp"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, "a view without an end") for name in OF_LEDGER] + [("page", kind) for kind in LEDGERS],
)
def test_a_ledger_that_no_run_writes_is_refused(run: Path, say: Say, name: str, kind: str) -> None:
    statements, words = LEDGERS[kind]
    damage(run, *statements)
    is_refused(name, say, words)


@pytest.mark.parametrize("name", ["page", "inspect one", "doctor", "export", "rescore"])
@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("UPDATE round SET body = CAST(substr(body, 1, 30) || x'ff' || substr(body, 32) AS BLOB) WHERE {}", "checksum"),
        ("UPDATE round SET body = 'text' WHERE {}", "round body must"),
        ("UPDATE round SET body = zeroblob(0) WHERE {}", "round body must"),
    ],
)
def test_a_damaged_round_is_named(run: Path, say: Say, name: str, statement: str, words: str) -> None:
    """And the episodes beside it are shown."""
    damage(run, statement.format("episode_id = '1-0-0' AND round_index = 0"))
    is_refused(name, say, words)
    is_refused(name, say, "round 0 of episode 1-0-0")
    if name == "page":
        assert "7 episodes" in say(name)[1]


@pytest.mark.parametrize("name", ["page", "inspect one", "export"])
@pytest.mark.parametrize(
    "change", ["trained = x'01'", "trained = 'x'", "parent = 7", "parent = round_index", "memo = 3, role = 4, finish_reason = 5"]
)  # fmt: skip
def test_a_damaged_row_of_a_round_ends_in_one_line(run: Path, say: Say, name: str, change: str) -> None:
    damage(run, f"UPDATE round SET {change} WHERE episode_id = '1-0-0' AND round_index = 1")
    code, out, err = say(name)
    assert code in (0, 2) and err.count("\n") <= 1, out + err


@pytest.mark.parametrize("name", OF_LEDGER)
def test_a_file_of_broken_pages_is_named(run: Path, say: Say, name: str) -> None:
    file = run / "ledger.sqlite"
    data = bytearray(file.read_bytes())
    for start in range(16384, len(data), 16384):
        data[start : start + 64] = b"\xff" * 64
    file.write_bytes(data)
    code, out, err = say(name)
    assert code == (0 if name == "page" else 2) and "malformed" in out + err and (out + err).count("\n") == 1, out + err


def test_a_read_that_takes_longer_than_its_file_explains_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "LONGEST_READ_S", 0.05)
    db = sqlite3.connect(tmp_path / "a.sqlite")
    with (
        closing(db),
        pytest.raises(sqlite3.OperationalError, match="interrupt"),
        schema.bounded(db, path=tmp_path / "a.sqlite"),
    ):
        db.execute(f"{ENDLESS} count(*) FROM n").fetchone()


CONFIGS = {
    "aliases": tenfold("  a{0}: &a{0} [{1}]\n"),
    "merged": tenfold("  a{0}: &a{0} {{<<: [{1}], k: 1}}\n"),
    "itself": "model: &m {path: *m}\n",
    "brackets": "model: {path: " + "[" * 5000,
    "digits": "model: {path: " + "9" * 5000 + "}\n",
}


@pytest.mark.parametrize("name", ["why", "compare", "page"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_configuration_that_no_run_writes_is_refused(run: Path, say: Say, name: str, kind: str) -> None:
    (run / "config.yaml").write_text(CONFIGS[kind])
    is_refused(name, say, "config.yaml")


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_ledger_of_such_a_run_is_inspected(run: Path, say: Say, kind: str) -> None:
    (run / "config.yaml").write_text(CONFIGS[kind])
    assert say("inspect one")[0] == 0


FIGURES = {
    "deep": "[" * 100_000,
    "a list": "[1]",
    "cut": '{"step": 1',
}


@pytest.mark.parametrize("name", ["why", "compare", "page"])
@pytest.mark.parametrize("kind", FIGURES)
def test_figures_that_no_run_writes_are_refused(run: Path, say: Say, name: str, kind: str) -> None:
    (run / "metrics.jsonl").write_text(FIGURES[kind] + "\n")
    is_refused(name, say, "metrics.jsonl must hold a JSON object on each line, got line 1: ")


@pytest.mark.parametrize("name", ["why", "compare", "page"])
@pytest.mark.parametrize("value", ["1e999", "NaN", "9" * 400, '"x"', "[]", "1e300", "-0"])
def test_figures_that_are_no_numbers_are_left_out(run: Path, say: Say, name: str, value: str) -> None:
    figures = ", ".join(
        f'"{one}": {value}' for one in ("reward/mean", "reward/std", "reward/min", "reward/max", "batch/episodes")
    )
    (run / "metrics.jsonl").write_text(
        f'{{"step": 1, {figures}, "val/mean": {value}}}\n{{"step": {value}, {figures}}}\n' * 9
    )
    (run / "machine.jsonl").write_text(
        f'{{"at": {value}, "step": {value}, "learner": {value}, "pool": {value}, "groups": {{"ready": {value}}}, '
        f'"engines": [{{"kv_share": {value}, "running": {value}}}]}}\n'
    )
    (run / "summary.json").write_text(f'{{"wall_s": {value}, "error": {value}, "stopped": {value}, "buffer": {value}}}')
    code, out, err = say(name)
    assert code == 0 and "left out" not in out, out + err


@pytest.mark.parametrize("name", ["why", "page", "inspect"])
@pytest.mark.parametrize(
    "file", ["metrics.jsonl", "machine.jsonl", "summary.json", "ledger.sqlite-owner", "ledger.sqlite-wal"]
)
def test_a_pipe_is_not_waited_for(run: Path, say: Say, name: str, file: str) -> None:
    (run / file).unlink(missing_ok=True)
    os.mkfifo(run / file)
    code, out, err = say(name)
    assert code in (0, 2) and err.count("\n") <= 1, out + err


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_logs_of_agents_that_lead_out_of_the_folder_are_not_read(run: Path, say: Say, kind: str) -> None:
    damage(run, "UPDATE episode SET reason = 'agent exited with code 1' WHERE state = 'failed'")
    log = run / "agents" / "1-0-0" / "log.txt"
    log.parent.mkdir(parents=True)
    secret = run.parent / "secret.txt"
    secret.write_text("SecretError: of this machine\n")
    log.symlink_to(secret) if kind == "link" else os.mkfifo(log)
    code, out, _ = say("why")
    assert code == 0 and "agent exited with code 1" in out and "SecretError" not in out
