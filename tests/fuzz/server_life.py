"""One life of the server under attack: its process, its keys, the witness beside it, and the way to send a request and to judge the
answer. Used by `tests.fuzz.real_engine`, which decides what is sent and what a life's end means.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from mocked_server.http.dialects import message_of
from mocked_server.keys import KeyRing, make_secret
from tests.fuzz.drawn_requests import Request
from tests.fuzz.witness import Witness, lease, score
from tests.support.processes.forked_children import Event, Nursery

START_S = 300.0
EPISODE_REQUESTS = 200
"""Then the attacker has another episode: what was kept for the last one has to go."""
JUST_NOW_S = 1.0
"""What was answered so shortly before a life ended may have ended it."""
CAUSE_S = 30.0
"""The server says why it ended after its connections are broken; one that stands still never does."""
LATER = (503, 507)
"""No failures if they say when to come back."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How a request was answered. `problem`: what is wrong with that, if anything is; `ends`: the server cannot be trusted any
    more."""

    status: int
    problem: str = ""
    ends: bool = False


class Life:
    """From the start of a server until it dies, stands still, or is stopped."""

    def __init__(self, raised: Nursery, folder: Path, *, timeout_s: float) -> None:
        folder.mkdir()
        self.folder = folder
        self.over = threading.Event()
        self.why = ""
        self._is_explained = False
        """By the server itself."""
        self.sent = 0
        self._raised = raised
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._under_way: dict[int, int] = {}
        """Thread -> the number of its request."""
        self._just_now: deque[tuple[float, int]] = deque(maxlen=200)
        self._is_gone = False
        self._episode: tuple[str, str] | None = None
        self.pid = raised.fork("serve", folder=str(folder))
        self.url = str(self._ready()["ready"])
        self._keys = KeyRing(make_secret(folder / "server.key"))
        self.witness = Witness(self.url, self._keys, over=self.over, failed=self.end, timeout_s=timeout_s)
        self.witness.start()

    def _ready(self) -> Event:
        until = time.monotonic() + START_S
        while (event := self._raised.told(until=until)) is not None:
            if event["by"] == self.pid:  # not the last words of the life before
                break
        assert event is not None and "ready" in event, (
            f"the server must start, got {event}: {self._raised.last_words()}"
        )
        return event

    # Its end

    def end(self, why: str) -> None:
        """It is not as it should be any more; of what clients say the first reason counts. From any thread."""
        with self._lock:
            if self.over.is_set():
                return
            self.why = why
            self.over.set()
        self.witness.wake()

    def look(self, *, within_s: float) -> None:
        """See whether the server told that something of it ended: that is the reason, whatever clients saw first."""
        event = self._event(within_s=within_s)
        if event is not None:
            self.end(event)
            self.why, self._is_explained = event, True

    def _event(self, *, within_s: float) -> str | None:
        until = time.monotonic() + within_s
        try:
            event = self._raised.told(until=until)
            while event is not None and event["by"] != self.pid:  # the last words of the life before
                event = self._raised.told(until=until)
        except AssertionError as error:  # of the nursery: its child has ended by itself
            self._is_gone = True
            return f"the server's process ended: {str(error)[:300]}"
        if event is None:
            return None
        what = f"the {event['died']} died" if "died" in event else f"the loop ended: {event.get('ended_loop')}"
        return f"{what}: {event.get('why', '')}"

    def close(self) -> None:
        """After `end`: the process is killed, `why` says as much as can be known."""
        if not self._is_explained:
            self.look(within_s=CAUSE_S)
        children = descendants(self.pid)
        if not self._is_gone:
            self._raised.kill(self.pid)
        for child in children:  # an engine that was starting just then would go on by itself
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self.witness.join()

    def stop(self) -> None:
        """End it as Ctrl-C does. Raises AssertionError when that is not possible without an error."""
        self.over.set()
        self.witness.join()
        self._raised.terminate(self.pid)

    # Requests

    def suspects(self) -> list[int]:
        """Numbers of the requests that were under way when it ended, and of those that had just been answered, latest first."""
        since = time.monotonic() - JUST_NOW_S
        with self._lock:
            latest = [number for when, number in reversed(self._just_now) if when >= since]
            return list(dict.fromkeys([*self._under_way.values(), *latest]))

    def send(self, request: Request, *, settles: bool = False) -> Answer:
        """Send it and judge the answer. `settles`: what it did to the server shows before this returns."""
        thread = threading.get_ident()
        try:
            with self._lock:
                key = self._keys.worker if request.by_worker else self._attacker()
                self._under_way[thread] = request.number
                self.sent += 1
            answer = post(self.url, request, key=key, timeout_s=self._timeout_s)
            if settles and not answer.ends:
                self.witness.wait_for_a_round()
            return answer
        except AssertionError as error:  # no episode
            return Answer(0, str(error), ends=True)
        finally:
            with self._lock:
                if not self.over.is_set():
                    self._just_now.append((time.monotonic(), self._under_way.pop(thread, request.number)))

    def _attacker(self) -> str:
        """The key of its present episode."""
        if self._episode is None or self.sent % EPISODE_REQUESTS == 0:
            before, self._episode = self._episode, lease(self.url, self._keys, timeout_s=self._timeout_s)
            if before is not None:
                ended = score(self.url, self._keys, before[0], timeout_s=self._timeout_s)
                assert ended.status_code in (200, 410), f"POST /scores: {ended.status_code}: {ended.text}"
        return self._episode[1]


def post(url: str, request: Request, *, key: str, timeout_s: float) -> Answer:
    """One request on a connection of its own."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout_s)
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    try:
        connection.request("POST", request.path, body=request.body, headers=headers)
        response = connection.getresponse()
        body = response.read()
    except TimeoutError:
        return Answer(0, f"no answer within {timeout_s:g} s", ends=True)
    except (OSError, http.client.HTTPException) as error:
        return Answer(0, f"the connection broke: {error!r}", ends=not answers(url, timeout_s=timeout_s))
    finally:
        connection.close()
    return judged(response.status, body, can_come_back=response.headers.get("retry-after") is not None)


