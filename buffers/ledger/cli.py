"""`python -m buffers.ledger inspect|episodes|export|doctor|backup|rescore|forget RUN`: a run's ledger, for its operator.

RUN is a run's folder or a ledger file. Everything but `rescore --revise` and `forget` only reads, and may be used while the run
lives: each command sees the ledger as of one commit. It trains nothing and repairs nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sqlite3
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from buffers.disk import replacing
from buffers.errors import ScoreError, UnderstudyError
from buffers.ledger.answers import Decode, answer_of, answers, in_a_line
from buffers.ledger.batches import read_rounds
from buffers.ledger.doctor import findings
from buffers.ledger.encode import checked_score
from buffers.ledger.episode_query import EPISODE_KEYS, Query
from buffers.ledger.episode_views import ORDERS, FilterError, read_agents, search
from buffers.ledger.export import export_atif, export_messages, export_parquet, recorded_sessions
from buffers.ledger.forgetting import Forgotten, episodes_of, require_some
from buffers.ledger.reader import LedgerReader
from buffers.ledger.schema import UNREADABLE, is_owned
from buffers.ledger.scores import score_history
from buffers.ledger.turns import TokenDecoder
from buffers.records import ScoreDetail

MAX_CONFIG_CHARACTERS, MAX_CONFIG_DEPTH = 1 << 17, 50
_BACKUP_PAGES = 256


def main(
    arguments: Sequence[str],
    *,
    open_ledger: Callable[..., Any],
    program: str = "python -m buffers.ledger",
    ask: Callable[[Path, dict[str, str]], dict[str, Any]] | None = None,
    clean_up: Callable[[Path, Forgotten], Iterable[str]] | None = None,
) -> int:
    """Run one command; returns the exit code. `open_ledger(path)`: the Ledger, for what writes. `program`: what the user calls it
    by. `ask(folder, what)`: has a live run forget. `clean_up(folder, forgotten)`: the same of a run's other files; lines on
    what is left."""
    options = _parser(program).parse_args(arguments)
    try:
        path = ledger_path(options.run)
        if options.command == "rescore":
            return rescore(path, options=options, open_ledger=open_ledger)
        if options.command == "forget":
            if ask is None or clean_up is None:
                raise UnderstudyError("forget takes it out of a run's other files, too; use `understudy ledger forget`")
            return forget(path, options=options, open_ledger=open_ledger, ask=ask, clean_up=clean_up)
        with closing(LedgerReader(path)) as reader, reader.read() as db:
            return int(options.act(db, path=path, options=options))
    except UnderstudyError as error:
        print(error, file=sys.stderr)
        return 2


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program, description="Show a run's ledger to its operator, also while the run lives."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    every = {
        "inspect": (inspect, "counts, ages and staleness of each state; with --episode, one as text and tokens"),
        "episodes": (
            episodes,
            "episodes that match, a line for each: step, version, score, rounds, tokens, state, answer",
        ),
        "export": (export, "all scored episodes: training rows as parquet; conversations as chat messages, or as ATIF"),
        "doctor": (doctor, "checks the file, every checksum and the counts"),
        "backup": (backup, "a copy of the ledger, also of a live run"),
        "rescore": (None, "replays stored episodes through another scorer"),
        "forget": (None, "overwrites what was said in sessions, and tells which versions were trained on it"),
    }
    for name, (act, words) in every.items():
        command = commands.add_parser(name, help=words, description=words)
        command.add_argument("run", type=Path, metavar="RUN", help="a run's folder, or a ledger file")
        command.set_defaults(act=act)
        if name in ("inspect", "episodes", "export", "rescore"):
            command.add_argument("--tokenizer", type=Path, help="folder of a tokenizer.json; default: the run's model")
    commands.choices["inspect"].add_argument("--episode", metavar="ID")
    listed = commands.choices["episodes"]
    listed.add_argument(
        "--where", nargs="+", default=[], metavar="NAME=VALUE",
        help=f"what they must be, such as state=failed step=10-20 min_score=0.5; names: {', '.join(EPISODE_KEYS)}",
    )  # fmt: skip
    listed.add_argument("--sort", choices=list(ORDERS), default="newest", help="their order (default: newest)")
    listed.add_argument("--limit", type=int, default=20, metavar="N", help="how many (default: 20)")
    listed.add_argument("--json", action="store_true", help="a line of JSON for each, texts whole")
    form = commands.choices["export"].add_mutually_exclusive_group(required=True)
    form.add_argument(
        "--parquet", type=Path, metavar="FILE", help="a row for each branch: ids, masks, log-probabilities"
    )
    form.add_argument(
        "--messages", type=Path, metavar="FILE.jsonl", help="a line for each branch: OpenAI's messages, score"
    )
    form.add_argument(
        "--atif",
        type=Path,
        metavar="FOLDER",
        help="a document for each branch: messages, score, ids, log-probabilities",
    )
    for name in ("export", "forget"):
        chosen = commands.choices[name]
        chosen.add_argument("--user", default="", metavar="NAME", help="the sessions of this user's key")
        chosen.add_argument(
            "--session", default="", metavar="NAME", help="a session, by its client's name for it or its id"
        )
    commands.choices["forget"].add_argument("--episode", default="", metavar="ID", help="this episode alone")
    commands.choices["backup"].add_argument("--to", type=Path, required=True, metavar="FILE")
    again = commands.choices["rescore"]
    again.add_argument("--scorer", required=True, metavar="MODULE.FUNCTION", help="(task, answer) -> score")
    again.add_argument("--revise", action="store_true", help="store the new scores of what is not trained yet (no run)")
    return parser


def ledger_path(run: Path) -> Path:
    """The ledger of a run's folder, or the file itself."""
    path = run / "ledger.sqlite" if run.is_dir() else run
    if not path.is_file():
        raise UnderstudyError(f"RUN must be a run's folder or a ledger file, got {run}; name one, such as runs/demo")
    return path


