"""What SFT trains of a conversation is what the server records when the policy gives its answers: ids, masks and branches."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AddedToken, AutoTokenizer

from benchmarks.chat_families import FAMILIES, Family, Refused
from benchmarks.families import make_family
from buffers.errors import TaskError
from buffers.records import EpisodeScores, Round, Row
from buffers.tasks.parquet import Trace
from buffers.training_rows import episode_rows
from configs.schema import RolloutConfig, ServerConfig
from configs.tiny_model import make_tiny_model
from mocked_server.vllm.demonstrations import DemonstrationRenderer, Unlearnable, make_renderer
from mocked_server.vllm.engine_arguments import EngineSettings, make_args, make_vllm_config
from tests.mocked_server.vllm.test_chat_families import Renderer
from tests.support.server_parts import ServerThread

TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
}
MARKUP = re.compile(r"</?(think|tool_call|tool_response)>")
SPEAKS = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "First.\nSecond."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "Third."},
    {"role": "user", "content": "Three?"},
    {"role": "assistant", "content": "Done."},
]
THINKS = [{**each, "reasoning_content": "Well, so."} if each["role"] == "assistant" else each for each in SPEAKS]
CALLS = [
    {"role": "user", "content": "Look."},
    {
        "role": "assistant", "content": "",
        "tool_calls": [{"id": "call00001", "type": "function", "function": {"name": "look", "arguments": '{"a": "b"}'}}],
    },
    {"role": "tool", "tool_call_id": "call00001", "content": "a tree"},
    {"role": "assistant", "content": "A tree."},
]  # fmt: skip


MARKED = {"role": "assistant", "content": "a<|im_end|>b"}
THOUGHT = {"role": "assistant", "content": "<think>\nSo.\n</think>\n\nYes."}


class FamilyRenderer(Renderer):
    """As vLLM's renderer is called without its threads."""

    def render_messages(self, messages: Any, params: Any) -> Any:
        return None, {"prompt": self._family.render(messages, **params.chat_template_kwargs)}

    @property
    def eos_token_id(self) -> int:
        return self.id_of(self._family.stop)


@dataclass(frozen=True)
class Params:
    chat_template_kwargs: dict[str, Any]
    tool_choice: Any = None


def renderer_of(family: Family, **more: Any) -> DemonstrationRenderer:
    inner = FamilyRenderer(family)
    named = (family.stop, getattr(family, "call_stop", ""), "<|observation|>")
    stops = {inner.id_of(stop) for stop in named if stop in family.marks}
    given = {"strict": False, "stops": stops or {inner.eos_token_id}, "last_only": False, "longest": 10_000} | more
    return DemonstrationRenderer(
        inner, refusal=Refused, make_params=lambda tools: Params({"tools": tools} if tools else {}), **given
    )


def rows_of(renderer: DemonstrationRenderer, *traces: Trace) -> list[list[Row]]:
    found = list(renderer.rows(traces))
    for each in found:
        assert not isinstance(each, Unlearnable), str(each)
    return [each for each in found if not isinstance(each, Unlearnable)]


def trained(renderer: DemonstrationRenderer, row: Row) -> list[str]:
    """The text of each answer that the row trains."""
    inner: Any = renderer._tokenizer
    return [inner.decode(row.ids[row.rounds == at]) for at in np.unique(row.rounds[row.rounds >= 0])]


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_each_family_trains_its_answers_with_the_token_that_ends_them(name: str) -> None:
    family = FAMILIES[name]
    messages = SPEAKS if name not in ("gemma", "mistral-v3") else SPEAKS[1:]
    opens = "<think>\n" in family.render(SPEAKS[1:2]).rpartition("One?")[2] and "</think>" not in family.render(
        SPEAKS[1:2]
    )
    renderer = renderer_of(family)
    (rows,) = rows_of(renderer, Trace(messages=THINKS[7 - len(messages) :] if opens or name == "glm-4.5" else messages))
    answers = [text for row in rows for text in trained(renderer, row)]
    assert len(answers) == 3 and (len(rows) == 1 or not family.continued)
    for answer, message in zip(answers, (each for each in messages if each["role"] == "assistant"), strict=True):
        assert str(message["content"]) in answer and answer.endswith(family.stop), answer
        assert answer.count(family.stop) == 1


