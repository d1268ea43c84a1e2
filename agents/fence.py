"""Fences around programs of others, with the kernel's means and without privileges: `python -I -S fence.py WORD ...`.

    run SPEC                      becomes a program that a model wrote, shut in (`agents.tools.sandbox.sandbox`)
    hold FOLDER SPEC              makes a room, the environment of a Harbor task, and keeps it (`agents.harbor.provider`)
    enter PID FOLDER COMMAND ...  runs a command in that room
    follow PID COMMAND ...        becomes a program that ends with process PID, which started it (`agents.tools.mcp.stdio`)

Started as a program of its own, also by other interpreters than ours (3.12 or newer); imports the standard library only. Fences
against programs that go wrong, not against an attacker: the kernel's own faults are not their matter.

`run`: all that the kernel grants of these limits is in force before the first line of the code runs, and cannot be taken back.
`"probe": true` in SPEC prints what was granted, as JSON, and ends. What is not granted is left out silently here: the caller knows
from its probe, and decides.

    setrlimit        processor time, memory, file size, open files, no core files
    user namespace   no network but an empty one, no shared memory of others, a scratch disk of limited size, all others read-only
    Landlock         files: reads Python and system libraries, writes its own folder; no signals to others
    seccomp          no sockets at all, no second process, no signals to others, no way around (io_uring, ptrace); and no rights,
                     owners, times and attributes of files where other disks could not be made read-only: Landlock leaves them

`hold` keeps the room until its standard input ends, so that it ends with the program that asked for it, however that ends. It
limits neither memory nor processors nor disk, and what the user of the run may read in /usr and /etc the room may read.

    user, process, IPC namespaces   no other process is seen or signalled; all that was started in the room ends with it
    mount namespace, pivot_root     / is FOLDER: its own /app, /tests, /logs, /tmp, /root; the machine's /usr and /etc, read-only
    network namespace               with `network` false: none at all. Otherwise the machine's network, loopback too
    no capabilities, no new ones    nothing of this can be taken back from inside
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 1, 24, 38, 22
LAST_CAPABILITY = 63
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWNET = 0x20000, 0x08000000, 0x10000000, 0x40000000
CLONE_NEWPID, CLONE_THREAD = 0x20000000, 0x10000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
MIB = 1 << 20

# Landlock: three calls with the same number everywhere; the rights grow with its version.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
PATH_BENEATH = 1
FS_EXECUTE, FS_WRITE_FILE, FS_READ_FILE, FS_READ_DIR, FS_TRUNCATE = 1, 2, 4, 8, 1 << 14
READ = FS_EXECUTE | FS_READ_FILE | FS_READ_DIR
ON_FILES = FS_EXECUTE | FS_WRITE_FILE | FS_READ_FILE | FS_TRUNCATE
CODE_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")

# seccomp: architecture -> its audit number, and its numbers of the calls that are refused.
CALLS: dict[str, tuple[int, dict[str, int]]] = {
    "x86_64": (
        0xC000003E,
        {"socket": 41, "clone": 56, "fork": 57, "vfork": 58, "kill": 62, "ptrace": 101, "tkill": 200, "tgkill": 234}
        | {"rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297, "setns": 308, "unshare": 272, "prlimit64": 302}
        | {"process_vm_readv": 310, "process_vm_writev": 311, "perf_event_open": 298, "bpf": 321, "keyctl": 250}
        | {"add_key": 248, "request_key": 249, "userfaultfd": 323, "mq_open": 240, "shmget": 29, "msgget": 68}
        | {"setpriority": 141, "ioprio_set": 251},
    ),
    "aarch64": (
        0xC00000B7,
        {"socket": 198, "clone": 220, "kill": 129, "ptrace": 117, "tkill": 130, "tgkill": 131}
        | {"rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240, "setns": 268, "unshare": 97, "prlimit64": 261}
        | {"process_vm_readv": 270, "process_vm_writev": 271, "perf_event_open": 241, "bpf": 280, "keyctl": 219}
        | {"add_key": 217, "request_key": 218, "userfaultfd": 282, "mq_open": 180, "shmget": 194, "msgget": 186}
        | {"setpriority": 140, "ioprio_set": 30},
    ),
}
ATTRIBUTES: dict[str, dict[str, int]] = {
    "x86_64": {"chmod": 90, "fchmod": 91, "chown": 92, "fchown": 93, "lchown": 94, "utime": 132, "utimes": 235}
    | {"futimesat": 261, "fchownat": 260, "fchmodat": 268, "utimensat": 280}
    | {
        "setxattr": 188,
        "lsetxattr": 189,
        "fsetxattr": 190,
        "removexattr": 197,
        "lremovexattr": 198,
        "fremovexattr": 199,
    },
    "aarch64": {"fchmod": 52, "fchmodat": 53, "fchownat": 54, "fchown": 55, "utimensat": 88}
    | {"setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15, "fremovexattr": 16},
}
NEW_ATTRIBUTES = {"fchmodat2": 452, "setxattrat": 463, "removexattrat": 466, "file_setattr": 469}
EVERYWHERE = {"pidfd_send_signal": 424, "io_uring_setup": 425, "clone3": 435}
LOAD, EQUAL, ANY_BIT, RETURN, AT_LEAST = 0x20, 0x15, 0x45, 0x06, 0x35
AT_NUMBER, AT_ARCHITECTURE, AT_FIRST_ARGUMENT = 0, 4, 16
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
EPERM, ENOSYS = 1, 38
X32 = 0x40000000

PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc")
"""Folders of the machine that a room has, read-only."""
OWN = (
    *("app", "home", "logs", "opt", "root", "run", "solution", "srv", "tests", "tmp", "var/tmp"),
    *("proc", "dev/pts", "dev/shm"),
)
"""Folders that a room has for itself."""
ROOM_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
NAMESPACES = ("user", "ipc", "net", "pid", "mnt")
"""The order in which they are joined."""
VARIABLES = "ROOM_VARIABLES"
"""The name of the variable that holds those of a command that enters, as JSON."""


def end_with_parent() -> None:
    """The kernel kills this process when the one that started it ends."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def give_up_rights() -> None:
    """No capability is left to programs that are started from here on, root's neither."""
    for capability in range(LAST_CAPABILITY + 1):
        LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def enter_namespaces(flags: int, *, root: bool) -> None:
    """New namespaces of these kinds, and a user namespace, in which the user is `root`, or stays who it is."""
    user, group = os.geteuid(), os.getegid()
    _check(LIBC.unshare(CLONE_NEWUSER | flags), "make namespaces")
    maps = (("uid_map", f"{0 if root else user} {user} 1"), ("gid_map", f"{0 if root else group} {group} 1"))
    for name, text in (("setgroups", "deny"), *maps):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def keep_mounts() -> None:
    """What is mounted from here on is mounted for this namespace only."""
    _check(LIBC.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "keep mounts to itself")


