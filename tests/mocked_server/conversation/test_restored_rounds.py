"""A server that was restarted: the same keys, the same episodes, the exact tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openai
import pytest

from buffers.ledger.ledger import Ledger
from configs.schema import RolloutConfig
from mocked_server.keys import KeyRing, make_secret
from tests.support.server_parts import ServerThread, whole_prompt


def serve(model: Path, folder: Path, *, resume_episodes: bool) -> ServerThread:
    thread = ServerThread(
        model,
        rollout=RolloutConfig(max_tokens=32, max_model_len=512),
        ledger=Ledger(folder / "ledger.sqlite", resume_episodes=resume_episodes),
        keys=KeyRing(make_secret(folder / "server.key")),
    )
    thread.start()
    return thread


@pytest.mark.slow  # two servers of its own
def test_running_episodes_go_on_after_a_restart_with_the_same_key_and_the_exact_tokens(
    tiny_model: Path, tmp_path: Path
) -> None:
    first = serve(tiny_model, tmp_path, resume_episodes=False)
    episode, client = first.lease()
    scored, done = first.lease()
    # Letter by letter: no tokenizer would write the answer like this again.
    odd = [token for letter in "north" for token in first.ids(letter, end=False)]
    assert odd != first.ids("north", end=False)
    first.engine.answer = lambda _: [*odd, first.tokenizer.eos_token_id]
    messages = [{"role": "user", "content": "Where?"}]
    said = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
    done.chat.completions.create(model="policy", messages=messages)
    with first.http(first.server.keys.scorer) as http:
        assert http.post("/scores", json={"episode_id": scored, "score": 1.0}).status_code == 200
    first.stop()

    second = serve(tiny_model, tmp_path, resume_episodes=True)
    again = client.with_options(base_url=f"{second.server.base_url}/v1")
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
    again.chat.completions.create(model="policy", messages=messages)
    rounds = second.stored(episode)
    assert [(round_.round_index, round_.parent) for round_ in rounds] == [(0, None), (1, 0)]
    assert rounds[0].sampled_ids.tolist()[: len(odd)] == odd
    expected = [*whole_prompt(rounds, rounds[0]), *rounds[0].sampled_ids, *rounds[1].tail_ids]
    assert second.engine.prompts == [list(map(int, expected))]
    with pytest.raises(openai.APIStatusError):
        done.with_options(base_url=f"{second.server.base_url}/v1").models.list()
    with second.http(second.server.keys.scorer) as http:
        assert http.post("/scores", json={"episode_id": episode, "score": 0.5}).json()["stored"] is True
        assert http.post("/scores", json={"episode_id": scored, "score": 1.0}).json()["stored"] is False
    assert second.pool.metrics()["pool/running"] == 0 and second.ledger.imbalance() == 0
    batch = second.ledger.claim(2, min_version=0).result()
    assert batch is not None and [row.score for row in batch.rows] == [0.5, 1.0]
    assert np.array_equal(batch.rows[0].ids, [*expected, *rounds[1].sampled_ids])
    second.stop()
