"""One run as a person sees it: folder, display, signals, and the report at the end. Called by `learner.run`."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import shlex
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from buffers.debugger import debugger_on
from buffers.disk import why_refused
from buffers.errors import UnderstudyError
from buffers.ledger.answers import first_and_last, in_a_line
from buffers.ledger.cli import decoder
from buffers.ledger.reader import LedgerReader
from configs.child_processes import python_path
from configs.schema import Config
from learner.checkpoints.store import BEST, LAST
from learner.pipeline import Pipeline
from learner.recovery.at_once import SIGNALS, signals_end_at_once
from learner.reporting.display import Display, Terminal, reward_curve_png, sparkline, summary_table, write_summary
from learner.reporting.run_metrics import OTHER_CLASS, OTHER_CLASS_ARGUMENT
from learner.reporting.tracker import Tracker
from learner.startup.run_folder import CONFIG, LEDGER, LOG, check_resumed, claimed, write_config
from learner.validation import PREFIX

logger = logging.getLogger(__name__)

SHOWN = 3
"""Validation tasks whose answers are shown at the end."""

Outcome = tuple[Pipeline, int, list[Exception]]
"""A run that has ended, its exit code, and what went wrong."""


def run_session(
    config: Config,
    *,
    resume: str = "",
    prepare: Callable[[], None] = lambda: None,
    program: str = "python -m learner.run",
) -> int:
    """Run the pipeline in a fresh folder, or in the folder of the run that is resumed; returns the exit code.

    `prepare`: called before this process has other threads. `program`: what the user calls it by. Raises UnderstudyError where a
    living run has the folder."""
    folder = Path(config.run.dir) / config.run.name
    log = folder / LOG
    with (
        ExitStack() as stack,
        claimed(folder, resume=resume, has_ledger=config.has_ledger) as (again, checkpoint),
        own_terminal(log) as terminal,
        signals_end_at_once(partial(_way_on, folder, program=program), terminal=terminal),
    ):
        start = checkpoint.position.step if checkpoint else 0
        if again and (folder / CONFIG).is_file():  # a resume that fails leaves the configuration as it was
            (folder / CONFIG).touch()
        else:
            write_config(folder, config)
        (folder / "summary.json").unlink(missing_ok=True)  # of the process before
        logging.basicConfig(filename=log, level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
        stack.enter_context(debugger_on(terminal) if config.run.debug else nullcontext())
        console = Terminal(terminal, force_terminal=False if config.run.debug else None)  # no panel before a debugger
        say = partial(console.print, highlight=False, soft_wrap=True)
        goal = "SFT" if config.learner.stage == "sft" else f"{config.run.steps} steps"
        say(f"understudy: run '{config.run.name}', {goal}, results in {folder}, log in {log}")
        if again:
            place, news = (checkpoint.folder, check_resumed(config, checkpoint)) if checkpoint else ("the start", [])
            say("\n".join([f"resuming after step {start}, from {place}", *news]))
        prepare()
        page = PageProcess(folder)
        say(f"page: {page.url}")
        with (
            Tracker(
                folder,
                trackers=config.run.trackers,
                name=config.run.name,
                config=config.model_dump(),
                start=start,
                warn=say,
            ) as tracker,
            Display(
                config.run.steps, title=config.run.name, optimum=config.run.reward_optimum, console=console
            ) as display,
        ):
            make = partial(Pipeline, folder=folder, display=display, tracker=tracker, checkpoint=checkpoint)
            run = run_agreeing(make, config=config, again=again, note=display.note)
            pipeline, code, errors = asyncio.run(with_page(run, page=page, display=display))
        conclude(pipeline, code, errors, folder=folder, console=console, program=program, attempt=tracker.attempt)
    return code


@contextmanager
def own_terminal(log: Path) -> Iterator[TextIO]:
    """Send this process's standard output and error, and its children's, to `log`; yield a file on the real terminal.

    Engine, Ray and their libraries print at will, from several processes; here only the run's own display reaches the screen.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with log.open("ab") as sink, os.fdopen(os.dup(1), "w", encoding="utf-8") as terminal:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
        try:
            yield terminal
        finally:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError):  # a full disk
                    stream.flush()
            for number, descriptor in zip((1, 2), saved, strict=True):
                os.dup2(descriptor, number)
                os.close(descriptor)


async def with_page(run: Coroutine[Any, Any, Outcome], *, page: PageProcess, display: Display) -> Outcome:
    """The outcome of `run`, beside which the page is there for visits."""
    display.page(page.url)
    page.on_link = display.page
    page.start()
    try:
        return await run
    finally:
        await page.close()