def make_read_only(path: str) -> None:
    """All that is mounted there is read-only for this namespace, also for `chmod` and its like."""
    wanted = struct.pack("QQQQ", MOUNT_ATTR_RDONLY, 0, 0, 0)
    done = LIBC.syscall(MOUNT_SETATTR, AT_FDCWD, os.fsencode(path), AT_RECURSIVE, wanted, len(wanted))
    _check(done, f"make {path} read-only")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"the kernel does not let this process {what}: {os.strerror(number)}")


def follow(parent: int, command: list[str]) -> None:
    """Take the program's place. Linux only; elsewhere the program ends when its standard input does, if it heeds that."""
    if sys.platform == "linux":
        end_with_parent()
        if os.getppid() != parent:  # it died before that call
            sys.exit(1)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them, and what it becomes would too
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


def run(spec: dict[str, Any]) -> None:
    """Give everything up, in an order in which each step is still allowed; then become the code, or print what was granted."""
    end_with_parent()
    work = os.path.join(spec["folder"], "work")
    namespaces = read_only = disk = False
    with suppress(OSError):
        enter_namespaces(CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWNS, root=False)
        namespaces = True
        keep_mounts()
        make_read_only("/")
        read_only = True
    if namespaces:  # gone with this process; after the disks, of which it would be one
        options = f"size={spec['disk_mb']}m,nr_inodes=1024,mode=700".encode()
        disk = LIBC.mount(b"tmpfs", os.fsencode(work), b"tmpfs", MS_NOSUID | MS_NODEV, options) == 0
    os.chdir(work)
    limit_resources(spec, counts_own_processes=namespaces)
    give_up_rights()
    version = shut_files(work, [*spec["readable"], os.path.join(spec["folder"], "program.py")])
    calls = refuse_calls(attributes=not (read_only and disk))
    if spec["probe"]:
        granted = {
            "network": namespaces or calls,
            "files": version >= 3,  # before that a file elsewhere could still be truncated
            "processes": calls or (namespaces and os.geteuid() != 0),
            "signals": calls or version >= 6,
            "disk": disk,
        }
        print(json.dumps(granted))
        return
    python = spec["python"]
    os.execve(python, [python, "-I", "-B", "-u", "../program.py"], spec["environment"])


