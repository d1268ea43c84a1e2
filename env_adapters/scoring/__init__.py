"""Scores without an environment: functions by name, functions of yours, a reward model."""
