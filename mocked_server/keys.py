"""Credentials: who may call what. No state but one random secret per run, which may lie in a file beside its ledger.

Four kinds of key, each derived from the run's secret and useless for any other purpose:

- an *episode* key opens one episode's model calls (it is that agent's OPENAI_API_KEY); it names the server process that owns the
  episode (`server.processes`);
- the *worker* key leases tasks (`GET /tasks`); each long-lived agent program has its own, so that it is known who leased;
- the *scorer* key reports scores and reads ground truths; agents never see it;
- the *admin* key adds tasks and reads the server's state.

Keys are compared in constant time and never logged. A server that others than this machine can reach is given a secret
that its operator made: `python -m mocked_server.keys FILE`.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import os
import secrets
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from buffers.errors import UnderstudyError
from buffers.wire.address import is_loopback

PREFIX = "us-"
DIGEST_CHARS = 32
SECRET_BYTES = 32
SECRET_FILE = "server.key"
OWNER_MARK = "~"
"""Mark between the number of a server process and the id of an episode that it owns."""
_NEW = os.O_CREAT | os.O_WRONLY | os.O_EXCL


class SecretError(UnderstudyError):
    """There is no secret where there must be one, or it can be read by others."""


class OwnedEpisode(NamedTuple):
    """An episode, and the number of the server process that owns it; 0 is the run's own."""

    episode_id: str
    process: int


class KeyRing:
    """Makes and checks keys. `secret` is 32 random bytes unless the same keys must survive a restart."""

    def __init__(self, secret: bytes | None = None) -> None:
        self.secret = secret or secrets.token_bytes(SECRET_BYTES)
        """Secret of which the run's other server processes make the same keys."""
        self.worker = self.worker_key("")
        self.scorer = PREFIX + "scorer-" + self._digest("scorer")
        self.admin = PREFIX + "admin-" + self._digest("admin")

    def _digest(self, purpose: str) -> str:
        return hmac.new(self.secret, purpose.encode(), hashlib.sha256).hexdigest()[:DIGEST_CHARS]

    def episode_key(self, episode_id: str, *, process: int = 0) -> str:
        """The key that opens this episode's model calls. `process`: the server process that owns it."""
        name = f"{process}{OWNER_MARK}{episode_id}" if process else episode_id
        return f"{PREFIX}{name}-{self._digest('episode:' + name)}"

    def worker_key(self, name: str) -> str:
        """The key with which the worker of this name leases tasks; `worker` is that of no name."""
        return f"{PREFIX}worker.{name}-{self._digest('worker:' + name)}"

    def worker_of(self, key: str) -> str | None:
        """The name of the worker whose key this is, or None when it is not one of ours."""
        prefix = f"{PREFIX}worker."
        if not key.startswith(prefix):
            return None
        name, _, digest = key[len(prefix) :].rpartition("-")
        return name if self.same(digest, self._digest("worker:" + name)) else None

    def episode_of(self, key: str) -> str | None:
        """The episode that this key opens, or None when it is not one of ours."""
        owned = self.owned_by(key)
        return None if owned is None else owned.episode_id

    def owned_by(self, key: str) -> OwnedEpisode | None:
        """The episode that this key opens and the server process that owns it, or None when it is not one of ours."""
        if not key.startswith(PREFIX):
            return None
        name, _, digest = key[len(PREFIX) :].rpartition("-")
        if not name or not self.same(digest, self._digest("episode:" + name)):
            return None
        process, mark, episode_id = name.partition(OWNER_MARK)
        return OwnedEpisode(episode_id, int(process)) if mark else OwnedEpisode(name, 0)

    @staticmethod
    def same(given: str, expected: str) -> bool:
        """Constant-time comparison of two keys (any text may be given)."""
        return hmac.compare_digest(given.encode(), expected.encode())


def check_host(host: str, *, secret: Path, key: str = "server.host", otherwise: str = "127.0.0.1") -> None:
    """Raises SecretError when other machines could reach what listens there and there is no secret for it. `key`: its
    configuration key."""
    if not is_loopback(host) and not secret.is_file():
        raise SecretError(
            f"{key}={host} can be reached by others, it needs a secret of yours in {secret}, got none; make one with "
            f"`python -m mocked_server.keys {secret}`, or set {key}={otherwise}"
        )


def read_secret(path: Path) -> bytes:
    """The secret in this file. Raises SecretError when it is short, or not its owner's alone."""
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise SecretError(f"{path} must be readable by its owner only; set its rights with `chmod 600 {path}`")
    secret = path.read_bytes()
    if len(secret) < SECRET_BYTES:
        raise SecretError(
            f"{path} must hold {SECRET_BYTES} random bytes, got {len(secret)}; remove it, and make a new one"
        )
    return secret


def secret_of_run(folder: Path, *, host: str) -> bytes:
    """The secret of the run in `folder`, in a file beside its ledger; on a host that others can reach, one that follows from the
    operator's (`server.key` beside the runs). Raises SecretError."""
    if is_loopback(host):
        return make_secret(folder / SECRET_FILE)
    shared = folder.parent / SECRET_FILE
    check_host(host, secret=shared)
    return hmac.digest(read_secret(shared), folder.name.encode(), "sha256")


def round_secret(folder: Path, *, host: str) -> bytes:
    """Secret of both sides of the wire to the ledger of the run in `folder`, where it listens on `host`; it opens
    nothing else. Raises SecretError."""
    check_host(host, secret=folder.parent / SECRET_FILE, key="buffer.node", otherwise="''")
    return wire_secret(folder, host=host, label=b"rows")


def wire_secret(folder: Path, *, host: str, label: bytes) -> bytes:
    """Secret of both sides of a wire of the run in `folder`; it opens nothing else. `host`: of its server. Raises
    SecretError."""
    return hmac.digest(secret_of_run(folder, host=host), label, "sha256")


def process_secret(secret: bytes) -> bytes:
    """Secret shared by the run and its server processes, derived from the run's secret."""
    return hmac.digest(secret, b"server processes", "sha256")


def make_secret(path: Path) -> bytes:
    """A new secret in a new file (mode 0600), in a new folder if need be; the one that is there, if it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError), os.fdopen(os.open(path, _NEW, 0o600), "wb") as sink:
        try:
            sink.write(secrets.token_bytes(SECRET_BYTES))
            sink.flush()
            os.fsync(sink.fileno())
        except OSError:
            path.unlink()  # a part would be nobody's secret, and refused from now on
            raise
    return read_secret(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 the file has a secret, 2 it cannot have one."""
    parser = argparse.ArgumentParser(
        prog="python -m mocked_server.keys",
        description="Make a secret for servers that other machines reach, in a file that its owner reads; one that is there stays.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help=f"beside the runs: runs/{SECRET_FILE}")
    path = parser.parse_args(argv).file
    try:
        make_secret(path)
    except (OSError, SecretError) as error:
        parser.exit(2, f"error: {path} must be a file that can be written and holds a secret: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
