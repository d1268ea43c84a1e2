"""Errors that programs act on are in the words of their dialect, whichever part of the server finds them; so are models."""

from __future__ import annotations

import re
from typing import Any

import anthropic
import openai
import pytest

from mocked_server.http.dialects import models_body, respelled

LIMIT = 512
WORDS = "word " * 30
LONG = "word " * 2000
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "google": "/v1beta/models/policy:generateContent",
    "google, streamed": "/v1beta/models/policy:streamGenerateContent?alt=sse",
    "google, listed": "/v1beta/models/policy:streamGenerateContent",
}
TOLD = {
    "messages": r"prompt is too long: (\d+) tokens > 512 maximum",
    "google": r"The input token count \((\d+)\) exceeds the maximum number of tokens allowed \(512\)",
}
OPENAIS = r"This model's maximum context length is 512 tokens\. However, your prompt contains (?:at least )?(\d+) \w+"


def body_of(dialect: str, texts: list[str]) -> dict[str, Any]:
    """A conversation whose turns are these, the agent's first."""
    roles = ["user", "assistant"] * len(texts)
    if dialect == "completions":
        return {"model": "policy", "prompt": " ".join(texts)}
    if dialect.startswith("google"):
        names = {"user": "user", "assistant": "model"}
        return {"contents": [{"role": names[r], "parts": [{"text": t}]} for r, t in zip(roles, texts, strict=False)]}
    turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    named = {"input": turns} if dialect == "responses" else {"messages": turns}
    return {"model": "policy", "max_tokens": 16, **named} if dialect != "responses" else {"model": "policy", **named}


def told(answer: Any, dialect: str) -> int:
    """The number of tokens that the error names."""
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    found = re.search(TOLD.get(dialect.partition(",")[0], OPENAIS), error["message"])
    assert found is not None, error
    if dialect == "messages":
        assert error["type"] == "invalid_request_error"
    elif dialect.startswith("google"):
        assert (error["status"], error["code"]) == ("INVALID_ARGUMENT", 400)
    else:
        assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
    return int(found[1])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", PATHS)
@pytest.mark.parametrize("text", [WORDS * 40, LONG * 100], ids=["in tokens", "in characters"])
def test_a_turn_that_is_too_long_is_told_in_the_words_of_the_dialect(server_thread, dialect, stream, text) -> None:
    _, client = server_thread.lease()
    with server_thread.http(client.api_key) as http:
        body = body_of(dialect, [text])
        answer = http.post(PATHS[dialect], json=body if dialect.startswith("google") else {**body, "stream": stream})
    assert told(answer, dialect) > LIMIT


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", [name for name in PATHS if name != "completions"])
def test_so_is_a_conversation_that_is_too_long_while_its_turns_are_not(server_thread, dialect, stream) -> None:
    server_thread.engine.answer = lambda _: server_thread.ids("ok")
    episode, client = server_thread.lease()
    texts = [WORDS]
    with server_thread.http(client.api_key) as http:
        for _ in range(20):
            body = body_of(dialect, texts)
            answer = http.post(
                PATHS[dialect], json=body if dialect.startswith("google") else {**body, "stream": stream}
            )
            if answer.status_code != 200:
                break
            texts += ["ok", WORDS]
    assert len(server_thread.stored(episode)) > 1 and told(answer, dialect) >= LIMIT


def test_words_of_all_paths_are_known() -> None:
    body = b'{"error": {"message": "n must be 1, max_completion_tokens and max_tokens too", "code": 400}}'
    assert b"maxOutputTokens and maxOutputTokens too" in respelled("/v1beta/models/*:generateContent", 400, body)
    assert respelled("/v1/responses", 400, body) == body
    assert b'"message": "Not Found"' in respelled("/v1/responses", 404, b'{"detail": "Not Found"}')


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/v1/nothing", {}, 404),
        ("POST", "/v1/embeddings", {}, 404),
        ("POST", "/v1/chat/completions/", {}, 404),
        ("GET", "/v1/responses/resp_1", {}, 404),
        ("GET", "/v1/chat/completions", {}, 405),
        ("POST", "/v1/models", {}, 405),
        ("POST", "/v1/complete", {"anthropic-version": "2023-06-01"}, 404),
        ("GET", "/v1/messages", {}, 405),
        ("POST", "/v1/messages/batches", {}, 404),
        ("POST", "/v1beta/models/policy:embedContent", {}, 404),
        ("GET", "/v1beta/models/policy:generateContent", {}, 405),
        ("GET", "/v1/cachedContents", {"x-goog-api-key": "x"}, 404),
        ("GET", "/nothing", {}, 404),
        ("DELETE", "/tasks", {}, 405),
    ],
)
def test_what_is_not_offered_is_refused_in_the_dialect(server_thread, method, path, headers, status) -> None:
    _, client = server_thread.lease()
    with server_thread.http(client.api_key) as http:
        answer = http.request(method, path, headers=headers)
    error = answer.json()["error"]
    assert answer.status_code == status and path in error["message"]
    if "beta" in path or "x-goog-api-key" in headers:
        assert error["code"] == status
    elif headers or "messages" in path:
        assert answer.json()["type"] == "error"
    else:
        assert set(error) == {"message", "type", "param", "code"}


def test_models_are_listed_in_every_dialect(server_thread) -> None:
    _, client = server_thread.lease()
    assert [model.id for model in client.models.list()] == ["policy"]
    assert client.models.retrieve("policy").id == "policy"
    with pytest.raises(openai.NotFoundError, match="model must be one of policy, got 'gpt-5'"):
        client.models.retrieve("gpt-5")
    url = server_thread.server.base_url
    with anthropic.Anthropic(base_url=url, api_key=client.api_key, max_retries=0) as asking:
        assert [(model.id, model.type) for model in asking.models.list()] == [("policy", "model")]
        assert asking.models.retrieve("policy").display_name == "policy"
        with pytest.raises(anthropic.NotFoundError, match="model must be one of policy"):
            asking.models.retrieve("claude")
    with server_thread.http() as http:
        http.headers["x-goog-api-key"] = client.api_key
        (listed,) = http.get("/v1beta/models").json()["models"]
        assert (listed["name"], listed["inputTokenLimit"]) == ("models/policy", LIMIT)
        assert http.get("/v1beta/models/policy").json() == listed
        missing = http.get("/v1beta/models/gemini-2.5-pro")
        assert missing.status_code == 404 and missing.json()["error"]["status"] == "NOT_FOUND"
        assert http.get("/v1beta/models", headers={"x-goog-api-key": "wrong"}).json()["error"]["code"] == 401


def test_a_list_without_models_is_one() -> None:
    assert models_body("/v1/messages", [], one=False) == b'{"data": [], "has_more": false}'


def test_google_clients_read_of_googles_fields(tools_server) -> None:
    _, client = tools_server.lease()
    tools = [{"functionDeclarations": [{"name": "add"}]}]
    calling = {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["subtract"]}}
    with tools_server.http(client.api_key) as http:
        for more, named in (
            ({"generationConfig": {"maxOutputTokens": 0}}, "maxOutputTokens"),
            ({"generationConfig": {"topP": 3}}, "topP"),
            ({"tools": tools, "toolConfig": calling}, "allowedFunctionNames must be declared in tools, got 'subtract'"),
        ):
            answer = http.post(PATHS["google"], json={**body_of("google", ["Hi"]), **more})
            said = answer.json()["error"]["message"]
            assert answer.status_code == 400 and named in said and "max_tokens" not in said, said
