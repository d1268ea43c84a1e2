"""The honest agent beside an attack: whatever others send, its requests succeed and what is recorded of it is exact.

Its conversations go through the real `openai` client, one after the other, each with an episode of its own. `check` reads
them from the ledger afterwards and recomputes their log-probabilities with Hugging Face. Used by
`tests.fuzz.real_engine`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai

from buffers.ledger.ledger import Ledger
from buffers.records import EpisodeScores, Row
from buffers.training_rows import ABORTED, episode_rows
from mocked_server.check.vllm_scripted_engine import max_logprob_diff
from mocked_server.keys import KeyRing

ROUNDS = 3
LEASE_S = 30.0
MAX_DIFFERENCE = 1e-5
QUESTIONS = ("Where are you?", "What is 3 + 4?", "Say a word.", "And then?", "Name a colour, please.")


def lease(url: str, keys: KeyRing, *, timeout_s: float) -> tuple[str, str]:
    """A new episode, asked for over HTTP: its id and its key."""
    worker = {"authorization": f"Bearer {keys.worker}"}
    answer = httpx.get(f"{url}/tasks", params={"wait": LEASE_S}, headers=worker, timeout=timeout_s)
    assert answer.status_code == 200, f"GET /tasks must give an episode, got {answer.status_code}: {answer.text}"
    return str(answer.json()["episode_id"]), str(answer.json()["api_key"])


def score(url: str, keys: KeyRing, episode_id: str, *, timeout_s: float) -> httpx.Response:
    """End an episode."""
    body = {"episode_id": episode_id, "score": 1.0}
    scorer = {"authorization": f"Bearer {keys.scorer}"}
    return httpx.post(f"{url}/scores", json=body, headers=scorer, timeout=timeout_s)


class Witness(threading.Thread):
    """Converses until `over` is set. `failed` is told what went wrong, after which it ends."""

    def __init__(
        self, url: str, keys: KeyRing, *, over: threading.Event, failed: Callable[[str], None], timeout_s: float
    ) -> None:
        super().__init__(name="witness", daemon=True)
        self.rounds: dict[str, int] = {}
        """Episode -> answers that it got."""
        self._url = url
        self._keys = keys
        self._over = over
        self._failed = failed
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._answered = 0

    def run(self) -> None:
        try:
            for number in itertools.count():
                if self._over.is_set():
                    return
                self._converse(number)
        except (openai.OpenAIError, httpx.HTTPError, AssertionError) as error:
            self._failed(f"the witness's request failed: {type(error).__name__}: {str(error)[:300]}")

    def wait_for_a_round(self) -> None:
        """Until it has been answered a request that was begun after this call, or all is over."""
        with self._changed:
            enough = self._answered + 2
            self._changed.wait_for(lambda: self._answered >= enough or self._over.is_set(), timeout=2 * self._timeout_s)

    def wake(self) -> None:
        """`over` is set."""
        with self._changed:
            self._changed.notify_all()

    def _converse(self, number: int) -> None:
        episode_id, key = lease(self._url, self._keys, timeout_s=self._timeout_s)
        messages: list[Any] = []
        with openai.OpenAI(base_url=f"{self._url}/v1", api_key=key, max_retries=0, timeout=self._timeout_s) as client:
            for turn in range(ROUNDS):
                messages.append({"role": "user", "content": QUESTIONS[(number + turn) % len(QUESTIONS)]})
                said = self._ask(client, messages, streams=(number + turn) % 2 == 1)
                messages.append({"role": "assistant", "content": said})
                self.rounds[episode_id] = turn + 1
                with self._changed:
                    self._answered += 1
                    self._changed.notify_all()
                if self._over.is_set():
                    return
        ended = score(self._url, self._keys, episode_id, timeout_s=self._timeout_s)
        assert ended.status_code == 200, f"its score must be stored, got {ended.status_code}: {ended.text}"

    def _ask(self, client: openai.OpenAI, messages: list[Any], *, streams: bool) -> str:
        asked: Any = {"model": "policy", "messages": messages, "max_tokens": 8}
        if not streams:
            return client.chat.completions.create(**asked).choices[0].message.content or ""
        parts = client.chat.completions.create(**asked, stream=True)
        return "".join(part.choices[0].delta.content or "" for part in parts if part.choices)


def check(path: Path, *, model: Path, rounds: dict[str, int]) -> float:
    """Largest difference between a recorded log-probability and that of the model. Raises AssertionError where an answer that the
    witness got is not in the ledger."""
    rows: list[Row] = []
    with Ledger(path, resume_episodes=True) as ledger:
        for episode_id, answered in rounds.items():
            stored = [part for part in ledger.rounds(episode_id).result() if part.finish_reason != ABORTED]
            assert len(stored) >= answered, (
                f"episode {episode_id}: {answered} answers, {len(stored)} rounds in the ledger"
            )
            rows += episode_rows(stored, group_id=0, scores=EpisodeScores(whole=0.0))
    return max_logprob_diff(model, rows) if rows else 0.0
