"""Random conversations: whatever an agent does, no sampled token is lost or trained twice, and every prefix is exact."""

from __future__ import annotations

import json
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from buffers.records import EpisodeScores
from buffers.training_rows import episode_rows
from tests.support.server_parts import whole_prompt

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


class Agent:
    """Does at random what agents do to a conversation. `asked`: the engine's prompt for each answer that it gave."""

    def __init__(self, served, seed):
        self.served = served
        self.rng = random.Random(seed)
        self.episode, self.client = served.lease()
        self.conversations = [[{"role": "user", "content": f"Task {seed}."}]]
        self.asked = {}
        self.num_answers = 0
        served.engine.answer = self.answer

    def answer(self, prompt):
        """A different answer each time: words, reasoning, one or two tool calls, or tokens that no text would give."""
        self.num_answers += 1
        number = self.num_answers
        kind = self.rng.randrange(4)
        call = f'<tool_call>\n{{"name":"add","arguments":{{"n":{number}}}}}\n</tool_call>'
        if kind == 0:
            ids = self.served.ids(f"Answer {number}.", end=self.rng.random() < 0.8)
        elif kind == 1:
            ids = self.served.ids(f"<think>\nThought {number}.\n</think>\n\nAnswer {number}.")
        elif kind == 2:
            ids = self.served.ids(f"Call {number}.\n" + "\n".join([call] * self.rng.choice([1, 2])))
        else:
            ids = [i for letter in f"letters {number}" for i in self.served.tokenizer.encode(letter)]
        self.asked[tuple(ids)] = prompt
        return ids

    def ask(self, messages, **options):
        reply = self.client.chat.completions.create(model="policy", messages=messages, tools=TOOLS, **options)
        return [choice.message.model_dump() for choice in reply.choices]

    def stream(self, messages):
        with self.client.chat.completions.stream(model="policy", messages=messages, tools=TOOLS) as events:
            return events.until_done().get_final_completion().choices[0].message.model_dump()

    def go_on(self, messages, message):
        calls = message.get("tool_calls") or []
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in calls]
        return [*messages, message, *(results or [{"role": "user", "content": f"Go on {self.rng.randrange(3)}."}])]

    def respelled(self, message):
        message = {k: v for k, v in message.items() if v is not None or self.rng.random() < 0.5}
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
        if self.rng.random() < 0.5:
            message.pop("reasoning", None)
        return message

    def step(self):
        messages = self.rng.choice(self.conversations)
        action = self.rng.choice(
            ["whole", "stream", "edit", "several", "parallel", "start", "compact", "retry", "again"]
        )
        if action == "whole":
            self.conversations.append(self.go_on(messages, self.respelled(self.ask(messages)[0])))
        elif action == "stream":
            self.conversations.append(self.go_on(messages, self.respelled(self.stream(messages))))
        elif action == "edit":
            self.conversations.append(self.go_on(messages, {**self.ask(messages)[0], "content": "Edited."}))
        elif action == "several":
            self.conversations += [self.go_on(messages, message) for message in self.ask(messages, n=2)]
        elif action == "parallel":
            with ThreadPoolExecutor(3) as threads:
                asked = [self.rng.choice(self.conversations) for _ in range(3)]
                replies = list(threads.map(lambda one: self.ask(one)[0], asked))
            self.conversations += [self.go_on(*pair) for pair in zip(asked, replies)]
        elif action == "start":
            self.conversations.append([{"role": "user", "content": f"Sub-task {self.num_answers}."}])
        elif action == "compact" and len(messages) > 2:
            self.conversations.append([messages[0], *messages[-self.rng.choice([1, 2]) :]])
        elif action == "retry":
            headers = [{"x-stainless-retry-count": str(attempt)} for attempt in (0, 1)]
            replies = [self.ask(messages, extra_headers=header)[0] for header in headers]
            assert replies[0] == replies[1]
            self.conversations.append(self.go_on(messages, replies[1]))
        else:
            self.ask(messages)


@pytest.mark.parametrize("seed", range(12))
def test_no_sampled_token_is_lost_or_trained_twice(tools_server, seed):
    agent = Agent(tools_server, seed)
    for _ in range(14):
        agent.step()
    rounds = tools_server.stored(agent.episode)
    assert len(rounds) >= agent.num_answers  # several choices of one prompt are several rounds
    assert any(round_.parent is not None for round_ in rounds)
    trained = Counter()
    for row in episode_rows(rounds, group_id=0, scores=EpisodeScores(whole=1.0)):
        assert len(row.ids) == len(row.mask)
        for index in np.unique(row.rounds[row.mask == 1]):
            trained[int(index)] += 1
            assert row.ids[row.rounds == index].tolist() == rounds[index].sampled_ids.tolist()
    assert trained == Counter(range(len(rounds)))
    for round_ in rounds:
        assert whole_prompt(rounds, round_).tolist() == agent.asked[tuple(round_.sampled_ids.tolist())]
    live = tools_server.server.episodes.get(agent.episode)
    heads = sum(r.parent is None for r in rounds) - 1
    siblings = sum(n - 1 for parent, n in Counter(r.parent for r in rounds).items() if parent is not None)
    assert sum(live.branch_causes.values()) >= heads + siblings  # each branch has a cause
