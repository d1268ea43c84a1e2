"""A tokenizer that knows more tokens than the model has rows for, as after `add_special_tokens` on a folder whose model was not
resized: whatever holds such a token is refused, in every dialect, and never reaches the engine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from configs.schema import RolloutConfig
from tests.support.server_parts import ServerThread

WORD = "<extra>"
BAD = f"say {WORD} m"
TURN = [{"role": "user", "content": BAD}]


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    folder = tmp_path_factory.mktemp("models") / "more_tokens"
    shutil.copytree(tiny_model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<spare>", WORD]})
    tokenizer.save_pretrained(folder)
    thread = ServerThread(folder, rollout=RolloutConfig(max_tokens=32, max_model_len=512))
    thread.start()
    yield thread
    thread.stop()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": TURN}),
        ("/v1/chat/completions", {"messages": TURN, "stream": True}),
        ("/v1/completions", {"prompt": BAD}),
        ("/v1/completions", {"prompt": [1, 513]}),
        ("/v1/responses", {"input": BAD, "store": False}),
        ("/v1/messages", {"messages": TURN, "max_tokens": 8}),
        ("/v1beta/models/policy:generateContent", {"contents": [{"role": "user", "parts": [{"text": BAD}]}]}),
        ("/generate", {"prompt_ids": [1, 513]}),
    ],
)
def test_a_token_without_a_row_is_refused_before_the_engine(served: ServerThread, path: str, body: dict) -> None:
    served.engine.prompts.clear()
    _, client = served.lease()
    with served.http(client.api_key) as http:
        reply = http.post(path, json={"model": "policy", **body} if path.startswith("/v1/") else body)
    assert (reply.status_code, served.engine.prompts) == (400, [])
    assert "the model's vocabulary of 512, got 513 ('<extra>')" in reply.text


def test_a_number_that_is_no_token_is_refused_too(served: ServerThread) -> None:
    _, client = served.lease()
    with served.http(client.api_key) as http:
        reply = http.post("/v1/completions", json={"model": "policy", "prompt": [1, 2**40]})
    assert reply.status_code == 400


def test_a_later_turn_is_refused_and_the_episode_goes_on(served: ServerThread) -> None:
    served.engine.answer = lambda _: served.ids("ok")
    _, client = served.lease()
    with served.http(client.api_key) as http:
        messages = [{"role": "user", "content": "Hi"}]
        first = http.post("/v1/chat/completions", json={"model": "policy", "messages": messages})
        messages += [first.json()["choices"][0]["message"], *TURN]
        assert http.post("/v1/chat/completions", json={"model": "policy", "messages": messages}).status_code == 400
        messages[-1] = {"role": "user", "content": "And?"}
        assert http.post("/v1/chat/completions", json={"model": "policy", "messages": messages}).status_code == 200
