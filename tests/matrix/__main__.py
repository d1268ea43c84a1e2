"""`python -m tests.matrix`: plays the runs, prints each row's effect, and fails for a row without one or a value without a row."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.matrix.judge import gaps, judged
from tests.matrix.records import Ended, Row, Run
from tests.matrix.rows.everything import all_rows
from tests.matrix.runs import all_runs, runs_with
from tests.matrix.start import Starter, import_everything, kept


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 all rows have their effect, 1 not so."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the table to this file")
    parser.add_argument("--only", nargs="+", default=[], metavar="RUN", help="these runs only, and their rows")
    parser.add_argument("--list", action="store_true", help="print runs and rows, and play nothing")
    parser.add_argument("--keep", type=Path, help="an empty folder for the runs, which stay there")
    parser.add_argument(
        "--look", type=Path, help="play nothing; look again at the runs that --keep has left in this folder"
    )
    parser.add_argument(
        "--model",
        type=Path,
        help="a folder of a pretrained model, with which the learner's runs are played, and no others",
    )
    parser.add_argument("--at-once", type=int, default=2, help="runs at a time (default: 2)")
    arguments = parser.parse_args(argv)
    there = all_runs() if arguments.model is None else runs_with(arguments.model.absolute())
    runs, rows = chosen(there, arguments.only), all_rows()
    if unknown := set(arguments.only) - {run.name for run in runs}:
        parser.error(f"--only must name runs, got {', '.join(sorted(unknown))}; --list prints their names")
    missing = gaps(rows, all_runs())
    if arguments.list:
        for row in rows:
            print(f"{row.run}: {row.what} {row.value}".rstrip())
        print(*missing, sep="\n")
        return int(bool(missing))
    if arguments.only or arguments.model:
        rows = [row for row in rows if row.run in (arguments.only or {run.name for run in runs})]
    if arguments.model:
        rows = [row for row in rows if row.what != "model.path"]
    # No TemporaryDirectory: each child that was forked would remove it at its end.
    scratch = None if arguments.look or arguments.keep else Path(tempfile.mkdtemp(prefix="matrix-"))
    folder = arguments.look or arguments.keep or scratch
    try:
        ended = kept(runs, folder) if arguments.look else play(runs, folder=folder, at_once=arguments.at_once)
        began = time.monotonic()
        table = judged(rows, ended, folder=folder)
        say(f"looking at {len(ended)} runs took {time.monotonic() - began:.0f} s")
        if not arguments.look:
            table = played_again(table, rows, runs=there, folder=folder / "again", at_once=arguments.at_once)
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
    return report(table, missing=[] if arguments.only or arguments.model else missing, path=arguments.json)


def chosen(runs: Sequence[Run], names: Sequence[str]) -> list[Run]:
    """The runs of these names, and those that they follow; all without a name."""
    if not names:
        return list(runs)
    wanted, by_name = set(names), {run.name: run for run in runs}
    for name in names:
        while name in by_name and (name := by_name[name].after):
            wanted.add(name)
    return [run for run in runs if run.name in wanted]


def play(runs: Sequence[Run], *, folder: Path, at_once: int) -> Mapping[str, Ended]:
    """Play the runs in `folder`."""
    began = time.monotonic()
    say(f"importing torch and vLLM took {import_everything():.1f} s")
    ended = Starter(folder, at_once=at_once, say=say).play(runs)
    say(f"{len(ended)} runs took {time.monotonic() - began:.0f} s")
    return ended


def played_again(
    table: list[dict[str, Any]], rows: Sequence[Row], *, runs: Sequence[Run], folder: Path, at_once: int
) -> list[dict[str, Any]]:
    """The table, with the runs of failed rows played once more: what a run samples is drawn, and an effect may not be in it. One
    that is not there fails twice."""
    names = sorted({row["run"] for row in table if not row["ok"] and "/" not in row["run"]})
    if not names:
        return table
    say(f"once more: {', '.join(names)}")
    folder.mkdir()
    ended = Starter(folder, at_once=at_once, say=say).play(chosen(runs, names))
    second = judged([row for row in rows if row.run in names], ended, folder=folder)
    better = {(row["what"], str(row["value"]), row["run"]): row for row in second if row["ok"]}
    return [
        row
        if row["ok"] or (now := better.get((row["what"], str(row["value"]), row["run"]))) is None
        else {**now, "effect": f"at the second try: {now['effect']}"}
        for row in table
    ]


def report(table: list[dict[str, Any]], *, missing: Sequence[str], path: Path | None) -> int:
    """Print the table and what failed; write the JSON; the exit code."""
    failed = [row for row in table if not row["ok"]]
    for row in table:
        say(f"{'ok    ' if row['ok'] else 'FAILED'} {row['what']} {row['value']} [{row['run']}]: {row['effect']}")
    for line in missing:
        say(f"FAILED {line}")
    say(f"{len(table)} rows, {len(failed)} failed, {len(missing)} missing")
    if path is not None:
        record = {"rows": len(table), "failed": len(failed) + len(missing), "missing": list(missing), "table": table}
        path.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")
    return int(bool(failed or missing))


def say(line: str) -> None:
    """A line, at once."""
    print(line, flush=True)


if __name__ == "__main__":
    from configs.child_processes import leave

    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    leave(main())
