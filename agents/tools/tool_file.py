"""A YAML file of tools, as verl writes it -> tools, and sources of tools that must be started (MCP servers).

    tools:
      - class_name: agents.tools.shipped.gsm8k.Gsm8kTool      # or my_tools.py:MyTool, beside the YAML
        config: {type: native, deadline_s: 5}
        tool_schema: {type: function, function: {name: ..., description: ..., parameters: {...}}}
      - function: agents.tools.shipped.calculator.calculator       # a plain typed function
      - mcp: {mcp_servers_config_path: servers.json, tool_selected_list: [search]}

Called by `agents.tools.toolbox`; `find` also by tools whose config names something. Invariants: only what the file names is
imported; a path in it stays in the file's folder, also by way of links. Raises ToolError that names file, entry, rule and remedy.
It starts nothing.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agents.tools.base_tool import BaseTool
from agents.tools.function_tool import FunctionTool
from agents.tools.mcp.config import McpEntry, McpFile
from agents.tools.schemas import OpenAIFunctionToolSchema
from buffers.did_you_mean import nearest
from buffers.errors import ToolError
from configs.bounded_yaml import YamlError, read_yaml

ToolSource = AbstractAsyncContextManager[list[BaseTool]]
"""Gives its tools when it is entered."""
KINDS = ("class_name", "function", "mcp")


class _Entry(BaseModel):
    """One entry of `tools`."""

    model_config = ConfigDict(extra="forbid")

    class_name: str | None = None
    function: str | None = None
    mcp: McpEntry | None = None
    name: str | None = None
    """Name of a function, if it shall be called by another."""
    config: dict[str, Any] = Field(default_factory=dict)
    tool_schema: OpenAIFunctionToolSchema | None = None

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> _Entry:
        if sum(getattr(self, kind) is not None for kind in KINDS) != 1:
            raise ValueError(f"must have exactly one of {', '.join(KINDS)}")
        return self


def load_tools(path: Path) -> tuple[list[BaseTool], list[ToolSource]]:
    """Tools and sources of a file, in its order."""
    tools: list[BaseTool] = []
    sources: list[ToolSource] = []
    for number, raw in enumerate(_entries(path), start=1):
        place = f"{path}, tool {number}"
        try:
            entry = _Entry.model_validate(raw)
        except ValidationError as error:
            raise ToolError(f"{place}: {_rules(error)}; see agents/tools/tool_file.py") from None
        if entry.mcp is not None:
            sources += _mcp_servers(entry.mcp, config=entry.config, folder=path.parent, place=place)
        elif entry.function is not None:
            tools.append(_function_tool(entry, folder=path.parent, place=place))
        else:
            tools.append(_class_tool(entry, folder=path.parent, place=place))
    return tools, sources


def _entries(path: Path) -> list[Any]:
    try:
        tree = read_yaml(path)
    except (OSError, YamlError) as error:
        raise ToolError(f"tools must be a YAML file, got {path}: {error}") from None
    if not isinstance(tree, dict) or list(tree) != ["tools"] or not isinstance(tree["tools"], list):
        raise ToolError(f"{path} must hold `tools:` and a list below it; see configs/tools/gsm8k.yaml")
    return tree["tools"]


def _rules(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, e['loc']))} {e['msg']}".strip() for e in error.errors())


def _function_tool(entry: _Entry, *, folder: Path, place: str) -> BaseTool:
    function = find(entry.function or "", folder=folder, place=place)
    if isinstance(function, FunctionTool):
        return FunctionTool(function.function, name=entry.name or function.name, config=entry.config)
    if not callable(function) or isinstance(function, type):
        raise ToolError(f"{place}: function must name a function, got {entry.function!r}; a class goes to class_name")
    return FunctionTool(function, name=entry.name, config=entry.config)


def _class_tool(entry: _Entry, *, folder: Path, place: str) -> BaseTool:
    kind = find(entry.class_name or "", folder=folder, place=place)
    if not isinstance(kind, type) or not issubclass(kind, BaseTool):
        raise ToolError(
            f"{place}: class_name must name a subclass of agents.tools.base_tool.BaseTool, got {kind!r:.100}"
        )
    if missing := sorted(getattr(kind, "__abstractmethods__", ())):
        raise ToolError(
            f"{place}: {entry.class_name} must implement {', '.join(missing)}, got a class without; write it"
        )
    return kind(entry.config, entry.tool_schema)


def _mcp_servers(entry: McpEntry, *, config: dict[str, Any], folder: Path, place: str) -> list[ToolSource]:
    servers = dict(entry.servers)
    if entry.mcp_servers_config_path is not None:
        path = inside(entry.mcp_servers_config_path, folder=folder, place=place)
        try:
            servers |= McpFile.model_validate_json(path.read_bytes()).mcpServers
        except ValidationError as error:
            raise ToolError(f'{path}: {_rules(error)}; it must look like {{"mcpServers": {{name: ...}}}}') from None
    if not servers:
        raise ToolError(f"{place}: mcp must name servers or mcp_servers_config_path, got neither; add one")
    from agents.tools.mcp.server import McpServer  # its package takes a second to import

    return [
        McpServer(spec, name=name, folder=folder, selected=entry.tool_selected_list, config=config)
        for name, spec in servers.items()
    ]


def find(name: str, *, folder: Path, place: str) -> Any:
    """Object that `module.attribute`, or `file.py:attribute` beside the YAML, names."""
    file, colon, attribute = name.partition(":")
    if colon:
        module = _module_at(inside(file, folder=folder, place=place), place=place)
    else:
        dotted, _, attribute = name.rpartition(".")
        try:
            module = importlib.import_module(dotted)
        except (ImportError, ValueError) as error:
            raise ToolError(
                f"{place}: {name!r} must be module.name of what can be imported: {error}; check its spelling"
            ) from error
    if not hasattr(module, attribute):
        public = [known for known in vars(module) if not known.startswith("_")]
        raise ToolError(f"{place}: {name!r} is not there; {nearest(attribute, public)}")
    return getattr(module, attribute)


def inside(name: str, *, folder: Path, place: str) -> Path:
    """The file of that name in the YAML's folder, or below it; links are followed first."""
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ToolError(f"{place}: files must lie in {folder}, got {name!r}; move it there")
    if not path.is_file():
        raise ToolError(f"{place}: {path} is not a file; {nearest(path.name, [p.name for p in folder.iterdir()])}")
    return path


def _module_at(path: Path, *, place: str) -> Any:
    name = f"tools_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ToolError(f"{place}: {path} must be a Python file; give it the ending .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module
