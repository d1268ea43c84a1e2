"""A chat template that knows users and answers only, as those of models that were tuned without tools: what a tool says is refused,
as the model would never see it; the same conversation without it is answered."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import openai
import pytest

from configs.schema import RolloutConfig
from configs.tiny_model import make_tiny_model
from tests.support.server_parts import ServerThread

VLLM = Path(str(getattr(find_spec("vllm"), "origin", ""))).parent
TEMPLATE = (VLLM / "transformers_utils" / "chat_templates" / "template_blip2.jinja").read_text(encoding="utf-8")
"""vLLM's own for BLIP-2."""


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
