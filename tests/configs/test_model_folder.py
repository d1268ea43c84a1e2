"""What the folder of a model has: weights among other files, kinds of layers, a template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from configs.model_folder import half_precision_kind, has_chat_template, has_mamba2, weight_files


def folder_of(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("names", "weights"),
    [
        (["model.safetensors", "consolidated.safetensors", "adapter_model.safetensors"], ["model.safetensors"]),
        (["pytorch_model.bin", "training_args.bin", "optimizer.bin", "optimizer.pt"], ["pytorch_model.bin"]),
        (["model.safetensors", "pytorch_model.bin", "pytorch_model.bin.index.json"], ["model.safetensors"]),
        (["pytorch_model.bin", "adapter_model.safetensors"], ["pytorch_model.bin"]),
        (["weights.safetensors", "optimizer.safetensors"], ["weights.safetensors"]),
        (["adapter_model.safetensors", "training_args.bin", "pytorch_model.bin.index.json"], []),
    ],
)
def test_weights_are_those_of_the_usual_names(tmp_path: Path, names: list[str], weights: list[str]) -> None:
    assert [file.name for file in weight_files(folder_of(tmp_path, *names))] == weights


@pytest.mark.parametrize(("name", "kind"), [("model", "safetensors"), ("pytorch_model", "bin")])
def test_an_index_names_the_files_and_all_must_be_there(tmp_path: Path, name: str, kind: str) -> None:
    files = [f"{name}-0000{place}-of-00002.{kind}" for place in (1, 2)]
    (tmp_path / f"{name}.{kind}.index.json").write_text(json.dumps({"weight_map": dict(zip("ab", files, strict=True))}))
    folder_of(tmp_path, *files, f"consolidated.{kind}")
    assert [file.name for file in weight_files(tmp_path)] == files
    (tmp_path / files[1]).unlink()
    with pytest.raises(ValueError, match=f"without {files[1]}; download the model again"):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    ("config", "half", "mamba2"),
    [
        ({"model_type": "llama", "num_attention_heads": 4}, "", False),
        ({"model_type": "qwen3_5", "text_config": {"linear_key_head_dim": 128}}, "gated delta nets", False),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "latent attention", False),
        ({"model_type": "mamba2", "state_size": 32, "chunk_size": 32, "n_groups": 2}, "", True),
        ({"model_type": "mamba", "state_size": 32, "conv_kernel": 4}, "", False),
        ({"model_type": "falcon_h1", "mamba_n_heads": 8}, "", True),
        ({"model_type": "nemotron_h", "mamba_num_heads": 8}, "", True),
        ({"model_type": "jamba", "mamba_d_state": 16, "mamba_dt_rank": 8}, "", False),
        ({"model_type": "granitemoehybrid", "mamba_n_heads": 8, "layer_types": ["mamba", "attention"]}, "", True),
        ({"model_type": "granitemoehybrid", "mamba_n_heads": 8, "layer_types": ["attention"]}, "", False),
    ],
)
def test_kinds_of_layers_are_told_by_the_configuration(
    tmp_path: Path, config: dict[str, Any], half: str, mamba2: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert (half_precision_kind(tmp_path), has_mamba2(tmp_path)) == (half, mamba2)


def test_a_chat_template_has_three_places(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert not has_chat_template(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert has_chat_template(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert has_chat_template(folder_of(tmp_path, "chat_template.jinja"))
