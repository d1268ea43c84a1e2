"""Seeds on a CPU: what is sampled after a part of a prompt, and thrown away, leaves a request's generator as it was.

Installed in the engine's process by `mocked_server.vllm.process.worker_extension`. vLLM samples after each part of a prompt that is
computed in several, and sets the generator back by its offset, which generators of a CPU do not have: the engine ends. Here its
state is kept instead, so an answer does not depend on how its prompt was cut. Seams relied on: the model runner's `_sample`,
`_bookkeeping_sync`, `discard_request_mask` and `input_batch.generators`.
"""

from __future__ import annotations

from typing import Any


def install(runner: Any) -> None:
    """Replaces two methods of this model runner."""
    sample, settle = runner._sample, runner._bookkeeping_sync

    def thrown_away() -> dict[int, Any]:
        """Place in the batch -> generator of each request whose prompt is not complete."""
        generators = runner.input_batch.generators
        return {k: generators[k] for k in generators if runner.discard_request_mask.np[k]}

    def sample_and_set_back(*args: Any, **options: Any) -> Any:
        states = [(generator, generator.get_state()) for generator in thrown_away().values()]
        output = sample(*args, **options)
        for generator, state in states:
            generator.set_state(state)
        return output

    def settle_without_them(*args: Any, **options: Any) -> Any:
        generators, set_back = runner.input_batch.generators, thrown_away()
        for k in set_back:
            del generators[k]
        try:
            return settle(*args, **options)
        finally:
            generators.update(set_back)

    runner._sample, runner._bookkeeping_sync = sample_and_set_back, settle_without_them
