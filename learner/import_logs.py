"""`understudy import`: sessions that other programs have logged -> demonstrations, or tasks, with a report of what was found.

Called by `learner.cli`. Invariants: the file appears whole or not at all; one session is in memory at a time. It trains nothing,
and writes to no ledger: answers of another model have no log-probabilities of the policy, so no policy gradient may have them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from buffers.errors import UnderstudyError

DEMONSTRATIONS, TASKS = "demonstrations", "tasks"
NOT_TRAINED = (
    "answers of another model have no log-probabilities of the policy, so they become demonstrations for SFT, or tasks, and never "
    "enter a policy gradient"
)


def main(words: Sequence[str], *, renderer_of: Callable[[Path], Any], remedies: Mapping[str, str]) -> int:
    """Exit codes: 0 something was written, 2 nothing could be. `renderer_of`: a model's folder -> what shows its demonstrations;
    `remedies`: cause of a branch -> what helps, in words."""
    parser = argparse.ArgumentParser(
        prog="understudy import",
        description="Read sessions of Claude Code, Codex, opencode and others, ATIF, chat JSONL, ShareGPT, OpenTelemetry spans, "
        "data sets of these, and ledgers; write demonstrations, or tasks.",
        epilog=f"{NOT_TRAINED}. Claude Code, Codex, Copilot, HAR and Inspect are read by the program atif-make.",
    )
    parser.add_argument(
        "source", nargs="+", type=Path, metavar="SOURCE", help="files, folders, runs: what they are is found out"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.parquet", help="what is written")
    parser.add_argument(
        "--as", dest="form", default=DEMONSTRATIONS, metavar="FORM",
        help="demonstrations (default), or tasks: what comes before the first answer, and the tools",
    )  # fmt: skip
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="say what can be learned by this model's chat template"
    )
    parser.add_argument(
        "--redact", action="store_true", help="write the names of keys, tokens and passwords in their place"
    )
    given = parser.parse_args(words)
    try:
        return _import(given, renderer_of=renderer_of, remedies=remedies)
    except UnderstudyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _import(given: argparse.Namespace, *, renderer_of: Callable[[Path], Any], remedies: Mapping[str, str]) -> int:
    from buffers.row_files import write_rows
    from buffers.tasks.logs import Findings, LogReader, row_of
    from buffers.tasks.parquet import TASK_SCHEMA, TRACE_SCHEMA
    from configs.model_folder import has_chat_template
    from learner.startup.template_check import check_template

    if given.form not in (DEMONSTRATIONS, TASKS):
        raise UnderstudyError(f"--as must be demonstrations or tasks, got {given.form!r}: {NOT_TRAINED}")
    if given.out.suffix != ".parquet":
        raise UnderstudyError(f"--out must be a file .parquet, got {given.out}: {NOT_TRAINED}")
    fit = None
    if given.model:
        if not has_chat_template(given.model):
            raise UnderstudyError(
                f"--model must be the folder of a model with a chat template, got {given.model}; name another"
            )
        check_template(given.model, key="--model")
        fit = TemplateFit(renderer_of(given.model), remedies=remedies)
    found = Findings()
    reader = LogReader(found=found, of_ledger=_of_ledger, redact=given.redact)
    sessions: Iterator[Any] = (session for source in given.source for session in reader.read(source))
    if fit is not None:
        sessions = fit.seen(sessions)
    try:
        if given.form == TASKS:
            number = write_rows(given.out, rows=_tasks(sessions), schema=TASK_SCHEMA)
        else:
            number = write_rows(given.out, rows=map(row_of, sessions), schema=TRACE_SCHEMA)
    except OSError as error:
        raise UnderstudyError(f"--out must be a file that can be written, got {given.out} ({error})") from error
    finally:
        print("\n".join(_report(found)))
        if fit is not None:
            print("\n".join(fit.report()))
    print(f"wrote      {number:,} {given.form} to {given.out}")
    return 0


def _of_ledger(path: Path) -> Iterator[Any]:
    from buffers.ledger.cli import tokenizer_of
    from buffers.ledger.export import recorded_sessions
    from buffers.ledger.reader import LedgerReader
    from buffers.ledger.turns import TokenDecoder

    decoder = TokenDecoder(tokenizer_of(path, given=None))
    with closing(LedgerReader(path)) as reader, reader.read() as db:
        for each in recorded_sessions(db, decoder=decoder):
            yield each.session


def _tasks(sessions: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Rows of a task file: what was said before the first answer, each once."""
    from buffers.tasks.parquet import task_row

    known = set()
    for session in sessions:
        first = next(at for at, message in enumerate(session.messages) if message["role"] == "assistant")
        prompt = session.messages[:first]
        digest = hash(json.dumps([prompt, session.tools]))
        if prompt and digest not in known:
            known.add(digest)
            extra = {"session": session.source, **({"tools": session.tools} if session.tools else {})}
            yield task_row({"prompt": prompt, "extra_info": extra}, data_source="import")


def _report(found: Any) -> Iterator[str]:
    yield f"files      {_counts(found.files)}"
    yield f"sessions   {found.sessions:,} with {found.answers:,} answers, of {_counts(found.models)}"
    for cause, number in found.causes.most_common():
        yield f"noticed    {number:,}: {cause}; the first in {found.first[cause]}"
    if found.secrets:
        yield f"secrets    {_counts(found.secrets)}; --redact writes their names in their place"


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} ({number:,})" for name, number in counts.most_common()) or "none"


class TemplateFit:
    """The sessions as SFT would show them to a model: what of them is trained, what is refused, and where play could not continue
    them token for token. `renderer`: `mocked_server.vllm.demonstrations.DemonstrationRenderer`."""

    def __init__(self, renderer: Any, *, remedies: Mapping[str, str]) -> None:
        self._renderer = renderer
        self._remedies = remedies
        self._shown = self._refused = self._num_rows = self._num_tokens = 0
        self._causes: Counter[str] = Counter()

    def seen(self, sessions: Iterable[Any]) -> Iterator[Any]:
        """The sessions, each looked at."""
        from buffers.tasks.parquet import Trace

        looked: list[Any] = []

        def traces() -> Iterator[Any]:
            for session in sessions:
                looked.append(session)
                yield Trace(messages=session.messages, tools=session.tools or None)

        for rows in self._renderer.rows(traces()):
            if isinstance(rows, Exception):
                self._refused += 1
                self._causes[re.sub(r"^answer \d+: ", "", str(rows))[:200]] += 1
            else:
                self._shown += 1
                self._num_rows += len(rows)
                self._num_tokens += sum(int(row.mask.sum()) for row in rows)
            yield looked.pop()

    def report(self) -> Iterator[str]:
        """The lines that are printed."""
        number = self._shown + self._refused
        yield f"trainable  {self._shown:,} of {number:,} sessions, {self._num_rows:,} rows, {self._num_tokens:,} tokens"
        for cause, number in self._causes.most_common():
            yield f"refused    {number:,}: {cause}"
        for cause, number in self._renderer.causes.most_common():
            yield f"template   {number:,}: {cause}, each a row of its own ({self._remedies.get(cause, 'no remedy is known')})"
