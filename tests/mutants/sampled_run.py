"""Mutants, drawn by a seed: each is written into a copy of the tree, and the tests of its module have to fail.

Invariants: the tree itself is never changed; nothing is run before the tests were green without a mutant; a mutant that runs into
the limit, or breaks the interpreter, is noticed but counted apart. Mutants that change nothing a user could see are listed with
the reason in `explained.toml`, each of which must still be one that could be drawn.
"""

from __future__ import annotations

import argparse
import compileall
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import cache_from_source
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from tests.mutants.operators import Mutant, mutants_of
from tests.mutants.watched_modules import WATCHED

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PROCESSES = 2
SAMPLE = 100
SLACK_S = 30.0
"""Seconds beyond three times what the green run took."""
GREEN_S = 1800.0
OPTIONS = ("-m", "not engine and not slow")
NOTICED = (1, 2)
"""Pytest's status after a test that failed, or could not be collected."""


class Refused(Exception):
    """Nothing can be said about mutants: one line that says why."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one mutant: `noticed`, `limit`, `broken`, `survived` or `explained`."""

    mutant: Mutant
    verdict: str
    seconds: float = 0.0
    note: str = ""
    """The reason of an explained one."""


class Copy:
    """A throw-away copy of the tree, and the process that runs tests in it."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder / "tree"
        copy_tree(root, self.folder)
        (folder / "results").mkdir()
        self._basetemp = folder / "basetemp"
        self._kept = folder / "original"
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "forked_pytest.py"), str(folder / "results")],
            cwd=self.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, tests: Sequence[str], *, limit_s: float, options: Sequence[str]) -> dict[str, Any]:
        """The answer of `forked_pytest`."""
        arguments = [*options, f"--basetemp={self._basetemp}", *tests]
        return self._ask({"arguments": arguments, "limit_s": limit_s})

    def preload(self, seen: dict[str, Any]) -> None:
        """What a run of another copy had imported is imported here."""
        self._ask({"preload": seen})

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def run_mutant(self, mutant: Mutant, tests: Sequence[str], *, limit_s: float, options: Sequence[str]) -> Outcome:
        """Write it, run its module's tests, put the module back."""
        path = self.folder / mutant.module
        shutil.copy2(path, self._kept)
        path.write_text(mutant.source, encoding="utf-8")
        Path(cache_from_source(str(path))).unlink(missing_ok=True)  # it may be of the same second and size
        try:
            answer = self.run(tests, limit_s=limit_s, options=options)
        finally:
            shutil.copy2(self._kept, path)
        status = answer["status"]
        verdict = (
            "limit" if status is None else "survived" if status == 0 else "noticed" if status in NOTICED else "broken"
        )
        return Outcome(mutant, verdict, answer["seconds"])

    def close(self) -> None:
        """End the process; the folder is its maker's to remove."""
        self._process.kill()
        self._process.communicate()


