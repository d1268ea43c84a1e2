"""What a run needs before anything starts: its model and its task files. Called by `learner.pipeline`."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any

from buffers.did_you_mean import one_of
from buffers.errors import TaskError
from buffers.tasks.parquet import unread_columns
from configs.child_processes import give_memory_back
from configs.model_folder import has_chat_template, quantization, weight_files
from configs.schema import Config
from configs.tiny_model import make_tiny_model
from learner.model.weight_files import WeightFiles
from learner.players import Players
from learner.startup.input_check import TEMPLATE_REMEDY, check_demonstrations, check_model, check_tasks
from learner.startup.template_check import check_template


async def prepare_files(
    config: Config,
    *,
    folder: Path,
    make: Callable[[Sequence[str], str, Path], Awaitable[None]],
    players: Players,
    begins_with_sft: bool,
    warn: Callable[[str], None],
) -> Path:
    """The model's folder; makes the tiny model, and has the files made that are missing.

    `make` runs `data.make`, as this file is missing, with a log file. `begins_with_sft`: the demonstrations are read. A row's
    `agent_name` must be one of `players`. `warn` gets a line for what has no effect. Raises TaskError for a file that cannot be
    used: that is known before the engine starts.
    """
    files = {} if config.learner.stage == "sft" else config.data.task_files
    shown = config.sft.files if begins_with_sft else {}
    named = [*files, config.data.validation.tasks, *shown.values()]
    if config.data.make and (missing := [path for path in named if path and not Path(path).is_file()]):
        await make(config.data.make, missing[0], folder / "data.log")
    keys = {path: "data.tasks" for path in files} | {config.data.validation.tasks: "data.validation.tasks"}
    keys |= {config.serve.gate.tasks: "serve.gate.tasks"}
    agents: set[str | None] = set()
    for path, key in keys.items():
        if path:
            if unread := await asyncio.to_thread(unread_columns, Path(path)):
                warn(
                    f"{key}={path}: nothing is read of the columns {', '.join(unread)}; docs/agents.md#tasks names those that are"
                )
            names = await asyncio.to_thread(partial(check_tasks, key, path, check=players.check))
            agents |= names.keys() if path != config.serve.gate.tasks else set()
            if players.names is not None:
                _check_agent_names(Path(path), names, players.names)
    if None in agents and players.default is not None and players.loops is None:
        warn(
            "no agent is configured: the run itself answers each prompt once, and data.scorer scores that; to have them played by "
            "agents that you start, leave data.scorer out, or give the rows an agent_name"
        )
    if agents and config.data.scorer and {name or players.default for name in agents} <= players.scored_by_environment:
        warn(
            "data.scorer is never asked: environments score all rows of the task files; leave it out, or name a player in "
            "agent_name that has none"
        )
    for key, path in shown.items():
        await asyncio.to_thread(check_demonstrations, key, path)
    if config.model.path == "tiny":
        return await asyncio.to_thread(make_tiny_model, folder / "model", seed=config.run.seed)
    source, own = check_model(config.model.path), folder / "model"
    model = await asyncio.to_thread(plain_folder, source, to=own, dtype=config.model.dtype, say=warn)
    try:
        await asyncio.to_thread(WeightFiles, model)
    except ValueError as error:
        raise TaskError(str(error)) from None
    await asyncio.to_thread(partial(check_template, model, key="model.path"))
    if not has_chat_template(model):
        warn(f"{source} has no chat template: requests with messages are refused; {TEMPLATE_REMEDY}")
    return model


def _check_agent_names(path: Path, names: Mapping[str | None, int], known: Set[str]) -> None:
    for name, row in names.items():
        if name is not None and name not in known:
            raise TaskError(f"{path}, row {row}: agent_name must be {one_of(name, known)}; or name it in agents.loops")


# The folder that engine and learner both read: `model.path` itself, or one that is made of it once, in the run's folder. Made
# is one of a GGUF file, of FP8 weights, and of a folder that has files beside its weights which vLLM would read as weights too.
# Invariants: the folder has plain weights, and both sides read the same; the source is not changed.

SCALES = "_scale_inv"
"""End of the name of the scales of a weight in FP8, one number for each block."""
LEFT_OUT = ("training_args.bin", "optimizer.bin")
"""Those that vLLM does not read."""
BLOCKS = (128, 128)
"""Rows and columns of a block, where config.json says nothing."""
FP8_EXTRAS = ("_scale_inv", ".input_scale", ".activation_scale")
"""Ends of the names of what is of no use beside plain weights."""


def plain_folder(source: Path, *, to: Path, dtype: str, say: Callable[[str], None]) -> Path:
    """`source`, or `to`, which is made where it is not there yet; `say` gets a line for what was made, and why. Raises
    TaskError."""
    make: Callable[[Path, Path, str], None]
    if source.suffix == ".gguf":
        make, why = _from_gguf, "is a GGUF file"
    elif quantization(source):
        make, why = _from_fp8, f"has FP8 weights, which are trained and served as {dtype}"
    elif more := _others(source):
        make, why = _of_links, f"has files that vLLM would read as weights too ({', '.join(more)})"
    else:
        return source
    if not (to / "config.json").is_file():
        partial = to.with_name(f".{to.name}.tmp")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(to, ignore_errors=True)
        make(source, partial, dtype)
        partial.rename(to)
        give_memory_back()
    say(f"engine and learner read {to}: {source} {why}")
    return to


def _others(source: Path) -> list[str]:
    """Files that vLLM would take for weights: it reads all *.safetensors, or else all *.bin, unless there is an index."""
    if (source / "model.safetensors.index.json").is_file():
        return []
    files = weight_files(source)
    read = list(source.glob("*.safetensors"))
    read += list(source.glob("*.bin")) if files[0].suffix == ".bin" else []
    return sorted(file.name for file in read if file not in files and file.name not in LEFT_OUT)


def _of_links(source: Path, to: Path, _: str) -> None:
    to.mkdir()
    files = weight_files(source)
    for file in source.iterdir():
        if file.is_file() and (file in files or file.suffix not in (".safetensors", ".bin", ".pt")):
            (to / file.name).symlink_to(file.absolute())


def _from_gguf(source: Path, to: Path, dtype: str) -> None:
    """What transformers reads of it, which takes the weights out of their blocks."""
    import torch
    import transformers

    named: dict[str, Any] = {"gguf_file": source.name, "trust_remote_code": False}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, **named)
        if hasattr(transformers, "GgufConfig"):  # later versions leave weights in blocks by themselves
            named["quantization_config"] = transformers.GgufConfig(dequantize=True)
        lm: Any = transformers.AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **named)
    except (ValueError, OSError, KeyError, NotImplementedError) as error:
        raise TaskError(
            f"model.path must be a GGUF file that transformers reads, got {source} ({str(error)[:200]}); name the folder of the "
            f"model that it was made of"
        ) from error
    lm.to(getattr(torch, dtype)).save_pretrained(to)
    tokenizer.save_pretrained(to)


def _from_fp8(source: Path, to: Path, dtype: str) -> None:
    """Each weight times the scales of its blocks, in float32, then in `dtype`."""
    import torch

    from learner.checkpoints.weight_shards import write_folder
    from learner.model.weight_files import WeightFiles

    files, weights = WeightFiles(source), dict[str, torch.Tensor]()
    kind, blocks = getattr(torch, dtype), quantization(source).get("weight_block_size") or BLOCKS
    for name in sorted(files.names):
        if name.endswith(FP8_EXTRAS):
            continue
        weight = files.whole(name)
        if weight.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            if name + SCALES not in files.names:
                raise TaskError(
                    f"model.path must name FP8 weights with scales of blocks, got {source} without {name}{SCALES}; use the model "
                    f"as it was before it was quantized"
                )
            scales = files.whole(name + SCALES).float()
            if scales.numel() > 1:
                for dim, block in zip((-2, -1), blocks, strict=True):
                    scales = scales.repeat_interleave(block, dim=dim).narrow(dim, 0, weight.shape[dim])
            weight = weight.float() * scales
        weights[name] = weight.to(kind).contiguous()
    write_folder(to, source=source, weights=weights, value_head={}, adapters={}, dtype=kind)
