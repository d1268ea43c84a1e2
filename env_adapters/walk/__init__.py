"""The demo's game: its rules, as an adapter and as an environment process, and its task files."""
