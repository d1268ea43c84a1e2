"""torch.distributed and FSDP2, in one place: process group, sharding, reductions, shard copies, gathered weights.

Called by `learner.training.trainer` and `learner.training.sft`; nothing else imports torch.distributed.
Invariant: every function here but `clone_shards` and `swapped` is entered by all ranks in the same order. One rank
takes the same path as many. Parameters are sharded again after every forward pass, the root's included: shards may be
exchanged between any two passes. No losses, no data.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

PATIENCE = timedelta(minutes=30)
"""How long ranks wait for one another when they meet: a large model is not read equally fast by all."""
OWN_PAGES = 2**23
"""Bytes from which on a rank that is to take little memory of a CPU has pages of its own for a block."""
_M_MMAP_THRESHOLD = -3  # of mallopt(3)
Shards = list[Tensor]
"""This rank's part of each trained parameter, in the order of `module.parameters()`, in any dtype and on any device. Frozen ones
never differ."""


def join(address: str, *, rank: int, world_size: int, device: torch.device) -> DeviceMesh:
    """Meets the other ranks at `host:port` (rank 0 listens there, and nowhere else). gloo on CPU, NCCL on a GPU, both on the
    interface that leads there.

    Raises OSError when the port is taken."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    host, _, port = address.rpartition(":")
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface_to(host)
    # A store that makes its own socket listens on every interface, without authentication.
    listening = {"master_listen_fd": socket.create_server((host, int(port))).detach()} if rank == 0 else {}
    store = dist.TCPStore(host, int(port), world_size, is_master=rank == 0, timeout=PATIENCE, **listening)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    return init_device_mesh(device.type, (world_size,))


def return_large_blocks() -> None:
    """Has glibc give blocks of OWN_PAGES and more back when they are freed. Elsewhere it does nothing.

    Freed blocks of torch's alignment do not fit the next of their size, so glibc keeps them: what a layer was gathered into, and
    what a pass that keeps few activations makes in between. With pages of their own a rank of two takes about half of the memory
    of one alone in place of 65 %, a pass with gradient checkpointing or an adapter a third less; it takes a fifth more time, so
    that a rank which needs none of it keeps glibc's way."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, OWN_PAGES)


def interface_to(host: str) -> str:
    """The name of the network interface from which this machine reaches `host`, by its routes. Raises OSError without one.

    Without a name gloo takes the address of the machine's name, whatever that leads to."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # nothing is sent
        own: str = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == own for each in addresses):
            return str(name)
    raise OSError(f"an interface must have the address {own}, from which {host} is reached, and none has")


def leave() -> None:
    """Ends the process group; without this a rank may abort at exit."""
    if dist.is_initialized():
        dist.destroy_process_group()


def shard(module: nn.Module, *, layers: Sequence[nn.Module], mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Shards each layer and then the rest, on the mesh's devices. Passes compute in `dtype`; master weights and gradients stay
    float32. Each backward pass divides its gradients over the ranks at once: kept whole until the last micro-batch of an update,
    they would be as large as the model on each rank. One rank in float32 has nothing to divide or cast: it stays a plain module,
    as FSDP's copies of each layer would cost it a sixth of its memory and time."""
    if mesh.size() == 1 and dtype == torch.float32:
        return
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    policy = MixedPrecisionPolicy() if dtype == torch.float32 else mixed
    for part in (*layers, module):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    register_fsdp_forward_method(module, "own_logits")


def give_memory(module: nn.Module, *, device: torch.device) -> None:
    """Memory for the parameters that have none (on the device `meta`): of sharded ones, for this rank's part. Nothing is written
    there yet. The others move to the device."""
    module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))


def all_sum(values: Tensor) -> Tensor:
    """Adds `values` over the ranks, in place."""
    return _reduced(values, dist.ReduceOp.SUM)


def all_max(values: Tensor) -> Tensor:
    """Takes the largest over the ranks, in place."""
    return _reduced(values, dist.ReduceOp.MAX)


def _reduced(values: Tensor, how: Any) -> Tensor:
    if not is_alone():
        dist.all_reduce(values, op=how)
    return values


def is_alone() -> bool:
    """Whether there is one rank, which asks nobody: gloo's threads would copy with OpenMP threads of their own, and where there are
    more of those than cores, OpenMP's threads sleep whenever they wait, so that an update takes a sixth longer."""
    return bool(dist.get_world_size() == 1)


def update(
    module: nn.Module,
    *,
    optimizer: torch.optim.Optimizer,
    clip: float,
    apart: Sequence[nn.Parameter] = (),
    apart_clip: float = 1.0,
) -> float:
    """Clips, steps and clears the gradients; returns their norm. One that is not finite: clears, changes nothing.

    The parameters `apart` (a value head) are clipped by themselves, to `apart_clip`, and are not in the norm.
    """
    own = {id(parameter) for parameter in apart}
    parts: list[list[Tensor]] = [[], []]
    for parameter in module.parameters():
        if parameter.grad is not None:
            parts[id(parameter) in own].append(parameter.grad)
    sizes = [_norm(gradients) for gradients in parts]
    finite = all(size < float("inf") for size in sizes)  # false for nan too
    if finite:
        for gradients, size, most in zip(parts, sizes, (clip, apart_clip)):
            if gradients:
                torch._foreach_mul_(gradients, min(1.0, most / (size + 1e-6)))
        optimizer.step()
    optimizer.zero_grad()
    return sizes[0] if finite else float("nan")


