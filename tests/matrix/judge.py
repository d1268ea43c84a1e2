"""Judges the rows: which are missing, and what each run that ended shows of its rows.

Called by `tests.matrix.__main__` and the tests. A row of a run that ended otherwise than it should fails, with what the run
printed last.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.matrix import inventory
from tests.matrix.effects import last_line
from tests.matrix.records import Ended, Row, Run
from tests.matrix.start import in_processes, with_others


def gaps(rows: Sequence[Row], runs: Iterable[Run]) -> list[str]:
    """What must have a row and has none; and rows of runs or tests that are not there."""
    shown = {(row.what, str(row.value)) for row in rows}
    whats = {row.what for row in rows}
    found = [f"no row for {key}={value}" for key, value in inventory.enumerated() if (key, str(value)) not in shown]
    others = [
        *inventory.other_keys(),
        *(f"column {name}" for name in inventory.columns()),
        *(f"metric {name}" for name in inventory.metrics()),
        *(f"promise {name}" for name in inventory.promises()),
    ]
    found += [f"no row for {what}" for what in others if what not in whats]
    names = {run.name for run in runs}
    for row in rows:
        if "/" in row.run and not inventory.has_test(row.run):
            found.append(f"no test {row.run}, which shows {row.what}={row.value}")
        elif "/" not in row.run and row.run not in names:
            found.append(f"no run {row.run}, which shows {row.what}={row.value}")
    return found


def judged(rows: Sequence[Row], ended: Mapping[str, Ended], *, folder: Path) -> list[dict[str, Any]]:
    """The table of what was seen, in the order of the rows."""
    own = {name: [row for row in rows if row.run == name] for name in ended}
    works = {name: partial(_seen, with_others(one, ended), own[name]) for name, one in ended.items() if own.get(name)}
    answers = {name: json.loads(text) if text else None for name, text in in_processes(works, folder=folder).items()}
    table, taken = [], dict.fromkeys(answers, 0)
    for row in rows:
        if row.run in answers:
            answer, number = answers[row.run], taken[row.run]
            taken[row.run] += 1
            effect, ok = answer[number] if answer else ("the process that looked at the run died", False)
        elif "/" in row.run:
            effect, ok = f"shown by {row.run}", inventory.has_test(row.run)
        else:
            continue
        table.append({"what": row.what, "value": row.value, "run": row.run, "effect": effect, "ok": ok})
    return table


def _seen(ended: Ended, rows: Sequence[Row]) -> str:
    """JSON: [effect, ok] of each row."""
    return json.dumps([effect_of(ended, row) for row in rows])


def effect_of(ended: Ended, row: Row) -> tuple[str, bool]:
    """What was seen, and whether it is the row's effect."""
    if ended.code != ended.run.code or ended.trouble:
        why = f"{ended.trouble} " if ended.trouble else ""
        return f"the run ended with code {ended.code}, not {ended.run.code}: {why}{last_line(ended.output)}", False
    try:
        return (row.effect(ended) if row.effect else f"shown by {row.run}"), True
    except AssertionError as error:
        return str(error) or _place(), False
    except (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError):
        return _place(), False


def _place() -> str:
    """The last line of the traceback, and where it was raised."""
    lines = traceback.format_exc().strip().splitlines()
    return f"{lines[-1]} ({' '.join(lines[-3:-1]).strip()})"[:400]
