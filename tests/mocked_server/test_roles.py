"""Roles over HTTP, with the real OpenAI client: who is asked, what is recorded and trained, and models of others."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import httpx
import openai
import pytest

from buffers.outgoing import ROLE
from configs.schema import RolloutConfig
from mocked_server.http.roles import Roles, Upstream, text_of
from tests.support.faults.hostile_http import BOMB, ENDLESS, MIB, hostile, whole
from tests.support.patience import PATIENCE_S
from tests.support.server_parts import ServerThread

HELLO: list[Any] = [{"role": "user", "content": "Hello."}]
KEY = "sk-of-the-judge"
BREAK_OFF = "Break off."
NEVER_END = "Never end."


class Judge(http.server.BaseHTTPRequestHandler):
    """An OpenAI-compatible server of somebody else."""

    asked: ClassVar[list[tuple[str, dict[str, Any], dict[str, str]]]] = []
    left: ClassVar[threading.Event] = threading.Event()
    """Who asked for what never ends has hung up."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append((self.path, body, dict(self.headers)))
        if body.get("stream"):
            events = [{"choices": [{"index": 0, "delta": {"content": part}}]} for part in ("well ", "done")]
            answer = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
            kind = "text/event-stream"
        else:
            message = {"role": "assistant", "content": "well done"}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            answer, kind = json.dumps({"id": "1", "object": "chat.completion", "choices": [choice]}), "application/json"
        self.send_response(200)
        self.send_header("content-type", kind)
        missing = 10 if body["messages"][0]["content"] == BREAK_OFF else 0
        self.send_header("content-length", str(len(answer) + missing))
        self.end_headers()
        if body["messages"][0]["content"] == NEVER_END:
            self.wfile.write(answer[: len(answer) // 2].encode())
            self.rfile.read(1)
            self.left.set()
            return
        self.wfile.write(answer.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def judge() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def server(tiny_model: Path, judge: str) -> Iterator[ServerThread]:
    upstream = Upstream(judge, model="large", key=KEY)
    roles = Roles(trained=["solver", "critic"], frozen=["old"], others={"judge": upstream})
    served = ServerThread(tiny_model, rollout=RolloutConfig(max_tokens=16, max_model_len=512), roles=roles)
    served.start()
    upstream.record, upstream.encode = served.generation.record, served.server.encode
    yield served
    served.call(upstream.close())
    served.stop()


def test_the_models_name_says_who_is_asked_and_the_round_keeps_it(server: ServerThread) -> None:
    episode, client = server.lease()
    for name in ("critic", "solver", "old"):
        client.chat.completions.create(model=name, messages=[{"role": "user", "content": f"To {name}."}])
    client.with_options(base_url=f"{server.server.base_url}/e/{client.api_key}/critic/v1").chat.completions.create(
        model="gpt-4o", messages=HELLO
    )
    rounds = server.stored(episode)
    assert [round_.role for round_ in rounds] == ["critic", "solver", "old", "critic"]
    assert [None if each.trained is None else each.trained.any() for each in rounds] == [None, None, False, None]
    assert server.server.decode(rounds[2].sampled_ids.tolist()).startswith("frozen")
    assert server.generation.stats.constrained == 0


def test_a_name_that_is_no_role_is_refused_with_the_list(server: ServerThread) -> None:
    episode, client = server.lease()
    with pytest.raises(openai.NotFoundError, match=r"roles \(solver, critic, old, judge\), got 'policy'") as refused:
        client.chat.completions.create(model="policy", messages=HELLO)
    assert refused.value.param == "model"
    by_path = client.with_options(base_url=f"{server.server.base_url}/e/{client.api_key}/nobody/v1")
    with pytest.raises(openai.NotFoundError, match="got 'nobody'"):
        by_path.chat.completions.create(model="solver", messages=HELLO)
    assert [model.id for model in client.models.list()] == ["solver", "critic", "old", "judge"]
    assert server.stored(episode) == []


def test_scores_of_roles_reach_their_rows(server: ServerThread) -> None:
    episode, client = server.lease()
    for name in ("solver", "critic", "old"):
        client.chat.completions.create(model=name, messages=[{"role": "user", "content": f"To {name}."}])
    with server.http(server.server.keys.scorer) as scorer:
        answer = scorer.post("/scores", json={"episode_id": episode, "score": 1.0, "role": "nobody"})
        assert answer.status_code == 422 and "(solver, critic, old, judge), got 'nobody'" in answer.text
        # An environment scores all speakers, whoever is trained.
        scorer.post("/scores", json={"episode_id": episode, "score": 7.0, "role": "old"}).raise_for_status()
        both = {"episode_id": episode, "score": 1.0, "role": "critic", "branch": 0}
        assert scorer.post("/scores", json=both).status_code == 422
        scorer.post("/scores", json={"episode_id": episode, "score": -2.0, "role": "critic"}).raise_for_status()
        scorer.post("/scores", json={"episode_id": episode, "score": 0.5}).raise_for_status()
    batch = server.ledger.claim(1, min_version=0).result()
    assert batch is not None
    server.ledger.release(batch.lease_id).result()
    assert [(row.role, row.role_score, row.own_score) for row in batch.rows] == [
        ("solver", None, 0.5),
        ("critic", -2.0, -2.0),
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_of_others_answers_and_is_recorded_and_its_key_stays(server: ServerThread, stream: bool) -> None:
    Judge.asked.clear()
    episode, client = server.lease()
    answer: Any = client.chat.completions.create(model="judge", messages=HELLO, stream=stream)
    said = "".join(event.choices[0].delta.content for event in answer) if stream else answer.choices[0].message.content
    assert said == "well done"
    ((path, body, headers),) = Judge.asked
    assert (path, body["model"], body["messages"]) == ("/v1/chat/completions", "large", HELLO)
    assert headers["Authorization"] == f"Bearer {KEY}" and client.api_key not in str(headers)
    (stored,) = server.stored(episode)
    assert stored.trained is not None and not stored.trained.any()
    assert (stored.role, server.server.decode(stored.sampled_ids.tolist())) == ("judge", "well done")


def test_an_answer_that_breaks_off_is_no_answer_that_ended(server: ServerThread) -> None:
    episode, client = server.lease()
    asked: list[Any] = [{"role": "user", "content": BREAK_OFF}]
    with pytest.raises((openai.APIError, httpx.HTTPError)):
        list(client.with_options(max_retries=0).chat.completions.create(model="judge", messages=asked, stream=True))
    client.chat.completions.create(model="solver", messages=HELLO)
    assert [stored.role for stored in server.stored(episode)] == ["solver"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_ends_the_request_to_a_model_of_others(server: ServerThread, stream: bool) -> None:
    Judge.asked.clear()
    Judge.left.clear()
    episode, client = server.lease()
    body = {"model": "judge", "messages": [{"role": "user", "content": NEVER_END}], "stream": stream}
    url = f"{server.server.base_url}/v1/chat/completions"
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {client.api_key}"}, timeout=PATIENCE_S) as asking:
        answer = asyncio.create_task(asking.post(url, json=body))
        async with asyncio.timeout(PATIENCE_S):
            while not Judge.asked:
                await asyncio.sleep(0.01)
        assert not answer.done()
        answer.cancel()
    assert await asyncio.to_thread(Judge.left.wait, PATIENCE_S)
    assert server.stored(episode) == []


def test_text_that_is_no_unicode_is_passed_on_and_recorded(server: ServerThread) -> None:
    Judge.asked.clear()
    episode, client = server.lease()
    body = b'{"model": "judge", "messages": [{"role": "user", "content": "a\\ud800b"}]}'
    with server.http() as http:
        answered = http.post(f"/e/{client.api_key}/v1/chat/completions", content=body)
    assert answered.status_code == 200, answered.text
    assert Judge.asked[0][1]["messages"][0]["content"] == "a\ud800b"
    (stored,) = server.stored(episode)
    assert stored.role == "judge"


def test_a_model_of_others_that_is_not_there_fails_its_request_only(tiny_model: Path, server: ServerThread) -> None:
    roles = server._roles
    assert roles is not None
    gone = Upstream("http://127.0.0.1:1", model="m", key="")
    there = roles._others["judge"]
    roles._others["judge"] = gone
    try:
        _, client = server.lease()
        with pytest.raises(openai.InternalServerError, match="the server of role judge gave no answer"):
            client.chat.completions.create(model="judge", messages=HELLO)
        client.chat.completions.create(model="solver", messages=HELLO)
    finally:
        roles._others["judge"] = there
        server.call(gone.close())


@contextmanager
def judged_by(server: ServerThread, url: str) -> Iterator[None]:
    """The role of a server elsewhere."""
    assert server._roles is not None
    others, upstream = server._roles._others, Upstream(url, model="large", key=KEY)
    upstream.record, upstream.encode = server.generation.record, server.server.encode
    judge, others["judge"] = others["judge"], upstream
    try:
        yield
    finally:
        others["judge"] = judge
        server.call(upstream.close())


@pytest.mark.parametrize(
    ("answer", "then", "reason"),
    [
        (BOMB, b"", "must not be compressed"),
        (whole(status="600 X"), b"", "a status of HTTP, got 600"),
        (whole(b"", "location: http://127.0.0.1:1/", status="307 X"), b"", "got a redirect"),
        (ENDLESS, b"x" * MIB, ""),
    ],
    ids=["compressed", "status 600", "redirect", "endless"],
)
async def test_what_a_model_of_others_may_answer_is_bounded(
    server: ServerThread, answer: bytes, then: bytes, reason: str
) -> None:
    episode, client = server.lease()
    client = client.with_options(max_retries=0)

    def ask() -> None:
        client.chat.completions.create(model="judge", messages=HELLO)

    async with hostile(answer, then=then) as other:
        with judged_by(server, other.url):
            # One that has begun breaks off.
            expected = (
                pytest.raises(openai.InternalServerError, match=reason) if reason else pytest.raises(openai.APIError)
            )
            with expected:
                await asyncio.to_thread(ask)
            assert server.stored(episode) == []
            if then:
                await asyncio.wait_for(other.hung_up.wait(), PATIENCE_S)
                assert other.sent < ROLE.max_bytes + 16 * MIB  # of buffers


async def test_episodes_share_no_cookies(server: ServerThread) -> None:
    message = b'{"choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}]}'
    async with hostile(whole(message, "set-cookie: who=me; Path=/", "content-type: application/json")) as other:
        with judged_by(server, other.url):
            for _ in range(2):
                _, client = server.lease()
                await asyncio.to_thread(client.chat.completions.create, model="judge", messages=HELLO)
    assert len(other.asked) == 2 and not any(b"who=me" in head for head in other.asked)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"content": [{"type": "text", "text": "ab"}]}, "ab"),
        ({"output": [{"content": [{"type": "output_text", "text": "ab"}]}]}, "ab"),
        ({"choices": [{"text": "ab"}]}, "ab"),
        ("no JSON", ""),
        ({"choices": [1, {"delta": 2}, {"message": None, "text": "ab"}], "content": 5, "output": {"a": 1}}, "ab"),
        ({"choices": 3, "output": [{"content": 7}, None], "content": [None, {"text": 1}]}, ""),
    ],
)
def test_what_an_answer_says_is_found_in_every_dialect(answer: Any, said: str) -> None:
    assert text_of(json.dumps(answer).encode()) == said


def test_a_loop_names_the_role_beside_the_tokens(server: ServerThread) -> None:
    episode, client = server.lease()
    with server.http() as http:
        answers = [
            http.post(f"/e/{client.api_key}/generate", json={"prompt_ids": [7, number], **asked}).json()
            for number, asked in enumerate(({"model": "critic"}, {"model": "old"}, {}))
        ]
        refused = http.post(f"/e/{client.api_key}/generate", json={"prompt_ids": [1], "model": "nobody"})
    assert [answer["is_trained"] for answer in answers] == [True, False, True]
    assert [round_.role for round_ in server.stored(episode)] == ["critic", "old", "solver"]
    assert refused.status_code == 404 and "must be one of this run's roles (solver, critic, old, judge)" in refused.text


def test_what_cannot_be_passed_on_is_refused(server: ServerThread) -> None:
    _, client = server.lease()
    root = f"/e/{client.api_key}/judge"
    with server.http() as http:
        bad = http.post(f"{root}/v1/chat/completions", content=b"[1]")
        tokens = http.post(f"{root}/generate", json={"prompt_ids": [1]})
    assert (bad.status_code, tokens.status_code) == (400, 400)
    assert "must be a JSON object" in bad.text and "must be for one of /v1/chat/completions" in tokens.text