def test_an_answer_that_play_continues_is_shown_without_its_history_and_nothing_is_shown_twice() -> None:
    """Else a conversation costs the square of its length."""
    renderer = renderer_of(FAMILIES["qwen2"])
    shown: list[int] = []
    render = renderer._renderer._render
    renderer._renderer._render = lambda messages, params: shown.append(len(messages)) or render(messages, params)
    turns = [
        ({"role": "user", "content": f"{n % 3}?"}, {"role": "assistant", "content": f"{n % 3}."}) for n in range(50)
    ]
    trace = Trace(messages=[each for turn in turns for each in turn])
    (first,), (second,) = rows_of(renderer, trace, trace)
    assert first.ids.tolist() == second.ids.tolist() and len(trained(renderer, first)) == 50
    assert max(shown) <= 6 and len(shown) < 50


@st.composite
def conversations(draw: st.DrawFn) -> tuple[str, list[Any]]:
    name = draw(st.sampled_from(sorted(FAMILIES)))
    text = st.lists(
        st.sampled_from(["\n", " ", "a", "Sum:", "###", "USER: ", "\n\n", "b c", "."]), min_size=1, max_size=5
    )
    words = text.map("".join).filter(lambda found: found.strip() != "")
    turns = draw(st.lists(st.tuples(words, words), min_size=1, max_size=4))
    said = [
        each
        for asks, answers in turns
        for each in ({"role": "user", "content": asks}, {"role": "assistant", "content": answers})
    ]
    return name, said


@pytest.mark.seconds
@settings(max_examples=300, deadline=None)
@given(conversations(), st.booleans())
def test_a_conversation_is_shown_whole_or_refused(drawn: tuple[str, list[Any]], strict: bool) -> None:
    """Every prompt is the template's own, or the exact ids so far and what it writes behind that answer."""
    name, messages = drawn
    family = FAMILIES[name]
    renderer = renderer_of(family, strict=strict)
    (rows,) = renderer.rows([Trace(messages=messages)])
    if isinstance(rows, Unlearnable):
        assert name in ("qwq", "deepseek-r1", "glm-4.5") or str(rows), "it says why"
        return
    answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    assert sorted(int(each) for row in rows for each in np.unique(row.rounds[row.rounds >= 0])) == list(
        range(len(answers))
    )
    inner: Any = renderer._tokenizer
    for row in rows:
        for number in np.unique(row.rounds[row.rounds >= 0]):
            start = int(np.flatnonzero(row.rounds == number)[0])
            prompt, at = inner.decode(row.ids[:start]), answers[int(number)]
            if prompt != family.render(messages[:at]):
                assert not strict, "strict: what the template writes, and nothing else"
                before = int(np.flatnonzero(row.mask[:start])[-1]) + 1 if row.mask[:start].any() else 0
                written = inner.decode(row.ids[before:start])
                assert written == family.behind(messages[: at + 1][:at], answers[int(number) - 1], stop=family.stop)


def test_strict_replay_teaches_the_history_that_the_template_writes() -> None:
    family = FAMILIES["qwen3"]
    for strict, num_rows in ((True, 3), (False, 1)):
        renderer = renderer_of(family, strict=strict)
        thinks = [
            each if each["role"] != "assistant" else {**each, "content": f"<think>\nSo.\n</think>\n\n{each['content']}"}
            for each in SPEAKS
        ]
        (rows,) = rows_of(renderer, Trace(messages=thinks))
        assert len(rows) == num_rows
        texts = [renderer._tokenizer.decode(row.ids) for row in rows]
        assert texts[-1].count("<think>") == (1 if strict else 3), "as play shows it"


