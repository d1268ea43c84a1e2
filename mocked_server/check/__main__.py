"""The command line: `python -m mocked_server.check --help`, and `understudy check`.

Heavy imports come last: `--help` answers at once, and a missing command or task is reported at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from buffers.errors import UnderstudyError
from buffers.records import Task
from buffers.terminal import guard_output, shown
from configs.model_folder import has_chat_template, quantization, weight_files

DESCRIPTION = "Can this agent be trained? Runs it once against a model on this machine, a tiny one or yours, and says."
EPILOG = """\
The command is started once, in an empty folder, with the environment that training gives it (OPENAI_BASE_URL, OPENAI_API_KEY,
ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY, GOOGLE_GEMINI_BASE_URL, GEMINI_API_KEY, MODEL, TASK_JSON, SEED) and its task on standard
input. ENV_ADDRESS names a stand-in that answers everything. {python} in the command is the Python that understudy runs with.
exit codes: 0 it can be trained, 1 it cannot, 2 the check itself could not be made, 130 stopped by Ctrl-C
"""
TASK = {"prompt": [{"role": "user", "content": "What is 12 + 30? Use the tools that you have."}]}
LOG_SHOWN = 8000
"""Bytes of the engine's output that are shown when the check could not be made."""
STOPPED = 130


def _arguments(words: Sequence[str], *, program: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=program, description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="the model that answers, with its own chat template; default: a tiny one",
    )
    parser.add_argument("--task", type=Path, help="a JSON file with the task (prompt, extra_info, ...); default: a sum")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that the agent may run (default: 300)")
    parser.add_argument(
        "--environment", action="append", default=[], metavar="NAME",
        help="a variable of this shell that the agent gets besides the usual ones (as agents.environment; repeatable)",
    )  # fmt: skip
    parser.add_argument("command", nargs="+", help="the agent's command, after --")
    return parser.parse_args(words)


def _resolved(command: Sequence[str]) -> list[str]:
    """The program's path; files among its arguments become absolute, because the agent runs in a folder of its own."""
    program = sys.executable if command[0] == "{python}" else shutil.which(command[0])
    if program is None:
        raise UnderstudyError(f"the agent's program must be on PATH or a file, got {command[0]!r}; check the command")
    script = next((word for word in command[1:2] if word.endswith((".py", ".js", ".sh"))), None)
    if script is not None and not os.path.isfile(script):
        raise UnderstudyError(f"the agent's script must be a file, got {script!r} ({os.path.abspath(script)} is none)")
    return [os.path.abspath(program), *(os.path.realpath(w) if os.path.isfile(w) else w for w in command[1:])]


def _task(path: Path | None) -> Task:
    try:
        fields = TASK if path is None else json.loads(path.read_text())
        return Task(**{"task_id": "check", **fields})
    except (OSError, ValueError, TypeError) as error:
        raise UnderstudyError(f"--task must be a JSON file with the fields of a task, got {path}: {error}") from None


def _check_model(folder: Path) -> None:
    with suppress(ValueError):  # an index that names a file that is not there
        if has_chat_template(folder) and weight_files(folder) and not quantization(folder):
            return
    raise UnderstudyError(
        f"--model must be the folder of a Hugging Face model with a chat template and plain weights, got {folder.absolute()}; of a "
        f"GGUF file or FP8 weights a run makes such a folder, runs/NAME/model"
    )


@contextmanager
def _quiet() -> Iterator[int]:
    """Engine and libraries print at will, in several processes: kept aside, and shown only when the check fails. Yields a
    descriptor of the real standard error."""
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as log:
        output, terminal = os.dup(1), os.dup(2)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            yield terminal
        except UnderstudyError:
            log.seek(0)
            os.write(terminal, shown(log.read()[-LOG_SHOWN:].decode(errors="replace")).encode())
            raise
        finally:
            sys.stdout.flush()
            for saved, number in ((output, 1), (terminal, 2)):
                os.dup2(saved, number)
                os.close(saved)


def main(words: Sequence[str], *, program: str = "python -m mocked_server.check") -> int:
    """The command line; returns the exit code. `program`: what the user calls it by."""
    guard_output()
    arguments = _arguments(words, program=program)
    try:
        command, task = _resolved(arguments.command), _task(arguments.task)
        if arguments.model is not None:
            _check_model(arguments.model)
        print(f"starting {arguments.model or 'a tiny model, about 15 s'} ...", file=sys.stderr, flush=True)
        with _quiet() as terminal:
            from mocked_server.check.trial import check
            from mocked_server.vllm.engine_arguments import set_process_environment

            set_process_environment()
            named = tuple(arguments.environment)
            report = asyncio.run(
                check(
                    command, task=task, timeout_s=arguments.timeout, output=terminal, named=named, model=arguments.model
                )
            )
    except UnderstudyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; nothing is left behind", file=sys.stderr)
        return STOPPED
    print(report.as_json() if arguments.json else report.as_text())
    return 0 if report.trainable else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
