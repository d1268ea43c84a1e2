"""What a client sends and nobody does here: tools that an API would run itself, and stop strings that stay in the next prompt."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from mocked_server.check.report import TrialObservations, make_report
from tests.mocked_server.http.test_dialects import ASK, CHAT_TOOLS, MESSAGES_TOOLS, RESPONSES_TOOLS
from tests.mocked_server.http.test_gemini import TOOLS, says

GOOGLE = "/v1beta/models/policy:generateContent"
TURN = [{"role": "user", "content": ASK}]
ASKS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURN, "tools": CHAT_TOOLS},
    "/v1/responses": {"input": ASK, "tools": RESPONSES_TOOLS},
    "/v1/messages": {"messages": TURN, "max_tokens": 50, "tools": MESSAGES_TOOLS},
    GOOGLE: {"contents": [says(ASK)], "tools": TOOLS},
}
SEARCHES = [
    ("/v1/chat/completions", {"type": "web_search"}, "web_search"),
    ("/v1/responses", {"type": "web_search", "external_web_access": False}, "web_search"),
    ("/v1/responses", {"type": "web_search_preview_2025_03_11"}, "web_search_preview_2025_03_11"),
    ("/v1/messages", {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}, "web_search_20250305"),
    (GOOGLE, {"googleSearch": {}}, "googleSearch"),
    (GOOGLE, {"google_search_retrieval": {}}, "google_search_retrieval"),
]
OTHERS = [
    ("/v1/chat/completions", {"type": "code_interpreter"}, "code_interpreter"),
    ("/v1/responses", {"type": "code_interpreter", "container": {"type": "auto"}}, "code_interpreter"),
    ("/v1/responses", {"type": "mcp", "server_label": "x", "server_url": "http://x"}, "mcp"),
    ("/v1/responses", {"type": "file_search", "vector_store_ids": ["v"]}, "file_search"),
    ("/v1/responses", {"type": "image_generation"}, "image_generation"),
    ("/v1/messages", {"type": "web_fetch_20250910", "name": "web_fetch"}, "web_fetch_20250910"),
    ("/v1/messages", {"type": "code_execution_20250825", "name": "code_execution"}, "code_execution_20250825"),
    (GOOGLE, {"codeExecution": {}}, "codeExecution"),
    (GOOGLE, {"urlContext": {}}, "urlContext"),
]


def ids_of(cases: list[Any]) -> list[str]:
    return [f"{path.rpartition('/')[2]} {name}" for path, _, name in cases]


def is_refused(served: Any, client: Any, path: str, body: dict[str, Any], *, named: str) -> None:
    before = len(served.engine.prompts)
    with served.http(client.api_key) as http:
        answer = http.post(path, json={"model": "policy", **body})
    assert answer.status_code == 400 and len(served.engine.prompts) == before
    assert f"{named} is not supported: no tool is run here" in answer.json()["error"]["message"]


@pytest.fixture
def served(tools_server: Any) -> Any:
    tools_server.engine.answer = lambda _: tools_server.ids("<think>\nhm\n</think>\n\nok")
    tools_server.engine.prompts.clear()
    return tools_server


@pytest.mark.parametrize(("path", "tool", "name"), OTHERS, ids=ids_of(OTHERS))
def test_a_tool_that_an_api_would_run_is_refused_by_name_in_every_dialect(served, path, tool, name) -> None:
    _, client = served.lease()
    for tools in ([tool], [*ASKS[path]["tools"], tool]):
        is_refused(served, client, path, {**ASKS[path], "tools": tools}, named=f"tools.{name}")


@pytest.mark.parametrize(("path", "tool", "name"), SEARCHES, ids=ids_of(SEARCHES))
def test_a_search_is_refused_unless_it_is_merely_offered_beside_others(served, path, tool, name) -> None:
    _, client = served.lease()
    is_refused(served, client, path, {**ASKS[path], "tools": [tool]}, named=f"tools.{name}")
    with served.http(client.api_key) as http:
        for tools in (ASKS[path]["tools"], [tool, *ASKS[path]["tools"]], [*ASKS[path]["tools"], tool]):
            answer = http.post(path, json={"model": "policy", **ASKS[path], "tools": tools})
            assert answer.status_code == 200, answer.text
    first, *same = served.engine.prompts
    assert same == [first, first]


def test_a_search_that_must_be_called_is_refused(served) -> None:
    _, client = served.lease()
    tools, choice = [*RESPONSES_TOOLS, {"type": "web_search"}], {"type": "web_search"}
    body = {"input": ASK, "tools": tools, "tool_choice": choice}
    is_refused(served, client, "/v1/responses", body, named="tool_choice.web_search")


@pytest.mark.parametrize("text", ["Look.", "It is 42, isn't it?"])
def test_a_stop_string_that_stays_in_the_next_prompt_is_counted(served, text) -> None:
    episode, client = served.lease()
    messages = [{"role": "user", "content": ASK}]
    before, served.engine.stop = served.server.status()["episodes/stops_kept"], text[-1]
    sampled = served.ids("<think>\nhm\n</think>\n\n" + text, end=False)
    served.engine.answer = lambda _: sampled
    try:
        for number in range(3):
            told = client.chat.completions.create(model="policy", messages=messages, stop=[text[-1]])
            assert told.choices[0].message.content.strip() == text[:-1]
            assert served.server.episodes.get(episode).stops_kept == number
            messages += [{"role": "assistant", "content": text[:-1]}, {"role": "user", "content": "And?"}]
    finally:
        served.engine.stop = ""
    first, second, _ = served.engine.prompts
    assert second[len(first) :][: len(sampled)] == sampled
    assert served.server.status()["episodes/stops_kept"] == before + 2


def test_the_report_on_an_agent_names_its_stop_strings() -> None:
    seen = TrialObservations(
        command=["agent"], exit_code=0, seconds=1.0, dialects=Counter(a=1), features=Counter(stop=2), errors=[]
    )
    report = make_report(seen, stored=[], rows=[], causes=[], temperature=1.0, stops_kept=2)
    assert any("stay in the next prompt (2 here)" in advice for advice in report.advice)
