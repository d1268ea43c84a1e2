"""Rules of env_adapters/openenv.py, against a server in this process that speaks OpenEnv's protocol.

`tests/outside/test_env_contracts.py` plays the real package's server.
"""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve

from buffers.errors import EnvError
from env_adapters.adapter import WithDeadlines
from env_adapters.openenv import OpenEnv

TASK: dict[str, Any] = {"task_id": "t", "extra_info": {"reset": {"level": 2}}}
NUMBER = {"properties": {"number": {"type": "integer"}, "metadata": {"type": "object"}}, "required": ["number"]}
MOVE = {"properties": {"to": {"type": "string"}, "speed": {"type": "number"}}, "required": ["to", "speed"]}
Answer = Callable[[dict[str, Any]], Any]


def seen(reward: float | None = None, done: bool = False, **observation: Any) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}


def error(code: str, **more: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"message": "no", "code": code, **more}}


@asynccontextmanager
async def server(answer: Answer, *, schema: Any = NUMBER) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """Answers each message with `answer(message)`; None: never, text: as it is. Gives its URL and all messages."""
    asked: list[dict[str, Any]] = []

    async def session(connection: ServerConnection) -> None:
        async for text in connection:
            asked.append(json.loads(text))
            reply = answer(asked[-1])
            if reply is None:
                await connection.close()
            else:
                await connection.send(reply if isinstance(reply, str) else json.dumps(reply))

    def plain(connection: ServerConnection, request: Any) -> Any:
        return connection.respond(HTTPStatus.OK, json.dumps({"action": schema})) if request.path == "/schema" else None

    async with serve(session, "127.0.0.1", 0, process_request=plain) as listener:
        port = listener.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", asked


def said(messages: list[dict[str, Any]]) -> str:
    (message,) = messages
    return message["content"]


async def test_an_episode_is_one_session_from_its_seed_to_its_return() -> None:
    def answer(message: dict[str, Any]) -> Any:
        if message["type"] == "reset":
            return seen(text="Guess.")
        if message["type"] == "state":
            return {"type": "state", "data": {"step_count": 2}}
        return seen(reward=0.5, done=message["data"]["number"] == 7, text="warm")

    async with server(answer) as (url, asked):
        inner = OpenEnv(url=url, prompt="Play.")
        adapter = WithDeadlines(inner, deadline_s=10.0)
        first = await adapter.reset(TASK, seed=5)
        assert said(first) == "Play.\nAction: the number (integer).\nGuess."
        steps = [await adapter.step(text) for text in ("3", '```json\n{"number": 7}\n```')]
        assert [(said(step.messages), step.done, step.reward) for step in steps] == [
            ("warm", False, 0.5),
            ("warm", True, 0.5),
        ]
        assert await adapter.score() == 1.0 and await inner.state() == {"step_count": 2}
        await adapter.close()
    assert asked == [
        {"type": "reset", "data": {"seed": 5, "level": 2}},
        {"type": "step", "data": {"number": 3}},
        {"type": "step", "data": {"number": 7}},
        {"type": "state"},
    ]


@pytest.mark.parametrize(
    ("schema", "options", "text", "data"),
    [
        (NUMBER, {}, "no number", None),
        (NUMBER, {}, '{"digit": 1}', {"number": {"digit": 1}}),  # for the server to refuse
        (MOVE, {}, "north", None),
        (MOVE, {}, '{"to": "north", "speed": 2}', {"to": "north", "speed": 2}),
        (MOVE, {"action": "to"}, "north\n", {"to": "north"}),
        ({**MOVE, "required": ["to"]}, {}, "7", {"to": "7"}),
    ],
)
async def test_a_reply_is_the_only_field_or_an_object_of_known_fields(
    schema: Any, options: dict[str, str], text: str, data: Any
) -> None:
    async with server(lambda _: seen(text="ok"), schema=schema) as (url, asked):
        adapter = WithDeadlines(OpenEnv(url=url, **options), deadline_s=10.0)
        await adapter.reset(TASK, seed=0)
        step = await adapter.step(text)
        await adapter.close()
    assert asked[1:] == ([] if data is None else [{"type": "step", "data": data}])
    assert said(step.messages).startswith("Not an action. Answer with") == (data is None)


