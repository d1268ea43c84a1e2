"""The room of one Harbor environment on this machine: `python -m agents.harbor.fence hold|enter ...`, with the kernel's
namespaces.

Started by `agents.harbor.provider`, in the interpreter of `harbor` (3.12 or newer) or in ours; imports the standard library and
`agents.tools.sandbox.child` only. `hold FOLDER` makes the room and keeps it until its standard input ends, so that it ends with
the program that asked for it, however that ends; `enter PID` runs a command in it.

    user, process, IPC namespaces   no other process is seen or signalled; all that was started in the room ends with it
    mount namespace, pivot_root     / is FOLDER: its own /app, /tests, /logs, /tmp, /root; the machine's /usr and /etc, read-only
    network namespace               with `network` false: none at all. Otherwise the machine's network, loopback too
    no capabilities, no new ones    nothing of this can be taken back from inside

It limits neither memory nor processors nor disk, and what the user of the run may read in /usr and /etc the room may read. It
is a fence against programs that go wrong, not one against an attacker.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agents.tools.sandbox.child import (
    AT_FDCWD,
    AT_RECURSIVE,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWUSER,
    LAST_CAPABILITY,
    LIBC,
    MOUNT_ATTR_RDONLY,
    MOUNT_SETATTR,
    MS_NODEV,
    MS_NOSUID,
    MS_PRIVATE,
    MS_REC,
    PR_CAPBSET_DROP,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
)

CLONE_NEWPID = 0x20000000
MS_RDONLY, MS_NOEXEC, MS_BIND = 1, 8, 4096
MNT_DETACH = 2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc")
"""What a room has of the machine, read-only."""
OWN = (
    "app",
    "home",
    "logs",
    "opt",
    "root",
    "run",
    "solution",
    "srv",
    "tests",
    "tmp",
    "var/tmp",
    "proc",
    "dev/pts",
    "dev/shm",
)
"""What a room has for itself, in its folder."""
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
NAMESPACES = ("user", "ipc", "net", "pid", "mnt")
"""The order in which they are joined."""
READY, KEEP = "ready", b"keep"
VARIABLES = "ROOM_VARIABLES"
"""The name of the variable that holds those of a command that enters, as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A folder or a file of the machine that a room shows."""

    source: str
    target: str
    """Its absolute path in the room."""
    read_only: bool = False


def hold(folder: Path, *, network: bool, mounts: Sequence[Mount]) -> None:
    """Make the room, print `ready PID`, and keep it until standard input ends; then `folder` is removed, unless `keep` was said."""
    first, gate = os.pipe()
    if (maker := os.fork()) == 0:
        os.close(first)
        _make(folder, network=network, mounts=mounts, gate=gate)
    os.close(gate)
    with os.fdopen(first, encoding="utf-8") as source:
        pid, _, told = source.read().partition("\n")
    if told or not pid:
        os.waitpid(maker, 0)
        shutil.rmtree(folder, ignore_errors=True)
        sys.exit(told or "the room ended before it was there")
    print(READY, pid, flush=True)
    kept = False
    while said := os.read(0, 4096):
        kept = KEEP in said
    with suppress(ProcessLookupError):
        os.kill(int(pid), signal.SIGKILL)  # the first process of the namespace: all others end with it
    os.waitpid(maker, 0)
    if not kept:
        shutil.rmtree(folder, ignore_errors=True)


def _make(folder: Path, *, network: bool, mounts: Sequence[Mount], gate: int) -> None:
    """A process between: it enters the namespaces, so that the holder stays among the machine's files, and waits for the room."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    user, group = os.geteuid(), os.getegid()
    flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID | (0 if network else CLONE_NEWNET)
    try:
        _check(LIBC.unshare(flags), "make namespaces")
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            Path(f"/proc/self/{name}").write_text(text)
    except OSError as error:
        os.write(gate, f"\n{error}".encode())
        os._exit(1)
    going, go = os.pipe()
    if (pid := os.fork()) == 0:
        os.read(going, 1)  # the holder hears its number first
        _keep(folder, mounts=mounts, gate=gate)
    os.write(gate, f"{pid}\n".encode())
    os.close(gate)
    os.write(go, b"1")
    os.waitpid(pid, 0)
    os._exit(0)


