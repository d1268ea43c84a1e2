"""Requests that ended a run, deafened the engine, or filled the memory, each against the real engine while another episode plays.

Every row was found by an attacker who had nothing but an episode's key. The witness's requests must all succeed, and its
recorded log-probabilities must be the model's.
"""

from __future__ import annotations

import gc
import json
import textwrap
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch
from openai import OpenAI
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from buffers.records import Task
from buffers.tasks.parquet import write_tasks
from configs.schema import RolloutConfig
from learner.recovery.restarts import RestartLimit
from mocked_server.conversation.live_episodes import MAX_KEPT_BYTES
from mocked_server.keys import KeyRing
from mocked_server.vllm.sampling_rules import MAX_OPTIONS
from tests.support.run_parts import start
from tests.support.server_parts import ServerThread, whole_prompt

pytestmark = [pytest.mark.engine]
EXACT = 1e-5
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
GOOGLE = "/v1beta/models/policy:generateContent"
HI = [{"role": "user", "content": "hi"}]
BIG = 2**70
MIB = 1 << 20


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"model": "policy", "messages": HI, "max_tokens": 4, **fields}


def complete(**fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"model": "policy", "prompt": "hi", "max_tokens": 4, **fields}


def generate(**params: Any) -> tuple[str, dict[str, Any]]:
    return GENERATE, {"prompt_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4, **params}}


def google(**config: Any) -> tuple[str, dict[str, Any]]:
    contents = [{"role": "user", "parts": [{"text": "hi"}]}]
    return GOOGLE, {"contents": contents, "generationConfig": {"maxOutputTokens": 4, **config}}


def nested(depth: int) -> str:
    return "(" * depth + "a" + ")" * depth


REFUSED: dict[str, tuple[tuple[str, dict[str, Any]], str]] = {
    "top_logprobs -1": (chat(logprobs=True, top_logprobs=-1), "logprobs"),
    "top_logprobs 100000": (chat(logprobs=True, top_logprobs=100000), "logprobs"),
    "logit_bias beyond the vocabulary": (chat(logit_bias={"99999999": 1}), "logit_bias"),
    "logit_bias negative": (chat(logit_bias={"-5": 1}), "logit_bias"),
    "allowed_token_ids beyond the vocabulary": (chat(allowed_token_ids=[10**8]), "allowed_token_ids"),
    "allowed_token_ids negative": (chat(allowed_token_ids=[-1]), "allowed_token_ids"),
    "stop_token_ids beyond the vocabulary": (chat(stop_token_ids=[10**7]), "stop_token_ids"),
    "stop_token_ids negative": (chat(stop_token_ids=[-700]), "stop_token_ids"),
    "stop_token_ids beyond 64 bits": (chat(stop_token_ids=[BIG]), "stop_token_ids must"),
    "seed beyond 64 bits": (generate(seed=2**64), "seed"),
    "stop with a lone surrogate": (chat(stop="\ud800"), "stop must"),
    "vllm_xargs": (chat(vllm_xargs={"kv_transfer_params": "x"}), "vllm_xargs"),
    "regex of nested parentheses": (chat(structured_outputs={"regex": nested(60_000)}), "structured_outputs.regex"),
    "grammar of nested parentheses": (
        chat(structured_outputs={"grammar": "root ::= " + nested(60_000)}),
        "structured_outputs.grammar",
    ),
    "seed as text": (generate(seed="abc"), "seed"),
    "min_tokens 1.5": (generate(min_tokens=1.5), "min_tokens"),
    "min_tokens NaN": (generate(min_tokens=float("nan")), "min_tokens"),
    "stop as a mapping": (generate(stop={"a": 1}), "stop"),
    "100,000 stop strings": (generate(stop=[f"s{i}" for i in range(100_000)]), "stop"),
    "a stop string of 12 MB": (generate(stop="x" * 12_000_000), "stop"),
    "100,000 choices": (
        chat(structured_outputs={"choice": [f"c{i}" for i in range(100_000)]}),
        "structured_outputs.choice",
    ),
    "n of 2,000": (chat(n=2000), "n x prompts"),
    "many prompts with n": (complete(prompt=["hi"] * 20, n=20), "n x prompts"),
    "template arguments of 15 MB": (chat(chat_template_kwargs={"x": "y" * 15_000_000}), "chat_template_kwargs"),
    "candidateCount of 2,000": (google(candidateCount=2000), "n x prompts"),
    "stopSequences with a lone surrogate": (google(stopSequences=["\ud800"]), "stopSequences must"),
    "100,000 stopSequences": (google(stopSequences=[f"s{i}" for i in range(100_000)]), "stop"),
    "a seed beyond 64 bits": (google(seed=BIG), "seed"),
    "a field's name in escapes": ((CHAT, {"prompt_logprobs": 1}), "prompt_logprobs"),
}
"""What is refused: the request, and a word of the message."""

EMPTY: dict[str, tuple[str, dict[str, Any]]] = {
    "$ref to itself": chat(structured_outputs={"json": {"$ref": "#"}}),
    "$ref to itself as a response format": chat(
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}
    ),
    "$ref to itself as a response schema": google(
        responseMimeType="application/json", responseJsonSchema={"$ref": "#"}
    ),
    "a grammar without an end": chat(structured_outputs={"grammar": 'root ::= root "a" | root'}),
    "one token, which stops": chat(allowed_token_ids=[2], stop_token_ids=[2], min_tokens=3),
    "one token, which is a bad word": chat(allowed_token_ids=[70], bad_words=["a", "b", "c", "d", "e", "f"]),
}
"""Constraints that leave no token to sample, or nothing that can be compiled."""

