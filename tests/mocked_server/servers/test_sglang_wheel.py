"""SGLang's published wheel has the names that are sent to it, read from it, and answered by the scripted server."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from mocked_server.servers.sglang_server import wire_params
from tests.mocked_server.servers.sglang_names import ARGUMENTS, CLASSES, META, ROUTES, SAMPLING, UPDATED, check_body

pytestmark = [pytest.mark.outside]

WORDS = {str: "str", list: "List", dict: "Dict", bool: "bool", int: "int", float: "float"}
"""What stands in an annotation of this type."""
IO = "sglang/srt/managers/io_struct.py"
PARAMS = "sglang/srt/sampling/sampling_params.py"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its files."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "download", "sglang==0.5.23", "--no-deps", "--quiet", "-d", str(folder)]
    subprocess.run(command, check=True, timeout=500)
    (found,) = folder.glob("sglang-*.whl")
    zipfile.ZipFile(found).extractall(folder)
    return folder


def fields_of(path: Path, name: str) -> dict[str, str]:
    """The fields of a class -> their annotations."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return {
                ast.unparse(one.target): ast.unparse(one.annotation)
                for one in node.body
                if isinstance(one, ast.AnnAssign)
            }
    raise AssertionError(f"{path} must have a class {name}")


def assert_has(there: dict[str, str], fields: dict[str, type]) -> None:
    for name, kind in fields.items():
        assert name in there, f"{name} must be a field"
        words = ("Set", "List") if kind is list else (WORDS[kind], "Literal") if kind is str else (WORDS[kind],)
        assert any(word in there[name] for word in words), f"{name} must be {kind}, is {there[name]}"


@pytest.mark.parametrize("name", CLASSES)
def test_a_request_has_the_fields_of_its_class(wheel: Path, name: str) -> None:
    assert_has(fields_of(wheel / IO, name), CLASSES[name])


def test_sampling_has_the_fields_of_its_class(wheel: Path) -> None:
    assert_has(fields_of(wheel / PARAMS, "SamplingParams"), SAMPLING)


def test_the_modes_and_the_answers_are_there(wheel: Path) -> None:
    assert "'retract'" in fields_of(wheel / IO, "PauseGenerationReqInput")["mode"]
    assert set(UPDATED) == set(fields_of(wheel / IO, "UpdateWeightFromDiskReqOutput"))
    routes = (wheel / "sglang/srt/entrypoints/http_server.py").read_text()
    assert all(f'("{route}"' in routes or f'"{route}",' in routes for route in ROUTES)
    made = (wheel / "sglang/srt/managers/tokenizer_manager.py").read_text()
    made += (wheel / "sglang/srt/utils/weight_versions.py").read_text()
    assert all(re.search(rf'"{key}"', made) for key in META)
    assert all(f'"{key}"' in made for key in ("output_ids", "meta_info", "version", "start", "end"))


def test_the_command_line_has_its_arguments(wheel: Path) -> None:
    declared = (wheel / "sglang/srt/server_args.py").read_text()
    declared += "".join(path.read_text() for path in (wheel / "sglang/srt/arg_groups").rglob("*.py"))
    for argument in ARGUMENTS:
        name = argument.removeprefix("--").replace("-", "_")
        assert argument in declared or re.search(rf"^    {name}\b", declared, flags=re.M), argument


def test_a_request_passes_the_contract_of_the_server(wheel: Path) -> None:
    """The server's own decoder of /generate, which is a module without other imports."""
    from vllm.sampling_params import SamplingParams

    spec = importlib.util.spec_from_file_location("sglang_api_types", wheel / "sglang/api/v1/api_types.py")
    assert spec is not None and spec.loader is not None
    types = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = types
    spec.loader.exec_module(types)
    params = SamplingParams(max_tokens=8, seed=3, stop=["a"], stop_token_ids=[4], logit_bias={3: 1.0}, logprobs=2)
    body: dict[str, Any] = {
        "rid": "r", "input_ids": [1, 2], "sampling_params": wire_params(params), "return_logprob": True, "logprob_start_len": -1,
        "top_logprobs_num": 2, "stream": True,
    }  # fmt: skip
    check_body(body, CLASSES["GenerateReqInput"])
    check_body(body["sampling_params"], SAMPLING)
    types.GenerateRequest.from_json_value(body)
    with pytest.raises(types.JsonContractError):
        types.GenerateRequest.from_json_value({**body, "input_ids": "1, 2"})
