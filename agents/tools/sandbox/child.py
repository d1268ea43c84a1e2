"""The program that shuts itself in, and then becomes the code: `python -I -S child.py SPEC`.

Started by `agents.tools.sandbox.sandbox` only, in a session of its own; imports nothing of ours. Invariant: all that
the kernel grants of the limits below is in force before the first line of the code runs, and nothing of it can be taken
back. Without privileges:

    setrlimit        processor time, memory, file size, open files, no core files
    user namespace   no network but an empty one, no shared memory of others, a scratch disk of limited size, all others read-only
    Landlock         files: reads Python and system libraries, writes its own folder; no signals to others
    seccomp          no sockets at all, no second process, no signals to others, no way around (io_uring, ptrace); and no rights,
                     owners, times and attributes of files where other disks could not be made read-only: Landlock leaves them

`"probe": true` in SPEC prints what was granted, as JSON, and ends. What is not granted is left out silently here: the caller knows
from its probe, and decides. It is a fence against programs that go wrong, not a proof against the kernel's own faults.
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
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 1, 24, 38, 22
LAST_CAPABILITY = 63
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWNET = 0x20000, 0x08000000, 0x10000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 2, 4, 16384, 1 << 18
MIB = 1 << 20

# Landlock: three calls with the same number everywhere; the rights grow with its version.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
PATH_BENEATH = 1
FS_EXECUTE, FS_WRITE_FILE, FS_READ_FILE, FS_READ_DIR, FS_TRUNCATE = 1, 2, 4, 8, 1 << 14
READ = FS_EXECUTE | FS_READ_FILE | FS_READ_DIR
ON_FILES = FS_EXECUTE | FS_WRITE_FILE | FS_READ_FILE | FS_TRUNCATE
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")

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
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
EVERYWHERE = {"pidfd_send_signal": 424, "io_uring_setup": 425, "clone3": 435}
CLONE_THREAD = 0x10000
LOAD, EQUAL, ANY_BIT, RETURN, AT_LEAST = 0x20, 0x15, 0x45, 0x06, 0x35
AT_NUMBER, AT_ARCHITECTURE, AT_FIRST_ARGUMENT = 0, 4, 16
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
EPERM, ENOSYS = 1, 38
X32 = 0x40000000


def main(spec: dict[str, Any]) -> None:
    """Give everything up, in an order in which each step is still allowed; then run the code, or say what was granted."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    work = os.path.join(spec["folder"], "work")
    namespaces = enter_namespaces()
    read_only = namespaces and lock_disks()
    disk = namespaces and own_disk(work, spec["disk_mb"])
    os.chdir(work)
    limit_resources(spec, counts_own_processes=namespaces)
    for capability in range(LAST_CAPABILITY + 1):
        LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
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


def enter_namespaces() -> bool:
    """No network interfaces, no shared memory of others, mounts of its own; the user stays who it is."""
    user, group = os.geteuid(), os.getegid()
    if LIBC.unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWNS) != 0:
        return False
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return True


def lock_disks() -> bool:
    """All that is mounted is read-only for this process, also for `chmod` and its like."""
    if LIBC.mount(None, b"/", None, MS_REC | MS_PRIVATE, None) != 0:
        return False
    wanted = struct.pack("QQQQ", MOUNT_ATTR_RDONLY, 0, 0, 0)
    return bool(LIBC.syscall(MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, wanted, len(wanted)) == 0)


def own_disk(work: str, megabytes: int) -> bool:
    """The working folder becomes a disk in memory, of limited size, that is gone with this process. After `lock_disks`."""
    options = f"size={megabytes}m,nr_inodes=1024,mode=700".encode()
    return bool(LIBC.mount(b"tmpfs", os.fsencode(work), b"tmpfs", MS_NOSUID | MS_NODEV, options) == 0)


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
    allowed = {work: rights, **dict.fromkeys(readable, READ), **dict.fromkeys(DEVICES, FS_READ_FILE | FS_WRITE_FILE)}
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


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