async def run_agreeing(
    make: Callable[..., Pipeline], *, config: Config, again: bool, note: Callable[[str], None]
) -> Outcome:
    """A run; begun once more with vLLM's other class of the model where its own does not compute what the learner does."""
    pipeline = make(config, resume=again)
    code, errors = await supervise(pipeline)
    own = pipeline.agreement
    if own is None or (first := own.apart) is None or not own.has_other:
        return pipeline, code, errors
    told, passes = "engine dies of a probe", ""
    if first.difference is not None:
        told = f"engine and learner differ by {first.difference:.2g} nats on average"
        passes = f", or learner.max_mean_logprob_diff={10 * first.difference:.1g} lets it pass"
    note(f"{told}: trying {OTHER_CLASS}")
    arguments = {**config.rollout.engine_args, **OTHER_CLASS_ARGUMENT}
    rollout = config.rollout.model_copy(update={"engine_args": arguments})
    pipeline = make(config.model_copy(update={"rollout": rollout}), resume=True)
    code, errors = await supervise(pipeline)
    other = pipeline.agreement
    if errors and (other is None or not (other.has_begun or other.apart)):
        told = "; ".join(map(in_words, errors))
        tried = f"vLLM's other class of it was tried: {told}"
        errors = [UnderstudyError(f"{first.what}; {tried}; train another model{passes}")]
    return pipeline, code, errors


async def supervise(pipeline: Pipeline) -> tuple[int, list[Exception]]:
    """Run to the end; SIGINT and SIGTERM ask for a clean stop. After the first one, and from its end on, they have the effect that
    they had before (`learner.recovery.at_once`)."""
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    asked = False

    def stop() -> None:
        if not pipeline.stop():
            running.cancel()

    def on_signal(
        *_: object,
    ) -> None:  # the signal's own handler, not the loop's: the second one has its effect on a busy loop, too
        nonlocal asked
        asked = True
        listen()
        loop.call_soon_threadsafe(stop)

    def listen() -> None:
        for number, handler in before.items():
            signal.signal(number, handler if asked or running.done() else on_signal)

    running = asyncio.create_task(pipeline.run(), name="pipeline")
    pipeline.on_joined = listen  # Ray installs a handler of its own for SIGTERM
    listen()
    try:
        await running
    except asyncio.CancelledError:
        if not asked:
            raise
    except BaseExceptionGroup as group:
        return 1, leaves(group)
    except Exception as error:
        return 1, [error]
    finally:
        listen()
    return (130 if asked else 0), []


def leaves(group: BaseExceptionGroup[BaseException]) -> list[Exception]:
    """The errors of a group, and of those in it. What is no error but an order to end, such as KeyboardInterrupt, is raised."""
    if (rest := group.split(Exception)[1]) is not None:
        raise rest
    inner = (leaves(one) if isinstance(one, BaseExceptionGroup) else [one] for one in group.exceptions)
    return [error for some in inner for error in some if isinstance(error, Exception)]


def conclude(
    pipeline: Pipeline,
    code: int,
    errors: Sequence[Exception],
    *,
    folder: Path,
    console: Terminal,
    program: str,
    attempt: Callable[[str, Callable[[], object]], None],
) -> None:
    """What a run leaves, however it ended: its figures and picture, what went wrong, and how to go on. A defect's traceback comes
    last."""
    say = partial(console.print, highlight=False, soft_wrap=True)
    history, lines = pipeline.history, [in_words(error) for error in errors]
    for error, line in zip(errors, lines, strict=True):
        logger.error("the run ended: %s", line, exc_info=None if isinstance(error, UnderstudyError) else error)
    summary = {**history.summary(), "stopped": code == 130, "error": "\n".join(lines) or None}
    attempt("summary.json", partial(write_summary, folder / "summary.json", summary))
    if history.rewards:
        attempt("reward.png", partial(report, console, history.rewards, summary=summary, folder=folder))
        if (folder / LEDGER).is_file():
            attempt("the answers", partial(show_answers, folder, say=say))
    elif history.sft:
        shown = {name: value for name, value in summary.items() if name not in {"name", "stopped", "error"}}
        console.print(summary_table(shown, title=f"run '{summary['name']}'"))
    verdicts = history.verdicts()
    for line in verdicts:
        say(f"note: {line}", style="bold yellow")
    for line in lines:
        say(f"error: {line}", style="bold red")
    held_back = bool(verdicts) and not history.is_solved
    if held_back or (errors and (folder / LEDGER).is_file()):
        say(how_to_see_why(folder, program=program))
    began = bool(history.rewards or history.sft)
    if code == 130 or (errors and began):
        say(how_to_go_on(folder, began=began, program=program))
    for error in errors:
        if not isinstance(error, UnderstudyError) and not why_refused(error):
            say("".join(traceback.format_exception(error)))


def in_words(error: Exception) -> str:
    """What went wrong, for people; of what is not ours with its kind."""
    if isinstance(error, UnderstudyError):
        return str(error)
    if why_refused(error):
        return (
            f"a file of the run was not taken by its disk: {error}; free space there, then run the same command again"
        )
    return f"a defect: {type(error).__name__}: {error}"


