"""A server with agents at work, killed again and again: its keys, episodes and tokens outlive it, and so do those of its agents.

`server_faults` raises the processes of `server_program` and kills them with SIGKILL at random moments: the server,
which comes back at the same port with the same ledger, and agents in the middle of an episode, whose place another one
takes. Every wait has a limit. A kill counts only if the process was alive and something had been acknowledged in its
life: by the server an answer or a score that was asked for after it was started, to the agent an answer within the
episode that it left behind.
"""

from __future__ import annotations

import random
import re
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path

from tokenizers import Tokenizer

from buffers.ledger.encode import decode
from buffers.ledger.schema import read_database
from tests.faults.ledger_faults import FILE_KILLS, ROOT, Log, check, child_environment, sum_of
from tests.support.ports import held_port
from tests.support.processes.forked_children import Event, Nursery, nursery

AGENTS = 6
"""As many as there are slots: who takes the place of a dead one plays once its slot is free."""
PATIENCE_S = 60.0
LIFE_S = 1.0
"""A server lives at most so much longer than until it has acknowledged something."""
STARTING_S = 0.3
EARLY = 0.1
"""So many starts are killed before the server is there; these kills count nowhere."""
LOOK_S = 0.2
TRIES = 100


def raise_servers(model: Path, *, log: Path) -> AbstractContextManager[Nursery]:
    """The nursery of servers and agents."""
    command = [sys.executable, str(ROOT / "tests" / "faults" / "server_program.py"), str(model)]
    return nursery(command, log=log, env=child_environment())


