"""Tools of MCP servers: what a YAML says of them, connections with bounds, and the tools themselves."""
