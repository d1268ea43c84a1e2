"""Parts for tests of agent loops: a scripted model server, in process, and a loop's surroundings."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from agents.agent_loop import verl_config
from agents.server_manager import TokenOutput

LOGPROB = -0.5


class ScriptedServer:
    """A server manager. Answers the n-th request of a request_id with `answers[n]` (token ids), or `answer(prompt_ids)`. `frozen`:
    roles that the policy does not play."""

    frozen: frozenset[str] = frozenset()

    def __init__(self, answers: list[list[int]] | Callable[[list[int]], list[int]]) -> None:
        self.answers = answers
        self.prompts: list[list[int]] = []
        self.params: list[dict[str, Any]] = []
        self.seen: dict[str, int] = {}
        self.models: list[str] = []

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], model: str = ""
    ) -> TokenOutput:
        self.models.append(model)
        self.prompts.append(prompt_ids)
        self.params.append(sampling_params)
        number = self.seen[request_id] = self.seen.get(request_id, -1) + 1
        ids = self.answers[number] if isinstance(self.answers, list) else self.answers(prompt_ids)
        ids = ids[: sampling_params.get("max_tokens", 10_000)]
        known = {"log_probs": [LOGPROB] * len(ids), "versions": [0] * len(ids)}
        return TokenOutput(ids, **known, is_trained=model not in self.frozen)


def make_loop(loop_class: Any, *, server: ScriptedServer, tokenizer: Any, room: int = 4096, **arguments: Any) -> Any:
    """A loop as the worker makes it, its class set up anew."""
    fresh = type(loop_class.__name__, (loop_class,), {"_class_initialized": False})
    config = verl_config(
        prompt_length=room // 2, response_length=room - room // 2, multi_turn={"format": "hermes", **arguments}
    )
    return fresh(
        trainer_config=SimpleNamespace(config=config),
        server_manager=server,
        tokenizer=tokenizer,
        **arguments,
    )
