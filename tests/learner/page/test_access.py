"""Rules of who may see the page: a link opens once, the admin key opens, no other key does; and strict headers on every answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from learner.page.run_set import RunSet
from learner.page.serve import COOKIE, POLICY, Access, admin_keys, build_app
from mocked_server.keys import KeyRing, make_secret
from tests.learner.page.page_parts import make_run

PORT = 8123
HERE = f"http://127.0.0.1:{PORT}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def page(run: Path) -> Iterator[tuple[Access, list[str]]]:
    runs, links = RunSet([run], meanings={}), ["first"]
    app = build_app(runs, default="seen", about={})
    yield Access(app, port=PORT, links=["first"], admin_keys=lambda: admin_keys([run]), new_link=links.append), links
    runs.close()


def browser(page: Access) -> TestClient:
    return TestClient(page, base_url=HERE)


def test_a_link_opens_once_and_gives_a_cookie_that_scripts_do_not_see(page):
    access, links = page
    mine, other = browser(access), browser(access)
    assert mine.get("/api/runs").status_code == 401
    opened = mine.get("/open/first")
    assert opened.status_code == 200 and 'http-equiv="refresh" content="0; url=/"' in opened.text
    cookie = opened.headers["set-cookie"]
    assert cookie.startswith(f"{COOKIE}_{PORT}=") and cookie.endswith("; Path=/; HttpOnly; SameSite=Strict")
    assert mine.get("/api/runs").status_code == 200
    again = other.get("/open/first")
    assert again.status_code == 401 and "set-cookie" not in again.headers and "opens once" in again.text
    assert mine.get("/open/first").status_code == 200, "who is in already goes on to the page"
    assert len(links) == 2 and other.get(f"/open/{links[1]}").status_code == 200
    assert other.get("/api/runs").status_code == 200 and mine.get("/api/runs").status_code == 200


def test_the_admin_key_opens_and_no_other_key_does(page, run):
    client = browser(page[0])
    keys = KeyRing(make_secret(run / "server.key"))

    def status(authorization: str) -> int:
        return client.get("/api/runs", headers={"authorization": authorization}).status_code

    assert status(f"Bearer {keys.admin}") == 200
    others = [keys.scorer, keys.worker, keys.episode_key("1-0-0"), KeyRing().admin, "", keys.admin[:-1]]
    assert [status(f"Bearer {key}") for key in others] == [401] * 6
    assert status(f"Basic {keys.admin}") == 401
    assert client.get("/api/runs", cookies={f"{COOKIE}_{PORT}": keys.admin}).status_code == 401
    assert client.get("/api/runs", params={"key": keys.admin}).status_code == 401


@pytest.mark.parametrize(
    "path", ["/", "/static/app.js", "/api/runs", "/api/events", "/api/runs/seen/episodes/1-0-0/tokens", "/x"]
)
def test_without_link_or_key_nothing_is_told(page, path):
    answer = browser(page[0]).get(path)
    assert answer.status_code == 401 and "one-time link" in answer.text and "seen" not in answer.text


def test_every_answer_has_strict_headers(page):
    client = browser(page[0])
    client.get("/open/first")
    for path in ("/", "/static/app.js", "/api/runs", "/api/none", "/open/none", "/static/../serve.py"):
        headers = client.get(path).headers
        assert headers["content-security-policy"] == POLICY and "default-src 'self'" in POLICY
        assert "unsafe" not in POLICY and headers["x-content-type-options"] == "nosniff", path
        assert headers["cache-control"] == "no-store" and headers["x-frame-options"] == "DENY"
        assert headers["referrer-policy"] == "no-referrer" and headers["cross-origin-resource-policy"] == "same-origin"


def test_what_could_change_something_or_comes_under_another_name_is_refused(page):
    client = browser(page[0])
    client.get("/open/first")
    assert [client.request(method, "/api/runs").status_code for method in ("POST", "PUT", "DELETE", "OPTIONS")] == [
        405
    ] * 4
    assert client.head("/api/runs").status_code == 200
    for host in ("evil.example", f"evil.example:{PORT}", "127.0.0.1", f"127.0.0.1:{PORT + 1}"):
        assert client.get("/api/runs", headers={"host": host}).status_code == 421, host
    assert client.get("/api/runs", headers={"host": f"localhost:{PORT}"}).status_code == 200


def test_files_beside_the_page_are_not_served(page):
    client = browser(page[0])
    client.get("/open/first")
    for path in ("/static/../serve.py", "/static/%2e%2e/serve.py", "/static/..%2f..%2fcli.py", "/static//etc/passwd"):
        assert client.get(path).status_code == 404, path


def test_keys_are_read_and_never_made(tmp_path):
    run = make_run(tmp_path)
    assert admin_keys([run]) == [] and not (run / "server.key").exists()
    (run / "server.key").write_bytes(b"short")
    assert admin_keys([run]) == []
