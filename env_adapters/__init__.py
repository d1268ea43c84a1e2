"""Environments: where tasks come from and who scores an episode."""