CONSTRAINED: dict[str, tuple[tuple[str, dict[str, Any]], int]] = {
    "logit_bias": (complete(logit_bias={"70": 100}), 0),
    "allowed_token_ids": (complete(allowed_token_ids=[71, 72]), 0),
    "bad_words": (complete(bad_words=["zebra"]), 0),
    "presence_penalty": (complete(presence_penalty=1.5), 0),
    "frequency_penalty": (complete(frequency_penalty=-1.5), 0),
    "repetition_penalty": (complete(repetition_penalty=1.3), 0),
    "presencePenalty": (google(presencePenalty=1.5), 0),
    "responseSchema": (google(responseMimeType="application/json", responseSchema={"type": "STRING"}), 0),
    "structured_outputs": (complete(structured_outputs={"regex": "[ab]+"}), 0),
    "min_tokens": (complete(min_tokens=3, max_tokens=8, ignore_eos=True), 5),
    "nothing": (complete(ignore_eos=True), 4),
}
"""Requests that change the distribution: how many of their tokens are trained."""


@pytest.fixture(scope="module")
def real(rollout, tiny_model) -> Iterator[ServerThread]:
    """A server in front of the session's engine."""
    served = ServerThread(
        tiny_model,
        rollout=RolloutConfig(max_tokens=64, max_model_len=1024),
        pool={"deadline_s": 1e6},
        loop=rollout._loop,
        tool_parser="hermes",
    )
    served.start(rollout.engine)
    yield served
    served.stop()


def post(
    served: ServerThread, client: OpenAI, path: str, body: dict[str, Any], *, patience_s: float = 60
) -> httpx.Response:
    text = json.dumps(body)  # keeps NaN, lone surrogates and large integers
    if path == CHAT and set(body) == {"prompt_logprobs"}:
        text = json.dumps({"model": "policy", "messages": HI, "max_tokens": 4, "x": 1})
        text = text.replace('"x"', '"\\u0070rompt_logprobs"')
    headers = {"Authorization": f"Bearer {client.api_key}", "Content-Type": "application/json"}
    return httpx.post(served.server.base_url + path, content=text, headers=headers, timeout=patience_s)


@contextmanager
def witness(served: ServerThread, model: Path) -> Iterator[None]:
    """Another episode plays meanwhile: each of its requests succeeds, and what is recorded of them is the model's."""
    episode_id, client = served.lease(prompt="witness")
    errors: list[Exception] = []
    over = threading.Event()

    def play() -> None:
        try:
            while not over.is_set():
                stream = client.chat.completions.create(model="policy", messages=HI, max_tokens=24, stream=True)  # type: ignore[call-overload]
                assert [chunk for chunk in stream if chunk.choices]
        except Exception as error:
            errors.append(error)

    players = [threading.Thread(target=play) for _ in range(2)]
    for player in players:
        player.start()
    try:
        yield
    finally:
        over.set()
        for player in players:
            player.join()
    assert not errors, errors
    assert max_difference(served, episode_id, model) < EXACT


