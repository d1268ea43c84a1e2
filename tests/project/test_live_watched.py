"""A whole live run that watches another model, learns from it by SFT, and then answers in its place."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import openai
import pytest

from tests.project.test_live import Live, ask, until
from tests.support.scripted_upstream import KEY, asked_of, scripted_upstream

WATCHED = 24


@pytest.mark.slow
@pytest.mark.long(minutes=3)
def test_what_another_model_says_is_learned_and_then_said_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPSTREAM_KEY", KEY)
    live = Live(tmp_path)
    with scripted_upstream() as url:
        live.words += [
            f"serve.upstream.url={url}", "serve.upstream.key_variable=UPSTREAM_KEY", "serve.upstream.model=large",
            "serve.upstream.terms_allow_learning=true", f"serve.upstream.lesson_sessions={WATCHED - 4}",
            "serve.upstream.step=1.0", "sft.epochs=12", "sft.lr=1e-2",
        ]  # fmt: skip
        key = live.command("serve", "keys", "add", "ann", *live.words).strip()
        live.start()
        client = openai.OpenAI(base_url=f"{live.url}/v1", api_key=key)
        for number in range(WATCHED):
            reply = ask(client, f"w{number % 4}")
            assert (reply.model, reply.choices[0].message.content) == ("large", f"up: w{number % 4}")
            said = {"response_id": reply.id, "score": 1.0}
            answer = httpx.post(f"{live.url}/feedback", json=said, headers={"Authorization": f"Bearer {key}"})
            assert answer.json()["trains"] is False
        served = live.folder / "versions" / "served.json"
        until(lambda: served.is_file() and json.loads(served.read_text())["version"] > 0, live)
        asked = len(asked_of(url))
        own = ask(client, "w0", temperature=0.0)
        assert (asked, own.model) == (WATCHED, "policy")
        assert "hm" in str(
            own.choices[0].message.content
        )  # it thinks first, as it was shown, and is cut after six tokens
        assert len(asked_of(url)) == asked
        assert key not in json.dumps(asked_of(url))
        (lesson,) = [line for line in live.lines if "sft/loss_last" in line]
        assert lesson["sft/loss_last"] < lesson["sft/loss_first"] and lesson["sft/conversations"] >= WATCHED - 4
        assert (lesson["upstream/requests"], lesson["upstream/down"]) == (WATCHED, 0)
        (version,) = [each for each in live.gated if each["state"] == "promoted"]
        compared = {"policy": None, "policy_sessions": 0, "upstream": 1.0, "upstream_sessions": WATCHED}
        assert version["compared"] == compared
        assert f"upstream: 1.000 in {WATCHED} sessions" in live.command("serve", "status", str(live.folder))
    files = [path for path in live.folder.rglob("*") if path.is_file()]
    assert not [path.name for path in files if KEY.encode() in path.read_bytes()]
