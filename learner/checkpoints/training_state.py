"""The learner's whole state on disk, with torch DCP: weights, optimizers, kept weight copies, random states, counters.

Called by `learner.training.trainer` on every rank at the same time; each rank writes and reads its own shards, so any
number of ranks may load what another number saved. Invariants: what is loaded has the names and shapes of what is
there, or nothing is changed; loading on as many ranks gives every bit back. `learner.checkpoints.store` decides where
folders lie and when they are complete. DCP keeps its index as a pickle: of what that names only INDEX is made, so that no folder
runs a program here.
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from buffers.disk import why_refused
from buffers.errors import StorageFull
from learner.checkpoints.store import COUNTERS
from learner.model.fsdp import HostAdamW, Shards, is_alone, on_host

COPY, RANDOM = "copy", "random"
"""First parts of the names of kept weight copies and of random states."""
INDEX = frozenset(
    {("torch", "Size"), ("torch.serialization", "_get_layout"), ("torch.distributed.checkpoint.filesystem", "_StorageInfo")}
    | {
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    }
)  # fmt: skip
"""Module and name of what DCP's index of tensors is made of, beside the types of their numbers."""
OPTIMIZER = "#"
"""Separates a parameter's name from the name of its optimizer state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """One module with its optimizer."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    trained_only: bool = False
    """Frozen weights are left out: they are read with the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What is not a tensor. Equal on all ranks."""

    steps: int
    kl_coef: float | None
    """None, here and of the entropy: as it is configured, not steered."""
    copies: list[str]
    """Names of the kept weight copies of the policy."""
    entropy_coef: float | None = None
    learned: list[str] | None = None
    """Names of the modules that have an optimizer; None: it was not written yet."""


def save(
    folder: Path,
    *,
    learned: Mapping[str, Learned],
    copies: Mapping[str, Shards],
    steps: int,
    kl_coef: float | None,
    entropy_coef: float | None,
    rank: int,
) -> None:
    """Writes into `folder` and flushes it to disk. `copies`: shards of other weights of the module `policy`, by name. All ranks
    raise what one of them does."""
    folder.mkdir(parents=True, exist_ok=True)
    state = _random_states(rank)
    for name, part in learned.items():
        state |= _weights(name, part) | _optimizer_state(name, part)
    for name, shards in copies.items():
        state |= _copy(name, learned["policy"].module, shards=shards)
    counters = Counters(
        steps=steps, kl_coef=kl_coef, entropy_coef=entropy_coef, copies=list(copies), learned=list(learned)
    )
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # `no_dist` has it say so
            dcp.save(state, storage_writer=_Writer(folder, counters=counters), no_dist=is_alone())
    except CheckpointException as error:  # which is no Exception
        raise next(failure for failure, _ in error.failures.values()) from None


class _Writer(dcp.FileSystemWriter):  # type: ignore[misc]
    """DCP's own, and the counters. What fails on one rank is raised on all: none waits for another one in the next collective."""

    def __init__(self, folder: Path, *, counters: Counters) -> None:
        super().__init__(folder, sync_files=True)
        self._counters = folder / COUNTERS, json.dumps(asdict(counters))

    def write_data(self, *plan: Any, **options: Any) -> Any:
        try:
            return super().write_data(*plan, **options)
        except (OSError, RuntimeError) as error:  # torch's names no disk, and its cause would not reach other ranks
            if why := why_refused(error):
                raise StorageFull(why) from None
            raise

    def finish(self, *metadata: Any, **options: Any) -> None:
        """Called on one rank."""
        path, text = self._counters
        path.write_text(text, encoding="utf-8")
        super().finish(*metadata, **options)


class _Reader(dcp.FileSystemReader):  # type: ignore[misc]
    """DCP's own, but for how it reads its index."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Raises ValueError for one that has anything but tensors: DCP unpickles other objects."""
        try:
            with (Path(self.path) / ".metadata").open("rb") as file:
                metadata = _IndexUnpickler(file).load()
            if not all(isinstance(each, TensorStorageMetadata) for each in metadata.state_dict_metadata.values()):
                raise ValueError("other objects")
        except Exception as error:  # of any kind: it may hold anything
            raise ValueError(
                f"checkpoint {self.path} must have an index (.metadata) of tensors, got {type(error).__name__}: {error}; resume "
                f"from another checkpoint"
            ) from None
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return cast(Metadata, metadata)


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in INDEX or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        if name == "PosixPath":  # where it was saved; its module differs between versions of Python
            return PurePosixPath
        raise pickle.UnpicklingError(f"{module}.{name}")


