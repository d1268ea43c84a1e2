"""The server's door under attack: a few hundred generated requests, large and deep bodies, slow sockets, forged names.

`make faults` sends thousands (`tests.fuzz`). The server is a process of its own where its memory is measured.
"""

from __future__ import annotations

import http.client
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from mocked_server.keys import KeyRing, make_secret
from tests.fault_play import free_port, raise_servers
from tests.fuzz import fuzz, serve_for_fuzz
from tests.server_parts import ServerThread

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
MIB = 1 << 20
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


def resident(pid: int) -> int:
    """Bytes of memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


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
    port = free_port(random.Random())
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
    before = resident(pid)
    slow = [socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) for _ in range(SLOW_SOCKETS)]
    for sock in slow:
        sock.sendall(b"POST /scores HTTP/1.1\r\nhost: x\r\ncontent-le")
    times = []
    with ThreadPoolExecutor(2) as attackers:
        attacks = [attackers.submit(attack, port, keys) for attack in (large_bodies, deep_bodies)]
        while not all(attack.done() for attack in attacks) or len(times) < 50:
            began = time.monotonic()
            assert httpx.get(f"{url}/health", headers={"host": "admin.example:1"}, timeout=10).status_code == 200
            times.append(time.monotonic() - began)
        for attack in attacks:
            attack.result()
    until = time.monotonic() + 15
    for sock in slow:
        sock.settimeout(max(0.1, until - time.monotonic()))
        assert sock.recv(1) == b"", "a slow socket must be closed within 10 s"
        sock.close()
    for key in keys_that_open_nothing(keys):
        for path in (f"/e/{key}/v1/models", f"/e/{key}/v1/chat/completions"):
            assert raw_status(port, path) in (400, 401, 403, 404, 405, 431), path
    assert resident(pid) - before <= 64 * MIB
    assert sorted(times)[len(times) // 2] <= 0.25


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
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
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
            timeout=60,
        )
        assert answer.status_code == 400