def inspect(db: sqlite3.Connection, *, path: Path, options: argparse.Namespace) -> int:
    """What is where, and for how long."""
    if options.episode:
        _print_episode(db, options.episode, decode=decoder(path, given=options.tokenizer))
        return 0
    (version,) = db.execute("SELECT coalesce(max(version), 0) FROM step").fetchone()
    (steps, lineages) = db.execute("SELECT count(*), (SELECT count(*) FROM lineage) FROM step").fetchone()
    print(f"{path}: {steps} steps, policy version {version}, {lineages} lineage(s)")
    print(f"{'groups':<12}{'number':>8}{'scored':>8}{'oldest':>10}{'staleness':>11}")
    # What ended has no age that grows: it counts to the last commit.
    now = time.time() if is_owned(path) else path.stat().st_mtime
    for state, number, scored, opened_at, max_version in db.execute(
        "SELECT state, count(*), sum(num_scored), min(opened_at), min(max_version) FROM grp GROUP BY state ORDER BY state"
    ):
        stale = "" if max_version is None or state not in ("ready", "leased") else str(version - max_version)
        print(f"{state:<12}{number:>8}{scored:>8}{_age(now, since=opened_at):>10}{stale:>11}")
    print(f"{'episodes':<12}{'number':>8}{'tokens':>8}{'oldest':>10}")
    for state, number, tokens, started_at in db.execute(
        "SELECT state, count(*), sum(num_tokens), min(started_at) FROM episode GROUP BY state ORDER BY state"
    ):
        print(f"{state:<12}{number:>8}{tokens:>8}{_age(now, since=started_at):>10}")
    for reason, number in db.execute(
        "SELECT reason, count(*) FROM grp WHERE state = 'evicted' GROUP BY reason ORDER BY 2 DESC LIMIT 10"
    ):
        print(f"evicted {number}: {reason}")
    return 0


def episodes(db: sqlite3.Connection, *, path: Path, options: argparse.Namespace) -> int:
    """Those that match, in order, with what was said last."""
    given = dict(word.partition("=")[::2] for word in options.where)
    if unknown := sorted(given.keys() - set(EPISODE_KEYS)):
        raise FilterError(f"--where must name one of {', '.join(EPISODE_KEYS)}, got {unknown[0]!r:.40}")
    if options.limit < 1:
        raise FilterError(f"--limit must be at least 1, got {options.limit}; leave it out for 20")
    while read_agents(db):
        pass
    found = search(db, Query(given).episode_filter(), order=options.sort, limit=options.limit, cursor=None)
    decode = decoder(path, given=options.tokenizer, plain=True)
    if not options.json:
        print(f"{'episode':<14}{'step':>6}{'version':>9}{'score':>8}{'rounds':>8}{'tokens':>8}  state: task, answer")
    for each in found.episodes:
        said = answer_of(db, episode_id=each.episode_id, decode=decode)
        if options.json:
            print(json.dumps({**asdict(each), **said.record()}, ensure_ascii=False))
            continue
        step, version = ("-" if value is None else str(value) for value in (each.step, each.version))
        score = "-" if each.score is None else f"{each.score:.3g}"
        state = each.state if each.reason is None else f"{each.state} ({each.reason:.60})"
        print(
            f"{each.episode_id:<14}{step:>6}{version:>9}{score:>8}{each.rounds:>8}{each.tokens:>8}  "
            f"{state}: {each.task_id or 'no task'}, {in_a_line(said.answer)}"
        )
    if found.total > len(found.episodes):
        print(f"{found.total - len(found.episodes):,} more; --limit shows them", file=sys.stderr)
    return 0


