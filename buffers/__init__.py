"""Data that waits: tasks, prompts, rounds and scored episodes, kept in one SQLite ledger per run."""
