"""Sessions that another model answers, with real OpenAI and Anthropic clients and that model in a process of its own: what passes,
what is recorded, what is learned, and what never is."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffers.errors import UnderstudyError
from buffers.ledger.ledger import Ledger
from buffers.prompt_queue import Response
from buffers.training_rows import TokenTree
from configs.schema import RolloutConfig, UpstreamConfig
from mocked_server.http.roles import Upstream
from mocked_server.live_keys import LiveKeys
from mocked_server.live_sessions import Newest
from mocked_server.watching import DEMONSTRATIONS, FOLDER, Watching, weighed
from tests.support.patience import PATIENCE_S
from tests.support.scripted_upstream import KEY, asked_of, scripted_upstream
from tests.support.server_parts import ServerThread

pytestmark = pytest.mark.seconds

HELLO: list[Any] = [{"role": "user", "content": "Hello."}]
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}}
TOOL: Any = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": PARAMETERS}}
CLAUDES: Any = {"name": "look", "description": "Looks.", "input_schema": PARAMETERS}
OWN: Any = {"type": "function", "name": "look", "parameters": PARAMETERS, "strict": False}
SILENCE_S = 3600.0


class Live(ServerThread):
    """A server of users' sessions. `promoted`: versions that have passed a gate."""

    def __init__(self, folder: Path, run: Path, *, url: str, key: str = KEY, **upstream: Any) -> None:
        self.run = run
        self.config = SimpleNamespace(**UpstreamConfig(url=url, terms_allow_learning=True, **upstream).model_dump())
        self.keys = LiveKeys(run)
        self.key = self.keys.add("ann")
        self.upstreams_key = key
        self.promoted = 0
        super().__init__(
            folder,
            rollout=RolloutConfig(max_tokens=16, max_model_len=2048),
            ledger=Ledger(run / "l.sqlite", resume_episodes=True),
        )

    def _resume(self) -> None:
        config = self.config
        upstream = Upstream(
            config.url, model=config.model, key=self.upstreams_key, who="serve.upstream", silence_s=config.timeout_s
        )
        upstream.record, upstream.encode = self.generation.record, self.server.encode
        self.watching = Watching(
            upstream, folder=self.run, ledger=self.ledger, settings=config, num_promoted=lambda: self.promoted, seed=7
        )
        sessions = self.server.serve_users(
            self.ledger, keys=self.keys, silence_s=SILENCE_S, words_count=True, policy=Newest(self.engine),
            watching=self.watching, patterns=[re.compile("up: melon|lemon")],
        )  # fmt: skip
        self.generation.on_round, self.generation.keeps = sessions.recorded, sessions.keeps

    def stop(self) -> None:
        self.call(self.watching.close())
        super().stop()

    def openai(self, **options: Any) -> openai.OpenAI:
        client = openai.OpenAI(
            base_url=f"{self.server.base_url}/v1", api_key=self.key, max_retries=0, timeout=PATIENCE_S, **options
        )
        self._clients.append(client)
        return client

    def anthropic(self) -> anthropic.Anthropic:
        client: Any = anthropic.Anthropic(
            base_url=self.server.base_url, api_key=self.key, max_retries=0, timeout=PATIENCE_S
        )
        self._clients.append(client)
        return client

    def feedback(self, **said: Any) -> dict[str, Any]:
        with self.http(self.key) as http:
            answer = http.post("/feedback", json=said)
        answer.raise_for_status()
        taken: dict[str, Any] = answer.json()
        return taken

    def figures(self) -> dict[str, float]:
        return self.watching.figures()

    def demonstrations(self, number: int) -> list[dict[str, Any]]:
        """Those of the run, of which there are so many once its sessions are silent."""
        self.call(self.watching.write_silent(-1.0))
        self.call(self.watching.wait(number))
        text = (self.run / FOLDER / DEMONSTRATIONS).read_text()
        return [json.loads(line) for line in text.splitlines()]

    def sessions(self) -> dict[str, bool]:
        """Episode -> whether the other model answers it."""
        read = lambda db: dict(db.execute("SELECT episode_id, is_watched FROM session").fetchall())  # noqa: E731
        found: dict[str, bool] = self.ledger.run(read).result(PATIENCE_S)
        return {name: bool(watched) for name, watched in found.items()}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with scripted_upstream() as root:
        yield root