async def test_an_action_that_the_server_refuses_is_told_to_the_model() -> None:
    refusal = error("VALIDATION_ERROR", errors=[{"msg": "must be below 100"}])
    async with server(lambda m: seen(text="go") if m["type"] == "reset" else refusal) as (url, _):
        adapter = WithDeadlines(OpenEnv(url=url), deadline_s=10.0)
        await adapter.reset(TASK, seed=0)
        step = await adapter.step("100")
        assert said(step.messages) == "Not an action: must be below 100. Answer with the number (integer)."
        assert (step.done, step.reward, await adapter.score()) == (False, None, 0.0)
        await adapter.close()


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (error("EXECUTION_ERROR"), "environment step: EXECUTION_ERROR"),
        (error("SESSION_ERROR"), "environment step: SESSION_ERROR"),
        (None, "environment step: lost"),
        ("not json", "environment step: lost"),
        ({"type": "observation", "data": {"observation": 3}}, "environment: wrong answer"),
        ({"type": "state", "data": {}}, "environment step: wrong answer"),
    ],
)
async def test_what_breaks_a_session_ends_the_episode_with_a_reason(reply: Any, reason: str) -> None:
    async with server(lambda m: seen(text="go") if m["type"] == "reset" else reply) as (url, _):
        adapter = WithDeadlines(OpenEnv(url=url), deadline_s=10.0)
        await adapter.reset(TASK, seed=0)
        with pytest.raises(EnvError) as failure:
            await adapter.step("1")
        assert failure.value.reason == reason
        await adapter.close()


async def test_a_server_that_hangs_or_is_not_there_ends_the_episode() -> None:
    async with server(lambda _: seen(text="go")) as (url, _):
        pass  # gone again
    adapter = WithDeadlines(OpenEnv(url=url), deadline_s=10.0)
    with pytest.raises(EnvError, match=r"must answer GET /schema") as failure:
        await adapter.reset(TASK, seed=0)
    assert failure.value.reason == "environment reset: no server"
    await adapter.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:  # takes connections, and says nothing
        adapter = WithDeadlines(OpenEnv(url=f"http://127.0.0.1:{listener.getsockname()[1]}"), deadline_s=0.2)
        with pytest.raises(EnvError, match=r"within 0\.2 s"):
            await adapter.reset(TASK, seed=0)
        await adapter.close()


async def test_observations_are_their_only_text_or_json_without_openenvs_own_fields() -> None:
    replies = iter([seen(board=[1, 2], text="x", metadata={}), seen(text="y", board=[])])
    async with server(lambda _: next(replies)) as (url, _):
        adapter = WithDeadlines(OpenEnv(url=url), deadline_s=10.0)
        assert said(await adapter.reset(TASK, seed=0)).endswith('{"board": [1, 2], "text": "x"}')
        await adapter.close()
        named = WithDeadlines(OpenEnv(url=url, observation="text", score="last"), deadline_s=10.0)
        assert said(await named.reset(TASK, seed=0)).endswith("\ny")
        await named.close()


async def test_what_cannot_be_used_is_refused_by_name() -> None:
    with pytest.raises(EnvError, match="must start with http:// or ws://, got 'localhost:80'"):
        OpenEnv(url="localhost:80")
    async with server(lambda _: seen()) as (url, _):
        adapter = WithDeadlines(OpenEnv(url=url, action="word"), deadline_s=10.0)
        with pytest.raises(EnvError, match=r"must be one of \['number'\], got 'word'"):
            await adapter.reset(TASK, seed=0)
        adapter = WithDeadlines(OpenEnv(url=url), deadline_s=10.0)
        with pytest.raises(EnvError, match=r"extra_info\.reset must be an object, got 3"):
            await adapter.reset({"task_id": "t", "extra_info": {"reset": 3}}, seed=0)
        await adapter.close()


async def test_a_session_is_with_the_server_that_was_named_and_nothing_in_it_is_compressed() -> None:
    offered: list[str | None] = []

    async def session(connection: ServerConnection) -> None:
        assert connection.request is not None
        offered.append(connection.request.headers.get("sec-websocket-extensions"))
        async for _ in connection:
            await connection.send(json.dumps(seen(text="go")))

    def plain(connection: ServerConnection, request: Any) -> Any:
        return connection.respond(HTTPStatus.OK, json.dumps({"action": NUMBER})) if request.path == "/schema" else None

    async with serve(session, "127.0.0.1", 0, process_request=plain) as listener:
        url = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        adapter = WithDeadlines(OpenEnv(url=f"http://{url}"), deadline_s=10.0)
        await adapter.reset(TASK, seed=0)
        await adapter.close()
        assert offered == [None]

        def elsewhere(connection: ServerConnection, request: Any) -> Any:
            if request.path == "/schema":
                return plain(connection, request)
            answer = connection.respond(HTTPStatus.TEMPORARY_REDIRECT, "")
            answer.headers["location"] = f"ws://{url}/ws"
            return answer

        async with serve(session, "127.0.0.1", 0, process_request=elsewhere) as redirecting:
            port = redirecting.sockets[0].getsockname()[1]
            adapter = WithDeadlines(OpenEnv(url=f"http://127.0.0.1:{port}"), deadline_s=10.0)
            with pytest.raises(EnvError, match="must take a session"):
                await adapter.reset(TASK, seed=0)
            await adapter.close()
    assert offered == [None]
