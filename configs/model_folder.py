"""What the folder of a model has, told by its files, without torch: weights, a chat template, kinds of layers.

Asked at the door by `learner.startup`, by `learner.model` for the files that it reads, and by `mocked_server.vllm` for what an
engine needs. Invariant: nothing is written, and no code of the folder is run.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

WEIGHTS = {"model": "safetensors", "pytorch_model": "bin"}
"""Usual names of weight files, and how they end; of two kinds the first counts, as for transformers and vLLM."""
NO_WEIGHTS = re.compile(
    r"(adapter_|consolidated|optimizer|scheduler|scaler|rng_|random_states|training_args|trainer_|value_head)"
)
"""Files of other things that end as weights do."""
LATENT = "latent attention"
RECURRENT = {"mamba", "linear_attention", "hybrid"}
"""How `layer_types` calls Mamba-2 layers, before and after transformers has read it."""

EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
"""How configurations call the routed experts that a token uses."""


def weight_files(folder: Path) -> list[Path]:
    """The files with the model's weights: those of the index, those of the usual names, or all that are not of something else.
    Empty: there are none. Raises ValueError for an index that names a file that is not there."""
    for name, kind in WEIGHTS.items():
        files = sorted(folder.glob(f"*.{kind}"))
        index = f"{name}.{kind}.index.json"
        single = folder / f"{name}.{kind}"
        if (folder / index).is_file() and not (single.is_file() or (not files and kind == "bin")):
            named = {folder / file for file in read_json(folder / index).get("weight_map", {}).values()}
            if missing := sorted(file.name for file in named if not file.is_file()):
                raise ValueError(
                    f"model.path must name a folder with all files of {index}, got {folder} without {missing[0]}; download the "
                    f"model again"
                )
            return sorted(named)
        usual = [file for file in files if re.fullmatch(rf"{name}(-\d+-of-\d+)?\.{kind}", file.name)]
        if found := usual or [file for file in files if not NO_WEIGHTS.match(file.name)]:
            return found
    return []


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file of JSON; empty where there is none."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def quantization(folder: Path) -> dict[str, Any]:
    """What config.json says of how weights are quantized; empty: they are plain."""
    found = read_json(folder / "config.json").get("quantization_config") or _text_config(folder).get(
        "quantization_config"
    )
    return found if isinstance(found, dict) else {}


def has_chat_template(folder: Path) -> bool:
    """Whether conversations can be shown to the model. Mistral's own tokenizers have their template in code."""
    files = ("chat_template.jinja", "chat_template.json", "tekken.json")
    told = read_json(folder / "tokenizer_config.json").get("chat_template")
    return bool(told) or any((folder / name).is_file() for name in files)


def has_remote_code(folder: Path) -> bool:
    """Whether the folder names code of its own for the model or the tokenizer, which transformers may have itself."""
    return any("auto_map" in read_json(folder / name) for name in ("config.json", "tokenizer_config.json"))


def half_precision_kind(folder: Path) -> str:
    """The kind of layers for which vLLM has no kernel on a CPU but for half precision; on a GPU that is so for LATENT. Empty: none."""
    text = _text_config(folder)
    if text.get("kv_lora_rank"):
        return LATENT
    return "gated delta nets" if text.get("linear_key_head_dim") else ""


def sees(folder: Path) -> bool:
    """Whether vLLM's class of the model has eyes: Qwen3.5's has them also where the model is its text part alone."""
    config = read_json(folder / "config.json")
    return "vision_config" in config or str(config.get("model_type")).startswith("qwen3_5")


def has_experts(folder: Path) -> bool:
    """Whether tokens use some of several experts."""
    text = _text_config(folder)
    return any(text.get(name) for name in EXPERTS_PER_TOKEN)


def has_mamba2(folder: Path) -> bool:
    """Whether there are Mamba-2 layers, which alone among recurrent ones have heads."""
    text = _text_config(folder)
    if not RECURRENT & set(text.get("layer_types") or RECURRENT):
        return False
    heads = any("mamba" in name and "head" in name for name in text)
    return heads or {"state_size", "chunk_size", "n_groups"} <= text.keys()


def _text_config(folder: Path) -> dict[str, Any]:
    config = read_json(folder / "config.json")
    text = config.get("text_config")
    return text if isinstance(text, dict) else config
