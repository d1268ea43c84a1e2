"""Small parts of processes: the environment of programs, temporary folders that end with them, and the end of a process that skips
taking Python apart. How our own processes are started stands in `configs.fork_server`.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import os
import shutil
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NoReturn


def give_memory_back() -> None:
    """Has glibc give the system what was freed, of which it keeps gibibytes otherwise."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


# A folder for temporary files that goes with this process: whatever it and all that it starts leave there, however they end.
# Entered by `learner.run` and `learner.evaluate`. Invariants: it is TMPDIR of this process and of those that it starts, and no
# other user can enter it. It is removed at the end; that of a process that was killed, by the next one, when it starts or when it
# ends, with the programs that have it for their TMPDIR: it is locked as long as a process lives that was forked of the one that
# made it.

PREFIX = "understudy."
SHORT = "/tmp"
"""A folder in which the path of a Unix socket, of at most 107 bytes, has room."""
MAX_CHARS = 40
"""Most characters of a folder in which every socket of a run has room: the paths of vLLM's need up to 67 more."""
_short = SHORT
"""The place for sockets that have no room in the folder for temporary files."""
_removed: dict[Path, int] = {}
"""What goes with a process, by its id: forks have the same table."""


@contextmanager
def own_temporary_folder() -> Iterator[None]:
    """Temporary files go to a folder of this process's own while inside."""
    global _short
    given, before, variable = tempfile.gettempdir(), tempfile.tempdir, os.environ.get("TMPDIR")
    with ExitStack() as stack:
        os.environ["TMPDIR"] = tempfile.tempdir = folder = stack.enter_context(_made(given))
        if len(os.fsencode(os.path.realpath(folder))) > MAX_CHARS:
            _short = stack.enter_context(_made(SHORT))
        try:
            yield
        finally:
            _short, tempfile.tempdir = SHORT, before
            os.environ.pop("TMPDIR")
            if variable is not None:
                os.environ["TMPDIR"] = variable


def socket_folder(most: int) -> str:
    """The folder for temporary files, or one in /tmp where its name has more than `most` bytes: the path of a Unix socket has at
    most 107, and what comes behind the folder needs the rest."""
    folder = os.path.realpath(tempfile.gettempdir())
    return folder if len(os.fsencode(folder)) <= most else _short


def goes_with_this_process(folder: Path) -> None:
    """It is among `to_remove` from now on: its maker removes it, unless the process has to end at once."""
    _removed[folder] = os.getpid()


def to_remove() -> list[Path]:
    """The folders of this process, and of none that it was forked of."""
    return [folder for folder, owner in _removed.items() if owner == os.getpid()]


@contextmanager
def _made(place: str) -> Iterator[str]:
    remove_left_behind(Path(place))
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        with suppress(FileNotFoundError):  # another process, which starts now, took it for one that was left behind
            if (lock := _try_lock(folder)) is not None:
                break
    goes_with_this_process(folder)
    owner = os.getpid()
    try:
        yield str(folder)
    finally:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)
            del _removed[folder]
            os.close(lock)
            remove_left_behind(Path(place))  # once more: a process of one that was killed may have outlived our start


def remove_left_behind(place: Path) -> None:
    """Folders of processes that were killed. Those of other users stay, as do those in use."""
    for folder in place.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or another process removes it now
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            if (lock := _try_lock(folder)) is not None:
                _end_programs(folder)
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _end_programs(folder: Path) -> None:
    """End those that have this folder for their TMPDIR: an environment, for example. Linux only."""
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # another user's, or it ends now
            if f"TMPDIR={folder}".encode() in environment.read_bytes().split(b"\0"):
                os.kill(int(environment.parent.name), signal.SIGKILL)


def _try_lock(folder: Path) -> int | None:
    """A lock on the folder, which ends with the process at the latest; None while another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def leave(code: int) -> NoReturn:
    """End the process, now that all is closed: for Python to take torch and vLLM apart takes over two seconds."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# The environment variables that programs of others get: agents, and what a check tries out. Invariant: no key or token of the
# operator's reaches such a program unless its name is given.

PASSED_ON = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TEMP", "TMP", "TZ", "LANG", "LANGUAGE", "TERM",
    "COLORTERM", "NO_COLOR", "LD_LIBRARY_PATH",
    "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "NODE_EXTRA_CA_CERTS",
    "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "CONDA_EXE", "PYENV_ROOT", "PYENV_VERSION",
    "PYTHONUTF8", "PYTHONIOENCODING", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED",
    "NODE_PATH", "NVM_DIR", "JAVA_HOME", "GOPATH", "GOROOT", "CARGO_HOME", "RUSTUP_HOME",
    "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES",
})  # fmt: skip
"""Variables by which programs find themselves, their files, their language's parts and their user's certificates."""
PROXIES = frozenset({"http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy"})
"""Written in small or in capital letters."""


def clean_environment(extra: Mapping[str, str], *, named: Sequence[str] = ()) -> dict[str, str]:
    """The part of this process's environment that programs need to run (`PASSED_ON`) and that is `named`; plus `extra`.

    The rest stays here: other people's programs have no use for our keys and tokens, nor for what would put the checkout on their
    import path. A proxy's address that holds a password is passed on only where it is named.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in named
        or name in PASSED_ON
        or name.startswith("LC_")
        or (name.lower() in PROXIES and "@" not in value)
    }
    return {**kept, **extra}


# The folder of our packages, for processes that are no forks: they import them from any working directory.

ROOT = Path(__file__).resolve().parent.parent


def python_path() -> str:
    """PYTHONPATH with the checkout first; as it is where we are installed: what lies in site-packages is found without it, and
    before the standard library it does not belong."""
    inherited = os.environ.get("PYTHONPATH", "")
    if ROOT in {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}:
        return inherited
    return os.pathsep.join(filter(None, [str(ROOT), inherited]))
