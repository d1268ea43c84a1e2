"""Rules of what others wrote on its way to a terminal: it is shown, and never obeyed; what people write is left as it is."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table

from buffers.ledger.ledger import Ledger
from buffers.terminal import GuardedStream, shown
from learner import cli
from learner.reporting.display import Display, Terminal
from tests.learner.diagnosis.recorded_run import RecordedRun, group

ROOT = Path(__file__).parents[2]
OBEYED = {
    "title": "\x1b]0;owned\x07", "cleared": "\x1b[2J", "c1": "\x9b2J", "back": "safe\rowned", "erased": "safe\b\b\b\b",
    "deleted": "\x7f", "reversed": "\u202eevil", "isolated": "\u2066evil", "line": "a\u2028b", "unseen": "a\u200bb",
    "tag": "\U000e0041", "half": "\ud800",
}  # fmt: skip
PEOPLE = "Zoë 日本\u3000語 👍 → ∑ l'été\ttab\nnext"


@pytest.mark.parametrize("name", OBEYED)
def test_what_a_terminal_obeys_is_written_out(name: str) -> None:
    text = shown(f"<{OBEYED[name]}>")
    assert text.isprintable() and "\\" in text and text[0] + text[-1] == "<>"
    assert shown(text) == text


def test_what_people_write_is_left_as_it_is() -> None:
    assert shown(PEOPLE) == PEOPLE


def test_all_that_is_printed_passes_and_nobody_colours_it() -> None:
    sink = io.StringIO()
    stream = GuardedStream(sink)
    print(OBEYED["title"], PEOPLE, file=stream)
    stream.writelines(["a", OBEYED["cleared"]])
    assert sink.getvalue() == f"\\x1b]0;owned\\x07 {PEOPLE}\na\\x1b[2J" and not stream.isatty()


def hostile_run(folder: Path) -> RecordedRun:
    """A run of which agents, their logs, tasks and its configuration say what a terminal obeys."""
    said = "".join(each for each in OBEYED.values() if each != "\ud800")
    in_yaml = json.dumps(said.replace(OBEYED["tag"], ""))
    run = RecordedRun(folder, f"run.dir={in_yaml}").steps(number=3)
    run.summary(error=f"the run ended: {said}")
    run.ledger(lambda ledger: [group(ledger, [f"agent{said}: {said}"] * 4, task=task) for task in range(3)])
    log = folder / "agents" / "1-0-0" / "log.txt"
    log.parent.mkdir(parents=True)
    log.write_text(f"Traceback\nValueError: {said}\n")
    return run


def is_shown(text: str) -> bool:
    return all(each.isprintable() or each in "\n\t" for each in text)


@pytest.mark.parametrize("command", ["why", "ledger inspect", "ledger doctor", "compare"])
def test_commands_that_read_a_run_show_it(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    run = hostile_run(tmp_path / "run").folder
    more = [str(RecordedRun(tmp_path / "other").steps(number=2).folder)] if command == "compare" else []
    assert cli.main([*command.split(), str(run), *more]) == 0
    told = capsys.readouterr()
    assert is_shown(told.out + told.err) and told.out
    assert "\\x1b]0;owned\\x07" in told.out or command not in ("why", "ledger inspect")


def test_a_traceback_shows_what_it_tells_of(tmp_path: Path) -> None:
    """Also one that no command of ours catches."""
    lines = f"from buffers.terminal import guard_output\nguard_output()\nraise ValueError({OBEYED['title']!r})"
    done = subprocess.run([sys.executable, "-c", lines], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and is_shown(done.stderr) and "ValueError: \\x1b]0;owned" in done.stderr


def test_the_display_of_a_run_shows_it_and_draws_itself() -> None:
    lines, screen = io.StringIO(), io.StringIO()
    said = f"7 x agent{OBEYED['cleared']}{OBEYED['reversed']} [red]:smile:[/nothing]"
    with Display(4, console=Terminal(lines)) as display:
        display.note(said)
    assert lines.getvalue() == "7 x agent\\x1b[2J\\u202eevil [red]:smile:[/nothing]\n"
    drawn = Terminal(screen, force_terminal=True)
    with Display(4, title=OBEYED["title"], console=drawn) as display:
        display.engines([said])
        display.note(said)
    assert OBEYED["cleared"] not in screen.getvalue() and OBEYED["title"] not in screen.getvalue()
    assert "\x1b[" in screen.getvalue() and "\\x1b[2J\\u202eevil [red]:smile:" in screen.getvalue()


def test_cells_and_titles_of_tables_are_shown() -> None:
    sink = io.StringIO()
    table = Table(title=f"a{OBEYED['title']}")
    table.add_column(f"b{OBEYED['reversed']}")
    table.add_row(f"c{OBEYED['cleared']} [/x]")
    Terminal(sink).print(table)
    assert is_shown(sink.getvalue()) and "\\x1b[2J" in sink.getvalue() and "\\u202e" in sink.getvalue()


def test_the_ledgers_own_command_shows_it_too(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        group(ledger, [f"agent: {OBEYED['title']}"] * 2)
    words = [sys.executable, "-m", "buffers.ledger", "inspect", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert is_shown(done.stdout) and "\\x1b]0;owned" in done.stdout