def max_difference(served: ServerThread, episode_id: str, folder: Path) -> float:
    """Between recorded and recomputed log-probabilities, over all rounds of an episode."""
    rounds = served.stored(episode_id)
    assert rounds
    model = AutoModelForCausalLM.from_pretrained(folder)
    worst = 0.0
    for round_ in rounds:
        prompt = whole_prompt(rounds, round_)
        ids = torch.tensor(np.concatenate([prompt, round_.sampled_ids])[None].astype(np.int64))
        with torch.no_grad():
            logprobs = model(ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
        again = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
        worst = max(worst, float(np.abs(again - round_.logprobs).max(initial=0.0)))
    return worst


def test_what_cannot_be_served_is_refused_by_name_and_nobody_else_notices(real, tiny_model):
    _, client = real.lease()
    with witness(real, tiny_model):
        for name, ((path, body), word) in REFUSED.items():
            answer = post(real, client, path, body)
            assert answer.status_code == 400, (name, answer.status_code, answer.text[:300])
            assert word in answer.text, (name, answer.text[:300])
            assert len(answer.content) < 3000, name
            streamed = (
                post(real, client, path, {**body, "stream": True}) if path == CHAT and "x" not in body else answer
            )
            assert streamed.status_code == 400, (name, streamed.status_code, streamed.text[:300])


UNCHECKED = (
    "top_logprobs -1",
    "top_logprobs 100000",
    "logit_bias beyond the vocabulary",
    "logit_bias negative",
    "allowed_token_ids beyond the vocabulary",
    "allowed_token_ids negative",
    "stop_token_ids beyond the vocabulary",
    "stop_token_ids negative",
    "stop_token_ids beyond 64 bits",
    "stop with a lone surrogate",
    "grammar of nested parentheses",
)
"""What reaches vLLM's engine client, and not its process, when nothing is checked before."""


def test_what_no_check_found_ends_its_own_request_only(real, tiny_model, monkeypatch):
    """The border around each generation, without the checks in front of it."""
    rules = real.server._client._rules
    for check in ("_check_types", "_check_values"):
        monkeypatch.setattr(rules, check, lambda _: None)
    monkeypatch.setattr("mocked_server.vllm.sampling_rules.check_sampling", lambda _: None)
    _, client = real.lease()
    with witness(real, tiny_model):
        for name in UNCHECKED:
            (path, body), _ = REFUSED[name]
            answer = post(real, client, path, body)
            assert answer.status_code == 400, (name, answer.status_code, answer.text[:300])


def test_constraints_that_leave_no_token_end_their_request_only(real, tiny_model):
    episode_id, client = real.lease()
    with witness(real, tiny_model):
        for name, (path, body) in EMPTY.items():
            answer = post(real, client, path, body)
            assert answer.status_code in (200, 400), (name, answer.status_code, answer.text[:300])
    for round_ in real.stored(episode_id):
        assert np.isfinite(round_.logprobs).all()


def test_tokens_of_a_changed_distribution_are_recorded_and_not_trained(real):
    for name, ((path, body), num_trained) in CONSTRAINED.items():
        episode_id, client = real.lease()
        assert post(real, client, path, body).status_code == 200, name
        (round_,) = real.stored(episode_id)
        trained = np.ones(len(round_.sampled_ids)) if round_.trained is None else round_.trained
        assert trained.sum() == num_trained, name
        assert (round_.trained is None) == (name == "nothing")
        if num_trained == 0:
            with pytest.raises(Exception, match="each of its model calls constrained"):
                real.call(real.server.notify_score(episode_id, 1.0))
        else:
            real.call(real.server.notify_score(episode_id, 1.0))


def test_strict_tools_leave_the_choice_to_the_policy_unless_a_call_is_forced(real):
    function = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}
    tools = [{"type": "function", "function": function}]
    trained = {}
    for choice in ("auto", "required"):
        for parallel in (True, False):
            episode_id, client = real.lease()
            path, body = chat(tools=tools, tool_choice=choice, parallel_tool_calls=parallel, max_tokens=32)
            assert post(real, client, path, body).status_code == 200
            trained[choice, parallel] = real.stored(episode_id)[0].trained
    assert trained["auto", True] is None and trained["auto", False] is None
    assert trained["required", True].sum() == 0 and trained["required", False].sum() == 0


