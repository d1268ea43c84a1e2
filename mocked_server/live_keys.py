"""Named keys that open the model API to agents that nobody starts (`understudy serve`).

They lie in a file beside the run's folder, by name, as hashes: a key is shown once, when it is made. The server reads the file
again when it changes, so that a key that is added or revoked counts at once. Invariant: a name stands for one user, for good: its
sessions stay its own also after its key was replaced.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import time
from pathlib import Path
from typing import Any

from buffers.errors import UnderstudyError
from mocked_server.keys import PREFIX

logger = logging.getLogger(__name__)

ENDING = ".users.json"
LIVE = f"{PREFIX}live."
"""Beginning of such a key; its user's name follows, then a secret."""
NAME = re.compile(r"[A-Za-z0-9_]{1,40}")


class LiveKeyError(UnderstudyError):
    """A key cannot be made or revoked."""


class LiveKeys:
    """The keys of the run in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder.with_name(folder.name + ENDING)
        self._read_at: tuple[int, int] | None = None
        self._keys: dict[str, dict[str, Any]] = {}

    def user_of(self, key: str) -> str | None:
        """Whose key this is; None: it is none, or was revoked."""
        name, _, secret = key.removeprefix(LIVE).partition("-")
        if not key.startswith(LIVE) or not secret:
            return None
        try:
            known = self.read().get(name)
        except LiveKeyError as error:  # what it said before counts, until it is mended
            logger.error("%s", error)
            known = self._keys.get(name)
        if known is None or known["revoked"]:
            return None
        return name if secrets.compare_digest(known["sha256"], _hash(key)) else None

    def is_excluded(self, name: str) -> bool:
        """True if this user's requests are answered, and nothing of them is stored."""
        return bool(self.read().get(name, {}).get("excluded"))

    def read(self) -> dict[str, dict[str, Any]]:
        """Name -> {sha256, made, revoked, excluded}, as the file has them now. Raises LiveKeyError for another file."""
        try:
            state = os.stat(self.path)
        except FileNotFoundError:
            self._read_at, self._keys = None, {}
            return {}
        now = (state.st_mtime_ns, state.st_ino)
        if now != self._read_at:
            try:
                read = json.loads(self.path.read_text(encoding="utf-8"))
                self._keys = {
                    str(name): {
                        "sha256": str(each["sha256"]),
                        "made": float(each["made"]),
                        "revoked": bool(each["revoked"]),
                        "excluded": bool(each["excluded"]),
                    }
                    for name, each in read.items()
                }
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise LiveKeyError(
                    f"{self.path} must hold the keys that `understudy serve keys` wrote, got {error!r:.100}; remove it, and make "
                    f"new keys"
                ) from error
            self._read_at = now
        return self._keys

    def add(self, name: str, *, excluded: bool = False) -> str:
        """A new key for this user, in the place of an earlier one; it is not shown again. `excluded`: its requests are answered,
        and nothing of them is stored."""
        if not NAME.fullmatch(name):
            raise LiveKeyError(
                f"the name of a key must be 1 to 40 letters, digits or _, got {name!r:.80}; name the user so"
            )
        key = f"{LIVE}{name}-{secrets.token_hex(24)}"
        made = {"sha256": _hash(key), "made": time.time(), "revoked": False, "excluded": excluded}
        self._write({**self.read(), name: made})
        return key

    def revoke(self, name: str) -> None:
        """Close the API to this key, from the next request on."""
        keys = dict(self.read())
        if name not in keys:
            raise LiveKeyError(
                f"there must be a key of this name, got {name!r:.80}; known are {', '.join(keys) or 'none'}"
            )
        self._write({**keys, name: {**keys[name], "revoked": True}})

    def _write(self, keys: dict[str, dict[str, Any]]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_suffix(f".{os.getpid()}")
        scratch.touch(mode=0o600)
        scratch.write_text(json.dumps(keys, indent=1) + "\n", encoding="utf-8")
        scratch.replace(self.path)


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
