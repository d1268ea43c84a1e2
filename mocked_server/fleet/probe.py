"""A probe of an engine: ordinary tokens that it samples freely, whose log-probabilities the learner computes again.

Called by `mocked_server.fleet.engine_fleet` for `learner.agreement`, between two versions of the weights. None is recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from mocked_server.fleet.member import ADAPTER_OF, FleetEngine, logprobs_of


async def probe(
    engine: FleetEngine, prompt_token_ids: Sequence[int], *, params: Any, role: str = ""
) -> tuple[list[int], list[float]]:
    """The prompt with what was sampled after it, and that one's log-probabilities. The second half is a request of its
    own: it finds the first one's keys and states in the engine's cache. Raises EngineLost, RequestRefused, RequestFailed."""
    extra: dict[str, Any] = {ADAPTER_OF: role} if role else {}
    ids, logprobs = list(prompt_token_ids), list[float]()
    for _ in range(2):
        outputs = engine.generate(ids.copy(), params, request_id=f"probe-{uuid4().hex}", **extra)
        async with aclosing(outputs) as stream:
            async for output in stream:
                if output.finished:
                    sampled = list(output.outputs[0].token_ids)
                    ids += sampled
                    logprobs += logprobs_of(output.outputs[0], sampled)
    return ids, logprobs
