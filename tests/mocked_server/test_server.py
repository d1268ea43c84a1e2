"""The MockedServer over HTTP with the real OpenAI client, a scripted engine behind it."""

from __future__ import annotations

import asyncio
import threading

import openai
import pytest

from buffers.errors import ScoreError
from buffers.records import Task
from tests.support.patience import PATIENCE_S
from tests.support.server_parts import LOGPROB, whole_prompt

HELLO = [{"role": "user", "content": "Hello."}]


def chat(client, messages, **options):
    return client.chat.completions.create(model="policy", messages=messages, **options)


def test_a_round_is_recorded_as_the_engine_saw_it(served):
    served.engine.version = 7
    episode, client = served.lease()
    reply = chat(client, HELLO)
    assert reply.choices[0].message.content == "ok"
    assert reply.choices[0].finish_reason == "stop"
    (stored,) = served.stored(episode)
    assert stored.tail_ids.tolist() == served.engine.prompts[0]
    assert stored.tail_ids.tolist() == served.tokenizer.apply_chat_template(
        HELLO, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert stored.sampled_ids.tolist() == served.ids("ok")
    assert stored.logprobs.tolist() == [LOGPROB] * len(served.ids("ok"))
    assert set(stored.versions.tolist()) == {7}
    assert stored.parent is None


def test_the_next_round_continues_the_exact_tokens(served):
    # Letter by letter: a fresh rendering of the same text would encode it in fewer tokens.
    sampled = [i for letter in "north" for i in served.tokenizer.encode(letter)] + [served.tokenizer.eos_token_id]
    assert sampled != served.ids("north")
    served.engine.answer = lambda _: sampled
    episode, client = served.lease()
    messages = [*HELLO]
    for turn in range(3):
        reply = chat(client, messages)
        messages += [
            {"role": "assistant", "content": reply.choices[0].message.content},
            {"role": "user", "content": f"And {turn}?"},
        ]
    rounds = served.stored(episode)
    assert [r.parent for r in rounds] == [None, 0, 1]
    assert [whole_prompt(rounds, r).tolist() for r in rounds] == served.engine.prompts
    tail = served.tokenizer.decode(rounds[1].tail_ids)
    assert tail == "\n<|im_start|>user\nAnd 0?<|im_end|>\n<|im_start|>assistant\n"


def test_experts_are_asked_for_from_the_parents_last_token_on(served, monkeypatch):
    monkeypatch.setattr(served.generation, "records_experts", True)
    episode, client = served.lease()
    reply = chat(client, HELLO)
    chat(client, [*HELLO, {"role": "assistant", "content": reply.choices[0].message.content}, *HELLO])
    first, second = served.stored(episode)
    assert second.parent == 0
    begins = [params.routed_experts_prompt_start for params in served.engine.params]
    assert begins == [0, len(first.tail_ids) + len(first.sampled_ids) - 1]


def test_a_truncated_answer_is_continued_with_its_end_of_turn(served):
    served.engine.answer = lambda _: served.ids("o", end=False)
    episode, client = served.lease()
    reply = chat(client, HELLO)
    chat(client, [*HELLO, {"role": "assistant", "content": reply.choices[0].message.content}, *HELLO])
    rounds = served.stored(episode)
    assert rounds[1].parent == 0
    assert rounds[1].tail_ids[0] == served.tokenizer.eos_token_id


def test_an_edited_history_starts_a_new_branch(served):
    episode, client = served.lease()
    chat(client, HELLO)
    chat(client, [*HELLO, {"role": "assistant", "content": "something else"}, *HELLO])
    assert [r.parent for r in served.stored(episode)] == [None, None]
    live = served.server.episodes.get(episode)
    assert live.branch_causes == {"content_edited": 1}


def test_content_parts_and_null_fields_are_the_same_history(served):
    episode, client = served.lease()
    chat(client, HELLO)
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello."}]}]
    assistant = {"role": "assistant", "content": [{"type": "text", "text": "ok"}], "refusal": None, "tool_calls": None}
    chat(client, [*parts, assistant, *HELLO])
    assert [r.parent for r in served.stored(episode)] == [None, 0]


def test_streaming_delivers_the_first_token_before_the_last_is_sampled(served):
    served.engine.answer = lambda _: served.ids("The exit is north.")
    served.engine.gate.clear()
    episode, client = served.lease()
    stream = chat(client, HELLO, stream=True)
    text = ""
    for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        if text:
            break  # the engine stands at the gate with all but one token still to come
    served.engine.gate.set()
    text += "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == "The exit is north."
    (stored,) = served.stored(episode)
    assert stored.sampled_ids.tolist() == served.ids("The exit is north.")


def test_plain_completions_are_recorded_and_continued(served):
    episode, client = served.lease()
    first = client.completions.create(model="policy", prompt="The exit is")
    prompt_ids = served.engine.prompts[0]
    client.completions.create(model="policy", prompt=[*prompt_ids, *served.ids("ok"), 300])
    assert first.choices[0].text == "ok"
    rounds = served.stored(episode)
    assert [r.parent for r in rounds] == [None, 0]
    assert rounds[1].tail_ids.tolist() == [300]


def test_the_run_pins_the_sampling_distribution(served):
    _, client = served.lease()
    chat(client, HELLO, temperature=0.1, top_p=0.5, max_tokens=3)
    (params,) = served.engine.params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (1.0, 1.0, 0, 3)


def test_two_choices_are_two_sibling_rounds(served):
    episode, client = served.lease()
    reply = chat(client, HELLO, n=2)
    assert len(reply.choices) == 2
    rounds = served.stored(episode)
    assert [r.parent for r in rounds] == [None, None]


def test_models_lists_the_policy(served):
    _, client = served.lease()
    assert [m.id for m in client.models.list()] == ["policy"]


def test_a_client_that_hangs_up_leaves_a_round_of_what_it_may_have_read(served):
    served.engine.gate.clear()
    served.engine.answer = lambda _: served.ids("The exit is north.")
    episode, client = served.lease()
    before = served.generation.stats.aborted
    stream = chat(client, HELLO, stream=True)
    next(iter(stream))
    stream.close()
    served.call(_until(lambda: served.generation.stats.aborted == before + 1))
    served.engine.gate.set()
    (stored,) = served.stored(episode)
    assert stored.finish_reason == "abandoned" and len(stored.sampled_ids) == 1
    assert served.ledger.counts()["rounds"] >= 1


async def _until(condition):
    import asyncio

    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


def test_an_unknown_key_opens_nothing(served):
    client = openai.OpenAI(base_url=f"{served.server.base_url}/v1", api_key="us-1-0-0-" + "0" * 32, max_retries=0)
    with pytest.raises(openai.AuthenticationError, match="api_key that came with the task"):
        chat(client, HELLO)
    for key in (served.server.keys.worker, served.server.keys.scorer, served.server.keys.admin):
        other = openai.OpenAI(base_url=f"{served.server.base_url}/v1", api_key=key, max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            chat(other, HELLO)
    assert served.engine.prompts == []


def test_a_scored_episode_takes_no_more_requests(served):
    episode, client = served.lease()
    chat(client, HELLO)
    with served.http(served.server.keys.scorer) as http:
        assert http.post("/scores", json={"episode_id": episode, "score": 1.0}).status_code == 200
    with pytest.raises(openai.PermissionDeniedError, match="has ended"):
        chat(client, HELLO)


def test_the_key_may_be_in_the_path(served):
    episode, client = served.lease()
    other = openai.OpenAI(base_url=f"{served.server.base_url}/e/{client.api_key}/v1", api_key="anything")
    chat(other, HELLO)
    assert len(served.stored(episode)) == 1


def test_scores_are_idempotent_and_conflicts_refused(served):
    episode, client = served.lease()
    chat(client, HELLO)
    with served.http(served.server.keys.scorer) as http:
        send = lambda score: http.post("/scores", json={"episode_id": episode, "score": score})  # noqa: E731
        assert send(0.5).json() == {"episode_id": episode, "stored": True}
        assert send(0.5).json() == {"episode_id": episode, "stored": False}
        assert send(0.75).status_code == 409
    assert served.ledger.counts()["scored/ready"] >= 1


@pytest.mark.seconds
@pytest.mark.parametrize(
    "body",
    [
        '{"episode_id": "E", "score": NaN}',
        '{"episode_id": "E", "score": Infinity}',
        '{"episode_id": "E", "score": 1e999}',
        '{"episode_id": "E", "score": "1.0"}',
        '{"episode_id": "E", "score": true}',
        '{"episode_id": "E"}',
        '{"episode_id": "E", "score": 1.0, "failed": "both"}',
        '{"episode_id": "E", "score": 1.0, "extra": 1}',
        "not json",
        "[]",
    ],
)
def test_a_score_that_is_not_a_finite_number_is_refused(served, body):
    episode, client = served.lease()
    chat(client, HELLO)
    with served.http(served.server.keys.scorer) as http:
        answer = http.post("/scores", content=body.replace("E", episode), headers={"content-type": "application/json"})
    assert answer.status_code in (400, 422), answer.text
    assert "error" in answer.json()
    assert served.server.episodes.get(episode).episode_id == episode


def test_an_agent_cannot_score_itself(served):
    episode, client = served.lease()
    chat(client, HELLO)
    for key in (client.api_key, served.server.keys.worker, "", "Bearer"):
        with served.http(key) as http:
            assert http.post("/scores", json={"episode_id": episode, "score": 1.0}).status_code == 401
            assert http.get("/episode", headers={"X-Episode-Key": client.api_key}).status_code == 401
            assert http.get("/status").status_code == 404
            assert http.get(f"{served.server.admin_url}/status").status_code == 401


def test_the_scorer_sees_the_ground_truth_and_the_agent_does_not(served):
    episode, client = served.lease(ground_truth="north")
    with served.http(served.server.keys.scorer) as http:
        view = http.get("/episode", headers={"X-Episode-Key": client.api_key}).json()
    assert view["episode_id"] == episode
    assert view["task"]["ground_truth"] == "north"
    verl = {
        "index": 3,
        "answer": "#### north-secret",
        "tools_kwargs": {"t": {"create_kwargs": {"truth": "north-secret"}}},
    }
    task = {
        "task_id": "leak-check",
        "prompt": "Hi",
        "reward_model": {"ground_truth": "north-secret"},
        "extra_info": verl,
    }
    with served.http(served.server.keys.admin) as http:
        assert http.post("/tasks", json={"tasks": [task]}).json() == {"added": 1}
    with served.http(served.server.keys.worker) as http:
        leased = http.get("/tasks?wait=5")
    assert leased.json()["task"]["task_id"] == "leak-check"
    assert "north-secret" not in leased.text and leased.json()["task"]["extra_info"] == {"index": 3}


def test_a_lease_has_the_seed_of_its_group(served):
    with served.http(served.server.keys.admin) as http:
        http.post("/tasks", json={"tasks": [{"task_id": f"seed-{n}", "prompt": "Hi"} for n in range(2)]})
    with served.http(served.server.keys.worker) as http:
        leases = [http.get("/tasks?wait=5").json() for _ in range(2)]
    live = [served.server.episodes.get(lease["episode_id"]).episode for lease in leases]
    assert [lease["seed"] for lease in leases] == [episode.seed for episode in live]
    assert leases[0]["seed"] != leases[1]["seed"]


def test_no_task_is_204_and_a_bad_task_row_is_named(served):
    with served.http(served.server.keys.worker) as http:
        assert http.get("/tasks?wait=0").status_code == 204
    with served.http(served.server.keys.admin) as http:
        answer = http.post("/tasks", json={"tasks": [{"task_id": "a", "prompt": "ok"}, {"task_id": "b", "prompt": 3}]})
    assert answer.status_code == 422
    assert "row 1" in answer.json()["error"]["message"] and "prompt" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", "{", 400),
        ("/v1/chat/completions", '{"model": "policy"}', 400),
        ("/v1/chat/completions", '{"model": "policy", "messages": "hello"}', 400),
        ("/v1/chat/completions", '{"model": "other", "messages": [{"role": "user", "content": "x"}]}', 404),
        ("/v1/completions", '{"model": "policy", "prompt": {"a": 1}}', 400),
    ],
)
def test_malformed_requests_get_an_openai_error_and_leave_no_round(served, path, body, status):
    episode, client = served.lease()
    with served.http(client.api_key) as http:
        answer = http.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]
    assert served.stored(episode) == []


