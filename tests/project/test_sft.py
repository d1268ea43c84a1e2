"""SFT as a user starts it: alone, with an adapter, on two ranks, killed and resumed bit for bit, and its folder read by others;
with played validation; before RL, and RL from its folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from buffers.tasks.parquet import write_tasks, write_traces
from configs.schema import RolloutConfig, ServerConfig
from env_adapters.walk.game import walk_tasks, walk_traces
from learner.diagnosis.diagnose import diagnose
from mocked_server.request_context import AnswerRecorder
from mocked_server.rollout import VLLMRollout
from mocked_server.vllm.engine_arguments import EngineSettings
from tests.support.run_parts import Run, start

SMALL = ("run.checkpoints.every=4", "sft.steps=12", "data.validation.every=4", "run.trackers=[]")


def files(folder: Path) -> tuple[str, ...]:
    write_traces(folder / "traces.parquet", walk_traces(120, seed=0, helpful=0.5))
    write_tasks(folder / "tasks.parquet", walk_tasks(64, seed=1))
    named = f"data.tasks={folder}/tasks.parquet", f"sft.demonstrations={folder}/traces.parquet", "data.make=[]"
    return (*named, "sft.validation=0.1", *SMALL)


def lines(run: Run) -> list[dict[str, float]]:
    found = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            name: value
            for name, value in line.items()
            if name in ("step", "sft/loss", "sft/val_loss", "policy/grad_norm")
        }
        for line in found
    ]


def weights(run: Run) -> dict[str, bytes]:
    folder = (run.folder / "last").resolve()
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}


def killed_and_resumed(folder: Path, *settings: str) -> tuple[Run, str]:
    """A run of SFT and what it printed; one that was killed on the way and resumed has ended as it did."""
    whole = start(folder / "whole", *settings)
    code, output = whole.wait()
    assert code == 0, output
    killed = start(folder / "killed", *settings)
    killed.wait_for_step(6)
    killed.process.kill()
    killed.process.wait()
    again = start(folder / "killed", *settings, resume="auto")
    code, said = again.wait()
    assert code == 0 and "resuming after step" in said, said
    assert weights(again) == weights(whole) and lines(again) == lines(whole)
    diagnose(again.folder)
    return whole, output


@pytest.mark.slow
def test_a_killed_run_of_sft_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole, output = killed_and_resumed(tmp_path, *files(tmp_path), "learner.stage=sft")
    summary = whole.summary()
    assert (
        summary["steps"] == summary["steps_planned"] == 12
        and summary["val_loss_last"] < 0.5 * summary["val_loss_first"]
    )
    assert "SFT 12/12  loss " in output and "validation of SFT step 12  loss " in output
    assert not (whole.folder / "ledger.sqlite").exists(), "nobody plays"


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.long
@pytest.mark.parametrize("shape", ["learner.lora.rank=8", "learner.ranks=2"])
def test_what_other_shapes_of_sft_leave_behind_is_one_model_for_us_for_transformers_and_for_vllm(
    tmp_path: Path, shape: str
) -> None:
    whole, _ = killed_and_resumed(tmp_path, *files(tmp_path), "learner.stage=sft", "sft.lr=5e-3", shape)
    summary, folder = whole.summary(), (whole.folder / "last").resolve()
    assert summary["steps"] == 12 and summary["val_loss_last"] < summary["val_loss_first"] - 0.5, summary
    lm = AutoModelForCausalLM.from_pretrained(folder)
    answer = answer_of_vllm(folder)
    assert differs(lm, answer) < MOST_DRIFT
    base = AutoModelForCausalLM.from_pretrained(whole.folder / "model")
    assert differs(base, answer) > 0.1, "SFT has changed the model"
    if (folder / "adapter").exists():
        assert {
            tensor.shape[0] for name, tensor in load_file(folder / "adapter" / ADAPTER).items() if "lora_A" in name
        } == {8}
        assert differs(PeftModel.from_pretrained(base, folder / "adapter"), answer) < MOST_DRIFT
    assert (folder / "adapter").exists() == ("lora" in shape)


PROMPT = [{"role": "user", "content": "The exit is north."}]
ADAPTER = "adapter_model.safetensors"
MOST_DRIFT = 1e-4
Answer = tuple[list[int], list[float]]
"""[P + S] ids of a prompt and of what follows it, [S] log-probabilities of that."""


def answer_of_vllm(folder: Path) -> Answer:
    """What a real engine samples with this model."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    prompt = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        PROMPT, add_generation_prompt=True, return_dict=False
    )
    settings = EngineSettings(
        model_path=folder, served_name="policy", dtype="float32", server=ServerConfig(),
        rollout=RolloutConfig(max_tokens=64, max_model_len=512, kv_cache_gb=0.0625),
    )  # fmt: skip
    params = SamplingParams(max_tokens=64, logprobs=0, seed=1, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    recorder = AnswerRecorder("r")

    async def sample(rollout: VLLMRollout) -> None:
        async for output in rollout.engine.generate(prompt, params, request_id="r"):
            recorder.add(output)

    with VLLMRollout(settings) as rollout:
        rollout.wait(sample(rollout))
    (response,) = recorder.responses(version=0)
    return [*prompt, *response.sampled_ids.tolist()], response.logprobs.tolist()


def differs(lm: torch.nn.Module, answer: Answer) -> float:
    """The largest difference from the model's own log-probabilities."""
    ids, logprobs = torch.tensor([answer[0]]), torch.tensor(answer[1])
    with torch.no_grad():
        own = lm(ids).logits.log_softmax(-1)[0, -len(logprobs) - 1 : -1]
    return float((own.gather(1, ids[0, -len(logprobs) :, None])[:, 0] - logprobs).abs().max())


@pytest.mark.slow
@pytest.mark.engine
def test_sft_is_played_and_rl_goes_on_from_it(tmp_path: Path) -> None:
    named = files(tmp_path)
    write_tasks(tmp_path / "val.parquet", walk_tasks(6, seed=99))
    alone = start(tmp_path / "alone", *named, "learner.stage=sft", f"data.validation.tasks={tmp_path}/val.parquet")
    code, output = alone.wait()
    assert code == 0, output
    played = [json.loads(line) for line in (alone.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["val/step"] for line in played if "val/step" in line] == [0, 4, 8, 12]
    model = (alone.folder / "best").resolve()
    after = start(
        tmp_path / "after", *named, "sft.demonstrations=", "sft.validation=", f"model.path={model}", "run.steps=1"
    )
    code, output = after.wait()
    assert code == 0 and after.summary()["steps"] == 1, output


@pytest.mark.slow
@pytest.mark.engine
def test_a_stage_before_rl_is_a_run_below_the_run(tmp_path: Path) -> None:
    run = start(tmp_path, *files(tmp_path), "run.steps=1", "buffer.groups_per_step=4", "buffer.group_size=4")
    code, output = run.wait()
    assert code == 0, output
    first = json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] == 0 and first["sft/loss_last"] < first["sft/loss_first"] and first["sft/refused"] == 0
    assert run.summary()["sft"]["steps"] == 12 and run.summary()["max_logprob_diff"] < 1e-4
    assert json.loads((run.folder / "sft" / "summary.json").read_text())["steps"] == 12
    assert len((run.folder / "sft" / "metrics.jsonl").read_text().splitlines()) == 13
