"""What a tool says reaches the model, or the template is refused: one that leaves it out, one that writes it after a call only."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from agents.chat_template_ids import tail_ids
from buffers.errors import AgentError
from tests.mocked_server.http.test_left_out_roles import TEMPLATE

AFTER_CALLS = """\
{%- for message in messages %}{% if message['role'] != 'tool' or messages[loop.index0 - 1].tool_calls %}<|im_start|>\
{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endif %}{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SAID = {"role": "tool", "tool_call_id": "c1", "content": "42"}


def tail(template: str, model: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template
    return str(tokenizer.decode(tail_ids(tokenizer, [SAID], tools=None, after=None)))


def test_what_a_template_writes_after_a_call_only_is_written_after_one(tiny_model: Path) -> None:
    assert "<|im_start|>tool\n42<|im_end|>" in tail(AFTER_CALLS, tiny_model)


def test_what_a_template_leaves_out_is_refused(tiny_model: Path) -> None:
    with pytest.raises(AgentError, match=r"must write a tool's result after its call, got .*, or nothing of it"):
        tail(TEMPLATE, tiny_model)
