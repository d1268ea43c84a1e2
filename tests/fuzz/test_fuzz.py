"""The server's door under attack: a few hundred generated requests, large and deep bodies, slow sockets, forged names.

`make faults` sends thousands (`python -m tests.fuzz`), `make test-long` thousands to a whole server with its real
engine. The server is a process of its own where its memory is measured.
"""

from __future__ import annotations

import http.client
import itertools
import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest

from configs.tiny_model import make_tiny_model
from mocked_server.http.dialects import CHAT, COMPLETIONS, COUNT_TOKENS, RESPONSES
from mocked_server.keys import KeyRing, make_secret
from tests.faults.server_faults import raise_servers
from tests.fuzz.drawn_requests import GOOGLE, GOOGLE_COUNT, GOOGLE_STREAM, PLAIN, Request, fields, request
from tests.fuzz.every_route import fuzz, serve_for_fuzz
from tests.fuzz.hostile_values import Pairs, Raw, spelled
from tests.fuzz.known_attacks import CASES
from tests.fuzz.real_engine import CLIENTS, MIB, Figures, attack
from tests.fuzz.server_life import judged, resident
from tests.fuzz.witness import MAX_DIFFERENCE, check
from tests.support.patience import PATIENCE_S
from tests.support.ports import held_port
from tests.support.server_parts import ServerThread

pytestmark = [pytest.mark.slow]
SLOW_SOCKETS = 500
WAIT_S = 30.0


@pytest.fixture
def attacked(tiny_model: Path) -> Iterator[ServerThread]:
    """A server of its own: what is sent leaves tasks and episodes behind."""
    thread = serve_for_fuzz(tiny_model)
    yield thread
    thread.stop()


def test_no_generated_request_is_a_failure_of_the_server(attacked: ServerThread) -> None:
    seen = fuzz(attacked, cases=300)
    statuses = {name.split()[-1] for name in seen}
    assert seen.total() >= 200 and {"200", "401", "422"} <= statuses and len(seen) >= 20


NUM_WITNESSED = 30
"""Rounds that the witness makes at least, beside 300 requests."""


def check_attack(folder: Path, *, num_drawn: int, **more: Any) -> Figures:
    """All known attacks, then so many drawn requests; `more`: of `attack`."""
    numbers = range(len(CASES) + num_drawn)
    figures = attack(numbers, seed=0, folder=folder, **more)
    assert figures.failures == [], str(figures)
    assert figures.deaths == 0 and figures.drawn == num_drawn
    paths = {name.split()[0] for name in figures.answers}
    statuses = {name.split()[1] for name in figures.answers}
    assert paths == PLAIN.keys() and {"200", "400"} <= statuses
    assert figures.witness_rounds >= NUM_WITNESSED
    return figures


@pytest.mark.engine
def test_no_request_harms_the_real_engine_or_who_else_it_answers(tmp_path: Path) -> None:
    """And the witness's record would not be exact with other weights."""
    figures = check_attack(tmp_path, num_drawn=300)
    assert 0.0 < figures.witness_difference <= MAX_DIFFERENCE
    path, episodes = tmp_path / "life-1" / "ledger.sqlite", {"1-0-0": 0, "2-0-0": 0}
    other = make_tiny_model(tmp_path / "other", seed=1)
    assert check(path, model=tmp_path / "tiny", rounds=episodes) <= MAX_DIFFERENCE
    assert check(path, model=other, rounds=episodes) > 1000 * MAX_DIFFERENCE
    with pytest.raises(AssertionError, match="10000 answers"):
        check(path, model=other, rounds={"1-0-0": 10_000})


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.timeout(3600)
def test_no_request_of_thousands_harms_the_real_engine_or_who_else_it_answers(tmp_path: Path) -> None:
    figures = check_attack(tmp_path, num_drawn=3000)
    assert len(figures.memory) == 2, "its growth is looked at"


SABOTAGE = """
from mocked_server.generation import Generation
from mocked_server.vllm.sampling_rules import seed_of
from tests.fuzz import server_program as fuzz_server

serve = Generation.serve

async def sabotaged(self, prompt):
    if prompt.sampling.params.seed == seed_of(prompt.episode_id, 7):
        raise KeyError("sabotage")
    await serve(self, prompt)

Generation.serve = sabotaged
fuzz_server.main()
"""