@pytest.fixture
def live(tiny_model: Path, tmp_path: Path, url: str, request: pytest.FixtureRequest) -> Iterator[Live]:
    run = tmp_path / "run"
    run.mkdir()
    served = Live(tiny_model, run, url=url, **getattr(request, "param", {}))
    served.start()
    yield served
    served.stop()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("live", [{"model": "large"}], indirect=True)
def test_a_chat_with_a_tool_passes_and_is_a_demonstration(live: Live, url: str, stream: bool) -> None:
    client = live.openai()

    def ask(messages: list[Any]) -> Any:
        if not stream:
            return client.chat.completions.create(model="any", messages=messages, tools=[TOOL]).choices[0].message
        with client.chat.completions.stream(model="any", messages=messages, tools=[TOOL]) as events:
            return events.get_final_completion().choices[0].message

    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "call"}]
    first = ask(messages)
    (call,) = first.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"at": "sky"})
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump(exclude={"index"})]},
        {"role": "tool", "tool_call_id": call.id, "content": "blue"},
    ]
    last = ask(messages)
    assert last.content == "up: blue"
    asked = asked_of(url)[-2:]
    assert all(each["body"]["model"] == "large" for each in asked) and asked[1]["body"]["messages"] == messages
    told = str([each["headers"] for each in asked])
    assert f"Bearer {KEY}" in told and live.key not in told
    (session,) = live.sessions()
    (line,) = live.demonstrations(1)
    assert [message["role"] for message in line["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert (line["messages"][4]["content"], line["messages"][4]["reasoning_content"]) == ("up: blue", "hm")
    assert line["messages"][2]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": "sky"}'}
    assert line["tools"] == [TOOL] and (line["source"], line["model"], line["weight"]) == (session, "large", 1.0)
    rounds = live.stored(session)
    assert [round_.role for round_ in rounds] == ["upstream", "upstream"]
    assert not any(round_.trained is None or round_.trained.any() for round_ in rounds)


@pytest.mark.parametrize("stream", [False, True])
def test_claudes_client_passes(live: Live, url: str, stream: bool) -> None:
    client = live.anthropic()

    def ask(messages: list[Any]) -> Any:
        asked: dict[str, Any] = {
            "model": "claude", "max_tokens": 64, "system": "Be brief.", "messages": messages, "tools": [CLAUDES],
        }  # fmt: skip
        if not stream:
            return client.messages.create(**asked)
        with client.messages.stream(**asked) as events:
            return events.get_final_message()

    messages: list[Any] = [{"role": "user", "content": "call"}]
    first = ask(messages)
    (use,) = first.content
    assert (use.name, use.input) == ("look", {"at": "sky"})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "blue"}]}
    messages += [{"role": "assistant", "content": [use.model_dump()]}, {"role": "user", "content": [result]}]
    last = ask(messages)
    assert last.content[0].text.startswith("up: ")
    headers = dict(asked_of(url)[-1]["headers"])
    assert headers["x-api-key"] == KEY and headers["anthropic-version"].startswith("20")
    (line,) = live.demonstrations(1)
    assert [message["role"] for message in line["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert line["tools"] == [TOOL]
    assert live.feedback(response_id=last.id, score=1.0)["trains"] is False


@pytest.mark.parametrize("stream", [False, True])
def test_the_responses_api_passes(live: Live, stream: bool) -> None:
    client = live.openai()

    def ask(items: list[Any]) -> Any:
        if not stream:
            return client.responses.create(model="m", input=items, instructions="Be brief.", tools=[OWN])
        events = client.responses.create(model="m", input=items, instructions="Be brief.", tools=[OWN], stream=True)
        return [event for event in events if event.type == "response.completed"][-1].response

    items: list[Any] = [{"role": "user", "content": "call"}]
    (call,) = ask(items).output
    items += [call.model_dump(exclude_none=True)]
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "blue"}]
    assert ask(items).output_text == "up: blue"
    (line,) = live.demonstrations(1)
    assert [message["role"] for message in line["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert line["messages"][4]["content"] == "up: blue"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_every_byte_of_a_stream_is_the_other_models(live: Live, url: str, path: str) -> None:
    body = {"model": "m", "max_tokens": 9, "stream": True}
    body |= {"input": "same"} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "same"}]}
    with live.http(live.key) as http:
        through = http.post(path, json=body)
    straight = httpx.post(url.removesuffix("/v1") + path, json=body)
    number = len(asked_of(url))
    assert through.headers["content-type"] == straight.headers["content-type"]
    same = straight.text.replace(f'"{_id(path, number)}"', f'"{_id(path, number - 1)}"').replace(
        f'"m{number}"', f'"m{number - 1}"'
    )
    assert through.text == same