def test_weights_choose_the_answers_that_are_trained() -> None:
    renderer = renderer_of(FAMILIES["chatml"])
    weighed = [
        {**each, "weight": int(at == 4)} if each["role"] == "assistant" else each for at, each in enumerate(SPEAKS)
    ]
    last = renderer_of(FAMILIES["chatml"], last_only=True)
    (whole,), (chosen,), (end,) = (
        *rows_of(renderer, Trace(messages=SPEAKS), Trace(messages=weighed)),
        *rows_of(last, Trace(messages=SPEAKS)),
    )
    assert trained(renderer, whole) == ["First.\nSecond.<|im_end|>", "Third.<|im_end|>", "Done.<|im_end|>"]
    assert trained(renderer, chosen) == ["Third.<|im_end|>"] and trained(last, end) == ["Done.<|im_end|>"]
    assert renderer._tokenizer.decode(chosen.ids) == renderer._tokenizer.decode(whole.ids)


@pytest.mark.parametrize(
    ("family", "trace", "why"),
    [
        ("chatml", Trace(messages=SPEAKS[:2]), "it has no message of the assistant"),
        ("chatml", Trace(messages=SPEAKS[2:]), "it begins with an answer, to which there is no prompt"),
        ("chatml", Trace(messages=[*SPEAKS[:2], {"role": "assistant", "content": "a", "weight": 0}]), "has a weight of 0"),
        ("chatml", Trace(messages=SPEAKS, weight=0.0), "has a weight of 0"),
        ("chatml", Trace(messages=[*SPEAKS[:2], MARKED]), "holds '<|im_end|>', at which engines stop"),
        ("chatml", Trace(messages=CALLS), "does not show all of answer 1: 'look' is not in"),
        ("chatml", Trace(messages=SPEAKS, tools=[TOOL]), "does not show its tools"),
        ("gemma", Trace(messages=SPEAKS), "System role not supported"),
        ("deepseek-r1", Trace(messages=SPEAKS), "begins each answer with reasoning, and it has none"),
        ("smollm3", Trace(messages=[*SPEAKS[:2], THOUGHT]), "leaves no room for its reasoning"),
    ],
)  # fmt: skip
def test_what_cannot_be_shown_is_refused_with_its_cause(family: str, trace: Trace, why: str) -> None:
    (refused,) = renderer_of(FAMILIES[family]).rows([trace])
    assert isinstance(refused, Unlearnable) and why in str(refused), refused


@pytest.mark.parametrize("name", ["chatml", "qwen3", "qwq", "deepseek-r1"])
def test_reasoning_is_taught_where_the_answer_begins(name: str) -> None:
    """Split off or within the text: the same answer, also where the template opens the thought, or knows it as text only."""
    renderer = renderer_of(FAMILIES[name])
    within = [
        {**each, "content": f"<think>\nWell, so.\n</think>\n\n{each['content']}"}
        for each in SPEAKS
        if each["role"] == "assistant"
    ]
    text = [within.pop(0) if each["role"] == "assistant" else each for each in SPEAKS]
    (apart,), (together,) = rows_of(renderer, Trace(messages=THINKS), Trace(messages=text))
    begins = "" if FAMILIES[name].render(SPEAKS[1:2]).endswith("<think>\n") else "<think>\n"
    assert trained(renderer, apart)[1] == f"{begins}Well, so.\n</think>\n\nThird.{FAMILIES[name].stop}"
    assert trained(renderer, together) == trained(renderer, apart)


def test_a_conversation_beyond_the_context_is_refused() -> None:
    (refused,) = renderer_of(FAMILIES["chatml"], longest=20).rows([Trace(messages=SPEAKS)])
    assert "tokens up to answer 1, rollout.max_model_len is 20" in str(refused)


# The server itself: vLLM's HTTP layer, a real tokenizer, and an engine that gives the demonstration's answers.


