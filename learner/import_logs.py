"""`understudy import`: sessions that other programs have logged -> demonstrations, or tasks, with a report of what was found.

Called by `learner.cli`. Invariants: the file appears whole or not at all; one session is in memory at a time. It trains nothing,
and writes to no ledger: answers of another model have no log-probabilities of the policy, so no policy gradient may have them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from buffers.errors import UnderstudyError

DEMONSTRATIONS, TASKS = "demonstrations", "tasks"
NOT_TRAINED = (
    "answers of another model have no log-probabilities of the policy, so they become demonstrations for SFT, or tasks, and never "
    "enter a policy gradient"
)
STRIPS, REWRITES = "template_strips_thinking", "template_rewrites_history"


def main(words: Sequence[str], *, remedies: Mapping[str, str]) -> int:
    """Exit codes: 0 something was written, 2 nothing could be. `remedies`: cause of a branch -> what helps, in words."""
    parser = argparse.ArgumentParser(
        prog="understudy import",
        description="Read sessions of Claude Code, Codex and other agents, ATIF, chat JSONL, ShareGPT, OpenTelemetry spans, data "
        "sets of these, and ledgers; write demonstrations, or tasks.",
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
        return _import(given, remedies=remedies)
    except UnderstudyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _import(given: argparse.Namespace, *, remedies: Mapping[str, str]) -> int:
    from buffers.row_files import write_rows
    from buffers.tasks.logs import Findings, LogReader, row_of
    from buffers.tasks.parquet import TASK_SCHEMA, TRACE_SCHEMA

    if given.form not in (DEMONSTRATIONS, TASKS):
        raise UnderstudyError(f"--as must be demonstrations or tasks, got {given.form!r}: {NOT_TRAINED}")
    if given.out.suffix != ".parquet":
        raise UnderstudyError(f"--out must be a file .parquet, got {given.out}: {NOT_TRAINED}")
    fit = TemplateFit(given.model) if given.model else None
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
            print("\n".join(fit.report(remedies)))
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
    """What of the sessions can be learned by a model's chat template: the answers that it shows whole behind its own prompt, and
    where play could not continue them token for token."""

    def __init__(self, folder: Path) -> None:
        """Raises TaskError for a folder without a usable template."""
        from transformers import AutoTokenizer

        from configs.model_folder import has_chat_template
        from learner.startup.template_check import check_template

        if not has_chat_template(folder):
            raise UnderstudyError(
                f"--model must be the folder of a model with a chat template, got {folder}; name another"
            )
        check_template(folder, key="--model")
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        self._render = partial(tokenizer.apply_chat_template, tokenize=False)
        self._tokens = partial(tokenizer, add_special_tokens=False)
        self._answers = self._shown = self._num_tokens = 0
        self._causes: Counter[str] = Counter()

    def seen(self, sessions: Iterable[Any]) -> Iterator[Any]:
        """The sessions, each looked at."""
        for session in sessions:
            self._look(session)
            yield session

    def _look(self, session: Any) -> None:
        from jinja2 import TemplateError

        raised = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RuntimeError)
        messages = [_as_served(message) for message in session.messages]
        written, thought = "", ""
        for at, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            try:
                asks = self._render(messages[:at], tools=session.tools, add_generation_prompt=True)
                whole = self._render(messages[: at + 1], tools=session.tools)
            except raised as error:
                self._causes[f"the chat template refuses it: {' '.join(str(error).split())[:160]}"] += 1
                self._answers += sum(each["role"] == "assistant" and each.get("weight") != 0 for each in messages[at:])
                return
            if not asks.startswith(written):
                self._causes[STRIPS if thought and thought not in asks else REWRITES] += 1
            written, thought = whole, str(message.get("reasoning_content", "")).strip()
            if message.get("weight") == 0:
                continue
            names = [call["function"]["name"] for call in message.get("tool_calls", ())]
            answer = whole.removeprefix(asks) if whole.startswith(asks) else ""
            self._answers += 1
            if answer and all(part in answer for part in (message["content"].strip(), thought, *names)):
                self._shown += 1
                self._num_tokens += len(self._tokens(answer.rstrip())["input_ids"])
            else:
                self._causes["the chat template does not show all of the answer behind its own prompt"] += 1

    def report(self, remedies: Mapping[str, str]) -> Iterator[str]:
        """The lines that are printed."""
        yield f"trainable  {self._shown:,} of {self._answers:,} answers, {self._num_tokens:,} tokens"
        for cause, number in self._causes.most_common():
            more = f", each a row of its own ({remedies[cause]})" if cause in remedies else ""
            yield f"template   {number:,}: {cause}{more}"


def _as_served(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as the server hands it to a template: arguments of calls are objects."""
    calls = [
        {**call, "function": {**call["function"], "arguments": _arguments(call)}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, **({"tool_calls": calls} if calls else {})}


def _arguments(call: Mapping[str, Any]) -> Any:
    try:
        return json.loads(call["function"]["arguments"])
    except (ValueError, RecursionError):
        return call["function"]["arguments"]
