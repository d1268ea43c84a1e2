"""`agents.loops`: the YAML list of agent loops of a run, as verl writes it. Read by the pipeline before anything starts.

    - name: tool_agent                       # what rows say in agent_name
      _target_: agents.loops.tool_agent.ToolAgentLoop   # left out: the loop that is shipped under this name
      tool_config_path: tools/gsm8k.yaml     # all other keys: arguments of the class, checked by it

Only classes that such a file names are imported, in the worker processes. Keys that end in `_path` are paths relative
to the file.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buffers.did_you_mean import one_of
from buffers.errors import TaskError
from configs.bounded_yaml import YamlError, read_yaml

if TYPE_CHECKING:
    from agents.agent_loop import AgentLoopBase

SHIPPED = {
    "single_turn_agent": "agents.loops.single_turn_agent.SingleTurnAgentLoop",
    "tool_agent": "agents.loops.tool_agent.ToolAgentLoop",
    "env_agent": "agents.loops.env_agent.EnvAgentLoop",
}
"""Agent name -> class, of the loops that come with the project."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSpec:
    """One agent loop of a run."""

    name: str
    target: str
    """`module.Class`."""
    arguments: Mapping[str, Any] = field(default_factory=dict)


def read_loops(path: Path) -> list[LoopSpec]:
    """The loops of a file, in order; raises TaskError naming file, entry, rule, value and remedy."""
    try:
        entries = read_yaml(path)
    except (OSError, YamlError) as error:
        raise TaskError(f"agents.loops must be a YAML file, got {path} ({error}); see configs/loops/") from error
    if not isinstance(entries, list) or not entries:
        raise TaskError(
            f"agents.loops must be a list of loops, got {entries!r:.100} in {path}; write `- name: tool_agent`"
        )
    loops: dict[str, LoopSpec] = {}
    for number, entry in enumerate(entries):
        spec = _spec(entry, where=f"{path}, entry {number}", folder=path.parent)
        if spec.name in loops:
            raise TaskError(f"{path}, entry {number}: name must be new, got {spec.name!r} twice; rename one")
        loops[spec.name] = spec
    return list(loops.values())


def loop_class(spec: LoopSpec) -> type[AgentLoopBase]:
    """Import the class of a loop; raises TaskError when it is none."""
    from agents.agent_loop import AgentLoopBase

    module, _, name = spec.target.rpartition(".")
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise TaskError(
            f"agent loop {spec.name!r}: _target_ must be module.Class, got {spec.target!r} ({error}); "
            f"is its folder on PYTHONPATH?"
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, AgentLoopBase)):
        raise TaskError(
            f"agent loop {spec.name!r}: _target_ must be an AgentLoopBase, got {kind!r}; derive it from that"
        )
    return kind


def _spec(entry: object, *, where: str, folder: Path) -> LoopSpec:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not entry["name"]:
        raise TaskError(f"{where}: must be a mapping with a name, got {entry!r:.100}; write `name: my_agent`")
    target = entry.get("_target_", SHIPPED.get(entry["name"]))
    if not isinstance(target, str):
        raise TaskError(
            f"{where}: _target_ must be module.Class, or name {one_of(entry['name'], SHIPPED)}; add `_target_: module.Class`"
        )
    arguments = {
        key: str(folder.resolve() / value) if key.endswith("_path") and isinstance(value, str) else value
        for key, value in entry.items()
        if key not in {"name", "_target_"}
    }
    return LoopSpec(name=entry["name"], target=target, arguments=arguments)
