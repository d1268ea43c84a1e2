"""What the page says of a run of `understudy serve`, and that feedback given there comes from the page itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from learner.page import serve
from learner.page.export import snapshot
from learner.page.run_set import RunSet
from learner.page.run_view import live_waits_of
from learner.page.serve import Access, build_app
from tests.learner.page.live_run import GATE, make_live_run
from tests.learner.page.page_parts import machine_line, make_run

PORT = 8124
HERE = f"http://127.0.0.1:{PORT}"
GIVEN = {"session": "now", "round_index": 0, "score": 1.0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_run(tmp_path, name="other")
    return make_live_run(tmp_path / "live")


@pytest.fixture
def client(folder: Path) -> Iterator[TestClient]:
    runs = RunSet([folder, folder.parent / "other"], meanings={})
    app = build_app(runs, default="live", about={})
    found = TestClient(Access(app, port=PORT, links=["first"], admin_keys=lambda: ["us-admin"]), base_url=HERE)
    found.get("/open/first")
    yield found
    runs.close()


def get(client: TestClient, path: str, **query: Any) -> Any:
    answer = client.get(f"/api/runs/live{path}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_sessions_have_user_client_state_and_what_was_said(client):
    found = get(client, "/episodes", sort="heard")
    shown = {one["episode_id"]: one["session"] for one in found["episodes"]}
    assert {name: (one["user"], one["state"], one["feedback"]) for name, one in shown.items()} == {
        "done": ("ann", "trained", 2), "gone": ("ann", "forgotten", 1), "late": ("ann", "waiting", 1),
        "now": ("bob", "open", 0), "side": ("bob", "open", 0),
    }  # fmt: skip
    assert (shown["done"]["name"], shown["done"]["client"], shown["side"]["is_side"]) == ("first", "codex/1", True)
    assert (shown["gone"]["name"], shown["gone"]["client"], shown["gone"]["heard_at"]) == ("", "", None)
    assert found["facets"]["user"] == {"ann": 3, "bob": 2}
    assert found["facets"]["session_state"] == {"open": 2, "trained": 1, "forgotten": 1, "waiting": 1}


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ({"user": "ann"}, {"done", "gone", "late"}), ({"session_state": "open,waiting"}, {"late", "now", "side"}),
        ({"feedback": "1"}, {"done", "gone", "late"}), ({"feedback": "0"}, {"now", "side"}), ({"q": "seco"}, {"late"}),
    ],
)  # fmt: skip
def test_sessions_are_chosen_by_user_state_feedback_and_name(client, query, wanted):
    assert {one["episode_id"] for one in get(client, "/episodes", **query)["episodes"]} == wanted


def test_a_session_has_its_feedback_and_what_it_ended_with_is_nobodys(client):
    found = get(client, "/episodes/done")
    assert [(one["judge"], one["value"], one["verdict"], one["is_settled"]) for one in found["scores"]] == [
        ("tests", 1.0, "stored", 0), ("", 1.0, "stored", 1), ("page", 0.0, "closed", 0),
    ]  # fmt: skip
    assert not any(one["is_settled"] for one in get(client, "/episodes/late")["scores"])
    assert "is open until something was said" in get(client, "/episodes/now")["why_untrained"]
    assert "side call" in get(client, "/episodes/side")["why_untrained"]
    assert get(client, "/episodes/gone")["rounds"][0]["sampled"] == 0


def test_versions_have_their_gate_what_was_served_and_who_is_on_which(client, folder):
    (folder / "versions" / "v6").mkdir()
    (folder / "versions" / "v6" / "version.json").write_text("{")
    found = get(client, "/versions")
    assert [(one["version"], one["state"]) for one in found["versions"]] == [
        (6, ""), (4, "refused"), (2, "promoted"), (0, "candidate")
    ]  # fmt: skip
    assert (found["served"], found["margin"], found["versions"][2]["gate"], found["versions"][3]["score"]) == (
        0,
        0.05,
        GATE,
        0.5,
    )
    assert [(one["version"], one["why"]) for one in found["history"]] == [(0, "by hand"), (2, "gate"), (0, "first")]
    assert [(one["version"], one["user"], one["number"]) for one in found["sessions"]] == [(2, "bob", 1)]


def test_a_live_run_waits_for_its_users_and_never_for_agents(client):
    idle = {"engines": [{"name": "e0", "is_up": True}], "prompts_waiting": 0, "generating": 0}
    found = live_waits_of(machine_line(**idle), sessions_per_step=8)
    assert [(one["who"], one["for"]) for one in found] == [
        ("learner", "feedback"), ("feedback", "users"), ("engines", "users")
    ]  # fmt: skip
    assert {one["for"] for one in get(client, "/machine")["now"]["waits"]} <= {"feedback", "users", "engines"}
    assert get(client, "/machine")["history"]["sessions"] == [1]


def test_feedback_goes_to_the_run_in_the_name_of_the_page(client, monkeypatch):
    asked = []

    async def ask_run(*given: Any) -> dict[str, Any]:
        asked.append(given)
        return {"episode_id": "now", "trains": False}

    monkeypatch.setattr(serve, "ask_run", ask_run)
    own = {"origin": HERE}
    answer = client.post("/api/runs/live/feedback", json={**GIVEN, "source": "me", "user": "x"}, headers=own)
    assert (answer.status_code, answer.json()["trains"]) == (200, False)
    ((run, *what),) = asked
    assert (run.name, what) == ("live", ["scorer", "feedback", {**GIVEN, "source": "page"}])
    wrong = client.post("/api/runs/live/feedback", json=["now"], headers=own)
    assert (wrong.status_code, len(asked)) == (422, 1)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 403), ({"origin": "https://evil.example"}, 403), ({"origin": "null"}, 403),
        ({"origin": f"http://127.0.0.1:{PORT + 1}"}, 403), ({"origin": f"http://localhost:{PORT}"}, 403),
        ({"origin": HERE, "content-type": "text/plain"}, 403), ({"origin": HERE, "content-length": "99999999"}, 403),
        ({"origin": "https://evil.example", "authorization": "Bearer us-admin"}, 403),
        ({"authorization": "Bearer us-admin"}, 502), ({"origin": HERE}, 502),
        ({"origin": f"https://127.0.0.1:{PORT}"}, 502),
    ],
)  # fmt: skip
def test_feedback_of_another_page_is_refused(client, headers, status):
    """502: it was let in, and no run answers in this test."""
    sent = {"content-type": "application/json", **headers}
    answer = client.post("/api/runs/live/feedback", content=json.dumps(GIVEN), headers=sent)
    assert answer.status_code == status, answer.text


def test_without_a_link_nothing_is_written_and_nothing_but_feedback_ever(client):
    stranger = TestClient(client.app, base_url=HERE)
    assert stranger.post("/api/runs/live/feedback", json=GIVEN, headers={"origin": HERE}).status_code == 401
    assert client.post("/api/runs/live/versions", json={}, headers={"origin": HERE}).status_code == 405
    assert client.request("PUT", "/api/runs/live/feedback", json=GIVEN, headers={"origin": HERE}).status_code == 405


def test_a_run_that_serves_nobody_or_has_ended_takes_no_feedback(client, folder):
    answer = client.post("/api/runs/other/feedback", json=GIVEN, headers={"origin": HERE})
    assert (answer.status_code, "serves no users" in answer.text) == (409, True)
    (folder / "summary.json").write_text("{}")
    answer = client.post("/api/runs/live/feedback", json=GIVEN, headers={"origin": HERE})
    assert (answer.status_code, "a run that is finished" in answer.text) == (409, True)


def test_an_exported_page_has_sessions_versions_and_feedback(folder):
    runs = RunSet([folder], meanings={})
    found = snapshot(runs, episodes=8)["runs"]["live"]
    runs.close()
    assert found["run"]["serves"] and found["versions"]["served"] == 0
    assert {one["episode_id"] for one in found["episodes"]} >= {"done", "late", "now"}
    assert found["details"]["done"]["scores"][0]["hint"] == "Fine."
