"""Rules of learner/startup/input_check.py, learner/startup/run_folder.py and mocked_server/http/request_fields.py: what is missing
is told by its key and its absolute path, before anything is imported or written."""

from __future__ import annotations

import json
import signal
import socket
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from buffers.errors import UnderstudyError
from buffers.records import Task
from buffers.tasks.parquet import write_tasks
from configs.load import load_config
from learner.run import check_inputs, with_model_needs
from learner.startup import input_check
from learner.startup.input_check import in_fork
from mocked_server.http.request_fields import check_parser, parser_names
from mocked_server.vllm import engine_arguments
from tests.support.models.model_folders import copied, in_bins, in_fp8, with_code, with_others
from tests.support.run_parts import start

GOOD = Task(task_id="t", prompt=[{"role": "user", "content": "Hi"}], data_source="", ground_truth="Hi")
PYTHON = "'{python}'"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a configuration whose files are all there."""
    monkeypatch.chdir(tmp_path)
    write_tasks(tmp_path / "good.parquet", [GOOD])
    (tmp_path / "agent.py").touch()
    pq.write_table(pa.table({"question": ["?"]}), "noprompt.parquet")
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), "norows.parquet")
    pq.write_table(pa.table({"prompt": ["Hi", ""]}), "badrow.parquet")
    (tmp_path / "empty.parquet").touch()
    (tmp_path / "table.csv").write_text("prompt\nHi\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").touch()
    (tmp_path / "my.yaml").write_text(
        "data: {tasks: good.parquet, scorer: contains}\n"
        "agents: {command: ['{python}', agent.py], processes: 0}\n"
        "learner: {advantage: grpo, critic: none}\n"
    )
    return tmp_path


def test_a_configuration_whose_files_are_there_passes(here: Path) -> None:
    check_inputs(load_config(here / "my.yaml"), resume="")
    made = ["data.tasks=made.parquet", f"data.make=[{PYTHON}, agent.py]", "data.validation.tasks=made_too.parquet"]
    check_inputs(load_config(here / "my.yaml", made), resume="")
    assert sorted(path.name for path in here.iterdir() if path.is_dir()) == ["folder", "half"], "nothing is written"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.tasks=missing.parquet", ["data.tasks=", "/missing.parquet", "nothing there", "relative to the folder"]),
        ("data.tasks=folder", ["data.tasks=folder", "got a folder there"]),
        ("data.tasks=noprompt.parquet", ["data.tasks=", "/noprompt.parquet", "a column 'prompt', got ['question']"]),
        ("data.tasks=norows.parquet", ["/norows.parquet", "at least one row"]),
        ("data.tasks=badrow.parquet", ["/badrow.parquet, row 1", "column 'prompt'"]),
        ("data.tasks=empty.parquet", ["/empty.parquet", "must be a parquet file"]),
        ("data.tasks=table.csv", ["/table.csv", "must be a parquet file"]),
        ("data.validation.tasks=val.parquet", ["data.validation.tasks=val.parquet", "/val.parquet"]),
        ("sft.demonstrations=good.parquet", ["sft.demonstrations=", "a column 'messages'"]),
        ("model.path=nowhere", ["model.path", "/nowhere is not a folder", "Hugging Face hub (OWNER/NAME)"]),
        ("model.path=folder", ["model.path", "/folder has no config.json"]),
        ("model.path=half", ["model.path", "/half has no weights"]),
        ("data.scorer=model:nowhere", ["data.scorer", "/nowhere is not a folder"]),
        ("data.scorer=json_lin", ["data.scorer", "did you mean 'json_line'"]),
        ("data.scorer=no_such.function", ["data.scorer", "no_such"]),
        (f"agents.command=[{PYTHON}, agnt.py]", ["agents.command", "'agnt.py'", "/agnt.py is not a file"]),
        ("agents.command=[no-such-program]", ["agents.command", "no-such-program"]),
        ("agents.environment=[NO_SUCH_NAME]", ["agents.environment", "NO_SUCH_NAME"]),
        ("agents.loops=loops.yaml", ["agents.loops", "loops.yaml"]),
        ("env.command=[no-such-program]", ["env.command", "no-such-program"]),
        (f"data.make=[{PYTHON}, mk.py]", ["data.make", "/mk.py is not a file"]),
        ("server.tool_parser=hermse", ["server.tool_parser", "did you mean 'hermes'"]),
        ("server.reasoning_parser=quen3", ["server.reasoning_parser", "did you mean 'qwen3'"]),
        ("server.host=0.0.0.0", ["server.host=0.0.0.0", "secret"]),
        ("run.dir=my.yaml", ["run.dir", "my.yaml is no folder"]),
    ],
)
def test_what_is_missing_is_told_by_its_key_and_its_absolute_path(here: Path, override: str, words: list[str]) -> None:
    with pytest.raises(UnderstudyError) as refused:
        check_inputs(load_config(here / "my.yaml", [override]), resume="")
    for word in words:
        assert word in str(refused.value)


def test_a_command_without_a_script_is_not_asked_for_one(here: Path) -> None:
    for command in (f"[{PYTHON}, -c, pass]", f"[{PYTHON}, -m, agent.py]", f"[{PYTHON}, -u, agent.py, made_later.py]"):
        check_inputs(load_config(here / "my.yaml", [f"agents.command={command}"]), resume="")


@pytest.mark.seconds
def test_a_port_in_use_is_told_before_anything_is_imported_and_the_run_before_stays_in_its_place(
    tmp_path: Path,
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    (tmp_path / "run" / "log.txt").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, output = start(tmp_path, f"server.port={port}", imports=True).wait()
    assert code == 2
    assert len(output.splitlines()) == 1 and f"127.0.0.1:{port}" in output and "server.port=0" in output
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["config.yaml", "log.txt", "run"]


def test_a_check_runs_in_a_process_of_its_own_and_a_defect_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    def refuses() -> None:
        sys.modules["left_behind"] = sys
        raise UnderstudyError("a rule")

    with pytest.raises(UnderstudyError, match="a rule"):
        in_fork(refuses)
    assert "left_behind" not in sys.modules and in_fork(lambda: 7) == 7
    with pytest.raises(UnderstudyError, match="could not be checked"):
        in_fork(lambda: 1 // 0)
    assert "ZeroDivisionError" in capfd.readouterr().err
    with pytest.raises(UnderstudyError, match="could not be checked"):
        in_fork(lambda: signal.raise_signal(signal.SIGINT))
    assert "KeyboardInterrupt" not in capfd.readouterr().err


def test_parsers_are_those_of_vllm() -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    assert set(parser_names("server.tool_parser")) <= set(ToolParserManager.list_registered())
    assert set(parser_names("server.reasoning_parser")) <= set(ReasoningParserManager.list_registered())
    assert {"hermes", "llama3_json"} <= set(parser_names("server.tool_parser"))
    check_parser("server.tool_parser", None)
    check_parser("server.tool_parser", "hermes")


@pytest.fixture
def plain(here: Path, tiny_model: Path) -> Path:
    """A folder with a configuration of plain prompts, and models as the hub has them."""
    (here / "my.yaml").write_text(
        "data: {tasks: good.parquet, scorer: contains}\nlearner: {advantage: grpo, critic: none}\n"
    )
    in_bins(with_others(copied(tiny_model, here / "bins")), shards=2)
    with_code(tiny_model, here / "code")
    copied(tiny_model, here / "gptq", quantization_config={"quant_method": "gptq", "bits": 4})
    in_fp8(tiny_model, here / "fp8", block=(128, 128))
    (copied(tiny_model, here / "silent") / "chat_template.jinja").unlink()
    (here / "alone").mkdir()
    (here / "alone" / "config.json").write_text("{}")
    (here / "alone" / "adapter_model.safetensors").touch()
    (here / "x.gguf").touch()
    return here


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.path=code", ["model.trust_remote_code must be true", "got false", "read that code"]),
        ("model.path=gptq", ["quantization_config gptq", "as it was before it was quantized"]),
        ("learner.teacher.path=gptq", ["learner.teacher.path must name a model of plain weights", "as it was before"]),
        ("model.path=silent", ["plain prompts need a chat template", "put chat_template.jinja into the folder"]),
        ("model.path=alone", ["model.path", "/alone has no weights"]),
        ("model.path=x.gguf", ["x.gguf needs the package gguf", "pip install gguf"]),
    ],
)
def test_a_model_that_cannot_be_used_is_refused_with_a_remedy(
    plain: Path, monkeypatch: pytest.MonkeyPatch, override: str, words: list[str]
) -> None:
    monkeypatch.setattr(input_check, "find_spec", lambda _: None)
    with pytest.raises(UnderstudyError) as refused:
        check_inputs(load_config(plain / "my.yaml", [override]), resume="")
    assert "\n" not in str(refused.value)
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.path=bins"],
        ["model.path=fp8"],
        ["model.path=code", "model.trust_remote_code=true"],
        ["model.path=silent", f"agents.command=[{PYTHON}, agent.py]"],
    ],
)
def test_a_model_that_can_be_used_passes(plain: Path, overrides: list[str]) -> None:
    check_inputs(load_config(plain / "my.yaml", overrides), resume="")


def test_code_of_a_folder_is_not_run_where_transformers_knows_the_model(plain: Path, tiny_model: Path) -> None:
    code = {"AutoConfig": "own_code.OwnConfig"}
    folder = copied(tiny_model, plain / "known", auto_map=code)
    (folder / "own_code.py").write_text("raise SystemExit('it was run')\n")
    check_inputs(load_config(plain / "my.yaml", ["model.path=known"]), resume="")


def test_the_number_format_is_made_where_nobody_set_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_next", "linear_key_head_dim": 128}')

    def settled(*overrides: str) -> str:
        path = f"model.path={tmp_path}"
        return with_model_needs(load_config(overrides=[path, *overrides])).model.dtype

    assert settled() == "bfloat16"
    assert capsys.readouterr().out.startswith("understudy: model.dtype=bfloat16, as vLLM has kernels for gated delta")
    assert settled("model.dtype=bfloat16") == "bfloat16" and capsys.readouterr().out == ""
    assert settled("rollout.engine_args={model-impl: transformers}", "model.dtype=float32") == "float32"
    assert settled("rollout.engine=sglang") == "float32", "it has kernels of its own"
    with pytest.raises(UnderstudyError, match=r"got float32; leave it out, or set model.dtype=bfloat16"):
        settled("model.dtype=float32")
    monkeypatch.setattr(engine_arguments, "has_gpu", lambda: True)
    assert settled() == "float32"
    assert settled("model.dtype=float32") == "float32"
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v3", "kv_lora_rank": 512}')
    assert settled() == "bfloat16" and "latent attention in half precision only on a GPU" in capsys.readouterr().out
    with pytest.raises(UnderstudyError, match="on a GPU, where vLLM has kernels for latent attention"):
        settled("model.dtype=float32")


@pytest.mark.parametrize(
    ("model", "given", "replays"),
    [
        ({"linear_key_head_dim": 128, "num_experts_per_tok": 2}, (), True),
        ({"linear_key_head_dim": 128, "num_experts_per_tok": 2}, ("learner.router_replay=false",), False),
        ({"linear_key_head_dim": 128}, (), False),
        ({"num_experts_per_tok": 2}, (), False),
        ({"num_experts_per_tok": 2}, ("model.dtype=bfloat16",), True),
        ({"num_experts_per_tok": 2}, ("model.dtype=bfloat16", "rollout.engine_args={model_impl: transformers}"), True),
        ({"kv_lora_rank": 512, "num_experts_per_tok": 2}, (), True),
    ],
)
def test_experts_are_recorded_where_routers_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: dict[str, int], given: tuple[str, ...], replays: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "any", **model}))
    config = with_model_needs(load_config(overrides=[f"model.path={tmp_path}", *given]))
    assert config.learner.router_replay is replays
    assert ("learner.router_replay=true, as in bfloat16" in capsys.readouterr().out) is replays


@pytest.mark.parametrize("experts", ["num_experts_per_tok", "moe_topk"])
def test_an_adapter_in_a_mixture_of_experts_is_refused_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, experts: str
) -> None:
    config = load_config(overrides=[f"model.path={tmp_path}", "learner.lora.rank=4"])
    (tmp_path / "config.json").write_text(f'{{"model_type": "any", "{experts}": 2}}')
    with pytest.raises(UnderstudyError, match=r"learner\.lora\.rank must be 0 for .* got 4; leave it out"):
        with_model_needs(config)
    monkeypatch.setattr(engine_arguments, "has_gpu", lambda: True)
    assert with_model_needs(config) == config
    (tmp_path / "config.json").write_text('{"model_type": "any"}')
    monkeypatch.setattr(engine_arguments, "has_gpu", lambda: False)
    assert with_model_needs(config) == config


def test_a_line_says_that_prefix_caching_is_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "falcon_h1", "mamba_n_heads": 8}')
    with_model_needs(load_config(overrides=[f"model.path={tmp_path}"]))
    assert "enable_prefix_caching=false" in capsys.readouterr().out
    given = "rollout.engine_args={no_enable_prefix_caching: true}"
    with_model_needs(load_config(overrides=[f"model.path={tmp_path}", given]))
    assert capsys.readouterr().out == ""