def drawn(is_it: Callable[[Request], bool]) -> Iterator[int]:
    """The numbers of the drawn requests that are so."""
    return (number for number in itertools.count(len(CASES)) if is_it(request(number, seed=0)))


@pytest.mark.long
@pytest.mark.engine
def test_of_many_requests_the_one_that_ends_a_server_is_named(tmp_path: Path) -> None:
    """A server whose generate loop ends with a request that has seed 7."""
    (program := tmp_path / "sabotage.py").write_text(SABOTAGE)
    wicked = next(drawn(lambda one: one.name == "seed" and one.path == COMPLETIONS and b'"seed":7}' in one.body))
    harmless = islice(drawn(lambda one: one.name == "user" and one.path in (CHAT, COMPLETIONS)), CLIENTS)
    said: list[str] = []
    figures = attack([wicked, *harmless], seed=0, folder=tmp_path, program=program, say=said.append)
    assert figures.failures == [f"{COMPLETIONS}: the loop ended: run: KeyError: 'sabotage' at sabotage.py:10 sabotaged"]
    assert figures.deaths == 2, "among others, and alone"
    assert any(f"--seed 0 --only {wicked}" in line for line in said)
    assert figures.answers.total() >= 2 + CLIENTS, "what was lost with the server is sent to the next one"


def test_the_same_seed_sends_the_same_requests_and_another_one_others() -> None:
    some = range(len(CASES), len(CASES) + 300)
    first, again, other = ([request(number, seed=seed) for number in some] for seed in (1, 1, 2))
    assert first == again
    assert sum(one.body != another.body for one, another in zip(first, other)) > 290, "a few are the shortest there are"


def test_every_field_of_each_dialect_is_drawn() -> None:
    names: dict[str, set[str]] = {path: set() for path in PLAIN}
    for number in range(len(CASES), 12_000):
        one = request(number, seed=0)
        names[one.path] |= set(one.name.split("+"))
    for path, found in names.items():
        known = {field.name for field in fields(path)}
        assert known >= {"max_tokens"} or path in (RESPONSES, COUNT_TOKENS, GOOGLE, GOOGLE_STREAM, GOOGLE_COUNT)
        assert known <= found, f"{path}: never drawn {known - found}"


def test_json_is_spelled_as_no_library_does() -> None:
    body = Pairs((("n", 2**70), ("n", Raw("1e400")), ("a", {"\ud800": [None, True, "é"]})), frozenset({"n"}))
    text = spelled(body)
    assert text == '{"\\u006e":1180591620717411303424,"\\u006e":1e400,"a":{"\\ud800": [null,true,"\\u00e9"]}}'.replace(
        ": [", ":["
    )
    assert json.loads(text) == {"n": float("inf"), "a": {"\ud800": [None, True, "é"]}}


@pytest.mark.parametrize(
    ("status", "body", "is_fault"),
    [
        (200, b'data: {"choices": []}\n\ndata: [DONE]\n\n', False),
        (200, b'data: {"error": {"message": "no", "code": 400}}\n\n', False),
        (200, b'data: {"error": {"message": "no", "code": 500}}\n\n', True),
        (200, b'event: error\ndata: {"type": "error", "error": {"type": "internal_error", "message": "no"}}\n\n', True),
        (200, b'data: {"type": "response.failed", "response": {"error": {"code": 500, "message": "no"}}}\n\n', True),
        (400, b"{}", False),
        (500, b'{"error": {"message": "no"}}', True),
        (503, b"", True),
    ],
)
def test_what_is_the_servers_fault_is_a_failure(status: int, body: bytes, is_fault: bool) -> None:
    assert bool(judged(status, body, can_come_back=False).problem) == is_fault


def test_a_server_may_say_when_to_come_back() -> None:
    assert not judged(503, b"", can_come_back=True).problem and not judged(507, b"", can_come_back=True).problem
    assert judged(500, b"", can_come_back=True).problem


def keys_that_open_nothing(keys: KeyRing) -> list[str]:
    key = keys.episode_key("1-0-0")
    return [
        "../../tasks",
        "..%2f..%2fstatus",
        "%00",
        key[:-1],
        key.upper(),
        "us-" + "x" * 10_000,
        key + "/../../status",
    ]


