"""Rules of learner/model/load.py and weight_files.py: what is read by parts is what transformers reads whole, or is refused by
name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from learner.model import weight_files
from learner.model.load import empty_model, load_policy
from learner.model.weight_files import WeightFiles
from tests.support.learner_parts import random_lm
from tests.support.models.model_folders import copied, in_bins, with_code, with_others

CPU = torch.device("cpu")


def saved(lm: Any, folder: Path, **options: Any) -> Path:
    lm.save_pretrained(folder, **options)
    return folder


def assert_read_whole(folder: Path) -> None:
    """Equal to the bit, buffers included, and none of it is tied to what it should not be."""
    wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = load_policy(folder, device=CPU).lm
    for kind in ("named_parameters", "named_buffers"):
        one, two = dict(getattr(wanted, kind)()), dict(getattr(found, kind)())
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)
    tied = wanted.get_output_embeddings().weight is wanted.get_input_embeddings().weight
    assert (found.get_output_embeddings().weight is found.get_input_embeddings().weight) == tied


def test_a_model_in_many_files_is_read_by_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "PIECE", 1000)  # of 19,200 elements in the largest
    folder = saved(random_lm(), tmp_path, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert_read_whole(folder)


def test_weights_in_half_precision_and_an_output_matrix_of_its_own(tmp_path: Path) -> None:
    lm = random_lm()
    lm.config.tie_word_embeddings = False
    lm.lm_head.weight = torch.nn.Parameter(torch.randn_like(lm.lm_head.weight))
    assert_read_whole(saved(lm.to(torch.bfloat16), tmp_path))


@pytest.mark.parametrize("of_torch_1_6", [True, False])
def test_files_of_torchs_own(tmp_path: Path, of_torch_1_6: bool) -> None:
    folder = saved(random_lm(), tmp_path)
    weights = load_file(folder / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=of_torch_1_6)
    (folder / "model.safetensors").unlink()
    assert_read_whole(folder)


class Program:
    """Touches a file wherever it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._path),)


@pytest.mark.parametrize("content", ["a program", "a list", "a part", "a text"])
def test_a_file_of_something_else_than_weights_is_refused_in_one_line_and_runs_nothing(
    tmp_path: Path, content: str
) -> None:
    folder = saved(random_lm(), tmp_path)
    weights = folder / "pytorch_model.bin"
    (folder / "model.safetensors").unlink()
    torch.save(
        {"a program": {"a": Program(tmp_path / "ran")}, "a list": [torch.ones(2)]}.get(content, {"a": 1}), weights
    )
    if content == "a part":
        weights.write_bytes(weights.read_bytes()[:100])
    if content == "a text":
        weights.write_text("<html>404</html>")
    with pytest.raises(
        ValueError, match=r"pytorch_model.bin must be a dictionary of tensors as torch.save writes it, got"
    ) as told:
        WeightFiles(folder)
    assert "\n" not in str(told.value) and not (tmp_path / "ran").exists()


def test_experts_are_read_as_transformers_joins_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        intermediate_size=32, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    assert_read_whole(saved(Qwen3MoeForCausalLM(config), tmp_path))


def test_files_of_other_things_beside_weights_are_not_read(tiny_model: Path, tmp_path: Path) -> None:
    bins = in_bins(with_others(copied(tiny_model, tmp_path / "bins")), shards=2)
    assert WeightFiles(bins).names == WeightFiles(tiny_model).names
    assert WeightFiles(with_others(copied(tiny_model, tmp_path / "one"))).names == WeightFiles(tiny_model).names


def test_a_folders_own_code_is_run_where_it_is_trusted(tiny_model: Path, tmp_path: Path) -> None:
    folder = with_code(tiny_model, tmp_path / "own")
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_policy(folder, device=CPU)
    lm = load_policy(folder, device=CPU, trust_remote_code=True).lm
    weights = load_file(folder / "model.safetensors")
    assert type(lm).__name__ == "OwnForCausalLM"
    assert all(torch.equal(weight, weights[name]) for name, weight in lm.named_parameters())


def test_a_model_is_built_without_memory(tmp_path: Path) -> None:
    lm = empty_model(saved(random_lm(), tmp_path))
    assert all(weight.is_meta for weight in lm.parameters())
    assert not any(buffer.is_meta for buffer in lm.buffers())


def changed(folder: Path, **weights: torch.Tensor | None) -> Path:
    """The folder with other weights, by name with `_` for `.`; None: without."""
    kept = load_file(folder / "model.safetensors")
    for spelled, weight in weights.items():
        name = next(name for name in kept if name.replace(".", "_") == spelled)
        del kept[name]
        if weight is not None:
            kept[name] = weight
    save_file(kept, folder / "model.safetensors")
    return folder


def test_a_folder_without_a_weight_is_refused_by_name(tmp_path: Path) -> None:
    folder = changed(saved(random_lm(), tmp_path), model_layers_1_mlp_up_proj_weight=None)
    with pytest.raises(ValueError, match=r"without model\.layers\.1\.mlp\.up_proj\.weight; download the model again"):
        load_policy(folder, device=CPU)


def test_a_weight_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    folder = changed(saved(random_lm(), tmp_path), model_norm_weight=torch.ones(63))
    with pytest.raises(ValueError, match=r"model\.norm\.weight in .* must have the shape .* \[64\], got \[63\]"):
        load_policy(folder, device=CPU)


def test_quantized_weights_are_refused_by_name(tmp_path: Path) -> None:
    folder = changed(saved(random_lm(), tmp_path), model_norm_weight=torch.ones(64, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"plain weights, got int8 for model\.norm\.weight"):
        load_policy(folder, device=CPU)


def test_an_index_that_names_a_missing_file_is_refused(tmp_path: Path) -> None:
    folder = saved(random_lm(), tmp_path, max_shard_size="100KB")
    gone = sorted(set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values()))[1]
    (folder / gone).unlink()
    with pytest.raises(ValueError, match=f"without {gone}; download the model again"):
        WeightFiles(folder)
