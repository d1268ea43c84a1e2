"""Runs agents: unmodified programs as child processes, long-lived or one per episode."""
