"""Credentials: who may call what. No state but one random secret per run.

Four kinds of key, each derived from the run's secret and useless for any other purpose:

- an *episode* key opens one episode's model calls (it is that agent's OPENAI_API_KEY);
- the *worker* key leases tasks (`GET /tasks`);
- the *scorer* key reports scores and reads ground truths; agents never see it;
- the *admin* key adds tasks and reads the server's state.

Keys are compared in constant time and never logged.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

PREFIX = "us-"
DIGEST_CHARS = 32


class KeyRing:
    """Makes and checks keys. `secret` is 32 random bytes unless the same keys must survive a restart."""

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secret or secrets.token_bytes(32)
        self.worker = PREFIX + "worker-" + self._digest("worker")
        self.scorer = PREFIX + "scorer-" + self._digest("scorer")
        self.admin = PREFIX + "admin-" + self._digest("admin")

    def _digest(self, purpose: str) -> str:
        return hmac.new(self._secret, purpose.encode(), hashlib.sha256).hexdigest()[:DIGEST_CHARS]

    def episode_key(self, episode_id: str) -> str:
        """The key that opens this episode's model calls."""
        return f"{PREFIX}{episode_id}-{self._digest('episode:' + episode_id)}"

    def episode_of(self, key: str) -> str | None:
        """The episode that this key opens, or None when it is not one of ours."""
        if not key.startswith(PREFIX):
            return None
        episode_id, _, digest = key[len(PREFIX) :].rpartition("-")
        expected = self._digest("episode:" + episode_id)
        return episode_id if episode_id and self.same(digest, expected) else None

    @staticmethod
    def same(given: str, expected: str) -> bool:
        """Constant-time comparison of two keys (any text may be given)."""
        return hmac.compare_digest(given.encode(), expected.encode())