def export(db: sqlite3.Connection, *, path: Path, options: argparse.Namespace) -> int:
    """What was asked for, of every scored episode; of a user's sessions, conversations without a score too."""
    to = options.parquet or options.messages or options.atif
    only = None
    if options.user or options.session:
        only = set(episodes_of(db, user=options.user, session=options.session))
        require_some([*only], user=options.user, session=options.session)
    try:
        if options.parquet:
            print(f"{export_parquet(db, path=to, episodes=only)} rows in {to}")
            return 0
        decoder = TokenDecoder(tokenizer_of(path, given=options.tokenizer))
        sessions = recorded_sessions(db, decoder=decoder, episodes=only)
        number = export_messages(sessions, path=to) if options.messages else export_atif(sessions, folder=to)
    except OSError as error:
        raise UnderstudyError(f"what is exported must go where it can be written, got {to} ({error})") from error
    print(f"{number} conversations in {to}")
    return 0


def doctor(db: sqlite3.Connection, *, path: Path, options: argparse.Namespace) -> int:
    """0 when nothing is wrong."""
    try:
        wrong = findings(db)
    except UNREADABLE as error:
        wrong = [f"file: {error}"]
    for line in wrong:
        print(line)
    print(f"{path}: " + (f"{len(wrong)} findings" if wrong else "sound: file, checksums, references and counts"))
    return 1 if wrong else 0


def backup(db: sqlite3.Connection, *, path: Path, options: argparse.Namespace) -> int:
    """The copy appears whole or not at all."""
    try:
        with replacing(options.to) as scratch:
            with closing(sqlite3.connect(scratch)) as copy:
                db.backup(copy, pages=_BACKUP_PAGES)
                copy.execute("PRAGMA journal_mode = DELETE")
            with scratch.open("rb") as stored:
                os.fsync(stored.fileno())
    except (OSError, sqlite3.Error) as error:
        raise UnderstudyError(f"--to must be a file that can be written, got {options.to} ({error})") from error
    print(f"{options.to}: {options.to.stat().st_size} bytes")
    return 0


def rescore(path: Path, *, options: argparse.Namespace, open_ledger: Callable[..., Any]) -> int:
    """One line of JSON for each scored episode; how many would change. `--revise` stores what is not trained yet."""
    scorer, decode = _function(options.scorer), decoder(path, given=options.tokenizer, plain=True)
    with closing(LedgerReader(path)) as reader, reader.read() as db:
        stored = [each for each in answers(db, decode=decode) if each.score is not None and each.task is not None]
    found = []
    for each in stored:
        score = checked_score(scorer(each.task, each.answer), episode_id=each.episode_id)
        found.append({"episode_id": each.episode_id, "group": each.group_state, "before": each.score, "score": score})
    for entry in found:
        print(json.dumps(entry))
    changed = [entry for entry in found if entry["score"] != entry["before"]]
    print(f"{len(found)} episodes, {len(changed)} with another score", file=sys.stderr)
    if options.revise:
        revision, number = ScoreDetail(revise=True), 0
        with open_ledger(path, resume_episodes=True) as ledger:
            for entry in changed:
                if entry["group"] in ("open", "ready"):
                    ledger.notify_score(entry["episode_id"], entry["score"], detail=revision).result()
                    number += 1
        print(f"{number} revised; what was in a batch keeps its score", file=sys.stderr)
    return 0


