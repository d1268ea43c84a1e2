"""Hostile requests by the thousand, to every route and to a whole server: `python -m tests.fuzz`."""
