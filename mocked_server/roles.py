"""The roles of a run: which of them a model request asks, by its path or by the name of the model in its body.

Made by `learner.pipeline` of the configuration's `roles`; `http.model_requests` asks it for each request of a run that has roles.
Invariant: a request is answered by one role of the run, or refused with the list of them. A path's role goes before the model's
name, for agents whose model cannot be set.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from starlette.types import Send

from buffers.errors import RequestRefused, ScoreError

MAX_SHOWN_CHARS = 80


class Role(NamedTuple):
    """One who answers requests. The policy plays those that are trained."""

    name: str
    is_trained: bool


NO_ROLE = Role("", True)
"""The policy, in a run without roles."""


class Asking(Protocol):
    """A request: `mocked_server.request_context.Call`."""

    asked_role: str
    role: Role


class Elsewhere(Protocol):
    """A model of others, which answers requests as they are."""

    async def answer(self, call: Any, path: str, body: bytes, *, send: Send) -> None: ...


class Roles:
    """`trained`, `frozen`: names of those that the policy and other engines of the run play; `others`: those of other servers."""

    def __init__(
        self, *, trained: Sequence[str], frozen: Sequence[str] = (), others: Mapping[str, Elsewhere] | None = None
    ) -> None:
        self._others = dict(others or {})
        self._roles = {name: Role(name, True) for name in trained}
        self._roles |= {name: Role(name, False) for name in (*frozen, *self._others)}
        self.default = self._roles[trained[0]]
        """The one that is asked where no model is named."""

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, the default first."""
        return tuple(self._roles)

    def settle(self, call: Asking, body: bytes) -> bytes:
        """Finds who answers this request, and notes it in the call; the body, with the role for its model. Raises
        RequestRefused."""
        fields = _object(body)
        named = call.asked_role or ("" if fields is None else fields.get("model") or "")
        if not named:
            call.role = self.default
            return body
        role = self._roles.get(named) if isinstance(named, str) else None
        if role is None:
            raise RequestRefused(
                f"model must be one of this run's roles ({', '.join(self.names)}), got {str(named)[:MAX_SHOWN_CHARS]!r}; "
                f"set the model's name to one of them",
                field="model",
            )
        call.role = role
        if fields is None or "model" not in fields or fields["model"] == role.name:
            return body
        return json.dumps({**fields, "model": role.name}).encode()

    def elsewhere(self, role: Role) -> Elsewhere | None:
        """What answers for this role instead of the run's engines."""
        return self._others.get(role.name)

    def check_scored(self, name: str) -> None:
        """Raises ScoreError for a name that is no role of the run. One that the policy does not play may have a score, which is
        kept and trains nothing: environments score all speakers, and need not know who is trained."""
        if name not in self._roles:
            raise ScoreError(
                f"role of a score must be one of this run's ({', '.join(self.names)}), got {name[:MAX_SHOWN_CHARS]!r}; score one "
                f"of those, or the whole episode"
            )


def _object(body: bytes) -> dict[str, Any] | None:
    """None: it is no JSON object, which is left to vLLM's HTTP layer to say."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None
