"""Prints docs/results.md, one number a row, from benchmarks/results/*.json; `--short`: the rows that the README shows;
`--write`: writes both where they belong.

A benchmark's own report (`--json PATH`) has many more figures; `figures.json` says of each claim where it comes from.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HEAD = """\
# Results

One number a row, each seen on this project's code by the command beside it. Two CPU cores that others used too, no GPU: take
ratios, not seconds. `make docs` writes this page from `benchmarks/results/`.

| what | figure | of | command | seen |
|---|---|---|---|---|"""


LEARNING = """
## Which algorithms learn the demo

Each recipe of `configs/recipes.py` on the demo's game, with the demo's learning rate and batch, from the same weights, trained on
data that is exactly so many updates old: updates until the mean reward of 5 batches was 0.9 or more (a figure for each seed), and
the mean reward of the last 5 of {steps} (mean of the seeds, and the worst). Nothing was tuned for any of them: a low row
says that this game, this rate and so few updates do not suit it. Seeds: {seeds}; {date}, by an earlier program that played without
an engine. `python -m benchmarks.learning` makes such a table of whole runs, where the lag is the most that there may be.

"""


def reports() -> list[dict[str, Any]]:
    """The files, in their order."""
    files = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def rows() -> list[dict[str, Any]]:
    """The rows of all files, in their order."""
    return [row for report in reports() for row in report.get("rows", ())]


def learning() -> str:
    """The table of `benchmarks.learning`, where its report is there."""
    return "".join(
        LEARNING.format(
            steps=report["settings"]["steps"],
            seeds=", ".join(map(str, report["settings"]["seeds"])),
            date=report["machine"]["date"],
        )
        + "\n".join(report["table"])
        + "\n"
        for report in reports()
        if "table" in report
    )


def page() -> str:
    """docs/results.md."""
    lines = [
        f"| {row['claim']} | {row['value']} | {row['runs']} | `{row['command']}` | {row['date']} |" for row in rows()
    ]
    return "\n".join([HEAD, *lines]) + "\n" + learning()


def short() -> str:
    """The README's table."""
    lines = [f"| {row['short']} | {row['value']} | `{row['command']}` |" for row in rows() if "short" in row]
    return "\n".join(["| what | figure | command |", "|---|---|---|", *lines]) + "\n"


def write() -> None:
    """docs/results.md, and the table between the README's markers."""
    (ROOT / "docs" / "results.md").write_text(page(), encoding="utf-8")
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition("<!-- results -->\n")
    readme.write_text(f"{before}<!-- results -->\n{short()}<!-- /results -->{rest.partition('<!-- /results -->')[2]}")


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        write()
        sys.exit()
    print(short() if "--short" in sys.argv[1:] else page(), end="")
