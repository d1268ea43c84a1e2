"""The folder that engine and learner both read: `model.path` itself, or one that is made of it once, in the run's folder.

Called by `learner.startup.model_and_tasks`. Made is one of a GGUF file, of FP8 weights, and of a folder that has files beside its
weights which vLLM would read as weights too. Invariants: the folder has plain weights, and both sides read the same; the source is
not changed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from buffers.errors import TaskError
from configs.model_folder import quantization, weight_files

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

    from learner.checkpoints.hf_export import write_folder
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