def _id(path: str, number: int) -> str:
    return {"/v1/messages": f"msg_up_{number}", "/v1/responses": f"resp_up_{number}"}.get(path, f"chatcmpl-up-{number}")


def test_a_session_stays_with_the_model_that_began_it(live: Live) -> None:
    client = live.openai()
    began = client.chat.completions.create(model="policy", messages=HELLO)
    live.config.share = 0.0
    history = [*HELLO, {"role": "assistant", "content": began.choices[0].message.content}]
    again = client.chat.completions.create(model="policy", messages=[*history, {"role": "user", "content": "And?"}])
    own = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "Another."}])
    live.config.share = 1.0
    said = own.choices[0].message.content
    more: list[Any] = [{"role": "user", "content": "Another."}, {"role": "assistant", "content": said}, HELLO[0]]
    last = client.chat.completions.create(model="policy", messages=more)
    assert (again.choices[0].message.content, said, last.choices[0].message.content) == ("up: And?", "ok", "ok")
    assert sorted(live.sessions().values()) == [False, True]
    (line,) = live.demonstrations(1)
    assert [message.get("content") for message in line["messages"]] == ["Hello.", "up: Hello.", "And?", "up: And?"]
    # Long after, and after its demonstration: its next answer alone is learned from what follows.
    third = [*history, {"role": "user", "content": "And?"}, {"role": "assistant", "content": "up: And?"}, HELLO[0]]
    live.config.share = 0.0
    assert client.chat.completions.create(model="policy", messages=third).choices[0].message.content == "up: Hello."
    weights = [
        message.get("weight") for message in live.demonstrations(2)[1]["messages"] if message["role"] == "assistant"
    ]
    assert weights == [0, 0, None]


def chat(client: openai.OpenAI, *words: str, **more: Any) -> str:
    """The answer to a conversation."""
    messages: Any = [{"role": ("user", "assistant")[n % 2], "content": each} for n, each in enumerate(words)]
    answer = client.chat.completions.create(model="policy", messages=messages, **more)
    return str(answer.choices[0].message.content)


def test_what_is_not_to_be_stored_is_answered_by_whom_its_session_is_and_not_learned(live: Live) -> None:
    client, hidden = live.openai(), live.openai(default_headers={"x-understudy-record": "none"})
    named: Any = {"extra_headers": {"x-session-id": "mine"}}
    for ask in (partial(chat, client), partial(chat, client, **named)):
        assert ask("Hello.") == "up: Hello."
        assert ask("Hello.", "up: Hello.", "lemon") == "up: lemon"
        assert ask("Hello.", "up: Hello.", "melon") == "up: melon"
        assert ask("Hello.", "up: Hello.", "melon", "up: melon", "And?") == "up: And?"
    assert chat(hidden, "apple") == "up: apple" and chat(hidden, "apple", "up: apple", "And?") == "up: And?"
    live.config.share = 0.0
    assert chat(client, "Hello.", "up: Hello.", "lemon") == "up: lemon"
    assert chat(client, "Hello.", "up: Hello.", "lemon", **named) == "up: lemon"
    assert chat(hidden, "fig") == chat(hidden, "apple", "up: apple", "And?") == "ok"
    assert [len(line["messages"]) for line in live.demonstrations(2)] == [2, 2]
    stored = live.ledger.run(lambda db: db.execute("SELECT count(*) FROM round").fetchone()[0]).result(PATIENCE_S)
    assert stored == 2 and list(live.sessions().values()) == [True, True]


@pytest.mark.parametrize("live", [{"share": 0.5}], indirect=True)
@pytest.mark.parametrize("is_named", [False, True])
def test_a_private_turn_is_answered_by_the_model_that_began_its_session(live: Live, is_named: bool) -> None:
    """Also where its session is silent, and lies in the ledger alone."""
    client, sessions = live.openai(), live.server.sessions
    assert sessions is not None
    kinds = set()
    for number in range(12):
        more: Any = {"extra_headers": {"x-session-id": f"s{number}"}} if is_named else {}
        said = chat(client, f"q{number}", **more)
        kinds.add(said[:2])
        if is_named and number % 2:
            sessions._silence_s = -1.0
            live.call(sessions.look())
            sessions._silence_s = SILENCE_S
        assert chat(client, f"q{number}", said, "lemon", **more)[:2] == said[:2]
        more["extra_headers"] = {**more.get("extra_headers", {}), "x-understudy-record": "none"}
        assert chat(client, f"q{number}", said, "And?", **more)[:2] == said[:2]
    assert kinds == {"up", "ok"}


