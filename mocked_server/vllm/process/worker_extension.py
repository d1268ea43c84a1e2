"""Runs inside the engine's worker process: loads published weights in place, prepares it for adapters.

Named to vLLM as `--worker-extension-cls`; `VLLMEngine.load_weights` calls it by `collective_rpc` while generation is
paused, so no token is ever sampled from half-loaded weights. Imports of vLLM stay inside: the server process only needs
this module's name.
"""

from __future__ import annotations

from typing import Any


class WorkerExtension:
    """Mixed into vLLM's worker class. `self.model_runner` and `self.reload_weights` are the worker's own."""

    def load_published(self, folder: str) -> None:
        """Read `folder` (a Hugging Face folder: *.safetensors) into the running model, in the checkpoint's parameter names."""
        worker: Any = self
        worker.reload_weights(weights_path=folder)
        repack_tied_head(worker.model_runner.get_model())

    def prepare_adapters(self) -> None:
        """Called before the first adapter is loaded."""
        from vllm.platforms import current_platform

        from mocked_server.vllm.process import cpu_adapters

        if current_platform.is_cpu():
            cpu_adapters.install()


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
