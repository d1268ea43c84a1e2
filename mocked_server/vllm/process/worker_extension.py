"""Runs inside the engine's worker process: loads published weights in place, prepares it for adapters.

Named to vLLM as `--worker-extension-cls`; `VLLMEngine.load_weights` calls it by `collective_rpc` while generation is paused, so no
token is ever sampled from half-loaded weights. Invariant: before the first version is loaded the worker has shown that it can: its
weights were set to zero, and a load of the folder that it was started from brought back each of them. Imports of vLLM stay inside:
the server process only needs this module's name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

NAMED = 4
"""Parameters that a refusal names."""


class WorkerExtension:
    """Mixed into vLLM's worker class. `self.model_runner` and the checksums are the worker's own."""

    _published_way: Callable[[Any, str], None] | None = None
    """The way to load that has been tried on this worker's model."""

    def load_published(self, folder: str) -> None:
        """Read `folder` (a Hugging Face folder: *.safetensors) into the running model, in the checkpoint's parameter names; what it
        lacks stays. Raises RuntimeError for a model that no way of loading restores, at the first call."""
        if self._published_way is None:
            self._published_way = _tried_way(self)  # on the worker: another engine in this process has another model
        self._published_way(self, folder)

    def watch_layers(self, prompt: list[int]) -> None:
        """Keep the state of this prompt's last token behind each layer, of passes from now on."""
        from mocked_server.vllm.process.layer_states import LayerStates

        self._watched = LayerStates(self.model_runner.get_model(), prompt=prompt)  # type: ignore[attr-defined]

    def watched_layers(self) -> list[bytes]:
        """[layers] of [hidden] float32, and an end of it; empty where no pass had them (graphs that are replayed call no hooks)."""
        return self._watched.end()

    def record_experts(self) -> None:
        """Called on a CPU before the first request, with `learner.router_replay`."""
        from mocked_server.vllm.process.recorded_experts import RecordedExperts

        RecordedExperts(self.model_runner)  # type: ignore[attr-defined]

    def keep_seeds(self) -> None:
        """Called before the first request."""
        from vllm.platforms import current_platform

        from mocked_server.vllm.process import cpu_seeds

        if current_platform.is_cpu():
            cpu_seeds.install(self.model_runner)  # type: ignore[attr-defined]

    def prepare_adapters(self) -> None:
        """Called before the first adapter is loaded."""
        from vllm.platforms import current_platform

        from mocked_server.vllm.process import cpu_adapters

        if current_platform.is_cpu():
            cpu_adapters.install()


def _tried_way(worker: Any) -> Callable[[Any, str], None]:
    """The first way that brings back what the engine was started with, by vLLM's checksums of all parameters and buffers."""
    from mocked_server.vllm.process.whole_load import load_whole

    started_from = str(worker.model_runner.vllm_config.model_config.model)
    expected = worker.compute_weight_checksums()
    found: list[str] = []
    for way in (load_layer_by_layer, load_whole):
        worker.reset_weights()
        try:
            way(worker, started_from)
        except Exception as error:  # of any kind: it is vLLM's model code
            found.append(f"{way.__name__}: {type(error).__name__}: {str(error)[:200]}")
            continue
        sums = worker.compute_weight_checksums()
        apart = [name.rpartition(":")[2] for name, value in expected.items() if sums.get(name) != value]
        if not apart:
            return way
        found.append(f"{way.__name__}: {len(apart)} are not what they were, such as {', '.join(apart[:NAMED])}")
    raise RuntimeError(
        f"the engine must take new weights in place, and cannot for {type(worker.model_runner.get_model()).__name__}: "
        f'{"; ".join(found)}; set rollout.engine_args={{"model_impl": "transformers"}}, or train another model'
    )


def load_layer_by_layer(worker: Any, folder: str) -> None:
    """vLLM's own: it needs memory for one layer beside the model. Experts are packed for their kernel anew (on a CPU), and so is
    an output matrix that is tied to the embeddings."""
    model = worker.model_runner.get_model()
    for module in model.modules():
        if hasattr(module, "w13_weight") and getattr(module.quant_method, "moe_kernel", None) is not None:
            module.quant_method.moe_kernel = None  # where there is one, vLLM packs no experts
    for tensor in (*model.parameters(), *model.buffers()):  # vLLM asks for names, which partial functions lack
        if isinstance(loader := getattr(tensor, "weight_loader", None), functools.partial):
            loader.__name__ = loader.func.__name__  # type: ignore[attr-defined]
    worker.reload_weights(weights_path=folder)
    repack_tied_head(model)


def repack_tied_head(model: Any) -> None:
    """Refresh the packed copy of a tied output head on CPU.

    vLLM packs `lm_head` for its CPU kernel when the model is first loaded and keeps the original tensor too; a reload refreshes
    only the original, so the logits would silently come from the old weights. Packing again is harmless where nothing
    is packed.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and module.quant_method is not None:
            module.quant_method.process_weights_after_loading(module)