def test_what_the_other_model_thinks_is_looked_at_too(live: Live) -> None:
    """It is in the demonstration. The scripted one thinks `hm`."""
    sessions = live.server.sessions
    assert sessions is not None
    sessions._patterns = [re.compile("hm")]
    assert chat(live.openai(), "Hello.") == "up: Hello."
    assert chat(live.openai(), "Hello.", "up: Hello.", "And?") == "up: And?"
    live.call(live.watching.write_silent(-1.0))
    assert not list(live.run.rglob("*.jsonl")) and sessions.figures()["live/unrecorded"] == 2


def test_what_is_not_to_be_stored_waits_for_the_other_model_where_it_is_down(live: Live) -> None:
    live.promoted = 1
    live.config.step = 0.0
    with pytest.raises(openai.InternalServerError):
        chat(live.openai(default_headers={"x-understudy-record": "none"}), "down")
    assert live.sessions() == {}


@pytest.mark.parametrize("live", [{"share": 0.5}], indirect=True)
def test_all_turns_of_a_conversation_that_is_not_stored_are_of_one_model(live: Live) -> None:
    hidden = live.openai(default_headers={"x-understudy-record": "none"})
    kinds = set()
    for number in range(16):
        said = chat(hidden, f"q{number}")
        kinds.add(said)
        assert chat(hidden, f"q{number}", said, "And?")[:2] == said[:2]
    assert "ok" in kinds and len(kinds) > 2


@pytest.mark.parametrize("live", [{"share": 0.5}], indirect=True)
def test_a_named_session_and_its_side_are_of_one_model(live: Live) -> None:
    client = live.openai()
    answers: dict[str, set[str]] = {}
    for number in range(20):
        name = f"s{number % 10}"
        asked: Any = [{"role": "user", "content": f"q{number}"}]
        answer = client.chat.completions.create(model="policy", messages=asked, extra_headers={"x-session-id": name})
        answers.setdefault(name, set()).add(str(answer.choices[0].message.content)[:2])
    assert set(map(len, answers.values())) == {1} and {"up"} in answers.values() and {"ok"} in answers.values()


@pytest.mark.parametrize("text", ["down", "locked"])
def test_one_that_is_down_costs_no_new_session_its_answer_once_the_policy_is_promoted(live: Live, text: str) -> None:
    client = live.openai()
    asked: list[Any] = [{"role": "user", "content": text}]
    with pytest.raises(openai.InternalServerError) as refused:
        client.chat.completions.create(model="policy", messages=asked)
    assert KEY not in str(refused.value)
    assert live.figures()["upstream/taken_over"] == 0
    live.promoted = 1
    answer = client.chat.completions.create(model="policy", messages=asked)
    assert answer.choices[0].message.content == "ok"
    assert (live.figures()["upstream/down"], live.figures()["upstream/taken_over"]) == (2, 1)
    live.config.step = 0.0
    history: list[Any] = [*asked, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "And?"}]
    assert client.chat.completions.create(model="policy", messages=history).choices[0].message.content == "ok"
    assert list(live.sessions().values()).count(False) == 1
    # One that the other model has answered before waits for it.
    began = client.chat.completions.create(model="policy", messages=HELLO).choices[0].message.content
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(
            model="policy",
            messages=[*HELLO, {"role": "assistant", "content": began}, {"role": "user", "content": text}],
        )


def test_one_that_is_not_there_is_an_error_of_each_dialect(tiny_model: Path, tmp_path: Path) -> None:
    served = Live(tiny_model, tmp_path, url="http://127.0.0.1:1/v1")
    served.start()
    try:
        with pytest.raises(openai.InternalServerError, match=r"serve\.upstream gave no answer") as refused:
            served.openai().chat.completions.create(model="policy", messages=HELLO)
        assert refused.value.code == "upstream_unavailable"
        with pytest.raises(anthropic.InternalServerError, match=r"serve\.upstream gave no answer") as other:
            served.anthropic().messages.create(model="policy", max_tokens=4, messages=HELLO)
        assert isinstance(other.value.body, dict) and other.value.body["error"]["type"] == "api_error"
        assert served.figures()["upstream/down"] == 2
    finally:
        served.stop()