def answers(url: str, *, timeout_s: float) -> bool:
    """Whether the server is there."""
    try:
        return httpx.get(f"{url}/health", timeout=timeout_s).status_code == 200
    except httpx.HTTPError:
        return False


def judged(status: int, body: bytes, *, can_come_back: bool) -> Answer:
    """Whether the server is at fault."""
    if status >= 500 and not (status in LATER and can_come_back):
        return Answer(status, f"{status}: {message_of(body)[:300]}")
    for line in body.splitlines() if status == 200 else ():
        if line.startswith(b"data: {") and (problem := fault_in_stream(line[6:])):
            return Answer(status, f"{status}, then in the stream {problem}")
    return Answer(status)


def fault_in_stream(event: bytes) -> str:
    """The error that a stream ended with, if it is the server's."""
    if b'"error"' not in event and b'"failed"' not in event:
        return ""
    try:
        told = json.loads(event)
    except ValueError:
        return f"no JSON: {event[:200]!r}"
    error = told.get("error") or (told.get("response") or {}).get("error") if isinstance(told, dict) else None
    if not isinstance(error, dict):
        return ""
    code = error.get("code")
    is_ours = (isinstance(code, int) and code >= 500) or error.get("type") in ("InternalServerError", "internal_error")
    return f"{code or error.get('type')}: {str(error.get('message'))[:300]}" if is_ours else ""


def resident(pid: int) -> int:
    """Bytes of memory of a process; 0 when there is none."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS")), 0)


def descendants(pid: int) -> list[int]:
    """Its children and theirs: the engine is among them."""
    try:
        tasks = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return []
    children = [int(child) for found in tasks for child in found]
    return children + [grandchild for child in children for grandchild in descendants(child)]
