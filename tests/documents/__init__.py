"""Plays every block of README.md and docs/ as it stands: `python -m tests.documents --help`."""
