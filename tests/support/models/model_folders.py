"""Folders of models as the hub has them: other files beside the weights, code of their own, FP8."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

SINGLE = "model.safetensors"
OWN_CODE = """\
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3Model


class OwnConfig(Qwen3Config):
    model_type = "own_qwen"


class OwnModel(Qwen3Model):
    config_class = OwnConfig


class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig
"""


def copied(source: Path, to: Path, **config: Any) -> Path:
    """A copy whose config.json says this too."""
    shutil.copytree(source, to)
    told = json.loads((to / "config.json").read_text()) | config
    (to / "config.json").write_text(json.dumps(told))
    return to


def in_bins(folder: Path, *, shards: int = 1) -> Path:
    """The same with its weights in files of torch's own."""
    weights = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    if shards == 1:
        torch.save(weights, folder / "pytorch_model.bin")
        return folder
    files = {name: f"pytorch_model-{place % shards + 1:05}-of-{shards:05}.bin" for place, name in enumerate(weights)}
    for file in set(files.values()):
        torch.save({name: weight for name, weight in weights.items() if files[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def with_others(folder: Path) -> Path:
    """The same with what training and publishing leave beside weights."""
    for name in ("adapter_model.safetensors", "consolidated.safetensors"):
        save_file({"lora": torch.ones(3)}, folder / name)
    for name in ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.bin"):
        torch.save({"state": torch.ones(3)}, folder / name)
    (folder / "original").mkdir()
    torch.save({"state": torch.ones(3)}, folder / "original" / "consolidated.00.pth")
    return folder


def with_code(source: Path, to: Path) -> Path:
    """A copy that only the code in its folder can read."""
    classes = {"AutoConfig": "OwnConfig", "AutoModel": "OwnModel", "AutoModelForCausalLM": "OwnForCausalLM"}
    code = {name: f"own_code.{own}" for name, own in classes.items()}
    copied(source, to, model_type="own_qwen", architectures=["OwnForCausalLM"], auto_map=code)
    (to / "own_code.py").write_text(OWN_CODE)
    return to


def in_fp8(source: Path, to: Path, *, block: tuple[int, int]) -> tuple[Path, Mapping[str, torch.Tensor]]:
    """A copy with matrices in FP8 with a scale for each block, and what they stand for."""
    quantized = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    copied(source, to, quantization_config=quantized)
    stored: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, weight in load_file(source / SINGLE).items():
        if "proj" not in name:
            stored[name] = plain[name] = weight
            continue
        scales = torch.zeros([-(-size // of) for size, of in zip(weight.shape, block, strict=True)])
        stored[name], plain[name] = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
        for row in range(scales.shape[0]):
            for column in range(scales.shape[1]):
                part = (
                    slice(row * block[0], (row + 1) * block[0]),
                    slice(column * block[1], (column + 1) * block[1]),
                )
                scales[row, column] = weight[part].abs().max() / 448
                stored[name][part] = (weight[part] / scales[row, column]).to(torch.float8_e4m3fn)
                plain[name][part] = stored[name][part].float() * scales[row, column]
        stored[f"{name}_scale_inv"] = scales
    save_file(stored, to / SINGLE, metadata={"format": "pt"})
    return to, plain
