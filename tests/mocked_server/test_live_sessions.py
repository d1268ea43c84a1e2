"""Users' keys, whose agents nobody starts, with the stock OpenAI client: which session a request belongs to, and feedback on it."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from buffers.ledger.ledger import Ledger
from configs.schema import RolloutConfig
from tests.support.patience import PATIENCE_S
from tests.support.server_parts import ServerThread

HELLO = [{"role": "user", "content": "Hello."}]


@pytest.fixture(scope="module")
def live(tmp_path_factory, tiny_model):
    server = ServerThread(tiny_model, rollout=RolloutConfig(), users=tmp_path_factory.mktemp("runs") / "live")
    server.start()
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def answers(live):
    numbers = iter(range(10**6))
    live.engine.answer = lambda _: live.ids(f"answer {next(numbers)}")


def chat(client: openai.OpenAI, messages, **options):
    return client.chat.completions.create(model="policy", messages=messages, **options)


def feedback(live, client: openai.OpenAI, **said) -> httpx.Response:
    with live.http(client.api_key) as http:
        return http.post("/feedback", json=said)


def session_of(live, client, reply) -> str:
    answer = feedback(live, client, response_id=reply.id, score=1.0)
    assert answer.status_code == 200, answer.text
    return answer.json()["episode_id"]


def said(reply) -> dict[str, str]:
    return {"role": "assistant", "content": reply.choices[0].message.content}


def test_a_conversation_is_one_session_with_nothing_configured(live):
    ann = live.user("ann")
    first = chat(ann, HELLO)
    second = chat(ann, [*HELLO, said(first), *HELLO])
    session = session_of(live, ann, first)
    assert session_of(live, ann, second) == session
    assert [each.parent for each in live.stored(session)] == [None, 0]


def test_the_same_question_again_opens_another_session(live):
    ann = live.user("ann")
    assert session_of(live, ann, chat(ann, HELLO)) != session_of(live, ann, chat(ann, HELLO))


def test_two_users_with_the_same_words_are_told_apart(live):
    ann, bob = live.user("ann"), live.user("bob")
    live.engine.answer = lambda _: live.ids("ok")
    first = chat(ann, HELLO)
    theirs = chat(bob, [*HELLO, said(first), *HELLO])
    assert session_of(live, bob, theirs).startswith("bob-")
    assert feedback(live, bob, response_id=first.id, score=0.0).status_code == 404


def test_a_session_that_its_client_names_has_all_its_requests(live):
    ann = live.user("ann")
    with ThreadPoolExecutor(4) as at_once:
        replies = list(at_once.map(lambda _: chat(ann, HELLO, extra_headers={"x-session-id": "mine"}), range(4)))
    assert len({session_of(live, ann, reply) for reply in replies}) == 1


@pytest.mark.parametrize("dialect", ["responses", "messages", "completions", "stream"])
def test_answers_of_each_dialect_are_found_by_the_id_that_the_client_reads(live, dialect):
    ann = live.user("ann")
    if dialect == "responses":
        name = ann.responses.create(model="policy", input="Hello.").id
    elif dialect == "completions":
        name = ann.completions.create(model="policy", prompt="Hello.").id
    elif dialect == "stream":
        name = [part.id for part in chat(ann, HELLO, stream=True)][-1]
    else:
        body = {"model": "policy", "max_tokens": 8, "messages": HELLO}
        with live.http() as http:
            name = http.post("/v1/messages", json=body, headers={"x-api-key": ann.api_key}).json()["id"]
    assert feedback(live, ann, response_id=name, score=1.0).json()["round_index"] == 0


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"score": 1.0}, "exactly one of session and response_id"),
        ({"session": "s"}, "score or text must be given"),
        ({"session": "s", "score": "high"}, "score"),
        ({"session": "s", "source": "a\nb", "score": 1.0}, "source must be printable"),
        ({"session": "s", "response_id": "r", "score": 1.0}, "exactly one"),
        ({"response_id": "r", "round_index": 1, "score": 1.0}, "an answer is one"),
    ],
)
def test_feedback_that_means_nothing_is_refused(live, body, says):
    ann = live.user("ann")
    with live.http(ann.api_key) as http:
        answer = http.post("/feedback", json=body)
    assert answer.status_code == 422
    assert says in answer.text


def test_a_key_that_is_no_users_gives_no_feedback(live):
    with live.http("us-live.ann-0") as http:
        assert http.post("/feedback", json={"session": "s", "score": 1.0}).status_code == 401


def test_a_revoked_key_opens_nothing_from_then_on(live):
    carl = live.user("carl")
    chat(carl, HELLO)
    live.users.revoke("carl")
    with pytest.raises(openai.AuthenticationError):
        chat(carl, HELLO)


def test_a_body_that_cannot_be_read_is_an_error_of_its_client(live):
    ann = live.user("ann")
    with live.http(ann.api_key) as http:
        assert http.post("/v1/chat/completions", content=b"{").status_code == 400


def until(holds, what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_silence_ends_what_was_scored_and_forgets_what_was_not(tmp_path, tiny_model):
    server = ServerThread(tiny_model, rollout=RolloutConfig(), users=tmp_path / "live", silence_s=0.2)
    server.start()
    try:
        ann = server.user("ann")
        scored, open_ = chat(ann, HELLO), chat(ann, HELLO)
        assert feedback(server, ann, response_id=scored.id, score=1.0).json()["trains"]
        until(lambda: server.ledger.counts()["groups/ready"] == 1, "the scored session did not end")
        until(lambda: len(server.server.episodes) == 0, "the other one was not forgotten")
        again = chat(ann, [*HELLO, said(open_), *HELLO])
        until(lambda: len(server.server.episodes) == 0, "it was not forgotten again")
        assert feedback(server, ann, response_id=again.id, score=0.0).json()["trains"]
        assert server.ledger.counts()["groups/ready"] == 2, "late feedback did not end it"
    finally:
        server.stop()


def test_a_request_that_comes_while_its_silent_session_is_put_away_is_recorded(tmp_path, tiny_model):
    server = ServerThread(tiny_model, rollout=RolloutConfig(), users=tmp_path / "live")
    server.start()
    try:
        ann, sessions = server.user("ann"), server.server.sessions
        first = chat(ann, HELLO, extra_headers={"x-session-id": "mine"})
        settle, under_way, asked = sessions._settle, threading.Event(), threading.Event()

        async def slow(episode_id: str) -> bool:
            under_way.set()
            await asyncio.to_thread(asked.wait)
            return await settle(episode_id)

        sessions._settle, sessions._silence_s = slow, 0.0
        looking = server.submit(sessions.look())
        assert under_way.wait(PATIENCE_S)
        sessions._silence_s = 60.0
        second = chat(ann, [*HELLO, said(first), *HELLO], extra_headers={"x-session-id": "mine"})
        asked.set()
        looking.result(PATIENCE_S)
        third = chat(ann, [*HELLO, said(first), *HELLO, said(second), *HELLO], extra_headers={"x-session-id": "mine"})
        session = session_of(server, ann, first)
        assert [session_of(server, ann, each) for each in (second, third)] == [session] * 2
        assert [each.parent for each in server.stored(session)] == [None, 0, 1]
    finally:
        server.stop()


@pytest.mark.seconds
def test_a_session_goes_on_over_a_restart_of_the_server(tmp_path, tiny_model):
    users, sessions, key, history = tmp_path / "live", [], "", [*HELLO]
    for _ in range(2):
        ledger = Ledger(tmp_path / "ledger.sqlite", resume_episodes=True)
        server = ServerThread(tiny_model, rollout=RolloutConfig(), users=users, ledger=ledger)
        server.start()
        try:
            client = (
                server.user("ann") if not key else openai.OpenAI(base_url=f"{server.server.base_url}/v1", api_key=key)
            )
            key = client.api_key
            reply = chat(client, history)
            history += [said(reply), *HELLO]
            sessions.append(session_of(server, client, reply))
            client.close()
        finally:
            server.stop()
    assert len(set(sessions)) == 1