def limit_resources(spec: dict[str, Any], *, counts_own_processes: bool) -> None:
    limits = {
        resource.RLIMIT_CPU: spec["cpu_s"],
        resource.RLIMIT_AS: spec["memory_mb"] * MIB,
        resource.RLIMIT_FSIZE: spec["disk_mb"] * MIB,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    if counts_own_processes:  # elsewhere it would count all processes of this user
        limits[resource.RLIMIT_NPROC] = spec["threads"]
    for name, wanted in limits.items():
        hard = resource.getrlimit(name)[1]
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(name, (value, value))


def shut_files(work: str, readable: list[str]) -> int:
    """Landlock: its version, 0 where there is none."""
    version = LIBC.syscall(CREATE_RULESET, None, 0, 1)
    if version < 1:
        return 0
    rights = (1 << 13) - 1
    for since, right in ((2, 1 << 13), (3, FS_TRUNCATE), (5, 1 << 15)):
        rights |= right if version >= since else 0
    attributes = struct.pack("QQQ", rights, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = LIBC.syscall(CREATE_RULESET, attributes, size, 0)
    if ruleset < 0:
        return 0
    allowed = {
        work: rights,
        **dict.fromkeys(readable, READ),
        **dict.fromkeys(CODE_DEVICES, FS_READ_FILE | FS_WRITE_FILE),
    }
    for path, wanted in allowed.items():
        if os.path.exists(path):
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            wanted &= rights if os.path.isdir(path) else rights & ON_FILES
            LIBC.syscall(ADD_RULE, ruleset, PATH_BENEATH, struct.pack("=Qi", wanted, place), 0)
            os.close(place)
    done = LIBC.syscall(RESTRICT_SELF, ruleset, 0) == 0
    os.close(ruleset)
    return version if done else 0


def refuse_calls(*, attributes: bool) -> bool:
    """seccomp: a filter that the kernel runs at each system call. Threads stay allowed, and signals to itself. `attributes`:
    changes of files' rights, owners, times and attributes are refused, too."""
    if platform.machine() not in CALLS or sys.byteorder != "little":
        return False
    architecture, numbers = CALLS[platform.machine()]
    program = [(LOAD, 0, 0, AT_ARCHITECTURE), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, REFUSE | EPERM)]
    program += [(LOAD, 0, 0, AT_NUMBER), (AT_LEAST, 0, 1, X32), (RETURN, 0, 0, REFUSE | EPERM)]
    unless = {
        "clone": (ANY_BIT, CLONE_THREAD),
        "tgkill": (EQUAL, os.getpid()),
        "prlimit64": (EQUAL, 0),
    }
    if attributes:
        numbers = {**numbers, **ATTRIBUTES[platform.machine()], **NEW_ATTRIBUTES}
    for name, number in {**numbers, **EVERYWHERE}.items():
        # clone3 hides its flags: where it is missing, libc takes clone.
        refusal = (RETURN, 0, 0, REFUSE | (ENOSYS if name == "clone3" else EPERM))
        if name in unless:
            test, value = unless[name]
            program += [(EQUAL, 0, 4, number), (LOAD, 0, 0, AT_FIRST_ARGUMENT), (test, 1, 0, value)]
            program += [refusal, (RETURN, 0, 0, ALLOW)]
        else:
            program += [(EQUAL, 0, 1, number), refusal]
    program.append((RETURN, 0, 0, ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code)))
    return bool(LIBC.prctl(PR_SET_SECCOMP, 2, header, 0, 0) == 0)


