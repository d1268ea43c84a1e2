"""The folder that both sides read, where `model.path` is no ordinary one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from buffers.errors import TaskError
from configs.load import load_config
from learner.players import make_players
from learner.startup.model_and_tasks import plain_folder, prepare_files
from tests.support.models import gguf_files
from tests.support.models.model_folders import copied, in_bins, in_fp8, with_others


def made(source: Path, to: Path, *, dtype: str = "float32") -> tuple[Path, list[str]]:
    lines: list[str] = []
    return plain_folder(source, to=to, dtype=dtype, say=lines.append), lines


def test_an_ordinary_folder_is_read_where_it_is(tiny_model: Path, tmp_path: Path) -> None:
    bins = in_bins(copied(tiny_model, tmp_path / "bins"))
    for source in (tiny_model, bins):
        assert made(source, tmp_path / "model") == (source, [])


def test_what_vllm_would_read_as_weights_is_left_out_and_nothing_is_copied(tiny_model: Path, tmp_path: Path) -> None:
    source = with_others(copied(tiny_model, tmp_path / "source"))
    folder, (line,) = made(source, tmp_path / "model")
    assert folder == tmp_path / "model" and "(adapter_model.safetensors, consolidated.safetensors)" in line
    assert sorted(file.name for file in folder.glob("*.safetensors")) == ["model.safetensors"]
    assert all(file.is_symlink() for file in folder.iterdir())
    assert made(source, tmp_path / "model")[0] == folder, "made once"


@pytest.mark.parametrize("block", [(128, 128), (96, 40)], ids=["whole", "cut"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fp8_weights_become_what_they_stand_for(
    tiny_model: Path, tmp_path: Path, block: tuple[int, int], dtype: str
) -> None:
    source, plain = in_fp8(tiny_model, tmp_path / "source", block=block)
    folder, (line,) = made(source, tmp_path / "model", dtype=dtype)
    found = load_file(folder / "model.safetensors")
    assert found.keys() == plain.keys() and f"trained and served as {dtype}" in line
    for name, weight in plain.items():
        assert torch.equal(found[name], weight.to(getattr(torch, dtype))), name
    assert "quantization_config" not in (folder / "config.json").read_text()


def test_fp8_without_scales_of_blocks_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    source, _ = in_fp8(tiny_model, tmp_path / "source", block=(128, 128))
    kept = {n: w for n, w in load_file(source / "model.safetensors").items() if not n.endswith("_scale_inv")}
    save_file(kept, source / "model.safetensors")
    with pytest.raises(TaskError, match="FP8 weights with scales of blocks"):
        made(source, tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.seconds
def test_a_gguf_file_becomes_a_folder_with_its_weights_tokenizer_and_template(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the package gguf reads such files")
    folder, file = gguf_files.make_llama(tmp_path)
    converted, (line,) = made(file, tmp_path / "model")
    kept, found = load_file(folder / "model.safetensors"), load_file(converted / "model.safetensors")
    assert kept.keys() == found.keys() and "is a GGUF file" in line
    assert all(torch.equal(kept[name], found[name]) for name in kept)
    from transformers import AutoTokenizer

    own, theirs = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(converted)
    assert own.chat_template == theirs.chat_template
    assert own("Hello there")["input_ids"] == theirs("Hello there")["input_ids"]


def test_a_file_that_is_no_gguf_is_refused_in_one_line(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the package gguf reads such files")
    (tmp_path / "no.gguf").write_bytes(b"something else")
    with pytest.raises(TaskError, match=r"must be a GGUF file that transformers reads"):
        made(tmp_path / "no.gguf", tmp_path / "model")


@pytest.mark.seconds
async def test_a_model_without_a_chat_template_is_told_of_at_the_start(tiny_model: Path, tmp_path: Path) -> None:
    """Agents may send text or token ids, so that it is no error."""
    (copied(tiny_model, tmp_path / "source") / "chat_template.jinja").unlink()
    config = load_config(overrides=[f"model.path={tmp_path / 'source'}", "data.tasks=", "data.make=[]"])
    lines: list[str] = []
    model = await prepare_files(
        config,
        folder=tmp_path,
        make=_makes_nothing,
        players=make_players(config),
        begins_with_sft=False,
        warn=lines.append,
    )
    assert model == tmp_path / "source"
    (line,) = lines
    assert "has no chat template" in line and "put chat_template.jinja into the folder" in line


async def _makes_nothing(*_: object) -> None: ...
