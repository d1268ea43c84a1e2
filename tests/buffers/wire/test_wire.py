"""Messages between processes: proven, bounded, in their order; a stranger and another version are sent away in a line."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import Queue
from typing import Any

import msgspec
import pytest
import zmq

from buffers.errors import UnderstudyError
from buffers.wire import listener as listener_module
from buffers.wire import session as session_module
from buffers.wire import sockets
from buffers.wire.address import OtherVersion, Way, WireAddress, WireError, WireLost, way_to
from buffers.wire.connection import Connection
from buffers.wire.listener import Listener, Peer
from buffers.wire.session import MAX_PART_BYTES, Message, Session
from tests.support.patience import PATIENCE_S
from tests.support.processes.child_process import child_process

ROOT = Path(__file__).parents[3]
SECRET = b"s" * 32
WAYS = list(Way)
TCP = [Way.ENCRYPTED, Way.SIGNED]


def echo(peer: Peer, message: Message) -> None:
    if message.kind == "bad":
        raise UnderstudyError("a message must be good, got a bad one; send another")
    peer.send("echo", message.body, number=message.number)


@contextmanager
def listening(way: Way, **settings: Any) -> Iterator[Listener]:
    listener = Listener(secret=SECRET, way=way, **{"on_message": echo, **settings})
    try:
        yield listener
    finally:
        listener.close()


def ask(connection: Connection, body: Any) -> Any:
    connection.send("ask", body, number=7)
    answer = connection.receive(20)
    assert answer is not None and (answer.kind, answer.number) == ("echo", 7)
    return msgspec.msgpack.decode(answer.body)


class Tap:
    """A TCP relay that sees all bytes and may change those that go to the listener."""

    def __init__(self, address: WireAddress) -> None:
        host, port = address.place.rsplit(":", 1)
        self._server = socket.create_server(("127.0.0.1", 0))
        self._target = (host, int(port))
        self.address = WireAddress(address.way, f"127.0.0.1:{self._server.getsockname()[1]}")
        self.seen = b""
        self.change = lambda data: data
        self._sockets = [self._server]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        try:
            near, _ = self._server.accept()
        except OSError:
            return
        far = socket.create_connection(self._target)
        self._sockets += [near, far]
        for one, other, forward in ((near, far, True), (far, near, False)):
            self._threads.append(threading.Thread(target=self._relay, args=(one, other, forward), daemon=True))
            self._threads[-1].start()

    def _relay(self, one: socket.socket, other: socket.socket, forward: bool) -> None:
        try:
            while data := one.recv(1 << 16):
                self.seen += data
                other.sendall(self.change(data) if forward else data)
            other.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self) -> None:
        for sock in self._sockets:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        for thread in self._threads:
            thread.join(PATIENCE_S)
        for sock in self._sockets:
            sock.close()


@pytest.fixture
def tap() -> Iterator[Any]:
    taps: list[Tap] = []

    def make(address: WireAddress) -> Tap:
        taps.append(Tap(address))
        return taps[-1]

    yield make
    for each in taps:
        each.close()


@pytest.mark.parametrize("way", WAYS)
def test_messages_of_any_size_come_back_in_their_order(way: Way) -> None:
    with listening(way) as listener, Connection(str(listener.address), secret=SECRET) as connection:
        big = os.urandom(3 * MAX_PART_BYTES + 17)
        assert ask(connection, {"a": [1, None, b"x"]}) == {"a": [1, None, b"x"]}
        assert ask(connection, big) == big
        for number in range(300):
            connection.send("ask", number, number=number)
        answers = [connection.receive(20) for _ in range(300)]
        assert [answer.number for answer in answers if answer is not None] == list(range(300))
        assert connection.receive(0.01) is None


@pytest.mark.parametrize("way", WAYS)
def test_who_does_not_know_the_secret_is_sent_away(way: Way, caplog: pytest.LogCaptureFixture) -> None:
    reached: list[Message] = []
    with (
        caplog.at_level(logging.WARNING),
        listening(way, on_message=lambda peer, message: reached.append(message)) as listener,
    ):
        with pytest.raises(
            WireError, match=r"both sides must prove that they know the run's secret, .*; give both the same"
        ):
            Connection(listener.address, secret=b"x" * 32)
        if way is not Way.ENCRYPTED:  # there nobody even gets to say this
            with raw(listener.address) as sock:
                sock.send_multipart([b"m" + bytes(32), msgspec.msgpack.encode(["ask", 1, None])])
                assert sock.recv().startswith(b"ga connection must begin with a greeting")
        with Connection(listener.address, secret=SECRET) as good:
            good.send("ask")
            assert good.receive(0.1) is None and listener.num_peers == 1
    assert [message.kind for message in reached] == ["ask"]
    assert "secret" in caplog.text or "greeting" in caplog.text


@contextmanager
def raw(address: WireAddress) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.linger = 0
        sock.rcvtimeo = 10_000
        sock.connect(address.endpoint)
        yield sock


def test_a_listener_that_knows_another_secret_learns_nothing_and_is_named() -> None:
    """As after another process took its port."""
    with listening(Way.SIGNED) as listener:
        with pytest.raises(WireError, match="the other one did not"):
            Connection(listener.address, secret=b"y" * 32)
        assert listener.num_peers == 0


@pytest.mark.parametrize("way", WAYS)
def test_another_version_is_refused_in_one_line_by_both_sides(
    way: Way, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    line = "both sides must run the same version of this project, here it is .* got .* on the other side; check out the same one"
    with caplog.at_level(logging.WARNING), listening(way) as listener:
        greeting = Session.greeting

        def older(self: Session) -> bytes:
            if not self._listens:
                self._own = msgspec.structs.replace(self._own, project="9.9.9")
            return greeting(self)

        with monkeypatch.context() as patch:
            patch.setattr(Session, "greeting", older)
            with pytest.raises((OtherVersion, WireLost), match=line):
                Connection(listener.address, secret=SECRET)
        with Connection(listener.address, secret=SECRET) as good:
            assert ask(good, 1) == 1
        assert listener.num_peers == 1
    own = f"{session_module.PROJECT} (wire {session_module.LANGUAGE})"
    assert f"both sides must run the same version of this project, here it is {own}, got 9.9.9" in caplog.text


def test_the_version_is_the_projects() -> None:
    assert f'version = "{session_module.PROJECT}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.seconds
@pytest.mark.parametrize("way", TCP)
def test_what_is_changed_under_way_is_never_taken(way: Way, tap: Any, caplog: pytest.LogCaptureFixture) -> None:
    reached: list[bytes] = []

    def keep(peer: Peer, message: Message) -> None:
        reached.append(msgspec.msgpack.decode(message.body))
        echo(peer, message)

    with caplog.at_level(logging.WARNING), listening(way, on_message=keep) as listener:
        between = tap(listener.address)
        with Connection(between.address, secret=SECRET) as connection:
            assert ask(connection, b"A" * 100) == b"A" * 100
            between.change = lambda data: data[:-1] + bytes([data[-1] ^ 1])
            connection.send("ask", b"B" * 100)
            if way is Way.SIGNED:
                with pytest.raises(WireLost, match="forged, changed or repeated"):
                    connection.receive(20)
            else:  # ZeroMQ leaves such a connection mute
                assert connection.receive(1) is None
                between.change = lambda data: data
                connection.send("ask", b"C" * 100)
                assert connection.receive(0.5) is None
        assert reached == [b"A" * 100]
    assert (b"A" * 100 in between.seen) is (way is Way.SIGNED), "encrypted, or not"
    if way is Way.SIGNED:
        assert "message 1 of a connection must carry the proof" in caplog.text


def test_what_is_repeated_under_way_is_never_taken(tap: Any) -> None:
    reached: list[int] = []

    def keep(peer: Peer, message: Message) -> None:
        reached.append(message.number)
        peer.send("echo", number=message.number)

    with listening(Way.SIGNED, on_message=keep) as listener:
        between = tap(listener.address)
        with Connection(between.address, secret=SECRET) as connection:
            between.change = lambda data: data + data
            connection.send("ask", number=1)
            with pytest.raises(WireLost, match="forged, changed or repeated"):
                [connection.receive(20) for _ in range(2)]
    assert reached == [1]


def test_a_message_that_cannot_be_ends_its_connection_alone(caplog: pytest.LogCaptureFixture) -> None:
    gone: Queue[Peer] = Queue()
    with listening(Way.LOCAL, on_gone=gone.put) as listener, Connection(listener.address, secret=SECRET) as good:
        with Connection(listener.address, secret=SECRET) as bad:
            bad.send("bad")
            with pytest.raises(WireLost, match="a message must be good, got a bad one; send another"):
                bad.receive(20)
        for junk in ([b"m", b"\xc1"], [b"m"], [b"q", b"\x90"], [b"m", msgspec.msgpack.encode(["x", "y", None])]):
            with Connection(listener.address, secret=SECRET) as bad:
                bad._socket.send_multipart(junk)
                with pytest.raises(WireLost, match="must"):
                    bad.receive(20)
        assert ask(good, 1) == 1 and listener.num_peers == 1
        assert all(gone.get(timeout=PATIENCE_S).is_gone for _ in range(5)) and gone.empty()


def test_a_message_beyond_the_limit_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "MAX_MESSAGE_BYTES", 100_000)
    with listening(Way.LOCAL) as listener, Connection(listener.address, secret=SECRET) as connection:
        assert ask(connection, b"x" * 90_000)
        connection.send("ask", b"x" * 100_001)
        with pytest.raises(WireLost, match="may have 100000 bytes, got 100"):
            connection.receive(20)
        with Connection(listener.address, secret=SECRET) as other:
            other._socket.send_multipart([b"m", bytes(MAX_PART_BYTES + 5000)])  # beyond what the socket takes
            with pytest.raises(WireLost):
                other.receive(20)


def test_who_reads_no_answers_holds_up_nobody_and_is_parted_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "_SEND_QUEUE", 4)
    gone: Queue[Peer] = Queue()

    def answer_much(peer: Peer, message: Message) -> None:
        peer.send("echo", bytes(1 << 20))

    with (
        listening(Way.LOCAL, on_message=answer_much, on_gone=gone.put) as listener,
        Connection(listener.address, secret=SECRET) as silent,
    ):
        asked = 0
        while gone.empty():
            silent.post("ask")
            silent._take(0) if asked == 0 else silent.send("ask")
            asked += 1
            assert asked < 1000
        with Connection(listener.address, secret=SECRET) as good:
            good.send("ask")
            assert good.receive(20) is not None


@pytest.mark.seconds
def test_strangers_who_say_nothing_keep_nobody_away_and_are_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "HANDSHAKE_S", 1.0)
    with ExitStack() as held, listening(Way.ENCRYPTED) as listener:
        host, port = listener.address.place.rsplit(":", 1)
        silent = [
            held.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE_S)) for _ in range(300)
        ]
        with Connection(listener.address, secret=SECRET) as good:
            assert ask(good, 1) == 1
            for sock in silent:
                while sock.recv(4096):
                    pass  # until it is closed
            assert ask(good, 2) == 2


@pytest.mark.parametrize("way", TCP)
@pytest.mark.parametrize("says", [b"", b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00", b"GET / HTTP/1.1\r\n\r\n"])
def test_strangers_take_no_more_files_than_that_and_no_disk(
    way: Way, says: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listener_module, "MAX_UNPROVEN", 8)
    with ExitStack() as held, listening(way) as listener:
        friends = [held.enter_context(Connection(listener.address, secret=SECRET)) for _ in range(20)]
        host, port = listener.address.place.rsplit(":", 1)
        strangers = []
        for _ in range(50):
            strangers.append(held.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE_S)))
            strangers[-1].sendall(says)
        for stranger in strangers[:-8]:
            with suppress(ConnectionResetError):
                while stranger.recv(4096):
                    pass  # until it is closed, without the time for a proof having passed
        assert [ask(friend, number) for number, friend in enumerate(friends)] == list(range(20))
        with Connection(listener.address, secret=SECRET) as good:
            assert ask(good, 1) == 1
        until = time.monotonic() + PATIENCE_S
        while (
            listener._proven_early and time.monotonic() < until
        ):  # the word that it was accepted may come behind its message
            time.sleep(0.01)
        assert len(listener._strangers) <= 8 and not listener._proven_early
    assert len(caplog.records) <= 2, "each thing is said once a minute"


def test_those_who_greet_and_prove_nothing_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "MAX_UNPROVEN", 3)
    with ExitStack() as held, listening(Way.LOCAL) as listener:
        for _ in range(10):
            stranger = held.enter_context(raw(listener.address))
            stranger.send(Session(b"?" * 32, listens=False, signed=False).greeting())
            assert stranger.recv()[:1] == b"h"
        assert len(listener._unproven) == 3
        with Connection(listener.address, secret=SECRET) as good:
            assert ask(good, 1) == 1


def test_nobody_else_can_enter_the_folder_of_a_local_socket_and_it_goes() -> None:
    with listening(Way.LOCAL) as listener:
        folder = Path(listener.address.place).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()


def test_a_connection_ends_when_its_listener_is_killed() -> None:
    program = (
        "import time; from buffers.wire.address import Way; from buffers.wire.listener import Listener;"
        f"listener = Listener(secret={SECRET!r}, way=Way.ENCRYPTED, on_message=lambda peer, message: None);"
        "print(listener.address, flush=True); time.sleep(600)"
    )
    environment = {"PYTHONPATH": f"{ROOT}", "PATH": os.environ["PATH"]}
    with child_process([sys.executable, "-c", program], env=environment) as child:
        assert child.stdout is not None
        with Connection(child.stdout.readline().strip(), secret=SECRET) as connection:
            assert connection.receive(0.05) is None
            os.kill(child.pid, signal.SIGKILL)
            with pytest.raises(WireLost, match="was cut"):
                connection.receive(PATIENCE_S)
            with pytest.raises(WireLost):
                connection.send("ask")


def test_another_thread_sends_by_posting_and_wakes() -> None:
    with listening(Way.LOCAL) as listener, Connection(listener.address, secret=SECRET) as connection:
        poster = threading.Timer(0.05, lambda: connection.post("ask", 5, number=1))
        poster.start()
        answer = None
        while answer is None:
            answer = connection.receive(20)
        assert msgspec.msgpack.decode(answer.body) == 5
        poster.join()
    connection.wake()  # after it was closed: nothing


def test_a_listener_sends_from_any_thread_and_drops_what_is_for_those_who_left() -> None:
    peers: Queue[Peer] = Queue()
    with listening(Way.LOCAL, on_message=lambda peer, message: peers.put(peer)) as listener:
        with Connection(listener.address, secret=SECRET) as connection:
            connection.send("ask")
            peer = peers.get(timeout=PATIENCE_S)
            for number in range(100):
                peer.send("told", number=number)
            told = [connection.receive(20) for _ in range(100)]
            assert [each.number for each in told if each is not None] == list(range(100))
        with Connection(listener.address, secret=SECRET) as other:
            while not peer.is_gone:
                peer.send("told")
                other.send("ask")
                peers.get(timeout=PATIENCE_S)
        assert listener.num_peers <= 1


def test_a_silent_connection_is_probed_and_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "TICK_S", 0.02)
    monkeypatch.setattr(listener_module, "PROBE_S", 0.0)
    with listening(Way.SIGNED) as listener:
        with Connection(listener.address, secret=SECRET) as quiet:
            assert quiet.receive(0.2) is None and ask(quiet, 1) == 1
        until = time.monotonic() + PATIENCE_S
        while listener.num_peers and time.monotonic() < until:
            threading.Event().wait(0.01)
        assert listener.num_peers == 0


def test_the_way_follows_from_the_address() -> None:
    assert (way_to("127.0.0.1"), way_to("::1"), way_to("localhost", trusted=True)) == (Way.LOCAL,) * 3
    assert (way_to("10.0.0.1"), way_to("10.0.0.1", trusted=True)) == (Way.ENCRYPTED, Way.SIGNED)
    for text in ("", "local:", "pickle:/tmp/x", "127.0.0.1:80"):
        with pytest.raises(WireError, match="must be one of local, encrypted, signed"):
            WireAddress.parse(text)


def test_ipv6_has_a_way_too() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with (
        listening(Way.ENCRYPTED, host="::1") as listener,
        Connection(str(listener.address), secret=SECRET) as connection,
    ):
        assert ask(connection, 1) == 1


def test_a_port_that_is_taken_is_named() -> None:
    with listening(Way.SIGNED) as listener, pytest.raises(OSError, match=r"cannot listen on 127\.0\.0\.1:"):
        Listener(secret=SECRET, way=Way.SIGNED, port=int(listener.address.place.rsplit(":", 1)[1]), on_message=echo)


def test_importing_an_address_does_not_import_zeromq() -> None:
    code = "import sys, buffers.wire.address; sys.exit('zmq' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_connection_that_nobody_closed_is_told_and_holds_up_no_garbage_collection() -> None:
    listener = Listener(secret=SECRET, way=Way.LOCAL, on_message=lambda peer, message: None)
    connection = Connection(listener.address, secret=SECRET)
    ring: list[object] = [connection]
    ring.append(ring)  # only the collector finds it
    del connection, ring
    with pytest.warns(ResourceWarning, match="was not closed"):
        gc.collect()
    listener.close()
