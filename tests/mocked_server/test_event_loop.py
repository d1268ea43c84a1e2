"""What takes time in proportion to an agent's input is not done on the server's event loop, and what is left there is bounded.

No time is judged: each kind of work says in which thread it was done, and for how much.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from configs.schema import RolloutConfig
from configs.tiny_model import make_tiny_model
from mocked_server.conversation.chat_history import ChatOptions, Conversation
from mocked_server.http import gemini_routes, model_requests, request_fields, request_limits, roles
from mocked_server.http.dialects import CHAT, RESPONSES
from mocked_server.http.request_fields import MAX_MESSAGES
from mocked_server.http.request_limits import MAX_CONTAINERS, MAX_STRINGS, MAX_VALUES
from mocked_server.http.roles import MAX_KEPT_CHARS, Roles, Upstream
from mocked_server.request_context import LARGE_BYTES
from tests.mocked_server.test_roles import judged_by
from tests.support.faults.hostile_http import MIB, hostile, whole
from tests.support.largest_requests import bodies
from tests.support.patience import PATIENCE_S
from tests.support.server_parts import ServerThread

pytestmark = pytest.mark.seconds

BODIES = bodies()
OURS = [
    (request_limits, "shape_of"), (request_fields, "shape_of"), (model_requests, "refused"), (model_requests, "servable"),
    (model_requests, "_digest"), (Roles, "settle"), (gemini_routes, "count_of"), (gemini_routes, "generation_of"),
    (roles, "text_of"), (Conversation, "of"), (ChatOptions, "of"),
]  # fmt: skip
"""Ours that reads all of a request, or of an answer of others."""
STARLETTES = "json.loads in fastapi/routing.py"
"""Reads the body of a request for vLLM's application, on the loop: what bodies may hold is bounded for that."""


class Done(NamedTuple):
    what: str
    size: int
    on_loop: bool


@dataclass
class Work:
    """What was done since `clear`."""

    loop: int = 0
    done: list[Done] = field(default_factory=list)

    def watch(self, what: str, work: Callable[..., Any], *, size: Callable[..., int]) -> Callable[..., Any]:
        def watched(*arguments: Any, **named: Any) -> Any:
            self.done.append(Done(what, size(*arguments, *named.values()), threading.get_ident() == self.loop))
            return work(*arguments, **named)

        return watched

    def large(self, *, on_loop: bool) -> set[str]:
        """Kinds of work that was done for much."""
        return {each.what for each in self.done if each.size > LARGE_BYTES and each.on_loop is on_loop}


def size_of(*arguments: Any) -> int:
    """Bytes or characters of all texts within."""
    total, rest = 0, list(arguments)
    while rest:
        each = rest.pop()
        if isinstance(each, str | bytes | bytearray):
            total += len(each)
        elif isinstance(each, dict):
            rest += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple):
            rest += each
            total += len(each)
    return total


@pytest.fixture(scope="module")
def work() -> Iterator[Work]:
    import sys

    import jinja2
    from transformers import TokenizersBackend

    seen = Work()

    def caller(name: str) -> str:
        frame = sys._getframe(3)
        return f"{name} in {'/'.join(Path(frame.f_code.co_filename).parts[-2:])}"

    def named(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            return seen.watch(caller(name), work, size=size_of)(*arguments, **options)

        return watched

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in OURS:
            whole_name = f"{getattr(owner, '__name__', owner)}.{name}"
            patch.setattr(owner, name, seen.watch(whole_name, getattr(owner, name), size=size_of))
        for name in ("loads", "dumps"):
            patch.setattr(json, name, named(f"json.{name}", getattr(json, name)))
        patch.setattr(
            TokenizersBackend, "_encode_plus", seen.watch("tokenizing", TokenizersBackend._encode_plus, size=size_of)
        )
        patch.setattr(jinja2.Template, "render", seen.watch("rendering", jinja2.Template.render, size=lambda *_: 10**9))
        yield seen


@pytest.fixture(scope="module")
def server(work: Work, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    model = make_tiny_model(tmp_path_factory.mktemp("model") / "long", positions=2**20)
    other = Upstream("http://127.0.0.1:1", model="large", key="")
    roles = Roles(trained=["policy"], others={"judge": other})
    served = ServerThread(model, rollout=RolloutConfig(max_tokens=16, max_model_len=2**19), roles=roles)
    served.start()
    assert served._thread.ident is not None
    work.loop = served._thread.ident
    yield served
    served.call(other.close())
    served.stop()


def post(server: ServerThread, path: str, body: bytes) -> httpx.Response:
    _, client = server.lease()
    headers = {"x-api-key": client.api_key, "content-type": "application/json"}
    return httpx.post(server.server.base_url + path, content=body, headers=headers, timeout=PATIENCE_S, trust_env=False)


@pytest.mark.parametrize("name", BODIES)
def test_the_largest_requests_are_read_beside_the_loop(server: ServerThread, work: Work, name: str) -> None:
    """All but once, by what vLLM's application is made of."""
    path, body = BODIES[name]
    work.done.clear()
    answer = post(server, path, body)
    assert answer.status_code in (200, 400), answer.text
    assert work.large(on_loop=True) <= {STARLETTES}
    assert {each for each in work.large(on_loop=False)} or len(body) <= LARGE_BYTES


def test_a_long_text_is_rendered_and_tokenized_beside_the_loop(server: ServerThread, work: Work) -> None:
    text = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "word " * 20_000}]})
    work.done.clear()
    assert post(server, CHAT, text.encode()).status_code == 200
    assert {"tokenizing", "rendering", "Conversation.of"} <= work.large(on_loop=False)
    assert work.large(on_loop=True) <= {STARLETTES}


