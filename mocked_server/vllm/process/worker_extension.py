"""Runs inside the engine's worker process: loads published weights in place, prepares it for adapters.

Named to vLLM as `--worker-extension-cls`; `VLLMEngine.load_weights` calls it by `collective_rpc` while generation is paused, so no
token is ever sampled from half-loaded weights. Invariant: before the first version is loaded the worker has shown that it can: its
weights were set to zero, and a load of the folder that it was started from brought back each of them. Imports of vLLM stay inside:
the server process only needs this module's name.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from functools import partial
from mmap import MADV_DONTNEED, PAGESIZE
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from configs.child_processes import give_memory_back

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
        give_memory_back()

    def free_memory(self, has_weights: bool) -> None:
        """Called on a CPU while no block of the KV cache is in use: its pages go back to the system, and come again as zeros.
        `has_weights`: those of the weights, too, and what is packed of them, until all are loaded again."""
        libc = ctypes.CDLL(None)
        freed = tree_leaves(self.model_runner.kv_caches)  # type: ignore[attr-defined]
        for module in self.model_runner.get_model().modules() if has_weights else ():  # type: ignore[attr-defined]
            freed += module.parameters(recurse=False)
            if "cpu_linear" in vars(module):
                module.cpu_linear = None  # it holds the packed ones
        for tensor in freed:
            storage = tensor.untyped_storage()
            first = -(-storage.data_ptr() // PAGESIZE) * PAGESIZE
            size = (storage.data_ptr() + storage.nbytes() - first) // PAGESIZE * PAGESIZE
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(max(0, size)), MADV_DONTNEED)
        give_memory_back()

    def watch_layers(self, prompt: list[int]) -> None:
        """Keep the state of this prompt's last token behind each layer, of passes from now on."""
        self._watched = LayerStates(self.model_runner.get_model(), prompt=prompt)  # type: ignore[attr-defined]

    def watched_layers(self) -> list[bytes]:
        """[layers] of [hidden] float32, and an end of it; empty where no pass had them (graphs that are replayed call no hooks)."""
        return self._watched.end()

    def record_experts(self) -> None:
        """Called on a CPU before the first request, with `learner.router_replay`."""
        RecordedExperts(self.model_runner)  # type: ignore[attr-defined]

    def keep_seeds(self) -> None:
        """Called before the first request."""
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            keep_generators(self.model_runner)  # type: ignore[attr-defined]

    def prepare_adapters(self) -> None:
        """Called before the first adapter is loaded."""
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            group_adapters()


def _tried_way(worker: Any) -> Callable[[Any, str], None]:
    """The first way that brings back what the engine was started with, by vLLM's checksums of all parameters and buffers."""
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


# Adapters on a CPU, several times as fast: the tokens of one adapter are computed together. vLLM's own way copies an adapter's
# matrices once for each token of a step, which takes six times as long as the model itself. A step has few adapters, one for
# each version that generations began under: two matrix products for each of them, and each layer, are enough. What is computed
# is the same.

Groups = list[tuple[int, slice | Tensor]]
"""(slot of an adapter, its rows); rows without an adapter are in none."""


