"""The tiny model's folder: deterministic, loadable, and its template append-only with hermes tool calls."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs.tiny_model import MARKUP_TOKENS, SPECIAL_TOKENS, chat_template, make_tiny_model

Message = dict[str, Any]
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é"}}}
TOOL_CHAT: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Add "}, {"type": "text", "text": "them."}]},
    {"role": "assistant", "content": None, "reasoning_content": "Two calls.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "3"},
    {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "4"}]},
    {"role": "assistant", "content": "7"},
    {"role": "user", "content": "Thanks."},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def render(tokenizer: Any, messages: list[Message], **options: Any) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def test_same_seed_gives_the_same_bytes_and_another_seed_other_weights(folder: Path, tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    again, other = make_tiny_model(tmp_path / "a"), make_tiny_model(tmp_path / "b", seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    names = sorted(path.name for path in folder.iterdir())
    assert names == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    for name in names:
        assert (again / name).read_bytes() == (folder / name).read_bytes(), name
        same = (other / name).read_bytes() == (folder / name).read_bytes()
        assert same == (name != "model.safetensors"), name


def test_a_complete_folder_is_left_alone_and_nothing_else_is_left_behind(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    folder = make_tiny_model(tmp_path / "empty")
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert make_tiny_model(folder, seed=7) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755


def test_a_folder_with_other_files_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="must be new, empty or complete"):
        make_tiny_model(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_the_model_loads_with_the_promised_sizes(folder: Path, tokenizer: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = model.config
    assert type(model).__name__ == "Qwen3ForCausalLM" and model.dtype == torch.float32
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (2, 128, 256)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 32)
    assert (config.vocab_size, config.max_position_embeddings, config.tie_word_embeddings) == (512, 32768, True)
    assert sum(parameter.numel() for parameter in model.parameters()) == 361_216
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>") == tokenizer.eos_token_id
    assert config.pad_token_id == tokenizer.convert_tokens_to_ids("<|endoftext|>") == tokenizer.pad_token_id
    assert len(tokenizer) == 512
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokenizer.encode("The exit is north.")])).logits
    assert logits.shape == (1, 5, 512) and bool(torch.isfinite(logits).all())


def test_markup_tokens_stay_in_decoded_text_and_control_tokens_do_not(tokenizer: Any) -> None:
    for token in (*SPECIAL_TOKENS, *MARKUP_TOKENS):
        (number,) = tokenizer.encode(token)
        assert tokenizer.decode([number]) == token
        assert tokenizer.decode([number], skip_special_tokens=True) == ("" if token in SPECIAL_TOKENS else token)


def test_every_text_survives_tokenization(tokenizer: Any) -> None:
    @settings(max_examples=100, deadline=None)
    @given(text=st.text(st.characters(exclude_categories=["Cs"])))
    def holds(text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text)) == text

    holds()


def test_digits_are_single_and_the_demo_costs_few_tokens(tokenizer: Any) -> None:
    assert [tokenizer.decode([number]) for number in tokenizer.encode("x 12345")] == ["x", " ", *"12345"]
    first = [
        {"role": "system", "content": "Find the exit. Move with w, a, s or d."},
        {"role": "user", "content": "The exit is north."},
    ]
    assert len(tokenizer.apply_chat_template(first, add_generation_prompt=True)["input_ids"]) == 32
    assert all(len(tokenizer.encode(key)) == 1 for key in "wasd")


def test_tool_conversation_in_full(tokenizer: Any) -> None:
    expected = """\
<|im_start|>system
Be brief.