def load(
    folder: Path, *, learned: Mapping[str, Learned], like: Shards, rank: int
) -> tuple[Counters, dict[str, Shards]]:
    """Writes the folder's state into the modules and optimizers; returns the counters and the weight copies, of the dtype of `like`
    and on its device.

    Raises ValueError, before any change, for a checkpoint of other names or shapes, or of anything but tensors.
    """
    if not (folder / COUNTERS).is_file():
        raise ValueError(
            f"checkpoint {folder} must have the state of one policy, got no {COUNTERS}; resume with the learner.lora.per_role "
            f"that it was saved with"
        )
    counters = Counters(**json.loads((folder / COUNTERS).read_text(encoding="utf-8")))
    stored = _Reader(folder).read_metadata().state_dict_metadata
    _check(folder, stored=stored, learned=learned)
    policy = learned["policy"].module
    copies = {name: [torch.empty_like(part) for part in like] for name in counters.copies}
    state = {name: value for name, value in _random_states(rank).items() if name in stored}
    for name, part in learned.items():
        _make_optimizer_state(name, part, stored=stored)
        state |= _weights(name, part) | _optimizer_state(name, part)
    for name, shards in copies.items():
        state |= _copy(name, policy, shards=shards)
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        dcp.load(state, storage_reader=_Reader(folder), no_dist=is_alone())
    _set_random_states(state, rank=rank)
    return counters, copies


def _weights(name: str, part: Learned) -> dict[str, Tensor]:
    """A tied parameter comes once, under its first name."""
    chosen = _trained(part.module) if part.trained_only else part.module.named_parameters()
    return {f"{name}.{key}": parameter.detach() for key, parameter in chosen}


def _optimizer_state(name: str, part: Learned) -> dict[str, Tensor]:
    return {
        f"{name}.{key}{OPTIMIZER}{kind}": value
        for key, parameter in part.module.named_parameters()
        for kind, value in part.optimizer.state.get(parameter, {}).items()
    }


def _make_optimizer_state(name: str, part: Learned, *, stored: Mapping[str, Any]) -> None:
    """Room for what the checkpoint holds: an optimizer has no state before its first step."""
    for key, parameter in part.module.named_parameters():
        prefix = f"{name}.{key}{OPTIMIZER}"
        kinds = [other.removeprefix(prefix) for other in stored if other.startswith(prefix)]
        part.optimizer.state[parameter] = {
            kind: _room(parameter, is_number=stored[prefix + kind].size == torch.Size(), optimizer=part.optimizer)
            for kind in kinds
        }


def _room(parameter: Tensor, *, is_number: bool, optimizer: torch.optim.Optimizer) -> Tensor:
    """An empty state: on the parameter's device, where the optimizer's kernel looks for it, or on the host."""
    room = torch.zeros((), device=parameter.device) if is_number else torch.zeros_like(parameter)
    return on_host(room) if isinstance(optimizer, HostAdamW) else room


def _copy(name: str, module: nn.Module, *, shards: Shards) -> dict[str, Tensor]:
    """Shards as parts of whole tensors, so that another number of ranks can read them."""
    return {
        f"{COPY}.{name}.{key}": _like(parameter.detach(), local)
        for (key, parameter), local in zip(_trained(module), shards, strict=True)
    }


def _trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """What weight copies hold: frozen weights are the same in all versions."""
    return [(key, parameter) for key, parameter in module.named_parameters() if parameter.requires_grad]


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _random_states(rank: int) -> dict[str, Tensor]:
    states = {f"{RANDOM}.{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"{RANDOM}.{rank}.cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_states(state: Mapping[str, Tensor], *, rank: int) -> None:
    if (cpu := state.get(f"{RANDOM}.{rank}.cpu")) is not None:
        torch.set_rng_state(cpu)
    if (cuda := state.get(f"{RANDOM}.{rank}.cuda")) is not None:
        torch.cuda.set_rng_state(cuda)


def _check(folder: Path, *, stored: Mapping[str, Any], learned: Mapping[str, Learned]) -> None:
    wanted = {name: weight.shape for part, own in learned.items() for name, weight in _weights(part, own).items()}
    weights = {
        name: meta.size
        for name, meta in stored.items()
        if OPTIMIZER not in name and name.split(".")[0] not in (COPY, RANDOM)
    }
    for name in sorted(wanted.keys() | weights.keys()):
        if wanted.get(name) != weights.get(name):
            raise ValueError(
                f"checkpoint {folder} must fit the model: {name} must be {_shape(wanted.get(name))}, got "
                f"{_shape(weights.get(name))}; resume with the model.path and learner.critic that it was saved with"
            )


def _shape(size: torch.Size | None) -> str:
    return "absent" if size is None else str(list(size))