def test_the_same_seed_is_another_one_in_each_episode(real):
    texts = []
    for _ in range(2):
        _, client = real.lease()
        answers = [post(real, client, *complete(seed=42, max_tokens=16)).json() for _ in range(2)]
        assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
        texts.append(answers[0]["choices"][0]["text"])
    assert texts[0] != texts[1]


def test_the_most_that_is_served_blocks_nobody(real, tiny_model):
    _, client = real.lease()
    with witness(real, tiny_model):
        choices = [f"choice number {number}" for number in range(MAX_OPTIONS)]
        assert post(real, client, *chat(structured_outputs={"choice": choices})).status_code == 200
        assert post(real, client, *chat(n=128, max_tokens=1)).status_code == 200


def hostile(number: int) -> tuple[str, dict[str, Any]]:
    """The next of many requests that are kept, or would be, in as much memory as can be had."""
    salt = f"{number}"
    small = chat(
        max_tokens=1, tools=[{"type": "function", "function": {"name": "f" + salt, "description": "d" * 50_000}}]
    )
    return (
        chat(chat_template_kwargs={"x": salt + "y" * 1_900_000}),
        chat(
            max_tokens=1,
            n=8,
            tools=[{"type": "function", "function": {"name": "f" + salt, "description": "d" * 50_000}}],
        ),
        complete(prompt=salt + " x" * 300, max_tokens=64, ignore_eos=True),
        chat(messages=[{"role": "user", "content": salt}, {"role": "assistant", "content": "a" * 400}, *HI]),
        chat(chat_template_kwargs={"x": salt + "y" * 3_000_000}),
        *[small] * 5,
    )[number % 10]


@pytest.mark.long
@pytest.mark.slow
def test_a_thousand_hostile_requests_cost_a_bounded_memory_that_ends_with_their_episode(real):
    process = psutil.Process()
    episode_id, client = real.lease()
    statuses: Counter[int] = Counter()
    before = process.memory_info().rss
    for number in range(1000):
        statuses[post(real, client, *hostile(number)).status_code] += 1
    live = real.server.episodes.get(episode_id)
    assert live.kept_bytes < MAX_KEPT_BYTES + 4 * MIB
    assert process.memory_info().rss - before < 6 * MAX_KEPT_BYTES
    assert statuses[200] > 50 and statuses[413] > 50 and statuses[400] > 50 and sum(statuses.values()) == 1000
    is_freed = weakref.ref(live.rounds[0].ids)
    del live
    real.call(real.server.notify_score(episode_id, 0.0))
    gc.collect()
    assert is_freed() is None


