"""`python`: runs a program that the model wrote, in a sandbox, and answers what it printed.

Named in a tools' YAML as `class_name: agents.tools.shipped.python.PythonTool`. Invariant: code is only ever run by a
`Sandbox`, each call in a new, empty folder: no state goes from call to call or from episode to episode. What the
program did wrong (an exception, too much time or output) is an answer like any other; only a sandbox that does not work
is a failing tool.

`config`: `deadline_s` (of the program), `memory_mb`, `disk_mb`, `threads`, `output_bytes`, `code_bytes`, `weak`, `concurrency`
(see `agents.tools.sandbox.sandbox`); or `sandbox: module.Class` and `sandbox_config: {...}`, its keyword arguments, for
one of your own.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from agents.tools.base_tool import BaseTool
from agents.tools.sandbox.sandbox import ChildLimits, ChildSandbox, Sandbox, SandboxResult
from agents.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from agents.tools.tool_file import find
from buffers.errors import ToolError

CODE_DEADLINE_S = 10.0
MARGIN_S = 30.0
"""Seconds that a call may wait for its turn, and for the sandbox, beyond the program's own time."""
LIMITS = {field.name for field in fields(ChildLimits)}
OWN = {"type", "deadline_s", "weak", "concurrency", "sandbox", "sandbox_config"}


class PythonTool(BaseTool):
    """One sandbox for all episodes."""

    own_schema = OpenAIFunctionToolSchema.of(
        "python",
        "Runs a Python program and returns what it prints. Each call starts from nothing; no network, no files are kept.",
        {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program. Print what you want to see."}},
            "required": ["code"],
        },
    )

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        if unknown := sorted(set(config) - LIMITS - OWN):
            raise ToolError(f"config of the python tool must have keys of {sorted(LIMITS | OWN)}, got {unknown}")
        self._code_deadline_s = float(config.get("deadline_s", CODE_DEADLINE_S))
        self.sandbox = _sandbox(config)
        super().__init__({**config, "deadline_s": self._code_deadline_s + MARGIN_S}, tool_schema)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Run `parameters["code"]`. Its reward is 0."""
        result = await self.sandbox.run(str(parameters["code"]), deadline_s=self._code_deadline_s)
        return ToolResponse(text=_words(result, deadline_s=self._code_deadline_s)), 0.0, {}


def _sandbox(config: dict[str, Any]) -> Sandbox:
    if name := config.get("sandbox"):
        made: Sandbox = find(str(name), folder=Path(), place="config.sandbox of the python tool")(
            **config.get("sandbox_config", {})
        )
        return made
    limits = ChildLimits(**{name: config[name] for name in LIMITS & set(config)})
    return ChildSandbox(limits, weak=bool(config.get("weak", False)), concurrency=config.get("concurrency"))


def _words(result: SandboxResult, *, deadline_s: float) -> str:
    """Output of the program, and its end where that does not go without saying."""
    how = ""
    if result.late:
        how = f"(ended after {deadline_s:g} s)"
    elif result.cut:
        how = "(ended: it printed too much)"
    elif result.exit_code is not None and result.exit_code < 0:
        how = f"(ended by signal {-result.exit_code})"
    elif result.exit_code and not result.output:
        how = f"(exit code {result.exit_code})"
    elif not result.output:
        how = "(no output; print what you want to see)"
    return "\n".join(part for part in (result.output.rstrip("\n"), how) if part)
