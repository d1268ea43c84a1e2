"""Rules of buffers/ledger/export.py: conversations leave the ledger with what their form has room for, and come back the same."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from buffers.ledger.answers import best_episodes
from buffers.ledger.batches import read_rounds
from buffers.ledger.cli import main
from buffers.ledger.export import RecordedSession, recorded_sessions
from buffers.ledger.ledger import Ledger
from buffers.ledger.reader import LedgerReader
from buffers.ledger.turns import TokenDecoder
from buffers.log_forms import Session
from buffers.records import Round
from buffers.tasks.logs import Findings, LogReader
from tests.support.buffer_parts import open_running

ASK = [{"role": "system", "content": "Use tools."}, {"role": "user", "content": "What is 12 + 30?"}]
CALLS = [
    {"type": "function", "function": {"name": "add", "arguments": {"a": 12, "b": 30}}},
    {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}},
]
ANSWERS: list[dict[str, Any]] = [
    {"role": "assistant", "content": "I add. ", "reasoning_content": "Twelve\nand thirty", "tool_calls": CALLS},
    {"role": "assistant", "content": "  It is 42.\n"},
]
RESULTS = [{"role": "tool", "content": "42"}, {"role": "tool", "content": "<sunny>\n"}]


class Player:
    """Plays a conversation into a ledger, as the server does: exact ids, each answer behind the tail of its prompt."""

    def __init__(self, ledger: Ledger, tokenizer: Any) -> None:
        self._ledger, self._tokenizer = ledger, tokenizer

    def ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def play(self, task: int, *, scores: Sequence[float], finish: str = "stop", forks: bool = False) -> None:
        episodes = open_running(self._ledger, task=task, group_size=len(scores))
        for episode, score in zip(episodes, scores, strict=True):
            history: list[dict[str, Any]] = list(ASK)
            before, first = "", 0
            for index, answer in enumerate(ANSWERS):
                asks = self._tokenizer.apply_chat_template(history, tokenize=False, add_generation_prompt=True)
                whole = self._tokenizer.apply_chat_template([*history, answer], tokenize=False)
                said = whole[len(asks) : whole.rindex("<|im_end|>") + len("<|im_end|>")]
                self._put(
                    episode.episode_id, index, asks[len(before) :], said, finish=finish if index else "tool_calls"
                )
                before = asks + said
                history += [answer, *RESULTS]
                first = len(before) if index == 0 else first
            if forks:
                self._put(episode.episode_id, 2, asks[first:], "It is 41.<|im_end|>", finish="stop", parent=0)
            self._ledger.notify_score(episode.episode_id, score).result()

    def _put(self, episode_id: str, index: int, tail: str, said: str, *, finish: str, parent: int | None = -1) -> None:
        sampled = self.ids(said)
        self._ledger.put_round(
            Round(
                episode_id=episode_id, round_index=index, parent=(index - 1 if index else None) if parent == -1 else parent,
                tail_ids=np.array(self.ids(tail), np.int32), sampled_ids=np.array(sampled, np.int32),
                logprobs=-np.arange(1, len(sampled) + 1, dtype=np.float32) / 3, versions=np.full(len(sampled), 7, np.int32),
                finish_reason=finish,
            )
        )  # fmt: skip


@pytest.fixture
def player(tmp_path: Path, tiny_model: Path) -> Iterator[Player]:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(f"model: {{path: {tiny_model}}}\n")
    with Ledger(tmp_path / "run" / "ledger.sqlite") as ledger:
        yield Player(ledger, AutoTokenizer.from_pretrained(tiny_model))


def sessions(run: Path, tiny_model: Path, **more: Any) -> list[RecordedSession]:
    with closing(LedgerReader(run / "ledger.sqlite")) as reader, reader.read() as db:
        return list(recorded_sessions(db, decoder=TokenDecoder(tiny_model / "tokenizer.json"), **more))


def imported(path: Path) -> list[Session]:
    return list(LogReader(found=Findings(), of_ledger=lambda _: iter(())).read(path))


def test_calls_thoughts_and_results_are_read_off_the_ids_and_render_to_them_again(
    player: Player, tmp_path: Path, tiny_model: Path
) -> None:
    player.play(0, scores=[1.0])
    (recorded,) = sessions(tmp_path / "run", tiny_model)
    *_, last = recorded.metrics
    told = recorded.session.messages
    assert [message["role"] for message in told] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert told[2]["reasoning_content"] == "Twelve\nand thirty" and told[2]["content"] == "I add. "
    assert [call["function"]["arguments"] for call in told[2]["tool_calls"]] == [
        '{"a": 12, "b": 30}',
        '{"city": "Rome"}',
    ]
    assert [message["tool_call_id"] for message in told[3:5]] == [call["id"] for call in told[2]["tool_calls"]]
    assert told[5] == {"role": "assistant", "content": "  It is 42.\n"}
    rendered = player._tokenizer.apply_chat_template(told, tokenize=False).removesuffix("\n")
    assert player.ids(rendered) == last["prompt_token_ids"] + last["completion_token_ids"]


def test_what_is_exported_comes_back_the_same(
    player: Player, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    player.play(0, scores=[1.0, 0.25])
    player.play(1, scores=[0.5], forks=True)
    run = tmp_path / "run"
    want = [each.session for each in sessions(run, tiny_model)]
    assert [(one.source, one.score) for one in want] == [
        ("1-0-0", 1.0),
        ("1-1-0", 0.25),
        ("2-0-0.0", 0.5),
        ("2-0-0.1", 0.5),
    ]
    for form, to in (("--messages", tmp_path / "chat.jsonl"), ("--atif", tmp_path / "atif")):
        assert main(["export", str(run), form, str(to)], open_ledger=Ledger) == 0
        assert f"4 conversations in {to}" in capsys.readouterr().out
        assert sorted(imported(to), key=lambda one: one.source) == want


def test_atif_has_the_ids_log_probabilities_and_versions_that_the_ledger_has(player: Player, tmp_path: Path) -> None:
    player.play(0, scores=[0.5])
    run = tmp_path / "run"
    assert main(["export", str(run), "--atif", str(tmp_path / "atif")], open_ledger=Ledger) == 0
    document = json.loads((tmp_path / "atif" / "1-0-0.json").read_text())
    with closing(LedgerReader(run / "ledger.sqlite")) as reader, reader.read() as db:
        rounds = read_rounds(db, episode_id="1-0-0")
    figures = [step["metrics"] for step in document["steps"] if step["source"] == "agent"]
    prompt: list[int] = []
    for told, round_ in zip(figures, rounds, strict=True):
        prompt += round_.tail_ids.tolist()
        assert told["prompt_token_ids"] == prompt
        assert told["completion_token_ids"] == round_.sampled_ids.tolist()
        assert (np.array(told["logprobs"], np.float32) == round_.logprobs).all()
        assert told["extra"]["policy_versions"] == round_.versions.tolist()
        assert told["extra"]["finish_reason"] == round_.finish_reason
        prompt += round_.sampled_ids.tolist()
    assert document["extra"] == {"episode_id": "1-0-0", "task_id": "t:0", "group_id": 1, "state": "ready", "score": 0.5}


def test_an_answer_is_learned_in_one_branch_and_a_cut_one_in_none(
    player: Player, tmp_path: Path, tiny_model: Path
) -> None:
    player.play(0, scores=[1.0], finish="length")
    player.play(1, scores=[1.0], forks=True)
    weights = [
        [message.get("weight", 1) for message in each.session.messages if message["role"] == "assistant"]
        for each in sessions(tmp_path / "run", tiny_model)
    ]
    assert weights == [[1, 0], [1, 1], [0, 1]]


def test_the_best_of_a_task_is_the_first_with_its_highest_score_and_none_at_0(
    player: Player, tmp_path: Path, tiny_model: Path
) -> None:
    player.play(0, scores=[0.5, 1.0, 1.0])
    player.play(1, scores=[0.0, -1.0])
    with closing(LedgerReader(tmp_path / "run" / "ledger.sqlite")) as reader, reader.read() as db:
        assert best_episodes(db) == ["1-1-0"]
    assert [each.session.source for each in sessions(tmp_path / "run", tiny_model, episodes=["1-1-0"])] == ["1-1-0"]


@pytest.mark.parametrize(
    ("words", "named"), [([], "one of the arguments --parquet --messages --atif"), (["--atif", "/dev/null/x"], "")]
)
def test_what_cannot_be_exported_is_refused(
    player: Player, tmp_path: Path, words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    player.play(0, scores=[1.0])
    try:
        code = main(["export", str(tmp_path / "run"), *words], open_ledger=Ledger)
    except SystemExit as error:
        code = error.code
    assert code == 2 and named in capsys.readouterr().err