Tools that you may call:
<tools>
{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
</tools>
A call is written as:
<tool_call>
{"name": "...", "arguments": {...}}
</tool_call><|im_end|>
<|im_start|>user
Add them.<|im_end|>
<|im_start|>assistant
<think>
Two calls.
</think>

<tool_call>
{"name": "add", "arguments": {"a": 1, "b": "é"}}
</tool_call>
<tool_call>
{"name": "add", "arguments": {"a": 1, "b": "é"}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
3
</tool_response>
<tool_response>
4
</tool_response><|im_end|>
<|im_start|>assistant
7<|im_end|>
<|im_start|>user
Thanks.<|im_end|>
<|im_start|>assistant
"""
    assert render(tokenizer, TOOL_CHAT, tools=[TOOL], add_generation_prompt=True) == expected
    assert render(tokenizer, TOOL_CHAT, tools=[TOOL], add_generation_prompt=True, enable_thinking=False) == expected


def test_arguments_as_text_and_content_before_a_call(tokenizer: Any) -> None:
    call = {"function": {"name": "add", "arguments": '{"a":1}'}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "Well.", "tool_calls": [call]}]
    assert render(tokenizer, messages) == (
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nWell.\n"
        '<tool_call>\n{"name": "add", "arguments": {"a":1}}\n</tool_call><|im_end|>\n'
    )


def test_a_longer_conversation_starts_with_the_shorter_one(tokenizer: Any) -> None:
    for tools in (None, [TOOL]):
        whole = render(tokenizer, TOOL_CHAT, tools=tools)
        for end in (2, 3, 5, 6, 7):  # not between the two tool messages, which share one turn
            prompting = end in (2, 5, 7)
            shorter = render(tokenizer, TOOL_CHAT[:end], tools=tools, add_generation_prompt=prompting)
            longer = whole + "<|im_start|>assistant\n" if end == 7 else whole
            assert longer.startswith(shorter), end


def test_tools_without_a_system_message_and_system_messages_later_on(tokenizer: Any) -> None:
    with_tools = render(tokenizer, [{"role": "user", "content": "q"}], tools=[TOOL])
    assert with_tools.startswith("<|im_start|>system\nTools that you may call:\n<tools>\n")
    later = [{"role": "user", "content": "q"}, {"role": "developer", "content": "Now rhyme."}]
    assert render(tokenizer, later) == ("<|im_start|>user\nq<|im_end|>\n<|im_start|>system\nNow rhyme.<|im_end|>\n")


def test_unknown_roles_and_parts_are_refused(tokenizer: Any) -> None:
    with pytest.raises(Exception, match="unknown role judge: use system, developer, user, assistant or tool"):
        render(tokenizer, [{"role": "judge", "content": "q"}])
    picture = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(Exception, match="content parts must be of type text, got image_url"):
        render(tokenizer, [{"role": "user", "content": picture}])


def test_strip_thinking_drops_the_reasoning_of_earlier_turns_only(folder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_model(tmp_path / "strips", strip_thinking=True))
    assert tokenizer.chat_template == chat_template(strip_thinking=True)
    question, answer = {"role": "user", "content": "q"}, "<|im_start|>assistant\n"
    for thought in (
        {"role": "assistant", "content": "ok", "reasoning_content": "hm"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nok"},
    ):
        shorter = render(tokenizer, [question, thought])
        assert shorter == f"<|im_start|>user\nq<|im_end|>\n{answer}<think>\nhm\n</think>\n\nok<|im_end|>\n"
        longer = render(tokenizer, [question, thought, question])
        assert longer == f"<|im_start|>user\nq<|im_end|>\n{answer}ok<|im_end|>\n<|im_start|>user\nq<|im_end|>\n"
    tool = {"role": "tool", "content": "3"}  # a tool's answer is not a new turn: the reasoning stays
    assert "<think>\nhm\n</think>" in render(tokenizer, [question, thought, tool])
    unstripped = render(AutoTokenizer.from_pretrained(folder), [question, thought, question])
    assert "<think>\nhm\n</think>" in unstripped


def test_strip_thinking_changes_nothing_but_the_template(folder: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "strips", strip_thinking=True)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (other / name).read_bytes() == (folder / name).read_bytes()
    assert json.loads((other / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
