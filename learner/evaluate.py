"""`understudy eval`: plays a task file through agent and judge without a learner, and prints what it scored.

It starts a run's pipeline with `learner.validation.Evaluation` in the place of the learn loop: the same engine, server, agents,
environment and scorer, in a folder of its own. Heavy imports come after argument parsing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from buffers.errors import TaskError
from configs.child_processes import own_temporary_folder
from configs.schema import Config, SftConfig
from learner.checkpoints.store import LAST
from learner.recovery.at_once import signals_end_at_once

ANSWERS = "answers.jsonl"
"""A line for each episode: question, answer, truth, score."""
SHOWN = 5
"""Answers that are printed."""
STOPPED_TEXT = "stopped; an evaluation cannot be resumed: run the same command again"
logger = logging.getLogger(__name__)


def evaluated_config(config: Config, *, checkpoint: Path | None, samples: int | None) -> Config:
    """The configuration of the evaluation: `data.validation`'s tasks and samples, or the training tasks where there are none; the
    weights of `checkpoint`, or `model.path`. Raises TaskError."""
    from learner.checkpoints.store import saved_versions

    validation = config.data.validation
    data = config.data
    if validation.tasks:
        data = data.model_copy(update={"tasks": validation.tasks})
    if not data.task_files:
        raise TaskError(
            "understudy eval needs tasks, got none; set data.validation.tasks or data.tasks to a parquet file"
        )
    weights = None if checkpoint is None else weights_of(checkpoint)
    if weights is not None and (found := saved_versions(weights)) and found.keys() != set(config.adapter_roles):
        raise TaskError(
            f"--checkpoint {checkpoint} has an adapter for each of the roles {', '.join(found)}, got a configuration with "
            f"{', '.join(config.adapter_roles) or 'none'}; set learner.lora and roles as in its run's config.yaml"
        )
    many = samples or validation.samples
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"name": f"{config.run.name}-eval"}),
            "model": config.model.model_copy(update={"path": str(weights)} if weights is not None else {}),
            "data": data.model_copy(
                update={"validation": validation.model_copy(update={"tasks": "", "samples": many})}
            ),
            "sft": SftConfig(),
            "learner": config.learner.model_copy(update={"stage": "rl"}),
            "buffer": config.buffer.model_copy(update={"max_policy_lag": 0}),  # no learner works beside the engines
        }
    )


def weights_of(folder: Path) -> Path:
    """The Hugging Face folder of a checkpoint, of a run's newest one, or this folder. Raises TaskError."""
    for place in (
        folder,
        folder / LAST,
        folder / "model",
    ):  # a run has both: its newest weights, and those it began with
        if (place / "config.json").is_file():
            return place
    raise TaskError(
        f"--checkpoint must name a run, one of its checkpoints or a Hugging Face folder, got {folder} without config.json; name "
        f"runs/NAME, or runs/NAME/checkpoints/step-000020"
    )