def group_adapters() -> None:
    """Replaces vLLM's computation in this process."""
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    original: Any = PunicaWrapperCPU.update_metadata
    if original.__name__ == "update_metadata_and_groups":
        return

    def update_metadata_and_groups(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        self.token_groups = groups_of(self.token_lora_indices)
        self.sampler_groups = groups_of(self.sampler_indices)

    PunicaWrapperCPU.update_metadata = update_metadata_and_groups
    PunicaWrapperCPU.add_lora_linear = _add_to_layer
    PunicaWrapperCPU.add_lora_logits = _add_to_logits


def groups_of(slots: Tensor) -> Groups:
    """[n] slots of n rows, -1 for none."""
    found = [slot for slot in slots.unique().tolist() if slot >= 0]
    if len(found) == 1 and bool((slots == found[0]).all()):
        return [(found[0], slice(0, len(slots)))]
    return [(slot, (slots == slot).nonzero()[:, 0]) for slot in found]


def _add_to_layer(
    self: Any,
    y: Tensor,
    x: Tensor,
    lora_a_stacked: tuple[Tensor, ...],
    lora_b_stacked: tuple[Tensor, ...],
    scale: float,
    output_slices: tuple[int, ...],
    **_: Any,
) -> None:
    """y [n, out] += scale * x [n, in] @ A^T @ B^T, for each slice of a packed layer; A [slots, 1, r, in], B [slots, 1, out, r]."""
    for slot, rows in self.token_groups:
        own, begin = x[rows], 0
        for down, up, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            y[rows, begin : begin + size] += _product(own, down[slot, 0], up[slot, 0], scale=scale).to(y.dtype)
            begin += size


def _add_to_logits(
    self: Any, y: Tensor, x: Tensor, lora_a_stacked: Tensor, lora_b_stacked: Tensor, scale: float, **_: Any
) -> None:
    """The same as `_add_to_layer`, for the output matrix."""
    logits, states = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
    for slot, rows in self.sampler_groups:
        added = _product(states[rows], lora_a_stacked[slot, 0], lora_b_stacked[slot, 0], scale=scale)
        logits[rows, : added.shape[1]] += added.to(y.dtype)


def _product(x: Tensor, down: Tensor, up: Tensor, *, scale: float) -> Tensor:
    """The product with A in float32, as vLLM does it."""
    return (scale * torch.nn.functional.linear(x.float(), down.float())).to(up.dtype) @ up.T


# Seeds on a CPU: what is sampled after a part of a prompt, and thrown away, leaves a request's generator as it was. vLLM
# samples after each part of a prompt that is computed in several, and sets the generator back by its offset, which generators
# of a CPU do not have: the engine ends. Here its state is kept instead, so an answer does not depend on how its prompt was cut.
# Seams relied on: the model runner's `_sample`, `_bookkeeping_sync`, `discard_request_mask` and `input_batch.generators`.


def keep_generators(runner: Any) -> None:
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


# The states behind the layers of a running model: which of them differ from the learner's is what names a wrong one. Invariant:
# the model computes what it did.

TAIL = 8
"""Last tokens of the prompt by which a pass that computes its end is known among others."""


class LayerStates:
    """Watches `model` from now on, for passes over the end of `prompt`."""

    def __init__(self, model: Any, *, prompt: list[int]) -> None:
        self._tail = prompt[-TAIL:]
        self._place: int | None = None
        """Place of the prompt's last token in the present pass; None: it has none."""
        lists = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
        layers: Any = max(lists, key=lambda part: sum(each.numel() for each in part.parameters()), default=[])
        self._states: dict[int, bytes] = {}
        self._hooks = [model.register_forward_pre_hook(self._begin, with_kwargs=True)]
        self._hooks += [layer.register_forward_hook(self._keeper(number)) for number, layer in enumerate(layers)]

    def _begin(self, model: Any, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        ids = options.get("input_ids", given[0] if given else None)
        ids = [] if ids is None else ids.flatten().tolist()
        width = len(self._tail)
        ends = (end for end in range(width, len(ids) + 1) if ids[end - width : end] == self._tail)
        self._place = next((end - 1 for end in ends), None)

    def _keeper(self, number: int) -> Any:
        def keep(layer: Any, given: Any, answer: Any) -> None:
            if self._place is None:
                return
            parts = [part for part in (answer if isinstance(answer, tuple) else (answer,)) if isinstance(part, Tensor)]
            # vLLM adds the residual in the next layer's norm.
            rows = [part.flatten(0, -2)[self._place].float() for part in parts if part.shape == parts[0].shape]
            self._states[number] = sum(rows[1:], rows[0]).cpu().numpy().tobytes()

        return keep

    def end(self) -> list[bytes]:
        """What was kept, of the last pass."""
        for hook in self._hooks:
            hook.remove()
        return [state for _, state in sorted(self._states.items())]


# Records the experts of each token on a CPU, where vLLM does not; its outputs are those that vLLM's own have on a GPU. A chunk
# of rows goes with each output that samples a token, for all places before that token from `routed_experts_prompt_start` on.
# Invariant: a place has the experts of the first pass that computed it, whatever weights come later. Seams relied on: routers'
# `set_capture_fn`, the model runner's batch, the scheduler's outputs.


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


# Loads a whole model anew into the memory that its kernels read, as the engine did when it started. For a moment it takes the
# memory of the weights twice. Invariant: tensors that kernels hold stay where they are; only their values change.


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
