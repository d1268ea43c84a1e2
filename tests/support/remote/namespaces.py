"""Hosts without machines: each has processes, a network, /tmp and /dev/shm of its own (Linux namespaces), all share a folder.

    with bridge() as net:
        head = net.host("a")
        head.run("ray start --head ...")
        head.kill()                        # all its processes at once, as a machine that loses its power

Needs root, and a kernel that permits it: `why_not` says what is missing.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.support.patience import PATIENCE_S

SETUP = (
    "mount -t tmpfs tmpfs /tmp && mount -t tmpfs -o size=4g tmpfs /dev/shm && ip link set lo up && exec sleep infinity"
)


@cache
def why_not() -> str:
    """The reason why there can be no such hosts here; empty: they can be."""
    for tool in ("ip", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            return f"hosts made of namespaces need the command {tool}"
    try:
        with bridge() as net:
            net.host("probe").run("true")
    except (subprocess.CalledProcessError, OSError) as error:
        return f"hosts made of namespaces need root and a kernel that permits them: {error}"
    return ""


@dataclass
class Host:
    """One of them. `address`: on the bridge."""

    name: str
    address: str
    holder: subprocess.Popen[bytes]

    def command(self, *words: str) -> list[str]:
        """The words of a program that runs on this host."""
        target = _child_of(self.holder.pid)
        return ["nsenter", "-t", str(target), "-m", "-n", "-p", "-u", "env", "-C", os.getcwd(), *words]

    def run(self, line: str, *, environment: Mapping[str, str] | None = None, timeout_s: float = 120) -> str:
        """Run a shell line there; what it printed. Raises CalledProcessError."""
        done = subprocess.run(
            self.command("bash", "-c", line), env={**os.environ, **(environment or {})}, capture_output=True, text=True,
            timeout=timeout_s,
        )  # fmt: skip
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, line, done.stdout, done.stdout + done.stderr)
        return done.stdout

    def kill(self) -> None:
        """End all its processes at once, and its network with them."""
        if self.holder.poll() is None:
            os.kill(
                _child_of(self.holder.pid), signal.SIGKILL
            )  # the first process of its namespace: the others go with it
        self.holder.wait(PATIENCE_S)


@dataclass
class Net:
    """A bridge and the hosts on it. `shared`: a folder that all hosts see, in no /tmp."""

    name: str
    subnet: int
    shared: Path
    hosts: list[Host] = field(default_factory=list)

    def host(self, name: str) -> Host:
        """One more host."""
        number = len(self.hosts) + 2
        address = f"10.99.{self.subnet}.{number}"
        holder = subprocess.Popen(
            ["unshare", "-m", "-n", "-p", "-u", "--fork", "--kill-child", "--mount-proc", "bash", "-c",
             f"hostname {name} && {SETUP}"]
        )  # fmt: skip
        host = Host(name, address, holder)
        self.hosts.append(host)
        target = _child_of(holder.pid)
        outside = f"{self.name}{number}"
        _ip(f"link add {outside} type veth peer name eth0 netns {target}")
        _ip(f"link set {outside} master {self.name} up")
        enter = ["nsenter", "-t", str(target), "-n", "ip"]
        for words in (f"addr add {address}/24 dev eth0", "link set eth0 up"):
            subprocess.run([*enter, *words.split()], check=True, capture_output=True)
        return host


@contextmanager
def bridge() -> Iterator[Net]:
    """A network of hosts; all of them end with the block."""
    name = f"us{uuid.uuid4().hex[:8]}"
    shared = Path(tempfile.mkdtemp(prefix="understudy-hosts-", dir="/var/tmp"))
    net = Net(name, subnet=uuid.uuid4().int % 200 + 20, shared=shared)
    try:
        _ip(f"link add {name} type bridge")
        _ip(f"link set {name} up")
        yield net
    finally:
        for host in net.hosts:
            host.kill()
        with suppress(subprocess.CalledProcessError):
            _ip(f"link delete {name}")
        shutil.rmtree(shared, ignore_errors=True)


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)


def _child_of(pid: int) -> int:
    """The first process of its namespace, once it has set up."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            if Path(f"/proc/{child}/comm").read_text().strip() == "sleep":  # it has become that once all is mounted
                return int(child)
        time.sleep(0.05)
    raise OSError("its namespace was not set up")
