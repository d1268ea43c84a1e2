"""A server that was restarted: the same keys, the same episodes, the exact tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import openai
import pytest

from buffers.ledger.ledger import Ledger
from configs.schema import RolloutConfig
from mocked_server.conversation.live_episodes import memo_of
from mocked_server.keys import KeyRing, make_secret
from tests.mocked_server.conversation.test_continuation import NEXT, TOOLS, USER, add, chat, episode
from tests.support.buffer_parts import make_round
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
    again, late = (
        openai.OpenAI(base_url=f"{second.server.base_url}/v1", api_key=one.api_key) for one in (client, done)
    )
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
    again.chat.completions.create(model="policy", messages=messages)
    rounds = second.stored(episode)
    assert [(round_.round_index, round_.parent) for round_ in rounds] == [(0, None), (1, 0)]
    assert rounds[0].sampled_ids.tolist()[: len(odd)] == odd
    expected = [*whole_prompt(rounds, rounds[0]), *rounds[0].sampled_ids, *rounds[1].tail_ids]
    assert second.engine.prompts == [list(map(int, expected))]
    with pytest.raises(openai.APIStatusError):
        late.models.list()
    with second.http(second.server.keys.scorer) as http:
        assert http.post("/scores", json={"episode_id": episode, "score": 0.5}).json()["stored"] is True
        assert http.post("/scores", json={"episode_id": scored, "score": 1.0}).json()["stored"] is False
    assert second.pool.metrics()["pool/running"] == 0 and second.ledger.imbalance() == 0
    batch = second.ledger.claim(2, min_version=0).result()
    assert batch is not None and [row.score for row in batch.rows] == [0.5, 1.0]
    assert np.array_equal(batch.rows[0].ids, [*expected, *rounds[1].sampled_ids])
    for opened in (again, late):
        opened.close()
    second.stop()


def test_rounds_are_remembered_as_they_were_kept() -> None:
    before = episode()
    asked = chat(USER, asked=TOOLS)
    root = add(before, 1, 2, 3, num_sampled=2, chat=asked)
    stored = [
        make_round("1-0-0", index=0, tail=[1], sampled=[2, 3]),
        make_round("1-0-0", index=1, parent=0, tail=[4], sampled=[5], finish_reason="abort"),
        make_round("1-0-0", index=2, parent=0, tail=[6], sampled=[7], finish_reason="length"),
        make_round("1-0-0", index=3, tail=[8], sampled=[9]),
    ]
    stored[0] = replace(stored[0], memo=memo_of(asked))
    stored[2] = replace(stored[2], memo=memo_of(chat(NEXT)))
    live = episode()
    live.restore(stored, decode=lambda ids: f"text of {ids}")
    first, second, third = live.rounds
    assert [each.round_index for each in live.rounds] == [0, 2, 3] and live.roots == [first, third]
    assert first.children == [second] and second.parent is first and third.children == []
    assert [each.ids.tolist() for each in live.rounds] == [[1, 2, 3], [6, 7], [8, 9]]
    assert [each.num_sampled for each in live.rounds] == [2, 1, 1] and second.total == 5
    assert [each.text for each in live.rounds] == ["text of [2, 3]", "text of [7]", "text of [9]"]
    assert [each.finish_reason for each in live.rounds] == ["stop", "length", "stop"]
    assert root.asked is not None and first.asked is not None and third.asked is None
    assert (first.asked.inputs, first.asked.identity) == (root.asked.inputs, root.asked.identity)
    assert (first.asked.template_kwargs, first.asked.tool_choice) == ({}, None)
    assert live.by_history == {asked.digests[-1]: [first], chat(NEXT).digests[-1]: [second]}


def test_a_memo_is_the_digest_of_a_history_and_of_what_it_was_asked_with() -> None:
    asked = chat(USER, NEXT, USER, asked=TOOLS)
    assert memo_of(asked) == asked.digests[3] + TOOLS.inputs + TOOLS.identity and len(memo_of(asked)) == 64
    assert memo_of(None) == b""