def main(argv: Sequence[str] | None = None, *, program: str = "understudy eval") -> int:
    """Exit codes: 0 done, 1 it failed, 2 unusable configuration, 130 stopped by Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog=program,
        description="Play a task file through agent and judge, without a learner: mean, pass@k, intervals, failures by reason.",
        epilog="tasks: data.validation.tasks, else data.tasks; results: runs/<run.name>-eval/evaluation.json, and its ledger",
    )
    parser.add_argument(
        "--config", type=Path, default=None, help="YAML file, or the name of a shipped one (default: demo)"
    )
    parser.add_argument(
        "--checkpoint", type=Path, default=None, metavar="FOLDER",
        help="the weights: a run (its newest checkpoint), one of its checkpoints, a Hugging Face folder (default: model.path)",
    )  # fmt: skip
    parser.add_argument(
        "--samples", type=int, default=None, metavar="K",
        help="episodes of each task; 1: greedy, more: at rollout.temperature (default: data.validation.samples)",
    )  # fmt: skip
    parser.add_argument(
        "--limit", type=int, default=None, metavar="N", help="play the first N tasks of the file only (default: all)"
    )
    parser.add_argument(
        "--export-best", type=Path, default=None, metavar="FILE.parquet",
        help="write each task's best answer as a demonstration for SFT, with its score; those of 0 or less are left out",
    )  # fmt: skip
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="configuration overrides")
    arguments = parser.parse_args(argv)
    for name, value in (("--samples", arguments.samples), ("--limit", arguments.limit)):
        if value is not None and value < 1:
            parser.error(f"{name} must be at least 1, got {value}; leave it out for its default")
    if arguments.export_best is not None and arguments.export_best.suffix != ".parquet":
        parser.error(f"--export-best must be a file .parquet, got {arguments.export_best}; name one")

    from learner.run import refused_in_words

    with own_temporary_folder(), signals_end_at_once(lambda: STOPPED_TEXT):
        return refused_in_words(lambda: _main(arguments))


def _main(arguments: argparse.Namespace) -> int:
    from configs.load import DEFAULT, load_config
    from learner.run import checked_config, prepare_engine

    config = load_config(arguments.config or DEFAULT, arguments.overrides)
    config = evaluated_config(config, checkpoint=arguments.checkpoint, samples=arguments.samples)
    config = checked_config(config, resume="", learns=False)
    return _evaluate(
        config,
        weights="model.path" if arguments.checkpoint is None else str(arguments.checkpoint),
        limit=arguments.limit,
        best=arguments.export_best,
        prepare=partial(prepare_engine, config),
    )


def _evaluate(
    config: Config, *, weights: str, limit: int | None, best: Path | None, prepare: Callable[[], None]
) -> int:
    from learner.pipeline import Pipeline
    from learner.reporting.display import Display, Terminal, write_summary
    from learner.reporting.tracker import Tracker
    from learner.session import in_words, own_terminal, supervise
    from learner.startup.run_folder import EVALUATION, LOG, claimed, write_config
    from learner.validation import EvaluationPlan, evaluation_figures, failures_in_words, table

    folder = Path(config.run.dir) / config.run.name
    samples = config.data.validation.samples
    log = folder / LOG
    with (
        claimed(folder),
        own_terminal(log) as terminal,
        signals_end_at_once(lambda: STOPPED_TEXT, terminal=terminal),
    ):
        write_summary(folder / EVALUATION, {"weights": weights, "model": config.model.path})
        write_config(folder, config)
        logging.basicConfig(filename=log, level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
        console = Terminal(terminal)
        say = partial(console.print, highlight=False, soft_wrap=True)
        say(f"understudy: evaluating {config.model.path}, results in {folder}, log in {log}")
        prepare()
        with Tracker(folder, trackers=[]) as tracker, Display(0, title=config.run.name, console=console) as display:
            pipeline = Pipeline(
                config, folder=folder, display=display, tracker=tracker, evaluates=EvaluationPlan(limit=limit)
            )
            code, errors = asyncio.run(supervise(pipeline))
        for error in errors:
            logger.error("the evaluation ended: %s", in_words(error), exc_info=error)
            say(f"error: {in_words(error)}", style="bold red")
        if code or pipeline.evaluation is None:
            if code == 130:
                say(STOPPED_TEXT)
            return code or 1
        played = pipeline.evaluation
        figures = evaluation_figures(
            played.found, num_tasks=played.num_tasks, samples=samples, failures=pipeline.failures
        )
        of_tasks = [{"task_id": one.task_id, "scores": one.scores, "failed": one.num_failed} for one in played.found]
        write_summary(
            folder / EVALUATION, {"weights": weights, "model": config.model.path, **figures, "scores": of_tasks}
        )
        console.print(table(figures))
        for line in failures_in_words(figures):
            say(line)
        tracker.attempt("the answers", partial(show_answers, folder, say=say))
        say(f"figures: {folder / EVALUATION}; every answer: {folder / ANSWERS}")
        if best is not None:
            say(f"{export_best(folder, to=best)} conversations of the tasks' best answers: {best}")
        return 0 if played.found else 1


def show_answers(folder: Path, *, say: Callable[..., object]) -> None:
    """Writes the answers of all episodes to ANSWERS, and prints the best, the worst and some in between."""
    from buffers.ledger.answers import answer_of, answers, in_a_line, samples
    from buffers.ledger.cli import decoder, ledger_path
    from buffers.ledger.reader import LedgerReader

    path, scored = ledger_path(folder), []
    decode = decoder(path, given=None, plain=True)
    with (
        closing(LedgerReader(path)) as reader,
        reader.read() as db,
        (folder / ANSWERS).open("w", encoding="utf-8") as sink,
    ):
        for each in answers(db, decode=decode):
            sink.write(json.dumps(each.record(), ensure_ascii=False) + "\n")
            if each.score is not None and each.task is not None:
                scored.append((each.score, each.task.task_id, each.episode_id))
        shown = [(name, answer_of(db, episode_id=one, decode=decode)) for name, one in samples(scored, number=SHOWN)]
    for name, each in shown:
        truth = each.task.ground_truth if each.task is not None else None
        say(f"{name}, score {each.score:g}: {in_a_line(each.question)}")
        say(f"  answer: {in_a_line(each.answer)}" + ("" if truth is None else f"\n  truth:  {in_a_line(str(truth))}"))


def export_best(folder: Path, *, to: Path) -> int:
    """Writes each task's best episode as demonstrations; how many conversations. Raises TaskError where none scored above 0."""
    from buffers.ledger.answers import best_episodes
    from buffers.ledger.cli import ledger_path, tokenizer_of
    from buffers.ledger.export import recorded_sessions
    from buffers.ledger.reader import LedgerReader
    from buffers.ledger.turns import TokenDecoder
    from buffers.row_files import write_rows
    from buffers.tasks.logs import row_of
    from buffers.tasks.parquet import TRACE_SCHEMA

    path = ledger_path(folder)
    decoder = TokenDecoder(tokenizer_of(path, given=None))
    with closing(LedgerReader(path)) as reader, reader.read() as db:
        best = set(best_episodes(db))
        if not best:
            raise TaskError(
                f"--export-best {to} needs a task with an answer that scored above 0, got none; nothing is written"
            )
        sessions = recorded_sessions(db, decoder=decoder, episodes=best)
        return write_rows(to, rows=(row_of(each.session) for each in sessions), schema=TRACE_SCHEMA)