def test_a_stream_that_is_cut_ends_with_an_error_of_its_dialect(live: Live) -> None:
    asked: list[Any] = [{"role": "user", "content": "cut"}]
    with pytest.raises(openai.APIError, match="gave no whole answer"):
        list(live.openai().chat.completions.create(model="policy", messages=asked, stream=True))
    with (
        pytest.raises(anthropic.APIStatusError, match="gave no whole answer"),
        live.anthropic().messages.stream(model="policy", max_tokens=4, messages=asked) as events,
    ):
        events.until_done()
    with pytest.raises((openai.APIError, httpx.HTTPError)):
        live.openai().chat.completions.create(model="policy", messages=asked)
    assert live.figures()["upstream/cut"] == 3
    assert all(not live.stored(name) for name in live.sessions())


@pytest.mark.parametrize("live", [{"timeout_s": 0.3}], indirect=True)
def test_one_that_is_silent_is_a_time_out(live: Live) -> None:
    with pytest.raises(openai.InternalServerError) as refused:
        live.openai().chat.completions.create(model="policy", messages=[{"role": "user", "content": "silent"}])
    assert (refused.value.status_code, refused.value.code) == (504, "upstream_timeout")
    assert live.figures()["upstream/slow"] == 1


def test_what_lies_with_the_other_server_is_not_learned(live: Live) -> None:
    client = live.openai()
    client.responses.create(model="m", input="one", extra_headers={"x-session-id": "a"})
    client.responses.create(model="m", input="two", previous_response_id="x", extra_headers={"x-session-id": "a"})
    image: Any = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": image}])
    assert [line["messages"][0]["content"] for line in live.demonstrations(1)] == ["one"]
    assert (live.figures()["upstream/unreadable"], live.figures()["upstream/left_out"]) == (1, 1)


def test_what_it_refuses_is_refused_without_the_key(live: Live) -> None:
    live.promoted = 1  # a request's own fault is no reason to ask the policy
    with pytest.raises(openai.BadRequestError, match=r"no such thing, \*\*\*") as refused:
        live.openai().chat.completions.create(model="policy", messages=[{"role": "user", "content": "wrong"}])
    assert (refused.value.code, refused.value.param) == ("bad_thing", "messages")
    assert (live.figures()["upstream/refused"], live.figures()["upstream/taken_over"]) == (1, 0)


@pytest.mark.parametrize("live", [{"dialect": "anthropic"}], indirect=True)
def test_a_client_of_another_dialect_is_the_policys(live: Live) -> None:
    answer = live.openai().chat.completions.create(model="policy", messages=HELLO)
    assert answer.choices[0].message.content == "ok"
    message: Any = live.anthropic().messages.create(model="policy", max_tokens=4, messages=HELLO)
    assert message.content[0].text == "up: Hello."


@pytest.mark.parametrize("live", [{"dialect": "openai"}], indirect=True)
def test_claudes_client_is_the_policys_where_it_speaks_openais_dialect(live: Live) -> None:
    message: Any = live.anthropic().messages.create(model="policy", max_tokens=4, messages=HELLO)
    assert message.content[0].text == "ok"
    answer = live.openai().chat.completions.create(model="policy", messages=HELLO)
    assert answer.choices[0].message.content == "up: Hello."


@pytest.mark.parametrize("live", [{"step": 0.4, "floor": 0.3}], indirect=True)
def test_the_share_falls_with_each_promoted_version_to_its_floor(live: Live) -> None:
    shares = []
    for live.promoted in range(4):
        shares.append(round(live.figures()["upstream/share"], 6))
    assert shares == [1.0, 0.6, 0.3, 0.3]


def test_feedback_weighs_and_leaves_out(live: Live) -> None:
    client = live.openai()
    for name, score in (("good", 1.0), ("poor", 0.1)):
        answer = client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": name}], extra_headers={"x-session-id": name}
        )
        assert live.feedback(response_id=answer.id, score=score)["trains"] is False
    found = {line["messages"][0]["content"]: (line["score"], line["weight"]) for line in live.demonstrations(2)}
    assert found == {"good": (1.0, 1.5), "poor": (0.1, 0.0)}
    assert live.ledger.claim(1, min_version=0).result() is None
    assert {each.score for each in live.ledger.session_scores().result()} == {1.0, 0.1}
    assert [weighed(score, min_score=0.5)["weight"] for score in (None, 0.5, 9.0)] == [1.0, 1.0, 2.0]


