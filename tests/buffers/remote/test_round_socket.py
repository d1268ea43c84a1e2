"""Rows from other processes: exact, proven, bounded; stored once however often they are sent."""

from __future__ import annotations

import errno
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest

import buffers.remote.round_socket
from buffers.ledger.encode import stored_round
from buffers.ledger.ledger import Ledger
from buffers.remote.round_socket import _SIZES, Channel, EndpointError, RoundClient, RoundServer
from tests.support.buffer_parts import make_round, open_running

ROOT = Path(__file__).parents[3]
SECRET = b"s" * 32


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        yield ledger


@pytest.fixture
def endpoint(ledger: Ledger) -> Iterator[RoundServer]:
    endpoint = RoundServer(ledger, secret=SECRET)
    yield endpoint
    endpoint.close()


def test_rounds_arrive_bit_for_bit_and_a_bad_one_harms_no_other(ledger: Ledger, endpoint: RoundServer) -> None:
    first, second = open_running(ledger, task=0, group_size=2)
    rounds = [
        make_round(first.episode_id, sampled=range(2000)),
        make_round("nobody"),
        make_round(first.episode_id, index=1, parent=0, tail=(), finish_reason="length"),
        make_round(second.episode_id, index=1, parent=0),
        make_round(second.episode_id),
    ]
    client = RoundClient(endpoint.address, secret=SECRET)
    errors = client.put_rounds(rounds)
    assert [error is None for error in errors] == [True, False, True, False, True]
    assert "nobody" in str(errors[1]) and "parent" in str(errors[3])
    one, two = ledger.rounds(first.episode_id).result()
    assert np.array_equal(one.sampled_ids, np.arange(2000)) and one.logprobs.dtype == np.float32
    assert np.array_equal(one.logprobs, rounds[0].logprobs) and two.finish_reason == "length"
    assert client.put_rounds([rounds[0]]) == [None] and ledger.counts()["rounds"] == 3  # sent again, stored once
    changed = make_round(first.episode_id, sampled=range(1999))
    assert client.put_rounds([changed])[0] is not None
    client.close()


def test_who_does_not_know_the_secret_is_sent_away(ledger: Ledger, endpoint: RoundServer) -> None:
    with pytest.raises((EndpointError, OSError)):
        RoundClient(endpoint.address, secret=b"x" * 32).put_rounds([])
    with socket.create_connection(endpoint.address, timeout=20) as sock:
        sock.sendall(b"n" * 32 + b"m" * 32 + _SIZES.pack(2, 60_000_000) + b"0" * 32 + b"{}")
        with suppress(ConnectionResetError):
            while sock.recv(4096):
                pass  # until it closes
    good = RoundClient(endpoint.address, secret=SECRET)
    assert good.put_rounds([]) == []
    good.close()


def test_a_frame_that_was_changed_repeated_or_is_too_large_ends_the_connection(
    ledger: Ledger, endpoint: RoundServer
) -> None:
    (episode,) = open_running(ledger, task=0)

    def tapped(change) -> None:
        sent: list[bytes] = []

        class Between:
            def __getattr__(self, name: str):
                return getattr(sock, name)

            def sendall(self, data: bytes) -> None:
                sent.append(data)
                sock.sendall(change(data, sent))

        with RoundClient(endpoint.address, secret=SECRET) as client:
            sock, client._channel._sock = client._channel._sock, Between()
            client.put_rounds([make_round(episode.episode_id, index=len(ledger.rounds(episode.episode_id).result()))])
            client.put_rounds([])

    tapped(lambda data, sent: data)
    assert ledger.counts()["rounds"] == 1
    with pytest.raises((EndpointError, OSError)):
        tapped(lambda data, sent: data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises((EndpointError, OSError)):
        tapped(lambda data, sent: sent[0])  # the first frame once more in place of the second
    with pytest.raises((EndpointError, OSError)):
        tapped(lambda data, sent: _SIZES.pack(2, 1 << 30) + data[8:])
    assert ledger.counts()["rounds"] == 2  # of the second try, its first frame was good


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, 5), (0, {"a": 1}), (0, None), (1, "x"), (1, 1.5), (1, True), (1, 2**70), (2, "x"), (2, [1]),
        (3, 5), (3, None), (3, "x" * 1000), (4, -1), (4, 1e9), (4, None), (5, "1"), (6, -1), (6, True),
    ],
)  # fmt: skip
def test_what_a_header_cannot_say_ends_its_connection_and_stores_nothing(
    ledger: Ledger, endpoint: RoundServer, place: int, value: object
) -> None:
    """Also from somebody who knows the secret."""
    (episode,) = open_running(ledger, task=0)
    body = stored_round(make_round(episode.episode_id)).body
    entry = [episode.episode_id, 0, None, "stop", len(body), 0, None]
    entry[place] = value
    with socket.create_connection(endpoint.address, timeout=20) as sock:
        channel = Channel(sock, secret=SECRET, listens=False)
        channel.send({"rounds": [entry]}, body=[body])
        assert channel.receive() is None
    with RoundClient(endpoint.address, secret=SECRET) as good:
        assert ledger.counts()["rounds"] == 0
        assert good.put_rounds([make_round(episode.episode_id)]) == [None]


