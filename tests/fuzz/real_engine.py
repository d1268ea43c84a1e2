"""The attack on a whole server with its real engine: `python -m tests.fuzz --engine real N [--seed S]`.

`attack(numbers, ...)` sends the known attacks one at a time, then drawn requests by several clients at once, beside a witness
(`tests.fuzz.witness`). A failure is an answer that is the server's fault, a client that waits in vain, the death or
replacement of the engine, the end of a loop, memory that grows, and a witness that was hindered or recorded wrongly.
Whatever ends a server's life is sent again alone to the next one, so that a failure names its request.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from configs.tiny_model import make_tiny_model
from tests.faults.ledger_faults import ROOT, child_environment
from tests.fuzz.drawn_requests import Request, request, shown
from tests.fuzz.known_attacks import CASES, TIME
from tests.fuzz.server_life import JUST_NOW_S, Answer, Life, descendants, resident
from tests.fuzz.witness import MAX_DIFFERENCE, check
from tests.support.processes.forked_children import Nursery, nursery

PROGRAM = ROOT / "tests" / "fuzz" / "server_program.py"
CLIENTS = 8
MAX_FAILURES = 20
TIMEOUT_S = 180.0
"""For one answer. A server that does not answer at all is found, and a machine that others use is none."""
MIB = 1 << 20
WARM = 200
"""Requests of a life after which its memory counts."""
MAX_GROWTH = (256 * MIB, 512 * MIB)
"""Of the server, and of the engine's processes: compiled grammars are cached there, and what compiles them keeps memory. In
50,000 requests they grew by 57 and 311 MiB, ever more slowly."""
MAX_REPEATED_GROWTH = 72 * MIB
"""By one large request that is sent again and again, after the first time."""
LOOK_S = 0.1
MAX_SUSPECTS = 100
VARYING = re.compile(r"[0-9]+|\b(chatcmpl|cmpl|resp|generate)[-_]\S+")
"""Parts of a message that differ between two failures of one kind."""


@dataclass
class Figures:
    """What an attack came to."""

    answers: Counter[str] = field(default_factory=Counter)
    """By route and status."""
    failures: list[str] = field(default_factory=list)
    repeated: Counter[str] = field(default_factory=Counter)
    """Answers that failed in a way that was reported before."""
    deaths: int = 0
    seconds: float = 0.0
    """While drawn requests were sent."""
    drawn: int = 0
    witness_rounds: int = 0
    witness_difference: float = 0.0
    memory: list[tuple[int, int]] = field(default_factory=list)
    """MiB of the last life's server, and of its engine: after the first requests, and at the end."""

    def __str__(self) -> str:
        lines = [f"{number:6} {name}" for name, number in sorted(self.answers.items())]
        lines += [f"{number:6} more as: {name}" for name, number in self.repeated.most_common()]
        memory = " -> ".join(f"{server}+{engine}" for server, engine in self.memory)
        rate = self.drawn / self.seconds if self.seconds else 0.0
        return "\n".join([
            *lines,
            f"{self.answers.total()} requests, {rate:.0f}/s of the drawn ones; {self.deaths} lives of the server ended early",
            f"{self.witness_rounds} rounds of the witness, its log-probabilities off by {self.witness_difference:.1e} at most",
            f"memory of server+engine in MiB: {memory}; {len(self.failures)} failures",
        ])  # fmt: skip


def attack(
    numbers: Sequence[int], *, seed: int, folder: Path, timeout_s: float = TIMEOUT_S, max_failures: int = MAX_FAILURES,
    program: Path = PROGRAM, say: Callable[[str], None] = print, model: Path | None = None,
    max_difference: float = MAX_DIFFERENCE,
) -> Figures:  # fmt: skip
    """Send the requests with these numbers; what failed is said at once, and is in the figures. `max_difference`: of the witness's
    log-probabilities and those of `model` (None: a tiny one)."""
    model = model or make_tiny_model(folder / "tiny")
    command = [sys.executable, str(program), str(model)]
    with nursery(command, log=folder / "server.log", env=child_environment()) as raised:
        attacked = Attack(
            raised, numbers, seed=seed, folder=folder, model=model, timeout_s=timeout_s, say=say,
            max_difference=max_difference,
        )  # fmt: skip
        while attacked.has_work() and len(attacked.figures.failures) < max_failures:
            attacked.live()
    return attacked.figures