def forget(
    path: Path,
    *,
    options: argparse.Namespace,
    open_ledger: Callable[..., Any],
    ask: Callable[[Path, dict[str, str]], dict[str, Any]],
    clean_up: Callable[[Path, Forgotten], Iterable[str]],
) -> int:
    """Says what was overwritten, and where it is still. 1: some of it is in a batch just now, and was left."""
    what = {"user": options.user, "session": options.session, "episode_id": options.episode}
    if bool(what["episode_id"]) == bool(what["user"] or what["session"]):
        raise UnderstudyError(
            "forget takes --user, --session or both, or --episode alone; name what is to be forgotten"
        )
    if not is_owned(path):
        taken = _forget(path, open_ledger=open_ledger, **what)
    else:
        told = ask(path.parent, what)
        taken = Forgotten._make(
            tuple(each) if isinstance(each, list) else each for each in map(told.get, Forgotten._fields)
        )
    print(
        f"forgotten: {len(taken.episodes)} episodes, {taken.rounds} rounds ({taken.tokens:,} sampled tokens), {taken.words} words "
        f"of feedback; {taken.untrained} episodes were not trained, and never will be"
    )
    for line in clean_up(path.parent, taken):
        print(line)
    if taken.in_batch:
        print(
            f"left: {', '.join(taken.in_batch)}, in the batch that is trained now; the run forgets a session after it"
        )
    return 1 if taken.in_batch else 0


def _forget(path: Path, *, open_ledger: Callable[..., Any], user: str, session: str, episode_id: str) -> Forgotten:
    with open_ledger(path, resume_episodes=True) as ledger:
        found = [episode_id] if episode_id else ledger.episodes_of(user=user, session=session).result()
        require_some(found, user=user, session=session)
        taken: Forgotten = ledger.forget_episodes(episode_ids=found).result()
        ledger.overwrite(whole=True)
    return taken


def decoder(path: Path, *, given: Path | None, plain: bool = False) -> Decode:
    """Token ids -> text, by the tokenizer of the run's model; `plain`: without control tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_of(path, given=given)))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=plain))


def tokenizer_of(path: Path, *, given: Path | None) -> Path:
    """The tokenizer.json by which a ledger's ids are text. Raises UnderstudyError where there is none."""
    file = given / "tokenizer.json" if given else tokenizer_file(path.parent)
    if file is None or not file.is_file():
        where = given or f"{path.parent} and its model.path"
        raise UnderstudyError(f"a tokenizer.json is needed, got none in {where}; name its folder with --tokenizer")
    return file


def tokenizer_file(run: Path) -> Path | None:
    """The tokenizer.json of a run's model: its own, or that of the folder in its configuration, which may be written as seen from
    where the run was started. None: it is not on this machine."""
    try:
        found = _named_model(run / "config.yaml")
        named = [base / found for base in (Path(), *run.resolve().parents)]
    except (OSError, ValueError, yaml.YAMLError, LookupError, TypeError):
        named = []
    folders = [run / "model", run / "last", *named]
    return next((folder / "tokenizer.json" for folder in folders if (folder / "tokenizer.json").is_file()), None)


def _named_model(config: Path) -> str:
    """`model.path`, of a file that another person may have written: all is text, nothing is merged, nothing is deep."""
    with config.open(encoding="utf-8") as source:
        text = source.read(MAX_CONFIG_CHARACTERS)
    depth = 0
    for event in yaml.parse(text, Loader=yaml.BaseLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_CONFIG_DEPTH:
            raise ValueError(f"{config} is nested too deep")
    found: str = yaml.load(text, Loader=yaml.BaseLoader)["model"]["path"]
    return found


def _print_episode(db: sqlite3.Connection, episode_id: str, *, decode: Decode) -> None:
    rounds = read_rounds(db, episode_id=episode_id)
    state, reason, score = db.execute(
        "SELECT state, reason, score FROM episode WHERE episode_id = ?", (episode_id,)
    ).fetchone()
    print(f"episode {episode_id}: {state}" + (f" ({reason})" if reason else "") + f", score {score}")
    for round_ in rounds:
        parent = "a root" if round_.parent is None else f"after round {round_.parent}"
        versions = sorted(set(round_.versions.tolist()))
        print(f"-- round {round_.round_index}, {parent}, {round_.finish_reason}, policy versions {versions}")
        print(f"prompt  {round_.tail_ids.tolist()}\n        {decode(round_.tail_ids.tolist())!r}")
        print(f"sampled {round_.sampled_ids.tolist()}\n        {decode(round_.sampled_ids.tolist())!r}")
    for told in score_history(db, episode_id=episode_id):
        print(f"-- score {told}")


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.rpartition(".")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ScoreError(
            f"--scorer must be module.function, got {name} ({error}); put its folder on PYTHONPATH"
        ) from error
    return found


def _age(now: float, *, since: float | None) -> str:
    return "" if since is None else f"{max(0.0, now - since):.0f} s"