def copy_tree(root: Path, target: Path) -> None:
    """What git tracks or would track, with the times of the files, and the virtual environment as a link."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, listed):
        if (root / name).is_file() and not (root / name).is_symlink():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name)
    compileall.compile_dir(target, quiet=2)
    if (root / ".venv").exists():
        (target / ".venv").symlink_to((root / ".venv").resolve())


def all_mutants(root: Path, modules: Iterable[str]) -> list[Mutant]:
    """Of these modules, in order."""
    return [mutant for name in modules for mutant in mutants_of(name, (root / name).read_text(encoding="utf-8"))]


def read_explained(path: Path) -> dict[tuple[str, str, str, str], str]:
    """Key of a mutant -> why no test has to notice it. Raises Refused for an entry without a reason."""
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("mutant", [])
    for entry in entries:
        if len(entry.get("reason", "")) < 10:
            raise Refused(f"{path.name}: each mutant needs a reason, got {entry}; say why no test can notice it")
    return {(e["module"], e["function"], e["before"], e["after"]): e["reason"] for e in entries}


def check_explained(explained: Mapping[tuple[str, str, str, str], str], mutants: Iterable[Mutant]) -> None:
    """Raises Refused when one of them cannot be drawn any more."""
    gone = explained.keys() - {mutant.key for mutant in mutants}
    if gone:
        lines = "\n".join(
            f"  {module}, {function}: {before}  ->  {after}" for module, function, before, after in sorted(gone)
        )
        raise Refused(
            f"explained.toml must name mutants of the code as it is, got {len(gone)} others; remove them:\n{lines}"
        )


def drawn(mutants: Sequence[Mutant], *, seed: int, sample: int) -> list[Mutant]:
    """So many of them, the same for each seed; all where there are fewer."""
    chosen = random.Random(seed).sample(range(len(mutants)), min(sample, len(mutants)))
    return [mutants[number] for number in sorted(chosen)]


@dataclass(slots=True)
class Report:
    """What a run found."""

    seed: int
    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0

    def count(self, *verdicts: str) -> int:
        return sum(Counter(outcome.verdict for outcome in self.outcomes)[verdict] for verdict in verdicts)

    def line(self) -> str:
        """The figures, for people."""
        return (
            f"seed {self.seed}: sampled {len(self.outcomes)}, noticed {self.count('noticed', 'limit', 'broken')} "
            f"({self.count('limit')} by the limit, {self.count('broken')} broke the interpreter), "
            f"survived {self.count('survived')}, explained {self.count('explained')}, {self.seconds:.0f} s"
        )

    def as_json(self, root: Path) -> str:
        """The figures, and each mutant that was not noticed by a test."""
        told = [
            {
                "module": outcome.mutant.module,
                "function": outcome.mutant.function,
                "line": outcome.mutant.line,
                "kind": outcome.mutant.kind,
                "verdict": outcome.verdict,
                "before": outcome.mutant.before,
                "after": outcome.mutant.after,
                "note": outcome.note,
            }
            for outcome in self.outcomes
            if outcome.verdict != "noticed"
        ]
        figures = {
            "seed": self.seed,
            "sampled": len(self.outcomes),
            "noticed": self.count("noticed", "limit", "broken"),
            "noticed_by_limit": self.count("limit"),
            "noticed_by_break": self.count("broken"),
            "survived": self.count("survived"),
            "explained": self.count("explained"),
            "seconds": round(self.seconds, 1),
            "mutants": told,
        }
        return json.dumps(figures, indent=2) + "\n"


def run_sample(
    root: Path,
    watched: Mapping[str, Sequence[str]],
    *,
    explained: Mapping[tuple[str, str, str, str], str],
    seed: int,
    sample: int,
    options: Sequence[str] = OPTIONS,
    processes: int = PROCESSES,
) -> Report:
    """Draw mutants of these modules and run the tests of each. Raises Refused when the tests fail without any."""
    began = time.monotonic()
    chosen = drawn(all_mutants(root, watched), seed=seed, sample=sample)
    report = Report(
        seed, [Outcome(each, "explained", note=explained[each.key]) for each in chosen if each.key in explained]
    )
    rest = [each for each in chosen if each.key not in explained]
    suites = list(dict.fromkeys(tuple(watched[each.module]) for each in rest))
    with _copies(root, processes) as copies, ThreadPoolExecutor(processes) as threads:
        free: SimpleQueue[Copy] = SimpleQueue()
        for copy in copies:
            free.put(copy)

        def lent(work: Callable[[Copy], T]) -> T:
            copy = free.get()
            try:
                return work(copy)
            finally:
                free.put(copy)

        def green(tests: tuple[str, ...]) -> dict[str, Any]:
            return lent(lambda copy: _green(copy, tests, options=options))

        def one(mutant: Mutant) -> Outcome:
            tests = tuple(watched[mutant.module])
            limit_s = 3 * seconds[tests] + SLACK_S
            outcome = lent(lambda copy: copy.run_mutant(mutant, tests, limit_s=limit_s, options=options))
            _tell(outcome, root=root)
            return outcome

        for answer in list(threads.map(green, suites)):
            for copy in copies:
                copy.preload(answer["seen"])
        # Once more: a mutant is compared with the tests as they run with all that is imported by now.
        seconds = {tests: answer["seconds"] for tests, answer in zip(suites, threads.map(green, suites), strict=True)}
        report.outcomes += threads.map(one, rest)
    report.seconds = time.monotonic() - began
    return report


@contextmanager
def _copies(root: Path, number: int) -> Iterator[list[Copy]]:
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        made: list[Copy] = []
        try:
            for name in map(str, range(number)):
                (Path(folder) / name).mkdir()
                made.append(Copy(root, Path(folder) / name))
            yield made
        finally:
            for copy in made:
                copy.close()


def _green(copy: Copy, tests: tuple[str, ...], *, options: Sequence[str]) -> dict[str, Any]:
    """The answer of a run without a mutant."""
    answer = copy.run(tests, limit_s=GREEN_S, options=options)
    if answer["status"] != 0:
        raise Refused(
            f"tests must pass without a mutant, got status {answer['status']} of {' '.join(tests)}; mend them first:\n"
            f"{answer['output']}"
        )
    print(f"green in {answer['seconds']:.1f} s: {' '.join(tests)}", flush=True)
    copy.preload(answer["seen"])
    return answer


def _tell(outcome: Outcome, *, root: Path) -> None:
    mutant = outcome.mutant
    print(f"{outcome.verdict:9} {outcome.seconds:5.1f} s  {mutant.module}:{mutant.line} {mutant.kind}", flush=True)
    if outcome.verdict == "survived":
        print(mutant.diff((root / mutant.module).read_text(encoding="utf-8")), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """0: every mutant was noticed or is explained; 1: one survived; 2: nothing could be said."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", type=int, default=SAMPLE, help=f"mutants to draw, {SAMPLE} unless told")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures and what was not noticed")
    parser.add_argument("--module", nargs="+", metavar="NAME", help="modules whose path contains one of these")
    parser.add_argument("--list", action="store_true", help="count the mutants of each module, run nothing")
    told = parser.parse_args(arguments)
    watched = {
        name: tests for name, tests in WATCHED.items() if not told.module or any(part in name for part in told.module)
    }
    if told.list:
        for name, number in Counter(mutant.module for mutant in all_mutants(ROOT, watched)).items():
            print(f"{number:5} {name}")
        return 0
    try:
        explained = read_explained(HERE / "explained.toml")
        check_explained(explained, all_mutants(ROOT, WATCHED))
        report = run_sample(ROOT, watched, explained=explained, seed=told.seed, sample=told.sample)
    except Refused as refusal:
        print(refusal, file=sys.stderr)
        return 2
    print(report.line())
    if told.json:
        told.json.write_text(report.as_json(ROOT), encoding="utf-8")
    return 1 if report.count("survived") else 0
