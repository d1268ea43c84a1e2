"""Further processes of the server: each serves the model API to the episodes that it owns (`server.processes`)."""