def test_attacks_cost_neither_memory_nor_the_others_time(tiny_model: Path, tmp_path: Path) -> None:
    port = held_port()
    with raise_servers(tiny_model, log=tmp_path / "server.log") as raised:
        pid = raised.fork("serve", folder=str(tmp_path), port=port, slots=1)
        told, until = raised.told(until=time.monotonic() + WAIT_S), time.monotonic() + WAIT_S
        while told is not None and "ready" not in told:
            told = raised.told(until=until)
        assert told is not None, raised.last_words()
        attack_server(pid, port=port, keys=KeyRing(make_secret(tmp_path / "server.key")))


def attack_server(pid: int, *, port: int, keys: KeyRing) -> None:
    url = f"http://127.0.0.1:{port}"
    assert httpx.get(f"{url}/health").status_code == 200
    before, quiet_s = resident(pid), median(seconds_of_health(url) for _ in range(50))
    slow = [socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) for _ in range(SLOW_SOCKETS)]
    for sock in slow:
        sock.sendall(b"POST /scores HTTP/1.1\r\nhost: x\r\ncontent-le")
    times = []
    with ThreadPoolExecutor(2) as attackers:
        attacks = [attackers.submit(attack, port, keys) for attack in (large_bodies, deep_bodies)]
        while not all(attack.done() for attack in attacks) or len(times) < 50:
            times.append(seconds_of_health(url))
        for attack in attacks:
            attack.result()
    until = time.monotonic() + PATIENCE_S
    for sock in slow:
        sock.settimeout(max(0.1, until - time.monotonic()))
        assert sock.recv(1) == b"", "a slow socket must be closed"
        sock.close()
    for key in keys_that_open_nothing(keys):
        for path in (f"/e/{key}/v1/models", f"/e/{key}/v1/chat/completions"):
            assert raw_status(port, path) in (400, 401, 403, 404, 405, 431), path
    assert resident(pid) - before <= 64 * MIB
    # 3 ms without attackers. With two, one processor has three times the work, and a body of 16 MiB takes a few dozen ms.
    assert median(times) <= 0.25 + 20 * quiet_s, (median(times), quiet_s)


def seconds_of_health(url: str) -> float:
    began = time.monotonic()
    answer = httpx.get(f"{url}/health", headers={"host": "admin.example:1"}, timeout=PATIENCE_S)
    assert answer.status_code == 200
    return time.monotonic() - began


def raw_status(port: int, path: str) -> int:
    """The path as it is: clients would tidy it up."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    connection.putrequest("POST", path.replace(" ", "%20"), skip_host=False)
    connection.putheader("content-length", "2")
    connection.endheaders()
    connection.send(b"{}")
    status = connection.getresponse().status
    connection.close()
    return status


def large_bodies(port: int, keys: KeyRing) -> None:
    """200 MiB with the scorer's key, told beforehand and not, and without any key."""
    for headers in ({"authorization": f"Bearer {keys.scorer}"}, {}):
        for told in (True, False):
            for path in ("/scores", "/v1/chat/completions"):
                assert send_large(port, path, headers=headers, told=told) in (401, 413, None)


def send_large(port: int, path: str, *, headers: dict[str, str], told: bool) -> int | None:
    """None: the server closed the connection while we still sent."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as sock:
        length = f"content-length: {200 * MIB}" if told else "transfer-encoding: chunked"
        lines = [f"POST {path} HTTP/1.1", "host: x", length, *(f"{name}: {value}" for name, value in headers.items())]
        sock.sendall("\r\n".join([*lines, "", ""]).encode())
        part = b" " * MIB if told else b"100000\r\n" + b" " * MIB + b"\r\n"
        try:
            for _ in range(200):
                sock.sendall(part)
            return int(sock.recv(100).split()[1])
        except (ConnectionError, IndexError):
            return None


def deep_bodies(port: int, keys: KeyRing) -> None:
    for _ in range(20):
        answer = httpx.post(
            f"http://127.0.0.1:{port}/scores",
            content=b'{"a":' * 100_000,
            headers={"authorization": f"Bearer {keys.scorer}", "content-type": "application/json"},
            timeout=PATIENCE_S,
        )
        assert answer.status_code == 400