def hold(folder: str, *, network: bool, mounts: Sequence[Mapping[str, Any]]) -> None:
    """Make the room, print `ready PID`, and keep it until standard input ends; then `folder` is removed, unless `keep` was said.

    `mounts`: files and folders of the machine that the room shows: `source`, `target` (absolute, in the room), `read_only`."""
    import shutil  # takes as long as all the others, and no code that is shut in needs it

    first, gate = os.pipe()
    if (maker := os.fork()) == 0:
        os.close(first)
        _make(folder, network=network, mounts=mounts, gate=gate)
    os.close(gate)
    with os.fdopen(first, encoding="utf-8") as source:
        pid, _, refusal = source.read().partition("\n")
    if refusal or not pid:
        os.waitpid(maker, 0)
        shutil.rmtree(folder, ignore_errors=True)
        sys.exit(refusal or "the room ended before it was there")
    print("ready", pid, flush=True)
    kept = False
    while said := os.read(0, 4096):
        kept = b"keep" in said
    with suppress(ProcessLookupError):
        os.kill(int(pid), signal.SIGKILL)  # the first process of the namespace: all others end with it
    os.waitpid(maker, 0)
    if not kept:
        shutil.rmtree(folder, ignore_errors=True)


def _make(folder: str, *, network: bool, mounts: Sequence[Mapping[str, Any]], gate: int) -> None:
    """A process between: it enters the namespaces, so that the holder stays among the machine's files, and waits for the room."""
    end_with_parent()
    try:
        enter_namespaces(CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID | (0 if network else CLONE_NEWNET), root=True)
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


def _keep(folder: str, *, mounts: Sequence[Mapping[str, Any]], gate: int) -> None:
    """The first process of the room: it makes the disks, and ends what is left to it."""
    end_with_parent()
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


def make_root(folder: str, *, mounts: Sequence[Mapping[str, Any]]) -> None:
    """`folder` becomes /. Raises OSError that says which step the kernel refused."""
    root = os.path.realpath(folder)
    keep_mounts()
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
        source, inside = mount["source"], root + os.path.normpath(f"/{mount['target']}")
        os.makedirs(inside if os.path.isdir(source) else os.path.dirname(inside), exist_ok=True)
        if not os.path.isdir(source):
            open(inside, "ab").close()
        _bind(source, inside, read_only=mount.get("read_only", False))
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
    for name in ROOM_DEVICES:
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
        make_read_only(target)


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
        end_with_parent()
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


def main(words: Sequence[str]) -> int:
    """See the module."""
    word, *rest = words
    try:
        if word == "follow":
            follow(int(rest[0]), rest[1:])
        elif word == "run":
            run(json.loads(rest[0]))
        elif word == "enter":
            return enter(int(rest[0]), folder=rest[1], command=rest[2:], variables=json.loads(os.environ[VARIABLES]))
        else:
            hold(rest[0], **json.loads(rest[1]))
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