def model_with(folder: Path, family: Family | None) -> Path:
    """The tiny model with the family's template and control tokens; None: with its own."""
    make_tiny_model(folder)
    if family is None:
        return folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(
        [AddedToken(mark, special=not MARKUP.fullmatch(mark), normalized=False) for mark in family.marks]
    )
    tokenizer.chat_template = family.template
    tokenizer.eos_token = family.stop
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"vocab_size": 1024, "eos_token_id": tokenizer.eos_token_id}
    (folder / "config.json").write_text(json.dumps(config))
    ends = [tokenizer.convert_tokens_to_ids(mark) for mark in (family.stop, "<|observation|>") if mark in family.marks]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


def play(thread: ServerThread, trace: Trace, *, answers: Sequence[Round]) -> list[Row]:
    """The rows of an episode whose agent holds this conversation."""
    episode_id, client = thread.lease()
    said = iter(answers)
    thread.engine.answer = lambda _: next(said).sampled_ids.tolist()
    for at, message in enumerate(trace.messages):
        if message["role"] == "assistant":
            more: Any = {"tools": trace.tools} if trace.tools else {}
            client.chat.completions.create(model="policy", messages=list(trace.messages[:at]), **more)
    return episode_rows(thread.stored(episode_id), group_id=0, scores=EpisodeScores(whole=0.0))


PLAYED = [
    ("chatml", SPEAKS, None), ("qwen3", THINKS_WITHIN := [
        each if each["role"] != "assistant" else {"role": "assistant", "content": f"<think>\nSo.\n</think>\n\n{each['content']}"}
        for each in SPEAKS
    ], None),
    ("", CALLS, "hermes"), ("", THINKS, None), ("qwq", THINKS, None), ("llama-3", SPEAKS, None), ("mistral-v3", SPEAKS, None),
    ("gemma-3", SPEAKS, None), ("deepseek-v3", SPEAKS, None), ("glm-4", SPEAKS, None), ("alpaca", SPEAKS, None),
    ("phi-3", SPEAKS, None),
]  # fmt: skip


@pytest.fixture
def threads() -> Iterator[list[ServerThread]]:
    started: list[ServerThread] = []
    yield started
    for thread in started:
        thread.stop()


@pytest.mark.slow
@pytest.mark.parametrize("replay_match", ["tolerant", "strict"])
@pytest.mark.parametrize(("name", "messages", "parser"), PLAYED)
def test_the_server_records_what_sft_trains(
    tmp_path: Path, threads: list[ServerThread], name: str, messages: list[Any], parser: str | None, replay_match: str
) -> None:
    more: dict[str, Any] = {"tool_parser": parser} if parser else {}
    model = model_with(tmp_path / "model", FAMILIES.get(name))
    thread = ServerThread(
        model, rollout=RolloutConfig(max_tokens=256, max_model_len=1024), replay_match=replay_match, **more
    )
    threads.append(thread)
    thread.start()
    trace = Trace(messages=messages, tools=[TOOL] if parser else None)
    renderer = make_renderer(thread._vllm_config, strict=replay_match == "strict", last_only=False)
    (expected,) = rows_of(renderer, trace)
    import asyncio

    rows = play(thread, trace, answers=asyncio.run(renderer._rounds(trace)))
    assert [(row.ids.tolist(), row.mask.tolist()) for row in rows] == [
        (row.ids.tolist(), row.mask.tolist()) for row in expected
    ]
    assert sum(int(row.mask.sum()) for row in rows) > 0


def test_chats_of_gpt_oss_are_rows_of_sft_only_where_agent_loops_write_them(tmp_path: Path) -> None:
    model = make_family("gpt_oss", tmp_path / "gpt_oss")
    settings = EngineSettings(
        model_path=model, served_name="policy", dtype="float32", server=ServerConfig(), rollout=RolloutConfig()
    )
    config = make_vllm_config(make_args(settings))
    with pytest.raises(TaskError, match=r"let agents\.loops play without agents\.command"):
        make_renderer(config, strict=True, last_only=False)
    messages = [{"role": "user", "content": "Which way?"}, {"role": "assistant", "content": "south"}]
    ((row,),) = rows_of(make_renderer(config, strict=True, last_only=False, only_loops=True), Trace(messages=messages))
    assert "south<|im_end|>" in AutoTokenizer.from_pretrained(model).decode(row.ids)