@dataclass(slots=True)
class Group:
    """Requests of which one, or some together, ended a life."""

    why: str
    numbers: list[int]
    is_explained: bool = False


class Attack:
    """See the module. Its main thread listens to the server; others send."""

    def __init__(
        self, raised: Nursery, numbers: Sequence[int], *, seed: int, folder: Path, model: Path, timeout_s: float,
        say: Callable[[str], None], max_difference: float,
    ) -> None:  # fmt: skip
        self.figures = Figures()
        self._raised = raised
        self._seed = seed
        self._folder = folder
        self._model = model
        self._timeout_s = timeout_s
        self._say = say
        self._max_difference = max_difference
        is_few = len(numbers) <= CLIENTS
        self._alone = deque(number for number in numbers if number < len(CASES) or is_few)
        self._crowd = deque(number for number in numbers if number >= len(CASES) and not is_few)
        self._groups: list[Group] = []
        self._known: set[str] = set()
        self._held: deque[tuple[float, str, Request]] = deque()
        """Failed answers of many clients' requests. What a server says while it ends is not reported: it is asked again, alone."""
        self._lock = threading.Lock()
        self._lives = 0

    def has_work(self) -> bool:
        """Whether something is still to be sent."""
        return bool(self._alone or self._crowd)

    def live(self) -> None:
        """One life of the server: it ends early, or all that is left was sent."""
        self._lives += 1
        life = Life(self._raised, self._folder / f"life-{self._lives}", timeout_s=self._timeout_s)
        self._send_with(life, [threading.Thread(target=self._send_alone, args=(life,), daemon=True)])
        if not life.over.is_set():
            self._explain_groups()
            began, before = time.monotonic(), life.sent
            self._send_with(
                life, [threading.Thread(target=self._send_many, args=(life,), daemon=True) for _ in range(CLIENTS)]
            )
            self.figures.seconds += time.monotonic() - began
            self.figures.drawn += life.sent - before
        if life.over.is_set():
            self._died(life)
        else:
            self._stopped(life)
        self._check_witness(life)

    # Sending

    def _send_with(self, life: Life, threads: list[threading.Thread]) -> None:
        """Start them, and listen to the server until they have ended."""
        for thread in threads:
            thread.start()
        start: tuple[int, int] | None = None
        while any(thread.is_alive() for thread in threads) and not life.over.is_set():
            life.look(within_s=LOOK_S)
            self._report_held(before=time.monotonic() - JUST_NOW_S)
            if life.sent < WARM:
                continue
            now = resident(life.pid), sum(map(resident, descendants(life.pid)))
            start = start or now
            self.figures.memory = [(before // MIB, engine // MIB) for before, engine in (start, now)]
            grown = [after - before > most for before, after, most in zip(start, now, MAX_GROWTH, strict=True)]
            if any(grown) and not life.over.is_set():
                self._fail(f"memory grew: server, engine {self.figures.memory} MiB", None)
                life.end("memory grew")
        if life.over.is_set() and not life.why.startswith("memory"):
            self._remember_suspects(life)
            life.close()
        for thread in threads:
            thread.join()
        self._report_held(before=time.monotonic())

    def _report_held(self, *, before: float) -> None:
        while self._held and self._held[0][0] <= before:
            _, why, sent = self._held.popleft()
            self._fail(why, sent)

    def _send_alone(self, life: Life) -> None:
        while self._alone and not life.over.is_set():
            sent = request(self._alone[0], seed=self._seed)
            first = 0
            for time_ in range(sent.times):
                this = replace(sent, body=sent.body.replace(TIME, str(time_).encode()))
                self._judge(life, sent, life.send(this, settles=True))
                if life.over.is_set():
                    return
                first = first if time_ else resident(life.pid)
            if (grown := resident(life.pid) - first) > MAX_REPEATED_GROWTH:
                self._fail(f"memory grew by {grown // MIB} MiB in {sent.times} times", sent)
            self._alone.popleft()

    def _send_many(self, life: Life) -> None:
        while not life.over.is_set():
            try:
                number = self._crowd.popleft()
            except IndexError:
                return
            sent = request(number, seed=self._seed)
            self._judge(life, sent, life.send(sent), is_alone=False)

    def _judge(self, life: Life, sent: Request, answer: Answer, *, is_alone: bool = True) -> None:
        with self._lock:
            self.figures.answers[f"{sent.path} {answer.status or 'none'}"] += 1
        if answer.ends:
            life.end(answer.problem)
        elif answer.problem and not is_alone:
            self._held.append((time.monotonic(), answer.problem, sent))
        elif answer.problem and not life.over.is_set():
            self._fail(answer.problem, sent)

    # Failures

    def _fail(self, why: str, sent: Request | None, *, always: bool = False) -> None:
        """Say it, unless the same was said of another request to this route."""
        why = why.encode(errors="backslashreplace").decode()  # a message may repeat half a surrogate pair
        route = sent.path if sent else "server"
        sign = f"{route} {VARYING.sub('#', why)[:120]}"
        with self._lock:
            if sign in self._known and not always:
                self.figures.repeated[sign] += 1
                return
            self._known.add(sign)
            self.figures.failures.append(f"{route}: {why}")
        self._say(f"FAILURE {route}: {why}")
        if sent is not None:
            self._say(
                f"  {sent.name}; send it again: python -m tests.fuzz --engine real --seed {self._seed} --only {sent.number}"
            )
            self._say(f"  POST {sent.path} {shown(sent.body)}")

    def _remember_suspects(self, life: Life) -> None:
        """Called when a life has ended early, before its connections are broken."""
        self._suspects = life.suspects()[:MAX_SUSPECTS]
        self._held.clear()

    def _died(self, life: Life) -> None:
        """The request that was sent alone did it; of several, each is sent alone to the next life."""
        if life.why.startswith("memory"):
            life.close()
            return
        self.figures.deaths += 1
        if self._alone:
            number = self._alone.popleft()
            for group in self._groups:
                group.is_explained |= number in group.numbers
            self._fail(life.why, request(number, seed=self._seed), always=True)
            return
        self._groups.append(Group(life.why, self._suspects))
        self._alone.extend(self._suspects)

    def _explain_groups(self) -> None:
        """All suspects were sent alone: a group that survived that is a failure of its own."""
        for group in self._groups:
            if not group.is_explained:
                only = ",".join(map(str, group.numbers))
                self._fail(f"{group.why} (by none of these alone: --only {only})", None, always=True)
        self._groups.clear()

    def _stopped(self, life: Life) -> None:
        try:
            life.stop()
        except AssertionError as error:
            self._fail(f"the server did not stop as it should: {str(error)[:500]}", None)

    def _check_witness(self, life: Life) -> None:
        self.figures.witness_rounds += sum(life.witness.rounds.values())
        try:
            off = check(life.folder / "ledger.sqlite", model=self._model, rounds=life.witness.rounds)
        except AssertionError as error:
            self._fail(f"the witness's record: {error}", None)
            return
        self.figures.witness_difference = max(self.figures.witness_difference, off)
        if not off <= self._max_difference:
            self._fail(f"the witness's log-probabilities are off by {off:.1e}, at most {self._max_difference:g}", None)
