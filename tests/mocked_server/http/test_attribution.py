"""Rules of mocked_server/http/attribution.py: whose request it is, and what it is answered when it is nobody's."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from buffers.records import Episode, Task
from mocked_server.conversation.live_episodes import Episodes
from mocked_server.http.attribution import Attribution, key_of, role_of
from mocked_server.http.dialects import GEMINI, GEMINI_ROUTES, GENERATE, GENERATING, MESSAGES, MODELS, SLEEP, WAKE_UP
from mocked_server.keys import KeyRing
from mocked_server.request_context import current_call

CHAT = "/v1/chat/completions"
GOOGLES = "/v1beta/models/policy:generateContent"
KEYS = KeyRing(bytes(32))
MINE = KEYS.episode_key("1-0-0")


def bearer(key: str) -> tuple[bytes, bytes]:
    return b"authorization", f"Bearer {key}".encode()


class Door:
    """`ask` gives the status, or which application answered; `answered` has (path, episode, requests under way) of each call."""

    def __init__(self, *, elsewhere: Callable[[str, str], Any] | None = None) -> None:
        self.episodes = Episodes()
        self.live = self.episodes.open(
            Episode(episode_id="1-0-0", group_id=1, sample_index=0, attempt=0, task=Task(task_id="t", prompt=[]))
        )
        self.full = False
        self.answered: list[tuple[str, str | None, int]] = []
        self.app = Attribution(
            self._models, others=self._others, keys=KEYS, episodes=self.episodes, is_full=lambda: self.full,
            elsewhere=elsewhere,
        )  # fmt: skip

    async def _models(self, scope: Any, receive: Any, send: Any) -> None:
        call = current_call.get()
        assert scope["raw_path"] == scope["path"].encode()
        live = None if call is None else call.live
        self.answered.append((scope["path"], live and live.episode_id, self.live.requests))
        await send({"type": "models"})

    async def _others(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "others"})

    async def ask(self, path: str, *headers: tuple[bytes, bytes], kind: str = "http") -> Any:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        method = "GET" if "models" in path and ":" not in path else "POST"
        scope = {"type": kind, "method": method, "path": path, "raw_path": path.encode(), "headers": list(headers)}
        await self.app(scope, None, send)  # type: ignore[arg-type]
        assert current_call.get() is None
        if sent[0]["type"] != "http.response.start":
            return sent[0]["type"]
        self.headers = dict(sent[0]["headers"])
        self.error = json.loads(sent[1]["body"])["error"]
        return sent[0]["status"]


@pytest.fixture
def door() -> Door:
    return Door()


@pytest.mark.parametrize(
    ("path", "headers", "key", "rest"),
    [
        (CHAT, [], None, CHAT),
        (CHAT, [bearer("a")], "a", CHAT),
        (CHAT, [(b"authorization", b"bearer a")], "a", CHAT),
        (CHAT, [(b"authorization", b"BEARER  a ")], "a", CHAT),
        (CHAT, [(b"authorization", b"Basic a")], None, CHAT),
        (CHAT, [(b"x-api-key", b"a")], "a", CHAT),
        (CHAT, [bearer("none"), (b"x-api-key", b"us-1")], "us-1", CHAT),
        (CHAT, [(b"x-api-key", b"none"), bearer("us-1")], "us-1", CHAT),
        (CHAT, [bearer("us-1"), (b"x-api-key", b"us-2")], "us-1", CHAT),
        (CHAT, [bearer("one"), (b"x-api-key", b"two")], "one", CHAT),
        ("/e/us-1" + CHAT, [bearer("us-2")], "us-1", CHAT),
        ("/e/us-1", [bearer("us-2")], "us-1", ""),
        ("/e/" + CHAT, [], "", CHAT),
        ("/ex/us-1" + CHAT, [], None, "/ex/us-1" + CHAT),
        (GOOGLES, [(b"x-goog-api-key", b"a")], "a", GOOGLES),
        (GOOGLES, [(b"x-goog-api-key", b"none"), bearer("us-1")], "us-1", GOOGLES),
        ("/e/us-1" + GOOGLES, [(b"x-goog-api-key", b"us-2")], "us-1", GOOGLES),
    ],
)
def test_the_key_is_in_a_header_or_in_the_path(path: str, headers: list[Any], key: str | None, rest: str) -> None:
    assert key_of({"path": path, "headers": headers}) == (key, rest)


@pytest.mark.parametrize(
    ("path", "role", "rest"),
    [
        ("/scout" + CHAT, "scout", CHAT),
        ("/scout" + GOOGLES, "scout", GOOGLES),
        (CHAT, "", CHAT),
        ("/scout/tasks", "", "/scout/tasks"),
        ("/scout", "", "/scout"),
        ("/a/b" + CHAT, "", "/a/b" + CHAT),
    ],
)
def test_a_role_stands_between_the_key_and_a_model_route(path: str, role: str, rest: str) -> None:
    assert role_of(path) == (role, rest)


@pytest.mark.parametrize(
    ("path", "query", "key"),
    [
        (GOOGLES, b"key=us-1", "us-1"),
        (GOOGLES, b"alt=sse&key=us%2D1", "us-1"),
        (GOOGLES, b"alt=sse&key=", None),
        (CHAT, b"key=us-1", None),
        ("/v1beta/models/x:other", b"key=us-1", None),
    ],
)
def test_the_key_may_be_in_the_query_of_googles_dialect_only(path: str, query: bytes, key: str | None) -> None:
    assert key_of({"path": path, "headers": [], "query_string": query}) == (key, path)


async def test_a_role_is_named_by_the_path_or_by_googles_model(door: Door) -> None:
    asked = []

    async def note(scope: Any, receive: Any, send: Any) -> None:
        call = current_call.get()
        asked.append((scope["path"], call and call.asked_role))
        await send({"type": "models"})

    app = Attribution(note, others=door._others, keys=KEYS, episodes=door.episodes, has_roles=True)
    door.app = app
    for path in ("/scout" + CHAT, CHAT, GOOGLES, "/scout" + GOOGLES, "/scout/tasks"):
        await door.ask(f"/e/{MINE}{path}")
    assert asked == [(CHAT, "scout"), (CHAT, ""), (GEMINI, "policy"), (GEMINI, "scout")]


async def test_the_model_of_googles_dialect_is_in_its_path(door: Door) -> None:
    named = []
    door.app.models = lambda scope, *_: named.append(scope["path_params"]) or door._models(scope, *_)  # type: ignore
    for path in (GOOGLES, f"/e/{MINE}{GOOGLES}", "/v1/models/my/own:generateContent"):
        assert await door.ask(path, bearer(MINE)) == "models"
    assert named == [{"model": "policy"}, {"model": "policy"}, {"model": "my/own"}]
    assert door.answered == [(GEMINI, "1-0-0", 1)] * 3


async def test_a_running_episodes_key_opens_its_model_calls(door: Door) -> None:
    assert await door.ask(CHAT, bearer(MINE)) == "models"
    assert await door.ask(f"/e/{MINE}{CHAT}", bearer("other")) == "models"
    assert await door.ask(MODELS, bearer(MINE)) == "models"
    assert door.answered == [(CHAT, "1-0-0", 1), (CHAT, "1-0-0", 1), (MODELS, "1-0-0", 1)]
    assert door.live.requests == 0, "counted while it is answered, not longer"


async def test_an_answer_that_fails_is_under_way_no_longer(door: Door) -> None:
    async def fails(*_: Any) -> None:
        assert door.live.requests == 1
        raise RuntimeError("mine")

    door.app.models = fails
    with pytest.raises(RuntimeError, match="mine"):
        await door.ask(CHAT, bearer(MINE))
    assert door.live.requests == 0 and current_call.get() is None


@pytest.mark.parametrize("path", [CHAT, MODELS, GENERATE, SLEEP, WAKE_UP])
@pytest.mark.parametrize(
    "key", [None, "x", "", MINE[:-1], KEYS.episode_key("2-0-0"), KeyRing(bytes(31)).admin, KEYS.scorer, KEYS.admin]
)
async def test_no_other_key_opens_anything(door: Door, path: str, key: str | None) -> None:
    headers = [] if key is None else [bearer(key)]
    if path == MODELS and key in (KEYS.scorer, KEYS.admin):
        assert await door.ask(path, *headers) == "models" and door.answered == [(MODELS, None, 0)]
        return
    assert await door.ask(path, *headers) == 401
    length = door.headers.pop(b"content-length")
    assert int(length) > 0 and door.headers == {b"content-type": b"application/json", b"x-should-retry": b"false"}
    words = "no API key was sent" if key is None else "api_key that came with the task"
    assert door.error["code"] == "invalid_api_key" and words in door.error["message"]
    assert door.answered == []


async def test_a_workers_key_opens_what_is_not_recorded_and_nothing_else(door: Door) -> None:
    for key in (KEYS.worker, KEYS.worker_key("w")):
        door.answered.clear()
        for path in (GENERATE, SLEEP, WAKE_UP, MODELS):
            assert await door.ask(path, bearer(key)) == "models"
        assert door.answered == [(path, None, 0) for path in (GENERATE, SLEEP, WAKE_UP, MODELS)]
        assert await door.ask(CHAT, bearer(key)) == 401


async def test_an_episodes_key_generates_and_does_not_put_the_engine_to_sleep(door: Door) -> None:
    assert await door.ask(GENERATE, bearer(MINE)) == "models" and door.answered == [(GENERATE, "1-0-0", 1)]
    assert [await door.ask(path, bearer(MINE)) for path in (SLEEP, WAKE_UP)] == [401, 401]


async def test_an_ended_episode_is_told_so_and_not_to_try_again(door: Door) -> None:
    door.episodes.close("1-0-0", "scored")
    assert await door.ask(CHAT, bearer(MINE)) == 403
    assert door.error["code"] == "episode_closed" and "has ended (scored)" in door.error["message"]
    assert door.headers[b"x-should-retry"] == b"false" and door.answered == []


async def test_while_the_disk_is_full_what_generates_waits_and_the_list_of_models_does_not(door: Door) -> None:
    door.full = True
    for path in sorted(GENERATING):
        assert await door.ask(path, bearer(MINE)) == 503
        assert "disk is full" in door.error["message"]
        expected = {MESSAGES: None, **dict.fromkeys(GEMINI_ROUTES, 503)}.get(path, "storage_full")
        assert door.error.get("code") == expected
        assert door.headers.pop(b"content-length")
        assert door.headers == {b"content-type": b"application/json", b"retry-after": b"5"}
    assert await door.ask(MODELS, bearer(MINE)) == "models"
    assert await door.ask(CHAT, bearer("x")) == 401, "a stranger is not told"


async def test_all_other_paths_are_anothers(door: Door) -> None:
    assert await door.ask("/scores") == "others"
    assert await door.ask(f"/e/{MINE}/scores", bearer("x")) == "others"
    assert await door.ask(CHAT, bearer(MINE), kind="websocket") == "others"
    assert await door.ask(CHAT, bearer(MINE), kind="lifespan") == "others" and door.answered == []


async def test_a_model_request_is_passed_to_the_process_that_has_its_episode() -> None:
    asked: list[tuple[str, str]] = []

    async def other(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "elsewhere"})

    def elsewhere(key: str, path: str) -> Any:
        asked.append((key, path))
        return None if key == MINE else other

    door = Door(elsewhere=elsewhere)
    assert await door.ask(CHAT, bearer("us-2")) == "elsewhere"
    assert await door.ask(CHAT, bearer(MINE)) == "models"
    assert await door.ask("/tasks", bearer("us-2")) == "others"
    assert await door.ask(CHAT) == 401
    assert asked == [("us-2", CHAT), (MINE, CHAT)], "only model requests with a key are asked about"
