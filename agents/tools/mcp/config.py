"""What a tools' YAML says about MCP servers. Pure data: the `mcp` package is not imported for it.

Read by `agents.tools.tool_file`; a server's part is used by `agents.tools.mcp.server`.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator


class McpServerSpec(BaseModel):
    """One server, in the words of `mcpServers`."""

    model_config = ConfigDict(extra="forbid")

    command: str | None = None
    args: list[str] = Field(default_factory=list)
    env: dict[str, str] = Field(default_factory=dict)
    url: str | None = None
    headers: dict[str, str] = Field(default_factory=dict)
    auth_token: str | None = None
    """verl's word for an `Authorization: Bearer` header."""

    @model_validator(mode="after")
    def _has_one_place(self) -> McpServerSpec:
        if (self.command is None) == (self.url is None):
            raise ValueError("a server must have either a command or a url")
        return self


class McpFile(BaseModel):
    """The file that `mcp_servers_config_path` names."""

    mcpServers: dict[str, McpServerSpec]  # as other clients spell it


class McpEntry(BaseModel):
    """`mcp:` of an entry in a tools' YAML."""

    model_config = ConfigDict(extra="forbid")

    servers: dict[str, McpServerSpec] = Field(default_factory=dict)
    mcp_servers_config_path: str | None = None
    tool_selected_list: list[str] | None = None
