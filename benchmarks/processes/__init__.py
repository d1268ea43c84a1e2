"""Programs that benchmarks start in processes of their own: a server, its agents, one side of an update, a player."""
