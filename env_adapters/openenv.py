"""An environment behind an OpenEnv server, as `openenv-core` serves it: one WebSocket session for each episode.

Made by `env_adapters.adapter`; the only owner of websockets, which is an extra (`envs`); OpenEnv itself is not needed here. The
server's plain `POST /reset` and `POST /step` make a new environment for each request, so an episode uses `/ws`, where the
connection is the session: `{"type": "reset" | "step" | "state" | "close", "data": {...}}` in, `observation`, `state` or `error`
out. Invariants: an action that the server's schema refuses is answered with a message to the model; every other error of the
server ends the episode. It starts no server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import httpx2

from buffers.errors import EnvError
from buffers.outgoing import OPENENV, Outgoing
from env_adapters.adapter import EnvAdapter, Message, Step, user

OWN_FIELDS = {"metadata", "done", "reward"}
"""Fields of every action and observation of OpenEnv."""


class OpenEnv(EnvAdapter):
    """`url`: the server's, http or ws. `action` names the field that a reply without JSON becomes (needed when the action has
    several), `observation` the field that is shown alone. `prompt` is said before the first observation."""

    def __init__(
        self,
        *,
        url: str,
        action: str = "",
        observation: str = "",
        prompt: str = "",
        score: Literal["return", "last"] = "return",
    ) -> None:
        if not url.startswith(("http://", "https://", "ws://", "wss://")):
            raise EnvError(f"url of an OpenEnv server must start with http:// or ws://, got {url!r}; name the server")
        if score not in ("return", "last"):
            raise EnvError(f"score of an OpenEnv environment must be return or last, got {score!r}; set one of them")
        secure = "s" if url.startswith(("https://", "wss://")) else ""
        rest = url.split("://", 1)[1].rstrip("/")
        self._http, self._ws = f"http{secure}://{rest}", f"ws{secure}://{rest}/ws"
        self._action_field = action
        self._observation_field = observation
        self._prompt = prompt
        self._kind = score
        self._rewards: list[float] = []
        self._connection: Any = None

    async def reset(self, task: dict[str, Any], *, seed: int) -> list[Message]:
        """The task's `extra_info.reset` is handed on beside the seed; the server takes what its environment knows."""
        self._fields = await self._action_fields()
        await self._connect()
        options = task.get("extra_info", {}).get("reset", {})
        if not isinstance(options, Mapping):
            raise EnvError(
                f"extra_info.reset must be an object, got {options!r:.80}", reason="environment reset: bad task"
            )
        answer = await self._ask({"type": "reset", "data": {"seed": seed, **options}})
        parts = [self._prompt, f"Action: {self._described()}", self._seen(answer)]
        return [user("\n".join(part for part in parts if part))]

    async def step(self, action: str) -> Step:
        data = self._parse(action)
        if data is None:
            return Step(messages=[user(f"Not an action. Answer with {self._described()}")], done=False)
        answer = await self._ask({"type": "step", "data": data}, refusable=True)
        if isinstance(answer, str):
            return Step(messages=[user(f"Not an action: {answer}. Answer with {self._described()}")], done=False)
        self._rewards.append(float(answer.get("reward") or 0.0))
        return Step(messages=[user(self._seen(answer))], done=bool(answer.get("done")), reward=self._rewards[-1])

    async def state(self) -> dict[str, Any]:
        """State of the session, by the server."""
        answer = await self._ask({"type": "state"}, kind="state")
        assert isinstance(answer, dict)
        return answer

    async def score(self) -> float:
        if self._kind == "last":
            return self._rewards[-1] if self._rewards else 0.0
        return float(sum(self._rewards))

    async def close(self) -> None:
        """Closing the connection ends the session."""
        if self._connection is not None:
            await self._connection.close()

    # Talking to the server

    async def _action_fields(self) -> dict[str, Any]:
        """The action's own fields, by the server's schema."""
        try:
            async with Outgoing(OPENENV, verify=self._http.startswith("https")) as client:  # loading CAs takes long
                reply = await client.get(f"{self._http}/schema")
            schema = reply.raise_for_status().json()["action"]
            fields = {name: field for name, field in schema["properties"].items() if name not in OWN_FIELDS}
        except (httpx2.HTTPError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
            raise EnvError(
                f"OpenEnv server at {self._http} must answer GET /schema with its action, it did not ({error!r:.200})",
                reason="environment reset: no server",
            ) from error
        if self._action_field and self._action_field not in fields:
            raise EnvError(
                f"action of {self._http} must be one of {sorted(fields)}, got {self._action_field!r}",
                reason="environment reset: actions",
            )
        self._required = [name for name in schema.get("required", []) if name not in OWN_FIELDS]
        return fields

    async def _connect(self) -> None:
        try:
            from websockets.asyncio.client import connect
            from websockets.exceptions import WebSocketException

            class Connect(connect):
                def process_redirect(self, exc: Exception) -> Exception | str:
                    return exc  # what it says is not another server's

        except ImportError as error:
            raise EnvError(
                "environment openenv needs the package websockets, which is not there; pip install 'websockets>=14'",
                reason="environment reset: not installed",
            ) from error
        try:
            self._connection = await Connect(
                self._ws, max_size=OPENENV.max_bytes, compression=None, open_timeout=None, proxy=None
            )
        except (OSError, WebSocketException) as error:
            raise EnvError(
                f"OpenEnv server must take a session at {self._ws}, it did not ({error!r:.200})",
                reason="environment reset: no server",
            ) from error

    async def _ask(
        self, message: dict[str, Any], *, kind: str = "observation", refusable: bool = False
    ) -> dict[str, Any] | str:
        """The data of the answer; with `refusable`, the reason why the server's schema refuses the action."""
        from websockets.exceptions import WebSocketException

        name = message["type"]
        try:
            await self._connection.send(json.dumps(message))
            answer = json.loads(await self._connection.recv())
            data = answer["data"]
        except (OSError, WebSocketException, ValueError, RecursionError, LookupError, TypeError) as error:
            raise EnvError(
                f"OpenEnv server must answer {name} in its session, it did not ({error!r:.200})",
                reason=f"environment {name}: lost",
            ) from error
        if answer.get("type") == kind and isinstance(data, dict):
            return data
        code = data.get("code", "") if isinstance(data, dict) else ""
        if refusable and code == "VALIDATION_ERROR":
            return "; ".join(str(one.get("msg", "")) for one in data.get("errors", [])) or "the server refused it"
        raise EnvError(
            f"OpenEnv server failed at {name}: {data!r:.300}", reason=f"environment {name}: {code or 'wrong answer'}"
        )

    # Text

    def _described(self) -> str:
        name = self._only_field()
        if name:
            return f"the {name} ({self._fields[name].get('type', 'JSON')})."
        return f"one JSON object with the fields {json.dumps(self._fields)}."

    def _only_field(self) -> str:
        """The field that a reply without JSON becomes; empty when there are several to choose from."""
        alone = self._required if len(self._required) == 1 else list(self._fields)
        return self._action_field or (alone[0] if len(alone) == 1 else "")

    def _parse(self, text: str) -> dict[str, Any] | None:
        """A JSON object (bare, or in a fence) whose keys are fields; or the value of the only field."""
        try:
            value = json.loads(_unfenced(text))
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict) and value and set(value) <= set(self._fields):
            return value
        name = self._only_field()
        if not name:
            return None
        if self._fields[name].get("type") == "string":
            return {name: text.strip()}
        return None if value is None else {name: value}

    def _seen(self, answer: dict[str, Any] | str) -> str:
        """The named field, the only text, or all of the observation as JSON."""
        assert isinstance(answer, dict)
        observation = answer.get("observation")
        if not isinstance(observation, dict):
            raise EnvError(
                f"an observation must be an object, got {observation!r:.100}", reason="environment: wrong answer"
            )
        shown = {name: value for name, value in observation.items() if name not in OWN_FIELDS}
        if self._observation_field:
            shown = {self._observation_field: shown.get(self._observation_field, "")}
        only = next(iter(shown.values())) if len(shown) == 1 else None
        return only if isinstance(only, str) else json.dumps(shown)


def _unfenced(text: str) -> str:
    lines = text.strip().splitlines()
    fenced = len(lines) > 2 and lines[0].startswith("```") and lines[-1].strip() == "```"
    return "\n".join(lines[1:-1] if fenced else lines)
