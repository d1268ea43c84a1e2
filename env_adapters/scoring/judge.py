"""A language model as scorer, `data.scorer: judge`: asked as the run's role `judge`, one answer at a time or a group's together.

Made by `learner.players`, called by `env_adapters.scoring.rewards` while the episode runs. The question goes to the run's own
server, under the episode's key, as an agent's would: so the judge is the policy, a frozen model or any OpenAI-compatible server, as
`roles.judge` says, and what was asked and said is a recorded round that is never trained.

- *absolute*: a number of 0 to 10 for each answer; the score is a tenth of it.
- *ranking*: all answers of a group are shown together, and once more in reverse, as judges favour places (arXiv:2306.05685). In
  each order an answer has the share of the others that it beats, a tie for half; its score is the mean of the two.

Invariants: a judge that is not there, is late or says something else fails the episodes that it was asked about (ScoreError), and
nothing else; what an answer says cannot leave its tags. The members of a group wait for one another, in their slots; one that ends
meanwhile is replaced by its next attempt, which is waited for. It keeps no answer longer than that, and trains nothing.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import httpx2

from buffers.errors import ScoreError, TaskError
from buffers.outgoing import RUN, Outgoing
from buffers.records import LeasedEpisode, Task, scored_episode

NAME = "judge"
"""Its name in `data.scorer`, and that of its role."""
Mode = Literal["absolute", "ranking"]
PLACES = {"absolute": ("{task}", "{answer}"), "ranking": ("{task}", "{answers}")}
"""Places that a rubric has to hold."""
BEST = 10
TRIES = 3
PAUSE_S = 0.5
"""Seconds before the second try where the judge's server is not there or busy; doubled before the next one."""
LOOKED_AT_CHARS = 65_536
OBJECTS_TRIED = 64
"""Opening braces of what a judge said that may begin its verdict, from the end."""
MAX_SHOWN_CHARS = 100
Truth = Callable[[Task, str], Awaitable[float]]


def read_rubric(path: str, *, mode: Mode) -> str:
    """The text of a rubric; of the shipped one for an empty path. Raises TaskError."""
    file = Path(path) if path else Path(__file__).with_name(f"judge_{mode}.txt")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(
            f"data.judge.rubric must name a text file, got {str(file.resolve())!r} ({type(error).__name__}); write it, or leave "
            f"the key out for the shipped one"
        ) from None
    if missing := [place for place in PLACES[mode] if place not in text]:
        raise TaskError(
            f"data.judge.rubric must hold {' and '.join(PLACES[mode])}, where what is judged stands, got "
            f"{'an empty file' if not text.strip() else 'none of ' + missing[0]} in {str(file.resolve())!r}; add it"
        )
    return text


@dataclass(slots=True)
class JudgeTotals:
    """Since a step's line was written."""

    rounds: int = 0
    tokens: int = 0
    seconds: float = 0.0
    failed: int = 0
    truths: list[float] = field(default_factory=list)
    orders: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """The figures of a step's line."""
        figures = {"judge/rounds": float(self.rounds), "judge/tokens": float(self.tokens)}
        figures |= {"judge/seconds": self.seconds, "judge/failed": float(self.failed)}
        agreements = (("judge/agreement_truth", self.truths), ("judge/agreement_orders", self.orders))
        return figures | {name: sum(shares) / len(shares) for name, shares in agreements if shares}


@dataclass(slots=True, eq=False)
class Member:
    """An answer that waits for the others of its group."""

    answer: str
    truth: float | None
    score: asyncio.Future[float]


