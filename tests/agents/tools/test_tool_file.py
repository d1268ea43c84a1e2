"""The YAML of tools: verl's form, functions, files beside it; what is wrong is named with its remedy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agents.tools.toolbox import Toolbox
from buffers.errors import ToolError

ROOT = Path(__file__).parents[3]

FOR_VERL = '''
from typing import Any, Optional
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


class GuessTool(BaseTool):
    """Higher or lower; its reward is one over the number of guesses."""

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._instance_dict = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema

    async def create(self, instance_id: Optional[str] = None, **kwargs) -> tuple[str, ToolResponse]:
        if instance_id is None:
            instance_id = str(uuid4())
        number = kwargs.get("create_kwargs", {}).get("number")
        self._instance_dict[instance_id] = {"number": number, "guesses": 0, "right": False}
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> tuple[ToolResponse, float, dict]:
        state = self._instance_dict[instance_id]
        state["guesses"] += 1
        state["right"] = parameters["guess"] == state["number"]
        word = "right" if state["right"] else "higher" if parameters["guess"] < state["number"] else "lower"
        return ToolResponse(text=word), 0.0 if state["right"] else -0.1, {"range": self.config["range"]}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        state = self._instance_dict[instance_id]
        return 1 / state["guesses"] if state["right"] else 0.0

    async def release(self, instance_id: str, **kwargs) -> None:
        del self._instance_dict[instance_id]
'''
VERLS_YAML = """
tools:
  - class_name: "guess_tool.GuessTool"
    config:
      type: native
      range: 9
    tool_schema:
      type: "function"
      function:
        name: "guess"
        description: "Guess the number."
        parameters:
          type: "object"
          properties:
            guess:
              type: "integer"
              description: "Your guess."
          required: ["guess"]
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "tools.yaml"
    path.write_text(text)
    return path


async def test_a_class_written_for_verl_runs_with_its_imports_changed(tmp_path, monkeypatch):
    (tmp_path / "guess_tool.py").write_text(FOR_VERL.replace("verl.tools", "agents.tools"))
    monkeypatch.syspath_prepend(tmp_path)
    toolbox = Toolbox.load(written(tmp_path, VERLS_YAML))
    async with toolbox.open(tools_kwargs={"guess": {"create_kwargs": {"number": 7}}}) as tools:
        assert tools.schemas[0]["function"]["parameters"]["properties"]["guess"]["description"] == "Your guess."
        first, second = [await tools.call("guess", f'{{"guess": {guess}}}') for guess in (5, 7)]
        assert (first.text, first.reward) == ("higher", -0.1)
        assert (second.text, second.reward) == ("right", 0.0)
        assert await tools.rewards() == {"guess": 0.5}


def test_only_what_the_file_names_is_imported(tmp_path):
    (tmp_path / "mine.py").write_text("def mine() -> str:\n    'Mine.'\n    return 'mine'\n")
    (tmp_path / "other.py").write_text("raise AssertionError('imported')\n")
    toolbox = Toolbox.load(written(tmp_path, "tools: [{function: 'mine.py:mine', name: my_tool}]"))
    assert toolbox.names == ["my_tool"]
    assert not [name for name in sys.modules if name.startswith("tools_file_other")]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (
            "tools: [{function: nowhere.tool}]",
            "'nowhere.tool' must be module.name of what can be imported: No module named",
        ),
        ("tools: [{function: agents.tools.shipped.calculator.calculate}]", "is not there; did you mean 'calculator'"),
        ("tools: [{class_name: agents.tools.shipped.gsm8k.Gsm8KTol}]", "is not there; did you mean 'Gsm8kTool'"),
        ("tools: [{class_name: agents.tools.shipped.calculator.calculator}]", "class_name must name a subclass of"),
        ("tools: [{class_name: agents.tools.base_tool.BaseTool}]", "must implement execute"),
        ("tools: [{function: agents.tools.shipped.gsm8k.Gsm8kTool}]", "a class goes to class_name"),
        ("tools: [{function: '../secret.py:tool'}]", "files must lie in .*, got '../secret.py'; move it there"),
        ("tools: [{function: '/etc/hostname:tool'}]", "files must lie in .*, got '/etc/hostname'"),
        ("tools: [{function: 'link.py:tool'}]", "files must lie in .*, got 'link.py'"),
        ("tools: [{function: 'tolos.yaml:tool'}]", "is not a file; did you mean 'tools.yaml'"),
        ("tools: [{function: 'tools.yaml:tool'}]", "must be a Python file; give it the ending .py"),
        ("tools: [{mcp: {mcp_servers_config_path: ../servers.json}}]", "files must lie in"),
        ("tools: [{mcp: {}}]", "mcp must name servers or mcp_servers_config_path, got neither"),
        ("tools: [{mcp: {servers: {a: {args: [x]}}}}]", "mcp.servers.a .*either a command or a url"),
        ("tools: [{class: x}]", "tool 1: class Extra inputs are not permitted; see agents/tools/tool_file.py"),
        ("tools: [{config: {}}]", "must have exactly one of class_name, function, mcp"),
        ("tool: []", "must hold `tools:` and a list below it; see configs/tools/gsm8k.yaml"),
        ("{", "tools must be a YAML file"),
    ],
)
def test_what_is_wrong_is_named_with_its_remedy(tmp_path, text, rule):
    (tmp_path / "secret.py").write_text("def tool() -> str: return 'secret'\n")
    inner = tmp_path / "tools"
    inner.mkdir()
    (inner / "link.py").symlink_to("../secret.py")
    with pytest.raises(ToolError, match=rule) as caught:
        Toolbox.load(written(inner, text))
    assert "\n" not in str(caught.value)


async def test_the_shipped_file_loads_and_its_tools_answer():
    async with Toolbox.load(ROOT / "configs" / "tools" / "gsm8k.yaml") as toolbox:
        assert toolbox.names == ["calc_gsm8k_reward", "calculator"]
        kwargs = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "18"}}}
        async with toolbox.open(tools_kwargs=kwargs) as tools:
            assert (await tools.call("calculator", '{"expression": "(16 - 3 - 4) * 2"}')).text == "18"
            outcome = await tools.call("calc_gsm8k_reward", '{"answer": "#### 18"}')
            assert outcome.text == "Current parsed answer='#### 18' reward=1.0"
            assert await tools.rewards() == {"calc_gsm8k_reward": 1.0, "calculator": 0.0}
