"""The judge of the next turn: a language model that reads what a user or a tool said after an answer, and gives that answer a
score and a hint (`serve.judge`).

Made by `learner.pipeline`, fed by `LiveSessions` with each round that continues another one. It asks the policy itself, or any
OpenAI-compatible server. Loop row: `run` takes an answer with its next turn (waits: one); gives feedback of the source `SOURCE`;
unblocked by requests. Invariants: what it asks is not recorded and never trained; a judge that is not there, is late or says
something else is counted, and changes nothing; no request waits for it: what waits is bounded, and the oldest is left out.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from buffers.errors import TaskError, UnderstudyError
from buffers.outgoing import ROLE, Outgoing
from buffers.records import MAX_HINT_CHARS
from configs.schema import NextTurnConfig

logger = logging.getLogger(__name__)

SOURCE = "next turn"
PLACES = ("{answer}", "{next}")
BEST = 10
MOST_WAITING = 256
MAX_CHARS = 8192
"""Characters of an answer, and of what was said next, that are shown: the last ones of the first, the first ones of the second."""
Ask = Callable[[str, int], Awaitable[str]]
"""(question, most tokens) -> what the model says."""


@dataclass(frozen=True, slots=True)
class NextTurn:
    """An answer, and what was said to it."""

    episode_id: str
    round_index: int
    answer: str
    said: str


def read_prompt(path: str) -> str:
    """The text of `serve.judge.prompt`, or the shipped one. Raises TaskError."""
    file = Path(path) if path else Path(__file__).with_name("next_turn.txt")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(
            f"serve.judge.prompt must name a text file, got {path!r} ({type(error).__name__}); write it"
        ) from None
    if missing := [place for place in PLACES if place not in text]:
        raise TaskError(
            f"serve.judge.prompt must hold {' and '.join(PLACES)}, got no {missing[0]} in {str(file)!r}; add it"
        )
    return text


class NextTurnJudge:
    """`ask`: the model. `tell(episode_id, round_index, score, hint)`: takes what it says; a score is 0 to 1."""

    def __init__(
        self, settings: NextTurnConfig, *, ask: Ask, tell: Callable[[str, int, float, str], Awaitable[object]]
    ) -> None:
        self._settings = settings
        self._prompt = read_prompt(settings.prompt)
        self._ask = ask
        self._tell = tell
        self._waiting: deque[NextTurn] = deque(maxlen=MOST_WAITING)
        self._woken = asyncio.Event()
        self._counts: Counter[str] = Counter()

    def look(self, turn: NextTurn) -> None:
        """Judge it, when its time comes."""
        self._counts["left_out"] += len(self._waiting) == MOST_WAITING
        self._waiting.append(turn)
        self._woken.set()

    async def run(self) -> None:
        """Judges one after the other, until cancelled."""
        while True:
            self._woken.clear()
            while self._waiting:
                await self._judge(self._waiting.popleft())
            await self._woken.wait()

    async def _judge(self, turn: NextTurn) -> None:
        shown = {"{answer}": _quoted(turn.answer[-MAX_CHARS:]), "{next}": _quoted(turn.said[:MAX_CHARS])}
        # In one go: what stands in an answer is no place.
        text = re.sub("|".join(map(re.escape, PLACES)), lambda place: shown[place[0]], self._prompt)
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                score, hint = verdict_of(await self._ask(text, self._settings.max_tokens))
            if score is None:
                self._counts["silent"] += 1
                return
            await self._tell(turn.episode_id, turn.round_index, score / BEST, hint)
            self._counts["judged"] += 1
        except (TimeoutError, ValueError, httpx2.HTTPError, UnderstudyError) as error:
            self._counts["failed"] += 1
            logger.info("the judge of the next turn gave no verdict: %r", error)

    def figures(self) -> dict[str, float]:
        """Counts since the start."""
        return {f"live/judge_{name}": float(self._counts[name]) for name in ("judged", "silent", "failed", "left_out")}


class ChatModel:
    """A model behind an OpenAI-compatible API. `url`: its root, with /v1."""

    def __init__(self, url: str, *, model: str, key: str) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def ask(self, text: str, max_tokens: int) -> str:
        """Answer of the model. Raises httpx2.HTTPError, ValueError."""
        body = {
            "model": self._model, "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "temperature": 0.0
        }  # fmt: skip
        async with Outgoing(ROLE, headers=self._headers) as client:
            reply = await client.post(f"{self._url}/v1/chat/completions", content=json.dumps(body).encode())
        if reply.status_code != httpx2.codes.OK:
            raise ValueError(f"status {reply.status_code}: {reply.text[:100]}")
        read: Any = reply.json()
        with suppress(KeyError, IndexError, TypeError):
            return str(read["choices"][0]["message"]["content"] or "")
        raise ValueError("no choices")


def verdict_of(said: str) -> tuple[float | None, str]:
    """(score of 0 to `BEST`, hint) of the last object in a text that has one; None: the next turn says nothing of the answer.
    Raises ValueError."""
    decoder = json.JSONDecoder()
    for brace in [match.start() for match in re.finditer(r"\{", said)][:-65:-1]:
        with suppress(ValueError, RecursionError):
            verdict, _ = decoder.raw_decode(said, brace)
            if "score" not in verdict:
                continue
            score, hint = verdict["score"], verdict.get("hint") or ""
            if isinstance(hint, str) and (score is None or _is_score(score)):
                return (None if score is None else float(score)), hint[:MAX_HINT_CHARS]
    raise ValueError(f"no verdict: {' '.join(said[-100:].split())!r}")


def _is_score(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= BEST


def _quoted(text: str) -> str:
    """Text that cannot leave its tags."""
    return text.replace("</", "< /")