@pytest.mark.long
@pytest.mark.slow
def test_a_request_that_deafens_every_engine_is_found_and_its_episode_ended_while_the_others_are_served(
    real, rollout, tiny_model, monkeypatch
):
    """What would reach the engine if nothing were checked before: its input thread ends, and its process lives."""
    engine, rules = rollout.engine, real.server._client._rules
    fleet, restart_limit = real.engine, RestartLimit()
    blamed: list[str] = []
    monkeypatch.setattr(rules, "_check_types", lambda _: None)
    monkeypatch.setattr(rules, "_check_values", lambda _: None)
    monkeypatch.setattr("mocked_server.vllm.sampling_rules.seed_of", lambda _, seed: seed)
    monkeypatch.setattr(engine._silence, "timeout_s", 2.0)
    monkeypatch.setattr(real.generation, "blame", blamed.append)
    monkeypatch.setattr(fleet, "_record_death", lambda name, error: restart_limit.record("engine", error, name=name))
    keeping = real.submit(fleet.run())
    episode_id, client = real.lease()
    try:
        with witness(real, tiny_model):
            poison = {"prompt_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4, "seed": 1}}
            monkeypatch.setattr("mocked_server.vllm.sampling_rules.seed_of", lambda *_: "abc")
            answer = post(real, client, GENERATE, poison, patience_s=200)
    finally:
        keeping.cancel()
        fleet.is_supervised = False
    assert answer.status_code == 400 and "the engine died while it answered this request alone" in answer.text
    assert blamed == [episode_id]
    assert restart_limit.figures() == {"restarts/engine": 3.0}


ATTACKER = """
    import json, os, sys, urllib.error, urllib.request

    base, key = os.environ["OPENAI_BASE_URL"].removesuffix("/v1"), os.environ["OPENAI_API_KEY"]

    def send(path, body):
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        try:
            with urllib.request.urlopen(urllib.request.Request(base + path, body.encode(), headers), timeout=600) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    episode = int(os.environ["SEED"])
    attacks = json.load(open(sys.argv[1]))
    statuses = [send(*attacks[(episode + number) % len(attacks)]) for number in range(5)]
    assert all(status < 500 for status in statuses), statuses
    honest = {"model": os.environ["MODEL"], "messages": json.loads(os.environ["TASK_JSON"])["prompt"], "max_tokens": 4}
    assert send("/v1/chat/completions", json.dumps(honest)) == 200
    print(json.dumps({"score": hash(key) % 7}))
"""


@pytest.mark.slow
def test_a_run_whose_agent_attacks_in_every_episode_ends_with_all_its_steps(tmp_path):
    agent, attacks, tasks = tmp_path / "agent.py", tmp_path / "attacks.json", tmp_path / "tasks.parquet"
    agent.write_text(textwrap.dedent(ATTACKER))
    rows = [request for request, _ in REFUSED.values() if len(json.dumps(request)) < 100_000]
    rows += list(EMPTY.values()) + [request for request, _ in CONSTRAINED.values()]
    attacks.write_text(json.dumps([(path, json.dumps(body)) for path, body in rows]))
    write_tasks(tasks, [Task(task_id=f"attacked-{number}", prompt=HI) for number in range(len(rows))])
    run = start(
        tmp_path,
        "run.steps=4",
        f"agents.command=['{{python}}', '{agent}', '{attacks}']",
        "agents.processes=0",
        "agents.concurrency=4",
        f"data.tasks={tasks}",
        "data.scorer=json_line",
        "buffer.groups_per_step=2",
        "buffer.group_size=2",
        "learner.advantage=grpo",
        'sft.demonstrations=""',
        "env.command=[]",
    )
    code, output = run.wait()
    assert code == 0, output
    summary = run.summary()
    assert summary["steps"] == 4 and summary["restarts"] == {}
    assert summary["max_logprob_diff"] < 1e-4, "no token of a changed distribution is trained"
    steps = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert max(step.get("generation/constrained_share", 0.0) for step in steps) > 0.0


@pytest.mark.slow
@pytest.mark.parametrize("advantage", [pytest.param("gae", marks=pytest.mark.long), "grpo"])
def test_a_run_whose_judge_is_broken_learns_from_what_it_says_at_times(tmp_path, advantage):
    write_tasks(tmp_path / "tasks.parquet", [Task(task_id=f"judged-{n}", prompt=HI) for n in range(9)])
    run = start(
        tmp_path,
        "run.steps=3",
        "model.path=tiny",
        "model.dtype=float32",
        f"data.tasks={tmp_path / 'tasks.parquet'}",
        "data.scorer=tests.support.scoring.broken",
        'data.validation.tasks=""',
        "agents.max_attempts=8",
        "agents.concurrency=8",
        "rollout.max_tokens=6",
        "rollout.max_model_len=128",
        "buffer.groups_per_step=2",
        "buffer.group_size=4",
        f"learner.advantage={advantage}",
        f"learner.critic={'shared' if advantage == 'gae' else 'none'}",
        config="configs/gsm8k.yaml",
    )
    code, output = run.wait()
    assert code == 0, output
    steps = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if "reward/mean" in step]
    assert len(steps) == 3 and max(step["reward/max"] for step in steps) > 9e8
    assert not any("tracker/refused" in step for step in steps), "a figure was NaN or infinite"
    assert sum(step["learner/updates"] for step in steps) > 0 and max(step["policy/grad_norm"] for step in steps) > 0.0
    weights = load_file(run.folder / "last" / "model.safetensors")
    assert all(bool(weight.isfinite().all()) for weight in weights.values())
    log = (run.folder / "log.txt").read_text()
    assert "must be a finite number below 1e+09 in size, got nan" in log and "ValueError: no" in log
    assert run.summary()["restarts"] == {}


def test_keys_are_what_the_attacker_has(real):
    """The attacks above were made with an episode's key; without any nothing of this is reached."""
    assert isinstance(real.server.keys, KeyRing)
    nobody = OpenAI(base_url=f"{real.server.base_url}/v1", api_key="us-no", max_retries=0)
    assert post(real, nobody, *chat(logprobs=True, top_logprobs=-1)).status_code == 401
