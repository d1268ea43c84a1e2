"""Rules of mocked_server/vllm/process/worker_extension.py: no version is loaded by a way that does not restore the model."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.families import make_family
from buffers.errors import EngineError
from mocked_server.vllm.engine import _load_published
from mocked_server.vllm.process import worker_extension
from mocked_server.vllm.process.worker_extension import WorkerExtension
from tests.support.patience import PATIENCE_S
from tests.support.run_parts import ROOT

START = {"layers.0.up": "a", "layers.0.experts": "b", "lm_head": "c"}


class Worker(WorkerExtension):
    """As vLLM's, as far as the extension asks; its weights are names and contents."""

    def __init__(self) -> None:
        self.weights = dict(START)
        self.loaded: list[tuple[str, str]] = []
        config = SimpleNamespace(model_config=SimpleNamespace(model="/start"))
        self.model_runner = SimpleNamespace(vllm_config=config, get_model=lambda: self)

    def compute_weight_checksums(self) -> dict[str, str]:
        return {f"rank0:{name}": value for name, value in self.weights.items()}

    def reset_weights(self) -> None:
        self.weights = dict.fromkeys(self.weights, "0")


def way(name: str, *, loses: tuple[str, ...] = (), fails: str = "") -> Any:
    def load(worker: Worker, folder: str) -> None:
        worker.loaded.append((name, folder))
        if fails:
            raise AttributeError(fails)
        worker.weights |= {key: value for key, value in START.items() if key not in loses}

    load.__name__ = name
    return load


def test_the_first_way_that_restores_every_weight_loads_all_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    for layers, expected in (
        (way("layers"), [("layers", "/start"), ("layers", "/v1"), ("layers", "/v2")]),
        (
            way("layers", loses=("lm_head",)),
            [("layers", "/start"), ("whole", "/start"), ("whole", "/v1"), ("whole", "/v2")],
        ),
        (way("layers", fails="no"), [("layers", "/start"), ("whole", "/start"), ("whole", "/v1"), ("whole", "/v2")]),
    ):
        monkeypatch.setattr(worker_extension, "load_layer_by_layer", layers)
        monkeypatch.setattr(worker_extension, "load_whole", way("whole"))
        worker = Worker()
        worker.load_published("/v1")
        worker.load_published("/v2")
        assert worker.loaded == expected


def test_each_engine_of_a_process_shows_it_for_its_own_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_extension, "load_layer_by_layer", way("layers"))
    workers = Worker(), Worker()
    for worker in workers:
        worker.load_published("/v1")
        assert worker.loaded == [("layers", "/start"), ("layers", "/v1")]


def test_a_model_that_no_way_restores_is_refused_with_what_each_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_extension, "load_layer_by_layer", way("layers", loses=("layers.0.experts",)))
    monkeypatch.setattr(worker_extension, "load_whole", way("whole", fails="weights are freed"))
    worker = Worker()
    with pytest.raises(
        RuntimeError,
        match=r"cannot for Worker: layers: 1 are not what they were, such as layers.0.experts; whole: Attr",
    ):
        worker.load_published("/v1")
    assert ("layers", "/v1") not in worker.loaded


def test_loaders_that_are_partial_functions_have_a_name_when_vllm_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As MiniMax-M2's have: without one vLLM's reload ends with an AttributeError, and leaves the model without memory."""
    monkeypatch.setattr(worker_extension, "repack_tied_head", lambda model: None)
    model = torch.nn.Linear(2, 2)
    model.weight.weight_loader = partial(way, loses=())  # type: ignore[attr-defined]
    names: list[str] = []
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(get_model=lambda: model),
        reload_weights=lambda weights_path: names.append(model.weight.weight_loader.__name__),
    )
    worker_extension.load_layer_by_layer(worker, "/v1")
    assert names == ["way"]


@pytest.mark.seconds
async def test_the_refusal_of_a_worker_is_an_error_of_one_line() -> None:
    async def collective_rpc(*call: Any, **options: Any) -> None:
        raise Exception("Call to collective_rpc method failed: the engine must take new weights")  # as vLLM's core does

    with pytest.raises(EngineError, match=r"^the engine must take new weights$"):
        await _load_published(SimpleNamespace(collective_rpc=collective_rpc), Path("/v1"))


def given(*models: Path) -> subprocess.CompletedProcess[str]:
    """A real engine of the first folder, which is given the weights of the second; `out.json` beside them has what it sampled."""
    command = [sys.executable, "-m", "benchmarks.engine_side", "--models", *map(str, models)]
    command += ["--out", str(models[0].parent / "out.json"), "--requests", "8", "--tokens", "24"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)


@pytest.mark.long
@pytest.mark.engine
def test_a_real_engine_refuses_experts_under_a_name_that_it_does_not_have(tmp_path: Path) -> None:
    model, other = (make_family("qwen3_moe", tmp_path / f"{seed}", seed=seed) for seed in range(2))
    weights = load_file(other / "model.safetensors")
    renamed = {name.replace(".mlp.experts.", ".moe.experts."): value for name, value in weights.items()}
    save_file(renamed, other / "model.safetensors", metadata={"format": "pt"})
    done = given(model, other)
    assert done.returncode != 0 and "layers.0.moe" in done.stderr + done.stdout, done.stderr[-3000:]


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.parametrize("name", ["gpt_oss", "granitemoe"])
def test_a_real_engine_samples_from_the_weights_that_it_was_given(name: str, tmp_path: Path) -> None:
    """Experts that vLLM's own way keeps as they were (gpt-oss), and that a CPU's kernel packs; Qwen3's: test_models.py."""
    done = given(*(make_family(name, tmp_path / f"{seed}", seed=seed) for seed in range(2)))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "out.json").read_text())
    for version in range(2):
        assert found[f"version_{version}_against_float32"]["max"] < 1e-4