@dataclass(eq=False)
class Judge:
    """`rubric`: see `read_rubric`. `group_size`: members of a group that is ranked. `truth`: scores an answer by the task's own
    truth, or raises ScoreError; None: the judge is compared with nothing. `is_ours`: an engine of the run answers, which can be
    held to the form of a verdict. `unranked`: how ids of tasks begin that are validation's: no group is ranked there, the truth
    scores."""

    rubric: str
    _: KW_ONLY
    mode: Mode
    group_size: int
    max_tokens: int
    timeout_s: float
    is_ours: bool
    truth: Truth | None = None
    unranked: str = "val/"

    def __post_init__(self) -> None:
        self.name = NAME
        self.sees_exit_code = False
        self._groups: defaultdict[str, dict[str, Member]] = defaultdict(dict)
        self._totals = JudgeTotals()

    def take(self) -> dict[str, float]:
        """The figures since the last call."""
        totals, self._totals = self._totals, JudgeTotals()
        return totals.figures()

    async def score(self, task: Task, answer: str) -> float:
        """The score, 0 to 1. Raises ScoreError, for which the episode fails."""
        leased = scored_episode.get()
        if leased is None:
            raise ScoreError(f"data.scorer={NAME} is asked in a running episode, got none for task {task.task_id}")
        truth = None
        with suppress(ScoreError):  # the task has none
            truth = None if self.truth is None else await self.truth(task, answer)
        if self.mode == "absolute":
            said = await self._ask(leased, {"{task}": _words(task), "{answer}": _quoted(answer)}, labels=["score"])
            score = said["score"] / BEST
            if truth is not None:
                self._totals.truths.append(float((score > 0.5) == (truth > 0.5)))
            return score
        if task.task_id.startswith(self.unranked):
            if truth is None:
                raise ScoreError(
                    f"task {task.task_id} has no group to be ranked in, and no truth; set data.judge.truth"
                )
            return truth
        return await self._ranked(leased, task, Member(answer, truth, asyncio.get_running_loop().create_future()))

    async def _ranked(self, leased: LeasedEpisode, task: Task, member: Member) -> float:
        """Wait until the group's last member ranks them all; that one is it, if all others wait."""
        group_id, index, _ = leased.episode_id.split("-")
        group = self._groups[group_id]
        group[index] = member
        try:
            if len(group) == self.group_size:
                await self._rank(leased, task, [group[each] for each in sorted(group, key=int)])
            return await member.score
        finally:
            if group.get(index) is member:  # else its next attempt is there already
                del group[index]
            if not group:
                self._groups.pop(group_id, None)

    async def _rank(self, leased: LeasedEpisode, task: Task, members: Sequence[Member]) -> None:
        """Give each its score, or all the judge's failure."""
        try:
            there = await self._shares(leased, task, [member.answer for member in members])
            back = await self._shares(leased, task, [member.answer for member in reversed(members)])
        except ScoreError as error:
            for member in members:
                if not member.score.done():
                    member.score.set_exception(error)
            return
        back.reverse()
        scores = [(one + other) / 2 for one, other in zip(there, back, strict=True)]
        self._totals.orders += [float(_order(there, *pair) == _order(back, *pair)) for pair in _pairs(members)]
        for one, other in _pairs(members):
            truths = members[one].truth, members[other].truth
            if truths[0] is not None and truths[1] is not None and truths[0] != truths[1]:
                order = _order(scores, one, other)
                self._totals.truths.append(0.5 if order == 0 else float((order > 0) == (truths[0] > truths[1])))
        for member, score in zip(members, scores, strict=True):
            if not member.score.done():
                member.score.set_result(score)

    async def _shares(self, leased: LeasedEpisode, task: Task, answers: Sequence[str]) -> list[float]:
        """The share of the others that each answer beats, in this order."""
        labels = [f"answer_{number}" for number in range(1, len(answers) + 1)]
        shown = "\n\n".join(
            f"<{label}>\n{_quoted(answer)}\n</{label}>" for label, answer in zip(labels, answers, strict=True)
        )
        said = await self._ask(leased, {"{task}": _words(task), "{answers}": shown}, labels=labels)
        numbers = [said[label] for label in labels]
        beaten = [sum((other < one) + (other == one) / 2 for other in numbers) - 0.5 for one in numbers]
        return [number / max(1, len(answers) - 1) for number in beaten]

    async def _ask(
        self, leased: LeasedEpisode, places: Mapping[str, str], *, labels: Sequence[str]
    ) -> dict[str, float]:
        """Number of each label, 0 to `BEST`, by the judge. Raises ScoreError."""
        # In one go: what stands in an answer is no place.
        text = re.sub("|".join(map(re.escape, places)), lambda place: places[place[0]], self.rubric)
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": text}], "max_tokens": self.max_tokens, "temperature": 0.0
        }  # fmt: skip
        if self.is_ours:
            body["structured_outputs"] = {"regex": _form(labels)}
        began = time.monotonic()
        self._totals.rounds += 1
        try:
            async with asyncio.timeout(self.timeout_s):
                return self._verdict(await self._reply(leased, body), labels=labels)
        except TimeoutError:
            why = f"no answer within data.judge.timeout_s={self.timeout_s:g}"
        except httpx2.HTTPError as error:
            why = f"no answer ({type(error).__name__})"
        except ValueError as error:
            why = str(error)
        finally:
            self._totals.seconds += time.monotonic() - began
        self._totals.failed += 1
        raise ScoreError(f"the judge gave {why}")

    async def _reply(self, leased: LeasedEpisode, body: Mapping[str, Any]) -> Any:
        """The answer of the run's server. One that is busy, or whose upstream is not there, is asked again."""
        url = f"{leased.base_url}/e/{leased.api_key}/{NAME}/v1/chat/completions"
        content = json.dumps(body).encode()  # escaped: an answer may be no Unicode
        async with Outgoing(RUN, headers={"content-type": "application/json"}) as client:
            for attempt in range(TRIES):
                reply = await client.post(url, content=content)
                if reply.status_code < 500 and reply.status_code != httpx2.codes.TOO_MANY_REQUESTS:
                    break
                if attempt < TRIES - 1:
                    await asyncio.sleep(PAUSE_S * 2**attempt)
        if reply.status_code != httpx2.codes.OK:
            raise ValueError(f"status {reply.status_code}: {reply.text[:MAX_SHOWN_CHARS]}")
        return reply.json()

    def _verdict(self, reply: Any, *, labels: Sequence[str]) -> dict[str, float]:
        """Raises ValueError for a reply that has none."""
        with suppress(KeyError, TypeError, ValueError):  # a server need not tell its usage
            self._totals.tokens += int(reply["usage"]["total_tokens"])
        said = ""
        with suppress(KeyError, IndexError, TypeError):
            said = str(reply["choices"][0]["message"]["content"] or "")
        end, decoder = said[-LOOKED_AT_CHARS:], json.JSONDecoder()
        for brace in [match.start() for match in re.finditer(r"\{", end)][: -OBJECTS_TRIED - 1 : -1]:
            with suppress(ValueError, RecursionError):
                verdict, _ = decoder.raw_decode(end, brace)
                if all(_is_number(verdict.get(label)) for label in labels):
                    return {label: float(verdict[label]) for label in labels}
        raise ValueError(f"no verdict with {', '.join(labels[:3])}: {' '.join(said[-MAX_SHOWN_CHARS:].split())!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= BEST


def _form(labels: Sequence[str]) -> str:
    """A short reason, then the numbers. No JSON schema: that lets a model write white space for ever."""
    numbers = ", ".join(rf'"{label}": (10|[0-9])' for label in labels)
    return rf'\{{"reason": "[^"\\\x00-\x1f]{{0,100}}", {numbers}\}}'


def _words(task: Task) -> str:
    """The task as its agent was shown it."""
    messages = [f"{message.get('role')}: {_content(message.get('content'))}" for message in task.prompt]
    return _quoted(_content(task.prompt[0].get("content")) if len(task.prompt) == 1 else "\n\n".join(messages))


def _content(content: object) -> str:
    return content if isinstance(content, str) else json.dumps(content)


def _quoted(text: str) -> str:
    """Text in which no tag of a rubric begins or ends."""
    return re.sub(r"<(?=/?(task|answer))", "< ", text)


def _pairs(members: Sequence[Member]) -> list[tuple[int, int]]:
    return list(combinations(range(len(members)), 2))


def _order(numbers: Sequence[float], one: int, other: int) -> int:
    """1 when the first is better, -1 when the second is, else 0."""
    return (numbers[one] > numbers[other]) - (numbers[one] < numbers[other])