def _norm(gradients: list[Tensor]) -> float:
    """0 of none."""
    if not gradients:
        return 0.0
    norm = torch.nn.utils.get_total_norm(gradients)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def trained(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that have a gradient: with LoRA, the adapter and a value head."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def clone_shards(
    module: nn.Module, *, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> Shards:
    """A copy of this rank's shards of what is trained, on their own device if no other is named."""
    return [
        local(parameter).to(device=device or parameter.device, dtype=dtype, copy=True) for parameter in trained(module)
    ]


def load_shards(module: nn.Module, *, shards: Shards) -> None:
    """Writes shards that `clone_shards` took from a module of the same architecture."""
    for parameter, shard_of_it in zip(trained(module), shards, strict=True):
        local(parameter).copy_(shard_of_it)


@contextmanager
def swapped(module: nn.Module, *, shards: Shards) -> Iterator[None]:
    """Runs the block with other weights, then puts the present ones back, which are meanwhile where the others are kept. Where
    the others are as the present ones are, a parameter at a time is in memory once more, and else all of them."""
    own = [local(parameter) for parameter in trained(module)]
    alike = all(one.dtype == other.dtype and one.device == other.device for one, other in zip(own, shards, strict=True))
    present = [] if alike else clone_shards(module, device=shards[0].device)
    if alike:
        _exchange(own, shards)
    else:
        load_shards(module, shards=shards)
    try:
        yield
    finally:
        if alike:
            _exchange(own, shards)
        else:
            load_shards(module, shards=present)


def _exchange(own: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    for one, other in zip(own, others, strict=True):
        before = one.clone()
        one.copy_(other)
        other.copy_(before)


def local(tensor: Any) -> Tensor:
    """This rank's part of a tensor."""
    found: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found.detach()


def on_host(tensor: Tensor) -> Tensor:
    """The tensor with its elements in the host's memory, still a part of a whole where it is one."""
    if not isinstance(tensor, DTensor):
        return tensor.cpu()
    return DTensor.from_local(
        tensor.to_local().cpu(), tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape,
        stride=tensor.stride(),
    )  # fmt: skip


class LocalRange(NamedTuple):
    """This rank's part of a parameter: `local`, of any shape, is elements [start, start + local.numel()) in row-major order."""

    name: str
    shape: list[int]
    start: int
    local: Tensor


def local_ranges(module: nn.Module, *, trained_only: bool = False) -> list[LocalRange]:
    """What this rank holds, by name; a tied parameter comes once, under its first name. No rank waits for another."""
    found = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad or not trained_only:
            whole, start = parameter.detach(), 0
            local = whole
            if isinstance(whole, DTensor):  # rows are dealt as torch.chunk does
                local = whole.to_local()
                rows = -(-whole.shape[0] // whole.device_mesh.size())
                first = min(rows * whole.device_mesh.get_local_rank(), whole.shape[0])
                start = first * (whole.numel() // max(1, whole.shape[0]))
            found.append(LocalRange(name, list(parameter.shape), start, local))
    return found


def whole(module: nn.Module, name: str, *, dtype: torch.dtype) -> Tensor:
    """A whole parameter on the CPU. All ranks enter."""
    parameter = module.get_parameter(name).detach().to(dtype)
    found: Tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return found.cpu()


def kept_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Those that are weights too: a folder has them. Every rank has the same."""
    kept = module.state_dict().keys()
    return [(name, buffer) for name, buffer in module.named_buffers() if name in kept and buffer.is_floating_point()]


def gather_parameters(module: nn.Module, *, trained_only: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Whole float32 parameters on CPU, one at a time, by name; a tied parameter comes once, under its first name."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad or not trained_only:
            whole = parameter.detach().full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
            yield name, whole.to(device="cpu").contiguous()


# AdamW in one kernel, with its two moments on the card or in the host's memory. Invariant: where the moments lie changes no bit
# of an update. A parameter at a time: with the moments on the host, those of one are on the card at once.

BETAS = (0.9, 0.95)
EPS = 1e-8
"""What is added to the size of a gradient that Adam divides by."""
MOMENTS = ("exp_avg", "exp_avg_sq")


def make_adamw(groups: list[dict[str, Any]], *, lr: float, moments_on_host: bool = False) -> torch.optim.AdamW:
    """AdamW without weight decay. `moments_on_host`: its moments are in the host's memory between updates."""
    kind = HostAdamW if moments_on_host else torch.optim.AdamW
    return kind(groups, lr=lr, betas=BETAS, eps=EPS, weight_decay=0.0, fused=True)


class HostAdamW(torch.optim.AdamW):  # type: ignore[misc]
    """AdamW whose moments go to the card for the update of their parameter, and back."""

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update. There is no closure."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group=group)

    def _update(self, parameter: Tensor, *, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            for name in MOMENTS:
                state[name] = on_host(torch.zeros_like(parameter))
        weight, gradient = local(parameter), local(parameter.grad)
        step, *moments = (local(state[name]).to(weight.device) for name in ("step", *MOMENTS))
        first, second = group["betas"]
        adamw(
            [weight], [gradient], [moments[0]], [moments[1]], [], [step], fused=True, amsgrad=False, beta1=first, beta2=second,
            lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        )  # fmt: skip
        for name, moved in zip(("step", *MOMENTS), (step, *moments), strict=True):
            if (kept := local(state[name])) is not moved:
                kept.copy_(moved)