def test_a_pickle_is_a_round_that_is_refused(ledger: Ledger, endpoint: RoundServer, tmp_path: Path) -> None:
    class Touch:
        def __reduce__(self):
            return Path.touch, (tmp_path / "touched",)

    (episode,) = open_running(ledger, task=0)
    body = pickle.dumps(Touch())
    with socket.create_connection(endpoint.address, timeout=20) as sock:
        channel = Channel(sock, secret=SECRET, listens=False)
        channel.send({"rounds": [[episode.episode_id, 0, None, "stop", len(body), 0, None]]}, body=[body])
        assert channel.receive() is None
    assert ledger.counts()["rounds"] == 0 and not (tmp_path / "touched").exists()


def test_who_asks_and_reads_no_answer_holds_nobody_up(
    ledger: Ledger, endpoint: RoundServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers.remote.round_socket, "RECEIVE_S", 0.2)
    (episode,) = open_running(ledger, task=0)
    with socket.create_connection(endpoint.address, timeout=20) as sock:
        channel = Channel(sock, secret=SECRET, listens=False)
        body = stored_round(make_round("nobody")).body
        nobody = [["n" * 900, 0, None, "stop", len(body), 0, None]] * 900
        channel.send({"rounds": nobody}, body=[body] * 900)
        assert len(channel.receive(wait=True)[0]["errors"]) == 900
        sock.settimeout(20)

        def ask_on() -> None:
            while True:
                channel.send({"rounds": nobody}, body=[body] * 900)

        with pytest.raises(ConnectionError):  # once the answers fill what lies between
            ask_on()
    with RoundClient(endpoint.address, secret=SECRET) as good:
        assert good.put_rounds([make_round(episode.episode_id)]) == [None]


def test_another_process_stores_rounds(ledger: Ledger, endpoint: RoundServer) -> None:
    (episode,) = open_running(ledger, task=0)
    code = (
        "import sys; from tests.support.buffer_parts import make_round; from buffers.remote.round_socket import RoundClient;"
        f"client = RoundClient({endpoint.address!r}, secret={SECRET!r});"
        f"print(client.put_rounds([make_round({episode.episode_id!r}, index=i) for i in range(3)]))"
    )
    path = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run([sys.executable, "-c", code], env=path, capture_output=True, text=True, check=False)
    assert done.stdout == "[None, None, None]\n", done.stderr
    assert len(ledger.rounds(episode.episode_id).result()) == 3


def test_strangers_who_say_nothing_keep_nobody_away(ledger: Ledger, endpoint: RoundServer) -> None:
    with ExitStack() as held:
        silent = [held.enter_context(socket.create_connection(endpoint.address, timeout=20)) for _ in range(300)]
        for sock in silent:
            assert len(sock.recv(32, socket.MSG_WAITALL)) == 32  # it was taken
        with RoundClient(endpoint.address, secret=SECRET) as good:
            assert good.put_rounds([]) == []
        assert silent[0].recv(1) == b"", "the oldest gives way"


def test_a_proof_that_comes_byte_by_byte_is_not_waited_for(
    ledger: Ledger, endpoint: RoundServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers.remote.round_socket, "HELLO_S", 0.1)
    with socket.create_connection(endpoint.address, timeout=20) as sock:
        received = drip(sock)
    assert len(received) == 32, "it proved something to a stranger"


def drip(sock: socket.socket) -> bytes:
    """What comes while one byte after another is sent, until the other side has enough."""
    received = b""
    sock.settimeout(0.02)
    for _ in range(1000):
        try:
            sock.sendall(b"x")
            if not (more := sock.recv(4096)):
                return received
            received += more
        except TimeoutError:
            continue
        except ConnectionError:
            return received
    raise AssertionError("it waits for ever")


def test_the_endpoint_goes_on_when_a_connection_could_not_be_taken(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(socket.socket):
        failures = 2

        def accept(self):
            if self.failures:
                self.failures -= 1
                raise OSError(errno.EMFILE, "too many open files")
            return super().accept()

    def full_server(address):
        sock = Full()
        sock.bind(address)
        sock.listen()
        return sock

    monkeypatch.setattr(socket, "create_server", full_server)
    monkeypatch.setattr(buffers.remote.round_socket, "STILL_S", 0.01)
    endpoint = RoundServer(ledger, secret=SECRET)
    with RoundClient(endpoint.address, secret=SECRET) as good:
        assert good.put_rounds([]) == []
    endpoint.close()
