"""An engine that samples the line which `rehearsal` put into a request: vLLM's own, held to the words by its grammar.

Used by `mocked_server.check`. Which tokens spell the words is left to the model, so most answers come in tokens that no tokenizer
would give: what depends on encoding text again is found out.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from mocked_server.rehearsal import LINE
from mocked_server.vllm_engine import VLLMEngine


class RehearsedEngine:
    """Wraps a started `VLLMEngine`."""

    def __init__(self, engine: VLLMEngine) -> None:
        self._engine = engine
        self.version = 0

    async def generate(
        self, prompt_token_ids: list[int], params: Any, *, request_id: str, **extra: Any
    ) -> AsyncGenerator[Any, None]:
        """As `VLLMEngine.generate`, with the words of the request's line."""
        from vllm.sampling_params import StructuredOutputsParams

        line = (params.extra_args or {}).pop(LINE, None)
        if line is not None:
            params.structured_outputs = StructuredOutputsParams(choice=[line])
        async with aclosing(self._engine.generate(prompt_token_ids, params, request_id=request_id, **extra)) as outputs:
            async for output in outputs:
                yield output