def server_faults(kills: int, *, seed: int, folder: Path) -> Log:
    """Kill so many processes: a third agents, the others servers."""
    from configs.tiny_model import make_tiny_model

    chance, total = random.Random(seed), Log()
    model = make_tiny_model(folder / "tiny", seed=0)
    kinds = ["agent"] * (kills // 3) + ["server"] * (kills - kills // 3)
    chance.shuffle(kinds)
    with raise_servers(model, log=folder / "server.log") as raised:
        for start in range(0, kills, FILE_KILLS):
            place = folder / f"server-{start}"
            place.mkdir()
            play = Play(raised, place, model=model, chance=chance)
            play.run(kinds[start : start + FILE_KILLS])
            total = sum_of(total, play.log)
    assert total.kills == kills and total.agents == kills // 3
    return total


class Play:
    """One ledger's server and agents, from the first to the last."""

    def __init__(self, raised: Nursery, folder: Path, *, model: Path, chance: random.Random) -> None:
        self.log = Log()
        self._raised = raised
        self._chance = chance
        self._path = folder / "ledger.sqlite"
        self._where = {"folder": str(folder), "port": held_port()}
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._server = 0
        self._born = 0.0
        """When the present server was started."""
        self._is_ready = False
        self._acknowledged = 0.0
        """When the latest answer or score was asked for that an agent got."""
        self._agents: dict[int, str | None] = {}
        """Process id -> the episode that it is in."""
        self._heard: dict[int, float] = {}
        self._said: dict[str, list[str]] = {}
        """Episode -> the answers that its agent got, in order."""
        self._refused: set[str] = set()
        self._left: set[str] = set()
        """Episodes of killed agents."""

    def run(self, kinds: Sequence[str]) -> None:
        """Kill one after the other; then let the agents finish, and look whether all is there."""
        self._start_server()
        for _ in range(AGENTS):
            self._start_agent()
        for kind in kinds:
            if kind == "agent":
                self._kill_agent()
            else:
                self._kill_server()
                check(self._path, log=self.log)
                self._start_server()
            self.log.kills += 1
        self._settle()
        check(self._path, log=self.log)
        self._check_answers()
        self._raised.kill(self._server)

    # Lives and deaths

    def _start_server(self) -> None:
        while self._chance.random() < EARLY:
            early = self._raised.fork("serve", **self._where, slots=AGENTS)
            self._read(until=time.monotonic() + self._chance.uniform(0.0, STARTING_S))
            self._raised.kill(early)
            self.log.idle += 1
        self._born, self._is_ready = time.monotonic(), False
        self._server = self._raised.fork("serve", **self._where, slots=AGENTS)
        self._read_until(lambda: self._is_ready, "the server must start")

    def _start_agent(self) -> None:
        pid = self._raised.fork("play", **self._where)
        self._heard[pid] = time.monotonic()
        self._agents[pid] = None

    def _kill_server(self) -> None:
        self._read_until(lambda: self._acknowledged > self._born, "the server must acknowledge something")
        self._read(until=time.monotonic() + self._chance.uniform(0.0, LIFE_S))
        self._raised.kill(self._server)
        self._read(until=0.0)

    def _kill_agent(self) -> None:
        """Until one is hit in the middle of an episode."""
        for _ in range(TRIES):
            self._read_until(lambda: any(self._amid()), "an agent must get an answer")
            victim = self._chance.choice(list(self._amid()))
            self._read(until=time.monotonic() + self._chance.uniform(0.0, LOOK_S / 10))
            self._raised.kill(victim)
            self._read(until=0.0)
            was_amid, episode = victim in self._amid(), self._agents.pop(victim)
            del self._heard[victim]
            self._start_agent()
            if was_amid and episode is not None and self._state_of(episode) == "running":
                self._left.add(episode)
                self.log.agents += 1
                return
            self.log.idle += 1
        raise AssertionError(f"no agent was hit in the middle of an episode in {TRIES} kills")

    def _state_of(self, episode_id: str) -> str:
        with closing(read_database(self._path)) as db:
            (state,) = db.execute("SELECT state FROM episode WHERE episode_id = ?", (episode_id,)).fetchone()
        return str(state)

    def _amid(self) -> Iterator[int]:
        """Agents in an episode in which they got an answer."""
        return (pid for pid, episode in self._agents.items() if episode in self._said)

    # What is told

    def _read_until(self, is_there: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + PATIENCE_S
        while not is_there():
            assert time.monotonic() < until, f"{what} within {PATIENCE_S} s: {self._raised.last_words()}"
            self._take(self._raised.told(until=until))

    def _read(self, *, until: float) -> None:
        """All that is told before then; what was told already in any case."""
        while (event := self._raised.told(until=until)) is not None:
            self._take(event)
        now = time.monotonic()
        silent = [pid for pid, when in self._heard.items() if now - when > PATIENCE_S]
        assert not silent, f"agents {silent} hang: {self._raised.last_words()}"

    def _take(self, event: Event | None) -> None:
        if event is None or "ended" in event:
            return
        by = event["by"]
        if by in self._agents:
            self._heard[by] = time.monotonic()
        if "ready" in event:
            self._is_ready = by == self._server
        elif "step" in event:
            self.log.steps.append((event["step"], event["lease"]))
        elif "leased" in event:
            self._agents[by] = event["leased"]
        elif "answer" in event:
            name, said = event["answer"]
            self._said.setdefault(name, []).append(said)
            self._acknowledged = max(self._acknowledged, event["asked"])
        elif "score" in event:
            name, self.log.scores[name] = event["score"]
            self._acknowledged = max(self._acknowledged, event["asked"])
            self._agents[by] = None
        elif "refused" in event:
            self._refused.add(event["refused"])
            self._agents[by] = None

    # The end

    def _settle(self) -> None:
        """Until another has scored in the place of each agent that was killed, and nothing is under way any more."""
        self._await_ledger(self._missing, "the episodes of killed agents must be tried again, and scored")
        self._raised.terminate(*self._agents)
        self._read(until=0.0)
        self._heard.clear()
        self._await_ledger(_unfinished, "every slot must be free, every full batch trained")

    def _await_ledger(self, find: Callable[[sqlite3.Connection], list[str]], what: str) -> None:
        until, found = time.monotonic() + PATIENCE_S, ["?"]
        while found:
            assert time.monotonic() < until, f"{what} within {PATIENCE_S} s: {found}; {self._raised.last_words()}"
            self._read(until=time.monotonic() + LOOK_S)
            with closing(read_database(self._path)) as db:
                found = find(db)

    def _missing(self, db: sqlite3.Connection) -> list[str]:
        scored = {_place(name) for (name,) in db.execute("SELECT episode_id FROM episode WHERE state = 'scored'")}
        return [name for name in self._left if _place(name) not in scored]

    def _check_answers(self) -> None:
        """Every answer is a round, those of a conversation are one branch, and what was refused had ended by its deadline."""
        with closing(read_database(self._path)) as db:
            states = {name: (state, reason) for name, state, reason in db.execute(_STATES)}
            rounds = db.execute("SELECT episode_id, round_index, parent, body FROM round").fetchall()
        overdue = {name for name, state in states.items() if state == ("failed", "deadline")}
        assert self._refused <= overdue, f"refused, though not overdue: {self._refused - overdue}"
        odd = {name: states[name] for name in self._left - overdue if states[name][0] != "scored"}
        assert odd == {}, f"episodes of killed agents that ended otherwise: {odd}"
        self.log.retried += len(self._left & overdue)
        self.log.late += len(self._refused)
        texts: dict[str, dict[int, str]] = {}
        known: dict[str, set[tuple[str | None, str]]] = {}
        for name, index, parent, body in sorted(rounds):
            text = self._tokenizer.decode(decode(body).sampled_ids.tolist())
            texts.setdefault(name, {})[index] = text
            known.setdefault(name, set()).add((None if parent is None else texts[name][parent], text))
        for name, said in self._said.items():
            links = list(zip([None, *said], said, strict=False))
            if name in overdue:  # the last answer may have left when the episode had ended
                links.pop()
            lost = set(links) - known.get(name, set())
            assert not lost, f"answered in {name}, and not recorded like that: {lost}; {known.get(name)}"


_STATES = "SELECT episode_id, state, reason FROM episode"


def _place(episode_id: str) -> str:
    """The place in its group, whichever attempt it is."""
    return re.sub(r"-\d+$", "", episode_id)


def _unfinished(db: sqlite3.Connection) -> list[str]:
    running = [name for (name,) in db.execute("SELECT episode_id FROM episode WHERE state = 'running'")]
    ready = [str(name) for (name,) in db.execute("SELECT group_id FROM grp WHERE state IN ('ready', 'leased')")]
    return running + ready[1:]