def test_a_prompt_that_is_too_long_is_refused(served):
    episode, client = served.lease()
    with pytest.raises(openai.BadRequestError, match="512"):
        chat(client, [{"role": "user", "content": "word " * 2000}])
    assert served.stored(episode) == []


def test_routes_of_vllm_that_are_not_model_calls_are_gone(served):
    _, client = served.lease()
    with served.http(client.api_key) as http:
        for path in (
            "/tokenize",
            "/metrics",
            "/v1/load_lora_adapter",
            "/openapi.json",
            "/scale_elastic_ep",
            "/invocations",
        ):
            assert http.post(path).status_code in (404, 405), path
        assert http.get("/health").status_code == 200


def test_concurrent_episodes_never_share_a_round(served):
    served.engine.answer = lambda prompt: [*prompt[-12:-5], served.tokenizer.eos_token_id]
    leases = [served.lease() for _ in range(16)]
    texts = [f"secret {i:02d}" for i in range(16)]
    replies = [""] * 16

    def run(i: int) -> None:
        replies[i] = chat(leases[i][1], [{"role": "user", "content": texts[i]}]).choices[0].message.content or ""

    threads = [threading.Thread(target=run, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, (episode, _) in enumerate(leases):
        (stored,) = served.stored(episode)
        assert texts[i] in served.tokenizer.decode(stored.tail_ids)


@pytest.mark.seconds
def test_plain_prompts_are_answered_and_scored_without_an_agent(served):
    seen = []
    served.score_fn = lambda task, text: seen.append((task.task_id, text)) or 1.0
    before = served.ledger.counts()["episodes/scored"]
    row = {"task_id": f"plain-{before}", "prompt": "2 + 2 =", "agent_name": "single_turn_agent"}
    with served.http(served.server.keys.admin) as http:
        http.post("/tasks", json={"tasks": [row]})
    with served.http(served.server.keys.worker) as http:
        assert http.get("/tasks?wait=0.5").status_code == 204
    served.call(_until(lambda: served.ledger.counts()["episodes/scored"] == before + 1))
    assert seen == [(row["task_id"], "ok")]


def test_a_scorer_may_take_its_time_and_its_failure_is_the_episodes(served):
    async def slow(task, text):
        await asyncio.sleep(0)
        if task.ground_truth == "broken":
            raise ScoreError("data.scorer is broken")
        return 0.5

    served.score_fn = slow
    before = served.ledger.counts()
    number = before["episodes/scored"]
    row = {"prompt": "2 + 2 =", "agent_name": "single_turn_agent"}
    rows = [{**row, "task_id": f"slow-{number}"}, {**row, "task_id": f"broken-{number}"}]
    rows[1]["reward_model"] = {"ground_truth": "broken"}
    with served.http(served.server.keys.admin) as http:
        http.post("/tasks", json={"tasks": rows})
    served.call(_until(lambda: served.ledger.counts().get("failed/scorer", 0) == 1 + before.get("failed/scorer", 0)))
    served.call(_until(lambda: served.ledger.counts()["episodes/scored"] == number + 1))


def test_a_greedy_episode_is_sampled_at_temperature_0_and_others_at_the_runs(served):
    task = Task(task_id=f"val/{served.ledger.counts()['groups/validating']}", prompt=HELLO)
    served.ledger.open_validation([task], group_size=1, greedy=True).result()
    leased = served.call(served.server.lease_episode(wait_s=5.0))
    client = openai.OpenAI(base_url=f"{served.server.base_url}/v1", api_key=leased.api_key, max_retries=0)
    chat(client, HELLO, temperature=0.7)
    assert served.engine.params[-1].temperature == 0.0
    _, other = served.lease()
    chat(other, HELLO, temperature=0.0)
    assert served.engine.params[-1].temperature == 1.0


def test_a_dead_engine_answers_with_an_error_and_ends_the_loop(tiny_model):
    from configs.schema import RolloutConfig
    from tests.support.server_parts import ServerThread

    thread = ServerThread(tiny_model, rollout=RolloutConfig(max_tokens=8, max_model_len=128))
    thread.start()
    thread.engine.dies = True
    _, client = thread.lease()
    with client, pytest.raises(openai.InternalServerError, match="engine or the server is going down") as caught:
        chat(client, HELLO)
    assert caught.value.status_code == 503
    thread.call(_until(thread._generating.done))
    assert "engine died" in str(thread._generating.exception().exceptions[0])
    thread.stop()
