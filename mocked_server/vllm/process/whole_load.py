"""Loads a whole model anew into the memory that its kernels read, as the engine did when it started.

Used by `mocked_server.vllm.process.worker_extension` where vLLM's way, layer by layer, does not restore a model: one whose
`load_weights` copies values itself and calls no loader (gpt-oss) keeps its old experts there without a word. For a moment it takes
the memory of the weights twice. Invariant: tensors that kernels hold stay where they are; only their values change.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def load_whole(worker: Any, folder: str) -> None:
    """All layers in the form that files have, filled by the model's own `load_weights`, processed, and copied to where they were.
    What `folder` lacks is taken from the folder that the engine was started from."""
    import torch
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    runner = worker.model_runner
    model, config = runner.get_model(), runner.vllm_config
    infos = {layer: layerwise.get_layerwise_info(layer) for layer in model.modules()}
    with torch.no_grad(), torch.device(runner.device):
        one: dict[int, Any] = {}
        for layer, info in infos.items():
            info.kernel_tensors = layerwise.get_layer_params_buffers(layer)
            info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
            _as_in_files(layer, info, one=one)
        model.load_weights(_weights(config, model, folder=folder))
        process_weights_after_loading(model, config.model_config, runner.device)
        for layer, info in infos.items():
            parameters, buffers = info.kernel_tensors
            for name, tensor in (parameters | buffers).items():
                if (new := getattr(layer, name, None)) is not None and new is not tensor:
                    tensor.data.copy_(new.data)
            layerwise._place_kernel_tensors(layer, info)
            info.reset()
    runner.reset_lora_state()
    runner.reset_encoder_cache()
    runner.reset_mm_cache()


def _as_in_files(layer: Any, info: Any, *, one: dict[int, Any]) -> None:
    """Gives a layer memory in the form that files have. `one`: old tensor -> new one: what was tied stays tied."""
    from vllm.model_executor.model_loader.reload import layerwise

    parameters, buffers = info.kernel_tensors
    layerwise.restore_layer_on_meta(layer, info)
    layerwise.materialize_layer(layer, info)
    for tensor in layerwise.get_layer_tensors(layer).values():
        if hasattr(tensor, "weight_loader"):
            tensor.weight_loader = layerwise._get_original_loader(tensor)
    for name, old in parameters.items():
        if name in layer._parameters:
            layer._parameters[name] = one.setdefault(id(old), layer._parameters[name])
    for name, old in buffers.items():  # those that are computed keep their values
        new = layer._buffers.get(name)
        if new is not None and new is not old and new.shape == old.shape:
            new.copy_(old)
    if getattr(getattr(layer, "quant_method", None), "moe_kernel", None) is not None:
        layer.quant_method.moe_kernel = None
    if hasattr(layer, "_already_called_process_weights_after_loading"):
        del layer._already_called_process_weights_after_loading


def _weights(config: Any, model: Any, *, folder: str) -> Iterator[tuple[str, Any]]:
    """Those of `folder`, and what the folder of the start has beside them."""
    import copy

    from vllm.model_executor.model_loader import get_model_loader

    loader = get_model_loader(config.load_config)
    published = copy.copy(config.model_config)
    published.model, published.revision = folder, None
    names = set()
    for name, weight in loader.get_all_weights(published, model):
        names.add(name)
        yield name, weight
    for name, weight in loader.get_all_weights(config.model_config, model):
        if name not in names:
            yield name, weight
