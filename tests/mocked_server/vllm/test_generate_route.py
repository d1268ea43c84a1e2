"""`POST /generate`: token ids in and out, recorded under the episode whose key came with it."""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import numpy as np
import pytest

from agents import server_manager
from agents.server_manager import AsyncLLMServerManager, ServerUnavailable
from buffers.errors import AgentError, EpisodeError
from tests.support.patience import PATIENCE_S
from tests.support.server_parts import LOGPROB


def post(served, key, body, path="/generate"):
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{served.server.base_url}{path}", json=body, headers=headers, timeout=PATIENCE_S)


def generate(served, key, prompt_ids, **sampling_params):
    async def run():
        server = AsyncLLMServerManager(served.server.base_url, worker_key=served.server.keys.worker)
        try:
            return await server.keyed(key).generate("episode", prompt_ids=prompt_ids, sampling_params=sampling_params)
        finally:
            await server.close()

    return asyncio.run(run())


def test_a_generation_is_a_round_of_the_keys_episode(served):
    served.engine.version = 3
    episode, client = served.lease()
    prompt = served.ids("What now?", end=False)
    output = generate(served, client.api_key, prompt, temperature=0.7, top_p=0.5, max_tokens=16)
    assert output.token_ids == served.ids("ok")
    assert output.log_probs == [LOGPROB] * len(output)
    assert output.versions == [3] * len(output)
    assert output.stop_reason == "completed"
    more = prompt + output.token_ids + served.ids("And then?", end=False)
    generate(served, client.api_key, more)
    first, second = served.stored(episode)
    assert first.tail_ids.tolist() == prompt
    assert (second.parent, second.tail_ids.tolist()) == (0, served.ids("And then?", end=False))
    assert served.engine.params[0].temperature == 1.0, "the run's"
    assert served.engine.params[0].top_p == 1.0


def test_the_workers_key_generates_for_nobodys_records(served):
    before = served.ledger.counts()["rounds"]
    output = generate(served, "", served.ids("hello", end=False), max_tokens=1)
    assert (len(output), output.stop_reason) == (1, "length")
    assert served.ledger.counts()["rounds"] == before


def test_other_keys_open_nothing(served):
    body = {"prompt_ids": [1]}
    keys = served.server.keys
    assert [post(served, key, body).status_code for key in ("x", "us-1-0-0-bad", keys.scorer, keys.admin)] == [401] * 4
    _, client = served.lease()
    assert post(served, client.api_key, {}, path="/sleep").status_code == 401
    assert post(served, keys.worker, {}, path="/sleep").status_code == 200
    assert post(served, keys.worker, {}, path="/wake_up").status_code == 200


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompt_ids": []}, "prompt_ids must be a list of token ids, not empty"),
        ({"prompt_ids": [1], "model": "solver"}, "and a model in a run with roles"),
        ({"prompt_ids": [1, "2"]}, "prompt_ids must be"),
        ({"prompt_ids": [True]}, "prompt_ids must be"),
        ({"prompt_ids": [1, 99_999]}, "vocabulary of 512, got 99999"),
        ({"prompt_ids": [1, 2**40]}, "prompt_ids must be"),
        ({"prompt_ids": [-1]}, "vocabulary of 512, got -1"),
        ({"prompt_ids": [1], "sampling_params": {"max_token": 3}}, "did you mean 'max_tokens'"),
        ({"prompt_ids": [1], "sampling_params": {"max_tokens": -3}}, "max_tokens"),
        ({"prompt_ids": [1], "prompt": "x"}, "the body must hold"),
        ({"prompt_ids": [1] * 600}, "maximum context length is 512 tokens"),
        ([1], "the body must hold"),
    ],
)
def test_what_cannot_be_generated_is_refused_by_name(served, body, says):
    _, client = served.lease()
    reply = post(served, client.api_key, body)
    assert reply.status_code == 400
    assert pytest.importorskip("re").search(says, reply.json()["error"]["message"])


def test_a_token_that_is_left_out_stays_in_the_row_and_is_not_trained(served):
    episode, client = served.lease()
    prompt = served.ids("What now?", end=False)
    output = generate(served, client.api_key, prompt)
    (live,) = served.server.episodes.get(episode).rounds
    assert live.round_index == 0
    served.ledger.mask_tokens(episode, {0: np.array([1] + [0] * (len(output) - 1))}).result(PATIENCE_S)
    served.call(served.server.notify_score(episode, 1.0))
    batch = served.ledger.claim(served.ledger.counts()["groups/ready"], min_version=0).result(PATIENCE_S)
    served.ledger.release(batch.lease_id).result(PATIENCE_S)
    rows = [row for row in batch.rows if row.episode_id == episode]
    assert [row.ids.tolist() for row in rows] == [prompt + output.token_ids]
    assert [row.mask.tolist() for row in rows] == [[0] * len(prompt) + [1] + [0] * (len(output) - 1)]
    assert rows[0].logprobs[rows[0].mask == 0].tolist() == [0.0] * (len(rows[0].ids) - 1)
    with pytest.raises(EpisodeError, match="ended"):
        served.ledger.mask_tokens(episode, {0: np.array([1])}).result(PATIENCE_S)


class Answers(BaseHTTPRequestHandler):
    """Each request gets the next of `statuses`, the last one again and again; 200 is an answer."""

    statuses: list[int]
    keys: list[str | None]

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.keys.append(self.headers["x-api-key"])
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        output = {"token_ids": [7], "log_probs": [-0.5], "stop_reason": "length", "versions": [2], "num_preempted": 0}
        body = json.dumps(output).encode() if status == 200 else b""
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_): ...


async def asked(statuses, *, patience_s):
    """What a server with these answers says to a request, and the keys that it was sent."""
    handler = type("Handler", (Answers,), {"statuses": list(statuses), "keys": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as listener:
        threading.Thread(target=listener.serve_forever).start()
        server = AsyncLLMServerManager(
            f"http://127.0.0.1:{listener.server_port}", worker_key="own", patience_s=patience_s
        )
        try:
            return await server.keyed("k").generate("a", prompt_ids=[1], sampling_params={}), handler.keys
        finally:
            await server.close()
            listener.shutdown()


@pytest.mark.seconds
def test_a_server_that_is_gone_is_told_apart_from_a_refusal(served):
    with pytest.raises(AgentError, match="vocabulary"):
        generate(served, "", [99_999])
    with pytest.raises(ServerUnavailable, match=r"did not answer within 0 s: .* answered 503"):
        asyncio.run(asked([503], patience_s=0.0))
    with pytest.raises(AgentError):
        asyncio.run(asked([500, 200], patience_s=PATIENCE_S))

    async def nowhere():
        await AsyncLLMServerManager("http://127.0.0.1:9", patience_s=0.0).generate(
            "a", prompt_ids=[1], sampling_params={}
        )

    with pytest.raises(ServerUnavailable, match="cannot be reached"):
        asyncio.run(nowhere())


async def test_a_request_is_sent_again_until_a_server_that_is_started_again_answers(monkeypatch):
    monkeypatch.setattr(server_manager, "PAUSE_S", 0.01)
    output, keys = await asked([503, 502, 200], patience_s=PATIENCE_S)
    assert (output.token_ids, output.log_probs, output.versions, output.stop_reason) == ([7], [-0.5], [2], "length")
    assert keys == ["k"] * 3
