"""Programs that benchmarks start in processes of their own: servers, their agents, an engine."""
