"""A chat template that knows users and answers only, as those of models that were tuned without tools: what a tool says is refused,
as the model would never see it; the same conversation without it is answered."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from configs.schema import RolloutConfig
from configs.tiny_model import make_tiny_model
from tests.support.server_parts import ServerThread

TEMPLATE = """\
{%- for message in messages %}
{%- if message['role'] in ('user', 'assistant') %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endif %}{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.mark.seconds
def test_what_a_tool_says_to_a_template_that_leaves_it_out_is_refused(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", seed=0)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    thread = ServerThread(model, rollout=RolloutConfig(max_tokens=8, max_model_len=512))
    thread.start()
    try:
        user = {"role": "user", "content": "What is 6 times 7?"}
        called = {"id": "c1", "type": "function", "function": {"name": "times", "arguments": "{}"}}
        calls = {"role": "assistant", "content": "Let me see.", "tool_calls": [called]}
        said = {"role": "tool", "tool_call_id": "c1", "content": "42"}
        _, client = thread.lease()
        for messages in ([user, calls, said], [user, calls, said, user]):
            with pytest.raises(
                openai.BadRequestError, match="must show messages of the role tool, and leaves them out"
            ):
                client.chat.completions.create(model="policy", messages=messages)
        assert client.chat.completions.create(model="policy", messages=[user]).choices
    finally:
        thread.stop()
