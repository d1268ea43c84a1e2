"""What clients were seen to send of their sessions, recorded from their programs in `session_marks.json`; and what is hostile."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from mocked_server.session_marks import MAX_NAME, SessionMark, session_mark

SEEN: list[dict[str, Any]] = json.loads(Path(__file__).with_suffix("").with_name("session_marks.json").read_text())
SILENT = {
    "Gemini CLI",
    "Qwen Code",
    "LangGraph",
    "langchain-anthropic",
    "smolagents",
    "OpenAI Agents SDK",
    "Anthropic SDK",
}
"""Clients that say nothing of their session."""
SOMETIMES = {"OpenAI SDK", "pi"}
"""Those that say it in one of their APIs, or where their user does."""
CLAUDE = "755805d7-1f1c-44f4-b767-4a4486261035"


def mark_of(seen: dict[str, Any]) -> SessionMark:
    headers = [(name.encode(), value.encode()) for name, value in seen["headers"].items()]
    return session_mark(seen["path"], headers, seen["body"])


def mark(*, path: str = "/v1/chat/completions", headers: dict[str, str] | None = None, **body: Any) -> SessionMark:
    return session_mark(path, [(name.encode(), value.encode()) for name, value in (headers or {}).items()], body)


@pytest.mark.parametrize("seen", SEEN, ids=lambda seen: f"{seen['client']}-{seen['did']}-{seen['side']}")
def test_a_side_call_is_told_and_no_round_is_one(seen):
    assert mark_of(seen).is_side == bool(seen["side"])


def test_the_program_that_asks_is_the_first_word_of_its_user_agent():
    assert mark(headers={"User-Agent": "claude-cli/2.1.197 (external, cli)"}).client == "claude-cli/2.1.197"
    assert (mark().client, mark(headers={"user-agent": " "}).client) == ("", "")


def test_all_requests_of_a_session_have_one_name_and_no_two_sessions_have_the_same():
    names = defaultdict(set)
    for seen in SEEN:
        names[seen["client"], seen["session"]].add(mark_of(seen).name)
    assert {client for (client, _), found in names.items() if found == {""}} == SILENT | SOMETIMES
    assert all(len(found) == 1 for found in names.values())
    told = [name for found in names.values() for name in found if name]
    assert len(told) == len(set(told)) == 26
    assert {client for (client, _), found in names.items() if found != {""}} >= {
        "Claude Code",
        "Codex",
        "opencode",
    } | SOMETIMES


def test_a_session_keeps_its_name_when_its_client_is_started_again():
    for client, first, again in (
        ("Claude Code", "claude -p", "claude -p -c"),
        ("Codex", "codex exec", "codex exec resume --last"),
        ("opencode", "opencode run", "opencode run -c"),
    ):
        names = [
            {
                mark_of(seen).name
                for seen in SEEN
                if (seen["client"], seen["did"], seen["session"]) == (client, did, "A")
            }
            for did in (first, again)
        ]
        assert names[0] == names[1] and len(names[0]) == 1


def test_a_sub_agent_has_its_session_s_name_and_one_of_its_own():
    agents = {(seen["client"], mark_of(seen).agent) for seen in SEEN if seen["sub_agent"]}
    assert "" not in {agent for _, agent in agents}
    assert sorted(client for client, _ in agents) == ["Claude Code", "Codex", "Codex", "opencode"]
    assert not any(mark_of(seen).agent for seen in SEEN if not seen["sub_agent"])


def test_a_field_tells_the_session_where_a_gateway_dropped_the_headers():
    for seen in SEEN:
        if seen["client"] in ("Claude Code", "Codex") and seen["side"] != "token count":
            bare = mark_of(seen | {"headers": {}})
            assert (bare.name, bare.is_side) == (mark_of(seen).name, bool(seen["side"]))


@pytest.mark.parametrize(
    ("sent", "name", "why"),
    [
        ({"metadata": {"user_id": f"user_ab12_account__session_{CLAUDE}"}}, CLAUDE, "metadata.user_id"),
        ({"metadata": {"user_id": "person-1"}, "user": "u", "safety_identifier": "s"}, "", ""),
        ({"prompt_cache_key": CLAUDE}, CLAUDE, "prompt_cache_key"),
        ({"prompt_cache_key": "ses_ddb035f08ffes0eQjf9bCApYuP"}, "ses_ddb035f08ffes0eQjf9bCApYuP", "prompt_cache_key"),
        ({"prompt_cache_key": "shop-assistant-prompt-v2"}, "", ""),
        ({"metadata": {"session_id": "a", "thread_id": "b"}, "prompt_cache_key": CLAUDE}, "a", "metadata.session_id"),
        ({"conversation": {"id": "conv_1"}}, "conv_1", "conversation.id"),
        ({"previous_response_id": "resp_1"}, "", ""),
        ({"headers": {"X-LiteLLM-Session-Id": "s"}, "session_id": "t"}, "s", "x-litellm-session-id header"),
        ({"headers": {"x-openwebui-chat-id": "c"}}, "c", "x-openwebui-chat-id header"),
        ({"headers": {"x-session-id": "undefined"}, "session_id": " t "}, "t", "session_id"),
        ({"headers": {"x-gateway-session-id": "g", "x-session-id": "default"}}, "g", "x-gateway-session-id header"),
        ({"headers": {"x-gateway-session-id": "g", "Session-Id": "s"}}, "s", "session-id header"),
        (
            {"headers": {"x-gateway-session-id": "g", "x-claude-code-session-id": "s"}},
            "s",
            "x-claude-code-session-id header",
        ),
        ({"client_metadata": {"session_id": "s"}, "prompt_cache_key": CLAUDE}, "s", "client_metadata.session_id"),
        ({"headers": {"x-session-token": "secret", "x-request-id": "r"}}, "", ""),
    ],
)
def test_what_names_a_session(sent, name, why):
    found = mark(**sent)
    assert (found.name, found.why, found.agent) == (name, why, "")


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        ({"max_tokens": 1, "messages": [{"role": "user", "content": "quota"}]}, "max_tokens=1"),
        ({"generationConfig": {"maxOutputTokens": 1}}, "generationConfig.maxOutputTokens=1"),
        ({"path": "/v1beta/models/*:countTokens"}, "token count"),
        ({"path": "/v1/responses/compact", "session_id": "s"}, "session_id; compaction"),
        ({"headers": {"x-codex-turn-metadata": '{"request_kind":"prewarm"}'}}, "request_kind=prewarm"),
        (
            {"input": [{"role": "user", "content": "You are performing a CONTEXT CHECKPOINT COMPACTION."}]},
            "compaction prompt",
        ),
        ({"system": "  You are a title generator."}, "title prompt"),
    ],
)
def test_what_is_a_side_call(sent, why):
    assert mark(**sent).is_side and mark(**sent).why == why


@pytest.mark.parametrize(
    "sent",
    [
        {"max_tokens": 10, "messages": [{"role": "user", "content": "Why does it say [SUGGESTION MODE: x]?"}]},
        {"max_tokens": True, "messages": []},
        {"messages": [{"role": "user", "content": "You are a title generator"}]},
        {"headers": {"x-codex-turn-metadata": '{"request_kind":"turn"}'}},
        {"messages": [{"role": "user", "content": "[SUGGESTION MODE: x"}, {"role": "user", "content": "Hi"}]},
    ],
)
def test_a_round_that_looks_like_a_side_call_is_none(sent):
    assert not mark(**sent).is_side


def test_a_name_is_bounded_and_printable_and_two_stay_two():
    long = [mark(session_id="x" * MAX_NAME + end).name for end in ("", "a", "b")]
    assert long[0] == "x" * MAX_NAME and len({*long}) == 3 and {len(name) for name in long[1:]} == {64}
    for hostile in ("a\x00b", "\ud800", "a\nb", "\x1b[2J"):
        assert len(mark(session_id=hostile).name) == 64
        assert mark(session_id=hostile, headers={"x-claude-code-agent-id": "a\tb"}).agent.isprintable()
    assert mark(session_id="x" * 100_000).name == ""


def anything(draw: random.Random, *, depth: int = 0) -> Any:
    """A value as a hostile body has it."""
    words = [
        "",
        "x",
        "user",
        "session_id",
        '{"session_id":"' * 9,
        "\ud800",
        "_session_",
        1,
        -1,
        1.5,
        True,
        None,
        10**400,
    ]
    kind = draw.randrange(4 if depth < 4 else 1)
    if kind == 1:
        return [anything(draw, depth=depth + 1) for _ in range(draw.randrange(4))]
    if kind > 1:
        return {field: anything(draw, depth=depth + 1) for field in draw.sample(FIELDS, draw.randrange(7))}
    return draw.choice(words)


FIELDS = [
    "messages", "input", "contents", "system", "instructions", "systemInstruction", "metadata", "client_metadata", "user_id",
    "text", "session_id", "conversation", "id", "prompt_cache_key", "max_tokens", "generationConfig", "role", "content", "parts",
    "x-codex-turn-metadata",
]  # fmt: skip


@pytest.mark.seconds
def test_nothing_that_is_sent_raises():
    draw = random.Random(7)
    for _ in range(1000):
        body = {field: anything(draw) for field in draw.sample(FIELDS, 8)}
        headers = [
            (draw.choice([b"Session_ID", b"x-session-id", b"\xff-session", b"thread-id", b""]), draw.randbytes(9))
        ]
        found = session_mark(draw.choice(["", "/v1/messages", "\ud800"]), headers, body)
        assert len(found.name) <= MAX_NAME and found.name.isprintable() and found.agent.isprintable()
    for body in ([], "x", None, 1):
        assert session_mark("/v1/messages", (), body) == SessionMark("", False, "")  # type: ignore[arg-type]
    deep: Any = "x"
    for _ in range(5000):
        deep = {"content": [deep]}
    assert mark(messages=[{"role": "user", "content": deep}], system=deep, metadata=deep) == SessionMark("", False, "")