def _keep(folder: Path, *, mounts: Sequence[Mount], gate: int) -> None:
    """The first process of the room: it makes the disks, and ends what is left to it."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        make_root(folder, mounts=mounts)
    except OSError as error:
        os.write(gate, str(error).encode())
        os._exit(1)
    null = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    os.close(gate)
    give_up_rights()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        signal.pause()


def make_root(folder: Path, *, mounts: Sequence[Mount]) -> None:
    """`folder` becomes /. Raises OSError that says which step the kernel refused."""
    root = os.path.realpath(folder)
    _check(LIBC.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "keep mounts to itself")
    _bind(root, root)
    for name in OWN:
        os.makedirs(os.path.join(root, name), exist_ok=True)
    for name in SYSTEM:
        inside = os.path.join(root, name)
        if os.path.islink(f"/{name}"):
            with suppress(FileExistsError):
                os.symlink(os.readlink(f"/{name}"), inside)
        elif os.path.isdir(f"/{name}"):
            os.makedirs(inside, exist_ok=True)
            _bind(f"/{name}", inside, read_only=True)
    for mount in mounts:
        inside = root + os.path.normpath(f"/{mount.target}")
        os.makedirs(inside if os.path.isdir(mount.source) else os.path.dirname(inside), exist_ok=True)
        if not os.path.isdir(mount.source):
            open(inside, "ab").close()
        _bind(mount.source, inside, read_only=mount.read_only)
    _make_devices(root)
    # Read-only: who maps to the machine's root could set the kernel's knobs. Where parts of /proc are hidden it is refused.
    LIBC.mount(b"proc", os.fsencode(f"{root}/proc"), b"proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, None)
    os.makedirs(f"{root}/.before", exist_ok=True)
    number = PIVOT_ROOT[os.uname().machine]
    _check(LIBC.syscall(number, os.fsencode(root), os.fsencode(f"{root}/.before")), "change /")
    os.chdir("/")
    _check(LIBC.umount2(b"/.before", MNT_DETACH), "leave the machine's disks")
    os.rmdir("/.before")


def _make_devices(root: str) -> None:
    for name in DEVICES:
        inside = f"{root}/dev/{name}"
        open(inside, "ab").close()
        with suppress(OSError):  # a machine without a /dev/tty
            _bind(f"/dev/{name}", inside)
    options = b"newinstance,ptmxmode=0666,mode=0620"
    LIBC.mount(b"devpts", os.fsencode(f"{root}/dev/pts"), b"devpts", MS_NOSUID | MS_NOEXEC, options)
    for name, target in (("ptmx", "pts/ptmx"), ("fd", "/proc/self/fd"), ("stdin", "/proc/self/fd/0")):
        with suppress(FileExistsError):
            os.symlink(target, f"{root}/dev/{name}")


def _bind(source: str, target: str, *, read_only: bool = False) -> None:
    _check(LIBC.mount(os.fsencode(source), os.fsencode(target), None, MS_BIND | MS_REC, None), f"show {source}")
    if read_only:
        wanted = struct.pack("QQQQ", MOUNT_ATTR_RDONLY, 0, 0, 0)
        done = LIBC.syscall(MOUNT_SETATTR, AT_FDCWD, os.fsencode(target), AT_RECURSIVE, wanted, len(wanted))
        _check(done, f"make {source} read-only")


def give_up_rights() -> None:
    """No capability is left to programs that are started from here on, root's neither."""
    for capability in range(LAST_CAPABILITY + 1):
        LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def enter(pid: int, *, folder: str, command: Sequence[str], variables: Mapping[str, str]) -> int:
    """Run a command in the room that `pid` holds, from `folder`, with these variables; its exit code. SIGTERM ends it, with its
    process group."""
    places = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
    mine = [os.stat(f"/proc/self/ns/{name}").st_ino for name in NAMESPACES]
    for name, place, own in zip(NAMESPACES, places, mine, strict=True):
        if os.fstat(place).st_ino != own:
            _check(LIBC.setns(place, 0), f"join the {name} namespace")
        os.close(place)
    if (child := os.fork()) == 0:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        give_up_rights()
        try:
            os.chdir(folder)
            os.execvpe(command[0], list(command), dict(variables))
        except OSError as error:
            os.write(2, f"{error}\n".encode())
            os._exit(127)
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(child, signal.SIGKILL))
    while True:
        try:
            _, status = os.waitpid(child, 0)
            break
        except InterruptedError:
            continue
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"the kernel does not let this process {what}: {os.strerror(number)}")


def main(words: Sequence[str]) -> int:
    """`hold FOLDER JSON` with `network` and `mounts`, or `enter PID FOLDER COMMAND ...`."""
    try:
        if words[0] == "enter":
            variables = json.loads(os.environ[VARIABLES])
            return enter(int(words[1]), folder=words[2], command=words[3:], variables=variables)
        spec = json.loads(words[2])
        hold(Path(words[1]), network=spec["network"], mounts=[Mount(**mount) for mount in spec["mounts"]])
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
