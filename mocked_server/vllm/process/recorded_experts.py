"""Records the experts of each token on a CPU, where vLLM does not; its outputs are those that vLLM's own have on a GPU.

Made in the engine's process (`worker_extension`) when it starts, with prefix caching off: a token that is cached meets no router. A
chunk of rows goes with each output that samples a token, for all places before that token from `routed_experts_prompt_start` on.
Invariant: a place has the experts of the first pass that computed it, whatever weights come later. Seams relied on: routers'
`set_capture_fn`, the model runner's batch, the scheduler's outputs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from torch import Tensor


class RecordedExperts:
    """Watches one model runner from now on, and the scheduler of its process. Raises RuntimeError for a model that has no router of
    vLLM's."""

    def __init__(self, runner: Any) -> None:
        from vllm.model_executor.layers.fused_moe.layer import MoERunner
        from vllm.v1.core.sched.scheduler import Scheduler

        config = runner.vllm_config.model_config
        self._runner = runner
        self._shape = config.get_total_num_hidden_layers(), config.get_num_experts_per_tok()
        self._dtype = np.uint8 if config.get_num_experts() <= 256 else np.uint16
        self._pass: dict[int, Tensor] = {}
        """The choices of the pass at hand, by layer."""
        self._known: dict[str, int] = {}
        """Request -> places that are recorded, or were not asked for."""
        self._unsent: dict[str, list[np.ndarray]] = {}
        routed = [module for module in runner.get_model().modules() if isinstance(module, MoERunner)]
        if not routed:
            raise RuntimeError(
                f"learner.router_replay needs a model whose experts vLLM itself runs, got {type(runner.get_model()).__name__}; "
                f"set learner.router_replay=false"
            )
        for module in routed:
            module.router.set_capture_fn(partial(self._pass.__setitem__, module.layer_id))
        runner.execute_model = partial(self._execute, runner.execute_model)
        updated = Scheduler.update_from_output

        def with_experts(scheduler: Any, *given: Any, **options: Any) -> Any:
            found = updated(scheduler, *given, **options)
            for output in [output for outputs in found.values() for output in outputs.outputs]:
                if output.new_token_ids and (rows := self._unsent.pop(output.request_id, None)):
                    output.routed_experts = np.concatenate(rows)
            return found

        Scheduler.update_from_output = with_experts

    def _execute(self, execute: Any, planned: Any, *given: Any, **options: Any) -> Any:
        for name in planned.finished_req_ids:
            self._known.pop(name, None)
            self._unsent.pop(name, None)
        for new in planned.scheduled_new_reqs:
            self._known[new.req_id] = new.sampling_params.routed_experts_prompt_start
        self._pass.clear()
        answer = execute(planned, *given, **options)
        batch, first = self._runner.input_batch, 0
        for place, name in enumerate(batch.req_ids):
            count = planned.num_scheduled_tokens.get(name, 0)
            start = int(batch.num_computed_tokens_cpu[place])
            fresh = max(0, start + count - self._known[name])  # fewer: some are computed again
            rows = np.zeros((min(fresh, count), *self._shape), dtype=self._dtype)
            for layer, chosen in self._pass.items():
                rows[:, layer] = chosen[first + count - len(rows) : first + count].numpy()
            if len(rows):
                self._unsent.setdefault(name, []).append(rows)
                self._known[name] = start + count
            first += count
        return answer