def report(console: Terminal, rewards: list[float], *, summary: dict[str, Any], folder: Path) -> None:
    """The reward curve in the terminal and as PNG, and the table of the figures that a person looks for first."""
    optimum = summary["reward_optimum"]
    reward_curve_png(folder / "reward.png", rewards, optimum=optimum, title=f"{summary['name']}: mean reward per step")
    console.print(f"reward {sparkline(rewards, top=optimum)}", highlight=False)
    shown = {
        name: value
        for name, value in summary.items()
        if not isinstance(value, dict) and name not in {"name", "stopped", "error"}
    }
    console.print(summary_table(shown, title=f"run '{summary['name']}'"))
    files = {
        "curve": "reward.png",
        "figures": "summary.json",
        "best weights": BEST,
        "last weights": LAST,
        "tensorboard": "tensorboard",
    }
    for name, file in files.items():
        if (folder / file).exists():
            console.print(f"{name:>12}: {folder / file}", highlight=False, soft_wrap=True)


def show_answers(folder: Path, *, say: Callable[..., object]) -> None:
    """What the first weights and the last ones answered, to the validation tasks whose scores have changed most."""
    path = folder / LEDGER
    with closing(LedgerReader(path)) as reader, reader.read() as db:
        if not db.execute("SELECT 1 FROM grp WHERE state = 'validated'").fetchone():
            return
        decode = decoder(path, given=None, plain=True)
        pairs = first_and_last(db, decode=decode, tasks_of=PREFIX, number=SHOWN)
    for first, last in pairs:
        say(f"{in_a_line(first.question)}")
        for name, each in (("before", first), ("after", last)):
            say(f"  {name:>6}, score {each.score:g}: {in_a_line(each.answer)}")


def how_to_see_why(folder: Path, *, program: str) -> str:
    """The command that says what held learning back, in the user's way of calling us."""
    command = "understudy why" if program.startswith("understudy") else "python -m learner.cli why"
    return f"what held it back:\n  {command} {folder}"


def _way_on(folder: Path, *, program: str) -> str:
    """The last words of a run that ends at once, at any moment, also of one that has just ended by itself."""
    figures = folder / "metrics.jsonl"
    return how_to_go_on(folder, began=figures.is_file() and figures.stat().st_size > 0, program=program)


def how_to_go_on(folder: Path, *, began: bool, program: str) -> str:
    """The command that resumes the run, for the end after Ctrl-C or an error after the first step."""
    if not began:
        return "stopped before anything was trained; run the same command again"
    command = "understudy resume" if program.startswith("understudy") else "python -m learner.cli resume"
    return f"stopped. To resume:\n  {command} {shlex.quote(str(folder))}"


# The live page of a run: a listening socket of the run's, and a process that answers there from the first visit on. A run that
# nobody looks at has the socket and nothing else. Invariants: the page's process reads files of the run and can neither hold up
# nor end it; one that dies is started again by the next visit; it ends with the run.

HOST = "127.0.0.1"
END_S = 5.0
"""Seconds that the process has to end."""
VISITS = 16
"""Connections that wait while it starts."""


class PageProcess:
    """`folder`: the run's. `on_link` takes a new address when the one before was used."""

    def __init__(self, folder: Path, *, on_link: Callable[[str], object] = lambda _: None) -> None:
        self._folder = folder
        self.on_link = on_link
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.bind((HOST, 0))
        self._socket.listen(VISITS)
        self._secret = secrets.token_urlsafe(32)
        self._process: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """A link that opens once, and was not used yet."""
        return f"http://{HOST}:{self._socket.getsockname()[1]}/open/{self._secret}"

    def start(self) -> None:
        """Wait for the first visit, on the running event loop."""
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._visited)

    def _visited(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._keeping = asyncio.create_task(self._keep(), name="page")

    async def _keep(self) -> None:
        """Run the process until it dies, then wait for the next visit."""
        environment = {
            **os.environ,
            "PYTHONPATH": python_path(),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "learner.page", "--child",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=environment,
            pass_fds=(self._socket.fileno(),), start_new_session=True,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        folders = [str(self._folder), str(self._folder.parent)]
        orders = {"descriptor": self._socket.fileno(), "folders": folders, "link": self._secret}
        with suppress(ConnectionError):
            process.stdin.write(json.dumps(orders).encode() + b"\n")
            await process.stdin.drain()
        while line := await process.stdout.readline():
            self._secret = line.decode().strip()
            self.on_link(self.url)
        logger.info("the page's process ended with code %s", await process.wait())
        self.start()

    async def close(self) -> None:
        """End the process, and stop listening."""
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        process, keeping = self._process, self._keeping
        if keeping is not None:
            keeping.cancel()
            await asyncio.wait({keeping})
        if process is not None and process.returncode is None:
            assert process.stdin is not None, "it is a pipe"
            with suppress(ConnectionError, asyncio.TimeoutError):
                process.stdin.write(b"end\n")
                await process.stdin.drain()
                await asyncio.wait_for(process.wait(), timeout=END_S)
            if process.returncode is None:
                process.kill()
                await process.wait()
        self._socket.close()