@pytest.mark.parametrize("size", [LARGE_BYTES // 5 + 1, 14 * MIB // 5])
async def test_what_a_role_elsewhere_is_asked_and_says_is_read_beside_the_loop(
    server: ServerThread, work: Work, size: int
) -> None:
    said = json.dumps({"choices": [{"index": 0, "message": {"role": "assistant", "content": "word " * 20_000}}]})
    body = json.dumps({"model": "judge", "messages": [{"role": "user", "content": "word " * size}]}).encode()
    async with hostile(whole(said.encode())) as other:
        with judged_by(server, other.url):
            work.done.clear()
            answer = await asyncio.to_thread(post, server, CHAT, body)
            assert answer.status_code == 200, answer.text
    assert work.large(on_loop=True) == set()
    assert {"tokenizing", "mocked_server.http.roles.text_of"} <= work.large(on_loop=False)
    longest = max(each.size for each in work.done if each.what == "tokenizing")
    assert longest <= MAX_KEPT_CHARS + 100  # of options


def objects(number: int) -> str:
    return ",".join(["{}"] * number)


@pytest.mark.parametrize(
    ("held", "reason"),
    [
        (f'"x":[{objects(MAX_CONTAINERS)}]', f"may have {MAX_CONTAINERS:,} objects and lists"),
        ('"x":[' + ",".join(['""'] * (MAX_STRINGS + 1)) + "]", f"may have {MAX_STRINGS:,} strings"),
        ('"x":[' + ",".join("1" * MAX_VALUES) + "]", f"may have {MAX_VALUES:,} values"),
    ],
    ids=["objects", "strings", "numbers"],
)
def test_a_body_of_too_many_values_is_read_by_nobody(server: ServerThread, work: Work, held: str, reason: str) -> None:
    """2 million objects of eight bytes are 16 MB, and took 14 GB and minutes of the loop."""
    for path in (CHAT, RESPONSES):
        work.done.clear()
        answer = post(server, path, f'{{"model":"policy",{held}}}'.encode())
        assert answer.status_code == 413 and reason in answer.text
        assert {each.what for each in work.done if each.size > LARGE_BYTES} <= {
            "mocked_server.http.request_limits.shape_of"
        }


@pytest.mark.parametrize("name", ["messages", "input", "tools"])
def test_a_list_of_too_many_objects_is_refused_by_its_name(server: ServerThread, name: str) -> None:
    path = RESPONSES if name == "input" else CHAT
    answer = post(server, path, f'{{"model":"policy","{name}":[{objects(MAX_MESSAGES + 1)}]}}'.encode())
    assert answer.status_code == 400
    assert f"{name} must be at most 4,096, got 4,097; send fewer" in answer.json()["error"]["message"]


def test_arguments_of_calls_are_bounded_as_what_they_are_not_as_text(server: ServerThread) -> None:
    def ask(arguments: str) -> httpx.Response:
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
        asked = {"role": "user", "content": "a"}
        messages = [asked, {"role": "assistant", "content": "", "tool_calls": [call]}, asked]
        return post(server, CHAT, json.dumps({"model": "policy", "messages": messages}).encode())

    answer = ask(f'{{"a":[{objects(MAX_CONTAINERS + 1)}]}}')
    assert answer.status_code == 400 and "arguments of tool calls may have 16,384" in answer.text
    assert ask(json.dumps({"file": objects(MAX_CONTAINERS + 1)})).status_code == 200, "a text with many brackets"


@pytest.mark.parametrize("item", [{"a": 1}, {"type": "message", "role": "user", "content": [{"a": 1}] * 100}])
def test_the_first_item_that_is_none_says_why_for_all(server: ServerThread, item: Any) -> None:
    def ask(number: int) -> int:
        answer = post(server, RESPONSES, json.dumps({"model": "policy", "input": [item] * number}).encode())
        assert answer.status_code == 400
        return int(answer.json()["error"]["message"].split()[0])

    assert ask(1) == ask(40) < 1000