def test_a_killed_server_goes_on_where_its_sessions_were(tiny_model: Path, tmp_path: Path, url: str) -> None:
    first = Live(tiny_model, tmp_path, url=url)
    first.start()
    began = first.openai().chat.completions.create(model="policy", messages=HELLO).choices[0].message.content
    (session,) = first.sessions()
    first.stop()
    with (tmp_path / FOLDER / f"{session}.jsonl").open("a") as broken:
        broken.write('{"user": "ann", "of"')
    second = Live(tiny_model, tmp_path, url=url, share=0.0)
    second.start()
    try:
        asked: list[Any] = [*HELLO, {"role": "assistant", "content": began}, {"role": "user", "content": "And?"}]
        answer = second.openai().chat.completions.create(model="policy", messages=asked)
        assert answer.choices[0].message.content == "up: And?"
        assert list(second.sessions()) == [session]
        (line,) = second.demonstrations(1)
        assert [message["content"] for message in line["messages"]] == ["Hello.", "up: Hello.", "And?", "up: And?"]
    finally:
        second.stop()


SAYINGS = st.lists(
    st.tuples(
        st.floats(-5.0, 5.0) | st.none(), st.sampled_from(["", "a", "b"]), st.integers(0, 2) | st.none(), st.booleans()
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(sayings=SAYINGS)
def test_no_token_of_another_model_enters_a_policy_gradient_whatever_is_said_of_it(
    sayings: list[tuple[float | None, str, int | None, bool]],
) -> None:
    ledger = Ledger(None)
    ledger.open_session(episode_id="w", user="ann", name="s", is_side=False, version=0, is_watched=True).result()
    tree = TokenTree("w")
    for number in range(3):
        untrained = np.zeros(2, np.uint8)
        ledger.put_round(tree.add(_response(), prompt_ids=_ids(number), trained=untrained, role="upstream")).result()
    for score, source, index, settles in sayings:
        with suppress(UnderstudyError):
            ledger.give_feedback(
                user="ann", session="s", response_id="", round_index=index, score=score, text="" if score is not None else "x",
                source=source,
            ).result()  # fmt: skip
        if settles:
            assert ledger.settle_session(episode_id="w", words_count=True).result() is False
    with suppress(UnderstudyError):
        ledger.notify_score("w", 1.0).result()
    assert ledger.take_over(episode_id="w").result() is False
    batch = ledger.claim(1, min_version=-1).result()
    assert batch is None
    ledger.close()


@pytest.mark.parametrize("trained", [None, np.array([0, 1], np.uint8)])
def test_the_ledger_takes_no_round_of_another_model_that_is_trained(trained: Any) -> None:
    ledger = Ledger(None)
    ledger.open_session(episode_id="w", user="ann", name="", is_side=False, version=0, is_watched=True).result()
    with pytest.raises(Exception, match="never trained"):
        ledger.put_round(TokenTree("w").add(_response(), prompt_ids=_ids(0), trained=trained)).result()
    with suppress(Exception):
        ledger.close()


def _ids(number: int) -> Any:
    return np.array([1, 2, number], np.int32)


def _response() -> Response:
    return Response(
        request_id="",
        sampled_ids=np.array([7, 8], np.int32),
        logprobs=np.zeros(2, np.float32),
        versions=np.zeros(2, np.int32),
    )


def test_what_was_watched_is_forgotten_with_its_session(live: Live) -> None:
    client = live.openai()
    for name in ("apple", "pear", "plum"):
        client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": name}], extra_headers={"x-session-id": name}
        )
        if name != "plum":  # which lies in a file of its own until it is silent
            assert len(live.demonstrations(1 + (name == "pear"))) == 1 + (name == "pear")
    lesson = live.run / FOLDER / "lesson-1" / DEMONSTRATIONS  # under way
    lesson.parent.mkdir()
    shutil.copy(live.run / FOLDER / DEMONSTRATIONS, lesson)
    sessions = live.server.sessions
    assert sessions is not None
    for name in ("apple", "plum"):
        live.call(sessions.forget(session=name))
    assert "pear" in lesson.read_text()
    held = [path for path in live.run.rglob("*.jsonl") if "apple" in path.read_text() or "plum" in path.read_text()]
    assert held == []
    assert [line["messages"][0]["content"] for line in live.demonstrations(1)] == ["pear"]
