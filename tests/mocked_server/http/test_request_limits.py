"""The server's door: sizes, depths, deadlines, the administrator's port, hosts that others can reach, a full disk."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffers.errors import StorageFull
from mocked_server.http.request_limits import MAX_BODY_BYTES, MAX_DEPTH, MAX_EPISODE_ROUTE_BYTES, shape_of
from mocked_server.http.routes import build_admin_app, build_app
from mocked_server.http.uvicorn_server import MAX_HEAD_BYTES, bind
from mocked_server.keys import (
    KeyRing,
    SecretError,
    check_host,
    is_loopback,
    make_secret,
    read_secret,
    round_secret,
    secret_of_run,
)
from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]


def true_depth(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max((true_depth(part) for part in value.values()), default=0)
    if isinstance(value, list):
        return 1 + max((true_depth(part) for part in value), default=0)
    return 0


texts = st.text(alphabet='{}[]"\\,:a', max_size=8)
trees = st.recursive(
    texts, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3), max_leaves=30
)


@given(tree=trees, depth=st.integers(0, 300))
@settings(max_examples=200, deadline=None)
def test_the_depth_of_a_json_text_is_that_of_its_brackets_outside_strings(tree: object, depth: int) -> None:
    padding = "[" + "[]," * (MAX_DEPTH + 1) + "[]]"  # enough brackets that they are looked at
    text = "[" * depth + json.dumps(["]" * 9, "{" * 9 + '\\"', tree, json.loads(padding)]) + "]" * depth
    exact = depth + true_depth(["", "", tree, [[]]])
    assert min(shape_of(text.encode()).depth, MAX_DEPTH + 1) == min(exact, MAX_DEPTH + 1)


def num_parts(value: object) -> tuple[int, int, int]:
    """Containers, strings and values of a tree."""
    if isinstance(value, str):
        return 0, 1, 0
    parts = [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)
    counts = [num_parts(part) for part in parts]
    within = [sum(each) for each in zip((0, 0, 0), *counts, strict=True)]
    return 1 + within[0], within[1], within[2] + 1 + max(0, len(value) - 1)


@given(tree=trees)
@settings(max_examples=200, deadline=None)
def test_what_a_json_text_holds_is_counted_outside_its_strings(tree: object) -> None:
    for text in (json.dumps(tree), json.dumps(tree, indent=2), json.dumps(tree, ensure_ascii=False)):
        assert tuple(shape_of(text.encode()))[:3] == num_parts(tree)


def post(url: str, *, key: str = "", body: bytes = b"", path: str = "/scores") -> httpx.Response:
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    return httpx.post(url + path, content=body, headers=headers, timeout=PATIENCE_S)


def test_large_and_deep_bodies_are_refused_on_every_kind_of_route(served) -> None:
    _, client = served.lease()
    keys, url = served.server.keys, served.server.base_url
    chat = "/v1/chat/completions"
    for path, key, limit in (("/scores", keys.scorer, MAX_EPISODE_ROUTE_BYTES), (chat, client.api_key, MAX_BODY_BYTES)):
        assert post(url, key=key, path=path, body=b" " * (limit + 1)).status_code == 413
        assert post(url, key=key, path=path, body=b'{"a": ' * 100_000).status_code == 400
    many = iter([b" " * 65536] * 300)  # chunked: no length is told
    assert httpx.post(url + "/scores", content=many, timeout=PATIENCE_S).status_code == 413
    assert post(served.server.admin_url, key=keys.admin, path="/tasks", body=b"[" * 100_000).status_code == 400
    within = post(url, key=keys.scorer, body=b'{"episode_id": "x", "failed": "' + b"y" * 400 + b'"}')
    assert within.status_code == 404


def test_the_administrators_routes_are_on_their_own_port_only(served) -> None:
    keys, server = served.server.keys, served.server
    headers = {"authorization": f"Bearer {keys.admin}", "host": server.admin_url.removeprefix("http://")}
    for method, path in (("GET", "/status"), ("POST", "/tasks")):
        assert httpx.request(method, server.base_url + path, headers=headers).status_code in (401, 404, 405)
    assert httpx.get(server.admin_url + "/status", headers=headers).status_code == 200
    for path in ("/episode", "/v1/models", "/scores", "/e/x/v1/models"):
        assert httpx.get(server.admin_url + path, headers=headers).status_code == 404
    assert (
        httpx.get(server.admin_url + "/status", headers={"authorization": f"Bearer {keys.scorer}"}).status_code == 401
    )
    assert server.admin_url.startswith("http://127.0.0.1:")


def test_every_route_but_health_asks_for_a_key(served) -> None:
    for app in (build_app(served.server), build_admin_app(served.server)):
        routes = {route.path: route for route in app.routes}
        assert len(routes) >= 3 and not routes["/health"].dependant.dependencies
        for path, route in routes.items():
            checks = [found.call.__name__ for found in route.dependant.dependencies]
            assert path == "/health" or "check" in checks, path


def hold_open(address: tuple[str, int], data: bytes) -> socket.socket:
    sock = socket.create_connection(address, timeout=PATIENCE_S)
    sock.sendall(data)
    return sock


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mocked_server.http.uvicorn_server.RECEIVE_S", 0.3)


@pytest.mark.seconds
@pytest.mark.usefixtures("_impatient")
def test_a_request_that_is_sent_too_slowly_is_cut_off_and_one_that_waits_is_not(served) -> None:
    host, port = served.server.base_url.removeprefix("http://").split(":")
    address = (host, int(port))
    head = b"POST /scores HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n"
    slow = [hold_open(address, data) for data in (b"", b"POST /sc", head, head + b"\r\n", head + b"\r\n123")]
    key = served.server.keys.worker.encode()
    waits = hold_open(address, b"GET /tasks?wait=1 HTTP/1.1\r\nhost: x\r\nauthorization: Bearer " + key + b"\r\n\r\n")
    for sock in slow:
        while sock.recv(4096):
            pass  # until the server closes it; the socket's own time-out fails the test
        sock.close()
    assert waits.recv(4096).startswith(b"HTTP/1.1 204")
    waits.close()


def test_a_head_that_never_ends_is_refused(served) -> None:
    host, port = served.server.base_url.removeprefix("http://").split(":")
    with hold_open((host, int(port)), b"GET /health HTTP/1.1\r\nhost: x\r\n") as sock:
        try:
            for _ in range(MAX_HEAD_BYTES // 1000 + 8):
                sock.sendall(b"a: " + b"b" * 1000 + b"\r\n")
            answer = sock.recv(4096)
        except (BrokenPipeError, ConnectionResetError):
            answer = b"HTTP/1.1 431"  # it was closed while we still sent
    assert answer.startswith(b"HTTP/1.1 431")
    assert httpx.get(served.server.base_url + "/health").status_code == 200


def test_while_the_disk_is_full_nothing_is_taken_that_could_not_be_stored(served, monkeypatch) -> None:
    def find_no_room(_: sqlite3.Connection) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    episode, client = served.lease()
    writer = served.ledger._writer
    monkeypatch.setattr(writer, "_probe", find_no_room)  # of each transaction while the disk is full
    with writer._turn:  # no transaction that began before ends now, and finds room
        monkeypatch.setattr(writer, "waits_for", "database or disk is full")
    scored = post(
        served.server.base_url,
        key=served.server.keys.scorer,
        body=json.dumps({"episode_id": episode, "score": 1.0}).encode(),
    )
    assert scored.status_code == 507 and scored.headers["retry-after"] == "5"
    asked = {"model": "policy", "messages": [{"role": "user", "content": "x"}]}
    chat = post(
        served.server.base_url, key=client.api_key, path="/v1/chat/completions", body=json.dumps(asked).encode()
    )
    assert chat.status_code == 503 and chat.headers["retry-after"] == "5"
    assert "x-should-retry" not in chat.headers and served.engine.prompts == []
    tasks = post(
        served.server.admin_url, key=served.server.keys.admin, path="/tasks", body=b'{"tasks": [{"prompt": "x"}]}'
    )
    assert tasks.status_code == 507


def test_a_score_of_a_player_in_this_process_waits_for_room(served, monkeypatch) -> None:
    episode, client = served.lease()
    client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x"}])
    refusals, stores = [StorageFull("full")] * 3, served.server._notify_score

    def while_full(*args, **details):
        if refusals:
            raise refusals.pop()
        return stores(*args, **details)

    monkeypatch.setattr("mocked_server.server.FULL_S", 0.0)
    monkeypatch.setattr(served.server, "_notify_score", while_full)
    served.call(served.server.notify_score(episode, 0.5, wait_for_disk=True))
    row = row_of(served.ledger, episode)
    assert (row.episode_id, row.score, refusals) == (episode, 0.5, [])


def test_parts_judges_and_revisions_pass_the_door(served) -> None:
    episode, client = served.lease()
    client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x"}])
    with served.http(served.server.keys.scorer) as http:
        bodies = (
            ({"score": 0.5, "round_index": 0}, 200, True),
            ({"score": 0.5, "round_index": 9}, 422, None),
            ({"score": 0.5, "round_index": 0, "branch": 0}, 422, None),
            ({"score": 0.5, "round_index": True}, 422, None),
            ({"score": 0.0, "judge": "style", "final": False}, 200, True),
            ({"score": 1.0}, 200, True),
            ({"score": 0.5}, 409, None),
            ({"score": 0.5, "revise": True}, 200, True),
            ({"score": 0.5}, 200, False),
        )
        for body, status, stored in bodies:
            answer = http.post("/scores", json={"episode_id": episode, **body})
            assert answer.status_code == status, (body, answer.text)
            assert stored is None or answer.json()["stored"] is stored
    row = row_of(served.ledger, episode)
    assert (row.score, row.round_scores) == (0.25, {0: 0.5})


def test_a_host_that_others_can_reach_needs_a_secret_of_the_operator(tmp_path: Path) -> None:
    secret = tmp_path / "server.key"
    assert all(map(is_loopback, ("127.0.0.1", "::1", "localhost", "127.9.9.9")))
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        assert not is_loopback(host)
        with pytest.raises(SecretError, match=r"server\.host=.* needs a secret of yours") as refusal:
            check_host(host, secret=secret)
        assert "\n" not in str(refusal.value)
    check_host("127.0.0.1", secret=secret)
    made = subprocess.run([sys.executable, "-m", "mocked_server.keys", str(secret)], cwd=ROOT, check=False)
    assert made.returncode == 0 and stat.S_IMODE(os.stat(secret).st_mode) == 0o600
    check_host("0.0.0.0", secret=secret)


def test_the_rows_endpoint_has_a_secret_of_its_own_and_beyond_loopback_it_needs_the_operators(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with pytest.raises(SecretError, match=r"buffer\.node=10\.0\.0\.1 can be reached by others.*set buffer\.node=''"):
        round_secret(folder, host="10.0.0.1")
    local = round_secret(folder, host="127.0.0.1")
    assert local == round_secret(folder, host="127.0.0.1") != secret_of_run(folder, host="127.0.0.1")
    make_secret(tmp_path / "server.key")
    beyond = round_secret(folder, host="10.0.0.1")
    assert len(beyond) == 32 and beyond not in (local, secret_of_run(folder, host="10.0.0.1"))


def test_keys_of_a_kept_secret_outlive_the_process_and_no_one_else_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    first, second = KeyRing(make_secret(path)), KeyRing(make_secret(path))
    assert second.episode_of(first.episode_key("1-0-0")) == "1-0-0" and first.scorer == second.scorer
    assert KeyRing().scorer != first.scorer
    path.chmod(0o644)
    with pytest.raises(SecretError, match="chmod 600"):
        read_secret(path)
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(SecretError, match="must hold 32 random bytes, got 5"):
        read_secret(path)


def test_health_does_not_wait_for_slow_sockets_that_hang(served, monkeypatch) -> None:
    monkeypatch.setattr("mocked_server.http.uvicorn_server.RECEIVE_S", 10 * PATIENCE_S)
    host, port = served.server.base_url.removeprefix("http://").split(":")
    slow = [hold_open((host, int(port)), b"POST /scores HTTP/1.1\r\nho") for _ in range(200)]
    for _ in range(20):
        assert httpx.get(served.server.base_url + "/health", timeout=PATIENCE_S).status_code == 200
    for sock in slow:
        sock.close()


def row_of(ledger, episode: str):
    """Of a claim of all that is ready: other tests left groups in the same ledger."""
    batch = ledger.claim(ledger.counts()["groups/ready"], min_version=0).result()
    return next(row for row in batch.rows if row.episode_id == episode)


def test_an_answer_does_not_wait_for_the_clients_acknowledgement(served) -> None:
    """Nagle's algorithm would hold an answer's body back until its head is acknowledged: 40 ms for each request."""
    with served.http() as http:
        http.get("/health")
        connections = served.server._http.server_state.connections
        sockets = [connection.transport.get_extra_info("socket") for connection in connections]
        assert sockets and all(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for sock in sockets)


def test_a_port_is_listened_on_as_soon_as_it_is_bound() -> None:
    """Else the kernel may give it to another who says SO_REUSEADDR, and the server could not start."""
    ours = bind("127.0.0.1", 0)
    try:
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                other.bind(ours.getsockname())
        with socket.create_connection(ours.getsockname(), timeout=PATIENCE_S):
            pass
    finally:
        ours.close()
